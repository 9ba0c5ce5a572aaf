# SPDX-License-Identifier: Apache-2.0
"""Sampled tokens have the law of the model: chi-square tests of thousands of drafted ones.

The law is known, as the model is made of it; the rule of the published code fails the same test.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from any_tree import AnyTree
from helpers import define_process, define_warp, softmax, tiny_config

import tsjax

STATES, TREE = 8, (3, 3, 3)
NUM_CHAINS, CHAIN_LENGTH = 32, 800


def transition_law() -> np.ndarray:
    """P(next | last) [STATES, STATES]: a Zipf law, in another order for each last token."""
    rng = np.random.default_rng(3)
    zipf = 1 / np.arange(1, STATES + 1) ** 1.5
    return np.stack([rng.permutation(zipf / zipf.sum()) for _ in range(STATES)])


def model_of_the_law() -> tsjax.Model:
    """The layers add nothing and the embedding is one-hot, so the logits are those of the law."""
    cfg = tiny_config(
        vocab_size=STATES, embed_dim=STATES, num_layers=1, num_heads=1, num_kv_heads=1, mlp_dim=8
    )
    params = tsjax.steps.init_params(cfg)
    weights = jax.tree.map(jnp.zeros_like, params.model)
    weights = weights.replace(
        embed=jnp.eye(STATES),
        final_norm=jnp.full((STATES,), np.sqrt(1 / STATES + cfg.norm_eps), jnp.float32),
        unembed=jnp.asarray(np.log(transition_law()).T, jnp.float32),
    )
    return tsjax.Model(params.replace(model=weights), cfg=cfg)


def p_value(chains) -> float:
    """Of a chi-square test of the transitions in chains [N, T] against the law."""
    last, following = np.asarray(chains)[:, :-1].ravel(), np.asarray(chains)[:, 1:].ravel()
    counts = np.zeros((STATES, STATES))
    np.add.at(counts, (last, following), 1)
    expected = counts.sum(1, keepdims=True) * transition_law()
    assert expected.min() > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(scipy.stats.chi2.sf(statistic, STATES * (STATES - 1)))


@pytest.mark.parametrize("noise_coupled", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_tokens_have_the_law_of_the_model(noise_coupled):
    """More than 25,000 sampled tokens, most of them drafted, by a wide tree and by n-grams."""
    method = tsjax.TokenSwift(
        tree=TREE, draft_passes=3, noise_coupled=noise_coupled, num_ngrams=4, suffix_length=4
    )
    prompts = [[index % STATES] for index in range(NUM_CHAINS)]
    result = tsjax.generate(
        model_of_the_law(),
        prompts,
        method=method,
        do_sample=True,
        max_new_tokens=CHAIN_LENGTH,
        seed=list(range(NUM_CHAINS)),
        capacity=CHAIN_LENGTH + 32,
    )
    assert sum(result.stats.new_tokens) == NUM_CHAINS * CHAIN_LENGTH > 25_000
    assert result.stats.tokens_per_step > (3 if noise_coupled else 1.5)
    assert p_value(np.concatenate([prompts, result.tokens], axis=1)) > 1e-3


def simulated(one_sample_per_node: bool) -> np.ndarray:
    """Chains made by a tree of drafts and the walk, or by the rule of the published code.

    The published code draws a sample for each depth of each row of leaves, rows that share a node
    included, and keeps the longest match.
    """
    rng, law = np.random.default_rng(0), transition_law()
    ranked, cumulated = np.argsort(-law, axis=1), np.cumsum(law, axis=1)
    leaves = np.stack(np.meshgrid(*map(range, TREE), indexing="ij"), -1).reshape(-1, len(TREE))
    chains = [[index % STATES] for index in range(NUM_CHAINS)]
    while min(map(len, chains)) <= CHAIN_LENGTH:
        for chain in chains:
            candidates, best = [], chain[-1]
            for _ in TREE:
                candidates.append(ranked[best])
                best = ranked[best][0]
            drafts = np.stack([c[leaves[:, d]] for d, c in enumerate(candidates)], axis=1)
            before = np.concatenate([np.full((len(leaves), 1), chain[-1]), drafts], axis=1)
            uniform = rng.random(before.shape)
            if one_sample_per_node:
                for depth in range(len(TREE) + 1):  # the rows below a node use its first row's
                    rows_per_node = len(leaves) // int(np.prod(TREE[:depth]))
                    first = np.arange(len(leaves)) // rows_per_node * rows_per_node
                    uniform[:, depth] = uniform[first, depth]
            samples = (uniform[..., None] > cumulated[before]).sum(-1)
            matches = np.cumprod(samples[:, :-1] == drafts, axis=1).sum(1)
            longest = int(np.argmax(matches))
            chain += samples[longest, : matches[longest] + 1].tolist()
    return np.asarray([chain[: CHAIN_LENGTH + 1] for chain in chains])


def test_the_test_of_the_law_tells_the_published_rule():
    assert p_value(simulated(one_sample_per_node=True)) > 1e-3
    assert p_value(simulated(one_sample_per_node=False)) < 1e-12


def penalised_and_truncated() -> tuple[tsjax.GenerationConfig, np.ndarray]:
    """Settings, and what they make of the law: P(next | last but one, last)."""
    config = tsjax.GenerationConfig(
        max_new_tokens=300, do_sample=True, temperature=1.3, top_k=6, min_p=0.1,
        repetition_penalty=1.6, repetition_window=2,
    )  # fmt: skip
    law = np.zeros((STATES,) * 3)
    for before, last in np.ndindex(STATES, STATES):
        logits = np.log(transition_law()[last])
        processed = define_process(logits, [3, before, last], 1, config)  # 3 is out of the window
        warped, slack = define_warp(processed, config)
        assert slack > 1e-4  # float32 removes the same tokens
        law[before, last] = softmax(warped)
    return config, law


@pytest.mark.wide
def test_penalised_and_truncated_tokens_have_their_law():
    """Given the two tokens before them, which are the penalty's window. Many rows in one batch."""
    config, law = penalised_and_truncated()
    rows = 64
    prompts = [[index % STATES] for index in range(rows)]
    result = tsjax.generate(
        model_of_the_law(),
        prompts,
        config=config.replace(seed=tuple(range(rows))),
        method=AnyTree(paths=5, pass_widths=(1, 6, 12)),
        capacity=350,
    )
    accepted = result.stats.accepted_by_source
    assert accepted["first"] > 800 and accepted["others"] > 800
    chains = np.concatenate([prompts, result.tokens], axis=1)
    counts = np.zeros((STATES,) * 3)
    np.add.at(counts, (chains[:, :-2], chains[:, 1:-1], chains[:, 2:]), 1)
    assert counts[law == 0].sum() == 0, "a removed token was chosen"
    expected = counts.sum(axis=2, keepdims=True) * law
    likely = expected.min(axis=2, where=law > 0, initial=np.inf) > 5
    assert counts[likely].sum() > 0.8 * counts.sum() > 10_000
    statistic = np.sum((counts - expected)[likely] ** 2 / np.maximum(expected[likely], 1e-9))
    freedom = (law[likely] > 0).sum() - likely.sum()
    assert scipy.stats.chi2.sf(statistic, freedom) > 1e-3

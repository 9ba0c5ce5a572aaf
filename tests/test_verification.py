# SPDX-License-Identifier: Apache-2.0
"""One step of drafting and verifying: each node's decision, the walk, the law, and what it costs.

The promise is that a drafted token is judged as plain decoding would judge it: with its ancestors
in the repetition window, the noise of its position, and once only, however many paths share it.
"""

import functools
import re

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers import (
    FUSED_AS_FOR_USERS,
    IN_PLACE,
    compilations,
    entry_computation,
    operations,
    tiny_config,
    tiny_model,
)
from test_sampling import define_process, define_warp, softmax

import tsjax
from pallas_kernels.best_slots.xla import BLOCK
from tsjax.config import without_unread
from tsjax.decoding.processors import LogitsProcessor, Text, first_counts, first_last_seen
from tsjax.decoding.programs import programs
from tsjax.decoding.sampling import score, step_noise
from tsjax.decoding.state import Acceptance
from tsjax.decoding.tree import NO_NODE, SOURCES, merge_paths
from tsjax.decoding.verification import accept, drafted_ancestors, verify_tree

VOCAB = 17
BATCH, PATHS, DEPTH = 2, 7, 4
WIDTH = 1 + PATHS * DEPTH + 2  # two nodes are always padding
LONGEST = 24  # tokens of a history
NO_TEXT = dict(num_ngrams=0, suffix_length=0)


# --- random trees --------------------------------------------------------------------------------


def random_tree(rng: np.random.Generator, root, alphabet: int):
    """Paths over few tokens, so that they share their beginnings and repeat their ancestors."""
    paths = rng.integers(0, alphabet, (BATCH, PATHS, DEPTH))
    lengths = rng.integers(0, DEPTH + 1, (BATCH, PATHS))
    return merged(jnp.asarray(root, jnp.int32), jnp.asarray(paths, jnp.int32), jnp.asarray(lengths))


@jax.jit
def merged(root, paths, lengths):
    return merge_paths(root, paths, lengths, width=WIDTH)


def drafted_texts(tree) -> list[dict[int, list[int]]]:
    """For each batch row, the drafted tokens from after the root to each node; no padding."""
    rows = []
    for tokens, parents in zip(np.asarray(tree.tokens), np.asarray(tree.parents), strict=True):
        texts = {0: []}
        for node, parent in enumerate(parents):
            if parent != NO_NODE:
                texts[node] = [*texts[parent], int(tokens[node])]
        rows.append(texts)
    return rows


def sampling_values(dtype: str, **settings):
    config = tsjax.GenerationConfig(**settings)
    return tsjax.sampling_values(config, config.eos_token_id or (), VOCAB, dtype)


tokens = st.integers(0, VOCAB - 1)
SETTINGS = st.fixed_dictionaries(
    {"do_sample": st.booleans()},
    optional={
        "temperature": st.floats(0.4, 1.5),
        "top_k": st.integers(0, VOCAB + 2),
        "top_p": st.floats(0.2, 1.0),
        "min_p": st.floats(0.0, 0.4),
        "epsilon_cutoff": st.floats(0.0, 0.1),
        "eta_cutoff": st.floats(0.0, 0.3),
        "min_tokens_to_keep": st.integers(1, 5),
        "repetition_penalty": st.floats(0.7, 2.0),
        "repetition_window": st.sampled_from([None, 1, 2, 3, 4, 5, 6, 8, 12, 20, 1024, 2048]),
        "eos_token_id": st.lists(tokens, max_size=3),
        "min_new_tokens": st.integers(0, 12),
        "suppress_tokens": st.lists(tokens, max_size=4),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "no_repeat_ngram_size": st.integers(0, 5),
    },
).map(without_unread)


# --- each node's decision ------------------------------------------------------------------------


@jax.jit
def scores_in_the_tree(logits, tree, tokens, length, prompt_length, noise, values):
    ancestors = drafted_ancestors(tree, length)
    text = text_of(tokens, length, prompt_length)
    return score(logits, text, tree.depths, noise, values, ancestors)


@jax.jit
def scores_alone(logits, tokens, length, prompt_length, noise, values):
    """One text per batch row, all of it known; one row of logits each."""
    depths = jnp.zeros((len(length), 1), jnp.int32)
    return score(logits, text_of(tokens, length, prompt_length), depths, noise, values)


def text_of(tokens, length, prompt_length) -> Text:
    seen = first_last_seen(tokens, length, VOCAB)
    counts = first_counts(tokens, prompt_length, length, VOCAB)
    return Text(tokens, length, prompt_length, seen, counts)


def by_last_tokens(logits, tokens, length, weight):
    """Reads the last two tokens, how long the text is and how often it has its last one."""
    last, other = tokens[length - 1], tokens[jnp.maximum(length - 2, 0)]
    often = jnp.sum((tokens == last) & (jnp.arange(len(tokens)) < length))
    return logits + weight * jnp.cos(jnp.arange(VOCAB) * (1 + last + 3 * other) + length) - often


@hypothesis.given(settings=SETTINGS, seed=st.integers(0, 10**6), alphabet=st.integers(1, VOCAB))
@hypothesis.settings(max_examples=150)
def test_a_nodes_scores_are_those_of_its_text_alone(settings, seed, alphabet):
    """Bit for bit, given the same logits: its ancestors are history, its position is its own."""
    rng = np.random.default_rng(seed)
    history = rng.integers(0, alphabet, (BATCH, LONGEST))
    length = rng.integers(1, LONGEST + 1, BATCH)
    prompt_length = np.asarray([rng.integers(1, n + 1) for n in length])
    logits = rng.normal(size=(BATCH, WIDTH, VOCAB)) * 3
    noise = rng.gumbel(size=(BATCH, DEPTH + 1, VOCAB))

    texts = np.zeros((BATCH, WIDTH, LONGEST + DEPTH), np.int32)
    lengths = np.ones((BATCH, WIDTH), np.int32)
    noises = np.zeros((BATCH, WIDTH, 1, VOCAB))
    real = np.zeros((BATCH, WIDTH), bool)
    with jax.enable_x64(True):
        tree = random_tree(rng, history[np.arange(BATCH), length - 1], alphabet)
        for b, nodes in enumerate(drafted_texts(tree)):
            for node, drafted in nodes.items():
                text = [*history[b, : length[b]], *drafted]
                texts[b, node, : len(text)], lengths[b, node] = text, len(text)
                noises[b, node, 0], real[b, node] = noise[b, len(drafted)], True
        values = sampling_values("float64", max_new_tokens=99, **settings)
        if seed % 2:
            hook = LogitsProcessor(by_last_tokens, arrays=(np.float64(2.0),))
            values = values.replace(processors=(hook,))
        given = (jnp.asarray(length, jnp.int32), jnp.asarray(prompt_length, jnp.int32))
        known = np.pad(history, ((0, 0), (0, DEPTH)))  # as a run has room for its drafts
        actual = scores_in_the_tree(logits, tree, jnp.asarray(known), *given, noise, values)
        expected = scores_alone(
            logits.reshape(-1, 1, VOCAB),
            texts.reshape(BATCH * WIDTH, -1),
            lengths.reshape(-1),
            jnp.repeat(given[1], WIDTH),
            noises.reshape(-1, 1, VOCAB),
            values,
        )
    actual, expected = np.asarray(actual), np.asarray(expected).reshape(actual.shape)
    assert actual.dtype == np.float64
    np.testing.assert_array_equal(actual[real].view(np.int64), expected[real].view(np.int64))


def test_the_window_slides_with_the_depth():
    """By hand: a window of 2 sees the last two tokens before each position, drafted or not."""
    tree = merged(
        jnp.asarray([3, 3], jnp.int32),
        jnp.broadcast_to(jnp.asarray([5, 6, 5, 7], jnp.int32), (BATCH, PATHS, DEPTH)),
        jnp.full((BATCH, PATHS), DEPTH),
    )
    values = sampling_values("float32", repetition_penalty=2.0, repetition_window=2)
    logits, history = jnp.ones((BATCH, WIDTH, VOCAB)), jnp.asarray([[8, 9, 3]] * BATCH)
    length = jnp.full((BATCH,), 3, jnp.int32)
    noise = jnp.zeros((BATCH, DEPTH + 1, VOCAB))
    scores = scores_in_the_tree(logits, tree, history, length, length, noise, values)
    penalised = [set(np.flatnonzero(row == 0.5).tolist()) for row in np.asarray(scores)[0]]
    assert penalised[: DEPTH + 1] == [{9, 3}, {3, 5}, {5, 6}, {6, 5}, {5, 7}]


def fresh_state(model, texts, *, method, capacity=64, batch_keys=None, prompt_length=None, **more):
    """init_state with ragged known texts; `more` are settings."""
    lengths = np.asarray([len(text) for text in texts], np.int32)
    tokens = np.zeros((len(texts), lengths.max()), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    config = tsjax.GenerationConfig(**more)
    return tsjax.init_state(
        tokens,
        lengths if prompt_length is None else prompt_length,
        cfg=tsjax.DecodeConfig(model=model.cfg, method=method),
        capacity=capacity,
        max_length=[capacity] * len(texts),
        length=lengths,
        sampling=tsjax.sampling_values(
            config, config.eos_token_id or (), model.cfg.vocab_size, model.cfg.dtype
        ),
        row_key=tsjax.row_keys([5] * len(texts), batch_keys or range(len(texts))),
    )


@functools.partial(jax.jit, static_argnames="cfg")
def prefilled(params, state, *, cfg):
    return tsjax.prefill(params, state, width=8, cfg=cfg)


@functools.partial(jax.jit, static_argnames="cfg")
def decoded(params, state, num_steps, *, cfg):
    return tsjax.decode(params, state, num_steps, cfg=cfg)


@functools.partial(jax.jit, static_argnames="cfg")
def verified(params, state, tree, *, cfg):
    noise = step_noise(state.row_key, state.length, DEPTH + 1, VOCAB, state.sampling)
    return verify_tree(params, state, tree, noise, cfg=cfg)


@pytest.mark.parametrize(
    "settings",
    [{}, dict(do_sample=True, repetition_penalty=1.4, repetition_window=3, min_p=0.02)],
    ids=["greedy", "sampled"],
)
def test_a_nodes_target_is_what_plain_decoding_says_after_its_text(settings, rng):
    """The pass over the whole tree against a prefill and one plain step for each node."""
    plain = tsjax.Autoregressive()
    history = [rng.integers(0, VOCAB, 11).tolist(), rng.integers(0, VOCAB, 6).tolist()]
    with jax.enable_x64(True):
        model = tiny_model(vocab_size=VOCAB, dtype="float64")
        cfg = tsjax.DecodeConfig(model=model.cfg)
        state = prefilled(
            model.params, fresh_state(model, history, method=plain, **settings), cfg=cfg
        )
        tree = random_tree(rng, [text[-1] for text in history], 6)
        verdict = verified(model.params, state, tree, cfg=cfg)
        target = np.asarray(verdict.target)

        cases = [
            (b, node, [*history[b], *drafted])
            for b, nodes in enumerate(drafted_texts(tree))
            for node, drafted in nodes.items()
        ]
        assert len(cases) > 20
        rows, nodes, texts = zip(*cases, strict=True)
        alone = fresh_state(
            model,
            texts,
            method=plain,
            batch_keys=list(rows),
            prompt_length=[len(history[b]) for b in rows],
            **settings,
        )
        alone = decoded(model.params, prefilled(model.params, alone, cfg=cfg), 1, cfg=cfg)
    assert np.asarray(alone.length).tolist() == [len(text) + 1 for text in texts]
    assert target[list(rows), list(nodes)].tolist() == np.asarray(alone.root).tolist()


# --- the walk ------------------------------------------------------------------------------------

accepted = jax.jit(accept)


@hypothesis.given(seed=st.integers(0, 10**6), alphabet=st.integers(1, 4))
@hypothesis.settings(max_examples=150)
def test_the_walk_is_a_walk(seed, alphabet):
    """From the root on to the child that is the node's target, until there is none."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, rng.integers(0, alphabet, BATCH), alphabet)
    target = rng.integers(0, alphabet, (BATCH, WIDTH)).astype(np.int32)
    acceptance: Acceptance = accepted(tree, target)
    for b, texts in enumerate(drafted_texts(tree)):
        node_of = {tuple(text): node for node, text in texts.items()}
        assert len(node_of) == len(texts)  # no two nodes have the same path
        text, walk = (), [0]
        while (*text, int(target[b, walk[-1]])) in node_of:
            text = (*text, int(target[b, walk[-1]]))
            walk.append(node_of[text])
        count = int(acceptance.count[b])
        assert np.asarray(acceptance.path)[b, : count + 1].tolist() == walk


def test_a_padding_node_is_never_accepted():
    """Its token is 0 and its slot comes last; a target of 0 does not make it a child."""
    none = jnp.zeros((BATCH, PATHS), jnp.int32)
    tree = merged(jnp.zeros(BATCH, jnp.int32), jnp.zeros((BATCH, PATHS, DEPTH), jnp.int32), none)
    acceptance = accepted(tree, jnp.zeros((BATCH, WIDTH), jnp.int32))
    assert np.asarray(acceptance.count).tolist() == [0, 0]
    assert np.asarray(acceptance.path)[:, 0].tolist() == [0, 0]


# --- what a step changes ------------------------------------------------------------------------

STEP_METHODS = {
    "ngram": tsjax.NGram(num_ngrams=3, suffix_length=5),
    "partial_cache": tsjax.TokenSwift(
        tree=(2, 2), draft_passes=2, draft_budget=20, num_sinks=4, num_ngrams=3, suffix_length=5
    ),
    "verified_state": tsjax.TokenSwift(
        tree=(2, 2), draft_from="verified_state", num_ngrams=3, suffix_length=5
    ),
}


@pytest.mark.parametrize("name", STEP_METHODS)
def test_steps_leave_the_state_of_a_prefill_of_the_same_text(name):
    """Cache rows, last positions, lengths: as if the emitted text had been the prompt."""
    method = STEP_METHODS[name]
    model = tiny_model(vocab_size=VOCAB, num_draft_heads=2)
    cfg = tsjax.DecodeConfig(model=model.cfg, method=method)
    settings = dict(repetition_penalty=0.7, method=method)  # says again what it has said
    texts = [[1, 2, 3, 1, 2, 3, 1, 2], [4], [5, 6]]
    state = fresh_state(model, texts, **settings).replace(max_length=jnp.asarray([14, 58, 59]))
    state = prefilled(model.params, state, cfg=cfg)
    for steps in (1, 1, 2, 12):
        state = decoded(model.params, state, steps, cfg=cfg)
        tokens, length = np.asarray(state.tokens), np.asarray(state.length)
        texts = [row[:n].tolist() for row, n in zip(tokens, length, strict=True)]
        expected = prefilled(model.params, fresh_state(model, texts, **settings), cfg=cfg)
        np.testing.assert_array_equal(state.length, expected.length)
        np.testing.assert_array_equal(state.last_seen, expected.last_seen)
        for row, n in enumerate(np.asarray(state.kv.length)):
            for actual, wanted in zip(
                (*state.kv.k, *state.kv.v), (*expected.kv.k, *expected.kv.v), strict=True
            ):
                np.testing.assert_allclose(actual[row, :, :n], wanted[row, :, :n], atol=2e-5)
    assert np.asarray(state.stats.accepted)[:, 1:].sum() > 3
    # A row that has ended stays as it is, while the others go on.
    ended = np.asarray(state.finish) != 0
    assert ended.any() and not ended.all()
    later = decoded(model.params, state, 2, cfg=cfg)
    for row in np.flatnonzero(ended):
        assert later.length[row] == state.length[row]
        np.testing.assert_array_equal(later.last_seen[row], state.last_seen[row])
        assert later.stats.steps[row] == state.stats.steps[row]
        n = int(state.kv.length[row])
        chex.assert_trees_all_equal(
            [x[row, :, :n] for x in later.kv.k + later.kv.v],
            [x[row, :, :n] for x in state.kv.k + state.kv.v],
        )


# --- the law of the output -----------------------------------------------------------------------

STATES, TREE = 8, (3, 3, 3)
NUM_CHAINS, CHAIN_LENGTH = 32, 800


def transition_law() -> np.ndarray:
    """P(next | last) [STATES, STATES]: a Zipf law, in another order for each last token."""
    rng = np.random.default_rng(3)
    zipf = 1 / np.arange(1, STATES + 1) ** 1.5
    return np.stack([rng.permutation(zipf / zipf.sum()) for _ in range(STATES)])


def model_of_the_law(num_draft_heads: int = 0) -> tsjax.Model:
    """The layers add nothing and the embedding is one-hot, so the logits are those of the law.

    Its heads know what is most probable after the most probable token, and so on.
    """
    cfg = tiny_config(
        vocab_size=STATES, embed_dim=STATES, num_layers=1, num_heads=1, num_kv_heads=1, mlp_dim=8,
        num_draft_heads=num_draft_heads,
    )  # fmt: skip
    params = tsjax.init_params(cfg)
    weights = jax.tree.map(jnp.zeros_like, params.model)
    likeliest = jnp.eye(STATES)[transition_law().argmax(axis=1)]
    heads = tuple(
        head.replace(linear=4.0**index * likeliest.T)
        for index, head in enumerate(params.heads, start=1)
    )
    weights = weights.replace(
        embed=jnp.eye(STATES),
        final_norm=jnp.full((STATES,), np.sqrt(1 / STATES + cfg.norm_eps), jnp.float32),
        unembed=jnp.asarray(np.log(transition_law()).T, jnp.float32),
    )
    return tsjax.Model(params.replace(model=weights, heads=heads), cfg=cfg)


def p_value(chains) -> float:
    """Of a chi-square test of the transitions in chains [N, T] against the law."""
    last, following = np.asarray(chains)[:, :-1].ravel(), np.asarray(chains)[:, 1:].ravel()
    counts = np.zeros((STATES, STATES))
    np.add.at(counts, (last, following), 1)
    expected = counts.sum(1, keepdims=True) * transition_law()
    assert expected.min() > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(scipy.stats.chi2.sf(statistic, STATES * (STATES - 1)))


@pytest.mark.parametrize("noise_coupled", [False, pytest.param(True, marks=pytest.mark.slow)])
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


# Drafts of every kind, in passes of several widths.
LAWFUL = {
    "verified_state": tsjax.TokenSwift(
        tree=(3, 2), draft_from="verified_state", noise_coupled=False, num_ngrams=2, ngram_size=3,
        suffix_length=0, pass_widths=(1, 5, 9),
    ),
    "draft_rest": tsjax.TokenSwift(
        tree=(3, 2), draft_passes=2, draft_rest=True, draft_budget=8, num_sinks=2, draft_refresh=4,
        num_ngrams=0, suffix_length=3, suffix_match=2, pass_widths=(8, 10),
    ),
}  # fmt: skip


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


@pytest.mark.parametrize("name", LAWFUL)
def test_penalised_and_truncated_tokens_have_their_law(name):
    """Given the two tokens before them, which are the penalty's window. Many rows in one batch."""
    config, law = penalised_and_truncated()
    rows = 64
    prompts = [[index % STATES] for index in range(rows)]
    result = tsjax.generate(
        model_of_the_law(num_draft_heads=2 * (name == "verified_state")),
        prompts,
        config=config.replace(seed=tuple(range(rows))),
        method=LAWFUL[name],
        capacity=350,
    )
    accepted = dict(zip(tsjax.SOURCES, result.stats.accepted_by_source.values(), strict=True))
    assert accepted["heads"] > 2000 and accepted["ngrams"] + accepted["suffix"] > 500
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


# --- no waste ------------------------------------------------------------------------------------

COST_METHODS = {
    "ngram": tsjax.NGram(num_ngrams=4, pass_widths=(1, 9)),
    "partial_cache": tsjax.TokenSwift(tree=(2, 2), draft_budget=500, num_ngrams=4),
    "verified_state": tsjax.TokenSwift(
        tree=(2, 2), draft_from="verified_state", num_ngrams=4, suffix_length=0
    ),
}


@functools.cache
def compiled(name: str, *, capacity: int, batch: int = 1, dtype: str = "float32"):
    """The program of the loop over steps, and the state it takes."""
    model, method = tiny_model(num_draft_heads=2, dtype=dtype), COST_METHODS[name]
    state = fresh_state(model, [[1, 2, 3]] * batch, method=method, capacity=capacity)
    cfg = tsjax.DecodeConfig(model=model.cfg, method=method)
    steps = jnp.int32(8)
    lowered = programs("cpu", dtype).decode.lower(model.params, state, steps, cfg=cfg)
    return lowered.compile(FUSED_AS_FOR_USERS), state


def scores_bytes(state) -> int:
    """A score for every slot and kv head, which the choice of a draft cache needs: thrice, for the
    loop that fills it and for two layers. With 128 dimensions a head one is 0.8% of a layer.
    """
    B, K, S, _ = state.kv.k[0].shape
    return 3 * 4 * B * K * S if partial_cache(state) is not None else 0


def partial_cache(state):
    return getattr(state.memory, "cache", None)


def ngram_table(state):
    return getattr(state.memory, "ngrams", state.memory)


@pytest.mark.parametrize(
    ("name", "batch", "dtype"),
    [
        ("ngram", 1, "float32"),
        ("partial_cache", 1, "float32"),
        ("partial_cache", 3, "bfloat16"),
        ("verified_state", 1, "float32"),
    ],
)
def test_no_step_copies_a_buffer(name, batch, dtype):
    # Blocks and rows are a fixed amount of scratch memory; the cache has to be large beside it.
    executable, state = compiled(name, capacity=262144, batch=batch, dtype=dtype)
    memory = executable.memory_analysis()
    cache = sum(buffer.nbytes for buffer in state.kv.k + state.kv.v)
    assert memory.temp_size_in_bytes <= 0.05 * cache + scores_bytes(state)
    donated = cache + ngram_table(state).places.nbytes + state.tokens.nbytes
    cache = partial_cache(state)
    if cache is not None:
        donated += sum(buffer.nbytes for buffer in cache.k + cache.v)
    assert memory.alias_size_in_bytes >= donated

    found = operations(executable, state.kv.k[0])
    assert found and set(found) <= IN_PLACE
    # Each fusion of that shape is one of the writes, wrapped.
    assert found.count("fusion") <= found.count("dynamic-update-slice")
    for buffer in (state.tokens, ngram_table(state).places):
        assert set(operations(executable, buffer)) <= IN_PLACE | {"scatter"}
    if cache is not None:
        # Where it is chosen again, what was gathered is selected for the rows that need it.
        found = operations(executable, cache.k[0])
        assert found and set(found) <= IN_PLACE | {"select", "broadcast"}


SMALL = 2 * BLOCK  # a capacity that is larger than any block


@pytest.mark.parametrize("name", COST_METHODS)
def test_work_does_not_grow_with_the_capacity(name):
    """Neither the work of a pass through each loop nor a loop's fixed number of passes does.

    Writing a few tokens in place counts as reading and writing that whole buffer of 4 bytes per
    slot, once or twice, and so does looking a few up; a single layer's keys would be 64. The
    exception is the choice of a draft cache, which scores all slots: once in many steps.
    """
    small, large = SMALL, 262144
    work = []
    for capacity in (small, large):
        executable, state = compiled(name, capacity=capacity)
        cost = executable.cost_analysis()
        passes = re.findall(r'"known_trip_count":\{"n":"(\d+)"', executable.as_text())
        scratch = executable.memory_analysis().temp_size_in_bytes - scores_bytes(state)
        work.append((cost["flops"], sorted(passes), scratch, cost["bytes accessed"]))
    assert work[0][:2] == work[1][:2] and work[0][0] > 0
    if name == "partial_cache":
        assert work[1][2] <= work[0][2]
    else:
        assert work[1][2] == work[0][2]
    if name != "partial_cache":
        assert work[1][3] - work[0][3] <= 40 * (large - small)


def test_one_program_for_every_length_seed_and_value():
    """Which processors are on is compiled in, and nothing else; the prefill knows none of it."""
    method, model = COST_METHODS["partial_cache"], tiny_model(num_draft_heads=2, vocab_size=VOCAB)
    settings = dict(method=method, capacity=128, prefill_width=16)
    tsjax.generate(model, [1, 2, 3], max_new_tokens=2, **settings)  # compiles
    with compilations() as names:
        for count in (1, 7, 40, 90):
            tsjax.generate(model, [1, 2, 3], max_new_tokens=count, **settings)
    assert not {"jit(decode)", "jit(read_part)"} & set(names)
    with compilations() as names:
        for seed in (1, 2, 3):
            sampled = dict(do_sample=True, seed=seed, top_p=0.3 * seed, min_p=0.01 * seed)
            sampled |= dict(temperature=0.2 * seed, repetition_penalty=1 + 0.1 * seed)
            if seed > 1:
                sampled |= dict(eos_token_id=seed, repetition_window=20)
            tsjax.generate(model, [1, 2, 3, 4], max_new_tokens=60, **sampled, **settings)
    assert sorted({"jit(decode)", "jit(read_part)"} & set(names)) == ["jit(decode)"]
    assert names.count("jit(decode)") == 1


@pytest.mark.parametrize("name", COST_METHODS)
def test_steps_ask_the_host_nothing(name):
    """All that a step reads and writes is on the device; the host only starts the loop."""
    executable, state = compiled(name, capacity=SMALL)  # compiled by the test before
    params, steps = tiny_model(num_draft_heads=2).params, jnp.int32(8)
    state = jax.tree.map(jnp.copy, state)  # it is donated
    with jax.transfer_guard("disallow"):
        state = jax.block_until_ready(executable(params, state, steps))
    assert int(state.stats.steps[0]) == 8


def test_a_narrow_pass_does_not_compute_the_wide_one():
    """Neither runs before it is known how many nodes there are."""
    model = tiny_model(vocab_size=VOCAB)
    method = tsjax.NGram(num_ngrams=0, suffix_length=6, pass_widths=(1,))
    cfg = tsjax.DecodeConfig(model=model.cfg, method=method)
    state = fresh_state(model, [[1, 2, 3]], method=method)
    step = jax.jit(functools.partial(tsjax.decode_step, cfg=cfg))
    text = step.lower(model.params, state).compile().as_text()
    assert "/mlp/" in text and "/mlp/" not in entry_computation(text)


# --- drafts of repeated text ---------------------------------------------------------------------

REPEATED = [1, 2, 3, 4, 9, 1, 2, 3]  # three tokens match, and 4, 9, 1 ... followed


def drafted(params, state, cfg):
    """The tree of a greedy step."""
    noise = jnp.zeros((state.root.shape[0], cfg.sizes.levels, VOCAB))
    return jax.jit(cfg.method.draft, static_argnums=0)(cfg.model, params, state, noise)[1]


@pytest.mark.parametrize(
    ("options", "sources"),
    [
        ({"suffix_match": 3, "suffix_alone": 4}, {"heads", "suffix"}),
        ({"suffix_match": 4}, {"heads"}),
        ({"suffix_alone": 3}, {"suffix"}),
    ],
)
def test_how_long_a_match_counts_and_when_it_is_drafted_alone(options, sources):
    model = tiny_model(vocab_size=VOCAB, num_draft_heads=1)
    method = tsjax.TokenSwift(
        tree=(2, 1, 1), draft_passes=2, draft_budget=20, num_sinks=4, suffix_length=5, num_ngrams=0,
        **options,
    )  # fmt: skip
    cfg = tsjax.DecodeConfig(model=model.cfg, method=method)
    state = fresh_state(model, [REPEATED], method=method)
    state = prefilled(model.params, state, cfg=cfg)
    tree = drafted(model.params, state, cfg)
    named = np.asarray(tree.sources[0])
    assert {name for name, used in zip(SOURCES, named.any(0), strict=True) if used} == sources
    suffix = np.asarray(tree.tokens[0])[named[:, SOURCES.index("suffix")]]
    assert suffix.tolist() == ([4, 9, 1, 2, 3] if "suffix" in sources else [])


def test_rows_of_a_batch_draft_repetitions_alone_one_by_one():
    """The second row has no repetition, so that the passes run, and it alone uses them."""
    model = tiny_model(vocab_size=VOCAB)
    method = tsjax.TokenSwift(
        tree=(2, 1), draft_passes=2, draft_budget=20, num_sinks=4, num_ngrams=2, suffix_length=5,
        suffix_match=3, suffix_alone=3,
    )  # fmt: skip
    cfg = tsjax.DecodeConfig(model=model.cfg, method=method)
    assert cfg.sizes.width == 1 + max(4 + 2 * 3, 5)  # never both in one row
    state = fresh_state(model, [REPEATED, [1, 2, 3, 4, 5, 6, 7, 8]], method=method)
    state = prefilled(model.params, state, cfg=cfg)
    tree = drafted(model.params, state, cfg)
    used = np.asarray(tree.sources).any(1)
    first, second = (
        {name for name, found in zip(SOURCES, row, strict=True) if found} for row in used
    )
    assert first == {"suffix"} and "heads" in second and "suffix" not in second

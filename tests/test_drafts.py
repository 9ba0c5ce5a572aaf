# SPDX-License-Identifier: Apache-2.0
"""Drafts of the model that have to be right: with everything in sight, or summed up, or known.

No draft can change a token, so what makes drafts worse fails here, in the recorded numbers of
test_method_contract.py, or nowhere.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    LOOPING,
    decoded,
    fresh_state,
    new_tokens,
    packed,
    prefilled,
    tiny_model,
    unpacked,
)
from test_any_tree import perfect_model

import tsjax
from tsjax.decoding.tree import SOURCES

VOCAB, CAPACITY = LOOPING["vocab_size"], 160
NO_TEXT = dict(num_ngrams=0, suffix_length=0)


def model_of(seed: int) -> tsjax.Model:
    return tiny_model(seed=seed, **LOOPING)


def after_steps(model, method, prompts: list[list[int]], num_steps: int, **settings):
    """The state after a prefill and `num_steps` steps."""
    cfg = tsjax.steps.DecodeConfig(model=model.cfg, method=method)
    state = fresh_state(model, prompts, method=method, capacity=CAPACITY, **settings)
    state = prefilled(model.params, state, cfg=cfg, width=16)
    return decoded(model.params, state, num_steps, cfg=cfg)


THREE = tsjax.TokenSwift(tree=(1, 1, 1), draft_passes=3, draft_budget=CAPACITY, **NO_TEXT)
PENALISED = dict(do_sample=True, repetition_penalty=1.3, repetition_window=7)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(dict(do_sample=True, top_p=0.9), id="truncated", marks=pytest.mark.wide),
        pytest.param(PENALISED, id="penalised"),
    ],
)
def test_a_draft_that_sees_everything_is_accepted_in_full(settings):
    """Ranked with the noise of their positions and penalised, drafts are the model's own choices.

    Only the first step starts with an empty draft cache.
    """
    for model in (model_of(0), model_of(1)):
        state = after_steps(model, THREE, [list(range(11))], 20, **settings)
        accepted = np.asarray(state.stats.accepted[0])
        assert accepted.sum() == 20 and accepted[3] >= 19


def test_what_the_last_token_attended_to_is_kept():
    """In a batch with rows of different paths; against plain softmaxes over the whole cache."""
    model = model_of(1)
    method = tsjax.TokenSwift(
        tree=(2, 2, 1), draft_passes=3, draft_budget=24, num_sinks=3, draft_rest=True,
        suffix_length=4, suffix_match=2, suffix_alone=2, pass_widths=(5,),
    )  # fmt: skip
    prompts = [list(range(11)), [5, 6, 5, 6, 5, 6, 5], [3]]
    state = after_steps(model, method, prompts, 9, do_sample=True)
    assert len(set(np.asarray(state.length - state.prompt_length).tolist())) > 1
    layers = zip(state.kv.k, state.kv.v, state.memory.cache.attended, strict=True)
    for k, v, (query, seen) in layers:
        for b, n in np.ndindex(*query.shape[:2]):
            head, length = n // model.cfg.group_size, int(state.kv.length[b])
            keys, values = (np.asarray(x[b, head, :length], np.float64) for x in (k, v))
            scores = keys @ np.asarray(query[b, n], np.float64) / np.sqrt(model.cfg.head_dim)
            weights = np.exp(scores - scores.max())
            log_total = scores.max() + np.log(weights.sum())
            mean = weights @ values / weights.sum()
            np.testing.assert_allclose(seen.mean[b, n], mean, rtol=0, atol=1e-4)
            np.testing.assert_allclose(seen.log_total[b, n], log_total, rtol=0, atol=1e-4)


def test_drafts_that_see_the_rest_see_everything_where_all_tokens_count_alike():
    """Without queries attention is a mean, of which the sum of the others is exactly a part."""
    model = model_of(1)
    layers = [
        packed(layer, q=np.zeros_like(unpacked(layer)["q"])) for layer in model.params.model.layers
    ]
    weights = model.params.model.replace(layers=tuple(layers))
    model = dataclasses.replace(model, params=model.params.replace(model=weights))
    method = dataclasses.replace(THREE, draft_budget=8, num_sinks=2, draft_rest=True)
    state = after_steps(model, method, [list(range(40))], 20, **PENALISED)
    assert state.stats.accepted[0, 3] >= 19  # all steps but the first


def test_noise_makes_sampled_drafts_meet():
    """noise_coupled=False drafts the most probable tokens, which sampling chooses less often."""
    method = dataclasses.replace(THREE, noise_coupled=False)
    state = after_steps(model_of(0), method, [list(range(11))], 20, **PENALISED)
    assert 20 < len(new_tokens(state)[0]) < (19 * 4 + 1) / 1.5  # if all were right


@pytest.mark.parametrize(
    ("draft_from", "tree"), [("partial_cache", (1, 3, 1, 1)), ("verified_state", (1, 1, 1))]
)
def test_perfect_heads_are_accepted_in_full(draft_from, tree):
    model = perfect_model({token: (token + 5) % VOCAB for token in range(VOCAB)})
    method = tsjax.TokenSwift(tree=tree, draft_from=draft_from, **NO_TEXT)
    state = after_steps(model, method, [[1]], 12)
    assert state.stats.accepted[0, -1] >= 11  # verified_state knows no state in the first step
    (row,) = new_tokens(state)
    assert row == [(6 + 5 * i) % VOCAB for i in range(len(row))]


# --- drafts of repeated text ---------------------------------------------------------------------

REPEATED = [1, 2, 3, 4, 9, 1, 2, 3]  # three tokens match, and 4, 9, 1 ... followed


def drafted(model, method, texts):
    """Which nodes each source has named, and the tokens of a greedy tree."""
    cfg = tsjax.steps.DecodeConfig(model=model.cfg, method=method)
    state = prefilled(model.params, fresh_state(model, texts, method=method), cfg=cfg)
    noise = jnp.zeros((len(texts), cfg.sizes.levels, cfg.model.vocab_size))
    tree = jax.jit(method.draft, static_argnums=0)(model.cfg, model.params, state, noise)[1]
    return np.asarray(tree.sources), np.asarray(tree.tokens)


def named(sources) -> set[str]:
    return {name for name, used in zip(SOURCES, sources.any(0), strict=True) if used}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"suffix_match": 3, "suffix_alone": 4}, {"model", "suffix"}),
        ({"suffix_match": 4}, {"model"}),
        ({"suffix_alone": 3}, {"suffix"}),
    ],
)
def test_how_long_a_match_counts_and_when_it_is_drafted_alone(options, wanted):
    model = tiny_model(num_draft_heads=1)
    method = tsjax.TokenSwift(
        tree=(2, 1, 1), draft_passes=2, draft_budget=20, num_sinks=4, suffix_length=5, num_ngrams=0,
        **options,
    )  # fmt: skip
    (sources,), (tokens,) = drafted(model, method, [REPEATED])
    assert named(sources) == wanted
    suffix = tokens[sources[:, SOURCES.index("suffix")]]
    assert suffix.tolist() == ([4, 9, 1, 2, 3] if "suffix" in wanted else [])


def test_rows_of_a_batch_draft_repetitions_alone_one_by_one():
    """The second row has no repetition, so that the passes run, and it alone uses them."""
    model = tiny_model()
    method = tsjax.TokenSwift(
        tree=(2, 1), draft_passes=2, draft_budget=20, num_sinks=4, num_ngrams=2, suffix_length=5,
        suffix_match=3, suffix_alone=3,
    )  # fmt: skip
    (first, second), _ = drafted(model, method, [REPEATED, [1, 2, 3, 4, 5, 6, 7, 8]])
    assert len(first) == 1 + max(4 + 2 * 3, 5)  # never both in one row
    assert named(first) == {"suffix"}
    assert "model" in named(second) and "suffix" not in named(second)

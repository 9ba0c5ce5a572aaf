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
from helpers import LOOPING, packed, tiny_model, unpacked
from test_any_tree import perfect_model
from test_verification import fresh_state, prefilled

import tsjax
from tsjax.decoding.programs import programs
from tsjax.decoding.tree import SOURCES

VOCAB, CAPACITY = LOOPING["vocab_size"], 160
NO_TEXT = dict(num_ngrams=0, suffix_length=0)


def model_of(seed: int) -> tsjax.Model:
    return tiny_model(seed=seed, **LOOPING)


def decoded(model, method, prompts: list[list[int]], num_steps: int, **settings):
    """The state after `num_steps` steps, by the programs and with the sizes of `compare`."""
    cfg = tsjax.DecodeConfig(model=model.cfg, method=method)
    config = tsjax.GenerationConfig(**settings)
    tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    state = tsjax.init_state(
        tokens,
        np.asarray(list(map(len, prompts)), np.int32),
        cfg=cfg,
        capacity=CAPACITY,
        max_length=[CAPACITY] * len(prompts),
        sampling=tsjax.sampling_values(config, (), model.cfg.vocab_size, model.cfg.dtype),
    )
    run = programs("cpu", model.cfg.dtype)
    state = run.read_part(model.params, state, 0, part=0, width=16, cfg=cfg)
    return run.decode(model.params, state, num_steps, cfg=cfg)


def new_tokens(state) -> list[list[int]]:
    tokens, start, end = map(np.asarray, (state.tokens, state.prompt_length, state.length))
    return [row[a:b].tolist() for row, a, b in zip(tokens, start, end, strict=True)]


THREE = tsjax.TokenSwift(tree=(1, 1, 1), draft_passes=3, draft_budget=CAPACITY, **NO_TEXT)
PENALISED = dict(do_sample=True, repetition_penalty=1.3, repetition_window=7)


@pytest.mark.parametrize(
    "settings",
    [{}, dict(do_sample=True), dict(do_sample=True, top_p=0.9), PENALISED],
    ids=["greedy", "sampled", "truncated", "penalised"],
)
def test_a_draft_that_sees_everything_is_accepted_in_full(settings):
    """With the whole text in the draft cache the first drafts are the model's own choices.

    Only the first step starts with an empty draft cache. The random models show that drafts are
    ranked with the noise of the right positions and with the drafts before them penalised, and
    that the draft cache holds the right rows.
    """
    for model in (model_of(0), model_of(1)):
        state = decoded(model, THREE, [list(range(11))], 20, **settings)
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
    state = decoded(model, method, prompts, 9, do_sample=True)
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
    fully_accepted = []
    for draft_rest in (False, True):
        method = dataclasses.replace(THREE, draft_budget=8, num_sinks=2, draft_rest=draft_rest)
        state = decoded(model, method, [list(range(40))], 20, **PENALISED)
        fully_accepted.append(int(state.stats.accepted[0, 3]))
    assert fully_accepted[0] < 15 and fully_accepted[1] >= 19  # all steps but the first


def test_noise_makes_sampled_drafts_meet():
    """noise_coupled=False drafts the most probable tokens, which sampling chooses less often."""
    counts = []
    for method in (THREE, dataclasses.replace(THREE, noise_coupled=False)):
        state = decoded(model_of(0), method, [[1, 2, 3]], 20, do_sample=True)
        counts.append(len(new_tokens(state)[0]))
    assert counts[0] > 1.5 * counts[1] and counts[1] > 20


@pytest.mark.parametrize(
    ("draft_from", "tree"), [("partial_cache", (1, 3, 1, 1)), ("verified_state", (1, 1, 1))]
)
def test_perfect_heads_are_accepted_in_full(draft_from, tree):
    model = perfect_model({token: (token + 5) % VOCAB for token in range(VOCAB)})
    method = tsjax.TokenSwift(tree=tree, draft_from=draft_from, **NO_TEXT)
    state = decoded(model, method, [[1]], 12)
    assert state.stats.accepted[0, -1] >= 11  # verified_state knows no state in the first step
    (row,) = new_tokens(state)
    assert row == [(6 + 5 * i) % VOCAB for i in range(len(row))]


# --- drafts of repeated text ---------------------------------------------------------------------

REPEATED = [1, 2, 3, 4, 9, 1, 2, 3]  # three tokens match, and 4, 9, 1 ... followed


def drafted(params, state, cfg):
    """The tree of a greedy step."""
    noise = jnp.zeros((state.root.shape[0], cfg.sizes.levels, cfg.model.vocab_size))
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
    model = tiny_model(num_draft_heads=1)
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
    model = tiny_model()
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

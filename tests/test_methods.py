# SPDX-License-Identifier: Apache-2.0
"""Every method returns the tokens of plain decoding, whatever is drafted and however it is asked.

The main test draws cases for a dozen static configurations and compares `generate` with
method="autoregressive". It runs in float64: there no two choices are near-ties, so equality is a
fact about the algorithm. A smaller set runs in float32. What a single step does is the subject of
test_verification.py.
"""

import dataclasses
import functools
import itertools
import os
import signal
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    EOS_ID,
    TOKENS,
    RecordingStreamer,
    chain,
    chain_model,
    packed,
    save_tokenizer,
    tiny_config,
    tiny_model,
    unpacked,
)

import tsjax
from tsjax.config import without_unread
from tsjax.decoding.programs import programs
from tsjax.decoding.tree import SOURCES
from tsjax.host import run
from tsjax.methods import resolve_method

VOCAB = 24
CAPACITY = 160
SIZES = dict(capacity=CAPACITY, prefill_width=16)
SHAPE = dict(vocab_size=VOCAB, embed_dim=VOCAB, mlp_dim=32)
RAGGED = [[1, 2, 3], [4], [1, 2, 3], [5, 6, 7, 5, 6, 7, 5]]
SAMPLED = dict(do_sample=True, temperature=0.9, min_p=0.02, repetition_penalty=1.1, seed=7)


# --- models ------------------------------------------------------------------------------------


@functools.cache
def models(num_draft_heads: int, dtype: str, head_kind: str = "chained") -> tuple[tsjax.Model, ...]:
    """Models of one config, so of one program: two random ones, and one that likes to loop.

    The third mostly continues a token in one way, so that long drafts are accepted when sampling.
    """
    shape = dict(SHAPE, num_draft_heads=num_draft_heads, head_kind=head_kind, dtype=dtype)
    cfg = tiny_config(**shape)
    params = tsjax.init_params(cfg, seed=2, scale=0.1)
    table = 0.3 * np.random.default_rng(2).standard_normal((VOCAB, VOCAB))
    table[np.arange(VOCAB), (5 * np.arange(VOCAB) + 3) % VOCAB] += 1.2
    weights = params.model.replace(
        embed=jnp.eye(VOCAB, dtype=dtype), unembed=jnp.asarray(table.T, dtype)
    )
    looping = tsjax.Model(params.replace(model=weights), cfg=cfg)
    return tiny_model(seed=0, **shape), tiny_model(seed=1, **shape), looping


def perfect_model(successor: dict[int, int], num_draft_heads: int) -> tsjax.Model:
    """A chain_model whose heads say what it will say."""
    plain = chain_model(successor, vocab_size=VOCAB)
    cfg = tiny_config(
        vocab_size=VOCAB, embed_dim=VOCAB, num_layers=1, num_draft_heads=num_draft_heads
    )
    follow = np.zeros((VOCAB, VOCAB), np.float32)
    follow[np.arange(VOCAB), [successor.get(token, 0) for token in range(VOCAB)]] = 1
    # Each head adds the next token's vector to those of the heads before it, ten times as large.
    heads = tuple(
        head.replace(linear=jnp.asarray(10**index * follow.T))
        for index, head in enumerate(tsjax.init_params(cfg).heads, start=1)
    )
    return tsjax.Model(plain.params.replace(heads=heads), cfg=cfg)


def headless(model: tsjax.Model) -> tsjax.Model:
    """The same model without its heads: what plain decoding needs, and one program for all."""
    cfg, params = model.cfg.with_heads(0), model.params.replace(heads=())
    return tsjax.Model(params, cfg=cfg, stop_ids=model.stop_ids, path=model.path)


def rows_of(result) -> list[tuple[list[int], str]]:
    return [
        (row.tolist(), reason)
        for row, reason in zip(result.tokens, result.finish_reason, strict=True)
    ]


@functools.cache
def second_model(dtype: str) -> tsjax.Model:
    """One that often says what the third of `models` says."""
    looping = models(0, dtype)[2]
    cfg = dataclasses.replace(looping.cfg, num_layers=1)
    params = tsjax.init_params(cfg, seed=3, scale=0.05)
    weights = params.model.replace(
        embed=looping.params.model.embed, unembed=looping.params.model.unembed
    )
    return tsjax.Model(params.replace(model=weights), cfg=cfg)


def compare(model, prompts, method, draft_model=None, **settings):
    """Generates with `method` and plainly; fails where they differ, else returns the result."""
    settings = {**SIZES, **settings}
    result = tsjax.generate(model, prompts, method=method, draft_model=draft_model, **settings)
    plain = rows_of(tsjax.generate(headless(model), prompts, **settings))
    for index, (actual, expected) in enumerate(zip(rows_of(result), plain, strict=True)):
        pairs = enumerate(zip(actual[0], expected[0], strict=False))
        first = next((i for i, (a, b) in pairs if a != b), "none")
        assert actual == expected, (
            f"row {index} differs from plain decoding, first different token: {first}\n"
            f"  {method}\n  {prompts=}\n  {settings=}\n  {actual=}\n  {expected=}"
        )
    return result


# --- any case, a dozen setups --------------------------------------------------------------------


class Setup(NamedTuple):
    """What a step is compiled for."""

    method: Any
    num_draft_heads: int = 0
    batch: int = 1
    head_kind: str = "chained"
    second: bool = False  # whether there is a second model


NO_TEXT = dict(num_ngrams=0, suffix_length=0)  # nothing but the model's drafts
LINE = tsjax.Line(1.0)
CHEAP_ROWS = tsjax.Costs(  # what is drafted at all is judged
    passes=((1, LINE), (64, tsjax.Line(1.01))), heads=0.0, choice=LINE, suffix=LINE, ngrams=0.0,
    overhead=0.0, origin="measured", int8=tsjax.Int8Costs(tsjax.Line(0.01), 0.0),
)  # fmt: skip
SETUPS = {
    "ngram": Setup(
        tsjax.NGram(
            num_ngrams=4, ngram_size=3, ngram_slots=5, suffix_length=6, pass_widths=(1, 4)
        ),
        batch=2,
    ),
    "ngrams_alone": Setup(tsjax.NGram(ngram_size=5, ngram_delay=3, suffix_length=0)),
    "suffix_alone": Setup(tsjax.NGram(num_ngrams=0, suffix_length=16), batch=4),
    # The least draft cache there is; a tree that is deeper than the drafts is cut to its first.
    "one_token": Setup(
        tsjax.TokenSwift(tree=(1, 2), draft_budget=2, num_sinks=0, **NO_TEXT), batch=2
    ),
    "paper": Setup(
        tsjax.TokenSwift(
            draft_budget=32, num_sinks=4, draft_refresh=3, draft_rest=True, suffix_length=0
        ),
        num_draft_heads=3,
    ),
    "121_rows": Setup(
        tsjax.TokenSwift(tree=(3, 3, 3, 3), draft_budget=128, **NO_TEXT), num_draft_heads=3
    ),
    "paths": Setup(
        tsjax.TokenSwift(
            tree=((0,), (1,), (0, 0), (0, 2), (1, 0)),
            num_ngrams=3,
            ngram_size=2,
            ngram_slots=3,
            suffix_length=4,
            draft_budget=12,
            num_sinks=2,
            noise_coupled=False,
        ),
        num_draft_heads=1,
        batch=2,
    ),
    "passes": Setup(
        tsjax.TokenSwift(
            tree=(2, 2, 1), draft_passes=3, draft_budget=24, num_sinks=3, draft_rest=True,
            suffix_length=4, suffix_match=2, suffix_alone=2, pass_widths=(5,),
        ),
        batch=2,
    ),
    "passes_and_heads": Setup(
        tsjax.TokenSwift(
            tree=(1, 2, 1, 1), draft_passes=2, draft_budget=4096, num_ngrams=2, ngram_size=4,
            suffix_match=2, suffix_alone=4,
        ),
        num_draft_heads=2,
        batch=4,
    ),
    "int8_drafts": Setup(
        tsjax.TokenSwift(
            tree=(2, 1, 2), draft_passes=2, draft_budget=16, num_sinks=2, draft_weights="int8",
            num_ngrams=2, ngram_size=3, suffix_length=3, draft_choice="retrieval",
            draft_refresh="never",
        ),
        num_draft_heads=1,
        batch=2,
    ),
    "magicdec": Setup(
        tsjax.MagicDec(draft_choice="snapkv", draft_passes=2, draft_budget=36, num_sinks=1),
        batch=2,
    ),
    "magicdec_streaming": Setup(
        tsjax.MagicDec(draft_budget=12, num_sinks=2, draft_weights="int8"), batch=2
    ),
    "draft_model": Setup(
        tsjax.DraftModel(draft_choice="importance", draft_budget=12, num_sinks=2),
        batch=4,
        second=True,
    ),
    "triforce": Setup(
        tsjax.TriForce(length=4, draft_budget=20, inner_budget=24, inner_sinks=1),
        batch=2,
        second=True,
    ),
    "triforce_alone": Setup(
        tsjax.TriForce(
            length=3, inner_length=2, draft_budget=16, num_sinks=0, draft_refresh=None,
            draft_weights="int8",
        ),
        batch=2,
    ),
    "no_tree": Setup(
        tsjax.TokenSwift(tree=(), num_ngrams=3, ngram_size=3, suffix_length=3, draft_budget=40)
    ),
    "verified": Setup(
        tsjax.TokenSwift(
            tree=(2, 2, 2), draft_from="verified_state", num_ngrams=4, suffix_length=6,
            pass_widths=(17, 5),
        ),
        num_draft_heads=3,
        batch=4,
    ),
    "likely": Setup(tsjax.LikelyTree(width=12, places=6, costs=CHEAP_ROWS), batch=2),
    "likely_passes": Setup(
        tsjax.LikelyTree(
            width=9, pass_widths=(4,), draft_passes=3, draft_budget=16, num_sinks=2,
            draft_refresh=5, draft_weights="int8", costs=CHEAP_ROWS, draft_choice="streaming",
        ),
        batch=2,
    ),
    "likely_heads": Setup(
        tsjax.LikelyTree(width=24, heads=True, places=3, costs=CHEAP_ROWS), num_draft_heads=3
    ),
    "likely_all": Setup(
        tsjax.LikelyTree(
            width=24, draft_passes=2, heads=True, places=3, draft_budget=20, num_sinks=3,
            draft_refresh=None, draft_rest=False, costs=CHEAP_ROWS,
        ),
        num_draft_heads=2,
        batch=4,
    ),
    "verified_alone": Setup(
        tsjax.TokenSwift(
            tree=(3,), draft_from="verified_state", noise_coupled=False, **NO_TEXT
        ),
        num_draft_heads=1,
        batch=2,
    ),
    "medusa": Setup(
        tsjax.Medusa(tree=12), num_draft_heads=3, batch=4, head_kind="parallel"
    ),
    "medusa_own": Setup(
        tsjax.Medusa(tree=(8, 2, 1), noise_coupled=False), num_draft_heads=3,
        head_kind="parallel_own_vocabulary",
    ),
    "medusa_star": Setup(
        tsjax.TokenSwift(
            tree=(1, 3, 2), draft_budget=24, num_sinks=2, num_ngrams=2, suffix_length=3
        ),
        num_draft_heads=2,
        batch=2,
        head_kind="parallel_own_vocabulary",
    ),
}  # fmt: skip

# Compiling is what costs; these are run with -m slow.
SLOW_SETUPS = (
    "121_rows",
    "paths",
    "ngrams_alone",
    "suffix_alone",
    "one_token",
    "passes",
    "no_tree",
    "verified_alone",
    "likely_heads",
    "medusa_own",
    "medusa_star",
    "magicdec_streaming",
    "draft_model",
    "triforce_alone",
)

tokens = st.integers(0, VOCAB - 1)


@st.composite
def prompts(draw, batch: int) -> list[list[int]]:
    """Rows of motifs that repeat themselves; the first one is as long as any.

    Of the longest row there are few lengths: single operations of init_state compile for each.
    """
    longest, rows = draw(st.sampled_from([40, 17, 5, 1])), []
    for index in range(batch):
        motif = draw(st.lists(tokens, min_size=1, max_size=12))
        tail = draw(st.lists(tokens, max_size=6))
        length = longest if index == 0 else draw(st.integers(1, longest))
        rows.append((motif * length + tail)[-length:])
    return rows


# Which processors are on is compiled in, so a few combinations stand for all; values vary.
VALUES = {
    "temperature": st.floats(0.4, 1.2),
    "top_k": st.integers(1, VOCAB + 3),
    "top_p": st.floats(0.3, 0.99),
    "min_p": st.floats(0.01, 0.3),
    "epsilon_cutoff": st.floats(0.001, 0.1),
    "eta_cutoff": st.floats(0.001, 0.2),
    "min_tokens_to_keep": st.integers(2, 5),
    "repetition_penalty": st.floats(1.01, 1.5),
    "repetition_window": st.sampled_from([None, 1, 2, 3, 4, 5, 8, 20, 64, 1024, 2048]),
    "eos_token_id": tokens | st.lists(tokens, max_size=3),
    "min_new_tokens": st.integers(1, 20),
    "suppress_tokens": st.lists(tokens, min_size=1, max_size=4),
}
SOMETIMES = {"temperature", "repetition_window", "eos_token_id"}  # they compile nothing
FEW_COMBINATIONS = st.sampled_from(
    [
        (False, set()),
        (False, {"repetition_penalty", "min_new_tokens", "suppress_tokens"}),
        (True, {"min_p", "repetition_penalty"}),
        (True, set(VALUES)),
    ]
)
ALL_COMBINATIONS = st.tuples(st.booleans(), st.sets(st.sampled_from(sorted(VALUES))))


@st.composite
def cases(draw, batch: int, combinations):
    """(index of the model, prompts, settings)."""
    rows = draw(prompts(batch))
    do_sample, on = draw(combinations)
    settings = draw(
        st.fixed_dictionaries(
            {
                "max_new_tokens": st.integers(20, 60) | st.integers(1, 60),
                "seed": st.integers(0, 2**32 - 1) | st.tuples(*[st.integers(0, 2**32 - 1)] * batch),
                **{name: VALUES[name] for name in on},
            },
            optional={name: VALUES[name] for name in SOMETIMES - on},
        )
    )
    if "min_new_tokens" in settings:
        settings["min_new_tokens"] = min(settings["min_new_tokens"], settings["max_new_tokens"])
    settings["do_sample"] = do_sample
    return draw(st.integers(0, 2)), rows, without_unread(settings)


def check_equality(name: str, dtype: str, max_examples: int, combinations=FEW_COMBINATIONS) -> None:
    setup = SETUPS[name]
    steps = emitted = 0

    @hypothesis.settings(max_examples=max_examples)
    @hypothesis.given(cases(setup.batch, combinations))
    def equal(case):
        nonlocal steps, emitted
        index, rows, settings = case
        model = models(setup.num_draft_heads, dtype, setup.head_kind)[index]
        draft_model = second_model(dtype) if setup.second else None
        stats = compare(model, rows, setup.method, draft_model, **settings).stats
        steps, emitted = steps + sum(stats.steps), emitted + stats.computed_tokens

    with jax.enable_x64(dtype == "float64"):
        equal()
    assert emitted > 1.1 * steps, "next to nothing was accepted, so next to nothing was tested"


@pytest.mark.parametrize("name", [name for name in SETUPS if name not in SLOW_SETUPS])
def test_tokens_are_those_of_plain_decoding(name):
    check_equality(name, "float64", 40)


def test_tokens_are_those_of_plain_decoding_in_float32():
    check_equality("verified", "float32", 20)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", SETUPS)
def test_tokens_are_those_of_plain_decoding_in_many_cases(name, dtype):
    check_equality(name, dtype, 1000 if dtype == "float64" else 300)


@pytest.mark.slow
def test_tokens_are_those_of_plain_decoding_with_any_processors_together():
    check_equality("passes_and_heads", "float64", 100, ALL_COMBINATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_20000_tokens(settings):
    """A draft cache of 256 slots is chosen again at least 80 times."""
    method = tsjax.TokenSwift(tree=(2, 2), draft_budget=256, draft_passes=2)
    settings = dict(settings, repetition_penalty=1.1, repetition_window=512)
    result = compare(
        tiny_model(), [1, 2, 3], method, max_new_tokens=20_000, capacity=32768, **settings
    )
    assert result.stats.new_tokens == (20_000,) and result.stats.tokens_per_step > 1.2


def test_a_method_that_drafts_nothing_is_plain_decoding():
    model = models(0, "float32")[0]
    for method in (tsjax.NGram(**NO_TEXT), tsjax.TokenSwift(tree=(), **NO_TEXT)):
        assert tsjax.DecodeConfig(model=model.cfg, method=method).sizes.width == 1
        result = compare(model, RAGGED, method, max_new_tokens=20, **SAMPLED)
        assert result.stats.tokens_per_step == 1.0


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_cache_smaller_than_one_step(settings):
    """Two slots beside the sinks, and up to nine tokens per step: it is often chosen again."""
    method = tsjax.TokenSwift(
        tree=(2, 2), draft_budget=4, num_sinks=2, num_ngrams=2, suffix_length=8
    )
    rows = [[1, 2, 3] * 6, [4]]
    result = compare(models(1, "float32")[2], rows, method, max_new_tokens=60, **settings)
    assert result.stats.tokens_per_step > 1


# --- drafts are accepted -----------------------------------------------------------------------


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


@pytest.fixture
def float64():
    """With the programs that the random cases have compiled already."""
    with jax.enable_x64(True):
        yield "float64"


@pytest.mark.parametrize("name", ["passes_and_heads", "verified"])
def test_drafts_of_every_source_are_accepted(name, float64):
    """In sampled text that loops: every counter has counted, and the counters agree."""
    setup, steps = SETUPS[name], 20
    model = models(setup.num_draft_heads, float64)[2]
    prompts, settings = [[1, 2], [4], [5, 6], [7]], dict(do_sample=True, temperature=0.5)
    state = decoded(model, setup.method, prompts, steps, **settings)
    accepted, by_source = map(np.asarray, (state.stats.accepted, state.stats.by_source))
    drafts = accepted @ np.arange(accepted.shape[1])
    assert np.asarray(state.stats.steps).tolist() == accepted.sum(1).tolist() == [steps] * 4
    assert list(map(len, new_tokens(state))) == (steps + drafts).tolist()
    assert dict(zip(SOURCES, (by_source > 0).any(0), strict=True)) == dict.fromkeys(SOURCES, True)
    # A token that two sources drafted counts for both.
    assert (by_source.max(1) <= drafts).all() and (drafts <= by_source.sum(1)).all()
    assert accepted[:, 4:].sum() > 0  # also paths that are longer than any n-gram
    assert (np.asarray(state.stats.drafted) >= drafts).all()
    longest = steps + int(drafts.max())
    plain = tsjax.generate(headless(model), prompts, max_new_tokens=longest, **settings, **SIZES)
    for actual, expected in zip(new_tokens(state), plain.tokens, strict=True):
        assert actual == expected[: len(actual)].tolist()


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
    for model in models(0, "float32"):
        state = decoded(model, THREE, [list(range(11))], 20, **settings)
        accepted = np.asarray(state.stats.accepted[0])
        assert accepted.sum() == 20 and accepted[3] >= 19


def test_what_the_last_token_attended_to_is_kept():
    """In a batch with rows of different paths; against plain softmaxes over the whole cache."""
    model = models(0, "float32")[1]
    method = SETUPS["passes"].method
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
    model = models(0, "float32")[1]
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
        state = decoded(models(0, "float32")[0], method, [[1, 2, 3]], 20, do_sample=True)
        counts.append(len(new_tokens(state)[0]))
    assert counts[0] > 1.5 * counts[1] and counts[1] > 20


@pytest.mark.parametrize(
    ("draft_from", "tree"), [("partial_cache", (1, 3, 1, 1)), ("verified_state", (1, 1, 1))]
)
def test_perfect_heads_are_accepted_in_full(draft_from, tree):
    model = perfect_model({token: (token + 5) % VOCAB for token in range(VOCAB)}, 3)
    method = tsjax.TokenSwift(tree=tree, draft_from=draft_from, **NO_TEXT)
    state = decoded(model, method, [[1]], 12)
    assert state.stats.accepted[0, -1] >= 11  # verified_state knows no state in the first step
    (row,) = new_tokens(state)
    assert row == [(6 + 5 * i) % VOCAB for i in range(len(row))]


# --- where a row ends --------------------------------------------------------------------------

COUNTING = {token: (token + 1) % VOCAB for token in range(VOCAB)}
DEEP = tsjax.TokenSwift(tree=(1, 1, 1, 1), **NO_TEXT)  # 5 tokens per step for perfect heads


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 5, 6, 17])
def test_exactly_max_new_tokens(max_new_tokens):
    """The room ends at every place inside an accepted path."""
    model = perfect_model(COUNTING, 3)
    result = tsjax.generate(
        model, [[1], [5, 9]], method=DEEP, max_new_tokens=max_new_tokens, **SIZES
    )
    expected = [[(start + i) % VOCAB for i in range(max_new_tokens)] for start in (2, 10)]
    assert rows_of(result) == [(row, "length") for row in expected]
    assert result.stats.computed_tokens == 2 * max_new_tokens
    assert result.stats.steps == (-(-max_new_tokens // 5),) * 2


@pytest.mark.parametrize("stop", range(2, 14))
def test_a_stop_token_inside_an_accepted_path_is_the_last(stop):
    model = perfect_model(COUNTING, 3)
    for limit in (stop - 1, 40):  # the stop token is also the last that fits
        settings = dict(eos_token_id=[stop, stop + 1], max_new_tokens=limit)
        result = tsjax.generate(model, [[1], [1]], method=DEEP, **settings, **SIZES)
        assert rows_of(result) == [(list(range(2, stop + 1)), "eos")] * 2
    assert result.stats.steps == (-(-(stop - 1) // 5),) * 2


def test_a_stop_token_beyond_the_room_is_not_seen():
    model = perfect_model(COUNTING, 3)
    settings = dict(eos_token_id=5, max_new_tokens=3, **SIZES)
    result = tsjax.generate(model, [[1], [1]], method=DEEP, **settings)
    assert rows_of(result) == [([2, 3, 4], "length")] * 2


def test_rows_end_one_by_one():
    model = perfect_model({**chain(1, 2, 3, 4, 5), 7: 8, 8: 7}, 3)
    settings = dict(eos_token_id=4, max_new_tokens=6)
    for rows, lengths in (([[1], [7]], (3, 6)), ([[3], [7, 1, 2]], (1, 2)), ([[7], [1]], (6, 3))):
        result = compare(model, rows, DEEP, **settings)
        assert result.finish_reason == ["length" if n == 6 else "eos" for n in lengths]
        assert result.stats.new_tokens == lengths


def test_stop_strings_end_a_row_at_the_same_token(tmp_path):
    shape = dict(vocab_size=len(TOKENS), path=save_tokenizer(tmp_path), stop_ids=(EOS_ID,))
    model = tiny_model(**shape)
    text = tsjax.generate(model, [5], max_new_tokens=40, **SIZES).text
    method = tsjax.TokenSwift(tree=(2, 2), draft_passes=2, **NO_TEXT)
    for start in range(0, len(text) - 3, 3):
        settings = dict(stop_strings=text[start : start + 3], max_new_tokens=40)
        result = compare(model, [5], method, **settings)
        assert result.finish_reason == ["stop_string"]
        assert result.text == tsjax.generate(model, [5], **settings, **SIZES).text


def test_capacity_has_room_for_the_drafts_of_the_last_step():
    model = models(0, "float32")[0]
    method = tsjax.NGram(suffix_length=9, num_ngrams=0)
    with pytest.raises(ValueError, match=r"capacity=41 is not valid: at least 42 .*9 drafted"):
        tsjax.generate(model, [1, 2, 3], method=method, max_new_tokens=30, capacity=41)
    settings = dict(max_new_tokens=30, prefill_width=2)
    tight = tsjax.generate(model, [1, 2, 3], method=method, capacity=42, **settings)
    assert rows_of(tight) == rows_of(
        tsjax.generate(model, [1, 2, 3], **settings, capacity=CAPACITY)
    )


# --- however it is asked for -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["passes_and_heads", "verified", "medusa"])
def test_neither_chunks_nor_stream_nor_resuming_matter(name, float64, tmp_path, monkeypatch):
    """A run that one method has begun is continued by others."""
    setup, path = SETUPS[name], tmp_path / "run.json"
    model = models(setup.num_draft_heads, float64, setup.head_kind)[2]
    settings = dict(SAMPLED, max_new_tokens=40, eos_token_id=11, **SIZES)
    whole = compare(model, RAGGED, setup.method, **settings)
    assert set(whole.finish_reason) == {"eos", "length"}
    sizes = itertools.cycle([1, 3, 2])
    monkeypatch.setattr(run, "_next_chunk", lambda steps, elapsed: next(sizes))

    streamed = list(tsjax.stream(model, RAGGED, method=setup.method, **settings))
    joined = [np.concatenate(rows) for rows in zip(*(c.tokens for c in streamed), strict=True)]
    assert [row.tolist() for row in joined] == [row.tolist() for row in whole.tokens]
    assert max(len(row) for chunk in streamed for row in chunk.tokens) > 3  # the most plain steps
    # Each token says who drafted it, and what a stream has counted is what it has said.
    for chunk in streamed:
        pairs = zip(chunk.sources, chunk.tokens, strict=True)
        assert all(len(sources) == len(tokens) for sources, tokens in pairs)
    said = np.concatenate([sources for chunk in streamed for sources in chunk.sources])
    counted = {name: int((said >> i & 1).sum()) for i, name in enumerate(tsjax.SOURCES)}
    assert counted == streamed[-1].stats.accepted_by_source
    assert (said > 0).sum() == streamed[-1].stats.accepted > 0

    begin = dict(settings, max_new_tokens=17, save_to=path)
    for first, second in ((setup.method, "autoregressive"), ("autoregressive", setup.method)):
        tsjax.generate(model, RAGGED, method=first, **begin)
        resumed = tsjax.generate(model, resume_from=path, method=second, max_new_tokens=40, **SIZES)
        assert rows_of(resumed) == rows_of(whole)


@pytest.mark.parametrize("name", ["passes_and_heads", "verified"])
def test_alone_and_interrupted_a_row_has_the_same_tokens(name, float64, tmp_path, monkeypatch):
    setup, path = SETUPS[name], tmp_path / "run.json"
    model = models(setup.num_draft_heads, float64, setup.head_kind)[2]
    settings = dict(SAMPLED, max_new_tokens=40, eos_token_id=11, **SIZES)
    whole = rows_of(tsjax.generate(headless(model), RAGGED, **settings))
    for index in (0, 1, 3):  # row 2 repeats row 0's prompt
        alone = tsjax.generate(model, RAGGED[index], method=setup.method, **settings)
        assert rows_of(alone) == [whole[index]]

    def interrupt(count):
        if count == 12:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run, "_next_chunk", lambda *_: 2)
    settings.update(streamer=RecordingStreamer(interrupt), save_to=path, on_interrupt="return")
    part = tsjax.generate(model, RAGGED[3], method=setup.method, **settings)
    assert part.finish_reason == ["interrupted"] and 12 <= len(part.tokens[0]) < 40
    assert part.tokens[0].tolist() == whole[3][0][: len(part.tokens[0])]
    resumed = tsjax.generate(model, resume_from=path, method=setup.method, **SIZES)
    assert rows_of(resumed) == [whole[3]]


def test_names_are_methods_with_their_defaults():
    assert resolve_method("ngram") == tsjax.NGram()
    assert resolve_method("tokenswift") == tsjax.Auto()
    result = compare(models(0, "float32")[2], RAGGED[3], "ngram", max_new_tokens=40, **SAMPLED)
    assert result.stats.tokens_per_step > 1


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)])  # 4 query heads and 2 kv heads
def test_a_mesh_gives_the_same_tokens(sizes):
    mesh = jax.make_mesh(sizes, ("data", "model"))
    shape = dict(num_layers=1, num_draft_heads=1)
    placed, single = tiny_model(mesh=mesh, **shape), tiny_model(**shape)
    method = tsjax.TokenSwift(
        tree=(2, 2), draft_budget=24, num_sinks=4, draft_rest=True, num_ngrams=2
    )
    for settings in ({}, SAMPLED):
        settings = dict(settings, max_new_tokens=30)
        expected = tsjax.generate(single, RAGGED, **settings)
        assert rows_of(tsjax.generate(placed, RAGGED, method=method, **settings)) == rows_of(
            expected
        )

# SPDX-License-Identifier: Apache-2.0
"""Whatever is drafted and however it is asked, the tokens are those of plain decoding.

The first test draws prompts, seeds and values for a few sets of processors, and compares runs with
AnyTree's trees with plain ones, mostly in float64: there no two choices are near-ties, so equality
is a fact about the algorithm. What a single step does is the subject of test_verification.py, what
each method keeps that of test_method_contract.py.
"""

import functools
import itertools
import os
import signal

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import (
    LOOPING,
    PROMPTS,
    SIZES,
    RecordingStreamer,
    chain_model,
    looping_model,
    tiny_config,
    tiny_model,
)

import tsjax
from tsjax.base.generation_config import without_unread
from tsjax.host import run

ANY = AnyTree()
VOCAB, BATCH = LOOPING["vocab_size"], len(PROMPTS)
SAMPLED = dict(do_sample=True, temperature=0.9, min_p=0.02, repetition_penalty=1.1, seed=7)


def rows_of(result) -> list[tuple[list[int], str]]:
    rows = zip(result.tokens, result.finish_reason, strict=True)
    return [(row.tolist(), reason) for row, reason in rows]


def compare(model, prompts, method=ANY, **settings):
    """Generates with `method` and plainly; fails where they differ, else returns the result."""
    settings = {**SIZES, **settings}
    result = tsjax.generate(model, prompts, method=method, **settings)
    assert rows_of(result) == rows_of(tsjax.generate(model, prompts, **settings))
    return result


# --- any case ------------------------------------------------------------------------------------

tokens = st.integers(0, VOCAB - 1)


@functools.cache
def models(dtype: str) -> tuple[tsjax.Model, ...]:
    """Of one config, so of one program: one that likes to loop, and two random ones."""
    others = (tiny_model(seed=seed, dtype=dtype, **LOOPING) for seed in (0, 1))
    return looping_model(dtype=dtype), *others


@st.composite
def prompts(draw, batch: int) -> list[list[int]]:
    """Rows of motifs that repeat themselves; the first one is as long as any."""
    longest, rows = draw(st.sampled_from([40, 5])), []
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
    "presence_penalty": st.floats(-0.5, -0.05) | st.floats(0.05, 0.5),
    "frequency_penalty": st.floats(-0.2, -0.05) | st.floats(0.05, 0.2),
    "no_repeat_ngram_size": st.just(4),
    "eos_token_id": st.lists(tokens, min_size=1, max_size=3),
    "min_new_tokens": st.integers(1, 20),
    "suppress_tokens": st.lists(tokens, min_size=1, max_size=4),
}
SOMETIMES = {"temperature", "repetition_window", "eos_token_id"}  # they compile nothing
FEW = {
    "greedy": (False, set()),
    "penalised": (False, {"repetition_penalty", "min_new_tokens", "suppress_tokens"}),
    "everything": (True, set(VALUES)),
}
ALL = st.tuples(st.booleans(), st.sets(st.sampled_from(sorted(VALUES))))


@st.composite
def cases(draw, combinations, batch: int = BATCH):
    """(index of the model, prompts, settings)."""
    do_sample, on = draw(combinations)
    seeds = st.integers(0, 2**32 - 1)
    settings = draw(
        st.fixed_dictionaries(
            {
                "max_new_tokens": st.integers(20, 60) | st.integers(1, 60),
                "seed": seeds | st.tuples(*[seeds] * batch),
                **{name: VALUES[name] for name in on},
            },
            optional={name: VALUES[name] for name in SOMETIMES - on},
        )
    )
    if "min_new_tokens" in settings:
        settings["min_new_tokens"] = min(settings["min_new_tokens"], settings["max_new_tokens"])
    settings["do_sample"] = do_sample
    return draw(st.integers(0, 2)), draw(prompts(batch)), without_unread(settings)


def check_equality(dtype: str, max_examples: int, combinations) -> None:
    steps = emitted = 0

    @hypothesis.settings(max_examples=max_examples)
    @hypothesis.given(cases(combinations))
    def equal(case):
        nonlocal steps, emitted
        index, rows, settings = case
        stats = compare(models(dtype)[index], rows, **settings).stats
        steps, emitted = steps + sum(stats.steps), emitted + stats.computed_tokens

    with jax.enable_x64(dtype == "float64"):
        equal()
    assert emitted > 1.05 * steps, "next to nothing was accepted, so next to nothing was tested"


@pytest.mark.parametrize(
    ("dtype", "few"),
    [
        pytest.param("float64", "greedy", marks=pytest.mark.wide),
        ("float32", "penalised"),
        ("float64", "everything"),
    ],
)
def test_tokens_are_those_of_plain_decoding(dtype, few):
    check_equality(dtype, 15, st.just(FEW[few]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_tokens_are_those_of_plain_decoding_with_any_processors_together(dtype):
    check_equality(dtype, 200, ALL)


# --- where a row ends ----------------------------------------------------------------------------

DEEP = tsjax.TokenSwift(tree=(1, 1, 1, 1), num_ngrams=0, suffix_length=0)


@pytest.fixture(scope="module")
def counter() -> tsjax.Model:
    """Says 2, 3, 4 after 1, and its heads know it: 5 tokens per step."""
    return perfect_model({token: (token + 1) % VOCAB for token in range(VOCAB)})


def perfect_model(successor: dict[int, int], heads: int = 3) -> tsjax.Model:
    """A chain_model whose heads say what it will say."""
    plain = chain_model(successor, vocab_size=VOCAB)
    shape = dict(vocab_size=VOCAB, embed_dim=VOCAB, num_layers=1, num_draft_heads=heads)
    cfg, follow = tiny_config(**shape), np.zeros((VOCAB, VOCAB), np.float32)
    follow[np.arange(VOCAB), [successor.get(token, 0) for token in range(VOCAB)]] = 1
    # Each head adds the next token's vector to those of the heads before it, ten times as large.
    linears = (10**index * follow.T for index in range(1, heads + 1))
    pairs = zip(tsjax.steps.init_params(cfg).heads, linears, strict=True)
    made = tuple(head.replace(linear=jax.numpy.asarray(linear)) for head, linear in pairs)
    return tsjax.Model(plain.params.replace(heads=made), cfg=cfg)


@pytest.mark.parametrize("max_new_tokens", [1, 4, 5, 6, 17])
def test_exactly_max_new_tokens(max_new_tokens, counter):
    """The room ends inside an accepted path, and a stop token beyond it is not seen."""
    how = dict(method=DEEP, max_new_tokens=max_new_tokens, eos_token_id=2 + max_new_tokens)
    result = tsjax.generate(counter, [[1], [5, 1]], **how, **SIZES)
    expected = list(range(2, 2 + max_new_tokens))
    assert rows_of(result) == [(expected, "length")] * 2
    assert result.stats.computed_tokens == 2 * max_new_tokens
    assert result.stats.steps == (-(-max_new_tokens // 5),) * 2


@pytest.mark.parametrize("stop", range(2, 9))
def test_a_stop_token_inside_an_accepted_path_is_the_last(stop, counter):
    for limit in (stop - 1, 40):  # the stop token is also the last that fits
        settings = dict(eos_token_id=[stop, stop + 1], max_new_tokens=limit)
        result = tsjax.generate(counter, [[1], [1]], method=DEEP, **settings, **SIZES)
        assert rows_of(result) == [(list(range(2, stop + 1)), "eos")] * 2
    assert result.stats.steps == (-(-(stop - 1) // 5),) * 2


def test_capacity_has_room_for_the_drafts_of_the_last_step():
    model, how = looping_model(), dict(max_new_tokens=30, prefill_width=16)
    with pytest.raises(ValueError, match=r"capacity=36 is not valid: at least 37 .*4 drafted"):
        tsjax.generate(model, [1, 2, 3], method=AnyTree(), capacity=36, **how)
    tight = tsjax.generate(model, [1, 2, 3], method=AnyTree(), capacity=37, **how)
    assert rows_of(tight) == rows_of(tsjax.generate(model, [1, 2, 3], **how, capacity=128))


# --- however it is asked for ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    settings = dict(SAMPLED, max_new_tokens=40, eos_token_id=0, **SIZES)
    result = compare(looping_model(), PROMPTS, **settings)
    assert set(result.finish_reason) == {"eos", "length"}
    assert result.stats.tokens_per_step > 1.2
    return result, settings


def test_neither_chunks_nor_stream_nor_resuming_matter(
    whole, any_tree_has_a_name, tmp_path, monkeypatch
):
    """A run that one method has begun is continued by others."""
    (wanted, settings), model, path = whole, looping_model(), tmp_path / "run.json"
    sizes = itertools.cycle([1, 3, 2])
    monkeypatch.setattr(run, "_next_chunk", lambda steps, elapsed: next(sizes))

    streamed = list(tsjax.stream(model, PROMPTS, method=AnyTree(), **settings))
    joined = [np.concatenate(rows) for rows in zip(*(c.tokens for c in streamed), strict=True)]
    assert [row.tolist() for row in joined] == [row.tolist() for row in wanted.tokens]
    assert max(len(row) for chunk in streamed for row in chunk.tokens) > 3  # the most plain steps
    # Each token says who drafted it, and what a stream has counted is what it has said.
    for chunk in streamed:
        pairs = zip(chunk.sources, chunk.tokens, strict=True)
        assert all(len(sources) == len(tokens) for sources, tokens in pairs)
    said = np.concatenate([sources for chunk in streamed for sources in chunk.sources])
    counted = {name: int((said >> i & 1).sum()) for i, name in enumerate(AnyTree.sources)}
    assert counted == streamed[-1].stats.accepted_by_source
    assert (said > 0).sum() == streamed[-1].stats.accepted > 0

    begin = {**settings, "max_new_tokens": 17, "save_to": path}
    for first, second in (("autoregressive", AnyTree()), (AnyTree(), "autoregressive")):
        tsjax.generate(model, PROMPTS, method=first, **begin)
        rest = tsjax.generate(model, resume_from=path, method=second, max_new_tokens=40, **SIZES)
        assert rows_of(rest) == rows_of(wanted)


def test_alone_and_interrupted_a_row_has_the_same_tokens(whole, tmp_path, monkeypatch):
    (wanted, settings), model, path = whole, looping_model(), tmp_path / "run.json"
    for index, prompt in enumerate(PROMPTS):
        alone = tsjax.generate(model, prompt, method=AnyTree(), **settings)
        assert rows_of(alone) == [rows_of(wanted)[index]]

    def interrupt(count):
        if count == 12:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run, "_next_chunk", lambda *_: 2)
    expected = rows_of(wanted)[:1]
    how = dict(settings, streamer=RecordingStreamer(interrupt), on_interrupt="return")
    part = tsjax.generate(model, PROMPTS[0], save_to=path, **how)
    assert part.finish_reason == ["interrupted"] and 12 <= len(part.tokens[0]) < 28
    assert part.tokens[0].tolist() == expected[0][0][: len(part.tokens[0])]
    resumed = tsjax.generate(model, resume_from=path, method=AnyTree(), **SIZES)
    assert rows_of(resumed) == expected

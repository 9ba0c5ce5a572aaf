# SPDX-License-Identifier: Apache-2.0
"""generate() and stream(): the tokens, who decides when a row ends, streaming and saved runs.

The tokens are checked against a decoder in NumPy that shares nothing with tsjax but the noise
(helpers.oracle). Most other tests need no oracle: they say which calls must agree.
"""

import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from helpers import (
    EOS_ID,
    TOKENS,
    VOCAB,
    RecordingStreamer,
    chain,
    chain_model,
    compilations,
    oracle,
    save_tokenizer,
    tiny_model,
)

import tsjax
from tsjax.config import without_unread
from tsjax.host import run as host_run
from tsjax.host import saving

PROMPT = [1, 2, 3]
RAGGED = [[1, 2, 3], [4], [1, 2, 3], [5, 6, 7, 8, 9, 10, 11]]
SAMPLED = dict(do_sample=True, temperature=1.2, min_p=0.02, repetition_penalty=1.1, seed=7)


@pytest.fixture(scope="module")
def model() -> tsjax.Model:
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def talker(tokenizer_folder) -> tsjax.Model:
    """A random model whose vocabulary is that of the tiny tokenizer."""
    return tiny_model(vocab_size=len(TOKENS), path=tokenizer_folder, stop_ids=(EOS_ID,))


def ids(text: str) -> list[int]:
    """Token ids of space-separated token names."""
    return [TOKENS[name] for name in text.split(" ")]


def sayer(text: str, tokenizer_folder: str) -> tsjax.Model:
    """A model that says these tokens (all different) after <s>, and then </s>."""
    table = chain(TOKENS["<s>"], *ids(text), EOS_ID)
    return chain_model(table, vocab_size=len(TOKENS), path=tokenizer_folder, stop_ids=(EOS_ID,))


def tokens_of(result) -> list[list[int]]:
    return [row.tolist() for row in result.tokens]


def generate(model, prompt=PROMPT, **kwargs) -> list[list[int]]:
    return tokens_of(tsjax.generate(model, prompt, **kwargs))


@pytest.fixture
def one_step_chunks(monkeypatch):
    """The host looks at the state after every step."""
    monkeypatch.setattr(host_run, "_next_chunk", lambda steps, elapsed: 1)


# --- against the slow decoder ------------------------------------------------------------------

ORACLE_CASES = {
    "greedy": dict(),
    "penalty": dict(repetition_penalty=1.5),
    "penalty_window": dict(repetition_penalty=1.8, repetition_window=6),
    "penalty_below_one": dict(repetition_penalty=0.7, repetition_window=3),
    "suppress": dict(suppress_tokens=[22, 38, 45, 49]),
    "stop": dict(eos_token_id=[45, 23]),
    "min_new_tokens": dict(eos_token_id=45, min_new_tokens=16),
    "sample": dict(do_sample=True),
    "sample_cold": dict(do_sample=True, temperature=0.6, seed=3),
    "top_k": dict(do_sample=True, top_k=5, temperature=2.0),
    "top_p": dict(do_sample=True, top_p=0.7),
    "min_p": dict(do_sample=True, min_p=0.3, temperature=2.5),
    "epsilon": dict(do_sample=True, epsilon_cutoff=0.04),
    "eta": dict(do_sample=True, eta_cutoff=0.1),
    "keep": dict(do_sample=True, top_p=0.01, min_tokens_to_keep=3),
    "everything": dict(
        do_sample=True,
        temperature=1.7,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        epsilon_cutoff=3e-3,
        eta_cutoff=3e-3,
        repetition_penalty=1.2,
        repetition_window=8,
        suppress_tokens=[3, 17],
        eos_token_id=[45, 57],
        min_new_tokens=10,
        seed=2**32 - 1,
    ),
}


@pytest.mark.parametrize("name", ORACLE_CASES)
def test_tokens_are_those_of_the_slow_decoder(model, name):
    settings = ORACLE_CASES[name]
    expected = oracle(model, PROMPT, max_new_tokens=40, **settings)
    result = tsjax.generate(model, PROMPT, max_new_tokens=40, **settings)
    assert tokens_of(result) == [expected]
    assert result.finish_reason == ["length" if len(expected) == 40 else "eos"]


def test_the_cases_differ(model):
    """Guards the test above: every setting changes the tokens."""
    rows = [tuple(generate(model, max_new_tokens=40, **case)[0]) for case in ORACLE_CASES.values()]
    assert len(set(rows)) == len(rows)


# --- the same tokens, however they are asked for -----------------------------------------------

FULL_LENGTH = 30


def full_run(model, prompt=PROMPT, **settings):
    return generate(model, prompt, max_new_tokens=FULL_LENGTH, **settings)


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_of_a_batch_is_the_row_alone(model, settings):
    together = full_run(model, RAGGED, **settings)
    for index, prompt in enumerate(RAGGED):
        if index != 2:  # the repeated prompt
            assert [together[index]] == full_run(model, prompt, **settings)
    assert (together[2] != together[0]) == bool(settings)


def test_a_row_keeps_its_tokens_when_the_batch_is_reordered(model):
    """Also the second of two equal prompts; and one seed per row is the seed of that row alone."""
    together = full_run(model, RAGGED, **SAMPLED)
    order = [3, 0, 2, 1]
    assert full_run(model, [RAGGED[i] for i in order], **SAMPLED) == [together[i] for i in order]
    seeds = [11, 7, 12, 7]
    by_seed = full_run(model, RAGGED, **{**SAMPLED, "seed": seeds})
    assert by_seed[1] == together[1] and by_seed[3] == together[3]
    assert [by_seed[2]] == full_run(model, RAGGED[2], **{**SAMPLED, "seed": 12})
    assert by_seed[0] != by_seed[2]


@pytest.mark.parametrize("prefill_width", [1, 3, 16, 64, 512])
def test_the_prefill_width_changes_nothing(model, prefill_width):
    prompt = [(5 * i) % VOCAB for i in range(70)]
    expected = full_run(model, prompt, **SAMPLED)
    assert full_run(model, prompt, prefill_width=prefill_width, **SAMPLED) == expected


@pytest.mark.parametrize("capacity", [33, 1025])
def test_the_capacity_changes_nothing(model, capacity):
    # 33 is the least there is: 3 prompt tokens and 30 new ones.
    expected = full_run(model, **SAMPLED)
    assert full_run(model, capacity=capacity, prefill_width=2, **SAMPLED) == expected


@hypothesis.given(
    settings=st.fixed_dictionaries(
        {},
        optional={
            "do_sample": st.booleans(),
            "temperature": st.floats(0.2, 3.0),
            "top_k": st.integers(0, VOCAB + 5),
            "top_p": st.floats(0.05, 1.0),
            "min_p": st.floats(0.0, 0.5),
            "min_tokens_to_keep": st.integers(1, 4),
            "repetition_penalty": st.floats(0.8, 2.0),
            "repetition_window": st.none() | st.integers(1, 40),
            "min_new_tokens": st.integers(0, 12),
            "eos_token_id": st.lists(st.integers(0, VOCAB - 1), max_size=8),
            "suppress_tokens": st.lists(st.integers(0, VOCAB - 1), max_size=8),
            "seed": st.integers(0, 2**32 - 1),
        },
    ),
    max_new_tokens=st.integers(12, 40),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
@hypothesis.settings(max_examples=30)
def test_neither_batch_nor_chunks_nor_stream_nor_repetition_matter(
    settings, max_new_tokens, chunks
):
    """Any settings: run in one go, in odd chunks, streamed, alone, and once more."""
    model = tiny_model()
    settings = without_unread(settings) | {"max_new_tokens": max_new_tokens}
    whole = tsjax.generate(model, RAGGED, **settings)
    sizes = itertools.cycle(chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_run, "_next_chunk", lambda steps, elapsed: next(sizes))
        again = tsjax.generate(model, RAGGED, **settings)
        streamed = list(tsjax.stream(model, RAGGED, **settings))
    assert tokens_of(again) == tokens_of(whole)
    assert again.finish_reason == whole.finish_reason
    joined = [np.concatenate(rows) for rows in zip(*(c.tokens for c in streamed), strict=True)]
    assert [row.tolist() for row in joined] == tokens_of(whole)
    assert generate(model, RAGGED[3], **settings) == [tokens_of(whole)[3]]
    for row, reason in zip(whole.tokens, whole.finish_reason, strict=True):
        stops = set(settings.get("eos_token_id", []))
        assert (reason == "eos") == (row[-1] in stops)
        assert len(row) == max_new_tokens or reason == "eos"
        assert len(row) > settings.get("min_new_tokens", 0) or reason == "length"
        assert not stops & set(row[:-1].tolist())
        assert not set(settings.get("suppress_tokens", [])) & set(row.tolist())


# --- compiled once -----------------------------------------------------------------------------


def programs(names: list[str]) -> list[str]:
    """The large programs among the compiled functions; the others are single operations."""
    return [name for name in names if name in ("jit(decode)", "jit(read_part)")]


def test_what_changes_from_call_to_call_compiles_nothing(model):
    generate(model, max_new_tokens=8)
    with compilations() as names:
        for settings in (*ORACLE_CASES.values(), SAMPLED):
            generate(model, **{"max_new_tokens": 50, **settings})
        for count in (1, 7, 500, 2000):
            generate(model, max_new_tokens=count)
        for length in (2, 16, 17):  # up to 16 committed tokens is one bucket
            generate(model, list(range(length)), max_new_tokens=8)
        list(tsjax.stream(model, PROMPT, max_new_tokens=30))
    assert programs(names) == []


def test_a_prompt_of_another_bucket_compiles_one_more_prefill():
    model = tiny_model(num_layers=1)  # no other test has compiled anything for it
    with compilations() as names:
        for length in (3, 18, 25, 33):
            generate(model, list(range(length)), max_new_tokens=8)
    assert sorted(programs(names)) == ["jit(decode)", "jit(read_part)", "jit(read_part)"]


def test_methods_share_the_programs_of_the_prefill():
    """As do lazy prefills that part only when tokens come back."""
    model, prompt = tiny_model(num_layers=2, mlp_dim=40), list(range(20))
    with compilations() as names:
        for method in (None, "ngram", tsjax.TokenSwift(tree=(1,), num_ngrams=0)):
            generate(model, prompt, max_new_tokens=8, method=method)
    assert sorted(programs(names)) == ["jit(decode)"] * 3 + ["jit(read_part)"]
    with compilations() as names:
        for revive in ("on_demand", "never", "background"):
            lazy = tsjax.LazyPrefill(keep={1: 0.5}, revive=revive)
            generate(model, prompt, max_new_tokens=8, prefill=lazy)
    assert sorted(programs(names)) == ["jit(decode)"] * 3 + ["jit(read_part)"] * 2


def test_rows_that_the_host_ends_compile_nothing(talker, tmp_path):
    """Stop strings and resumed runs put flags into the state; its type must stay the same."""
    prompts, path = [[5], [6, 7]], tmp_path / "run.json"
    settings = dict(eos_token_id=(), save_to=path)
    text = tsjax.generate(talker, prompts, max_new_tokens=14, **settings).text
    stop = text[0][:3]
    assert stop not in text[1]
    with compilations() as names:
        part = tsjax.generate(talker, prompts, max_new_tokens=14, stop_strings=stop, **settings)
        result = tsjax.generate(talker, resume_from=path, max_new_tokens=60)
    assert part.finish_reason == ["stop_string", "length"]
    assert len(result.tokens[0]) == len(part.tokens[0]) and len(result.tokens[1]) > 14
    assert programs(names) == []


# --- the end of a row --------------------------------------------------------------------------


def test_rows_end_one_by_one():
    model = chain_model({**chain(1, 2, 3, 4, 5), 7: 8, 8: 7}, stop_ids=(4,))
    result = tsjax.generate(model, [[1], [7], [3], [7, 1, 2]], max_new_tokens=6)
    assert tokens_of(result) == [[2, 3, 4], [8, 7, 8, 7, 8, 7], [4], [3, 4]]
    assert result.finish_reason == ["eos", "length", "eos", "eos"]
    assert result.stats.new_tokens == result.stats.steps == (3, 6, 1, 2)
    assert result.stats.prompt_tokens == (1, 1, 1, 3)
    assert result.stats.tokens_per_step == 1.0
    assert all(row.dtype == np.int32 for row in result.tokens)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 17])
def test_exactly_max_new_tokens(model, max_new_tokens):
    result = tsjax.generate(model, RAGGED, max_new_tokens=max_new_tokens)
    assert [len(row) for row in result.tokens] == [max_new_tokens] * len(RAGGED)
    assert result.finish_reason == ["length"] * len(RAGGED)


@pytest.mark.parametrize(
    ("eos_token_id", "expected"),
    [
        (None, [2, 3]),  # the model's own
        ((), [2, 3, 4, 5, 6, 0, 0, 0]),
        (5, [2, 3, 4, 5]),
        ([6, 4], [2, 3, 4]),
        (np.asarray([6, 5]), [2, 3, 4, 5]),
    ],
)
def test_stop_tokens(eos_token_id, expected):
    model = chain_model(chain(1, 2, 3, 4, 5, 6), stop_ids=(3,))
    assert generate(model, [1], max_new_tokens=8, eos_token_id=eos_token_id) == [expected]


def test_a_checkpoints_stop_ids_beyond_its_vocabulary_are_dropped():
    model = chain_model(chain(1, 2, 3, 4), stop_ids=(3, 128001))
    assert generate(model, [1], max_new_tokens=8) == [[2, 3]]


def test_a_stop_token_in_the_prompt_stops_nothing():
    model = chain_model(chain(1, 2, 3, 4), stop_ids=(2, 4))
    assert generate(model, [1, 2], max_new_tokens=8) == [[3, 4]]


def test_min_new_tokens_bars_every_stop_token(model):
    stops = sorted(set(full_run(model)[0]))  # all that a free run would say
    for least in (0, 1, 5):
        result = tsjax.generate(
            model, PROMPT, max_new_tokens=40, min_new_tokens=least, eos_token_id=stops
        )
        assert not set(stops) & set(result.tokens[0][:least].tolist())
        assert len(result.tokens[0]) > least


# --- stop strings ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "expected"),
    [
        ("▁the ▁a b c", "a", "▁the ▁a"),
        ("▁the ▁a b c", "e ab", "▁the ▁a b"),  # across three tokens
        ("▁the ▁a b c", "the", "▁the"),  # the space before it is stripped from the text
        ("▁the ▁a b c", " the", None),
        ("▁the ▁a b c", "bc</s>", None),  # special tokens are no text
        ("a <0xE2> <0x82> <0xAC> b", "€", "a <0xE2> <0x82> <0xAC>"),
        ("a <0xE2> <0x82> <0xAC> b", "a€b", "a <0xE2> <0x82> <0xAC> b"),
        ("a <0x0A> b", "\n", "a <0x0A>"),
        ("a <0x0A> b", "a\nb", "a <0x0A> b"),
        ("a b c d e", ["de", "cd", "zz"], "a b c d"),  # whichever is complete first
        ("a b c d e", ["abcd", "c"], "a b c"),
    ],
)
def test_stop_strings(said, stop, expected, chunked, tokenizer_folder, monkeypatch):
    """The tokens end with the one that completes the string."""
    if chunked:
        monkeypatch.setattr(host_run, "_next_chunk", lambda steps, elapsed: 1)
    model = sayer(said, tokenizer_folder)
    result = tsjax.generate(model, [TOKENS["<s>"]], max_new_tokens=9, stop_strings=stop)
    assert tokens_of(result) == [ids(expected) if expected else [*ids(said), EOS_ID]]
    assert result.finish_reason == ["stop_string" if expected else "eos"]


@hypothesis.given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(
    max_examples=25, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_the_first_token_that_completes_a_stop_string_is_the_last(data, seed, talker):
    """Against the definition: decode the prompt and every prefix, and look after the prompt."""
    prompt = [TOKENS["<s>"], TOKENS["▁the"], TOKENS["re"]]
    settings = dict(max_new_tokens=60, do_sample=True, temperature=1.5, seed=seed, eos_token_id=())
    whole = tsjax.generate(talker, prompt, **settings)
    start = data.draw(st.integers(0, max(len(whole.text) - 1, 0)))
    length = data.draw(st.integers(1, 5))
    random = data.draw(st.text("aet \n€", min_size=1))
    stops = [whole.text[start : start + length] or "a", random, "there"]
    chunk = data.draw(st.integers(1, 60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_run, "_next_chunk", lambda steps, elapsed: chunk)
        result = tsjax.generate(talker, prompt, stop_strings=stops, **settings)
    everything = tokens_of(whole)[0]
    for count in range(1, len(everything) + 1):
        text = tsjax.files.tokenizer.decode_text(talker.tokenizer, prompt + everything[:count])
        if any(text.find(stop, max(0, len("there") + 1 - len(stop))) >= 0 for stop in stops):
            assert result.finish_reason == ["stop_string"]
            break
    else:
        assert result.finish_reason == ["length"]
    assert tokens_of(result) == [everything[:count]]


@pytest.mark.parametrize("stop", ["e rain", "ain", " rain"])
def test_a_stop_string_may_begin_in_the_prompt(stop, tokenizer_folder):
    words = [TOKENS[token] for token in ("▁the", "▁", "r", "a", "in", "s")]
    model = chain_model(chain(*words), vocab_size=len(TOKENS), path=tokenizer_folder)
    result = tsjax.generate(model, words[:2], max_new_tokens=9, stop_strings=stop)
    assert tokens_of(result) == [words[2:5]] and result.finish_reason == ["stop_string"]
    assert result.text == "rain"


def test_the_text_continues_the_prompts(talker):
    prompt = talker.tokenizer("the rain")["input_ids"]
    result = tsjax.generate(talker, prompt, max_new_tokens=12, do_sample=True, seed=3)
    whole = talker.tokenizer.decode(prompt + tokens_of(result)[0], skip_special_tokens=True)
    assert "the rain" + result.text == whole


def test_steps_thrown_away_after_a_stop_string_count_with_their_tokens(talker, monkeypatch):
    free = tsjax.generate(talker, PROMPT, max_new_tokens=40, eos_token_id=())
    monkeypatch.setattr(host_run, "_next_chunk", lambda steps, elapsed: 40)
    stop = free.text[:2]
    result = tsjax.generate(
        talker, PROMPT, max_new_tokens=40, eos_token_id=(), stop_strings=[stop], min_new_tokens=0
    )
    assert result.finish_reason == ["stop_string"] and len(result.tokens[0]) < 40
    assert result.stats.tokens_per_step == 1.0


def test_a_special_token_can_be_a_stop_string(tokenizer_folder):
    words = [TOKENS[token] for token in ("he", "w", "</s>", "r")]
    model = chain_model(chain(*words), vocab_size=len(TOKENS), path=tokenizer_folder)
    for stop, count in (("</s>", 2), ("w</s>", 2), ("s", 9), ("w", 1)):  # "s" is in no text
        result = tsjax.generate(model, words[:1], max_new_tokens=9, stop_strings=stop)
        assert len(result.tokens[0]) == count
        assert result.finish_reason == ["stop_string" if count < 9 else "length"]


def test_a_stop_string_ends_its_own_row_only(talker):
    prompts = [[4, 5], [6]]
    settings = dict(max_new_tokens=40, do_sample=True, seed=1, eos_token_id=())
    free = tsjax.generate(talker, prompts, **settings)
    stop = free.text[1][4:9]
    assert stop not in free.text[0]
    result = tsjax.generate(talker, prompts, stop_strings=stop, **settings)
    assert result.finish_reason == ["length", "stop_string"]
    assert tokens_of(result)[0] == tokens_of(free)[0]
    count = len(result.tokens[1])
    assert count < 40 and tokens_of(result)[1] == tokens_of(free)[1][:count]


# --- text and streaming ------------------------------------------------------------------------


def test_padding_of_a_single_row_is_left_out(model):
    encoded = {"input_ids": [3, 1, 4, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}
    assert generate(model, encoded) == generate(model, [3, 1, 4])


def test_padding_of_a_tokenizers_output_is_left_out(model):
    encoded = {"input_ids": [[1, 2, 3], [0, 0, 5]], "attention_mask": [[1, 1, 1], [0, 0, 1]]}
    assert generate(model, encoded) == generate(model, [[1, 2, 3], [5]])


def test_prompts_as_text(talker):
    result = tsjax.generate(talker, "the rain", max_new_tokens=12)
    assert isinstance(result.text, str)
    assert result.text == tsjax.files.tokenizer.decode_text(talker.tokenizer, result.tokens[0])
    encoded = talker.tokenizer("the rain")
    for same in (encoded["input_ids"], encoded, [encoded["input_ids"]]):
        assert generate(talker, same, max_new_tokens=12) == tokens_of(result)
    batch = tsjax.generate(talker, ["the rain", "a tin"], max_new_tokens=12)
    assert isinstance(batch.text, list) and batch.text[0] == result.text
    assert tsjax.generate(talker, ["the rain"], max_new_tokens=12).text == [result.text]


def test_prompts_of_every_type(model):
    expected = full_run(model)
    for prompt in (tuple(PROMPT), np.asarray(PROMPT, np.int64), jax.numpy.asarray(PROMPT)):
        assert full_run(model, prompt) == expected
    for prompt in (np.asarray([PROMPT], np.uint8), [np.asarray(PROMPT)], (tuple(PROMPT),)):
        assert full_run(model, prompt) == expected


def test_text_needs_a_tokenizer_only_when_it_is_asked_for(model):
    result = tsjax.generate(model, PROMPT, max_new_tokens=3)
    with pytest.raises(ValueError, match="no tokenizer"):
        _ = result.text
    assert all(chunk.text is None for chunk in tsjax.stream(model, PROMPT, max_new_tokens=3))


@pytest.mark.parametrize("prompt", ["the rain", ["a tin", "a tin"]])
def test_chunks_of_a_stream_join_to_the_result(talker, prompt):
    settings = dict(max_new_tokens=80, do_sample=True, temperature=2.0, seed=3)
    result = tsjax.generate(talker, prompt, **settings)
    chunks = list(tsjax.stream(talker, prompt, **settings))
    rows = len(result.tokens)
    assert len(chunks) > 1
    for row in range(rows):
        tokens = np.concatenate([chunk.tokens[row] for chunk in chunks])
        np.testing.assert_array_equal(tokens, result.tokens[row])
        reasons = [c.finish_reason[row] for c in chunks if c.finish_reason[row] is not None]
        assert reasons == [result.finish_reason[row]]
    text = ["".join(chunk.text[row] for chunk in chunks) for row in range(rows)]
    assert text == ([result.text] if isinstance(prompt, str) else result.text)


def test_finish_reason_comes_with_the_last_tokens_of_its_row(one_step_chunks):
    model = chain_model({**chain(1, 2, 3, 4), 7: 7}, stop_ids=(4,))
    chunks = list(tsjax.stream(model, [[1], [7]], max_new_tokens=5))
    assert [chunk.finish_reason for chunk in chunks] == [
        [None, None], [None, None], ["eos", None], [None, None], [None, "length"]
    ]  # fmt: skip
    assert [len(chunk.tokens[0]) for chunk in chunks] == [1, 1, 1, 0, 0]


def test_a_stream_checks_at_the_call_and_can_be_left(model):
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        tsjax.stream(model, PROMPT, temprature=0.5)
    with pytest.raises(ValueError, match="prompt"):
        tsjax.stream(model, [])
    before = handlers()
    for _ in tsjax.stream(model, PROMPT, max_new_tokens=1000):
        assert handlers() == before  # taken while a chunk runs, and given back
        break
    assert handlers() == before


def test_a_streamer_gets_the_prompt_and_then_every_token(model):
    streamer = RecordingStreamer()
    result = tsjax.generate(model, PROMPT, max_new_tokens=25, streamer=streamer)
    assert streamer.prompt == PROMPT and streamer.ended
    assert [streamer.tokens] == tokens_of(result)


def test_transformers_text_streamer(talker, capsys):
    from transformers import TextStreamer

    streamer = TextStreamer(talker.tokenizer, skip_prompt=True, skip_special_tokens=True)
    result = tsjax.generate(
        talker, "the rain", max_new_tokens=30, do_sample=True, seed=5, streamer=streamer
    )
    # Its text begins anew after the prompt; ours continues the prompt's.
    assert capsys.readouterr().out.strip() == result.text.strip()


def test_progress_goes_to_stderr(model, capsys):
    tsjax.generate(model, PROMPT, max_new_tokens=25, progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "25/25" in captured.err and "1.00 tok/step" in captured.err


# --- interrupts --------------------------------------------------------------------------------

MANY = 20_000


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def send(number: int, after: int):
    """For a RecordingStreamer: sends this process a signal when this many tokens have come."""

    def act(count: int):
        if count == after:
            os.kill(os.getpid(), number)

    return act


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_what_there_is(model, number, on_interrupt):
    before = handlers()
    streamer = RecordingStreamer(send(number, after=5))
    run = functools.partial(
        tsjax.generate, model, PROMPT, max_new_tokens=MANY, streamer=streamer, **SAMPLED
    )
    if on_interrupt == "raise":
        result = interrupted(run)
    else:
        result = run(on_interrupt="return")
    assert result.finish_reason == ["interrupted"]
    assert 5 <= len(result.tokens[0]) < MANY
    assert streamer.ended and [streamer.tokens] == tokens_of(result)
    assert handlers() == before
    # It is a prefix of the whole run; the capacity is named to share the compiled program.
    count = len(result.tokens[0])
    assert tokens_of(result) == generate(model, max_new_tokens=count, capacity=32768, **SAMPLED)


def interrupted(call) -> tsjax.GenerationResult:
    with pytest.raises(tsjax.Interrupted) as raised:
        call()
    return raised.value.result


def test_a_signal_from_outside_while_the_device_works(model):
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    result = interrupted(lambda: tsjax.generate(model, PROMPT, max_new_tokens=MANY))
    timer.join()
    assert result.finish_reason == ["interrupted"]


class BeforeTheFirstToken(RecordingStreamer):
    def put(self, value):  # the prompt is put before anything is computed
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_before_the_first_step_gives_no_tokens(model, tmp_path):
    settings = dict(max_new_tokens=30, streamer=BeforeTheFirstToken())
    path = tmp_path / "run.json"
    result = interrupted(lambda: tsjax.generate(model, PROMPT, save_to=path, **settings))
    assert result.finish_reason == ["interrupted"] and tokens_of(result) == [[]]
    assert result.stats.steps == (0,)
    assert generate(model, None, resume_from=path) == generate(model, max_new_tokens=30)


def test_a_signal_during_the_prefill_ends_it(model, monkeypatch):
    """Also where the device is still compiling: the handler runs when it is done."""
    real, passes = host_run.programs_of, []

    def signalled(model):
        def read_part(*args, **kwargs):
            passes.append(args)
            os.kill(os.getpid(), signal.SIGTERM)
            return real(model).read_part(*args, **kwargs)

        return real(model)._replace(read_part=read_part)

    monkeypatch.setattr(host_run, "programs_of", signalled)
    result = interrupted(
        lambda: tsjax.generate(model, PROMPT * 9, prefill_width=8, max_new_tokens=9)
    )
    assert len(passes) == 1 and result.finish_reason == ["interrupted"]
    assert tokens_of(result) == [[]]


def test_a_signal_in_the_last_chunk_ends_a_loop_of_runs(model):
    """Nothing of this run is missing, but the next one must not begin."""
    streamer = RecordingStreamer(send(signal.SIGTERM, after=25))
    result = interrupted(
        lambda: tsjax.generate(model, PROMPT, max_new_tokens=25, streamer=streamer)
    )
    assert result.finish_reason == ["length"] and tokens_of(result) == [streamer.tokens]


@pytest.mark.parametrize("value", ["stop", None, True])
def test_what_follows_an_interrupt_is_checked(model, value):
    for function in (tsjax.generate, tsjax.stream):
        with pytest.raises(ValueError, match="on_interrupt=.*: 'raise' or 'return'"):
            function(model, PROMPT, on_interrupt=value)


def test_a_second_ctrl_c_raises(model):
    before = handlers()

    def twice(count: int):
        if count == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        streamer = RecordingStreamer(twice)
        tsjax.generate(model, PROMPT, max_new_tokens=MANY, streamer=streamer, **SAMPLED)
    assert handlers() == before


def test_an_error_in_a_streamer_restores_the_handlers(model):
    before = handlers()

    def fail(count: int):
        raise RuntimeError("from the streamer")

    with pytest.raises(RuntimeError, match="from the streamer"):
        tsjax.generate(model, PROMPT, streamer=RecordingStreamer(fail))
    assert handlers() == before


def test_outside_the_main_thread_signals_are_left_alone(model):
    results = []
    thread = threading.Thread(target=lambda: results.append(full_run(model)))
    thread.start()
    thread.join()
    assert results == [full_run(model)]


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
def test_a_stream_ends_with_the_chunk_that_was_interrupted(model, monkeypatch, on_interrupt):
    expected, before = full_run(model), handlers()
    interrupt_chunk(monkeypatch, 3, steps=4)
    stream = tsjax.stream(model, PROMPT, max_new_tokens=FULL_LENGTH, on_interrupt=on_interrupt)
    chunks = []
    for _ in range(3):
        chunks.append(next(stream))
        assert handlers() == before  # a signal between chunks is the caller's
    assert [chunk.finish_reason for chunk in chunks] == [[None], [None], ["interrupted"]]
    assert np.concatenate([chunk.tokens[0] for chunk in chunks]).tolist() == expected[0][:9]
    if on_interrupt == "raise":
        assert tokens_of(interrupted(lambda: next(stream))) == [expected[0][:9]]
    assert list(stream) == []


def interrupt_chunk(monkeypatch, number: int, steps: int):
    """Chunks of `steps` steps after a first one of 1; Ctrl-C while the device works on one."""
    real, calls = host_run.programs_of, []

    def signalled(model):
        def decode(*args, **kwargs):
            calls.append(args)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGINT)
            return real(model).decode(*args, **kwargs)

        return real(model)._replace(decode=decode)

    monkeypatch.setattr(host_run, "programs_of", signalled)
    monkeypatch.setattr(host_run, "_next_chunk", lambda *_: steps)


# --- saved runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_an_interrupted_run_goes_on_with_the_same_tokens(model, settings, tmp_path, monkeypatch):
    """A batch; row 0 has ended before the interrupt, row 2 (its twin, when sampled) has not."""
    sampled = bool(settings)
    settings = dict(settings, max_new_tokens=40, min_new_tokens=3)
    settings["eos_token_id"] = generate(model, RAGGED, **settings)[0][4]
    whole = tsjax.generate(model, RAGGED, **settings)
    with monkeypatch.context() as patch:
        interrupt_chunk(patch, 3, steps=6)
        part = interrupted(
            lambda: tsjax.generate(model, RAGGED, save_to=tmp_path / "run.json", **settings)
        )
    assert part.finish_reason[0] == "eos" and "interrupted" in part.finish_reason
    assert part.finish_reason[2] == ("interrupted" if sampled else "eos")
    for row, expected in zip(tokens_of(part), tokens_of(whole), strict=True):
        assert row == expected[: len(row)]
    resumed = tsjax.generate(model, resume_from=tmp_path / "run.json")
    assert tokens_of(resumed) == tokens_of(whole)
    assert resumed.finish_reason == whole.finish_reason
    assert resumed.stats.prompt_tokens == whole.stats.prompt_tokens
    assert resumed.stats.new_tokens == whole.stats.new_tokens
    computed = sum(whole.stats.new_tokens) - sum(part.stats.new_tokens)
    assert resumed.stats.computed_tokens == sum(resumed.stats.steps) == computed


def test_a_stop_string_is_found_across_the_interrupt(tokenizer_folder, tmp_path, monkeypatch):
    model, path = sayer("▁the ▁a b c d", tokenizer_folder), tmp_path / "run.json"
    interrupt_chunk(monkeypatch, 3, steps=1)
    settings = dict(max_new_tokens=9, stop_strings="abc")
    part = interrupted(lambda: tsjax.generate(model, [TOKENS["<s>"]], save_to=path, **settings))
    assert tokens_of(part) == [ids("▁the ▁a b")]
    result = tsjax.generate(model, resume_from=path)
    assert tokens_of(result) == [ids("▁the ▁a b c")] and result.finish_reason == ["stop_string"]
    assert result.text == "the abc"  # a single prompt stays one


def test_a_killed_process_goes_on_from_its_last_save(model, tmp_path):
    path = tmp_path / "run.json"
    script = f"""
        import os, signal
        import jax

        jax.config.update("jax_num_cpu_devices", 4)
        from helpers import RecordingStreamer, tiny_model
        import tsjax

        def kill(count):
            if count == 21:  # in the chunk after the one that was saved with 20 tokens or less
                os.kill(os.getpid(), signal.SIGKILL)

        tsjax.generate(tiny_model(), {PROMPT}, max_new_tokens=40, save_to={os.fspath(path)!r},
                       save_every=1, streamer=RecordingStreamer(kill), **{SAMPLED})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    expected = generate(model, max_new_tokens=40, **SAMPLED)[0]
    saved = json.loads(path.read_text())["tokens"][0]
    assert 0 < len(saved) <= 21 and saved == expected[: len(saved)]
    assert sorted(os.listdir(tmp_path)) == ["run.json", "run.json.lock"]
    assert generate(model, None, resume_from=path, save_to=path) == [expected]
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize("max_new_tokens", [20, 21, 45])
def test_a_finished_run_can_be_extended(model, tmp_path, max_new_tokens):
    path = tmp_path / "run.json"
    generate(model, RAGGED, max_new_tokens=20, save_to=path, **SAMPLED)
    longer = generate(model, None, resume_from=path, max_new_tokens=max_new_tokens)
    assert longer == generate(model, RAGGED, max_new_tokens=max_new_tokens, **SAMPLED)


def test_a_finished_run_is_returned_again(model, tmp_path):
    path = tmp_path / "run.json"
    expected = tsjax.generate(model, PROMPT, max_new_tokens=20, save_to=path)
    again = tsjax.generate(model, PROMPT, resume_from=path)
    assert tokens_of(again) == tokens_of(expected)
    assert again.finish_reason == expected.finish_reason
    assert again.stats.computed_tokens == 0 and again.stats.tokens_per_second == 0.0


def test_a_resumed_run_can_be_saved_to_the_same_file(model, tmp_path):
    path = tmp_path / "run.json"
    generate(model, max_new_tokens=10, save_to=path, **SAMPLED)
    generate(model, None, resume_from=path, save_to=path, max_new_tokens=20)
    longer = generate(model, None, resume_from=path, max_new_tokens=30)
    assert longer == generate(model, max_new_tokens=30, **SAMPLED)


def test_the_file_is_written_every_so_many_tokens(model, tmp_path, monkeypatch, one_step_chunks):
    counts, real = [], saving.write_run

    def write(path, run):
        counts.append(len(run.tokens[0]))
        real(path, run)

    monkeypatch.setattr(saving, "write_run", write)
    generate(model, max_new_tokens=35, save_to=tmp_path / "run.json", save_every=10)
    assert counts == [10, 20, 30, 35]


def test_numpy_settings_can_be_saved(model, tmp_path):
    path = tmp_path / "run.json"
    settings = dict(temperature=np.float32(0.5), suppress_tokens=[np.int64(3)], top_k=np.int64(5))
    whole = generate(model, max_new_tokens=np.int64(9), do_sample=True, save_to=path, **settings)
    assert generate(model, None, resume_from=path) == whole
    assert os.stat(path).st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_linked_file_stays_linked(model, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "run.json")
    generate(model, max_new_tokens=3, save_to=tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "run.json").is_file()


def test_resuming_with_just_the_tokens_that_were_made(model, tmp_path, monkeypatch):
    expected, path = full_run(model), tmp_path / "run.json"
    interrupt_chunk(monkeypatch, 3, steps=4)
    settings = dict(max_new_tokens=FULL_LENGTH, save_to=path, on_interrupt="return")
    assert generate(model, **settings) == [expected[0][:9]]
    result = tsjax.generate(model, resume_from=path, max_new_tokens=9)
    assert tokens_of(result) == [expected[0][:9]] and result.finish_reason == ["length"]


def test_a_failed_write_leaves_the_file_before_it(model, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    generate(model, max_new_tokens=10, save_to=path)
    before = path.read_bytes()

    def full(handle):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="run.json' was not written: no space left"):
        result = tsjax.generate(model, PROMPT, max_new_tokens=20, save_to=path)
    assert len(result.tokens[0]) == 20 and result.unsaved
    assert result.problems == (f"save_to={str(path)!r} was not written: no space left on device",)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["run.json"]


# --- on a mesh ---------------------------------------------------------------------------------


def on_mesh(shape: dict[str, int], **changes) -> tsjax.Model:
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape))  # with Explicit axes
    return tiny_model(mesh=mesh, num_layers=1, **changes)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ({"model": 4}, {"vocab_size": 64, "num_kv_heads": 4}),
        ({"model": 4}, {"num_heads": 6, "num_kv_heads": 3}),  # only the mlp can be cut in 4
        ({"model": 2}, {"num_kv_heads": 1}),  # and query heads, as kernels are on each device
        ({"data": 2, "model": 2}, {}),
    ],
)
def test_a_mesh_gives_the_same_tokens(shape, changes):
    placed, single = on_mesh(shape, **changes), tiny_model(num_layers=1, **changes)
    assert not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(placed.params))
    assert full_run(placed, RAGGED, **SAMPLED) == full_run(single, RAGGED, **SAMPLED)
    logits = tsjax.forward(placed, [PROMPT])
    np.testing.assert_allclose(logits, tsjax.forward(single, [PROMPT]), atol=2e-5)


def test_a_batch_that_the_mesh_does_not_divide_compiles_once():
    model = on_mesh({"data": 2, "model": 2})
    expected = full_run(tiny_model(num_layers=1))
    assert full_run(model) == expected
    with compilations() as names:
        for _ in range(4):
            assert full_run(model) == expected
        generate(model, max_new_tokens=50, eos_token_id=45)
    assert programs(names) == []


def test_an_unknown_mesh_axis_is_refused(tmp_path):
    mesh = jax.make_mesh((4,), ("tensor",))
    with pytest.raises(ValueError, match=r"'tensor'.*use 'data' and 'model' and 'slots'"):
        tsjax.load(tmp_path, mesh=mesh)


# --- settings ----------------------------------------------------------------------------------


def test_settings_override_the_config(model):
    config = tsjax.GenerationConfig(max_new_tokens=25, do_sample=True, seed=1)
    by_config = generate(model, config=config)
    assert by_config == generate(model, max_new_tokens=25, do_sample=True, seed=1)
    assert generate(model, config=config, seed=2) != by_config
    assert generate(model, config=config, max_new_tokens=9) == [by_config[0][:9]]
    assert config == tsjax.GenerationConfig(max_new_tokens=25, do_sample=True, seed=1)


@pytest.mark.parametrize("method", ["autoregressive", tsjax.Autoregressive()])
def test_methods_by_name_and_by_dataclass(model, method):
    result = tsjax.generate(model, PROMPT, method=method, max_new_tokens=25)
    assert tokens_of(result) == generate(model, max_new_tokens=25)
    assert result.stats.tokens_per_step == 1.0
    assert result.stats.decode_seconds > 0 and result.stats.tokens_per_second > 0


def test_beyond_the_positions_of_the_model_on_request(model):
    short = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, max_positions=16))
    assert len(generate(short, max_new_tokens=13)[0]) == 13
    with pytest.raises(ValueError, match="exceed_max_positions=True"):
        generate(short, max_new_tokens=14)
    longer = generate(short, max_new_tokens=14, exceed_max_positions=True)
    assert longer == generate(model, max_new_tokens=14)

# SPDX-License-Identifier: Apache-2.0
"""generate() and stream(): the tokens, who decides when a row ends, streaming and saved runs.

The tokens are checked against a decoder in NumPy that shares nothing with tsjax but the noise
(helpers.oracle). Most other tests need no oracle: they say which calls must agree.
"""

import dataclasses
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from helpers import (
    EOS_ID,
    TOKENS,
    RecordingStreamer,
    chain,
    chain_model,
    oracle,
    save_tokenizer,
    tiny_model,
)

import tsjax
from tsjax.host import run as host_run
from tsjax.host import saving
from tsjax.host.run import seconds_per_chunk

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

# What each processor alone does is in test_sampling.py.
ORACLE_CASES = {
    "greedy": dict(),
    "penalty": dict(repetition_penalty=1.8, repetition_window=6),
    "suppress": dict(suppress_tokens=[22, 38, 45, 49]),
    "min_new_tokens": dict(eos_token_id=45, min_new_tokens=16),
    "sample": dict(do_sample=True),
    "everything": dict(
        do_sample=True, temperature=1.7, top_k=20, top_p=0.9, min_p=0.01, epsilon_cutoff=3e-3,
        eta_cutoff=3e-3, min_tokens_to_keep=1, repetition_penalty=1.2, repetition_window=8,
        suppress_tokens=[3, 17], eos_token_id=[45, 57], min_new_tokens=10, seed=2**32 - 1,
    ),
}  # fmt: skip


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


def test_a_row_keeps_its_tokens_alone_and_in_any_order(model):
    """Also the second of two equal prompts; and one seed per row is the seed of that row alone."""
    together = full_run(model, RAGGED, **SAMPLED)
    for index in (0, 1, 3):
        assert [together[index]] == full_run(model, RAGGED[index], **SAMPLED)
    order = [3, 0, 2, 1]
    assert full_run(model, [RAGGED[i] for i in order], **SAMPLED) == [together[i] for i in order]
    by_seed = full_run(model, RAGGED, **{**SAMPLED, "seed": [11, 7, 12, 7]})
    assert by_seed[1] == together[1] and by_seed[3] == together[3]
    assert [by_seed[2]] == full_run(model, RAGGED[2], **{**SAMPLED, "seed": 12})
    assert by_seed[0] != by_seed[2] and together[0] != together[2]


def test_the_capacity_changes_nothing(model):
    exact = len(PROMPT) + FULL_LENGTH
    found = full_run(model, capacity=exact, prefill_width=2, **SAMPLED)
    assert found == full_run(model, **SAMPLED)


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


@pytest.mark.parametrize(
    ("stop_ids", "eos_token_id", "expected"),
    [
        ((3, 128001), None, [2, 3]),  # the model's own; the other is of no vocabulary
        ((1, 4), None, [2, 3, 4]),  # one is of the prompt
        ((3,), (), [2, 3, 4, 5, 6, 0, 0, 0]),
        ((3,), 5, [2, 3, 4, 5]),
        ((3,), np.asarray([6, 5]), [2, 3, 4, 5]),
    ],
)
def test_stop_tokens(stop_ids, eos_token_id, expected):
    model = chain_model(chain(1, 2, 3, 4, 5, 6), stop_ids=stop_ids)
    assert generate(model, [1], max_new_tokens=8, eos_token_id=eos_token_id) == [expected]


# --- stop strings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "stop", "expected"),
    [
        ("▁the ▁a b c", "e ab", "▁the ▁a b"),  # across three tokens
        ("▁the ▁a b c", "the", "▁the"),  # the space before it is stripped from the text
        ("▁the ▁a b c", " the", None),
        ("▁the ▁a b c", "bc</s>", None),  # special tokens are no text
        ("a <0xE2> <0x82> <0xAC> b", "€", "a <0xE2> <0x82> <0xAC>"),
        ("a <0x0A> b", "\n", "a <0x0A>"),
        ("a b c d e", ["de", "cd", "zz"], "a b c d"),  # whichever is complete first
        ("a b c d e", ["abcd", "c"], "a b c"),
    ],
)
def test_stop_strings(said, stop, expected, tokenizer_folder, monkeypatch):
    """The tokens end with the one that completes the string."""
    model = sayer(said, tokenizer_folder)
    for _ in ("in one chunk", "in a chunk for each token"):
        result = tsjax.generate(model, [TOKENS["<s>"]], max_new_tokens=9, stop_strings=stop)
        assert tokens_of(result) == [ids(expected) if expected else [*ids(said), EOS_ID]]
        assert result.finish_reason == ["stop_string" if expected else "eos"]
        assert result.stats.tokens_per_step == 1.0  # steps that are thrown away are not counted
        monkeypatch.setattr(host_run, "_next_chunk", lambda steps, elapsed: 1)


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


def test_a_special_token_can_be_a_stop_string(tokenizer_folder):
    words = [TOKENS[token] for token in ("he", "w", "</s>", "r")]
    model = chain_model(chain(*words), vocab_size=len(TOKENS), path=tokenizer_folder)
    for stop, count in (("</s>", 2), ("w</s>", 2), ("s", 9), ("w", 1)):  # "s" is in no text
        result = tsjax.generate(model, words[:1], max_new_tokens=9, stop_strings=stop)
        assert len(result.tokens[0]) == count
        assert result.finish_reason == ["stop_string" if count < 9 else "length"]


# --- text and streaming ------------------------------------------------------------------------


def test_prompts_of_every_type_and_without_their_padding(model):
    expected = generate(model, max_new_tokens=9)
    for same in (
        tuple(PROMPT),
        np.asarray(PROMPT, np.int64),
        jax.numpy.asarray([PROMPT]),
        [np.asarray(PROMPT)],
        {"input_ids": [*PROMPT, 0, 0], "attention_mask": [1, 1, 1, 0, 0]},
        {"input_ids": [[0, *PROMPT]], "attention_mask": [[0, 1, 1, 1]]},
    ):
        assert generate(model, same, max_new_tokens=9) == expected


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
    for prompt, name in (("", "prompt=''"), (["a", ""], r"prompt\[1\]=''")):
        with pytest.raises(ValueError, match=f"{name}.*not empty"):
            tsjax.generate(talker, prompt)


def test_text_needs_a_tokenizer_only_when_it_is_asked_for(model):
    result = tsjax.generate(model, PROMPT, max_new_tokens=3)
    with pytest.raises(ValueError, match="no tokenizer"):
        _ = result.text
    assert all(chunk.text is None for chunk in tsjax.stream(model, PROMPT, max_new_tokens=3))


def test_chunks_of_a_stream_join_to_the_result(talker):
    settings = dict(max_new_tokens=80, do_sample=True, temperature=2.0, seed=3)
    result = tsjax.generate(talker, ["a tin", "a tin"], **settings)
    chunks = list(tsjax.stream(talker, ["a tin", "a tin"], **settings))
    assert len(chunks) > 1
    for row, text in enumerate(result.text):
        tokens = np.concatenate([chunk.tokens[row] for chunk in chunks])
        np.testing.assert_array_equal(tokens, result.tokens[row])
        reasons = [c.finish_reason[row] for c in chunks if c.finish_reason[row] is not None]
        assert reasons == [result.finish_reason[row]]
        assert "".join(chunk.text[row] for chunk in chunks) == text


def test_only_runs_that_nobody_reads_along_have_long_chunks_on_a_gpu(talker, monkeypatch):
    """And none that the host cuts."""
    seconds = []

    def told(_, *given):
        seconds.append((seconds_per_chunk("gpu", *given), seconds_per_chunk("cpu", *given)))
        return seconds[-1][1]

    monkeypatch.setattr(host_run, "seconds_per_chunk", told)
    streamer = SimpleNamespace(put=lambda _: None, end=lambda: None)
    for settings in (
        {}, {"streamer": streamer}, {"stop_strings": "never said"},
        {"repetition_detection": (1, 4, 9)},
    ):  # fmt: skip
        tsjax.generate(talker, "a tin", max_new_tokens=2, **settings)
    list(tsjax.stream(talker, "a tin", max_new_tokens=2))
    assert seconds == [(1.0, 0.2), *[(0.2, 0.2)] * 4]


def test_finish_reason_comes_with_the_last_tokens_of_its_row(one_step_chunks):
    model = chain_model({**chain(1, 2, 3, 4), 7: 7}, stop_ids=(4,))
    chunks = list(tsjax.stream(model, [[1], [7]], max_new_tokens=5))
    assert [chunk.finish_reason for chunk in chunks] == [
        [None, None], [None, None], ["eos", None], [None, None], [None, "length"]
    ]  # fmt: skip
    assert [len(chunk.tokens[0]) for chunk in chunks] == [1, 1, 1, 0, 0]


def test_a_stream_checks_at_the_call(model):
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        tsjax.stream(model, PROMPT, temprature=0.5)
    with pytest.raises(ValueError, match="prompt"):
        tsjax.stream(model, [])


def test_a_streamer_gets_the_prompt_and_then_every_token(model):
    streamer = RecordingStreamer()
    result = tsjax.generate(model, PROMPT, max_new_tokens=25, streamer=streamer)
    assert streamer.prompt == PROMPT and streamer.ended
    assert [streamer.tokens] == tokens_of(result)


def test_progress_goes_to_stderr(model, capsys):
    tsjax.generate(model, PROMPT, max_new_tokens=25, progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "25/25" in captured.err and "1.00 tok/step" in captured.err


# --- saved runs --------------------------------------------------------------------------------


def test_a_finished_run_can_be_extended_by_the_same_file(model, tmp_path):
    path = tmp_path / "run.json"
    generate(model, RAGGED, max_new_tokens=20, save_to=path, **SAMPLED)
    for count in (20, 21, 45):
        longer = generate(model, None, resume_from=path, save_to=path, max_new_tokens=count)
        assert longer == generate(model, RAGGED, max_new_tokens=count, **SAMPLED)


def test_a_finished_run_is_returned_again_with_settings_of_numpy(model, tmp_path):
    path = tmp_path / "run.json"
    settings = dict(temperature=np.float32(0.5), suppress_tokens=[np.int64(3)], top_k=np.int64(5))
    settings.update(max_new_tokens=np.int64(20), do_sample=True)
    expected = tsjax.generate(model, PROMPT, save_to=path, **settings)
    again = tsjax.generate(model, PROMPT, resume_from=path)
    assert tokens_of(again) == tokens_of(expected)
    assert again.finish_reason == expected.finish_reason
    assert again.stats.computed_tokens == 0 and again.stats.tokens_per_second == 0.0


def test_the_file_is_written_every_so_many_tokens(model, tmp_path, monkeypatch, one_step_chunks):
    counts, real = [], saving.write_run

    def write(path, run):
        counts.append(len(run.tokens[0]))
        real(path, run)

    monkeypatch.setattr(saving, "write_run", write)
    generate(model, max_new_tokens=35, save_to=tmp_path / "run.json", save_every=10)
    assert counts == [10, 20, 30, 35]


# --- settings ----------------------------------------------------------------------------------


def test_settings_override_the_config(model):
    config = tsjax.GenerationConfig(max_new_tokens=25, do_sample=True, seed=1)
    by_config = generate(model, config=config)
    assert by_config == generate(model, max_new_tokens=25, do_sample=True, seed=1)
    assert generate(model, config=config, seed=2) != by_config
    assert generate(model, config=config, max_new_tokens=9) == [by_config[0][:9]]


def test_beyond_the_positions_of_the_model_on_request(model):
    short = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, max_positions=16))
    assert len(generate(short, max_new_tokens=13)[0]) == 13
    with pytest.raises(ValueError, match="exceed_max_positions=True"):
        generate(short, max_new_tokens=14)
    longer = generate(short, max_new_tokens=14, exceed_max_positions=True)
    assert longer == generate(model, max_new_tokens=14)

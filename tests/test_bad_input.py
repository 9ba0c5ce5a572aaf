# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused before any compute, by a message that names argument, value and remedy."""

import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import VOCAB, RecordingStreamer, compilations, tiny_model

import tsjax
from tsjax.__main__ import main
from tsjax.host import run, sizes
from tsjax.host.saved_run import read_run
from tsjax.model.cache import cache_bytes

PROMPT = [1, 2, 3]
MAX_POSITIONS = 100


@pytest.fixture(scope="module")
def model() -> tsjax.Model:
    return tiny_model(max_positions=MAX_POSITIONS)


@pytest.fixture
def no_compute(monkeypatch):
    """No state is made and nothing is compiled, whatever else the test does."""

    def reached(*args, **kwargs):
        pytest.fail("the state was allocated")

    monkeypatch.setattr(run, "begin_run", reached)
    with compilations() as names:
        yield
    assert names == []


def refused(error, call, *words: str):
    """`call` raises `error` with all `words` in its message."""
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


# --- prompts -----------------------------------------------------------------------------------

MESSAGE = {"role": "user", "content": "Who are you?"}
PROMPTS = [
    (None, ["prompt=None", "token ids", "resume_from"]),
    ([], ["prompt=[]", "at least one token"]),
    ([[1], []], ["prompt[1]=[]", "at least one token"]),
    (np.zeros((0, 3), int), ["prompt=", "at least one row"]),
    ([1, VOCAB], ["prompt", f"id {VOCAB}", f"0 to {VOCAB - 1}"]),
    ([2**40], [f"id {2**40}", f"0 to {VOCAB - 1}"]),
    ([2**70], ["prompt", "integer token ids"]),
    ([[1], [2, -1]], ["prompt[1]", "id -1", f"0 to {VOCAB - 1}"]),
    ([1.0, 2.0], ["prompt", "float64", "integer token ids"]),
    (jnp.ones((2, 3)), ["prompt[0]", "float32", "integer"]),
    ([True, False], ["prompt", "bool", "integer"]),
    ([[[1]]], ["prompt=[[[1]]]", "list of rows"]),
    ([[1, [2]]], ["prompt=[[1, [2]]]", "list of rows"]),
    (np.ones((1, 1, 1), int), ["prompt=", "list of rows"]),
    (5, ["prompt=5", "a row of token ids"]),
    ([1, [2]], ["prompt[0]", "a row of integer"]),
    (["a", 1], ["prompt", "integer token ids"]),
    (b"text", ["prompt=b'text'", "a string"]),
    ({"ids": [1]}, ["prompt={'ids': [1]}", "a row of token ids"]),
    (["a", "b"], ["no tokenizer", "pass token ids"]),
    ([MESSAGE], ["prompt=", "messages=[...]"]),
    ([[MESSAGE], [MESSAGE]], ["prompt=", "messages=[...]"]),
]


@pytest.mark.parametrize(("prompt", "words"), PROMPTS, ids=range(len(PROMPTS)))
def test_prompts(model, prompt, words, no_compute):
    refused(ValueError, lambda: tsjax.generate(model, prompt), *words)


def test_a_prompt_beyond_the_positions(model, no_compute):
    refused(
        ValueError,
        lambda: tsjax.generate(model, [PROMPT, [1] * 90], max_new_tokens=11),
        "max_new_tokens=11", "90 tokens", "100 positions", "at most 10", "exceed_max_positions=",
    )  # fmt: skip
    refused(ValueError, lambda: tsjax.generate(model, [1] * 200), "200 tokens", "shorten")


# --- settings ----------------------------------------------------------------------------------

INTEGERS = {
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "top_k": 0,
    "min_tokens_to_keep": 1,
    "repetition_window": 1,
    "suppress_tokens": 0,
    "eos_token_id": 0,
    "seed": 0,
}
FLOATS = ("temperature", "top_p", "min_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty")

SETTINGS = [
    *[({name: least - 1}, [f"{name}={least - 1}"]) for name, least in INTEGERS.items()],
    *[({name: 1.5}, [f"{name}=1.5", "an integer"]) for name in INTEGERS if name[0] != "s"],
    *[({name: "3"}, [f"{name}='3'"]) for name in (*INTEGERS, *FLOATS)],
    *[({name: True}, [f"{name}=True"]) for name in (*INTEGERS, *FLOATS)],
    *[({name: x}, [f"{name}={x}", "a finite number"]) for name in FLOATS for x in (-0.1, math.nan)],
    *[({name: 1.1}, [f"{name}=1.1", "between 0 and 1"]) for name in FLOATS[1:5]],
    ({"epsilon_cutoff": 1.0}, ["epsilon_cutoff=1.0", "[0, 1)"]),
    ({"repetition_penalty": 0}, ["repetition_penalty=0", "1.0 switches it off"]),
    ({"repetition_window": 0}, ["repetition_window=0", "None", "repetition_penalty=1.0"]),
    ({"do_sample": "yes"}, ["do_sample='yes'", "True or False"]),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, ["min_new_tokens=9", "max_new_tokens=8"]),
    ({"suppress_tokens": [1, -1]}, ["suppress_tokens=-1", "at least 0"]),
    ({"suppress_tokens": [VOCAB]}, [f"suppress_tokens={VOCAB}", f"vocabulary size {VOCAB}"]),
    ({"suppress_tokens": list(range(VOCAB))}, ["suppress_tokens", "some token must be left"]),
    (
        {"suppress_tokens": list(range(1, VOCAB)), "eos_token_id": 0, "min_new_tokens": 1},
        ["suppress_tokens", "min_new_tokens"],
    ),
    ({"eos_token_id": VOCAB}, [f"eos_token_id={VOCAB}", f"vocabulary size {VOCAB}"]),
    ({"eos_token_id": [1, 2.5]}, ["eos_token_id=2.5", "an integer"]),
    ({"seed": 2**32}, [f"seed={2**32}", "at most 4294967295"]),
    ({"seed": [1, 2]}, ["seed=(1, 2)", "one for each of 1 prompts"]),
    ({"seed": 0.5}, ["seed=0.5", "an integer"]),
    ({"stop_strings": ["a", ""]}, ["stop_strings=('a', '')", "non-empty"]),
    ({"stop_strings": 5}, ["stop_strings=5", "a string or a list"]),
    ({"stop_strings": "end"}, ["stop_strings=('end',)", "needs a tokenizer"]),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS, ids=[words[0] for _, words in SETTINGS])
def test_settings(model, settings, words, no_compute):
    refused(ValueError, lambda: tsjax.generate(model, PROMPT, **settings), *words)


SAMPLING: dict = {
    "temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1, "min_tokens_to_keep": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLING)
def test_what_only_sampling_reads_is_refused_without_it(model, name, capsys, no_compute):
    setting = {name: SAMPLING[name]}
    words = (f"{name}={SAMPLING[name]}", "do_sample=True (--do-sample)", "leave it out")
    for call in (
        lambda: tsjax.generate(model, PROMPT, **setting),
        lambda: tsjax.GenerationConfig(do_sample=True).replace(do_sample=False, **setting),
    ):
        refused(ValueError, call, *words)
    sampled = tsjax.GenerationConfig(do_sample=True, **setting)
    assert sampled.replace(do_sample=False, seed=3) == tsjax.GenerationConfig(seed=3)
    neutral = {name: getattr(tsjax.GenerationConfig(), name)}
    assert tsjax.GenerationConfig(**neutral) == tsjax.GenerationConfig()
    flag = "--" + name.replace("_", "-")
    assert main(["generate", "no model", "Once", flag, str(SAMPLING[name])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tsjax: error: {words[0]}") and "--do-sample" in line


UNKNOWN = {
    "temprature": ["did you mean 'temperature'?"],
    "topk": ["did you mean 'top_k'?"],
    "zzz": ["known: do_sample, eos_token_id"],
}
HABITS = {
    "max_length": ["max_new_tokens"],
    "max_tokens": ["max_new_tokens"],
    "stop": ["stop_strings", "eos_token_id"],
    "n": ["num_return_sequences"],
    "best_of": ["num_return_sequences"],
    "num_beams": ["beam search", "leave it out"],
    "length_penalty": ["beam search", "leave it out"],
    "logit_bias": ["tsjax.token_bias"],
    "bad_words_ids": ["tsjax.bad_words"],
    "allowed_token_ids": ["tsjax.allowed_tokens"],
    "output_scores": ["logprobs"],
    "pad_token_id": ["leave it out", "list"],
    "temp": ["temperature", "do_sample"],
    "stream": ["tsjax.stream(...)"],
    "max_time": ["tsjax.stream(...)"],
}


@pytest.mark.parametrize("name", [*UNKNOWN, *HABITS])
def test_an_unknown_name_is_never_ignored(model, name, no_compute):
    """Habits from other programs get a hint."""
    for call in (
        lambda: tsjax.generate(model, PROMPT, **{name: 3}),
        lambda: tsjax.stream(model, PROMPT, **{name: 3}),
        lambda: tsjax.GenerationConfig().replace(**{name: 3}),
        lambda: tsjax.GenerationConfig.from_hf({}, **{name: 3}),
    ):
        refused(TypeError, call, f"unknown argument {name!r}", *(UNKNOWN | HABITS)[name])


@pytest.mark.parametrize("name", HABITS)
def test_an_unknown_flag_gets_the_same_hint(name, capsys):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(SystemExit) as ended:
        main(["generate", "model", "Once", flag, "1"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tsjax generate: error: unknown argument {flag}: ")
    for word in HABITS[name]:
        setting = word in tsjax.GenerationConfig.__dataclass_fields__
        assert ("--" + word.replace("_", "-") if setting else word) in line


def test_generate_inside_jit_is_refused(model, no_compute):
    array = np.asarray(PROMPT)
    weights = tsjax.Model(model.params, cfg=model.cfg)
    for what, call in (
        ("prompt", lambda: jax.jit(lambda x: tsjax.generate(weights, x).tokens)(array)),
        ("call", lambda: jax.jit(lambda: tsjax.generate(weights, PROMPT).tokens)()),
        (
            "model",
            lambda: jax.jit(
                lambda params: tsjax.generate(tsjax.Model(params, cfg=model.cfg), PROMPT).tokens
            )(model.params),
        ),
    ):
        refused(
            TypeError, call, f"a traced {what}", "tsjax.steps.prefill", "tsjax.steps.decode",
            "examples/inside_jit.py",
        )  # fmt: skip


# --- arguments of generate ---------------------------------------------------------------------

TWO_ROWS, LONG = [PROMPT, [4]], dict(prompt=[1] * 34, max_new_tokens=2)
ARGUMENTS = [
    ({"streamer": RecordingStreamer(), "prompt": TWO_ROWS}, ValueError, ["takes one row", "has 2"]),
    ({"seed": [1], "prompt": TWO_ROWS}, ValueError, ["seed=(1,)", "one for each of 2 prompts"]),
    *(({"model": other}, TypeError, ["model=", "tsjax.load"]) for other in ({}, "a/path", None)),
    ({"on_interrupt": "stop"}, ValueError, ["on_interrupt='stop'", "'raise' or 'return'"]),
    ({"method": "medusa2"}, ValueError, ["method='medusa2'", "'autoregressive'"]),
    ({"method": tsjax.methods.Autoregressive}, ValueError, ["method=<class", "or its dataclass"]),
    ({"prefill": "half"}, ValueError, ["prefill='half'", "'full'"]),
    ({"prefill_width": 0}, ValueError, ["prefill_width=0", "at least 1"]),
    ({"capacity": 18}, ValueError, ["capacity=18", "at least 19 slots", "max_new_tokens=16"]),
    # 33 tokens in passes of 32 take 64 slots, though prompt and output would fit into 40.
    ({"capacity": 40, "prefill_width": 32, **LONG}, ValueError, ["capacity=40", "at least 48"]),
    ({"save_to": "no/run.json"}, FileNotFoundError, ["save_to='no/run.json'", "does not exist"]),
    ({"capacity": "all"}, ValueError, ["capacity='all'", "an integer"]),
    ({"save_every": 0}, ValueError, ["save_every=0", "at least 1"]),
    (
        {"config": {"top_k": 5}},
        TypeError,
        ["config={'top_k': 5}", "a tsjax.GenerationConfig, or transformers'"],
    ),
    ({"streamer": object()}, TypeError, ["streamer=<object", "put() and end()"]),
]


@pytest.mark.parametrize(
    ("arguments", "error", "words"), ARGUMENTS, ids=[next(iter(row[0])) for row in ARGUMENTS]
)
def test_arguments(model, arguments, error, words, no_compute):
    arguments = {"model": model, "prompt": PROMPT, "max_new_tokens": 16, **arguments}
    refused(error, lambda: tsjax.generate(**arguments), *words)


def test_a_cache_that_does_not_fit(model, monkeypatch, no_compute):
    cache = cache_bytes(model.cfg, 3, 2048)
    monkeypatch.setattr(sizes, "available_bytes", lambda device: cache - 1)
    refused(
        MemoryError,
        lambda: tsjax.generate(model, [PROMPT] * 3, max_new_tokens=16),
        f"{cache:,} for the cache", f"{cache - 1:,} are free", "capacity=2048",
        "lower max_new_tokens",
    )  # fmt: skip


# --- saved runs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("saved") / "run.json"
    tsjax.generate(model, PROMPT, max_new_tokens=16, save_to=path)
    return os.fspath(path)


def test_resuming_from_what_is_no_run(model, tmp_path, no_compute):
    path = tmp_path / "run.json"
    words = "resume_from=", os.fspath(path)

    def resume():
        tsjax.generate(model, resume_from=path)

    refused(FileNotFoundError, resume, *words, "no such file")
    for content in ("", "text", "[]", "{}", '{"format": 1}', '{"format": 99}'):
        path.write_text(content)
        refused(ValueError, resume, *words, "a file written by save_to")


def test_resuming_with_another_model(saved):
    other = tiny_model(vocab_size=50)
    words = "resume_from=", "another model", "load that of the run"
    refused(ValueError, lambda: tsjax.generate(other, resume_from=saved), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, ["resume_from", "its own settings", "max_new_tokens"]),
        ({"top_k": 3, "max_new_tokens": 20}, ["its own settings"]),
        ({"config": tsjax.GenerationConfig()}, ["its own settings"]),
        ({"prompt": [9]}, ["prompt is not the one saved", "leave it out"]),
        ({"max_new_tokens": 15}, ["max_new_tokens=15", "16 tokens"]),
        ({"max_new_tokens": 98}, ["max_new_tokens=98", "at most 97", "exceed_max_positions=True"]),
    ],
)
def test_resuming_with_other_settings(model, saved, changes, words, no_compute):
    refused(ValueError, lambda: tsjax.generate(model, resume_from=saved, **changes), *words)


def test_an_older_greedy_run_may_hold_values_that_nothing_read(model, saved, tmp_path):
    with open(saved, encoding="utf-8") as file:
        document = json.load(file)
    for number, reading in enumerate(({}, {"do_sample": False})):
        path = tmp_path / f"{number}.json"
        path.write_text(
            json.dumps(document | {"config": reading | {"max_new_tokens": 16} | SAMPLING})
        )
        assert read_run(path).config == tsjax.GenerationConfig(max_new_tokens=16)
        again = tsjax.generate(model, resume_from=path)
        assert again.tokens[0].tolist() == document["tokens"][0]


# --- HuggingFace's generation_config.json -------------------------------------------------------

BOTH = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}


def test_from_hf_reads_every_kind_of_source(tmp_path):
    import transformers

    (tmp_path / "generation_config.json").write_text(json.dumps(BOTH))
    expected = tsjax.GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, top_k=50, eos_token_id=(1, 2)
    )
    for source in (
        BOTH,
        tmp_path,
        os.fspath(tmp_path / "generation_config.json"),
        transformers.GenerationConfig(**BOTH),
    ):
        assert tsjax.GenerationConfig.from_hf(source) == expected
    changed = tsjax.GenerationConfig.from_hf(BOTH, top_k=0, seed=3)
    assert (changed.top_k, changed.seed, changed.top_p) == (0, 3, 0.9)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"do_sample": True}, {"do_sample": True, "top_k": 50}),
        ({"temperature": 0.0}, {}),  # HuggingFace does not read these without do_sample
        ({"temperature": 0.6, "top_p": 2.0, "top_k": 5, "min_p": 0.1, "eta_cutoff": 0.1}, {}),
        ({"max_new_tokens": None, "eos_token_id": None, "use_cache": True, "seed": 1}, {"seed": 1}),
        ({"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0}, {}),
    ],
)
def test_from_hf_takes_what_does_not_matter(fields, expected):
    assert tsjax.GenerationConfig.from_hf(fields) == tsjax.GenerationConfig(**expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_beams": 4}, ["num_beams=4"]),
        ({"typical_p": 0.9, "do_sample": True}, ["typical_p=0.9"]),
        ({"guidance_scale": 1.5}, ["guidance_scale=1.5"]),
        ({"bad_words_ids": [[1]]}, ["bad_words_ids=[[1]]"]),
    ],
)
def test_from_hf_refuses_by_name_what_it_cannot_do(fields, words):
    refused(
        NotImplementedError, lambda: tsjax.GenerationConfig.from_hf(fields), *words, "transformers"
    )


def test_from_hf_refuses_changes_that_nothing_reads():
    for fields, changes in (({"top_p": 0.9}, {}), (BOTH, {"do_sample": False})):
        refused(
            ValueError,
            lambda: tsjax.GenerationConfig.from_hf(fields, min_p=0.2, **changes),  # noqa: B023
            "min_p=0.2", "do_sample=True",
        )  # fmt: skip
    assert tsjax.GenerationConfig.from_hf(BOTH, do_sample=False).eos_token_id == (1, 2)


def test_from_hf_refuses_bad_sources(tmp_path):
    path = tmp_path / "generation_config.json"
    refused(FileNotFoundError, lambda: tsjax.GenerationConfig.from_hf(tmp_path), str(path))
    path.write_text("{")
    refused(ValueError, lambda: tsjax.GenerationConfig.from_hf(path), str(path), "not valid JSON")
    wrong = {"top_p": 2.0, "do_sample": True}
    refused(ValueError, lambda: tsjax.GenerationConfig.from_hf(wrong), "top_p=2.0")

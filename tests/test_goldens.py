# SPDX-License-Identifier: Apache-2.0
"""tsjax against recorded outputs of transformers: see record_goldens.py. Needs no torch."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import tsjax
from tools import record_goldens
from tsjax.decoding.processors import KnownText, first_last_seen
from tsjax.decoding.sampling import process, sampling_values, warp


def read_golden(name):
    with np.load(record_goldens.FOLDER / f"{name}.npz") as archive:
        return dict(archive)


def loaded(name, path) -> tsjax.Model:
    """From a HuggingFace folder of a config.json and float32 weights."""
    golden = read_golden(name)
    assert json.loads(golden["config"].item()) == record_goldens.CASES[name]
    (path / "config.json").write_text(golden["config"].item())
    weights = {
        key.removeprefix("weights/"): value.astype(np.float32)
        for key, value in golden.items()
        if key.startswith("weights/")
    }
    save_file(weights, path / "model.safetensors")
    return tsjax.load(path)


@pytest.mark.parametrize("name", record_goldens.CASES)
def test_model(name, tmp_path):
    golden = read_golden(name)
    assert golden["margin"] >= record_goldens.SMALLEST_MARGIN
    prompt, begun = golden["prompt"], golden["prompt"][: record_goldens.GREEDY_PROMPT]
    text = np.concatenate([begun, golden["greedy"]])
    both = np.stack([np.resize(prompt, len(text)), text])
    logits, next_logits = tsjax.forward(loaded(name, tmp_path), both)
    np.testing.assert_allclose(logits[: len(prompt)], golden["logits"], rtol=0, atol=5e-5)
    chosen = np.argmax(next_logits[len(begun) - 1 : -1], axis=-1)
    np.testing.assert_array_equal(chosen, golden["greedy"])


@pytest.mark.parametrize("name", ["llama_llama3_tied", "qwen3"])
def test_greedy_text(name, tmp_path):
    golden = read_golden(name)
    begun, count = golden["prompt"][: record_goldens.GREEDY_PROMPT], record_goldens.GREEDY_TOKENS
    result = tsjax.generate(loaded(name, tmp_path), begun, max_new_tokens=count, eos_token_id=())
    np.testing.assert_array_equal(result.tokens[0], golden["greedy"])


def apply_processors(settings, tokens, logits, prompt_length):
    """What tsjax leaves of logits [B, V] after tokens [B, P]; greedy settings are not warped."""
    batch, length = tokens.shape
    config = tsjax.GenerationConfig(max_new_tokens=1000, **settings)
    values = sampling_values(config, config.eos_token_id or (), logits.shape[-1], logits.dtype)
    lengths = np.full((batch,), length, np.int32)
    last_seen = first_last_seen(tokens, lengths, logits.shape[-1])
    text = KnownText(tokens, lengths, np.full((batch,), prompt_length, np.int32), last_seen)
    out = _process(logits[:, None], text, lengths[:, None], values)
    return np.asarray(_warp(out, values) if config.do_sample else out)[:, 0]


_process, _warp = jax.jit(process), jax.jit(warp)


@pytest.mark.parametrize("index", range(len(record_goldens.PROCESSORS)))
def test_processors(index):
    golden = read_golden("processors")
    settings = record_goldens.PROCESSORS[index]
    ours = apply_processors(
        settings, golden["tokens"], golden["logits"], record_goldens.PROCESSOR_PROMPT
    )
    np.testing.assert_allclose(ours, golden["outputs"][index], rtol=1e-6)

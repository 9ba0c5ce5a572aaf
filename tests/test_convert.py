# SPDX-License-Identifier: Apache-2.0
"""Conversions there and back are bit-equal, transformers loads what is written, and the command."""

import json
import os
import re
import subprocess
import sys

import hf_fixtures
import jax.numpy as jnp
import numpy as np
import pytest
from hf_fixtures import (
    BIASED,
    LLAMA3,
    YARN,
    assert_same_trees,
    change,
    change_tensors,
    make,
    weights,
)
from safetensors.numpy import load_file

import tsjax.files.checkpoint
from tsjax.files.checkpoint import load
from tsjax.model.logits import logits
from tsjax_convert import export_heads, to_hf, to_tsjax, verify
from tsjax_convert.__main__ import main
from tsjax_convert.conversion import parse_size


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [("llama", "float32", BIASED), ("qwen2", "bfloat16", {}), ("qwen3", "float32", {})],
)
def test_there_and_back_is_bit_equal(family, dtype, changes, tmp_path):
    raw = hf_fixtures.config(family, torch_dtype=dtype, **changes)
    content = {k: v.astype(jnp.dtype(dtype)) for k, v in hf_fixtures.tensors(raw).items()}
    hf_fixtures.write(tmp_path / "hf", raw, content)
    there = to_tsjax(tmp_path / "hf", tmp_path / "ts")
    back = to_hf(tmp_path / "ts", tmp_path / "back")
    assert_same_trees(weights(tmp_path / "back"), content)
    assert there.num_params == back.num_params == sum(a.size for a in content.values())
    assert back.num_bytes > sum(a.nbytes for a in content.values())
    verify(tmp_path / "hf", tmp_path / "back")
    assert load(tmp_path / "back").cfg == load(tmp_path / "hf").cfg


def test_shards_have_an_index_and_a_size(tmp_path):
    make(tmp_path / "hf")
    to_hf(tmp_path / "hf", tmp_path / "out", max_shard_size="20KB")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert [f.name for f in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert_same_trees(weights(tmp_path / "out"), weights(tmp_path / "hf"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {k: f.name for f in files for k in load_file(f)}
    total = sum(a.nbytes for a in weights(tmp_path / "hf").values())
    assert index["metadata"]["total_size"] == total
    for file in files:
        assert sum(a.nbytes for a in load_file(file).values()) <= 20_000
    verify(tmp_path / "hf", tmp_path / "out")


def test_sizes(tmp_path):
    sizes = {5: 5, "123": 123, "2GB": 2 * 10**9, "1.5 MiB": 1_572_864, "3kb": 3000}
    assert {size: parse_size(size) for size in sizes} == sizes
    make(tmp_path / "hf")
    for size in ("", "GB", "-1GB", "2 lightyears", 0, "0.1"):
        with pytest.raises(ValueError, match="max_shard_size="):
            to_hf(tmp_path / "hf", tmp_path / "out", max_shard_size=size)
    assert os.listdir(tmp_path) == ["hf"]


def test_type_changes_on_the_way(tmp_path):
    make(tmp_path / "hf")
    to_tsjax(tmp_path / "hf", tmp_path / "ts", dtype="bfloat16")
    to_hf(tmp_path / "hf", tmp_path / "half", dtype="bfloat16")
    for name, array in weights(tmp_path / "half").items():
        original = weights(tmp_path / "hf")[name]
        assert array.tobytes() == original.astype(jnp.bfloat16).tobytes()
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    verify(tmp_path / "hf", tmp_path / "ts")
    verify(tmp_path / "half", tmp_path / "ts")


def test_special_ids_are_kept(tmp_path):
    make(tmp_path / "hf", bos_token_id=7, eos_token_id=[3, 4])
    to_tsjax(tmp_path / "hf", tmp_path / "ts")
    to_hf(tmp_path / "hf", tmp_path / "out")
    to_hf(tmp_path / "ts", tmp_path / "back")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (7, [3, 4])
        assert json.loads((tmp_path / "back" / name).read_text())["eos_token_id"] == [3, 4]
    assert load(tmp_path / "back").stop_ids == (3, 4)


def test_verify_finds_a_difference(tmp_path):
    content = weights(make(tmp_path / "hf"))
    to_tsjax(tmp_path / "hf", tmp_path / "ts")
    content["model.norm.weight"][5] += 1e-6
    content["model.layers.1.mlp.down_proj.weight"][3, 4] = -0.0
    change_tensors(tmp_path / "hf", content)
    message = "differs from its source in model.layers.1.mlp.down_proj.weight, model.norm.weight$"
    with pytest.raises(ValueError, match=message):
        verify(tmp_path / "hf", tmp_path / "ts")


# --- draft heads -----------------------------------------------------------------------------


@pytest.fixture
def with_heads(tmp_path):
    make(tmp_path / "base")
    donor = make(tmp_path / "donor", heads=2)
    return tmp_path / "base", donor


def heads_of(folder):
    return {name: array for name, array in weights(folder).items() if "medusa" in name}


def test_heads_go_out_alone_and_come_back(with_heads, tmp_path):
    base, donor = with_heads
    written = export_heads(donor, tmp_path / "adapter")
    assert written.num_params == 2 * (32 * 32 + 2 * 32)
    assert_same_trees(weights(tmp_path / "adapter"), heads_of(donor))
    to_tsjax(base, tmp_path / "ts", heads=tmp_path / "adapter")
    assert verify(base, tmp_path / "ts", heads=tmp_path / "adapter") == 21 + 6
    export_heads(tmp_path / "ts", tmp_path / "again")
    assert_same_trees(weights(tmp_path / "again"), heads_of(donor))
    assert verify(tmp_path / "ts", tmp_path / "again") == 6
    assert verify(donor, tmp_path / "again") == 6


def test_heads_are_merged_or_dropped_but_never_by_chance(with_heads, tmp_path, capsys):
    """By the command."""
    base, donor = with_heads
    ts, out = tmp_path / "ts", tmp_path / "out"

    def run(*argv) -> int:
        return main([*map(str, argv)])

    assert run(base, ts, "--heads", donor, "--verify") == 0
    assert run(ts, tmp_path / "adapter", "--heads-only", "--verify") == 0
    assert "6 tensors verified" in capsys.readouterr().out
    assert run(ts, out, "--to", "hf") == 2
    asked = "the model has 2 draft heads.*--merge-heads.*--drop-heads"
    assert re.search(asked, capsys.readouterr().err)
    assert run(ts, out, "--to", "hf", "--merge-heads", "--verify") == 0
    assert_same_trees(weights(out), {**weights(base), **heads_of(donor)})
    assert json.loads((out / "config.json").read_text())["medusa_heads"] == 2
    assert load(out).cfg.num_draft_heads == 2
    assert run(ts, out, "--to", "hf", "--drop-heads", "--overwrite", "--verify") == 0
    assert "21 tensors verified" in capsys.readouterr().out
    assert_same_trees(weights(out), weights(base))
    assert "medusa_heads" not in json.loads((out / "config.json").read_text())


# --- transformers loads it -------------------------------------------------------------------


LINEAR = {"rope_type": "linear", "factor": 2.0}
MSCALED = {**YARN, "type": "yarn", "mscale": 1.5, "mscale_all_dim": 0.5}
MODELS = [
    ("llama", {**BIASED, "rope_scaling": LLAMA3}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 16, "rope_scaling": LINEAR}),
    ("qwen2", {"rope_scaling": {k: v for k, v in MSCALED.items() if k != "rope_type"}}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"rope_scaling": {**YARN, "truncate": False}}),
]


@pytest.mark.parity
@pytest.mark.parametrize(("family", "changes"), MODELS)
def test_transformers_computes_the_same_logits_from_what_is_written(family, changes, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    make(tmp_path / "hf", family, **changes)
    to_tsjax(tmp_path / "hf", tmp_path / "ts")
    to_hf(tmp_path / "ts", tmp_path / "back", max_shard_size="20KB")
    tokens = np.random.default_rng(1).integers(0, 48, (2, 100), np.int32)
    results = []
    for folder in ("hf", "back"):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        with torch.no_grad():
            results.append(theirs.eval()(torch.from_numpy(tokens).long()).logits.numpy())
    assert np.array_equal(*results)
    model = load(tmp_path / "ts")
    ours = np.asarray(logits(model.params, jnp.asarray(tokens), cfg=model.cfg))
    np.testing.assert_allclose(ours, results[0], rtol=2e-4, atol=2e-4)


# --- the command -----------------------------------------------------------------------------


def test_command_converts_and_verifies(tmp_path, capsys):
    src, ts, back = make(tmp_path / "hf"), str(tmp_path / "ts"), str(tmp_path / "back")
    assert main([str(src), ts, "--verify"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"{ts}: ") and " parameters, " in out and "21 tensors verified" in out
    assert main([ts, back, "--to", "hf", "--max-shard-size", "20KB", "--verify", "--quiet"]) == 0
    assert_same_trees(weights(tmp_path / "back"), weights(src))
    assert main([back, ts, "--overwrite", "--dtype", "bfloat16"]) == 0
    assert load(ts).cfg.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, ["{tmp}/none", "{tmp}/out"], "no such folder"),
        ({}, ["{tmp}/hf", "{tmp}/hf"], "exists"),
        ({"model_type": "gpt2"}, ["{tmp}/hf", "{tmp}/out"], "'gpt2'.* not supported"),
        ({"head_dim": 4}, ["{tmp}/hf", "{tmp}/out"], "the config asks for"),
        ({}, ["{tmp}/hf", "{tmp}/out", "--heads-only"], "hf' has no draft heads to export"),
        ({}, ["{tmp}/hf", "{tmp}/out", "--to", "hf", "--max-shard-size", "x"], "max_shard_size"),
    ],
)
def test_command_refuses_with_exit_code_2(changes, arguments, message, tmp_path, capsys):
    change(make(tmp_path / "hf") / "config.json", **changes)
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tsjax-convert: ") and "Traceback" not in err
    assert re.search(message, err)
    assert sorted(os.listdir(tmp_path)) == ["hf"]


def test_command_interrupted_leaves_nothing(tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tsjax.files.checkpoint, "copy_companions", interrupt)
    assert main([str(make(tmp_path / "hf")), str(tmp_path / "ts")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.wide
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_memory_of_a_conversion_is_that_of_the_model(tmp_path):
    """There is no second copy of the weights."""
    code = """if True:
        import re, sys, jax.numpy as jnp
        from orbax.checkpoint import v1 as ocp
        from tsjax_convert import to_tsjax

        def peak():
            status = open("/proc/self/status").read()
            return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

        jnp.zeros(()).block_until_ready()
        before = peak()
        written = to_tsjax(sys.argv[1], sys.argv[2])
        print(written.num_bytes, peak() - before - written.num_bytes)
    """
    make(tmp_path / "hf", vocab_size=60_000, hidden_size=512, num_hidden_layers=1)
    command = [sys.executable, "-c", code, str(tmp_path / "hf"), str(tmp_path / "ts")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    written, above = map(int, done.stdout.split())
    assert written > 200e6
    assert above < 180e6, above  # blocks of 32 MiB, mapped and read, and small change

# SPDX-License-Identifier: Apache-2.0
"""Medusa's heads in files: those that were published come in and go out byte for byte."""

import json

import hf_fixtures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers import tiny_config

import tsjax
import tsjax_convert

KINDS = SHARED, OWN = "parallel", "parallel_own_vocabulary"
D, ROWS = hf_fixtures.SIZES["hidden_size"], hf_fixtures.SIZES["vocab_size"]


def published(layout: str, heads: int = 3, prefix: str = "", bias: bool = True):
    """Tensors as the published files have them, and what each head's arrays should be."""
    rng, tensors, expected = np.random.default_rng(5), {}, []
    names = {
        "vllm": ("blocks.{}.layers.0.weight", "blocks.{}.layers.0.bias", "lm_heads.{}.weight"),
        "own": ("{}.0.linear.weight", "{}.0.linear.bias", "{}.1.weight"),
        "shared": ("{}.0.linear.weight", "{}.0.linear.bias"),
    }[layout]
    for k in range(heads):
        arrays = [rng.standard_normal(size).astype(np.float32) for size in ((D, D), D, (ROWS, D))]
        arrays[1] *= bias
        if layout == "shared":
            arrays[2] = None
        expected.append(tuple(arrays))
        for name, array in zip(names, arrays, strict=False):
            if bias or "bias" not in name:
                tensors[prefix + name.format(k)] = array
    return tensors, expected


def write(file, tensors):
    file.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    return file


def check_heads(model, expected, kind: str) -> None:
    assert model.cfg.num_draft_heads == len(expected) and model.cfg.head_kind == kind
    for head, arrays in zip(model.params.heads, expected, strict=True):
        for found, array in zip((head.block, head.block_bias, head.unembed), arrays, strict=True):
            assert (found is None) == (array is None)
            if array is not None:
                np.testing.assert_array_equal(found, array)


@pytest.fixture
def base(tmp_path):
    return hf_fixtures.make(tmp_path / "base")


@pytest.mark.parametrize(
    ("layout", "prefix"), [("own", "medusa_heads."), ("shared", ""), ("vllm", "medusa_head.")]
)
def test_published_heads_come_in_and_go_out_byte_for_byte(layout, prefix, base, tmp_path):
    tensors, expected = published(layout, prefix=prefix)
    # A folder as it is on the hub, with the config that names a wrong number of heads.
    name = "model.safetensors" if layout == "vllm" else "medusa_lm_head.safetensors"
    file = write(tmp_path / "heads" / name, tensors)
    (file.parent / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    kind = SHARED if layout == "shared" else OWN
    for place in (file, file.parent):
        check_heads(tsjax.load(base, heads=place), expected, kind)
    # To a tsjax checkpoint, and from there to a folder of heads alone.
    tsjax_convert.to_tsjax(base, tmp_path / "ts", heads=file)
    check_heads(tsjax.load(tmp_path / "ts"), expected, kind)
    exported = "vllm" if layout == "vllm" else "medusa"
    tsjax_convert.export_heads(tmp_path / "ts", tmp_path / "out", layout=exported)
    plain = write(tmp_path / "plain.safetensors", published(layout)[0])
    assert (tmp_path / "out" / name).read_bytes() == plain.read_bytes()
    assert tsjax_convert.verify(tmp_path / "ts", tmp_path / "out") == len(tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_heads" if layout == "vllm" else "medusa_num_heads"] == 3


@pytest.mark.parity
def test_a_pickle_as_it_was_published(base, tmp_path):
    torch = pytest.importorskip("torch")
    tensors, expected = published("own", heads=5)
    (tmp_path / "heads").mkdir()
    file = tmp_path / "heads" / "medusa_lm_head.pt"
    torch.save({name: torch.from_numpy(array).bfloat16() for name, array in tensors.items()}, file)
    (file.parent / "config.json").write_text('{"medusa_num_heads": 2}')
    with pytest.raises(ValueError, match="only pickled torch weights.*allow_pickle=True"):
        tsjax.load(base, heads=file.parent)
    model = tsjax.load(base, heads=file.parent, allow_pickle=True)
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), expected)
    check_heads(model, halves, OWN)


def test_vllm_heads_without_biases_and_with_the_models_matrix(base, tmp_path):
    tensors, expected = published("vllm", bias=False)
    check_heads(tsjax.load(base, heads=write(tmp_path / "a.safetensors", tensors)), expected, OWN)
    shared = {name: array for name, array in tensors.items() if "lm_heads" not in name}
    shared["lm_head.weight"] = np.ones((ROWS, D), np.float32)
    expected = [(block, bias, None) for block, bias, _ in expected]
    file = write(tmp_path / "b.safetensors", shared)
    check_heads(tsjax.load(base, heads=file), expected, SHARED)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_merged_and_dropped(kind, base, tmp_path):
    tensors, expected = published("own" if kind == OWN else "shared")
    file = write(tmp_path / "heads.safetensors", tensors)
    tsjax_convert.to_hf(base, tmp_path / "merged", heads=file, draft_heads="merge")
    check_heads(tsjax.load(tmp_path / "merged"), expected, kind)
    # The config's number does not count, that of the tensors does.
    hf_fixtures.change(tmp_path / "merged" / "config.json", medusa_heads=1)
    check_heads(tsjax.load(tmp_path / "merged"), expected, kind)
    check_heads(tsjax.load(base, heads=tmp_path / "merged"), expected, kind)
    tsjax_convert.to_hf(tmp_path / "merged", tmp_path / "bare", draft_heads="drop")
    assert tsjax.load(tmp_path / "bare").cfg == tsjax.load(base).cfg


OWN_FILE, PREFIXED, VLLM = ("own", ""), ("own", "medusa_head."), ("vllm", "")


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (OWN_FILE, {"1.1.linear.weight": (D, D)}, "heads of several residual blocks are not supp"),
        (OWN_FILE, {"1.0.linear.weight": (D, D + 1)}, r"1.0.linear.weight.*shape \[32, 33\]"),
        (OWN_FILE, {"1.1.weight": None}, "missing in .*: medusa_head.1.1.weight"),
        (OWN_FILE, {"1.0.linear.bias": None}, "missing in .*: medusa_head.1.0.linear.bias"),
        (OWN_FILE, {"something": (3,)}, "not part of this model: something"),
        (OWN_FILE, {"token_map": (3,)}, "has a token_map"),
        (OWN_FILE, {"blocks.1.layers.0.weight": (D, D)}, "is there again"),
        (OWN_FILE, {"medusa_layers.0.linear.weight": (D, D)}, "two kinds of draft heads"),
        (
            OWN_FILE,
            {f"{k}.0.linear.{x}": None for k in range(3) for x in ("weight", "bias")},
            "it holds no",
        ),
        (PREFIXED, {"medusa_head.0.scale": (3,)}, "not part of this model: medusa_head.0.scale"),
        (VLLM, {"blocks.0.layers.1.weight": (D, D)}, "heads of several residual blocks"),
    ],
)
def test_wrong_heads_are_refused(layout, change, message, base, tmp_path):
    name, prefix = layout
    tensors, _ = published(name, prefix=prefix)
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.zeros(shape, np.float32)
    file = write(tmp_path / "heads.safetensors", tensors)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        tsjax.load(base, heads=file)


def test_old_files_say_no_kind_of_heads(tmp_path):
    old = tiny_config(num_draft_heads=2)
    assert "head_kind" not in old.to_dict() and tsjax.ModelConfig.from_dict(old.to_dict()) == old
    new = tiny_config(num_draft_heads=2, head_kind=OWN)
    assert tsjax.ModelConfig.from_dict(new.to_dict()) == new
    assert new.with_heads(0) == old.with_heads(0) == tiny_config()

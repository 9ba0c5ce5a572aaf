# SPDX-License-Identifier: Apache-2.0
"""tsjax's own checkpoints: saving is all or nothing, what is read is what was saved."""

import dataclasses
import gc
import json
import os
import shutil
import sys

import hf_fixtures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_fixtures import BIASED, assert_same_trees, change, make, same
from jax.sharding import AxisType
from test_checkpoint import check_model

import tsjax.files.checkpoint
from tsjax.base.errors import BadValue
from tsjax.files.checkpoint import load, save
from tsjax.files.config_files import model_config
from tsjax.model.params import abstract_params


def mesh_of_four():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def check_placed(model, plain, mesh) -> None:
    """The numbers of `plain`, on the mesh as the parameters declare it."""
    assert_same_trees(model.params, plain.params)
    declared = jax.tree.leaves(abstract_params(plain.cfg, mesh))
    for leaf, wanted in zip(jax.tree.leaves(model.params), declared, strict=True):
        assert leaf.sharding == wanted.sharding


def test_weights_are_placed_on_the_mesh_as_declared(tmp_path):
    mesh = mesh_of_four()
    plain = load(make(tmp_path / "hf", heads=1))
    save(plain, tmp_path / "ts")
    for folder in ("hf", "ts"):
        model = load(tmp_path / folder, mesh=mesh)
        check_placed(model, plain, mesh)
        qkv = model.params.model.layers[0].qkv  # a kv head, with its two query heads
        assert {shard.data.shape for shard in qkv.addressable_shards} == {(1, 4, 8, 32)}
    # What was saved from a mesh is the same on one device.
    save(load(tmp_path / "hf", mesh=mesh), tmp_path / "again")
    assert_same_trees(load(tmp_path / "again").params, plain.params)


def test_a_single_device_array_is_owned(tmp_path):
    # The array may share memory with what was read, never with the mapped file.
    model = load(make(tmp_path))
    before = np.array(model.params.model.embed)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.write(b"\0" * size)
    assert same(model.params.model.embed, before)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen2", "bfloat16")])
def test_saved_and_loaded_is_the_same(family, dtype, tmp_path):
    model = load(make(tmp_path / "hf", family, heads=1), dtype=dtype)
    save(model, tmp_path / "ts")
    again = load(tmp_path / "ts")
    assert_same_trees(again.params, model.params)
    assert (again.cfg, again.stop_ids) == (model.cfg, model.stop_ids)
    assert again.path == str(tmp_path / "ts")
    half = load(tmp_path / "ts", dtype="bfloat16")
    expected = jax.tree.map(lambda a: np.asarray(a).astype(jnp.bfloat16), model.params)
    assert_same_trees(half.params, expected)
    assert half.cfg == dataclasses.replace(model.cfg, dtype="bfloat16")


def test_float64_needs_x64(tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match="dtype='float64' .* JAX_ENABLE_X64"):
        load(tmp_path, dtype="float64")
    with jax.enable_x64(True):
        model = load(tmp_path, dtype="float64")
        assert model.params.model.embed.dtype == np.float64
        save(model, tmp_path / "saved")
        with pytest.raises(ValueError, match="not read as float64: .* jax.config.update"):
            load(tmp_path / "saved")
    jax.config.update("jax_enable_x64", True)
    try:
        assert_same_trees(load(tmp_path / "saved").params, model.params)
    finally:
        jax.config.update("jax_enable_x64", False)
    with pytest.raises(ValueError, match="dtype='float64' .* JAX_ENABLE_X64"):
        load(tmp_path / "saved")
    assert load(tmp_path / "saved", dtype="float32").cfg.dtype == "float32"


def test_companions_are_copied_and_the_tokenizer_found(tmp_path):
    from test_tokenizer import TOKENIZERS

    make(tmp_path / "hf")
    TOKENIZERS["byte_level"].save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    (tmp_path / "hf" / "notes.txt").write_text("not copied")
    save(load(tmp_path / "hf"), tmp_path / "ts")
    model = load(tmp_path / "ts")
    assert model.stop_ids == (4, 5)
    assert model.tokenizer.encode("Hello") == TOKENIZERS["byte_level"].encode("Hello")
    assert not (tmp_path / "ts" / "notes.txt").exists()


# --- all or nothing ----------------------------------------------------------------------------


def test_only_checkpoints_are_overwritten_and_when_asked(tmp_path):
    model = load(make(tmp_path / "hf"))
    save(model, tmp_path / "ts")
    with pytest.raises(FileExistsError, match="exists; choose another place"):
        save(model, tmp_path / "ts")
    save(dataclasses.replace(model, stop_ids=(9,)), tmp_path / "ts", overwrite=True)
    assert load(tmp_path / "ts").stop_ids == (9,)
    assert sorted(os.listdir(tmp_path)) == ["hf", "ts"]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("")
    for path in (tmp_path / "precious", tmp_path / "precious" / "thesis.txt"):
        with pytest.raises(FileExistsError, match="is not a checkpoint folder"):
            save(model, path, overwrite=True)
    assert (tmp_path / "precious" / "thesis.txt").exists()


@pytest.mark.parametrize("existing", [True, False])
def test_a_failed_save_leaves_what_was_there(existing, tmp_path, monkeypatch):
    model = load(make(tmp_path / "hf"))
    if existing:
        save(model, tmp_path / "ts")

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(tsjax.files.checkpoint, "copy_companions", fail)
    with pytest.raises(OSError, match="no space"):
        save(dataclasses.replace(model, stop_ids=(9,)), tmp_path / "ts", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == (["hf", "ts"] if existing else ["hf"])
    if existing:
        assert load(tmp_path / "ts").stop_ids == (2,)


def test_params_that_do_not_fit_the_config_are_not_saved(tmp_path):
    model = load(make(tmp_path / "hf"))
    wrong = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, vocab_size=50))
    with pytest.raises(ValueError, match=r"model.embed has shape \[48, 32\]; .* \[50, 32\]"):
        save(wrong, tmp_path / "ts")
    assert os.listdir(tmp_path) == ["hf"]


# --- what is refused ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    place = tmp_path_factory.mktemp("original")
    save(load(make(place / "hf")), place / "ts")
    return place / "ts"


@pytest.fixture
def saved(original, tmp_path):
    return shutil.copytree(original, tmp_path / "ts")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format_version=99), "format_version=99; this tsjax reads 1 and 2"),
        (lambda d: d.pop("model"), "is damaged: KeyError"),
        (lambda d: d.update(model=[]), "is damaged"),
        (lambda d: d["model"].update(colour="red"), "is damaged: .*unknown .*colour"),
        (lambda d: d["model"].update(vocab_size=-1), "is damaged: .*vocab_size=-1"),
        (lambda d: d["model"]["rope"].update(kind="x"), "is damaged: .*rope kind='x'"),
        (lambda d: d.update(stop_ids=3), "is damaged"),
    ],
)
def test_a_damaged_description_is_refused(change, message, saved):
    file = saved / "tsjax.json"
    description = json.loads(file.read_text())
    change(description)
    file.write_text(json.dumps(description))
    with pytest.raises(ValueError, match=f"tsjax.json.*{message}"):
        load(saved)


def test_arrays_that_do_not_fit_the_description_are_listed(saved):
    file = saved / "tsjax.json"
    changes = dict(num_layers=1, tie_embeddings=True, vocab_size=50, mlp_bias=True)
    change(file, model=json.loads(file.read_text())["model"] | changes)
    with pytest.raises(ValueError) as error:
        load(saved)
    for line in (
        "does not fit the config",
        "missing: model.layers.0.gate_up_bias",
        "not part of this model: model.layers.1.qkv\n",
        "not part of this model: model.unembed",
        "model.embed has shape [48, 32]; the config asks for [50, 32]",
    ):
        assert line in str(error.value)


def overwrite(name: str, content: bytes):
    return lambda state: (state / name).write_bytes(content)


def cut(state) -> None:
    os.truncate(max(state.rglob("d/*"), key=os.path.getsize), 1000)


TYPES = b'{"array_metadatas": [{"array_metadata": {}}]}'


@pytest.mark.parametrize(
    "damage",
    [
        overwrite("_METADATA", b"{"),
        overwrite("_sharding", b""),
        overwrite("manifest.ocdbt", b"x" * 90),
        lambda state: (state / "manifest.ocdbt").unlink(),
        overwrite("array_metadatas/process_0", TYPES),
        cut,
    ],
    ids=["names", "sharding", "list", "no list", "types", "cut"],
)
def test_damaged_array_files_are_named(damage, saved, caplog, monkeypatch):
    damage(saved / "params" / "state")
    unheard, found = [], None
    monkeypatch.setattr(sys, "unraisablehook", unheard.append)
    try:
        load(saved)
    except ValueError as error:  # not pytest.raises, which would keep what hangs on the error
        found = type(error), str(error)
    gc.collect()  # what readers left speaks now, if at all
    assert found is not None and found[0] is BadValue and "ts/params' is damaged: " in found[1]
    assert not caplog.records and not unheard


# What version 0.1.0 made of HuggingFace's names, one replacement after the other.
NAMES_OF_FORMAT_1 = {
    "model.medusa_layers": "heads", "linear.weight": "linear", "post_layernorm": "norm_out",
    "post_attention_layernorm": "mlp_norm", "embed_tokens": "embed", "lm_head": "model.unembed",
    "model.norm": "model.final_norm", "self_attn.": "", "mlp.": "", "_proj.weight": "",
    "_proj.bias": "_bias", ".weight": "",
}  # fmt: skip


def save_format_1(raw: dict, theirs: dict, folder) -> None:
    """A checkpoint as version 0.1.0 wrote it: q, k, v, gate and up apart, inputs before outputs."""
    from orbax.checkpoint import v1 as ocp

    cfg, arrays = model_config(raw), {}
    for key, array in theirs.items():
        path = key.replace("input_layernorm", "norm_in" if "medusa" in key else "attn_norm")
        for there, here in NAMES_OF_FORMAT_1.items():
            path = path.replace(there, here)
        name = path.split(".")[-1]
        if name != "embed":
            array = array.T
        if name in ("q", "k", "v", "q_bias", "k_bias", "v_bias"):
            array = array.reshape(*array.shape[:-1], -1, cfg.head_dim)
        if name == "o":
            array = array.reshape(-1, cfg.head_dim, cfg.embed_dim)
        arrays[path] = np.ascontiguousarray(array)
    folder.mkdir()
    ocp.save(folder / "params", arrays)
    description = {"format_version": 1, "model": cfg.to_dict(), "stop_ids": [2]}
    (folder / "tsjax.json").write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {**BIASED, "medusa_heads": 2}), pytest.param("qwen2", {}, marks=pytest.mark.wide)],
)
def test_a_checkpoint_of_format_1_is_read(family, changes, tmp_path):
    raw = hf_fixtures.config(family, **changes)
    theirs = hf_fixtures.tensors(raw, heads=changes.get("medusa_heads", 0))
    save_format_1(raw, theirs, tmp_path / "old")
    plain = load(tmp_path / "old")
    check_model(theirs, plain)
    if family == "qwen2":
        mesh = mesh_of_four()
        check_placed(load(tmp_path / "old", mesh=mesh), plain, mesh)
        half = {key: tensor.astype(jnp.bfloat16) for key, tensor in theirs.items()}
        check_model(half, load(tmp_path / "old", dtype="bfloat16"))
    save(plain, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "tsjax.json").read_text())["format_version"] == 2
    assert_same_trees(load(tmp_path / "new").params, plain.params)
    rounded = [load(tmp_path / name, weights="int8").params for name in ("old", "new")]
    assert_same_trees(*rounded)

# SPDX-License-Identifier: Apache-2.0
"""Loading is exact, placed as declared, and refuses what does not fit; saving is all or nothing."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import hf_fixtures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_fixtures import FAMILIES, make
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

import tsjax.files.checkpoint
from tsjax.files import huggingface, weight_files
from tsjax.files.checkpoint import Model, load, save
from tsjax.files.config_files import model_config
from tsjax.files.huggingface import TABLE, entries
from tsjax.model.logits import logits
from tsjax.model.params import abstract_params
from tsjax.model.sharding import named_sharding

BIASED = {"attention_bias": True, "mlp_bias": True}


def same(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same_trees(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        assert same(a, b), jax.tree_util.keystr(path)


def check_layer(theirs: dict, ours, cfg, prefix: str) -> None:
    """Every weight of one layer, moved by hand, head by head and unit by unit."""
    D, H, K, G = cfg.embed_dim, cfg.head_dim, cfg.num_kv_heads, cfg.group_size
    places = {"q": [(n // G, n % G) for n in range(K * G)]}
    places |= {"k": [(n, G) for n in range(K)], "v": [(n, G + 1) for n in range(K)]}
    for name, heads in places.items():
        theirs_of = f"{prefix}.self_attn.{name}_proj"
        assert len(theirs[f"{theirs_of}.weight"]) == H * len(heads)
        for n, place in enumerate(heads):
            rows = slice(n * H, (n + 1) * H)
            assert same(ours.qkv[place], theirs[f"{theirs_of}.weight"][rows])
            if cfg.qkv_bias:
                assert same(ours.qkv_bias[place], theirs[f"{theirs_of}.bias"][rows])
    assert ours.qkv.shape == (K, G + 2, H, D)
    weight = theirs[f"{prefix}.self_attn.o_proj.weight"]
    for n in range(cfg.num_heads):
        assert same(ours.o[:, n], weight[:, n * H : (n + 1) * H])
    for index, name in enumerate(("gate", "up")):
        assert same(ours.gate_up[:, index], theirs[f"{prefix}.mlp.{name}_proj.weight"])
        if cfg.mlp_bias:
            assert same(ours.gate_up_bias[:, index], theirs[f"{prefix}.mlp.{name}_proj.bias"])
    assert same(ours.down, theirs[f"{prefix}.mlp.down_proj.weight"])
    if cfg.mlp_bias:
        assert same(ours.down_bias, theirs[f"{prefix}.mlp.down_proj.bias"])
    if cfg.out_bias:
        assert same(ours.o_bias, theirs[f"{prefix}.self_attn.o_proj.bias"])
    if cfg.qk_norm:
        assert same(ours.q_norm, theirs[f"{prefix}.self_attn.q_norm.weight"])
        assert same(ours.k_norm, theirs[f"{prefix}.self_attn.k_norm.weight"])
    assert same(ours.attn_norm, theirs[f"{prefix}.input_layernorm.weight"])
    assert same(ours.mlp_norm, theirs[f"{prefix}.post_attention_layernorm.weight"])
    assert ours.attn_norm.shape == (D,)


def check_model(theirs: dict, model: Model) -> None:
    weights, cfg = model.params.model, model.cfg
    assert same(weights.embed, theirs["model.embed_tokens.weight"])
    assert same(weights.final_norm, theirs["model.norm.weight"])
    if cfg.tie_embeddings:
        assert weights.unembed is None
    else:
        assert same(weights.unembed, theirs["lm_head.weight"])
    for index, layer in enumerate(weights.layers):
        check_layer(theirs, layer, cfg, f"model.layers.{index}")
    for index, head in enumerate(model.params.heads):
        prefix = f"model.medusa_layers.{index}"
        assert same(head.linear, theirs[f"{prefix}.linear.weight"])
        assert same(head.norm_in, theirs[f"{prefix}.input_layernorm.weight"])
        assert same(head.norm_out, theirs[f"{prefix}.post_layernorm.weight"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_arrives_bit_by_bit(family, shards, tmp_path):
    make(tmp_path, family, shards=shards)
    model = load(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    check_model(hf_fixtures.tensors(raw), model)
    assert model.cfg == model_config(raw)
    assert model.stop_ids == (2,)
    assert model.num_params == sum(a.size for a in hf_fixtures.tensors(raw).values())


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", BIASED), ("qwen3", {"attention_bias": True})]
)
def test_biases_arrive(family, changes, tmp_path):
    make(tmp_path, family, **changes)
    check_model(load_file(tmp_path / "model.safetensors"), load(tmp_path))


def test_a_tensor_larger_than_a_block_arrives(tmp_path, monkeypatch):
    monkeypatch.setattr("tsjax.files.weight_files._BLOCK_BYTES", 300)  # two rows, and a rest
    make(tmp_path, vocab_size=49)
    check_model(load_file(tmp_path / "model.safetensors"), load(tmp_path))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_types_are_converted_as_numpy_does(stored, wanted, tmp_path):
    raw = hf_fixtures.config(torch_dtype=stored)
    content = {k: v.astype(jnp.dtype(stored)) for k, v in hf_fixtures.tensors(raw).items()}
    model = load(hf_fixtures.write(tmp_path, raw, content), dtype=wanted)
    check_model({k: v.astype(jnp.dtype(wanted)) for k, v in content.items()}, model)
    assert model.cfg.dtype == wanted
    if stored == wanted:
        assert_same_trees(load(tmp_path), model)


def test_every_row_of_the_table_is_used():
    biased = model_config(hf_fixtures.config(**BIASED, medusa_heads=1))
    normed = model_config(hf_fixtures.config("qwen3"))
    parallel = normed.with_heads(1, "parallel_own_vocabulary")
    configs = biased, normed, parallel
    paths = {re.sub(r"\.\d+\.", ".{i}.", e.path) for c in configs for e in entries(c)}
    tensors = [t for c in configs for e in entries(c) for t in e.tensors]
    assert paths == {path for _, path in TABLE}
    assert {re.sub(r"\.\d+\.", ".{i}.", t.key) for t in tensors} == {key for key, _ in TABLE}


def test_old_rotary_buffers_and_a_tied_lm_head_are_ignored(tmp_path):
    raw = hf_fixtures.config("qwen2")
    content = hf_fixtures.tensors(raw)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "lm_head.weight": content["model.embed_tokens.weight"].copy(),
    }
    check_model(content, load(hf_fixtures.write(tmp_path, raw, {**content, **extra})))


def test_heads_in_the_checkpoint_are_found(tmp_path):
    make(tmp_path, heads=3)
    model = load(tmp_path)
    assert model.cfg.num_draft_heads == 3 and len(model.params.heads) == 3
    check_model(load_file(tmp_path / "model.safetensors"), model)


@pytest.mark.parametrize("prefix", ["model.medusa_layers", "medusa_layers"])
@pytest.mark.parametrize("base_heads", [0, 1])
@pytest.mark.parametrize("as_file", [True, False])
def test_heads_are_attached(prefix, base_heads, as_file, tmp_path):
    base = make(tmp_path / "base", heads=base_heads)
    raw = hf_fixtures.config()
    heads = {k: v for k, v in hf_fixtures.tensors(raw, 7, heads=2).items() if "medusa" in k}
    (tmp_path / "adapter").mkdir()
    file = tmp_path / "adapter" / "anything.safetensors"
    save_file({k.replace("model.medusa_layers", prefix): v for k, v in heads.items()}, file)
    model = load(base, heads=file if as_file else file.parent)
    assert model.cfg.num_draft_heads == 2
    check_model({**load_file(base / "model.safetensors"), **heads}, model)

    save(load(base), tmp_path / "saved")
    assert_same_trees(load(tmp_path / "saved", heads=file).params, model.params)


def test_heads_are_taken_from_a_whole_checkpoint(tmp_path):
    base, other = make(tmp_path / "base"), make(tmp_path / "other", heads=2)
    model = load(base, heads=other)
    check_model(load_file(other / "model.safetensors"), model)


# --- threads that read -----------------------------------------------------------------------


def read(folder) -> Iterator[tuple[huggingface.Entry, np.ndarray]]:
    cfg, weights = huggingface.open_checkpoint(os.fspath(folder))
    return huggingface.read_model(cfg, weights)


def watch_rows(monkeypatch, watch) -> None:
    """`watch(name)` is called in each thread that begins to read rows of a tensor."""
    original = weight_files._safetensors_rows

    def rows(file, name, *place):
        watch(name)
        return original(file, name, *place)

    monkeypatch.setattr(weight_files, "_safetensors_rows", rows)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_read_the_same(threads, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "_THREADS", threads)
    monkeypatch.setattr(weight_files, "_BLOCK_BYTES", 200)
    make(tmp_path, num_hidden_layers=3, heads=2, torch_dtype=dtype)
    seen = []
    model = load(tmp_path, on_tensor=lambda *one: seen.append((*one, threading.get_ident())))
    content = load_file(tmp_path / "model.safetensors")
    check_model({name: array.astype(jnp.dtype(dtype)) for name, array in content.items()}, model)
    named = zip(entries(model.cfg), jax.tree.leaves(model.params), strict=True)
    assert seen == [(entry.path, leaf.nbytes, threading.get_ident()) for entry, leaf in named]


def test_blocks_of_one_tensor_are_read_side_by_side(tmp_path, monkeypatch):
    make(tmp_path)
    monkeypatch.setattr(huggingface, "_THREADS", 3)
    monkeypatch.setattr(weight_files, "_BLOCK_BYTES", 1200)
    together = threading.Barrier(3, timeout=20)
    watch_rows(
        monkeypatch, lambda name: together.wait() if name == "model.embed_tokens.weight" else None
    )
    _, embed = next(read(tmp_path))  # 48 rows of 32 numbers: 6 blocks, in twos of three
    assert same(embed, load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"])


def test_few_arrays_are_read_ahead(tmp_path, monkeypatch):
    make(tmp_path, num_hidden_layers=4)
    begun = []
    watch_rows(monkeypatch, begun.append)
    made: list[weakref.ref] = []
    empty = huggingface._aligned_empty

    def counted(*arguments):
        array = empty(*arguments)
        made.append(weakref.ref(array.base))
        return array

    monkeypatch.setattr(huggingface, "_aligned_empty", counted)
    cfg, _ = huggingface.open_checkpoint(os.fspath(tmp_path))
    wanted = entries(cfg)
    for number, (entry, array) in enumerate(read(tmp_path), 1):
        time.sleep(0.002)  # for as long as threads like to go on
        assert entry.path == wanted[number - 1].path
        allowed = {t.key for one in wanted[: number + huggingface._AHEAD] for t in one.tensors}
        assert set(begun) <= allowed
        del array
        assert sum(one() is not None for one in made) <= 1 + huggingface._AHEAD
    assert set(begun) == {tensor.key for one in wanted for tensor in one.tensors}


@pytest.mark.parametrize("threads", [1, 8])
def test_the_first_error_in_order_is_raised(threads, tmp_path, monkeypatch):
    """Also where a later array fails at once and the first one after a while."""
    make(tmp_path)
    monkeypatch.setattr(huggingface, "_THREADS", threads)
    seen = []

    def fail(name):
        if name == "model.layers.0.self_attn.o_proj.weight":
            raise OSError(f"no {name}")
        if name == "model.layers.0.self_attn.k_proj.weight":
            time.sleep(0.05)
            raise OSError(f"no {name}")

    watch_rows(monkeypatch, fail)
    with pytest.raises(OSError, match=r"^no model\.layers\.0\.self_attn\.k_proj\.weight$"):
        load(tmp_path, on_tensor=lambda path, size: seen.append(path))
    assert seen == ["model.embed", "model.layers.0.attn_norm"]
    assert not [one for one in threading.enumerate() if one.name.startswith("tsjax-read")]


def test_a_file_that_was_cut_after_it_was_opened(tmp_path):
    arrays = read(make(tmp_path))
    os.truncate(tmp_path / "model.safetensors", 5000)
    changed = r"model\.safetensors': model\..* cannot be read: the file was changed"
    with pytest.raises(ValueError, match=changed):
        list(arrays)


def test_an_interrupt_ends_the_threads(tmp_path, monkeypatch):
    make(tmp_path)

    def interrupt(path, size):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, on_tensor=interrupt)
    arrays = read(tmp_path)
    next(arrays)
    del arrays  # by a caller that wants no more
    assert not [one for one in threading.enumerate() if one.name.startswith("tsjax-read")]


# --- what is refused -------------------------------------------------------------------------


def change_tensors(folder, change):
    content = load_file(folder / "model.safetensors")
    change(content)
    save_file(content, folder / "model.safetensors")


def test_missing_unused_and_misshapen_tensors_are_all_listed(tmp_path):
    def change(content):
        del content["model.norm.weight"], content["model.layers.1.mlp.up_proj.weight"]
        content["model.layers.2.mlp.up_proj.weight"] = np.zeros((40, 32), np.float32)
        content["model.extra"] = np.zeros(3, np.float32)
        content["lm_head.weight"] = np.zeros((32, 48), np.float32)
        content["model.embed_tokens.weight"] = np.zeros((48, 32), np.int8)

    change_tensors(make(tmp_path), change)
    with pytest.raises(ValueError) as error:
        load(tmp_path)
    message = str(error.value)
    file = str(tmp_path / "model.safetensors")
    for line in (
        f"missing in {file}: model.norm.weight",
        f"missing in {file}: model.layers.1.mlp.up_proj.weight",
        f"not part of this model: model.layers.2.mlp.up_proj.weight in {file}",
        f"not part of this model: model.extra in {file}",
        f"lm_head.weight in {file} has shape [32, 48]; the config asks for [48, 32]",
        f"model.embed_tokens.weight in {file} has type I8",
    ):
        assert line in message
    assert len(message.splitlines()) == 7


def test_heads_announced_and_missing(tmp_path):
    make(tmp_path, medusa_heads=1)
    with pytest.raises(ValueError, match="missing in .*model.medusa_layers.0.linear.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("model.medusa_layers.0.linear.weight"), "missing in .*0.linear.weight"),
        (lambda c: c.update({"medusa_layers.0.x": np.zeros(2)}), "not part of .*medusa_layers.0.x"),
    ],
)
def test_damaged_heads_are_refused(change, message, tmp_path):
    base, adapter = make(tmp_path / "base"), make(tmp_path / "heads", heads=1)
    change_tensors(adapter, change)
    with pytest.raises(ValueError, match=message):
        load(base, heads=adapter)


def test_heads_without_heads_are_refused(tmp_path):
    with pytest.raises(ValueError, match="heads=.* holds no model.medusa_layers"):
        load(make(tmp_path), heads=tmp_path)


def test_heads_of_another_size_are_refused(tmp_path):
    base = make(tmp_path / "base")
    other = make(tmp_path / "other", heads=1, hidden_size=16)
    with pytest.raises(ValueError, match=r"\[16, 16\]; the config asks for \[32, 32\]"):
        load(base, heads=other)


@pytest.mark.parametrize("keep", [4, 100, -10])
def test_truncated_safetensors(keep, tmp_path):
    file = make(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors.* is truncated or corrupt"):
        load(tmp_path)


@pytest.mark.parametrize("same_size", [True, False])
def test_a_file_that_is_replaced_while_it_is_read(same_size, tmp_path):
    """Its tensors lie elsewhere, or are those of another model."""
    file = make(tmp_path) / "model.safetensors"
    weights = weight_files.open_weights(os.fspath(tmp_path))
    name, stored = next(iter(weights.items()))
    stored.rows(0, 1)
    tensors = {key: array + 1 for key, array in load_file(file).items()}
    if not same_size:
        tensors["a" * 100] = np.zeros(1, np.float32)
    save_file(tensors, tmp_path / "new")
    os.replace(tmp_path / "new", file)
    with pytest.raises(ValueError, match=f"{re.escape(name)} cannot be read.*was changed"):
        stored.rows(0, 1)


def test_corrupt_header_and_every_bad_shard_is_named(tmp_path):
    make(tmp_path, shards=3)
    for number in (1, 3):
        file = tmp_path / f"model-0000{number}-of-00003.safetensors"
        content = bytearray(file.read_bytes())
        content[8:40] = b"?" * 32
        file.write_bytes(content)
    with pytest.raises(ValueError, match="(?s)00001-of.*corrupt.*00003-of.*corrupt"):
        load(tmp_path)


def test_missing_shards_are_listed(tmp_path):
    make(tmp_path, shards=3)
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="index.json.*00001-of-00003.*00002-of-00003"):
        load(tmp_path)


def change_index(folder, change):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content)
    index.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("weight_map"), "no weight_map"),
        (
            lambda c: c["weight_map"].update({"x": "model-00001-of-00002.safetensors"}),
            "puts x in model-00001.*does not hold it",
        ),
        (lambda c: c["weight_map"].update({"x": "../x.safetensors"}), "outside its folder"),
    ],
)
def test_a_wrong_index_is_refused(change, message, tmp_path):
    make(tmp_path, shards=2)
    change_index(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    make(tmp_path, shards=2)
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    content = load_file(first)
    save_file({**load_file(second), **dict([content.popitem()])}, second)
    with pytest.raises(ValueError, match="holds .* again"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json' is not valid JSON"),
        ("config.json", "[]", "config.json' must hold a JSON object"),
        ("config.json", None, "neither a config.json .* nor a tsjax.json"),
        ("model.safetensors", None, "has no model.safetensors.* it has config.json"),
    ],
)
def test_broken_folders(file, content, message, tmp_path):
    make(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(tmp_path)


def test_a_file_is_not_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="a checkpoint is a folder, this is a file"):
        load(make(tmp_path) / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_nan_weights_warn_and_load(value, dtype, tmp_path):
    raw = hf_fixtures.config(torch_dtype=dtype)
    content = {k: v.astype(jnp.dtype(dtype)) for k, v in hf_fixtures.tensors(raw).items()}
    content["model.layers.0.input_layernorm.weight"][5] = jnp.finfo(dtype).max  # which is finite
    content["model.norm.weight"][3] = value
    hf_fixtures.write(tmp_path, raw, content)
    only = r"^model.norm.weight in \S* has NaN or infinite values"
    with pytest.warns(UserWarning, match=only):
        model = load(tmp_path)
    check_model(content, model)


def test_overflow_in_the_conversion_warns(tmp_path):
    make(tmp_path)
    change_tensors(tmp_path, lambda c: c["model.norm.weight"].__setitem__(3, 1e6))
    with pytest.warns(UserWarning, match="model.norm.weight .* infinite values as float16"):
        load(tmp_path, dtype="float16")


def test_config_without_dtype_takes_that_of_the_tensors(tmp_path):
    raw = hf_fixtures.config(torch_dtype=...)
    content = {k: v.astype(jnp.bfloat16) for k, v in hf_fixtures.tensors(raw).items()}
    assert load(hf_fixtures.write(tmp_path, raw, content)).cfg.dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["int8", "fp16", "bf16"])
def test_unknown_types_are_refused(dtype, tmp_path):
    with pytest.raises(ValueError, match=f"dtype='{dtype}' is not valid: one of float32"):
        load(make(tmp_path), dtype=dtype)


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


def test_pickled_weights_need_permission(tmp_path):
    make(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin.*allow_pickle=True"):
        load(tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights(dtype, zipped, tmp_path):
    torch = pytest.importorskip("torch")
    expected = load(make(tmp_path), dtype=dtype)
    content = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "pytorch_model.bin"
    tensors = {k: torch.from_numpy(v).to(getattr(torch, dtype)) for k, v in content.items()}
    torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
    model = load(tmp_path, dtype=dtype, allow_pickle=True)
    assert_same_trees(model.params, expected.params)


@pytest.mark.parity
def test_pickles_of_other_things_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    make(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": os.getcwd}, file)
    with pytest.raises(ValueError, match="corrupt or holds more than tensors"):
        load(tmp_path, allow_pickle=True)
    torch.save({"epoch": 3}, file)
    with pytest.raises(ValueError, match="holds more than tensors: epoch"):
        load(tmp_path, allow_pickle=True)
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="corrupt"):
        load(tmp_path, allow_pickle=True)


# --- meshes ----------------------------------------------------------------------------------


def mesh_of(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_weights_are_placed_on_the_mesh_as_declared(family, tmp_path):
    mesh = mesh_of((2, 2), ("data", "model"))
    plain = load(make(tmp_path / "hf", family, heads=1))
    save(plain, tmp_path / "ts")
    declared = jax.tree.leaves(abstract_params(plain.cfg, mesh))
    for folder in ("hf", "ts"):
        model = load(tmp_path / folder, mesh=mesh)
        assert_same_trees(model.params, plain.params)
        for leaf, wanted in zip(jax.tree.leaves(model.params), declared, strict=True):
            assert leaf.sharding == wanted.sharding
        qkv = model.params.model.layers[0].qkv  # a kv head, with its two query heads
        assert {shard.data.shape for shard in qkv.addressable_shards} == {(1, 4, 8, 32)}
    # What was saved from a mesh is the same on one device.
    save(load(tmp_path / "hf", mesh=mesh), tmp_path / "again")
    assert_same_trees(load(tmp_path / "again").params, plain.params)


def test_a_mesh_with_an_unknown_axis_is_refused(tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match="mesh axes"):
        load(tmp_path, mesh=mesh_of((4,), ("x",)))


def test_a_single_device_array_is_owned(tmp_path):
    # The array may share memory with what was read, never with the mapped file.
    model = load(make(tmp_path))
    before = np.array(model.params.model.embed)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(0, os.SEEK_END)
        size = file.tell()
        file.seek(0)
        file.write(b"\0" * size)
    assert same(model.params.model.embed, before)


# --- the tsjax format ------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_loaded_is_the_same(family, dtype, tmp_path):
    model = load(make(tmp_path / "hf", family, heads=1), dtype=dtype)
    save(model, tmp_path / "ts")
    again = load(tmp_path / "ts")
    assert_same_trees(again.params, model.params)
    assert (again.cfg, again.stop_ids) == (model.cfg, model.stop_ids)
    assert again.path == str(tmp_path / "ts")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_saved_float32_loads_as_another_type(dtype, tmp_path):
    model = load(make(tmp_path / "hf"))
    save(model, tmp_path / "ts")
    again = load(tmp_path / "ts", dtype=dtype)
    expected = jax.tree.map(lambda a: np.asarray(a).astype(jnp.dtype(dtype)), model.params)
    assert_same_trees(again.params, expected)
    assert again.cfg == dataclasses.replace(model.cfg, dtype=dtype)


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


def test_a_model_without_tokenizer_says_so(tmp_path):
    model = load(make(tmp_path))
    with pytest.raises(FileNotFoundError, match="no tokenizer could be loaded"):
        _ = model.tokenizer
    with pytest.raises(ValueError, match="has no path"):
        _ = dataclasses.replace(model, path=None).tokenizer


def test_a_model_is_a_pytree_of_its_parameters(tmp_path):
    model = load(make(tmp_path))
    assert len(jax.tree.leaves(model)) == len(entries(model.cfg))
    doubled = jax.jit(lambda m: jax.tree.map(lambda a: 2 * a, m))(model)
    assert doubled.cfg == model.cfg
    assert same(doubled.params.model.embed, 2 * np.asarray(model.params.model.embed))


def test_an_existing_folder_is_not_overwritten_unasked(tmp_path):
    model = load(make(tmp_path / "hf"))
    save(model, tmp_path / "ts")
    with pytest.raises(FileExistsError, match="exists; choose another place"):
        save(model, tmp_path / "ts")
    other = dataclasses.replace(model, stop_ids=(9,))
    save(other, tmp_path / "ts", overwrite=True)
    assert load(tmp_path / "ts").stop_ids == (9,)
    assert sorted(os.listdir(tmp_path)) == ["hf", "ts"]


def test_only_checkpoints_are_overwritten(tmp_path):
    model = load(make(tmp_path / "hf"))
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


def test_a_killed_save_leaves_nothing_at_the_destination(tmp_path):
    make(tmp_path / "hf")
    code = (
        "import os, signal, sys, tsjax.files.checkpoint as c\n"
        "c.copy_companions = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "c.save(c.load(sys.argv[1]), sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "hf"), str(tmp_path / "ts")]
    assert subprocess.run(command, capture_output=True).returncode == -9
    assert not (tmp_path / "ts").exists()


def test_params_that_do_not_fit_the_config_are_not_saved(tmp_path):
    model = load(make(tmp_path / "hf"))
    wrong = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, vocab_size=50))
    with pytest.raises(ValueError, match=r"model.embed has shape \[48, 32\]; .* \[50, 32\]"):
        save(wrong, tmp_path / "ts")
    assert os.listdir(tmp_path) == ["hf"]


@pytest.fixture
def saved(tmp_path):
    save(load(make(tmp_path / "hf")), tmp_path / "ts")
    return tmp_path / "ts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format_version=99), "format_version=99; this tsjax reads 1 and 2"),
        (lambda d: d.pop("format_version"), "format_version=None"),
        (lambda d: d.pop("model"), "is damaged: KeyError"),
        (lambda d: d.update(model=[]), "is damaged"),
        (lambda d: d["model"].update(colour="red"), "is damaged: .*unknown .*colour"),
        (lambda d: d["model"].pop("vocab_size"), "is damaged: .*vocab_size"),
        (lambda d: d["model"].update(vocab_size=-1), "is damaged: .*vocab_size=-1"),
        (lambda d: d["model"]["rope"].update(kind="x"), "is damaged: .*rope kind='x'"),
        (lambda d: d.update(stop_ids=3), "is damaged"),
    ],
)
def test_a_damaged_description_is_refused(change, message, saved):
    description = json.loads((saved / "tsjax.json").read_text())
    change(description)
    (saved / "tsjax.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=f"tsjax.json.*{message}"):
        load(saved)


def test_a_truncated_description_is_refused(saved):
    (saved / "tsjax.json").write_text((saved / "tsjax.json").read_text()[:-5])
    with pytest.raises(ValueError, match="tsjax.json' is not valid JSON"):
        load(saved)


def test_arrays_that_do_not_fit_the_description_are_listed(saved):
    description = json.loads((saved / "tsjax.json").read_text())
    description["model"].update(num_layers=1, tie_embeddings=True, vocab_size=50, mlp_bias=True)
    (saved / "tsjax.json").write_text(json.dumps(description))
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
    ("family", "changes"), [("llama", {**BIASED, "medusa_heads": 2}), ("qwen2", {}), ("qwen3", {})]
)
def test_a_checkpoint_of_format_1_is_read(family, changes, tmp_path):
    raw = hf_fixtures.config(family, **changes)
    theirs = hf_fixtures.tensors(raw, heads=changes.get("medusa_heads", 0))
    save_format_1(raw, theirs, tmp_path / "old")
    plain = load(tmp_path / "old")
    check_model(theirs, plain)
    # Also on a mesh, in another type, and saved again.
    mesh = mesh_of((2, 2), ("data", "model"))
    placed = load(tmp_path / "old", mesh=mesh)
    assert_same_trees(placed.params, plain.params)
    declared = jax.tree.leaves(abstract_params(plain.cfg, mesh))
    for leaf, wanted in zip(jax.tree.leaves(placed.params), declared, strict=True):
        assert leaf.sharding == wanted.sharding
    half = {key: tensor.astype(jnp.bfloat16) for key, tensor in theirs.items()}
    check_model(half, load(tmp_path / "old", dtype="bfloat16"))
    save(plain, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "tsjax.json").read_text())["format_version"] == 2
    assert_same_trees(load(tmp_path / "new").params, plain.params)


def test_arrays_that_do_not_fit_format_1_are_listed_under_their_names_there(tmp_path):
    raw = hf_fixtures.config()
    save_format_1(raw, hf_fixtures.tensors(raw), tmp_path / "old")
    file = tmp_path / "old" / "tsjax.json"
    description = json.loads(file.read_text())
    description["model"].update(num_layers=1, mlp_bias=True, mlp_dim=50)
    file.write_text(json.dumps(description))
    with pytest.raises(ValueError) as error:
        load(tmp_path / "old")
    for line in (
        "missing: model.layers.0.up_bias",
        "not part of this model: model.layers.1.q\n",
        "model.layers.0.gate has shape [32, 40]; the config asks for [32, 50]",
    ):
        assert line in str(error.value)


def test_missing_arrays_are_refused(saved):
    shutil.move(saved / "params", saved / "elsewhere")
    with pytest.raises(ValueError, match="params' is missing or damaged"):
        load(saved)


def test_damaged_arrays_are_refused(saved):
    for folder, _, files in os.walk(saved / "params"):
        for name in files:
            if os.path.getsize(os.path.join(folder, name)) > 20_000:  # the arrays' bytes
                with open(os.path.join(folder, name), "r+b") as file:
                    file.truncate(100)
    # In a process of its own: after the error, readers that are still at work report to an event
    # loop that orbax has closed, and whatever test runs then would be blamed for it.
    code = "import sys, tsjax; tsjax.load(sys.argv[1])"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert re.search("BadValue: .*params' is damaged", ran.stderr), ran.stderr


# --- the same numbers as transformers --------------------------------------------------------


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parity
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_scaling": LLAMA3}),
        ("llama", {**BIASED, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 16}),
        ("qwen2", {"rope_scaling": YARN}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("mistral", {"rope_scaling": {**YARN, "truncate": False}}),
    ],
)
def test_logits_are_those_of_transformers(family, changes, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    make(tmp_path, family, **changes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = np.random.default_rng(1).integers(0, 48, (2, 100), np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    model = load(tmp_path)
    actual = logits(model.params, jnp.asarray(tokens), cfg=model.cfg)
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)


def test_named_sharding_of_an_odd_size_is_replicated():
    # What loading relies on: sizes the mesh does not divide are replicated, not refused.
    mesh = mesh_of((1, 4), ("data", "model"))
    assert named_sharding((7, 8), ("vocab", "embed"), mesh).is_fully_replicated

# SPDX-License-Identifier: Apache-2.0
"""HuggingFace checkpoints: loading is exact, is done by threads, and refuses what does not fit.

What tsjax itself saves is the subject of test_saved_checkpoint.py.
"""

import json
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator

import hf_fixtures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import unpacked
from hf_fixtures import BIASED, assert_same_trees, change, change_tensors, make, same, weights
from safetensors.numpy import save_file

from tsjax.files import huggingface, weight_files
from tsjax.files.checkpoint import Model, load, save
from tsjax.files.config_files import model_config
from tsjax.files.tensor_names import Entry, entries

BOTH = (("", "weight"), ("_bias", "bias"))
NAMES = {
    **{f"{x}{end}": f"self_attn.{x}_proj.{kind}" for x in "qkvo" for end, kind in BOTH},
    **{f"{x}{end}": f"mlp.{x}_proj.{kind}" for x in ("gate", "up", "down") for end, kind in BOTH},
    **{f"{x}_norm": f"self_attn.{x}_norm.weight" for x in "qk"},
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}


def check_layer(theirs: dict, ours, cfg, prefix: str) -> None:
    """Every weight of one layer, and no other."""
    assert ours.qkv.shape == (cfg.num_kv_heads, cfg.group_size + 2, cfg.head_dim, cfg.embed_dim)
    parts = unpacked(ours)
    for name, of_theirs in NAMES.items():
        wanted = theirs.get(f"{prefix}.{of_theirs}")
        array = parts.get(name, getattr(ours, name, None))
        assert (array is None) == (wanted is None), name
        if wanted is not None:
            assert same(np.reshape(array, wanted.shape), wanted), name


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


@pytest.mark.parametrize(
    ("family", "shards", "changes"),
    [
        ("llama", 1, BIASED),
        ("llama", 3, {"num_hidden_layers": 3}),
        ("qwen3", 1, {"attention_bias": True}),
        ("qwen2", 1, {}),
        ("mistral", 1, {}),
    ],
)
def test_every_tensor_arrives_bit_by_bit(family, shards, changes, tmp_path):
    raw = json.loads((make(tmp_path, family, shards=shards, **changes) / "config.json").read_text())
    model, content = load(tmp_path), hf_fixtures.tensors(raw)
    check_model(content, model)
    assert model.cfg == model_config(raw)
    assert model.stop_ids == (2,)
    assert model.num_params == sum(a.size for a in content.values())


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_types_are_converted_as_numpy_does(stored, wanted, tmp_path):
    raw = hf_fixtures.config(torch_dtype=stored if wanted != "float16" else ...)
    content = {k: v.astype(jnp.dtype(stored)) for k, v in hf_fixtures.tensors(raw).items()}
    model = load(hf_fixtures.write(tmp_path, raw, content), dtype=wanted)
    check_model({k: v.astype(jnp.dtype(wanted)) for k, v in content.items()}, model)
    assert model.cfg.dtype == wanted
    if stored == wanted:  # the type of the config, or where it says none of the tensors
        assert_same_trees(load(tmp_path), model)


def test_old_rotary_buffers_and_a_tied_lm_head_are_ignored(tmp_path):
    raw = hf_fixtures.config("qwen2")
    content = hf_fixtures.tensors(raw)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "lm_head.weight": content["model.embed_tokens.weight"].copy(),
    }
    check_model(content, load(hf_fixtures.write(tmp_path, raw, {**content, **extra})))


@pytest.mark.parametrize(
    ("base_heads", "prefix", "as_file"),
    [(0, "model.medusa_layers", True), (1, "medusa_layers", False), (3, "medusa_layers", True)],
)
def test_heads_are_found_and_attached(base_heads, prefix, as_file, tmp_path):
    base = make(tmp_path / "base", heads=base_heads)
    whole, plain = weights(base), load(base)
    assert plain.cfg.num_draft_heads == len(plain.params.heads) == base_heads
    check_model(whole, plain)
    other = hf_fixtures.tensors(hf_fixtures.config(), 7, heads=2)
    heads = {k: v for k, v in other.items() if "medusa" in k}
    (tmp_path / "adapter").mkdir()
    file = tmp_path / "adapter" / "anything.safetensors"
    save_file({k.replace("model.medusa_layers", prefix): v for k, v in heads.items()}, file)
    model = load(base, heads=file if as_file else file.parent)
    assert model.cfg.num_draft_heads == 2
    check_model({**whole, **heads}, model)
    # Also by a checkpoint of tsjax, and from a whole checkpoint.
    save(plain, tmp_path / "saved")
    assert_same_trees(load(tmp_path / "saved", heads=file).params, model.params)
    donor = hf_fixtures.write(tmp_path / "donor", hf_fixtures.config(), other)
    check_model({**whole, **heads}, load(base, heads=donor))


# --- threads that read -----------------------------------------------------------------------


def read(folder) -> Iterator[tuple[Entry, np.ndarray]]:
    cfg, weights = huggingface.open_checkpoint(os.fspath(folder))
    return huggingface.read_model(cfg, weights)


def watch_rows(monkeypatch, watch) -> None:
    """`watch(name)` is called in each thread that begins to read rows of a tensor."""
    original = weight_files._safetensors_rows

    def rows(file, name, *place):
        watch(name)
        return original(file, name, *place)

    monkeypatch.setattr(weight_files, "_safetensors_rows", rows)


@pytest.mark.parametrize(("threads", "dtype"), [(1, "float32"), (8, "bfloat16")])
def test_threads_read_the_same(threads, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "_THREADS", threads)
    monkeypatch.setattr(weight_files, "_BLOCK_BYTES", 200)
    make(tmp_path, num_hidden_layers=3, heads=2, torch_dtype=dtype)
    seen = []
    model = load(tmp_path, on_tensor=lambda *one: seen.append((*one, threading.get_ident())))
    content = weights(tmp_path)
    check_model({name: array.astype(jnp.dtype(dtype)) for name, array in content.items()}, model)
    named = zip(entries(model.cfg), jax.tree.leaves(model.params), strict=True)
    assert seen == [(entry.path, leaf.nbytes, threading.get_ident()) for entry, leaf in named]


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


def test_missing_unused_and_misshapen_tensors_are_all_listed(tmp_path):
    folder, shape = make(tmp_path), np.zeros((40, 32), np.float32)
    wrong = {"model.norm.weight": ..., "model.layers.1.mlp.up_proj.weight": ...}
    wrong |= {"model.layers.2.mlp.up_proj.weight": shape, "model.extra": np.zeros(3, np.float32)}
    wrong |= {"lm_head.weight": np.zeros((32, 48), np.float32)}
    change_tensors(folder, wrong | {"model.embed_tokens.weight": np.zeros((48, 32), np.int8)})
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


def cut(folder, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])


def map_to(folder, file: str) -> None:
    index = folder / "model.safetensors.index.json"
    change(index, weight_map=json.loads(index.read_text())["weight_map"] | {"x": file})


def repeat_a_tensor(folder) -> None:
    first, second = sorted(folder.glob("*-of-00002.safetensors"))
    both = {**hf_fixtures.load_file(second), **dict([hf_fixtures.load_file(first).popitem()])}
    save_file(both, second)


INDEX = "model.safetensors.index.json"
REFUSED = [  # shards, what is done to the folder, what is said of it
    (1, lambda folder: cut(folder, 4), "model.safetensors.* is truncated or corrupt"),
    (1, lambda folder: cut(folder, -10), "model.safetensors.* is truncated or corrupt"),
    (3, lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(),
     "index.json.*00002-of-00003"),
    (2, lambda folder: change(folder / INDEX, weight_map=...), "no weight_map"),
    (2, lambda folder: map_to(folder, "model-00001-of-00002.safetensors"),
     "puts x in model-00001.*does not hold it"),
    (2, lambda folder: map_to(folder, "../x.safetensors"), "outside its folder"),
    (2, repeat_a_tensor, "holds .* again"),
    (1, lambda folder: (folder / "config.json").write_text("[]"), "must hold a JSON object"),
    (1, lambda folder: (folder / "config.json").unlink(), "neither a config.json .* nor a tsjax"),
    (1, lambda folder: (folder / "model.safetensors").unlink(),
     "has no model.safetensors.* it has config.json"),
    (1, lambda folder: change(folder / "config.json", medusa_heads=1),
     "missing in .*model.medusa_layers.0.linear.weight"),
    (1, lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
     "pytorch_model.bin.*allow_pickle=True"),
]  # fmt: skip


@pytest.mark.parametrize(("shards", "damage", "message"), REFUSED)
def test_damaged_folders_are_refused(shards, damage, message, tmp_path):
    damage(make(tmp_path, shards=shards))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"heads": 1}, {"model.medusa_layers.0.linear.weight": ...}, "missing in .*0.linear.wei"),
        ({"heads": 1}, {"medusa_layers.0.x": np.zeros(2)}, "not part of .*medusa_layers.0.x"),
        ({"heads": 1, "hidden_size": 16}, {}, r"\[16, 16\]; the config asks for \[32, 32\]"),
        ({}, {}, "heads=.* holds no model.medusa_layers"),
    ],
)
def test_damaged_heads_are_refused(options, changes, message, tmp_path):
    base, adapter = make(tmp_path / "base"), make(tmp_path / "heads", **options)
    change_tensors(adapter, changes)
    with pytest.raises(ValueError, match=message):
        load(base, heads=adapter)


@pytest.mark.parametrize("same_size", [True, False])
def test_a_file_that_is_replaced_while_it_is_read(same_size, tmp_path):
    """Its tensors lie elsewhere, or are those of another model."""
    file = make(tmp_path) / "model.safetensors"
    stored = weight_files.open_weights(os.fspath(tmp_path))
    name, rows = next((name, one.rows) for name, one in stored.items())
    rows(0, 1)
    tensors = {key: array + 1 for key, array in weights(tmp_path).items()}
    if not same_size:
        tensors["a" * 100] = np.zeros(1, np.float32)
    save_file(tensors, tmp_path / "new")
    os.replace(tmp_path / "new", file)
    with pytest.raises(ValueError, match=f"{re.escape(name)} cannot be read.*was changed"):
        rows(0, 1)


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", np.nan), ("bfloat16", -np.inf), ("float16", np.inf)]
)
def test_weights_that_are_not_finite_warn_and_load(value, dtype, tmp_path):
    raw = hf_fixtures.config(torch_dtype=dtype)
    content = {k: v.astype(jnp.dtype(dtype)) for k, v in hf_fixtures.tensors(raw).items()}
    content["model.layers.0.input_layernorm.weight"][5] = jnp.finfo(dtype).max  # which is finite
    content["model.norm.weight"][3] = value
    hf_fixtures.write(tmp_path, raw, content)
    only = r"^model.norm.weight in \S* has NaN or infinite values"
    with pytest.warns(UserWarning, match=only):
        model = load(tmp_path)
    check_model(content, model)
    if dtype == "float32":  # whose largest number is too large
        with pytest.warns(UserWarning, match="input_layernorm.* infinite values as float16"):
            load(tmp_path, dtype="float16")


def test_wrong_arguments_are_refused(tmp_path):
    make(tmp_path)
    for dtype in ("int8", "bits16", "half_"):
        with pytest.raises(ValueError, match=f"dtype='{dtype}' is not valid: one of float32"):
            load(tmp_path, dtype=dtype)
    wrong = "a checkpoint is a folder or a file ending in .gguf, this is a file"
    with pytest.raises(ValueError, match=wrong):
        load(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="mesh axes"):
        load(tmp_path, mesh=jax.make_mesh((4,), ("x",)))


# --- pickles -----------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize(("dtype", "zipped"), [("float32", True), ("bfloat16", False)])
def test_pickled_weights(dtype, zipped, tmp_path):
    torch = pytest.importorskip("torch")
    expected = load(make(tmp_path), dtype=dtype)
    content = weights(tmp_path)
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
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="corrupt"):
        load(tmp_path, allow_pickle=True)
    for content, more in (({"a": os.getcwd}, ""), ({"epoch": 3}, ": epoch")):
        torch.save(content, file)
        with pytest.raises(ValueError, match=f"holds more than tensors{more}"):
            load(tmp_path, allow_pickle=True)

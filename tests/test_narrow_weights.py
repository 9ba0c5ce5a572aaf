# SPDX-License-Identifier: Apache-2.0
"""Models with matrices in few bits: their numbers, and that all else is as with wide ones.

The wide model with the same numbers, read by the gguf package, is the oracle.
"""

import dataclasses
import gc

import gguf_fixtures
import hf_fixtures
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Types

import tsjax
from pallas_kernels import NarrowMatrix, native
from pallas_kernels.narrow_product.matrix import FORMATS
from tsjax.base.errors import NotInstalled, NotSupported
from tsjax.base.model_config import FORMATS as NAMES
from tsjax.files import gguf_numbers
from tsjax.files.fingerprint import model_fingerprint
from tsjax.methods.devices import pass_work
from tsjax_convert import to_hf, to_tsjax, verify

LARGE = {"hidden_size": 256, "intermediate_size": 512}  # whole blocks of 256
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def mixed(name: str) -> Types:
    """As the files that people use: v and down have more bits, the vocabulary most."""
    more = {"v_proj": Types.Q6_K, "down_proj": Types.Q6_K, "up_proj": Types.Q5_K}
    more |= {"embed_tokens": Types.Q8_0, "lm_head": Types.Q8_0, "o_proj": Types.F16}
    return more.get(name.split(".")[-2], Types.Q4_K)


def wide_numbers(matrix) -> np.ndarray:
    """[*outputs, *inputs] of a matrix of a model, in one piece or in several."""
    if isinstance(matrix, tuple):
        return np.concatenate([wide_numbers(piece) for piece in matrix], axis=1)
    if isinstance(matrix, NarrowMatrix):
        return np.asarray(matrix.numbers()).reshape(*matrix.outputs, *matrix.inputs)
    return np.asarray(matrix, np.float32)


def bytes_of(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def tokens_of(result) -> list[list[int]]:
    return [np.asarray(row).tolist() for row in result.tokens]


def matrices(model: tsjax.Model) -> dict[str, np.ndarray]:
    found = {}
    for index, layer in enumerate(model.params.model.layers):
        for name in ("qkv", "o", "gate_up", "down"):
            found[f"{index}.{name}"] = wide_numbers(getattr(layer, name))
    return found


def test_the_formats_have_one_list():
    assert tuple(FORMATS) == NAMES


@pytest.mark.skipif(not native.on_host(), reason="C++ takes blocks apart")
@pytest.mark.parametrize("kind", [*(getattr(Types, name) for name in NAMES), mixed])
def test_stored_blocks_keep_their_numbers(kind, tmp_path):
    """Bit for bit those of the package, in the rows and columns of the wide model."""
    family = "llama" if kind in (mixed, Types.Q4_0, Types.Q6_K) else "qwen2"
    path = gguf_fixtures.make(tmp_path / "m.gguf", family, kind, **LARGE)
    narrow = tsjax.load(path, weights="stored", dtype="float32")
    wide = tsjax.load(path.with_suffix(""), dtype="float32")
    assert narrow.cfg.as_wide == dataclasses.replace(wide.cfg, family=narrow.cfg.family)
    for name, array in matrices(wide).items():
        found = matrices(narrow)[name]
        if not (kind is mixed and name.endswith(".o")):  # F16 is no narrow form
            assert narrow.cfg.is_narrow
        np.testing.assert_array_equal(found.view(np.uint32), array.view(np.uint32), name)
    unembed = narrow.params.model.unembed
    assert isinstance(unembed, NarrowMatrix)
    tied = (
        wide.params.model.embed if wide.params.model.unembed is None else wide.params.model.unembed
    )
    np.testing.assert_array_equal(wide_numbers(unembed), np.asarray(tied))
    np.testing.assert_array_equal(narrow.params.model.embed, wide.params.model.embed)
    logits = [tsjax.forward(model, np.asarray([PROMPT])) for model in (narrow, wide)]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "hf"
    return hf_fixtures.make(path, hidden_size=64, intermediate_size=128, vocab_size=80)


@pytest.mark.parametrize(("weights", "steps"), [("int8", 127), ("int4", 15)])
def test_rounded_ones_are_near(folder, weights, steps):
    """No further than half a step of their group, whose numbers lie in a range."""
    model, wide = tsjax.load(folder, weights=weights), matrices(tsjax.load(folder))
    for name, found in matrices(model).items():
        groups = wide[name].reshape(-1, 32)
        most = np.abs(groups).max(axis=1) if weights == "int8" else np.ptp(groups, axis=1)
        error = np.abs(found.reshape(-1, 32) - groups).max(axis=1)
        assert (error <= most / steps * 0.502 + 1e-3 * np.abs(groups).max(axis=1)).all(), name
        assert error.max() > 0
    assert model.num_params == tsjax.load(folder).num_params


METHODS = {
    "text": tsjax.LikelyTree(width=6),
    "int8 passes": tsjax.methods.MagicDec(draft_budget=8, num_sinks=2, draft_weights="int8"),
}


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        ("int8", "float32"), ("int4", "bfloat16"),
        pytest.param("int8", "bfloat16", marks=pytest.mark.wide),
        pytest.param("int4", "float32", marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_methods_say_what_plain_decoding_says(folder, weights, dtype):
    model = tsjax.load(folder, weights=weights, dtype=dtype)
    settings = {"max_new_tokens": 40, "do_sample": True, "eos_token_id": ()}
    plain = tsjax.generate(model, PROMPT, method="autoregressive", **settings)
    for name, method in METHODS.items():
        found = tsjax.generate(model, PROMPT, method=method, **settings)
        assert tokens_of(found) == tokens_of(plain), name
        assert model.bytes_for(method) == 0  # it drafts with itself
        assert model.params_for(method) is model.params


def test_a_mesh_holds_parts_of_it(folder):
    mesh = jax.make_mesh((1, 2), ("data", "model"))
    alone = tsjax.load(folder, weights="int4", dtype="float32")
    split = tsjax.load(folder, weights="int4", dtype="float32", mesh=mesh)
    layer = split.params.model.layers[0]
    for matrix, axis in ((layer.qkv, 0), (layer.gate_up, 0), (layer.down, 1), (layer.o, 1)):
        for array in (matrix.values, matrix.scales, matrix.least):
            assert 2 * array.sharding.shard_shape(array.shape)[axis] == array.shape[axis]
    assert model_fingerprint(split) == model_fingerprint(alone)
    texts = [
        tokens_of(tsjax.generate(model, PROMPT, max_new_tokens=20, eos_token_id=()))
        for model in (alone, split)
    ]
    assert texts[0] == texts[1]


def test_checkpoints_keep_them(folder, tmp_path):
    model = tsjax.load(folder, weights="int4")
    tsjax.save(model, tmp_path / "narrow")
    back = tsjax.load(tmp_path / "narrow")
    assert back.cfg == model.cfg
    for one, other in zip(*map(jax.tree.leaves, (back.params, model.params)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert tsjax.load(tmp_path / "narrow", weights="int4").cfg == model.cfg
    for weights in ("float", "int8"):
        with pytest.raises(ValueError, match=f"weights='{weights}' is not valid: .* wide ones are"):
            tsjax.load(tmp_path / "narrow", weights=weights)
    # A wide checkpoint of this package is rounded as the folder that it was made of.
    to_tsjax(folder, tmp_path / "wide")
    again = tsjax.load(tmp_path / "wide", weights="int4")
    assert again.cfg == model.cfg
    for one, other in zip(*map(jax.tree.leaves, (again.params, model.params)), strict=True):
        np.testing.assert_array_equal(one, other)
    to_tsjax(folder, tmp_path / "written", weights="int4")
    assert verify(folder, tmp_path / "written") == len(jax.tree.leaves(model.params))
    to_tsjax(folder, tmp_path / "written", weights="int8", overwrite=True)
    assert tsjax.load(tmp_path / "written").cfg.unembed_format == "Q8_0"
    with pytest.raises(ValueError, match="src=.* holds narrow weights"):
        to_hf(tmp_path / "narrow", tmp_path / "hf")
    swapped = model.with_params(back.params)
    assert model_fingerprint(swapped) == model_fingerprint(model)
    fingerprints = {model_fingerprint(tsjax.load(folder, weights=w)) for w in (None, "int8")}
    assert len(fingerprints | {model_fingerprint(model)}) == 3


def test_a_wide_checkpoint_is_rounded_layer_by_layer(tmp_path):
    """What is held at a time, of all arrays of jax: narrow ones, and the wide ones of a layer."""
    folder = hf_fixtures.make(tmp_path / "hf", num_hidden_layers=6)
    model = tsjax.load(folder)
    tsjax.save(model, tmp_path / "wide")
    most = max(map(bytes_of, (model.params.model.embed, *model.params.model.layers)))
    assert most < 0.4 * bytes_of(model.params)
    del model

    gc.collect()
    gc.freeze()  # else each look below would go through all that other tests have left

    def live():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    before, narrow, beside = live(), [], []

    def on_tensor(path, nbytes):
        narrow.append(nbytes)
        beside.append(live() - before - sum(narrow))

    try:
        found = tsjax.load(tmp_path / "wide", weights="int8", on_tensor=on_tensor)
    finally:
        gc.unfreeze()
    assert sum(narrow) == bytes_of(found.params)
    assert max(beside) <= most
    assert model_fingerprint(found) == model_fingerprint(tsjax.load(folder, weights="int8"))


def test_saved_runs_know_them(folder, tmp_path):
    model, settings = tsjax.load(folder, weights="int8"), {"eos_token_id": ()}
    whole = tsjax.generate(model, PROMPT, max_new_tokens=24, **settings)
    run = tmp_path / "run.json"
    tsjax.generate(model, PROMPT, max_new_tokens=10, save_to=run, **settings)
    with pytest.raises(ValueError, match="was saved with weights='int8', the model has None"):
        tsjax.generate(tsjax.load(folder), resume_from=run, max_new_tokens=24)
    found = tsjax.generate(model, resume_from=run, max_new_tokens=24)
    assert tokens_of(found) == tokens_of(whole)
    assert tsjax.check_run(model, run).num_tokens == 10


def test_what_cannot_be_is_said(folder, tmp_path):
    with pytest.raises(ValueError, match="weights='int2' is not valid: one of 'float', 'int8'"):
        tsjax.load(folder, weights="int2")
    with pytest.raises(ValueError, match="weights='stored' is not valid for .*: of a GGUF file"):
        tsjax.load(folder, weights="stored")
    path = gguf_fixtures.make(tmp_path / "rare.gguf", kind=Types.TQ1_0, **LARGE)
    with pytest.raises(NotSupported, match=r"weights='stored' is .* TQ1_0, as blk.*'int8' rounds"):
        tsjax.load(path, weights="stored")


def test_without_a_compiler(tmp_path, monkeypatch):
    """Blocks stay together; what the gguf package widens can be rounded."""
    path = gguf_fixtures.make(tmp_path / "m.gguf", kind=Types.Q8_0)
    gguf_numbers.kind_of_code.cache_clear()
    monkeypatch.setattr(native, "on_host", lambda: None)
    with pytest.raises(NotInstalled, match="weights='stored' needs the kernels in C"):
        tsjax.load(path, weights="stored")
    assert tsjax.load(path, weights="int8").cfg.is_narrow
    gguf_numbers.kind_of_code.cache_clear()


@pytest.mark.parametrize("weights", ["float", "int8", "int4"])
def test_costs_count_what_a_pass_reads(folder, weights):
    model = tsjax.load(folder, weights=weights)
    work = pass_work(model.cfg, 1, 0)
    layers = [(x.qkv, x.o, x.gate_up, x.down) for x in model.params.model.layers]
    held = [sum(x.nbytes for x in jax.tree.leaves(y)) for y in (layers, model.params.model.unembed)]
    assert [work["products"].bytes, work["logits"].bytes] == held

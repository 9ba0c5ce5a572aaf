# SPDX-License-Identifier: Apache-2.0
"""Weights in memory under HuggingFace's names, bit for bit there and back, from every kind of
array; and low-rank adapters, which are added while the matrices are read."""

import json

import hf_fixtures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tsjax

FAMILIES = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {}),
]


def bits(array) -> bytes:
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_there_and_back_is_the_same(family, changes, dtype, tmp_path):
    raw = hf_fixtures.config(family, torch_dtype=dtype, **changes)
    content = {k: v.astype(jnp.dtype(dtype)) for k, v in hf_fixtures.tensors(raw).items()}
    model = tsjax.from_hf(content, raw)
    back = tsjax.to_hf(model)
    assert {k: (v.shape, v.dtype, bits(v)) for k, v in back.items()} == {
        k: (v.shape, v.dtype, bits(v)) for k, v in content.items()
    }
    hf_fixtures.write(tmp_path / "hf", raw, content)
    loaded = tsjax.load(tmp_path / "hf")
    assert (loaded.cfg, loaded.stop_ids) == (model.cfg, model.stop_ids)
    for one, other in zip(*map(jax.tree.leaves, (loaded.params, model.params)), strict=True):
        assert bits(one) == bits(other)
    assert bits(tsjax.from_hf(back, model.cfg).params.model.embed) == bits(model.params.model.embed)
    tsjax.save_hf(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {k: bits(v) for k, v in written.items()} == {k: bits(v) for k, v in content.items()}


def test_parameters_alone_and_others_of_the_shape():
    model = tsjax.from_hf(hf_fixtures.tensors(raw := hf_fixtures.config()), raw)
    doubled = jax.tree.map(lambda x: 2 * x, model.params)
    found = tsjax.to_hf(doubled, model.cfg)
    for name, array in tsjax.to_hf(model).items():
        np.testing.assert_array_equal(found[name], 2 * array)


def test_a_config_in_every_form(tmp_path):
    raw = hf_fixtures.config("qwen2")
    content = hf_fixtures.tensors(raw)
    hf_fixtures.write(tmp_path / "hf", raw, content)
    wanted = tsjax.load(tmp_path / "hf").cfg
    for config in (raw, tmp_path / "hf", tmp_path / "hf" / "config.json", wanted):
        assert tsjax.from_hf(content, config).cfg == wanted
    halves = tsjax.from_hf(content, raw, dtype="bf16")
    assert halves.cfg.dtype == halves.params.model.embed.dtype == "bfloat16"
    silent = {k: v for k, v in raw.items() if k != "torch_dtype"}
    assert tsjax.from_hf(content, silent).cfg.dtype == "float32"
    assert tsjax.from_hf(content, raw, weights="int8").cfg.is_narrow


@pytest.mark.parity
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_a_model_of_torch_as_it_is_in_memory(family, changes):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    raw = hf_fixtures.config(family, **changes)
    config = transformers.AutoConfig.for_model(**raw)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = np.arange(12)[None]
    for kind in (torch.float32, torch.bfloat16):
        theirs = theirs.to(kind)
        model = tsjax.from_hf(theirs.state_dict(), theirs.config, dtype=kind)
        assert model.cfg.dtype == str(kind).removeprefix("torch.")
        back = tsjax.to_hf(model)
        for name, tensor in theirs.state_dict().items():
            if name in back:
                np.testing.assert_array_equal(
                    np.asarray(back[name], np.float32), tensor.float().numpy()
                )
    model = tsjax.from_hf(theirs.float().state_dict(), theirs.config, dtype="float32")
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(tsjax.forward(model, tokens), wanted, atol=2e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, r: (t | {"more": np.ones(3, "f")}, r), "not part of this model: more"),
        (lambda t, r: ({k: v for k, v in t.items() if "norm" not in k}, r), "missing in tensors"),
        (lambda t, r: (t, 5), "config=5 is not valid"),
        (lambda t, r: ({}, r), "at least one array"),
        (lambda t, r: (t | {"model.norm.weight": "no"}, r), r"tensors\['model.norm.weight'\]"),
        (lambda t, r: (t, r | {"hidden_act": "gelu"}), "gelu"),
    ],
)
def test_what_is_no_model_is_refused(change, message):
    raw = hf_fixtures.config()
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        tsjax.from_hf(*change(hf_fixtures.tensors(raw), raw))


# --- low-rank adapters ---------------------------------------------------------------------------

SCALES = {"lora_alpha": 6, "alpha_pattern": {"layers.1.mlp.up_proj": 3}}


def write_adapter(folder, raw, content, rng, *, rank=2, names=None, **changes):
    """As PEFT writes it, for some matrices of every kind; what each of them becomes."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "bias": "none", "modules_to_save": None, **SCALES}
    config |= changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors, merged = {}, dict(content)
    for name, matrix in content.items():
        of = name.removesuffix(".weight")
        if matrix.ndim != 2 or "embed" in name or "k_proj" in name or "lm_head" in name:
            continue
        down = rng.standard_normal((rank, matrix.shape[1])).astype(np.float32)
        up = rng.standard_normal((matrix.shape[0], rank)).astype(np.float32)
        tensors[f"base_model.model.{of}.lora_A.weight"] = down
        tensors[f"base_model.model.{of}.lora_B.weight"] = up
        alpha = 3 if of.endswith("layers.1.mlp.up_proj") else 6
        scale = alpha / (np.sqrt(rank) if changes.get("use_rslora") else rank)
        merged[name] = matrix.astype(np.float64) + scale * up.astype(np.float64) @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_adapter_is_added(family, changes, tmp_path, rng):
    raw = hf_fixtures.config(family)
    content = hf_fixtures.tensors(raw)
    hf_fixtures.write(tmp_path / "hf", raw, content)
    wanted = write_adapter(tmp_path / "adapter", raw, content, rng, **changes)
    tsjax.save(tsjax.load(tmp_path / "hf"), tmp_path / "ts")
    for base in ("hf", "ts"):
        model = tsjax.load(tmp_path / base, adapter=tmp_path / "adapter")
        for name, array in tsjax.to_hf(model).items():
            np.testing.assert_allclose(array, wanted[name], rtol=2e-6, atol=2e-6)
        assert model.cfg == tsjax.load(tmp_path / "hf").cfg
    narrow = tsjax.load(tmp_path / "hf", adapter=tmp_path / "adapter", weights="int8")
    tsjax.save_hf(model, tmp_path / "merged")
    same = tsjax.load(tmp_path / "merged", weights="int8")
    for one, other in zip(*map(jax.tree.leaves, (narrow.params, same.params)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_adapter_is_added_before_rounding(dtype, tmp_path, rng):
    raw = hf_fixtures.config(torch_dtype=dtype)
    content = {k: v.astype(jnp.dtype(dtype)) for k, v in hf_fixtures.tensors(raw).items()}
    hf_fixtures.write(tmp_path / "hf", raw, content)
    wanted = write_adapter(tmp_path / "adapter", raw, content, rng)
    model = tsjax.load(tmp_path / "hf", adapter=tmp_path / "adapter")
    for name, array in tsjax.to_hf(model).items():
        assert array.dtype == dtype
        rounded = np.asarray(wanted[name], np.float32).astype(array.dtype).astype(np.float32)
        np.testing.assert_allclose(np.asarray(array, np.float32), rounded, rtol=0.01, atol=0.01)


def test_an_adapter_of_a_tied_vocabulary_is_refused(tmp_path, rng):
    """Also where the file has a matrix of that name, which nobody reads."""
    raw = hf_fixtures.config(tie_word_embeddings=True)
    content = hf_fixtures.tensors(raw)
    content["lm_head.weight"] = content["model.embed_tokens.weight"].copy()
    hf_fixtures.write(tmp_path / "hf", raw, content)
    write_adapter(tmp_path / "adapter", raw, content, rng)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    V, D = content["lm_head.weight"].shape
    parts = {"A": np.ones((2, D), "f"), "B": np.ones((V, 2), "f")}
    more = {f"base_model.model.lm_head.lora_{k}.weight": v for k, v in parts.items()}
    save_file(load_file(file) | more, file)
    with pytest.raises(ValueError, match="lm_head.weight: .* has no such matrix"):
        tsjax.load(tmp_path / "hf", adapter=tmp_path / "adapter")


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_an_adapter_of_peft(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    raw = hf_fixtures.config("qwen2")
    hf_fixtures.write(tmp_path / "hf", raw, hf_fixtures.tensors(raw))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    settings = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules="all-linear", init_lora_weights=False,
        rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 5},
    )  # fmt: skip
    adapted = peft.get_peft_model(theirs, settings)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    found = tsjax.to_hf(tsjax.load(tmp_path / "hf", adapter=tmp_path / "adapter"))
    changed = 0
    for name, array in found.items():
        np.testing.assert_allclose(array, merged[name].numpy(), rtol=2e-6, atol=2e-6)
        changed += bool((np.asarray(array) != hf_fixtures.weights(tmp_path / "hf")[name]).any())
    assert changed == 14


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(use_dora=True), "use_dora=True is not supported.*merge_and_unload"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(peft_type="IA3"), "peft_type='IA3'"),
        (dict(bias="all"), "bias='all'"),
        (dict(init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (dict(lora_alpha="x"), "lora_alpha='x'"),
    ],
)
def test_another_kind_of_adapter_is_refused(changes, message, tmp_path, rng):
    raw = hf_fixtures.config()
    content = hf_fixtures.tensors(raw)
    hf_fixtures.write(tmp_path / "hf", raw, content)
    write_adapter(tmp_path / "adapter", raw, content, rng, **changes)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        tsjax.load(tmp_path / "hf", adapter=tmp_path / "adapter")


def test_an_adapter_of_another_model_is_refused(tmp_path, rng):
    raw, other = hf_fixtures.config(), hf_fixtures.config(num_hidden_layers=3)
    hf_fixtures.write(tmp_path / "hf", raw, hf_fixtures.tensors(raw))
    write_adapter(tmp_path / "adapter", other, hf_fixtures.tensors(other), rng)
    with pytest.raises(ValueError, match=r"model.layers.2.*has no such matrix"):
        tsjax.load(tmp_path / "hf", adapter=tmp_path / "adapter")
    with pytest.raises(FileNotFoundError, match=r"a folder with adapter_config.json"):
        tsjax.load(tmp_path / "hf", adapter=tmp_path / "hf")
    with pytest.raises(FileNotFoundError, match=r"it is an adapter: .* adapter= this folder"):
        tsjax.load(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(ValueError, match="alone"):
        tsjax.load(tmp_path / "hf", adapter=tmp_path / "adapter")

# SPDX-License-Identifier: Apache-2.0
"""Weights in memory under HuggingFace's names, bit for bit there and back, from every kind of
array; and low-rank adapters, which are added while the matrices are read."""

import json

import hf_fixtures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_fixtures import BIASED, assert_same_models, assert_same_trees, weights
from safetensors.numpy import load_file, save_file

import tsjax

FAMILIES = [
    ("llama", {**BIASED, "torch_dtype": "bfloat16"}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {"torch_dtype": "float16"}),
    ("qwen3", {"torch_dtype": "bfloat16"}),
    ("mistral", {}),
]


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_there_and_back_is_the_same(family, changes, tmp_path):
    raw = hf_fixtures.config(family, **changes)
    kind = jnp.dtype(raw["torch_dtype"])
    content = {k: v.astype(kind) for k, v in hf_fixtures.tensors(raw).items()}
    model = tsjax.from_hf(content, raw)
    back = tsjax.to_hf(model)
    assert_same_trees(back, content)
    loaded = tsjax.load(hf_fixtures.write(tmp_path / "hf", raw, content))
    assert loaded.stop_ids == model.stop_ids
    assert_same_models(loaded, model)
    assert_same_models(tsjax.from_hf(back, model.cfg), model)
    tsjax.save_hf(model, tmp_path / "out")
    assert_same_trees(weights(tmp_path / "out"), content)


def test_parameters_alone_and_others_of_the_shape():
    model = tsjax.from_hf(hf_fixtures.tensors(raw := hf_fixtures.config()), raw)
    doubled = jax.tree.map(lambda x: 2 * x, model.params)
    wanted = {name: 2 * array for name, array in tsjax.to_hf(model).items()}
    assert_same_trees(tsjax.to_hf(doubled, model.cfg), wanted)


def test_a_config_in_every_form(tmp_path):
    raw = hf_fixtures.config("qwen2")
    content = weights(hf_fixtures.make(tmp_path / "hf", "qwen2"))
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
    config = transformers.AutoConfig.for_model(**hf_fixtures.config(family, **changes))
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    for kind in (torch.float32, torch.bfloat16):
        state = theirs.to(kind).state_dict()
        model = tsjax.from_hf(state, theirs.config, dtype=kind)
        assert model.cfg.dtype == str(kind).removeprefix("torch.")
        back = {name: np.asarray(array, np.float32) for name, array in tsjax.to_hf(model).items()}
        if model.cfg.tie_embeddings:
            state.pop("lm_head.weight")
        assert_same_trees(back, {name: array.float().numpy() for name, array in state.items()})


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


def write_adapter(folder, content, rng, **changes):
    """As PEFT writes it, for some matrices of every kind; what each of them becomes."""
    folder.mkdir()
    rank, of_peft = 2, {"peft_type": "LORA", "r": 2, "bias": "none", "modules_to_save": None}
    (folder / "adapter_config.json").write_text(json.dumps({**of_peft, **SCALES, **changes}))
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


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("qwen2", {"use_rslora": True})])
def test_an_adapter_is_added(family, changes, tmp_path, rng):
    content = weights(hf_fixtures.make(tmp_path / "hf", family))
    wanted = write_adapter(tmp_path / "adapter", content, rng, **changes)
    plain = tsjax.load(tmp_path / "hf")
    tsjax.save(plain, tmp_path / "ts")
    for base in ("hf", "ts"):
        model = tsjax.load(tmp_path / base, adapter=tmp_path / "adapter")
        for name, array in tsjax.to_hf(model).items():
            np.testing.assert_allclose(array, wanted[name], rtol=2e-6, atol=2e-6)
        assert model.cfg == plain.cfg
    narrow = tsjax.load(tmp_path / "hf", adapter=tmp_path / "adapter", weights="int8")
    tsjax.save_hf(model, tmp_path / "merged")
    assert_same_models(narrow, tsjax.load(tmp_path / "merged", weights="int8"))


def test_an_adapter_is_added_before_rounding(tmp_path, rng):
    raw = hf_fixtures.config(torch_dtype="bfloat16")
    content = {k: v.astype(jnp.bfloat16) for k, v in hf_fixtures.tensors(raw).items()}
    hf_fixtures.write(tmp_path / "hf", raw, content)
    wanted = write_adapter(tmp_path / "adapter", content, rng)
    model = tsjax.load(tmp_path / "hf", adapter=tmp_path / "adapter")
    for name, array in tsjax.to_hf(model).items():
        rounded = np.asarray(wanted[name], np.float32).astype(jnp.bfloat16)
        assert array.dtype == "bfloat16" and (np.asarray(array) != rounded).mean() < 0.01


def test_an_adapter_of_a_tied_vocabulary_is_refused(tmp_path, rng):
    """Also where the file has a matrix of that name, which nobody reads."""
    content = weights(hf_fixtures.make(tmp_path / "hf", tie_word_embeddings=True))
    content["lm_head.weight"] = content["model.embed_tokens.weight"].copy()
    hf_fixtures.change_tensors(tmp_path / "hf", content)
    write_adapter(tmp_path / "adapter", content, rng)
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
    own = weights(hf_fixtures.make(tmp_path / "hf", "qwen2"))
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
        changed += bool((np.asarray(array) != own[name]).any())
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
    content = weights(hf_fixtures.make(tmp_path / "hf"))
    write_adapter(tmp_path / "adapter", content, rng, **changes)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        tsjax.load(tmp_path / "hf", adapter=tmp_path / "adapter")


def test_an_adapter_of_another_model_is_refused(tmp_path, rng):
    hf_fixtures.make(tmp_path / "hf")
    other = hf_fixtures.tensors(hf_fixtures.config(num_hidden_layers=3))
    write_adapter(tmp_path / "adapter", other, rng)
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

# SPDX-License-Identifier: Apache-2.0
"""Small random HuggingFace checkpoints, written without any of the code under test, and what two
of them are compared by."""

import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
}


BIASED = {"attention_bias": True, "mlp_bias": True}
# Scaled positions.
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def config(family: str = "llama", **changes) -> dict:
    """A config.json; a value of ... removes the key."""
    raw = {"model_type": family, **SIZES, **FAMILIES[family], **changes}
    return {key: value for key, value in raw.items() if value is not ...}


def tensors(raw: dict, seed: int = 0, heads: int = 0) -> dict[str, np.ndarray]:
    """Every tensor transformers has for this config (and TokenSwift's heads), in float32."""
    rng = np.random.default_rng(seed)
    family, D, F = raw["model_type"], raw["hidden_size"], raw["intermediate_size"]
    N, K = raw["num_attention_heads"], raw["num_key_value_heads"]
    H = raw.get("head_dim") or D // N
    shapes = {"model.embed_tokens.weight": (raw["vocab_size"], D), "model.norm.weight": (D,)}
    if not raw.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (raw["vocab_size"], D)
    attention, mlp = raw.get("attention_bias", False), raw.get("mlp_bias", False)
    linears = {  # the shape, and whether it has a bias
        "self_attn.q_proj": (N * H, D, family == "qwen2" or attention),
        "self_attn.k_proj": (K * H, D, family == "qwen2" or attention),
        "self_attn.v_proj": (K * H, D, family == "qwen2" or attention),
        "self_attn.o_proj": (D, N * H, attention),
        "mlp.gate_proj": (F, D, mlp),
        "mlp.up_proj": (F, D, mlp),
        "mlp.down_proj": (D, F, mlp),
    }
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, (outputs, inputs, biased) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (outputs, inputs)
            if biased:
                shapes[f"{prefix}.{name}.bias"] = (outputs,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (D,)
        if family == "qwen3":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (H,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (H,)
    for head in range(heads):
        shapes[f"model.medusa_layers.{head}.linear.weight"] = (D, D)
        shapes[f"model.medusa_layers.{head}.input_layernorm.weight"] = (D,)
        shapes[f"model.medusa_layers.{head}.post_layernorm.weight"] = (D,)
    return {
        name: rng.standard_normal(shape, np.float32) * np.float32(0.2) + ("norm" in name)
        for name, shape in shapes.items()
    }


def write(folder: Path, raw: dict, content: dict[str, np.ndarray], shards: int = 1) -> Path:
    """Writes config.json and the tensors in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, places = sorted(content), {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: content[name] for name in names[index::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, file))
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def make(folder: Path, family: str = "llama", heads: int = 0, shards: int = 1, **changes) -> Path:
    """A whole random checkpoint."""
    raw = config(family, **changes)
    return write(folder, raw, tensors(raw, heads=heads), shards)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, by name."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}


def change(file: Path, **values) -> None:
    """Replaces values of a JSON object; of ... removes the key."""
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def change_tensors(folder: Path, changes: dict[str, np.ndarray]) -> None:
    """Replaces tensors of a checkpoint, or adds them; of ... removes them."""
    content = load_file(folder / "model.safetensors") | changes
    kept = {name: array for name, array in content.items() if array is not ...}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def same(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same_trees(left, right) -> None:
    """Of arrays: the same bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        assert same(a, b), jax.tree_util.keystr(path)


def assert_same_models(found, wanted) -> None:
    assert found.cfg == wanted.cfg
    assert_same_trees(found.params, wanted.params)

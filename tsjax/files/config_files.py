# SPDX-License-Identifier: Apache-2.0
"""HuggingFace's config.json, read and written.

Knows how each supported family writes its settings. Settings that would change the output and that
tsjax does not have are refused by name; nothing is guessed. Does not know tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from tsjax.base.checks import check, check_float, check_int
from tsjax.base.errors import BadValue, NotSupported
from tsjax.base.input_files import parsing, read_json
from tsjax.base.model_config import CHAINED, ModelConfig, RopeConfig
from tsjax.files.gguf_files import is_gguf, read_headers
from tsjax.files.gguf_tokenizer import stop_ids_of

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}

# The sizes that every file has, in HuggingFace's names and in ours.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_positions",
}

_TRAINED_LENGTH = "original_max_position_embeddings"
# The keys of each kind of rotary embedding that are written; transformers reads some more.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _TRAINED_LENGTH),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate", _TRAINED_LENGTH),
}
_ROPE_KEYS_ONLY_READ = {"yarn": ("mscale", "mscale_all_dim")}
_ROPE_KEYS_OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


def model_config(raw: Mapping[str, Any], *, dtype: str | None = None) -> ModelConfig:
    """The content of a config.json -> ModelConfig, as transformers 5 understands it.

    `raw` is no transformers object: those fill in defaults of their own. `dtype` replaces the
    file's `dtype` (or `torch_dtype`).
    """
    _check_types(raw)
    family = _family(raw)
    # Only the first Llama checkpoints were written without num_key_value_heads.
    needed = [*_SIZES, "rms_norm_eps"] + ["num_key_value_heads"] * (family != "llama")
    needed += ["head_dim"] * (family == "qwen3")
    missing = [name for name in needed if raw.get(name) is None]
    dtype = dtype or raw.get("dtype") or raw.get("torch_dtype")
    if dtype is None:
        missing.append("dtype (or torch_dtype; or pass dtype=)")
    if missing or dtype is None:
        raise BadValue(f"config.json lacks {', '.join(missing)}")

    for name in _SIZES:
        check_int(raw[name], name, 1)
    check_float(raw["rms_norm_eps"], "rms_norm_eps", 0.0, math.inf)
    unsupported = "; ".join(_unsupported_settings(raw, family))
    if unsupported:
        raise NotSupported(f"config.json asks for what tsjax does not have: {unsupported}")
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    head_dim, kv_heads = raw.get("head_dim"), raw.get("num_key_value_heads")
    if head_dim is None:
        check(hidden % heads == 0, "hidden_size", hidden, f"a multiple of the {heads} heads")
        head_dim = hidden // heads
    attention_bias = family in ("llama", "qwen3") and _flag(raw, "attention_bias")
    return ModelConfig(
        **{ours: raw[theirs] for theirs, ours in _SIZES.items()},
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw["rms_norm_eps"]),
        rope=_rope_config(raw),
        dtype=dtype,
        family=family,
        tie_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family == "llama" and _flag(raw, "mlp_bias"),
        qk_norm=family == "qwen3",
        num_draft_heads=raw.get("medusa_heads") or 0,  # as TokenSwift's training writes it
        head_kind=raw.get("medusa_head_kind") or CHAINED,  # as the next one written by config_to_hf
        head_accuracy=tuple(raw.get("medusa_head_accuracy") or ()),
    )


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """ModelConfig -> the content of a config.json, in keys that transformers 5 and 4 both read."""
    check(cfg.family in FAMILIES, "family", cfg.family, f"one of {', '.join(FAMILIES)}")
    rope, scaling = cfg.rope, None
    if rope.kind != "default":
        names = {key: key for key in _ROPE_KEYS[rope.kind]}
        if _TRAINED_LENGTH in names:
            names[_TRAINED_LENGTH] = "original_max_positions"
        scaling = {key: getattr(rope, name) for key, name in names.items()}
        scaling["rope_type"] = rope.kind
    of_family = {
        "llama": {"attention_bias": cfg.out_bias, "mlp_bias": cfg.mlp_bias},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"attention_bias": cfg.out_bias, "use_sliding_window": False},
        "mistral": {"sliding_window": None},
    }
    raw = {
        "architectures": [FAMILIES[cfg.family]],
        "model_type": cfg.family,
        **{theirs: getattr(cfg, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": cfg.tie_embeddings,
        "torch_dtype": cfg.dtype,
        **of_family[cfg.family],
    }
    if cfg.num_draft_heads:
        raw["medusa_heads"] = cfg.num_draft_heads
    if cfg.head_kind != CHAINED:
        raw["medusa_head_kind"] = cfg.head_kind
    if cfg.head_accuracy:
        raw["medusa_head_accuracy"] = list(cfg.head_accuracy)
    if model_config(raw) != cfg:
        raise BadValue(f"no {FAMILIES[cfg.family]} has the shape of this model: {cfg}")
    return raw


def read_stop_ids(folder: str) -> tuple[int, ...]:
    """The end-of-text ids: of a GGUF file, of generation_config.json, else of config.json; none
    gives ()."""
    if is_gguf(folder):
        with parsing(folder, " has a tokenizer that cannot be read"):
            return stop_ids_of(read_headers(folder)[0].fields)
    for name in ("generation_config.json", "config.json"):
        path = os.path.join(folder, name)
        ids = stop_ids_in(read_json(path), repr(path)) if os.path.exists(path) else ()
        if ids:
            return ids
    return ()


def stop_ids_in(raw: Mapping[str, Any], place: str) -> tuple[int, ...]:
    ids = raw.get("eos_token_id")
    ids = tuple(ids) if isinstance(ids, list | tuple) else () if ids is None else (ids,)
    for value in ids:
        check_int(value, f"eos_token_id in {place}", 0)
    return ids


def _family(raw: Mapping[str, Any]) -> str:
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    if model_type is None:
        raise BadValue("config.json lacks model_type; it names the family of the model")
    check(isinstance(model_type, str), "model_type", model_type, "a string")
    known = FAMILIES.get(model_type)
    if known is None or (architectures is not None and known not in architectures):
        raise NotSupported(
            f"model_type={model_type!r} with architectures={architectures} is not supported; "
            f"supported are {', '.join(f'{k} ({v})' for k, v in FAMILIES.items())}"
        )
    return model_type


def _check_types(raw: Mapping[str, Any]) -> None:
    """The types of optional keys; sizes and rotary embeddings are checked where they are read."""
    wanted = {
        "a string or null": (str, ("dtype", "torch_dtype", "medusa_head_kind")),
        "a list or null": (list, ("architectures", "layer_types", "medusa_head_accuracy")),
        "an object or null": (dict, ("rope_scaling", "rope_parameters")),
    }
    for text, (kind, names) in wanted.items():
        for name in names:
            check(isinstance(raw.get(name), kind | None), name, raw.get(name), text)
    integers = {"head_dim": 1, "num_key_value_heads": 1, "sliding_window": 1, "medusa_heads": 0}
    for name, least in integers.items():
        if raw.get(name) is not None:
            check_int(raw[name], name, least)
    for share in raw.get("medusa_head_accuracy") or ():
        check_float(share, "medusa_head_accuracy", 0.0, 1.0)


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    check(isinstance(value, bool), name, value, "true or false")
    return value


def _unsupported_settings(raw: Mapping[str, Any], family: str) -> list[str]:
    act, quantized = raw.get("hidden_act", "silu"), raw.get("quantization_config")
    rotary = [of.get("partial_rotary_factor") for of in (raw, _rope_settings(raw))]
    sliding = family in ("qwen2", "qwen3") and _flag(raw, "use_sliding_window")
    layers = [kind for kind in raw.get("layer_types") or () if kind != "full_attention"]
    # transformers' default where the file of a Mistral is silent
    window = raw.get("sliding_window", 4096) if family == "mistral" else None
    whole = "to attend to the whole context, if the model was trained for that"
    asked = {
        f"hidden_act={act!r} (only 'silu')": act != "silu",
        "quantization_config (use the unquantized checkpoint)": quantized is not None,
        **{f"partial_rotary_factor={x!r} (only 1.0)": x not in (None, 1.0) for x in rotary},
        f"use_sliding_window=true (set it to false {whole})": sliding,
        f"layer_types with {layers[:1]} (only 'full_attention')": layers,
        f'sliding_window={window} (set "sliding_window": null in config.json {whole})': window
        and window < raw["max_position_embeddings"],
    }
    return [setting for setting, is_asked in asked.items() if is_asked]


def _rope_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def _rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    rope = _rope_settings(raw)
    kind = rope.get("rope_type", rope.get("type", "default"))
    check(isinstance(kind, str), "rope_type", kind, "a string")
    nested = [name for name, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise NotSupported(f"rope parameters per layer type ({', '.join(nested)})")
    if kind not in _ROPE_KEYS:
        raise NotSupported(
            f"rope type {kind!r} is not supported; supported are {', '.join(_ROPE_KEYS)}"
        )
    known = (*_ROPE_KEYS[kind], *_ROPE_KEYS_ONLY_READ.get(kind, ()))
    unknown = sorted(set(rope) - {*_ROPE_KEYS_OF_ALL, *known})
    if unknown:
        raise NotSupported(
            f"rope type {kind!r} with {', '.join(f'{k}={rope[k]!r}' for k in unknown)} is not "
            f"supported; it knows {', '.join(known) or 'no further keys'}"
        )
    needed = {"linear": ("factor",), "yarn": ("factor",), "llama3": _ROPE_KEYS["llama3"][:3]}
    missing = [name for name in needed.get(kind, ()) if name not in rope]
    if missing:
        raise BadValue(f"rope type {kind!r} in config.json lacks {', '.join(missing)}")

    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    check_float(theta, "rope_theta", 0.0, math.inf)
    fields: dict[str, Any] = {"kind": kind, "theta": float(theta)}
    longest, default_factor = raw["max_position_embeddings"], None
    if kind in ("llama3", "yarn"):
        lengths = (raw.get(_TRAINED_LENGTH), rope.get(_TRAINED_LENGTH), longest)
        length = next(value for value in lengths if value is not None)
        check_int(length, _TRAINED_LENGTH, 1)
        fields["original_max_positions"] = length
        default_factor = longest / length if kind == "yarn" else None
    if kind != "default":
        fields["factor"] = _number(rope, "factor", default_factor)
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            fields[name] = _number(rope, name)
    if kind == "yarn":
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            # As in transformers, null and 0 mean the default.
            fields[name] = _number(rope, name, default) or default
        fields["truncate"] = rope.get("truncate", True)
        fields["attention_factor"] = _yarn_attention_factor(rope, fields["factor"])
    return RopeConfig(**fields)


def _number(rope: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A value of the file; `default` takes the place of a missing one and of null."""
    value: Any = default if rope.get(name) is None else rope[name]
    check_float(value, f"rope {name}", 0.0, math.inf)
    return float(value)


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature by transformers' rule: 0.1 ln(factor) + 1 if the file does not say."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, all_dim = _number(rope, "mscale", 0.0), _number(rope, "mscale_all_dim", 0.0)
    computed = mscale(weight) / mscale(all_dim) if weight and all_dim else mscale(1.0)
    return _number(rope, "attention_factor", computed)

# SPDX-License-Identifier: Apache-2.0
"""HuggingFace checkpoints: config.json, and where each tensor goes in Params.

Knows how each supported family writes its settings and names its tensors. Settings that would
change the output and that tsjax does not have are refused by name; nothing is guessed. Does not
know file formats (weight_files.py) or devices: it hands out NumPy arrays, one at a time.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.config import CHAINED, DTYPES, ModelConfig, RopeConfig, check, check_float, check_int
from tsjax.errors import BadValue, NoSuchFile, NotSupported
from tsjax.files.head_files import find_heads
from tsjax.files.weight_files import StoredTensor, Weights, open_weights, raise_all
from tsjax.input_files import listed, parsing, read_json
from tsjax.model.params import declare_params, is_spec
from tsjax.model.transformer import ParamSpec

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}

# --- config.json -----------------------------------------------------------------------------

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
    """The end-of-text ids: of generation_config.json, else of config.json; none gives ()."""
    for name in ("generation_config.json", "config.json"):
        path = os.path.join(folder, name)
        ids = read_json(path).get("eos_token_id") if os.path.exists(path) else None
        if ids is not None:
            ids = tuple(ids) if isinstance(ids, list) else (ids,)
            for value in ids:
                check_int(value, f"eos_token_id in {path!r}", 0)
            return ids
    return ()


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


# --- tensor names ----------------------------------------------------------------------------

# HuggingFace's name of each tensor and the path in Params. The tensors of one path lie together
# there, in this order, along the second axis. Matrices are [outputs, inputs] on both sides; here
# the heads of attention have axes of their own. Shapes follow from the declaration.
TABLE: tuple[tuple[str, str], ...] = (
    ("model.embed_tokens.weight", "model.embed"),
    ("model.layers.{i}.input_layernorm.weight", "model.layers.{i}.attn_norm"),
    ("model.layers.{i}.self_attn.q_proj.weight", "model.layers.{i}.qkv"),
    ("model.layers.{i}.self_attn.k_proj.weight", "model.layers.{i}.qkv"),
    ("model.layers.{i}.self_attn.v_proj.weight", "model.layers.{i}.qkv"),
    ("model.layers.{i}.self_attn.o_proj.weight", "model.layers.{i}.o"),
    ("model.layers.{i}.self_attn.q_proj.bias", "model.layers.{i}.qkv_bias"),
    ("model.layers.{i}.self_attn.k_proj.bias", "model.layers.{i}.qkv_bias"),
    ("model.layers.{i}.self_attn.v_proj.bias", "model.layers.{i}.qkv_bias"),
    ("model.layers.{i}.self_attn.o_proj.bias", "model.layers.{i}.o_bias"),
    ("model.layers.{i}.self_attn.q_norm.weight", "model.layers.{i}.q_norm"),
    ("model.layers.{i}.self_attn.k_norm.weight", "model.layers.{i}.k_norm"),
    ("model.layers.{i}.post_attention_layernorm.weight", "model.layers.{i}.mlp_norm"),
    ("model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.gate_up"),
    ("model.layers.{i}.mlp.up_proj.weight", "model.layers.{i}.gate_up"),
    ("model.layers.{i}.mlp.down_proj.weight", "model.layers.{i}.down"),
    ("model.layers.{i}.mlp.gate_proj.bias", "model.layers.{i}.gate_up_bias"),
    ("model.layers.{i}.mlp.up_proj.bias", "model.layers.{i}.gate_up_bias"),
    ("model.layers.{i}.mlp.down_proj.bias", "model.layers.{i}.down_bias"),
    ("model.norm.weight", "model.final_norm"),
    ("lm_head.weight", "model.unembed"),
    # TokenSwift's heads.
    ("model.medusa_layers.{i}.linear.weight", "heads.{i}.linear"),
    ("model.medusa_layers.{i}.input_layernorm.weight", "heads.{i}.norm_in"),
    ("model.medusa_layers.{i}.post_layernorm.weight", "heads.{i}.norm_out"),
    # Medusa's; head_files.py knows the other names that they have.
    ("medusa_head.{i}.0.linear.weight", "heads.{i}.block"),
    ("medusa_head.{i}.0.linear.bias", "heads.{i}.block_bias"),
    ("medusa_head.{i}.1.weight", "heads.{i}.unembed"),
)

_THREADS = min(8, os.cpu_count() or 1)  # that read; each has a block in memory
_AHEAD = 3  # arrays that they fill before they are asked for

# The frequencies of rotary embeddings, saved as buffers by old versions of transformers.
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq")


Box = tuple[slice, ...]  # a part of an array, along each of its axes from start to stop
Wanted = Callable[[ParamSpec], Box]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a HuggingFace checkpoint, and which part of an array of Params it is."""

    key: str
    shape: tuple[int, ...]  # in the checkpoint
    part: slice | None  # of the array's second axis; None: it is the whole array

    def of(self, array: Any) -> Any:
        """The tensor in an array of NumPy or jax. A view where it is the whole of NumPy's."""
        return (array if self.part is None else array[:, self.part]).reshape(self.shape)

    def rows(self, shape: tuple[int, ...]) -> np.ndarray:
        """Where its rows lie in the array of that shape, seen as a matrix of such rows."""
        number = np.arange(math.prod(shape) // math.prod(self.shape[1:]))
        if self.part is None:
            return number
        return number.reshape(*shape[:2], -1)[:, self.part].reshape(-1)

    def within(self, shape: tuple[int, ...], box: Box) -> tuple[np.ndarray, slice | None]:
        """Which of its rows, and of their columns, lie in a box of the array of that shape."""
        if len(self.shape) == 1:  # a vector is small
            return np.ones(self.shape, bool), None
        inner = 1
        while math.prod(shape[-inner:]) < self.shape[1]:
            inner += 1
        rows = np.zeros(shape[:-inner], bool)
        rows[box[:-inner]] = True
        unit, (first, *_) = math.prod(shape[len(shape) - inner + 1 :]), box[-inner:]
        columns = slice(first.start * unit, first.stop * unit)
        return rows.reshape(-1)[self.rows(shape)], columns


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of Params, and the tensors of a HuggingFace checkpoint that it is made of."""

    path: str
    spec: ParamSpec
    tensors: tuple[Tensor, ...]

    def apart(self) -> list[Entry]:
        """Its tensors as arrays by themselves, in HuggingFace's shapes."""
        found = []
        for tensor in self.tensors:
            spec = dataclasses.replace(self.spec, shape=tensor.shape, parts=())
            found.append(Entry(self.path, spec, (dataclasses.replace(tensor, part=None),)))
        return found


def entries(cfg: ModelConfig) -> list[Entry]:
    """Every declared parameter of `cfg`, draft heads included, in the order of the declaration."""
    specs, _ = jax.tree_util.tree_flatten_with_path(declare_params(cfg), is_leaf=is_spec)
    found = []
    for keys, spec in specs:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        index = re.search(r"\.(\d+)\.", path)
        number = index[1] if index else ""
        general = re.sub(r"\.\d+\.", ".{i}.", path)
        names = [key.replace("{i}", number) for key, place in TABLE if place == general]
        found.append(Entry(path, spec, _tensors(names, spec)))
    return found


def _tensors(names: list[str], spec: ParamSpec) -> tuple[Tensor, ...]:
    found, start = [], 0
    for name, shape in zip(names, spec.part_shapes, strict=True):
        outputs = len(shape) - spec.inputs
        theirs = shape  # a norm, say
        if spec.inputs:
            theirs = (math.prod(shape[:outputs]), math.prod(shape[outputs:]))
        elif spec.parts:
            theirs = (math.prod(shape),)
        part = slice(start, start := start + shape[1]) if spec.parts else None
        found.append(Tensor(name, theirs, part))
    return tuple(found)


# --- reading ---------------------------------------------------------------------------------


def open_checkpoint(
    folder: str, *, dtype: str | None = None, allow_pickle: bool = False
) -> tuple[ModelConfig, Weights]:
    """The settings and the weight files of a HuggingFace folder; draft heads in it are counted."""
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path):
        raise NoSuchFile(
            f"{folder!r} has neither a config.json (HuggingFace) nor a tsjax.json (tsjax); it has "
            f"{', '.join(listed(sorted(os.listdir(folder)))) or 'nothing'}"
        )
    raw = read_json(path)
    if dtype is None and (raw.get("dtype") or raw.get("torch_dtype")) is None:
        # As transformers: a file that does not say is read in the type of its tensors.
        stored = [t.dtype for t in open_weights(folder, allow_pickle=allow_pickle).values()]
        dtype = max(set(stored), key=stored.count, default=None)
    with parsing(path):
        cfg = model_config(raw, dtype=dtype)
    weights = open_weights(folder, allow_pickle=allow_pickle)
    with parsing(path):  # before anything is declared
        check_counts(cfg, len(weights), ("num_hidden_layers", "medusa_heads"))
        found = find_heads(weights, beside_model=True)
    if found is None:
        return cfg, weights
    # Of TokenSwift's the config knows the number; published configs of Medusa's name wrong ones.
    heads = max(cfg.num_draft_heads, found.count) if found.kind == CHAINED else found.count
    same = (heads, found.kind) == (cfg.num_draft_heads, cfg.head_kind)
    return cfg if same else cfg.with_heads(heads, found.kind), weights


def with_heads_of(cfg: ModelConfig, weights: Weights) -> ModelConfig:
    """The same model with the draft heads among the tensors, counted there."""
    found = find_heads(weights)
    return cfg.with_heads(found.count, found.kind) if found else cfg.with_heads(0)


def check_counts(cfg: ModelConfig, stored: int, names: tuple[str, str]) -> None:
    """Refuses more layers or heads than there are tensors; `names` are those of the counts."""
    for name, count in zip(names, (cfg.num_layers, cfg.num_draft_heads), strict=True):
        check(count <= stored, name, count, f"there are {stored} tensors in all")


def read_model(
    cfg: ModelConfig, weights: Weights, *, apart: bool = False, part: Wanted | None = None
) -> Iterator[tuple[Entry, np.ndarray]]:
    """Every parameter of `cfg`, one at a time; names and shapes are checked before the first.

    With `apart` every tensor by itself: what only writes them again needs no memory to join them.
    `part` says which part of each array is read; the rest is then unspecified.
    """
    found = {name: tensor for name, tensor in weights.items() if not _HARMLESS.fullmatch(name)}
    if cfg.tie_embeddings:
        found.pop("lm_head.weight", None)  # transformers does not read it either
    heads = find_heads(weights, beside_model=True)
    if heads and (heads.kind != CHAINED or not cfg.num_draft_heads):
        found = {name: found[name] for name in found if name not in heads.names}
        found |= heads.tensors if cfg.num_draft_heads else {}
    wanted = entries(cfg)
    if apart:
        wanted = [tensor for entry in wanted for tensor in entry.apart()]
    return _read(wanted, weights, found, part)


def read_heads(
    cfg: ModelConfig, weights: Weights, *, part: Wanted | None = None
) -> Iterator[tuple[Entry, np.ndarray]]:
    """The `cfg.num_draft_heads` heads in an adapter or a whole checkpoint with such heads."""
    heads = find_heads(weights)
    found = heads.tensors if heads else {}
    return _read([e for e in entries(cfg) if e.path.startswith("heads.")], weights, found, part)


def _read(
    wanted: list[Entry], weights: Weights, found: Weights, part: Wanted | None
) -> Iterator[tuple[Entry, np.ndarray]]:
    """Reads `wanted`; `found` has the tensors under the table's keys."""
    files = ", ".join(listed(sorted({tensor.file for tensor in weights.values()})))
    tensors = {tensor.key: tensor for entry in wanted for tensor in entry.tensors}
    problems = [f"missing in {files}: {key}" for key in tensors if key not in found]
    problems += [f"not part of this model: {found[key]}" for key in found if key not in tensors]
    for key, tensor in tensors.items():
        stored = found.get(key)
        if stored and stored.shape != tensor.shape:
            shapes = f"shape {list(stored.shape)}; the config asks for {list(tensor.shape)}"
            problems.append(f"{stored} has {shapes}")
        if stored and stored.dtype not in DTYPES:
            types = f"type {stored.dtype}, which is not one of {', '.join(DTYPES)}"
            problems.append(f"{stored} has {types}")
    raise_all(problems)
    return _read_arrays(wanted, found, part)


class _Begun(NamedTuple):
    """An array that threads fill, and for each of its tensors the blocks: are they finite?"""

    entry: Entry
    array: np.ndarray
    blocks: list[tuple[StoredTensor, list[Future[bool]]]]


def _read_arrays(
    wanted: list[Entry], found: Weights, part: Wanted | None
) -> Iterator[tuple[Entry, np.ndarray]]:
    """Reads by threads, which are never more than _AHEAD arrays further than the caller.

    Arrays come in the order of `wanted`, and so do errors: what comes after one is not asked for.
    """
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tsjax-read")
    wrong, begun = [], collections.deque[_Begun]()
    try:
        begun += [_begin(pool, one, found, part) for one in wanted[:_AHEAD]]
        for number in range(1, len(wanted) + 1):
            entry, array, tensors = begun.popleft()
            for stored, blocks in tensors:
                if not all([block.result() for block in blocks]):
                    wrong.append(str(stored))
            begun += [_begin(pool, one, found, part) for one in wanted[number - 1 + _AHEAD :][:1]]
            if wrong and number == len(wanted):  # here: the caller may not ask for another one
                have = f"{'has' if len(wrong) == 1 else 'have'} NaN or infinite values"
                names = ", ".join(listed(wrong))
                warnings.warn(f"{names} {have} as {array.dtype.name}", stacklevel=2)
            yield entry, array
    finally:  # also after an error, an interrupt, or when the caller has seen enough
        pool.shutdown(cancel_futures=True)


def _begin(pool: ThreadPoolExecutor, entry: Entry, found: Weights, part: Wanted | None) -> _Begun:
    array, blocks = _aligned_empty(entry.spec.shape, jnp.dtype(entry.spec.dtype)), []
    for tensor in entry.tensors:
        stored, rows = found[tensor.key], tensor.rows(array.shape)
        matrix = array.reshape(-1, *tensor.shape[1:])  # a view
        places, columns = [*stored.blocks()], None
        if part is not None:
            wanted, columns = tensor.within(array.shape, part(entry.spec))
            places = [*_narrowed(places, wanted)]
        jobs = [pool.submit(_read_block, stored, at, columns, matrix, rows[at]) for at in places]
        blocks.append((stored, jobs))
    return _Begun(entry, array, blocks)


def _narrowed(blocks: list[slice], wanted: np.ndarray) -> Iterator[slice]:
    """Each block from its first wanted row to its last one."""
    for block in blocks:
        rows = np.flatnonzero(wanted[block])
        if len(rows):
            yield slice(block.start + int(rows[0]), block.start + int(rows[-1]) + 1)


def _read_block(
    stored: StoredTensor, at: slice, columns: slice | None, matrix: np.ndarray, rows: np.ndarray
) -> bool:
    """Fills these rows and columns of the matrix; returns whether all of them are finite."""
    block = stored.rows(at.start, at.stop, columns)
    with np.errstate(over="ignore", invalid="ignore"):
        block = block.astype(matrix.dtype, copy=False)
    if columns is None:
        matrix[rows] = block
    else:
        matrix[rows, columns] = block
    return _all_finite(block)


def _all_finite(block: np.ndarray) -> bool:
    if block.dtype != jnp.bfloat16:
        return bool(np.isfinite(block).all())
    # By the bits without the sign: NumPy asks one by one where a type is not its own.
    return bool((block.view(np.uint16) & 0x7FFF).max() < 0x7F80)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """As np.empty, at an address that lets a CPU device take the array over without a copy."""
    size, alignment = math.prod(shape) * dtype.itemsize, 64
    memory = np.empty(size + alignment, np.uint8)
    offset = -memory.ctypes.data % alignment
    return memory[offset : offset + size].view(dtype).reshape(shape)

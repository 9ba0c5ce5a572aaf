# SPDX-License-Identifier: Apache-2.0
"""HuggingFace's names: where each tensor of a checkpoint goes in Params, wide or narrow.

Knows how tensors are named and which lie together. Does not know files, nor how they are read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from pallas_kernels import NarrowMatrix
from pallas_kernels.narrow_product.matrix import FORMATS, packed, rounded
from tsjax.base.errors import BadValue, NotInstalled, NotSupported
from tsjax.base.model_config import LAYER_MATRICES, NUM_LAYER_MATRICES, WIDE, ModelConfig
from tsjax.files.weight_files import StoredTensor, Weights
from tsjax.model.narrow import NARROW_ARRAYS, of_one_format
from tsjax.model.param_spec import ParamSpec
from tsjax.model.params import declare_params, is_spec

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
    # A one-layer drafter's, after a prefix: EAGLE-3's names, and what only ours have.
    ("drafter.fc.weight", "drafter.fuse"),
    ("drafter.midlayer.input_layernorm.weight", "drafter.token_norm"),
    ("drafter.midlayer.hidden_norm.weight", "drafter.layer.attn_norm"),
    ("drafter.midlayer.self_attn.q_proj.weight", "drafter.layer.qkv"),
    ("drafter.midlayer.self_attn.k_proj.weight", "drafter.layer.qkv"),
    ("drafter.midlayer.self_attn.v_proj.weight", "drafter.layer.qkv"),
    ("drafter.midlayer.self_attn.o_proj.weight", "drafter.layer.o"),
    ("drafter.midlayer.post_attention_layernorm.weight", "drafter.layer.mlp_norm"),
    ("drafter.midlayer.mlp.gate_proj.weight", "drafter.layer.gate_up"),
    ("drafter.midlayer.mlp.up_proj.weight", "drafter.layer.gate_up"),
    ("drafter.midlayer.mlp.down_proj.weight", "drafter.layer.down"),
    ("drafter.norm.weight", "drafter.out_norm"),
    ("drafter.lm_head.weight", "drafter.unembed"),
    ("drafter.d2t", "drafter.words"),
    ("drafter.tap_norms", "drafter.tap_norms"),
    ("drafter.token.weight", "drafter.token"),
    ("drafter.carry.weight", "drafter.carry"),
    ("drafter.carry_norm.weight", "drafter.carry_norm"),
)

NOT_IN_BLOCKS = ("F64", "F32", "F16", "BF16")  # GGUF's types that are read in the model's

# Of the layers' matrices and of the vocabulary's, whose error is that of each logit.
ROUNDED = {"int8": ("Q8_0", "Q8_0"), "int4": ("Q4_1", "Q8_0")}

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
    """One array of Params, and the tensors of a HuggingFace checkpoint that it is made of.

    With a format it is a NarrowMatrix, and `spec` says of the wide one what is there.
    """

    path: str
    spec: ParamSpec
    tensors: tuple[Tensor, ...]
    format: str = WIDE

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
        # An array of a narrow matrix is no tensor of such a checkpoint.
        found.append(Entry(path, spec, _tensors(names, spec) if names else ()))
    return found


def to_read(cfg: ModelConfig) -> list[Entry]:
    """What files have of `cfg`, draft heads included; of a narrow matrix one entry."""
    found = []
    for entry in entries(cfg.as_wide):
        formats, start = _formats(cfg, entry.path), 0
        if not any(formats):
            found.append(entry)
            continue
        some = of_one_format(entry.spec, formats)
        for number, (spec, name) in enumerate(some):
            stop = start + max(1, len(spec.parts))
            tensors = _tensors([tensor.key for tensor in entry.tensors[start:stop]], spec)
            path, start = f"{entry.path}.{number}" if some[1:] else entry.path, stop
            found.append(Entry(path, spec, tensors, name))
    if cfg.tie_embeddings and cfg.unembed_format != WIDE:
        embed = next(entry for entry in found if entry.path == "model.embed")
        spec = dataclasses.replace(embed.spec, inputs=1)
        found.append(Entry("model.unembed", spec, embed.tensors, cfg.unembed_format))
    return found


def _formats(cfg: ModelConfig, path: str) -> list[str]:
    """Of the parts of a parameter."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(\w+)", path)
    if layer:
        return cfg.formats_of(int(layer[1])).get(layer[2], [])
    return [cfg.unembed_format] if path == "model.unembed" else []


def with_weights(cfg: ModelConfig, weights: str | None, stored: Weights, place: str) -> ModelConfig:
    """The model with its matrices held so: one of WEIGHTS."""
    if weights in (None, "float"):
        return cfg
    if weights == "stored":
        if not any(tensor.kind for tensor in stored.values()):
            wanted = "of a GGUF file; 'int8' and 'int4' round the matrices of any checkpoint"
            raise BadValue(f"weights='stored' is not valid for {place!r}: {wanted}")
        return _stored_formats(cfg, stored)
    of_layers, of_vocabulary = ROUNDED[weights]
    return dataclasses.replace(
        cfg, layer_formats=((of_layers,) * NUM_LAYER_MATRICES,), unembed_format=of_vocabulary
    )


def held_as(cfg: ModelConfig) -> str | None:
    """Which of WEIGHTS holds such matrices; None for wide ones."""
    if not cfg.is_narrow:
        return None
    names = (name for name in ROUNDED if with_weights(cfg, name, {}, "") == cfg)
    return next(names, "stored")


def _stored_formats(cfg: ModelConfig, weights: Weights) -> ModelConfig:
    """The model with each matrix as a GGUF file holds it."""
    unknown: dict[str, StoredTensor] = {}  # one of each type

    def of(key: str) -> str:
        stored = weights.get(key)
        if stored is not None and stored.apart is not None:
            return stored.kind
        if stored is not None and stored.kind not in NOT_IN_BLOCKS:
            unknown.setdefault(stored.kind, stored)
        return WIDE

    keys = {entry.path: [tensor.key for tensor in entry.tensors] for entry in entries(cfg.as_wide)}
    layers = tuple(
        tuple(of(key) for part in LAYER_MATRICES for key in keys[f"model.layers.{layer}.{part}"])
        for layer in range(cfg.num_layers)
    )
    (unembed,) = keys["model.embed" if cfg.tie_embeddings else "model.unembed"]
    found = dataclasses.replace(cfg, layer_formats=layers, unembed_format=of(unembed))
    if unknown.keys() & {*FORMATS}:
        raise NotInstalled(
            "weights='stored' needs the kernels in C++ to take blocks apart; `tsjax info` says why "
            "there are none. weights='int8' does without"
        )
    if unknown:
        types = "; ".join(f"{kind}, as {stored}" for kind, stored in unknown.items())
        raise NotSupported(
            f"weights='stored' is not valid: no narrow form here keeps the numbers of {types}; "
            "'int8' rounds all matrices, 'float' widens them"
        )
    return found


def arrays_of(path: str, found: np.ndarray | NarrowMatrix) -> dict[str, np.ndarray]:
    """The arrays of a parameter, by their paths in Params."""
    if not isinstance(found, NarrowMatrix):
        return {path: found}
    pairs = ((f"{path}.{part}", getattr(found, part)) for part in NARROW_ARRAYS)
    return {name: array for name, array in pairs if array is not None}


def rounded_arrays(
    cfg: ModelConfig, wide: Iterable[tuple[Entry, jax.Array]]
) -> Iterator[tuple[Entry, Any]]:
    """The arrays of `cfg`, of those of the wide model: rounded, or as they are."""
    held = {entry.path: entry for entry in to_read(cfg)}
    for entry, array in wide:
        yield held[entry.path], _held_as(held[entry.path], array)
        if entry.path == "model.embed" and cfg.tie_embeddings and cfg.unembed_format != WIDE:
            yield held["model.unembed"], _held_as(held["model.unembed"], array)


def _held_as(entry: Entry, wide: jax.Array) -> Any:
    if entry.format == WIDE:
        return wide
    count = len(entry.spec.shape) - entry.spec.inputs
    outputs, inputs = wide.shape[:count], wide.shape[count:]
    parts = rounded(np.asarray(wide).reshape(math.prod(outputs), -1), entry.format)
    return packed(FORMATS[entry.format], outputs, inputs, **parts)


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

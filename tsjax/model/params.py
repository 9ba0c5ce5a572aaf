# SPDX-License-Identifier: Apache-2.0
"""All trained arrays, declared once: init, placement, loading and checks read the declaration.

Knows what the model and its heads declare. Does not know files.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.model_config import ModelConfig
from tsjax.model.drafter import DrafterWeights, declare_drafter
from tsjax.model.heads import Head, declare_heads
from tsjax.model.int8 import as_int8
from tsjax.model.param_spec import ParamSpec
from tsjax.model.sharding import named_sharding, placed, usable_mesh, wanted_axes
from tsjax.model.transformer import ModelWeights, declare_model, int8_weights


class Params(flax.struct.PyTreeNode):
    """All trained arrays: the frozen model, its draft heads (an empty tuple without heads) and its
    one-layer drafter (None without one).

    Attributes:
      drafts: the model in int8, for methods that draft with it: see `with_int8_drafts`.
      corpus: earlier texts, for methods that draft from them: a `CorpusIndex`.
      draft_model: a second model, for methods that draft with one.
    """

    model: ModelWeights
    heads: tuple[Head, ...] = ()
    drafter: DrafterWeights | None = None
    drafts: ModelWeights | None = None
    corpus: Any = None
    draft_model: ModelWeights | None = None


def declare_params(cfg: ModelConfig) -> Params:
    """Shape, type and logical axes of every parameter: init, sharding, loading, checks read it."""
    return Params(model=declare_model(cfg), heads=declare_heads(cfg), drafter=declare_drafter(cfg))


def is_spec(leaf) -> bool:
    return isinstance(leaf, ParamSpec)


def placement(spec: ParamSpec, mesh=None):
    """Where the parameter lies on a mesh; None without one."""
    if not mesh:
        return None
    pairs = zip(spec.shape, spec.axes, strict=True)
    units = [size // spec.group if axis and wanted_axes(axis) else size for size, axis in pairs]
    return named_sharding(units, spec.axes, mesh)


def abstract_params(cfg: ModelConfig, mesh=None) -> Params:
    """The declaration as jax.ShapeDtypeStruct, with shardings when a mesh is given."""

    def abstract(spec: ParamSpec):
        dtype, sharding = jnp.dtype(spec.dtype), placement(spec, mesh)
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)

    return jax.tree.map(abstract, declare_params(cfg), is_leaf=is_spec)


def with_int8_drafts(params: Params, cfg: ModelConfig) -> Params:
    """`params` with a second copy of the model's matrices, in int8, one matrix at a time.

    What `TokenSwift(draft_weights="int8")` drafts with. `generate` makes it by itself.
    """
    return params.replace(drafts=int8_weights(params.model, cfg, as_int8))


def inputs_first(spec: ParamSpec) -> list[ParamSpec]:
    """The parts of a parameter by themselves, their inputs before their outputs.

    So init draws them, and so they lie in checkpoints of format 1.
    """

    def turned(values: tuple) -> tuple:
        outputs = len(values) - spec.inputs
        return values[outputs:] + values[:outputs]

    if not spec.parts:
        return [dataclasses.replace(spec, shape=turned(spec.shape), axes=turned(spec.axes))]
    axes = turned(spec.axes[:1] + spec.axes[2:])
    shapes = [turned((first * size, *rest)) for first, size, *rest in spec.part_shapes]
    return [dataclasses.replace(spec, shape=shape, axes=axes, parts=()) for shape in shapes]


def join(spec: ParamSpec, parts: Sequence[Any], *, numpy: Any = jnp) -> Any:
    """The parameter from what `inputs_first` declares: arrays of jax, or those of `numpy`."""
    inputs = range(spec.inputs)
    joined = []
    for part, shape in zip(parts, spec.part_shapes, strict=True):
        outputs_first = numpy.moveaxis(part, inputs, range(-spec.inputs, 0))
        joined.append(outputs_first.reshape(shape))
    return numpy.concatenate(joined, axis=1) if spec.parts else joined[0]


def init_params(cfg: ModelConfig, seed: int = 0, scale: float = 0.02, mesh=None) -> Params:
    """Random weights (normal, standard deviation `scale`); norms are one and biases zero."""
    mesh = usable_mesh(mesh)
    specs, treedef = jax.tree.flatten(declare_params(cfg), is_leaf=is_spec)
    rng = np.random.default_rng(seed)

    def make(spec: ParamSpec):
        if spec.init == "bits":
            return placed(_narrow_array(rng, spec, scale), placement(spec, mesh))
        if spec.init == "normal":
            parts = [rng.standard_normal(s.shape, np.float32) for s in inputs_first(spec)]
            values = join(spec, parts, numpy=np) * np.float32(scale)
        else:
            values = np.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, np.float32)
        values = values.astype(jnp.dtype(spec.dtype))
        return placed(values, placement(spec, mesh))

    return jax.tree.unflatten(treedef, [make(spec) for spec in specs])


def _narrow_array(rng: Any, spec: ParamSpec, scale: float) -> np.ndarray:
    """Of integers any, and levels that bring them to about the size of others."""
    if spec.dtype == "uint8":
        return rng.integers(0, 256, spec.shape, np.uint8)
    value = 1 if spec.dtype == "int8" else scale / 64
    return np.full(spec.shape, value, spec.dtype)


def random_params(cfg: ModelConfig) -> Params:
    """As `init_params`, but made on the device, array by array; biases are random too."""
    specs, treedef = jax.tree.flatten(declare_params(cfg), is_leaf=is_spec)
    rng = np.random.default_rng(0)

    def make(index: int, spec: ParamSpec) -> jax.Array:
        if spec.init == "bits":
            return jnp.asarray(_narrow_array(rng, spec, 0.02))
        if spec.init == "ones":
            return jnp.ones(spec.shape, spec.dtype)
        return normal(index, spec.shape, spec.dtype, 0.02)

    leaves = [make(index, spec) for index, spec in enumerate(specs)]
    return jax.tree.unflatten(treedef, leaves)


def normal(index: int, shape: Sequence[int], dtype: str, scale: float = 1.0) -> jax.Array:
    """Random numbers, other ones for each index."""
    key, shape = jax.random.key(0), tuple(shape)
    return _normal(key, np.uint32(index), np.float32(scale), shape=shape, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key, index, scale, *, shape, dtype):
    values = jax.random.normal(jax.random.fold_in(key, index), shape, dtype)
    return values * scale.astype(dtype)

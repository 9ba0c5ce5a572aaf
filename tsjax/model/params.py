# SPDX-License-Identifier: Apache-2.0
"""All trained arrays, declared once: init, placement, loading and checks read the declaration.

Knows what the model and its heads declare. Does not know files.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tsjax.config import ModelConfig
from tsjax.model.heads import HeadWeights, declare_heads
from tsjax.model.sharding import named_sharding, usable_mesh
from tsjax.model.transformer import ModelWeights, ParamSpec, declare_model


class Params(flax.struct.PyTreeNode):
    """All trained arrays: the frozen model and its draft heads (an empty tuple without heads)."""

    model: ModelWeights
    heads: tuple[HeadWeights, ...] = ()


def declare_params(cfg: ModelConfig) -> Params:
    """Shape, type and logical axes of every parameter: init, sharding, loading, checks read it."""
    return Params(model=declare_model(cfg), heads=declare_heads(cfg))


def is_spec(leaf) -> bool:
    return isinstance(leaf, ParamSpec)


def abstract_params(cfg: ModelConfig, mesh=None) -> Params:
    """The declaration as jax.ShapeDtypeStruct, with shardings when a mesh is given."""

    def abstract(spec: ParamSpec):
        sharding = named_sharding(spec.shape, spec.axes, mesh) if mesh else None
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=sharding)

    return jax.tree.map(abstract, declare_params(cfg), is_leaf=is_spec)


def init_params(cfg: ModelConfig, seed: int = 0, scale: float = 0.02, mesh=None) -> Params:
    """Random weights (normal, standard deviation `scale`); norms are one and biases zero."""
    mesh = usable_mesh(mesh)
    specs, treedef = jax.tree.flatten(declare_params(cfg), is_leaf=is_spec)
    rng = np.random.default_rng(seed)

    def make(spec: ParamSpec):
        if spec.init == "normal":
            values = rng.standard_normal(spec.shape, np.float32) * np.float32(scale)
        else:
            values = np.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, np.float32)
        values = values.astype(jnp.dtype(spec.dtype))
        sharding = named_sharding(spec.shape, spec.axes, mesh) if mesh else None
        return jax.device_put(values, sharding)

    return jax.tree.unflatten(treedef, [make(spec) for spec in specs])

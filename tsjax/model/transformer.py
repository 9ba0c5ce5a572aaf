# SPDX-License-Identifier: Apache-2.0
"""The transformer: declared once, run by one function.

Knows the weights' names, shapes and logical axes, and how they turn tokens into hidden states and
logits. Does not know caches: attention is a function handed in, and the fresh keys and values are
handed back. Families differ by the flags of `ModelConfig` only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from tsjax.config import ModelConfig
from tsjax.model.layers import apply_rotary, linear, rms_norm, rotary_angles, swiglu
from tsjax.typing import Array, Float, Int, accumulation_dtype


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """The declaration of one parameter. A leaf, not a pytree."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axis of each dimension, see sharding.py
    dtype: str
    init: str = "normal"  # "normal", "ones" or "zeros"


class LayerWeights(flax.struct.PyTreeNode):
    """One layer. Biases and q/k norms are None where the family has none."""

    attn_norm: Any  # [D]
    q: Any  # [D, N, H]
    k: Any  # [D, K, H]
    v: Any  # [D, K, H]
    o: Any  # [N, H, D]
    mlp_norm: Any  # [D]
    gate: Any  # [D, F]
    up: Any  # [D, F]
    down: Any  # [F, D]
    q_bias: Any = None  # [N, H]
    k_bias: Any = None  # [K, H]
    v_bias: Any = None  # [K, H]
    o_bias: Any = None  # [D]
    gate_bias: Any = None  # [F]
    up_bias: Any = None  # [F]
    down_bias: Any = None  # [D]
    q_norm: Any = None  # [H]
    k_norm: Any = None  # [H]


class ModelWeights(flax.struct.PyTreeNode):
    """The whole model; `unembed` is None when the embedding is shared."""

    embed: Any  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Any  # [D]
    unembed: Any = None  # [D, V]


def declare_model(cfg: ModelConfig) -> ModelWeights:
    """The one declaration of all parameters, as a tree of ParamSpec."""
    D, N, K, H, F = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.mlp_dim

    def spec(shape, axes, init="normal"):
        return ParamSpec(shape, axes, cfg.dtype, init)

    def norm(size, axis):
        return spec((size,), (axis,), "ones")

    def bias(shape, axes, flag):
        return spec(shape, axes, "zeros") if flag else None

    def layer():
        return LayerWeights(
            attn_norm=norm(D, "embed"),
            q=spec((D, N, H), ("embed", "heads", "head_dim")),
            k=spec((D, K, H), ("embed", "kv_heads", "head_dim")),
            v=spec((D, K, H), ("embed", "kv_heads", "head_dim")),
            o=spec((N, H, D), ("heads", "head_dim", "embed")),
            mlp_norm=norm(D, "embed"),
            gate=spec((D, F), ("embed", "mlp")),
            up=spec((D, F), ("embed", "mlp")),
            down=spec((F, D), ("mlp", "embed")),
            q_bias=bias((N, H), ("heads", "head_dim"), cfg.qkv_bias),
            k_bias=bias((K, H), ("kv_heads", "head_dim"), cfg.qkv_bias),
            v_bias=bias((K, H), ("kv_heads", "head_dim"), cfg.qkv_bias),
            o_bias=bias((D,), ("embed",), cfg.out_bias),
            gate_bias=bias((F,), ("mlp",), cfg.mlp_bias),
            up_bias=bias((F,), ("mlp",), cfg.mlp_bias),
            down_bias=bias((D,), ("embed",), cfg.mlp_bias),
            q_norm=norm(H, "head_dim") if cfg.qk_norm else None,
            k_norm=norm(H, "head_dim") if cfg.qk_norm else None,
        )

    return ModelWeights(
        embed=spec((cfg.vocab_size, D), ("vocab", "embed")),
        layers=tuple(layer() for _ in range(cfg.num_layers)),
        final_norm=norm(D, "embed"),
        unembed=None if cfg.tie_embeddings else spec((D, cfg.vocab_size), ("embed", "vocab")),
    )


# Called with the layer's index and its fresh q, k and v.
Attend = Callable[
    [int, Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]],
    Float[Array, "B T N H"],
]


def forward(
    weights: ModelWeights,
    hidden: Float[Array, "B T D"],
    *,
    positions: Int[Array, "B T"],
    attend: Attend,
    cfg: ModelConfig,
    layers: range | None = None,
) -> tuple[
    Float[Array, "B T D"], tuple[Float[Array, "B T K H"], ...], tuple[Float[Array, "B T K H"], ...]
]:
    """One pass of `layers`, by default all, over T rows.

    Args:
      hidden: what the first of them takes: `embed`, or what the layer before it gave.
      attend: attention of one layer's fresh rows; it alone knows the cache and the mask.

    Returns:
      hidden after the last of them, before the final norm, and the fresh keys and values, one
      array per layer.
    """
    x = hidden
    cos, sin = rotary_angles(positions, cfg.rope, cfg.head_dim, cfg.dtype)
    keys, values = [], []
    for index in range(cfg.num_layers) if layers is None else layers:
        layer = weights.layers[index]
        with jax.named_scope("attention"):
            normed = rms_norm(x, layer.attn_norm, cfg.norm_eps)
            q = linear(normed, layer.q, layer.q_bias)  # [B, T, N, H]
            k = linear(normed, layer.k, layer.k_bias)  # [B, T, K, H]
            v = linear(normed, layer.v, layer.v_bias)  # [B, T, K, H]
            if cfg.qk_norm:
                q = rms_norm(q, layer.q_norm, cfg.norm_eps)
                k = rms_norm(k, layer.k_norm, cfg.norm_eps)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
            mixed = attend(index, q, k, v)
            x = x + linear(mixed, layer.o, layer.o_bias, contract=2)
        with jax.named_scope("mlp"):
            normed = rms_norm(x, layer.mlp_norm, cfg.norm_eps)
            x = x + swiglu(
                normed,
                layer.gate,
                layer.up,
                layer.down,
                layer.gate_bias,
                layer.up_bias,
                layer.down_bias,
            )
        keys.append(k)
        values.append(v)
    return x, tuple(keys), tuple(values)


def embed(weights: ModelWeights, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """What the first layer takes for tokens.

    Also where the table's rows lie on several devices: XLA turns a look-up of one row into a slice,
    and to slice a split table each device would fetch all of it. Two rows stay a look-up.
    """
    table = weights.embed
    if tokens.size > 1:
        return table[tokens]
    twice = jnp.concatenate([tokens, tokens], axis=1)
    return lax.optimization_barrier(table[twice])[:, :1]


def final_norm(
    weights: ModelWeights, hidden: Float[Array, "*rows D"], *, cfg: ModelConfig
) -> Float[Array, "*rows D"]:
    """What the unembedding takes, from the last layer's output."""
    return rms_norm(hidden, weights.final_norm, cfg.norm_eps)


def unembed(
    weights: ModelWeights, normed: Float[Array, "*rows D"], *, cfg: ModelConfig
) -> Float[Array, "*rows V"]:
    """Logits of normed states."""
    with jax.named_scope("unembed"):
        out_dtype = accumulation_dtype(cfg.dtype)
        if weights.unembed is not None:
            return linear(normed, weights.unembed, out_dtype=out_dtype)
        return linear(normed, weights.embed, transposed=True, out_dtype=out_dtype)

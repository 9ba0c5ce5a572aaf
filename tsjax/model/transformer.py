# SPDX-License-Identifier: Apache-2.0
"""The transformer: declared once, run by one function.

Knows the weights' names, shapes and logical axes, and how they turn tokens into hidden states and
logits. Does not know caches: attention is a function handed in, and the fresh keys and values are
handed back. Families differ by the flags of `ModelConfig` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import NarrowMatrix, add_rms_norm, rms_norm, rotary_heads, rotate, rounded_rows
from pallas_kernels.narrow_rows import power_of_2
from tsjax.base.model_config import WIDE, ModelConfig
from tsjax.base.typing import Array, Float, Int, accumulation_dtype
from tsjax.model.int8 import Int8Matrix
from tsjax.model.layers import Matrix, linear, rotary_angles, swiglu
from tsjax.model.narrow import declared
from tsjax.model.param_spec import ParamSpec


class LayerWeights(flax.struct.PyTreeNode):
    """One layer. Biases and q/k norms are None where the family has none.

    A matrix may be a NarrowMatrix, and one of several parts a tuple: see `narrow.declared`.
    """

    attn_norm: Any  # [D]
    qkv: Any  # [K, G + 2, H, D]: of each kv head its query heads, its key and its value
    o: Any  # [D, N, H]
    mlp_norm: Any  # [D]
    gate_up: Any  # [F, 2, D]
    down: Any  # [D, F]
    qkv_bias: Any = None  # [K, G + 2, H]
    o_bias: Any = None  # [D]
    gate_up_bias: Any = None  # [F, 2]
    down_bias: Any = None  # [D]
    q_norm: Any = None  # [H]
    k_norm: Any = None  # [H]


class ModelWeights(flax.struct.PyTreeNode):
    """The whole model; `unembed` is None where the embedding itself makes the logits."""

    embed: Any  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Any  # [D]
    unembed: Any = None  # [V, D]


def declare_model(cfg: ModelConfig) -> ModelWeights:
    """The one declaration of all parameters, as a tree of ParamSpec."""
    D, N, K, G = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.group_size
    H, F, V = cfg.head_dim, cfg.mlp_dim, cfg.vocab_size
    qkv, gate_up = (G, 1, 1), (1, 1)

    def matrix(shape, axes, inputs=1, parts=(), group=1):
        return ParamSpec(shape, axes, cfg.dtype, inputs=inputs, parts=parts, group=group)

    def norm(size, axis):
        return ParamSpec((size,), (axis,), cfg.dtype, "ones")

    def bias(shape, axes, flag, parts=()):
        return ParamSpec(shape, axes, cfg.dtype, "zeros", parts=parts) if flag else None

    def layer(index: int):
        formats = cfg.formats_of(index)
        fresh = matrix((K, G + 2, H, D), ("kv_heads", None, "head_dim", "embed"), parts=qkv)
        # A device that has a kv head has all its query heads, as attention is split so.
        out = matrix((D, N, H), ("embed", "heads", "head_dim"), inputs=2, group=G)
        opened = matrix((F, 2, D), ("mlp", None, "embed"), parts=gate_up)
        return LayerWeights(
            attn_norm=norm(D, "embed"),
            qkv=declared(fresh, formats["qkv"]),
            o=declared(out, formats["o"]),
            mlp_norm=norm(D, "embed"),
            gate_up=declared(opened, formats["gate_up"]),
            down=declared(matrix((D, F), ("embed", "mlp")), formats["down"]),
            qkv_bias=bias((K, G + 2, H), ("kv_heads", None, "head_dim"), cfg.qkv_bias, qkv),
            o_bias=bias((D,), ("embed",), cfg.out_bias),
            gate_up_bias=bias((F, 2), ("mlp", None), cfg.mlp_bias, gate_up),
            down_bias=bias((D,), ("embed",), cfg.mlp_bias),
            q_norm=norm(H, "head_dim") if cfg.qk_norm else None,
            k_norm=norm(H, "head_dim") if cfg.qk_norm else None,
        )

    tied = cfg.tie_embeddings and cfg.unembed_format == WIDE
    unembed = declared(matrix((V, D), ("vocab", "embed")), [cfg.unembed_format])
    return ModelWeights(
        embed=matrix((V, D), ("vocab", "embed"), inputs=0),
        layers=tuple(layer(index) for index in range(cfg.num_layers)),
        final_norm=norm(D, "embed"),
        unembed=None if tied else unembed,
    )


def int8_weights(
    weights: ModelWeights, cfg: ModelConfig, as_int8: Callable[[Any, int], Int8Matrix]
) -> ModelWeights:
    """`weights` with every matrix of a product made anew by `as_int8(matrix, inputs)`, in turn.

    The embedding, which is looked up, the norms and the biases stay the same arrays.
    """

    def made(spec: ParamSpec, leaf: Any) -> Any:
        return as_int8(leaf, spec.inputs) if spec.inputs else leaf

    found = jax.tree.map(made, declare_model(cfg), weights)
    return found if found.unembed is not None else found.replace(unembed=as_int8(found.embed, 1))


# Called with the layer's index and its fresh q, k and v.
Attend = Callable[
    [int, Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]],
    Float[Array, "B T N H"],
]


def apply_layers(
    weights: ModelWeights,
    hidden: Float[Array, "B T D"],
    *,
    positions: Int[Array, "B T"],
    attend: Attend,
    cfg: ModelConfig,
    layers: range | None = None,
    live: Int[Array, "B"] | None = None,
    taps: Sequence[int] = (),
) -> tuple[
    Float[Array, "B T D"],
    tuple[Float[Array, "B T K H"], ...],
    tuple[Float[Array, "B T K H"], ...],
    tuple[Float[Array, "B T D"], ...],
]:
    """One pass of `layers`, by default all, over T rows.

    Args:
      hidden: what the first of them takes: `embed`, or what the layer before it gave.
      attend: attention of one layer's fresh rows; it alone knows the cache and the mask.
      live: how many rows of each batch row are wanted, the first ones; None is all. Of the others a
        device may compute what it likes.
      taps: numbers of layers; what there is after so many of the model is returned.

    Returns:
      hidden after the last of them, before the final norm, the fresh keys and values, one array
      per layer, and one for each of the taps.
    """
    x, update = hidden, None  # of the layer before, not yet added: the next norm does it
    cos, sin = rotary_angles(positions, cfg.rope, cfg.head_dim, cfg.dtype)
    keys, values, after = [], [], {}
    for index in range(cfg.num_layers) if layers is None else layers:
        layer = weights.layers[index]
        with jax.named_scope("attention"):
            x, q, k, v = _fresh(layer, x, update, cos, sin, live, cfg=cfg)
            mixed = attend(index, q, k, v)
        after[index] = x
        x, update = layer_output(layer, x, mixed, live, cfg=cfg)
        keys.append(k)
        values.append(v)
    if update is not None:
        x = x + update.astype(x.dtype)
    after[cfg.num_layers if layers is None else layers.stop] = x
    return x, tuple(keys), tuple(values), tuple(after[tap] for tap in taps)


# All layers are alike. What is jitted in a program is traced and lowered once for all of them; XLA
# then puts each where it is called, so nothing else changes.
@functools.partial(jax.jit, static_argnames=("cfg",))
def _fresh(
    layer: LayerWeights,
    x: Float[Array, "B T D"],
    update: Float[Array, "B T D"] | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    live: Int[Array, "B"] | None,
    *,
    cfg: ModelConfig,
) -> tuple[
    Float[Array, "B T D"], Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]
]:
    """What a layer takes, which is x + update, and queries, keys and values of its rows."""
    if update is None:
        normed = rms_norm(x, layer.attn_norm, cfg.norm_eps, live=live)
    else:
        x, normed = add_rms_norm(x, update, layer.attn_norm, cfg.norm_eps, live=live)
    wide = accumulation_dtype(cfg.dtype)
    # Of each kv head its query heads, its key and its value.
    fresh = linear(normed, layer.qkv, layer.qkv_bias, out_dtype=wide, live=live)
    if cfg.qk_norm:
        fresh = fresh.astype(cfg.dtype)
        q = fresh[:, :, :, :-2].reshape(*x.shape[:2], cfg.num_heads, cfg.head_dim)
        q = rotate(rms_norm(q, layer.q_norm, cfg.norm_eps), cos, sin)
        k = rotate(rms_norm(fresh[:, :, :, -2], layer.k_norm, cfg.norm_eps), cos, sin)
        v = fresh[:, :, :, -1]
    else:
        q, k, v = rotary_heads(fresh, cos, sin, cfg.dtype, live=live)
    if cfg.cache == "int8":  # once, so that drafts, attention and the cache see the same numbers
        if layer.qkv_bias is not None:
            powers = key_powers(layer.qkv_bias[:, -2]).astype(k.dtype)
            k, q = k / powers, q * jnp.repeat(powers, cfg.group_size, axis=0)
        k, v = rounded_rows(jnp.stack([k, v]))
    # What attention reads and what later goes to the cache are then the same arrays. XLA would
    # otherwise keep the wider sums of the product, of all layers, and make both from them.
    return x, *lax.optimization_barrier((q, k, v))


USUAL_KEY = 4.0  # about the largest number of a key without a bias, in models that we looked at


def key_powers(bias: Float[Array, "K H"]) -> Float[Array, "K H"]:
    """By what keys are divided and queries multiplied, so that a bias does not make a few numbers
    so large that eight bits leave nothing of the others (Qwen2.5 has biases of 150).

    Powers of two, which change no product; of both numbers that are rotated into each other the
    same one.
    """
    size = jnp.max(jnp.abs(bias).reshape(len(bias), 2, -1), axis=1).astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.maximum(size, USUAL_KEY))
    return jnp.tile(power_of_2(exponent), (1, 2))


@functools.partial(jax.jit, static_argnames=("cfg",))
def layer_output(
    layer: LayerWeights,
    x: Float[Array, "B T D"],
    mixed: Float[Array, "B T N H"],
    live: Int[Array, "B"] | None,
    *,
    cfg: ModelConfig,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """What a layer gives, from what it took and what its rows attended to: the sum of two arrays.

    Sums of products stay in their wide type until they are added.
    """
    wide = accumulation_dtype(cfg.dtype)
    with jax.named_scope("attention"):
        mixed = linear(mixed, layer.o, layer.o_bias, contract=2, out_dtype=wide, live=live)
    with jax.named_scope("mlp"):
        x, normed = add_rms_norm(x, mixed, layer.mlp_norm, cfg.norm_eps, live=live)
        biases = layer.gate_up_bias, layer.down_bias
        return x, swiglu(normed, layer.gate_up, layer.down, *biases, out_dtype=wide, live=live)


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
    with jax.named_scope("unembed"):
        return linear(normed, unembedding(weights), out_dtype=accumulation_dtype(cfg.dtype))


def unembedding(weights: ModelWeights) -> Matrix:
    """The matrix that logits are made with."""
    return weights.embed if weights.unembed is None else weights.unembed


def unembedding_rows(weights: ModelWeights, tokens: Int[Array, "n"]) -> Float[Array, "n D"]:
    """Its rows of these tokens, in the model's type."""
    matrix: Any = unembedding(weights)
    if isinstance(matrix, NarrowMatrix):
        return matrix.rows(tokens).astype(weights.embed.dtype)
    return matrix[tokens]

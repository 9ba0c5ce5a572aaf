# SPDX-License-Identifier: Apache-2.0
"""The pieces of a transformer layer as pure functions: linear, feed-forward, rotary angles.

Knows array shapes and RopeConfig. Does not know parameters' names, caches or models.
Matrix products of float32 and float64 arrays run at full precision on every device, those of
bfloat16 arrays accumulate in float32.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import NarrowMatrix, gated, narrow_product, product
from tsjax.base.model_config import RopeConfig
from tsjax.base.typing import Array, DTypeLike, Float, Int, accumulation_dtype
from tsjax.model.int8 import Int8Matrix

Matrix = Float[Array, "..."] | Int8Matrix | NarrowMatrix
Weight = Matrix | tuple[Matrix, ...]  # in one piece, or in several


def linear(
    x: Float[Array, "..."],
    weight: Weight,
    bias: Float[Array, "..."] | None = None,
    *,
    contract: int = 1,
    out_dtype: DTypeLike | None = None,
    live: Int[Array, "B"] | None = None,
) -> Float[Array, "..."]:
    """The sums of x [..., *I] * weight [*O, *I] over I, the last `contract` axes, + bias [*O].

    A weight in several pieces gives theirs side by side along the second axis of O.
    `live` says of rows [B, T] how many of each batch row are wanted; None is all.
    """
    lead, inner = x.shape[: x.ndim - contract], x.shape[x.ndim - contract :]
    rows = x.reshape(*lead, math.prod(inner))
    pieces = weight if isinstance(weight, tuple) else (weight,)
    sums = [_sums(rows, piece, contract, live) for piece in pieces]
    y = jnp.concatenate(sums, axis=len(lead) + 1) if sums[1:] else sums[0]
    if bias is not None:
        y = y + _with_rank(bias.astype(y.dtype), y.ndim)
    return y.astype(out_dtype or x.dtype)


def _sums(
    rows: Float[Array, "*lead I"], weight: Matrix, contract: int, live: Int[Array, "B"] | None
) -> Float[Array, "..."]:
    """[*lead, *O]."""
    if isinstance(weight, NarrowMatrix):
        return narrow_product(rows, weight, live=live).reshape(*rows.shape[:-1], *weight.outputs)
    scales = weight.scales.reshape(-1) if isinstance(weight, Int8Matrix) else None
    values: Any = weight.values if isinstance(weight, Int8Matrix) else weight
    outer = values.shape[: values.ndim - contract]
    matrix = values.reshape(math.prod(outer), rows.shape[-1])
    y = product(rows, matrix, scales=scales, live=live)
    return y.reshape(*rows.shape[:-1], *outer)


def swiglu(
    x: Float[Array, "*rows D"],
    gate_up: Weight,
    down: Weight,
    gate_up_bias: Float[Array, "F 2"] | None = None,
    down_bias: Float[Array, "D"] | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    live: Int[Array, "B"] | None = None,
) -> Float[Array, "*rows D"]:
    """down(silu(gate(x)) * up(x)): the feed-forward part of every supported family.

    gate_up is [F, 2, D], down [D, F].
    """
    wide = accumulation_dtype(x.dtype)
    opened = linear(x, gate_up, gate_up_bias, out_dtype=wide, live=live)  # [*rows, F, 2]
    hidden = gated(opened, x.dtype, live=live)
    return linear(hidden, down, down_bias, out_dtype=out_dtype, live=live)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float[np.ndarray, "{head_dim//2}"]:
    """Angle per position of each pair of dimensions, in float64."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn_frequencies(frequencies, rope, head_dim)
    return frequencies


def _llama3_frequencies(
    frequencies: Float[np.ndarray, "pairs"], rope: RopeConfig
) -> Float[np.ndarray, "pairs"]:
    """Long wavelengths are slowed down by `factor`, short ones kept, those between are blended."""
    wavelength = 2 * math.pi / frequencies
    rotations = rope.original_max_positions / wavelength
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn_frequencies(
    frequencies: Float[np.ndarray, "pairs"], rope: RopeConfig, head_dim: int
) -> Float[np.ndarray, "pairs"]:
    """YaRN (arXiv 2309.00071): interpolate low frequencies, keep high ones, ramp between."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def rotary_angles(
    positions: Int[Array, "*rows"], rope: RopeConfig, head_dim: int, dtype: DTypeLike
) -> tuple[Float[Array, "*rows {head_dim//2}"], Float[Array, "*rows {head_dim//2}"]]:
    """cos and sin for `positions`, in `dtype`'s accumulation type."""
    wide = accumulation_dtype(dtype)
    frequencies = jnp.asarray(rope_frequencies(rope, head_dim), wide)
    angles = positions[..., None].astype(wide) * _with_rank(frequencies, positions.ndim + 1)
    scale = rope.attention_factor
    return (jnp.cos(angles) * scale).astype(wide), (jnp.sin(angles) * scale).astype(wide)


def _with_rank(x: Float[Array, "..."], rank: int) -> Float[Array, "..."]:
    """x with more axes in front, of size 1: for a product with an array of that rank."""
    return lax.expand_dims(x, range(rank - x.ndim))

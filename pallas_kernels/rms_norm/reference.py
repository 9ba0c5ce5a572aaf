# SPDX-License-Identifier: Apache-2.0
"""The definition, as HuggingFace has it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.typing import Array, Float, accumulation_dtype


def rms_norm(
    rows: Float[Array, "*rows D"], weight: Float[Array, "D"], eps: float
) -> Float[Array, "*rows D"]:
    """As `api.rms_norm`."""
    wide = rows.astype(accumulation_dtype(rows.dtype))
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(rows.dtype) * lax.expand_dims(weight, range(rows.ndim - 1))


def add_rms_norm(
    rows: Float[Array, "*rows D"],
    update: Float[Array, "*rows D"],
    weight: Float[Array, "D"],
    eps: float,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """As `api.add_rms_norm`."""
    sums = rows + update.astype(rows.dtype)
    return sums, rms_norm(sums, weight, eps)

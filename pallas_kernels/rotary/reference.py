# SPDX-License-Identifier: Apache-2.0
"""The definition, as HuggingFace has it."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.typing import Array, DTypeLike, Float


def rotate(
    x: Float[Array, "B T heads H"], cos: Float[Array, "B T H//2"], sin: Float[Array, "B T H//2"]
) -> Float[Array, "B T heads H"]:
    """As `api.rotate`."""
    wide = x.astype(cos.dtype)
    first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def rotary_heads(
    fresh: Float[Array, "B T K P H"],
    cos: Float[Array, "B T H//2"],
    sin: Float[Array, "B T H//2"],
    dtype: DTypeLike,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """As `api.rotary_heads`."""
    fresh = fresh.astype(dtype)
    queries, keys, values = fresh[:, :, :, :-2], fresh[:, :, :, -2], fresh[:, :, :, -1]
    B, T, K, G, H = queries.shape
    return rotate(queries.reshape(B, T, K * G, H), cos, sin), rotate(keys, cos, sin), values

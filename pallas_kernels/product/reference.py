# SPDX-License-Identifier: Apache-2.0
"""The definition: weights as numbers of the accumulation type, then one sum per output."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.typing import Array, Float, Num, accumulation_dtype


def product(
    rows: Float[Array, "*rows I"],
    weights: Num[Array, "O I"],
    scales: Float[Array, "O"] | None = None,
) -> Float[Array, "*rows O"]:
    """As `api.product`."""
    wide = accumulation_dtype(rows.dtype)
    matrix = weights.astype(wide)
    if scales is not None:
        matrix = matrix * scales[:, None]
    return jnp.einsum("...i,oi->...o", rows.astype(wide), matrix, precision="highest")

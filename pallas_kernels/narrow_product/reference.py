# SPDX-License-Identifier: Apache-2.0
"""The definition, in XLA: rows as they are multiplied, weights as float32 numbers, one sum each."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.narrow_product.matrix import ENTRIES, NarrowMatrix, stored_inputs
from pallas_kernels.typing import Array, Float, accumulation_dtype

MOST = 127  # of an entry that is rounded
TINY = 2.0**-100  # where all of 32 entries are below it they are multiplied as zeros


def narrow_product(rows: Float[Array, "*rows I"], matrix: NarrowMatrix) -> Float[Array, "*rows O"]:
    """As `api.narrow_product`."""
    wide = accumulation_dtype(rows.dtype)
    weights = matrix.numbers().astype(wide)
    return jnp.einsum("...i,oi->...o", as_multiplied(rows), weights, precision="highest")


@jax.custom_jvp
def as_multiplied(rows: Float[Array, "*rows I"]) -> Float[Array, "*rows I"]:
    """What the weights are multiplied with: rows of bfloat16 as integers times a scale for each
    32 entries, others as they are. Its derivative is 1."""
    if rows.dtype != jnp.bfloat16:
        return rows.astype(accumulation_dtype(rows.dtype))
    count = rows.shape[-1]
    padding = [(0, 0)] * (rows.ndim - 1) + [(0, stored_inputs(count) - count)]
    groups = jnp.pad(rows.astype(jnp.float32), padding)
    groups = groups.reshape(*rows.shape[:-1], math.ceil(count / ENTRIES), ENTRIES)
    largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    steps = jnp.where(largest > TINY, MOST / largest, 0)
    found = jnp.round(groups * steps) * (largest / MOST)
    return found.reshape(*rows.shape[:-1], -1)[..., :count]


as_multiplied.defjvps(
    lambda tangent, found, rows: tangent.astype(accumulation_dtype(tangent.dtype))
)

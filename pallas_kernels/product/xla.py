# SPDX-License-Identifier: Apache-2.0
"""The product in plain XLA, and what a GPU does with few rows."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels.typing import accumulation_dtype

FEWEST_ROWS = 8  # on a GPU


def product(rows, weights, scales=None):
    """As `api.product`."""
    # XLA sees no further than this product: for GPUs it would otherwise keep transposed copies of
    # weights with several output axes.
    # One barrier for each: jax 0.12 cannot transpose one of which some operands are constants.
    rows, weights = lax.optimization_barrier(rows), lax.optimization_barrier(weights)
    sums = lax.dot_general(
        rows,
        weights.astype(rows.dtype),
        (((rows.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=accumulation_dtype(rows.dtype),
    )
    return sums if scales is None else sums * lax.expand_dims(scales, range(sums.ndim - 1))


def product_of_few_rows(rows, weights, scales=None):
    """As `product` of FEWEST_ROWS rows, of which those beyond the given ones are zero.

    For fewer rows XLA does not call cuBLAS on a GPU but has a kernel of its own. On an H200 that
    one is the faster one for one row of 16-bit weights (docs/kernels.md).
    """
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.shape[0] >= FEWEST_ROWS:
        raise NotImplementedError(f"{flat.shape[0]} rows: fewer than {FEWEST_ROWS}")
    padded = jnp.pad(flat, ((0, FEWEST_ROWS - flat.shape[0]), (0, 0)))
    # XLA would make one product of fewer rows of it again.
    sums = lax.optimization_barrier(product(lax.optimization_barrier(padded), weights, scales))
    return sums[: math.prod(rows.shape[:-1])].reshape(*rows.shape[:-1], sums.shape[-1])

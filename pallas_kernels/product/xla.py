# SPDX-License-Identifier: Apache-2.0
"""The product in plain XLA: on a GPU cuBLAS, or a kernel of XLA's own for one row."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.typing import accumulation_dtype


def product(rows, weights, scales=None):
    """As `api.product`."""
    # XLA sees no further than this product: for GPUs it would otherwise keep transposed copies of
    # weights with several output axes.
    # One barrier for each: jax 0.12 cannot transpose one of which some operands are constants.
    rows, weights = lax.optimization_barrier(rows), lax.optimization_barrier(weights)
    # Products of int8 with 16 bits are exact in float32 at any precision. At the highest, XLA makes
    # one row a reduction without matrix units; of 16-bit weights that was the fastest on an H200.
    is_exact = scales is not None and jnp.finfo(rows.dtype).bits == 16
    sums = lax.dot_general(
        rows,
        weights.astype(rows.dtype),
        (((rows.ndim - 1,), (1,)), ((), ())),
        precision=None if is_exact else lax.Precision.HIGHEST,
        preferred_element_type=accumulation_dtype(rows.dtype),
    )
    return sums if scales is None else sums * lax.expand_dims(scales, range(sums.ndim - 1))

# SPDX-License-Identifier: Apache-2.0
"""The product in plain XLA: on a GPU cuBLAS, or a kernel of XLA's own for one row."""

from __future__ import annotations

from jax import lax

from pallas_kernels.typing import accumulation_dtype


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

# SPDX-License-Identifier: Apache-2.0
"""The public function: checks its arguments, then calls the first implementation that serves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import FLOATS, check_live
from pallas_kernels.narrow_product import native, reference, triton, xla
from pallas_kernels.narrow_product.matrix import NarrowMatrix, check_matrix
from pallas_kernels.typing import Array, Float, Int


def narrow_product(
    rows: Float[Array, "*rows I"],
    matrix: NarrowMatrix,
    *,
    live: Int[Array, "B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows O"]:
    """Each row's products with narrow weights of each output, summed over I.

    On a CPU rows of bfloat16 are rounded first, as the processor multiplies integers: each 32
    entries to integers of at most 127 times a scale, largest / 127. So is a row's error what it is
    for weights of eight bits. Rows of other types, and all on a GPU, are multiplied as they are.
    Of more rows than are decoded at a time XLA's product on a GPU rounds the weights to their type.

    Args:
      rows: with any axes before I.
      matrix: weights of four or eight bits, in groups with scales; its inputs are one axis here.
      live: of rows [B, T, I], how many of each batch row are wanted, the first ones; what the
        others get is unspecified. The native kernel leaves them out.
      implementation: "native" (on a CPU, for rows in bfloat16 and float32), "triton" (on a GPU, for
        up to 128 rows of 16 bits) or "xla", which makes the weights wide at each call, to have that
        one or an error; None for the first that serves.

    Returns:
      float32 (float64 for float64 rows). With the native kernel and the one for GPUs a row has the
      same bits whatever other rows there are.
    """
    rows, matrix = jnp.asarray(rows), jax.tree.map(jnp.asarray, matrix)
    if not rows.ndim or rows.dtype not in FLOATS:
        raise ValueError(
            f"rows of shape {rows.shape} and type {rows.dtype} is not valid: [..., I] of one of "
            f"{', '.join(FLOATS)}"
        )
    check_matrix(matrix, rows.shape[-1])
    check_live(live, rows)
    with jax.named_scope("narrow_product"):
        return dispatch.run(IMPLEMENTATIONS, (rows, matrix, live), name=implementation)


IMPLEMENTATIONS = (
    dispatch.Implementation("native", "cpu", native.narrow_product),
    dispatch.Implementation("triton", "cuda", dispatch.of_all_rows(triton.narrow_product)),
    dispatch.Implementation("xla", "cuda", dispatch.of_all_rows(xla.narrow_product)),
    dispatch.Implementation("xla", None, dispatch.of_all_rows(reference.narrow_product)),
)

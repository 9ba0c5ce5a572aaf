# SPDX-License-Identifier: Apache-2.0
"""The public function: checks its arguments, then calls the first implementation that serves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import FLOATS, check_live
from pallas_kernels.product import native, xla
from pallas_kernels.typing import Array, Float, Int, Num, accumulation_dtype


def product(
    rows: Float[Array, "*rows I"],
    weights: Num[Array, "O I"],
    *,
    scales: Float[Array, "O"] | None = None,
    live: Int[Array, "B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows O"]:
    """Each row's products with the weights of each output, summed over I.

    Args:
      rows: with any axes before I.
      weights: in the rows' type, or int8 with `scales`.
      scales: of each output, what one step of its int8 weights is worth; in the type of the sums.
      live: of rows [B, T, I], how many of each batch row are wanted, the first ones; what the
        others get is unspecified. The native kernel leaves them out.
      implementation: "native" (on a CPU) or "xla" to have that one or an error; None for the first
        that serves.

    Returns:
      float32 (float64 for float64 rows). On a CPU with the native kernel a row has the same bits
      whatever other rows there are.
    """
    rows, weights = jnp.asarray(rows), jnp.asarray(weights)
    scales = None if scales is None else jnp.asarray(scales)
    _check(rows, weights, scales)
    check_live(live, rows)
    with jax.named_scope("product"):
        return dispatch.run(IMPLEMENTATIONS, (rows, weights, scales, live), name=implementation)


def _check(rows: Array, weights: Array, scales: Array | None) -> None:
    if not rows.ndim or weights.ndim != 2 or rows.shape[-1] != weights.shape[1]:
        raise ValueError(
            "shapes do not fit together: rows [..., I], weights [O, I]; "
            f"got rows {rows.shape}, weights {weights.shape}"
        )
    if rows.dtype not in FLOATS:
        raise ValueError(f"rows of type {rows.dtype} is not valid: one of {', '.join(FLOATS)}")
    wide = accumulation_dtype(rows.dtype)
    if scales is None and weights.dtype != rows.dtype:
        raise ValueError(
            f"weights of type {weights.dtype} is not valid: {rows.dtype}, as rows, or int8 with "
            "scales"
        )
    if scales is not None and weights.dtype != jnp.int8:
        raise ValueError(f"weights of type {weights.dtype} is not valid with scales: int8")
    if scales is not None and (scales.shape != weights.shape[:1] or scales.dtype != wide):
        raise ValueError(
            f"scales of shape {scales.shape} and type {scales.dtype} is not valid: "
            f"{weights.shape[:1]} of {wide}, by weights and rows"
        )


IMPLEMENTATIONS = (
    dispatch.Implementation("native", "cpu", native.product),
    dispatch.Implementation("xla", None, dispatch.of_all_rows(xla.product)),
)

# SPDX-License-Identifier: Apache-2.0
"""The public functions: each checks its arguments, then calls the first that serves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import FLOATS, check_live
from pallas_kernels.rms_norm import native, reference
from pallas_kernels.typing import Array, Float, Int, accumulation_dtype


def rms_norm(
    rows: Float[Array, "*rows D"],
    weight: Float[Array, "D"],
    eps: float,
    *,
    live: Int[Array, "B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows D"]:
    """rows / rms(rows) * weight over the last axis, in the rows' type.

    The mean square is computed in the type of sums. On a CPU with the native kernel a row has the
    same bits whatever other rows there are.

    Args:
      rows: with any axes before D.
      weight: in the rows' type.
      eps: is added to the mean square.
      live: of rows [B, T, D], how many of each batch row are wanted, the first ones; what the
        others get is unspecified. The native kernel leaves them out.
      implementation: "triton", "native" or "xla" to have that one or an error; None for the first
        that serves.
    """
    rows, weight = jnp.asarray(rows), jnp.asarray(weight)
    _check(rows, weight)
    check_live(live, rows)
    with jax.named_scope("rms_norm"):
        return dispatch.run(implementations(eps), (rows, weight, live), name=implementation)


def add_rms_norm(
    rows: Float[Array, "*rows D"],
    update: Float[Array, "*rows D"],
    weight: Float[Array, "D"],
    eps: float,
    *,
    live: Int[Array, "B"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """rows + update, in the rows' type, and the norms of these sums as `rms_norm` gives them.

    Args:
      update: what a layer adds to its rows; in the rows' type or the type of sums.
      live: see `rms_norm`.
    """
    rows, update, weight = jnp.asarray(rows), jnp.asarray(update), jnp.asarray(weight)
    _check(rows, weight)
    check_live(live, rows)
    if update.shape != rows.shape or update.dtype not in (
        rows.dtype,
        accumulation_dtype(rows.dtype),
    ):
        raise ValueError(
            f"update of shape {update.shape} and type {update.dtype} is not valid: {rows.shape} of "
            f"{rows.dtype} or of {accumulation_dtype(rows.dtype)}, by rows"
        )
    with jax.named_scope("rms_norm"):
        found = implementations(eps, adds=True)
        return dispatch.run(found, (rows, update, weight, live), name=implementation)


def _check(rows: Array, weight: Array) -> None:
    if not rows.ndim or weight.shape != rows.shape[-1:]:
        raise ValueError(
            "shapes do not fit together: rows [..., D], weight [D]; "
            f"got rows {rows.shape}, weight {weight.shape}"
        )
    if rows.dtype not in FLOATS or weight.dtype != rows.dtype:
        raise ValueError(
            f"rows of type {rows.dtype} with weight of type {weight.dtype} is not valid: one type, "
            f"of {', '.join(FLOATS)}"
        )


def implementations(eps: float, *, adds: bool = False) -> tuple[dispatch.Implementation, ...]:
    name = "add_rms_norm" if adds else "rms_norm"

    def of(module):
        return functools.partial(getattr(module, name), eps=eps)

    def on_gpu(*arrays):
        from pallas_kernels.rms_norm import triton  # which takes a tenth of a second to import

        return of(triton)(*arrays)

    return (
        dispatch.Implementation("triton", "cuda", dispatch.of_all_rows(on_gpu)),
        dispatch.Implementation("native", "cpu", of(native)),
        dispatch.Implementation("xla", None, dispatch.of_all_rows(of(reference))),
    )

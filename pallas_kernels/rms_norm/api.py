# SPDX-License-Identifier: Apache-2.0
"""The public function: checks its arguments, then calls the first implementation that serves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import FLOATS
from pallas_kernels.rms_norm import native, reference
from pallas_kernels.typing import Array, Float


def rms_norm(
    rows: Float[Array, "*rows D"],
    weight: Float[Array, "D"],
    eps: float,
    *,
    implementation: str | None = None,
) -> Float[Array, "*rows D"]:
    """rows / rms(rows) * weight over the last axis, in the rows' type.

    The mean square is computed in the type of sums. On a CPU with the native kernel a row has the
    same bits whatever other rows there are.

    Args:
      rows: with any axes before D.
      weight: in the rows' type.
      eps: is added to the mean square.
      implementation: "native" or "xla" to have that one or an error; None for the first that
        serves.
    """
    rows, weight = jnp.asarray(rows), jnp.asarray(weight)
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
    with jax.named_scope("rms_norm"):
        return dispatch.run(implementations(eps), (rows, weight), name=implementation)


def implementations(eps: float) -> tuple[dispatch.Implementation, ...]:
    return (
        dispatch.Implementation("native", "cpu", functools.partial(native.rms_norm, eps=eps)),
        dispatch.Implementation("xla", None, functools.partial(reference.rms_norm, eps=eps)),
    )

# SPDX-License-Identifier: Apache-2.0
"""The public function: checks its arguments, then calls the first implementation that serves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import FLOATS, check_live
from pallas_kernels.gate import native, reference
from pallas_kernels.typing import Array, DTypeLike, Float, Int, accumulation_dtype


def gated(
    opened: Float[Array, "*rows F 2"],
    dtype: DTypeLike,
    *,
    live: Int[Array, "B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows F"]:
    """silu(gate) * up of each pair (gate, up), in `dtype`.

    On a CPU with the native kernel a row has the same bits whatever other rows there are.

    Args:
      opened: pairs in `dtype` or its type of sums; they are rounded to `dtype` first.
      live: of rows [B, T, F, 2], how many of each batch row are wanted, the first ones; what the
        others get is unspecified. The native kernel leaves them out.
      implementation: "native" (on a CPU, for rows [B, T]) or "xla" to have that one or an error;
        None for the first that serves.
    """
    opened, dtype = jnp.asarray(opened), jnp.dtype(dtype)
    if opened.ndim < 2 or opened.shape[-1] != 2:
        raise ValueError(f"opened of shape {opened.shape} is not valid: [..., F, 2]")
    if dtype not in FLOATS or opened.dtype not in (dtype, accumulation_dtype(dtype)):
        raise ValueError(
            f"opened of type {opened.dtype} with dtype {dtype} is not valid: dtype is one of "
            f"{', '.join(FLOATS)}, opened of it or of its type of sums"
        )
    check_live(live, opened)
    with jax.named_scope("gate"):
        return dispatch.run(implementations(dtype), (opened, live), name=implementation)


def implementations(dtype: DTypeLike) -> tuple[dispatch.Implementation, ...]:
    definition = functools.partial(reference.gated, dtype=dtype)
    return (
        dispatch.Implementation("native", "cpu", functools.partial(native.gated, dtype=dtype)),
        dispatch.Implementation("xla", None, dispatch.of_all_rows(definition)),
    )

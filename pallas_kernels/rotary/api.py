# SPDX-License-Identifier: Apache-2.0
"""The public functions: each checks its arguments, then calls the first that serves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import FLOATS, check_live
from pallas_kernels.rotary import native, reference
from pallas_kernels.typing import Array, DTypeLike, Float, Int, accumulation_dtype


def rotate(
    x: Float[Array, "B T heads H"], cos: Float[Array, "B T H//2"], sin: Float[Array, "B T H//2"]
) -> Float[Array, "B T heads H"]:
    """The pairs (i, i + H/2) of x, each turned by its angle: rotary embedding."""
    return reference.rotate(x, cos, sin)


def rotary_heads(
    fresh: Float[Array, "B T K P H"],
    cos: Float[Array, "B T H//2"],
    sin: Float[Array, "B T H//2"],
    dtype: DTypeLike,
    *,
    live: Int[Array, "B"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Queries, keys and values of fresh rows in `dtype`; queries and keys with rotary embedding.

    Args:
      fresh: of each kv head its query heads, its key and its value, P = N / K + 2 vectors; in
        `dtype` or its type of sums.
      cos, sin: of each row's angles, in the type of sums.
      live: how many of each batch row's rows are wanted, the first ones; what the others get is
        unspecified. The native kernel leaves them out.
      implementation: "triton", "native" or "xla" to have that one or an error; None for the first
        that serves.
    """
    fresh, cos, sin = jnp.asarray(fresh), jnp.asarray(cos), jnp.asarray(sin)
    dtype = jnp.dtype(dtype)
    wide = accumulation_dtype(dtype)
    if fresh.ndim != 5 or fresh.shape[3] < 3 or fresh.shape[4] % 2:
        raise ValueError(
            f"fresh of shape {fresh.shape} is not valid: [B, T, K, P, H], P at least 3 and H even"
        )
    angles = (*fresh.shape[:2], fresh.shape[4] // 2)
    if cos.shape != angles or sin.shape != angles:
        raise ValueError(
            f"shapes do not fit together: fresh {fresh.shape}, so cos and sin {angles}; "
            f"got cos {cos.shape}, sin {sin.shape}"
        )
    if dtype not in FLOATS or fresh.dtype not in (dtype, wide):
        raise ValueError(
            f"fresh of type {fresh.dtype} with dtype {dtype} is not valid: dtype is one of "
            f"{', '.join(FLOATS)}, fresh of it or of {wide}"
        )
    if cos.dtype != wide or sin.dtype != wide:
        raise ValueError(f"cos of {cos.dtype} and sin of {sin.dtype} is not valid: {wide}")
    check_live(live, fresh)
    with jax.named_scope("rotary"):
        arrays = fresh, cos, sin, live
        return dispatch.run(implementations(dtype), arrays, name=implementation)


def implementations(dtype: DTypeLike) -> tuple[dispatch.Implementation, ...]:
    def on_gpu(*arrays):
        from pallas_kernels.rotary import triton  # which takes a tenth of a second to import

        return triton.rotary_heads(*arrays, dtype=dtype)

    on_cpu = functools.partial(native.rotary_heads, dtype=dtype)
    definition = functools.partial(reference.rotary_heads, dtype=dtype)
    return (
        dispatch.Implementation("triton", "cuda", dispatch.of_all_rows(on_gpu)),
        dispatch.Implementation("native", "cpu", on_cpu),
        dispatch.Implementation("xla", None, dispatch.of_all_rows(definition)),
    )

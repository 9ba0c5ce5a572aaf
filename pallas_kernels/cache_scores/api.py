# SPDX-License-Identifier: Apache-2.0
"""The public function: checks its arguments, then calls the first implementation that serves."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.cache_scores import native, xla
from pallas_kernels.checks import check_arrays, check_length
from pallas_kernels.narrow_rows import NarrowRows, as_array
from pallas_kernels.typing import Array, Float, Integer, accumulation_dtype

MODES = ("dot", "softmax")


def cache_scores(
    q_last: Float[Array, "B N H"],
    k_cache: Float[Array, "B K S H"] | NarrowRows,
    length: Integer[Array, "B"],
    mode: str = "dot",
    *,
    log_totals: Float[Array, "B N"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B K S"] | Float[Array, "B S"]:
    """How much one row's queries ask for each of `length` committed slots.

    "dot": the products q.k, summed over the query heads that share a kv head; neither scaled nor a
    softmax, they order the slots. "softmax": the attention weights, averaged over all query heads;
    they sum to 1. Only the first `length` slots are read: the cost follows `length`, not the
    capacity, and no array larger than [B, K, S] exists.

    Args:
      q_last: queries of one row.
      k_cache: committed keys, wide or narrow; N is a multiple of K.
      length: committed slots of each batch row, at most S.
      mode: "dot" or "softmax".
      log_totals: float32 (float64 for float64 inputs), for "softmax": the logarithm of the
        sum of exp(score) of all that a query head saw, as `tree_attention` gives it, where that is
        other than these slots. The weights are then parts of it.
      implementation: "triton", "native" or "xla" to have that one or an error; None for the first
        that serves.

    Returns:
      float32 (float64 for float64 inputs). "dot": [B, K, S], -inf at `length` and beyond.
      "softmax": [B, S], 0 at `length` and beyond.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not valid: one of {', '.join(map(repr, MODES))}")
    arrays = dict(q_last=jnp.asarray(q_last), k_cache=as_array(k_cache), length=jnp.asarray(length))
    check_arrays(
        arrays,
        dict(q_last="B N H", k_cache="B K S H", length="B"),
        floats=("q_last", "k_cache"),
        integers=("length",),
    )
    check_length(arrays["length"], arrays["k_cache"].shape[2])
    if log_totals is not None:
        arrays["log_totals"] = _checked_totals(log_totals, mode, arrays["q_last"])
    with jax.named_scope("cache_scores"):
        scores = dispatch.run(IMPLEMENTATIONS[mode], tuple(arrays.values()), name=implementation)
        if mode == "dot":
            return scores
        # Head by head: on a CPU XLA takes many times longer for a sum over an outer axis.
        total = functools.reduce(jnp.add, [scores[:, head] for head in range(scores.shape[1])])
        return total / arrays["q_last"].shape[1]


def _checked_totals(log_totals: Array, mode: str, q: Array) -> Array:
    log_totals, wide = jnp.asarray(log_totals), accumulation_dtype(q.dtype)
    if mode != "softmax":
        raise ValueError(f"mode={mode!r} is not valid with log_totals: 'softmax'")
    if log_totals.shape != q.shape[:2] or log_totals.dtype != wide:
        raise ValueError(
            f"log_totals of shape {log_totals.shape} and type {log_totals.dtype} is not valid: "
            f"{q.shape[:2]} of {wide}, by q_last"
        )
    return log_totals


def _triton(*arrays: Any, mode: str) -> Array:
    from pallas_kernels.cache_scores import triton

    return triton.cache_scores(*arrays, mode=mode)


IMPLEMENTATIONS = {
    mode: (
        dispatch.Implementation("triton", "cuda", functools.partial(_triton, mode=mode)),
        dispatch.Implementation("native", "cpu", functools.partial(native.cache_scores, mode=mode)),
        dispatch.Implementation("xla", None, functools.partial(xla.cache_scores, mode=mode)),
    )
    for mode in MODES
}

# SPDX-License-Identifier: Apache-2.0
"""The public function: checks its arguments, then calls the first implementation that serves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.cache_scores import xla
from pallas_kernels.checks import check_arrays, check_length

MODES = ("dot", "softmax")


def cache_scores(q_last, k_cache, length, mode: str = "dot", *, implementation: str | None = None):
    """How much one row's queries ask for each of `length` committed slots.

    "dot": the products q.k, summed over the query heads that share a kv head; neither scaled nor a
    softmax, they order the slots. "softmax": the attention weights, averaged over all query heads;
    they sum to 1. Only the first `length` slots are read: the cost follows `length`, not the
    capacity, and no array larger than [B, K, S] exists.

    Args:
      q_last: [B, N, H] queries of one row.
      k_cache: [B, K, S, H] committed keys; N is a multiple of K.
      length: [B] int32, committed slots of each batch row, at most S.
      mode: "dot" or "softmax".
      implementation: "triton" or "xla" to have that one or an error; None for the first that
        serves.

    Returns:
      float32 (float64 for float64 inputs). "dot": [B, K, S], -inf at `length` and beyond.
      "softmax": [B, S], 0 at `length` and beyond.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not valid: one of {', '.join(map(repr, MODES))}")
    arrays = dict(
        q_last=jnp.asarray(q_last), k_cache=jnp.asarray(k_cache), length=jnp.asarray(length)
    )
    check_arrays(
        arrays,
        dict(q_last="B N H", k_cache="B K S H", length="B"),
        floats=("q_last", "k_cache"),
        integers=("length",),
    )
    check_length(arrays["length"], arrays["k_cache"].shape[2])
    with jax.named_scope("cache_scores"):
        scores = dispatch.run(IMPLEMENTATIONS[mode], tuple(arrays.values()), name=implementation)
        if mode == "dot":
            return scores
        return jnp.sum(scores, axis=1) / arrays["q_last"].shape[1]


def _triton(*arrays, mode: str):
    from pallas_kernels.cache_scores import triton

    return triton.cache_scores(*arrays, mode=mode)


IMPLEMENTATIONS = {
    mode: (
        dispatch.Implementation("triton", "cuda", functools.partial(_triton, mode=mode)),
        dispatch.Implementation("xla", None, functools.partial(xla.cache_scores, mode=mode)),
    )
    for mode in MODES
}

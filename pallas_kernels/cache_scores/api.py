# SPDX-License-Identifier: Apache-2.0
"""The public function: checks shapes, then calls the implementation for the device at hand."""

from __future__ import annotations

import jax

from pallas_kernels.cache_scores import xla


def cache_scores(q, k_cache, length):
    """The product of one query per kv head with the keys of `length` committed slots.

    Neither scaled nor a softmax: it orders the slots. Summed over the query heads that share a kv
    head, q.k is the product with the sum of their queries, so q is that sum. Only the first
    `length` slots are read; the cost follows `length`, not the capacity.

    Args:
      q: [B, K, H] queries.
      k_cache: [B, K, S, H] committed keys.
      length: [B] int32, committed slots of each batch row, at most S.

    Returns:
      [B, K, S] in float32 (float64 for float64 inputs); -inf at `length` and beyond.
    """
    B, K, H = q.shape
    fits = k_cache.ndim == 4 and (B, K, H) == (*k_cache.shape[:2], k_cache.shape[3])
    if not fits or length.shape != (B,):
        raise ValueError(
            "q must be [B, K, H], k_cache [B, K, S, H] and length [B]; got "
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, length {tuple(length.shape)}"
        )
    with jax.named_scope("cache_scores"):
        return xla.cache_scores(q, k_cache, length)

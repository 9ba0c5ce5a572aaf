# SPDX-License-Identifier: Apache-2.0
"""Block by block in plain XLA, with a dynamic trip count."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

BLOCK = 16384  # scores that are looked at together


def best_slots(scores, length, *, count: int, first: int = 0):
    """As `api.best_slots`."""
    B, K, S = scores.shape
    block, zero = min(max(count, BLOCK), S), jnp.int32(0)

    def merge(index, best):
        begin = index * block
        start = jnp.minimum(begin, S - block)  # the last block may overlap
        here = start + jnp.arange(block, dtype=jnp.int32)[None, None]
        fresh = lax.dynamic_slice_in_dim(scores, start, block, axis=2)
        fresh = jnp.where(fresh == 0, jnp.zeros_like(fresh), fresh)  # to top_k, -0 is below 0
        fresh = firsts_above(fresh, here, first)
        fresh = jnp.where((here >= begin) & (here < length[:, None, None]), fresh, -jnp.inf)
        values = jnp.concatenate([best[0], fresh], axis=2)
        slots = jnp.concatenate([best[1], jnp.broadcast_to(here, fresh.shape)], axis=2)
        values, order = lax.top_k(values, count)
        return values, jnp.take_along_axis(slots, order, axis=2)

    blocks = (jnp.max(length).astype(jnp.int32) + block - 1) // block
    nothing = jnp.full((B, K, count), -jnp.inf, scores.dtype), jnp.zeros((B, K, count), jnp.int32)
    return lax.fori_loop(zero, blocks, merge, nothing)[1]


def firsts_above(scores, here, first: int):
    """`scores` of the slots `here`, with those of the `first` ones above all others."""
    return jnp.where((here < first) & (scores > -jnp.inf), jnp.inf, scores)

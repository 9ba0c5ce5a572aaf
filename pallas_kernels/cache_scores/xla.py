# SPDX-License-Identifier: Apache-2.0
"""Blockwise scores in plain XLA: a loop over cache blocks with a dynamic trip count."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

BLOCK = 1024


def cache_scores(q, k_cache, length):
    """Arguments and result as in `api.cache_scores`."""
    B, K, S, _ = k_cache.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    block, zero = min(BLOCK, S), jnp.int32(0)

    def score_block(index, scores):
        start = jnp.minimum(index * block, S - block)  # the last block may overlap
        keys = lax.dynamic_slice_in_dim(k_cache, start, block, axis=2)
        dims = (((2,), (3,)), ((0, 1), (0, 1)))
        fresh = lax.dot_general(
            q, keys, dims, precision=lax.Precision.HIGHEST, preferred_element_type=wide
        )
        committed = start + jnp.arange(block, dtype=jnp.int32) < length[:, None]
        fresh = jnp.where(committed[:, None], fresh, -jnp.inf)
        return lax.dynamic_update_slice(scores, fresh, (zero, zero, start))

    blocks = (jnp.max(length).astype(jnp.int32) + block - 1) // block
    return lax.fori_loop(zero, blocks, score_block, jnp.full((B, K, S), -jnp.inf, wide))

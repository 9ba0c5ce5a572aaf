# SPDX-License-Identifier: Apache-2.0
"""Blockwise scores in plain XLA: loops over cache blocks with dynamic trip counts."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.narrow_rows import slots_of
from pallas_kernels.typing import accumulation_dtype

BLOCK = 1024
MASKED = -1e30  # finite: exp(MASKED - peak) is exactly 0 and no inf - inf can arise


def cache_scores(*arrays, mode: str = "dot"):
    """As `api.cache_scores`, but "softmax" is summed over each kv head's queries only."""
    return dict(dot=_dot_scores, softmax=_softmax_scores)[mode](*arrays)


def _dot_scores(q, k_cache, length):
    (B, N, H), (_, K, S, _) = q.shape, k_cache.shape
    grouped = q.reshape(B, K, N // K, H)
    wide = accumulation_dtype(q.dtype)

    def score_block(index, scores):
        start, fresh, committed = _block_scores(grouped, k_cache, length, index)
        fresh = jnp.where(committed[:, None], jnp.sum(fresh, axis=2), -jnp.inf)
        return lax.dynamic_update_slice_in_dim(scores, fresh, start, axis=2)

    nothing = jnp.full((B, K, S), -jnp.inf, wide)
    return lax.fori_loop(0, _blocks(length, S), score_block, nothing)


def _softmax_scores(q, k_cache, length, log_totals=None):
    (B, N, H), (_, K, S, _) = q.shape, k_cache.shape
    grouped = q.reshape(B, K, N // K, H)
    wide = accumulation_dtype(q.dtype)

    def add_block(index, carry):
        peak, total = carry
        start, fresh, committed = _block_scores(grouped, k_cache, length, index)
        slots = start + jnp.arange(fresh.shape[3], dtype=jnp.int32)
        once = slots >= index * fresh.shape[3]  # blocks may overlap
        fresh = jnp.where((committed & once[None])[:, None, None], fresh * H**-0.5, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(fresh, axis=-1))
        weights = jnp.sum(jnp.exp(fresh - new_peak[..., None]), axis=-1)
        return new_peak, total * jnp.exp(peak - new_peak) + weights

    blocks = _blocks(length, S)
    if log_totals is None:
        nothing = jnp.full(grouped.shape[:3], MASKED, wide), jnp.zeros(grouped.shape[:3], wide)
        peak, total = lax.fori_loop(0, blocks, add_block, nothing)
        log_totals = peak + jnp.log(total)
    log_totals = log_totals.reshape(grouped.shape[:3])

    def share_block(index, shares):
        start, fresh, committed = _block_scores(grouped, k_cache, length, index)
        fresh = jnp.exp(fresh * H**-0.5 - log_totals[..., None])
        fresh = jnp.where(committed[:, None], jnp.sum(fresh, axis=2), 0)
        return lax.dynamic_update_slice_in_dim(shares, fresh, start, axis=2)

    return lax.fori_loop(0, blocks, share_block, jnp.zeros((B, K, S), wide))


def _blocks(length, capacity: int):
    block = min(BLOCK, capacity)
    return (jnp.max(length).astype(jnp.int32) + block - 1) // block


def _block_scores(grouped, k_cache, length, index):
    """Where a block starts, its products [B, K, G, block], and which of its slots [B, block] are
    committed. The last block may overlap the one before it."""
    S = k_cache.shape[2]
    block = min(BLOCK, S)
    start = jnp.minimum(jnp.int32(index) * block, S - block)
    keys = slots_of(k_cache, start, block, grouped.dtype)
    dims = (((3,), (3,)), ((0, 1), (0, 1)))
    scores = lax.dot_general(
        grouped,
        keys,
        dims,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=accumulation_dtype(grouped.dtype),
    )
    slots = start + jnp.arange(block, dtype=jnp.int32)
    return start, scores, slots[None] < length[:, None]

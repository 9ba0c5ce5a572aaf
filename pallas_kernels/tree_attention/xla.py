# SPDX-License-Identifier: Apache-2.0
"""Blockwise attention in plain XLA: loops over cache blocks with dynamic trip counts.

Serves every shape and device. The fresh rows start a running softmax, each cache block updates it,
so nothing larger than one block of scores exists and the cost follows the longest `length` of the
batch. Blocks that every batch row has filled come first and need no mask; smaller ones take the
rest, so that a short text costs little. A small cache, as that of drafts, is one block.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.narrow_rows import slots_of, widened
from pallas_kernels.typing import accumulation_dtype

LARGEST_BLOCK, SMALL_BLOCK = 4096, 512
LONGEST_AT_ONCE = 1280  # slots of a cache that is read as one block
MOST_ELEMENTS = 2**18  # of one array of a block
MOST_FOR_ONE_ROW = 2**20  # reading is all its work, and larger blocks are fewer copies
MASKED = -1e30  # finite: exp(MASKED - max) is exactly 0 and no inf - inf can arise


def tree_attention(
    q, k_cache, v_cache, length, k_new, v_new, tree_mask, mean=None, log_total=None,
    slot_ranks=None, row_ranks=None, *, block: int | None = None,
):  # fmt: skip
    """Arguments as in `api.tree_attention`; returns both results.

    `mean` and `log_total` are those of `rest`, `slot_ranks` and `row_ranks` those of `ranks`;
    `block` cache slots are read at a time.
    """
    B, T, N, H = q.shape
    K, S = k_cache.shape[1:3]
    G = N // K
    rows = T * G
    at_once = block is None and S <= LONGEST_AT_ONCE
    block = min(block or default_block(B * K, rows, H), S)
    small = min(SMALL_BLOCK, block)

    # The G * T rows that share one kv head are one tile: the cache is read once for all of them.
    tile = q.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, rows, H)

    def add(k, v, committed, ranks, carry):
        """Adds slots to the running softmax: all or those `committed` [B, slots], and of them all
        or those whose `ranks` [B, slots] are below a row's."""
        peak, total, out = carry
        scores = _dot(tile, k, 3, 3) * H**-0.5
        if committed is not None:
            scores = jnp.where(committed[:, None, None, :], scores, MASKED)
            v = jnp.where(committed[:, None, :, None], v, 0)  # 0 * NaN would not be 0
        if ranks is not None and row_ranks is not None:
            seen = ranks[:, None] < jnp.repeat(row_ranks, G, axis=1)[..., None]
            scores = jnp.where(seen[:, None], scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        shrink = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak[..., None])
        fresh = _dot(weights.astype(q.dtype), v, 3, 2)
        return (
            new_peak,
            total * shrink + jnp.sum(weights, axis=-1),
            out * shrink[..., None] + fresh,
        )

    def add_slice(start, size, committed, carry):
        k, v = (slots_of(cache, start, size, q.dtype) for cache in (k_cache, v_cache))
        ranks = slot_ranks
        if ranks is not None:
            ranks = lax.dynamic_slice_in_dim(ranks, start, size, axis=1)
        return add(k, v, committed, ranks, carry)

    def add_whole_block(index, carry):
        return add_slice(index * block, block, None, carry)

    def add_small_block(index, carry):
        first = after_whole + index * small
        start = jnp.minimum(first, S - small)  # the last block may overlap the one before it
        slots = start + jnp.arange(small, dtype=jnp.int32)[None]
        return add_slice(start, small, (slots >= first) & (slots < length[:, None]), carry)

    carry = _fresh_rows(tile, k_new, v_new, tree_mask, mean, log_total)
    if at_once:
        slots = jnp.arange(S, dtype=jnp.int32)[None]
        k, v = widened(k_cache, q.dtype), widened(v_cache, q.dtype)
        peak, total, out = add(k, v, slots < length[:, None], slot_ranks, carry)
    else:
        shortest, longest = jnp.min(length).astype(jnp.int32), jnp.max(length).astype(jnp.int32)
        whole = shortest // block
        after_whole = whole * block
        rest = (longest - after_whole + small - 1) // small
        carry = lax.fori_loop(0, whole, add_whole_block, carry)
        peak, total, out = lax.fori_loop(0, rest, add_small_block, carry)
    out = (out / total[..., None]).astype(q.dtype)
    out = out.reshape(B, K, T, G, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)
    logs = (peak + jnp.log(total)).reshape(B, K, T, G).transpose(0, 2, 1, 3).reshape(B, T, N)
    return out, logs


def _fresh_rows(tile, k_new, v_new, tree_mask, mean, log_total):
    """The softmax of fresh rows among themselves, and over `rest`: its peak, total and sum."""
    (B, K, rows, H), T = tile.shape, k_new.shape[1]
    G = rows // T
    k_fresh, v_fresh = jnp.swapaxes(k_new, 1, 2), jnp.swapaxes(v_new, 1, 2)  # [B, K, T, H]
    scores = _dot(tile, k_fresh, 3, 3) * H**-0.5  # [B, K, rows, T]
    related = jnp.broadcast_to(tree_mask, (B, T, T))
    related = jnp.repeat(related, G, axis=1)[:, None]  # [B, 1, rows, T]
    scores = jnp.where(related, scores, MASKED)
    peak = jnp.max(scores, axis=-1)  # [B, K, rows]; finite from here, if only MASKED
    weights = jnp.exp(scores - peak[..., None])
    total = jnp.sum(weights, axis=-1)
    out = _dot(weights.astype(tile.dtype), v_fresh, 3, 2)  # [B, K, rows, H]
    if mean is not None and log_total is not None:
        # One more slot, with a score and a value for each query head.
        mean = jnp.tile(mean.reshape(B, K, G, H), (1, 1, T, 1)).astype(out.dtype)
        log_total = jnp.tile(log_total.reshape(B, K, G), (1, 1, T))
        new_peak = jnp.maximum(peak, log_total)
        shrink, weight = jnp.exp(peak - new_peak), jnp.exp(log_total - new_peak)
        peak, total = new_peak, total * shrink + weight
        out = out * shrink[..., None] + mean * weight[..., None]
    return peak, total, out


def _dot(a, b, contract_a: int, contract_b: int):
    """Batched over [B, K]."""
    dims, wide = (((contract_a,), (contract_b,)), ((0, 1), (0, 1))), accumulation_dtype(a.dtype)
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=wide)


def default_block(heads: int, rows: int, H: int) -> int:
    """As long as the scores of a block, and its keys, stay in a core's nearest caches."""
    block, most = LARGEST_BLOCK, MOST_FOR_ONE_ROW if rows == 1 else MOST_ELEMENTS
    while block > SMALL_BLOCK and heads * max(rows, H) * block > most:
        block //= 2
    return block

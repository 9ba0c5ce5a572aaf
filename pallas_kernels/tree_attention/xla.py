# SPDX-License-Identifier: Apache-2.0
"""Blockwise attention in plain XLA: loops over cache blocks with dynamic trip counts.

Serves every shape and device. The fresh rows start a running softmax, each cache block updates it,
so nothing larger than one block of scores exists and the cost follows the longest `length` of the
batch: whole blocks first, then small ones for the rest, so that a short cache costs little.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

SMALL_BLOCK = 128
MASKED = -1e30  # finite: exp(MASKED - max) is exactly 0 and no inf - inf can arise


def tree_attention(
    q, k_cache, v_cache, length, k_new, v_new, tree_mask, *, block: int | None = None
):
    """Arguments and result as in `api.tree_attention`; `block` cache slots are read at a time."""
    B, T, N, H = q.shape
    K, S = k_cache.shape[1:3]
    G = N // K
    rows = T * G
    wide = jnp.promote_types(q.dtype, jnp.float32)
    block = min(block or default_block(rows), S)

    # The G * T rows that share one kv head are one tile: the cache is read once for all of them.
    tile = q.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, rows, H)

    def dot(a, b, contract_a: int, contract_b: int):
        """Batched over [B, K]."""
        dims = (((contract_a,), (contract_b,)), ((0, 1), (0, 1)))
        return lax.dot_general(
            a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=wide
        )

    # Fresh rows among themselves. Each row sees itself, so the running maximum is finite from here.
    k_fresh, v_fresh = jnp.swapaxes(k_new, 1, 2), jnp.swapaxes(v_new, 1, 2)  # [B, K, T, H]
    scores = dot(tile, k_fresh, 3, 3) * H**-0.5  # [B, K, rows, T]
    visible = jnp.broadcast_to(tree_mask, (B, T, T))
    visible = jnp.repeat(visible, G, axis=1)[:, None]  # [B, 1, rows, T]
    scores = jnp.where(visible, scores, MASKED)
    peak = jnp.max(scores, axis=-1)  # [B, K, rows]
    weights = jnp.exp(scores - peak[..., None])
    total = jnp.sum(weights, axis=-1)
    out = dot(weights.astype(q.dtype), v_fresh, 3, 2)  # [B, K, rows, H]

    def attend_block(first, block, carry):
        """Adds slots first .. first + block to the running softmax."""
        peak, total, out = carry
        start = jnp.minimum(first, S - block)  # the last block may overlap the one before it
        k = lax.dynamic_slice_in_dim(k_cache, start, block, axis=2)
        v = lax.dynamic_slice_in_dim(v_cache, start, block, axis=2)
        slots = start + jnp.arange(block, dtype=jnp.int32)
        committed = (slots >= first) & (slots < length[:, None])  # [B, block]
        scores = dot(tile, k, 3, 3) * H**-0.5
        scores = jnp.where(committed[:, None, None, :], scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        shrink = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak[..., None])
        v = jnp.where(committed[:, None, :, None], v, 0)  # 0 * NaN would not be 0
        fresh = dot(weights.astype(q.dtype), v, 3, 2)
        return (
            new_peak,
            total * shrink + jnp.sum(weights, axis=-1),
            out * shrink[..., None] + fresh,
        )

    longest = jnp.max(length).astype(jnp.int32)
    small = min(SMALL_BLOCK, block)
    whole = longest // block
    rest = longest - whole * block
    carry = lax.fori_loop(
        0, whole, lambda i, carry: attend_block(i * block, block, carry), (peak, total, out)
    )
    _, total, out = lax.fori_loop(
        0,
        (rest + small - 1) // small,
        lambda i, carry: attend_block(whole * block + i * small, small, carry),
        carry,
    )
    out = (out / total[..., None]).astype(q.dtype)
    return out.reshape(B, K, T, G, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)


def default_block(rows: int) -> int:
    """Few rows are bound by reading the cache, many by the size of the block of scores."""
    return 1024 if rows <= 64 else 512

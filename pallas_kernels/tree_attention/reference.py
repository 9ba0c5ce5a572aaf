# SPDX-License-Identifier: Apache-2.0
"""The definition: one dense softmax over the whole cache and the fresh rows, no blocks."""

from __future__ import annotations

import jax.numpy as jnp


def tree_attention(q, k_cache, v_cache, length, k_new, v_new, tree_mask):
    """Arguments and result as in `api.tree_attention`; costs by capacity."""
    B, T, N, H = q.shape
    K, S = k_cache.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    committed = jnp.arange(S) < length[:, None]  # [B, S]
    values = jnp.where(committed[:, None, :, None], v_cache, 0)
    k = jnp.concatenate([k_cache, jnp.swapaxes(k_new, 1, 2)], axis=2).astype(wide)
    v = jnp.concatenate([values, jnp.swapaxes(v_new, 1, 2)], axis=2).astype(wide)
    visible = jnp.concatenate(
        [
            jnp.broadcast_to(committed[:, None, :], (B, T, S)),
            jnp.broadcast_to(tree_mask, (B, T, T)),
        ],
        axis=2,
    )  # [B, T, S + T]
    grouped = q.reshape(B, T, K, N // K, H).astype(wide)
    scores = jnp.einsum("btkgh,bksh->bkgts", grouped, k, precision="highest") * H**-0.5
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("bkgts,bksh->btkgh", weights, v, precision="highest")
    return out.reshape(B, T, N, H).astype(q.dtype)

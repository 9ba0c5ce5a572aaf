# SPDX-License-Identifier: Apache-2.0
"""The definition: one dense softmax over the whole cache and the fresh rows, no blocks."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.narrow_rows import NarrowRows, widened
from pallas_kernels.typing import Array, Bool, Float, Integer, accumulation_dtype


def tree_attention(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B K S H"] | NarrowRows,
    v_cache: Float[Array, "B K S H"] | NarrowRows,
    length: Integer[Array, "B"],
    k_new: Float[Array, "B T K H"],
    v_new: Float[Array, "B T K H"],
    tree_mask: Bool[Array, "T T"] | Bool[Array, "B T T"],
    mean: Float[Array, "B N H"] | None = None,
    log_total: Float[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Arguments as in `api.tree_attention`, those of `rest` one by one; returns both results.

    Costs by capacity.
    """
    B, T, N, H = q.shape
    K, S = k_cache.shape[1:3]
    wide = accumulation_dtype(q.dtype)
    k_cache, v_cache = widened(k_cache, q.dtype), widened(v_cache, q.dtype)
    committed = jnp.arange(S, dtype=length.dtype)[None] < length[:, None]  # [B, S]
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
    if mean is not None and log_total is not None:
        beside = jnp.broadcast_to(log_total.reshape(B, K, N // K, 1, 1), (*scores.shape[:4], 1))
        scores = jnp.concatenate([scores, beside], axis=-1)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights, logs = weights / total, (peak + jnp.log(total))[..., 0]  # [B, K, G, T]
    out = jnp.einsum("bkgts,bksh->btkgh", weights[..., : S + T], v, precision="highest")
    if mean is not None and log_total is not None:
        share = jnp.moveaxis(weights[..., -1:], 3, 1)  # [B, T, K, G, 1]
        out = out + share * mean.reshape(B, 1, K, N // K, H).astype(wide)
    return out.reshape(B, T, N, H).astype(q.dtype), jnp.moveaxis(logs, 3, 1).reshape(B, T, N)

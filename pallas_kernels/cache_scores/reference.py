# SPDX-License-Identifier: Apache-2.0
"""The definition: products with the whole cache, then the mask."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.narrow_rows import NarrowRows, widened
from pallas_kernels.typing import Array, Float, Integer, accumulation_dtype


def cache_scores(
    q_last: Float[Array, "B N H"],
    k_cache: Float[Array, "B K S H"] | NarrowRows,
    length: Integer[Array, "B"],
    mode: str = "dot",
    *,
    log_totals: Float[Array, "B N"] | None = None,
) -> Float[Array, "B K S"] | Float[Array, "B S"]:
    """Arguments and result as in `api.cache_scores`; costs by capacity."""
    (B, N, H), (_, K, S, _) = q_last.shape, k_cache.shape
    wide = accumulation_dtype(q_last.dtype)
    k_cache = widened(k_cache, q_last.dtype)
    committed = (jnp.arange(S, dtype=length.dtype)[None] < length[:, None])[:, None]  # [B, 1, S]
    keys = jnp.where(committed[..., None], k_cache, 0).astype(wide)
    grouped = q_last.reshape(B, K, N // K, H).astype(wide)
    scores = jnp.einsum("bkgh,bksh->bkgs", grouped, keys, precision="highest")
    if mode == "dot":
        return jnp.where(committed, jnp.sum(scores, axis=2), -jnp.inf)
    scores = jnp.where(committed[:, None], scores * H**-0.5, -jnp.inf)
    if log_totals is not None:
        return jnp.mean(jnp.exp(scores - log_totals.reshape(B, K, N // K, 1)), axis=(1, 2))
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), jnp.finfo(wide).min)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.mean(weights / jnp.where(total == 0, 1, total), axis=(1, 2))

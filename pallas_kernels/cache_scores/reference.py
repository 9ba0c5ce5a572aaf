# SPDX-License-Identifier: Apache-2.0
"""The definition: one product with the whole cache, then the mask."""

from __future__ import annotations

import jax.numpy as jnp


def cache_scores(q, k_cache, length):
    """Arguments and result as in `api.cache_scores`; costs by capacity."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    committed = (jnp.arange(k_cache.shape[2]) < length[:, None])[:, None]  # [B, 1, S]
    keys = jnp.where(committed[..., None], k_cache, 0).astype(wide)
    scores = jnp.einsum("bkh,bksh->bks", q.astype(wide), keys, precision="highest")
    return jnp.where(committed, scores, -jnp.inf)

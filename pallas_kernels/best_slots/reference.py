# SPDX-License-Identifier: Apache-2.0
"""The definition: a stable sort of all scores."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.typing import Array, Float, Int, Integer


def best_slots(
    scores: Float[Array, "B K S"], length: Integer[Array, "B"], *, count: int, first: int = 0
) -> Int[Array, "B K {count}"]:
    """Arguments and result as in `api.best_slots`; costs by capacity."""
    slots = jnp.arange(scores.shape[2], dtype=jnp.int32)
    scores = jnp.where(slots < length[:, None, None], scores, -jnp.inf)
    is_first = (slots < first) & (scores > -jnp.inf)
    order = jnp.argsort(jnp.where(is_first, -jnp.inf, -scores), axis=2, stable=True)
    return order[..., :count].astype(jnp.int32)

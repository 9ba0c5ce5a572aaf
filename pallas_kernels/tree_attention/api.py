# SPDX-License-Identifier: Apache-2.0
"""The public function: checks shapes, then calls the implementation for the device at hand."""

from __future__ import annotations

import jax

from pallas_kernels.tree_attention import xla


def tree_attention(q, k_cache, v_cache, length, k_new, v_new, mask):
    """Attention of T fresh rows to `length` committed slots and, where `mask` says, to each other.

    The cache is only read, and only its first `length` slots: the cost follows `length`, not the
    capacity, and slots beyond it may hold anything, NaN included. Scores are scaled by H**-0.5 and
    summed in float32 (float64 for float64 inputs).

    Args:
      q: [B, T, N, H] queries.
      k_cache, v_cache: [B, K, S, H] committed keys and values; N is a multiple of K.
      length: [B] int32, committed slots of each batch row, at most S.
      k_new, v_new: [B, T, K, H] keys and values of the fresh rows.
      mask: [T, T] or [B, T, T] bool, mask[t, u]: row t sees fresh row u. Every row sees itself.

    Returns:
      [B, T, N, H] in q's type.
    """
    _check_shapes(q, k_cache, v_cache, length, k_new, v_new, mask)
    with jax.named_scope("tree_attention"):
        return xla.tree_attention(q, k_cache, v_cache, length, k_new, v_new, mask)


def _check_shapes(q, k_cache, v_cache, length, k_new, v_new, mask) -> None:
    arrays = dict(
        q=q, k_cache=k_cache, v_cache=v_cache, length=length, k_new=k_new, v_new=v_new, mask=mask
    )
    shapes = ", ".join(f"{name} {tuple(a.shape)}" for name, a in arrays.items())
    if q.ndim != 4 or k_cache.ndim != 4:
        raise ValueError(f"q must be [B, T, N, H] and k_cache [B, K, S, H]; got {shapes}")
    B, T, N, H = q.shape
    K, S = k_cache.shape[1:3]
    wanted = dict(
        k_cache=[(B, K, S, H)],
        v_cache=[(B, K, S, H)],
        length=[(B,)],
        k_new=[(B, T, K, H)],
        v_new=[(B, T, K, H)],
        mask=[(T, T), (B, T, T)],
    )
    wrong = [name for name, allowed in wanted.items() if arrays[name].shape not in allowed]
    if wrong or N % K:
        raise ValueError(
            f"shapes do not fit together ({', '.join(wrong) or 'N is not a multiple of K'}); "
            f"got {shapes}"
        )

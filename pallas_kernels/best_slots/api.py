# SPDX-License-Identifier: Apache-2.0
"""The public function: checks its arguments, then calls the first implementation that serves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.best_slots import native, xla
from pallas_kernels.checks import check_length
from pallas_kernels.typing import Array, Float, Int, Integer


def best_slots(
    scores: Float[Array, "B K S"],
    length: Integer[Array, "B"],
    *,
    count: int,
    first: int = 0,
    implementation: str | None = None,
) -> Int[Array, "B K {count}"]:
    """The `first` slots and then those with the highest scores, best first; equal ones by position.

    Only scores of the first `length` slots are read: the cost follows `length`, not the capacity.

    Args:
      scores: as `cache_scores` gives them; -inf where there is no key.
      length: of each batch row, at least the slots that have a score.
      count: of slots, at most S.
      first: slots that are chosen whatever their scores are, if they have one.
      implementation: "native" or "xla" to have that one or an error; None for the first that
        serves.

    Returns:
      int32. Where a row has fewer than `count` scores, the rest are any slots.
    """
    scores, length = jnp.asarray(scores), jnp.asarray(length)
    if scores.ndim != 3 or length.shape != scores.shape[:1]:
        raise ValueError(
            "shapes do not fit together: scores [B, K, S], length [B]; got "
            f"scores {scores.shape}, length {length.shape}"
        )
    if not 1 <= count <= scores.shape[2]:
        raise ValueError(f"count={count} is not valid: from 1 to the {scores.shape[2]} slots")
    if first < 0:
        raise ValueError(f"first={first} is not valid: 0 or more")
    check_length(length, scores.shape[2])
    with jax.named_scope("best_slots"):
        return dispatch.run(_implementations(count, first), (scores, length), name=implementation)


@functools.cache
def _implementations(count: int, first: int) -> tuple[dispatch.Implementation, ...]:
    sizes = {"count": count, "first": first}
    return (
        dispatch.Implementation("native", "cpu", functools.partial(native.best_slots, **sizes)),
        dispatch.Implementation("xla", None, functools.partial(xla.best_slots, **sizes)),
    )

# SPDX-License-Identifier: Apache-2.0
"""How the rows of several texts are written to one buffer, in place. Knows XLA, no cache."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import with_derivative_of
from tsjax.base.typing import Array, Int, Shaped


def for_each_row(
    one: Callable[[Int[Array, ""], Array], Array],
    at_once: Callable[..., Array],
    buffer: Shaped[Array, "B K slots H"],
    *inputs: Array,
) -> Shaped[Array, "B K slots H"]:
    """one(b, buffer) for every batch row b, in place; on a GPU at_once(buffer, *inputs), which is
    the same by one scatter, as a loop's turn is the host's there. Derivatives are those of the
    scatter, as a loop has none."""
    if buffer.shape[0] == 1:
        return one(jnp.int32(0), buffer)

    def in_turn(buffer, *_):
        return lax.fori_loop(jnp.int32(0), jnp.int32(buffer.shape[0]), one, buffer)

    default = with_derivative_of(at_once, in_turn)
    return lax.platform_dependent(buffer, *inputs, cuda=at_once, default=default)


def write_at_once(
    buffer: Shaped[Array, "B K slots H"], rows: Shaped[Array, "B K T H"], start: Int[Array, "B"]
) -> Shaped[Array, "B K slots H"]:
    """Rows of all texts as slots start[b] .. start[b] + T, by one scatter."""
    index = jnp.arange(rows.shape[2], dtype=jnp.int32)
    return scattered(buffer, rows, start[:, None] + index[None])


def scattered(
    buffer: Shaped[Array, "B K slots H"], rows: Shaped[Array, "B K T H"], slots: Int[Array, "B T"]
) -> Shaped[Array, "B K slots H"]:
    """Each row of each text in its slot, no two in one; those beyond the end go nowhere."""
    b = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    kept = buffer.at[b, :, slots]
    return kept.set(jnp.swapaxes(rows, 1, 2), unique_indices=True, mode="drop")

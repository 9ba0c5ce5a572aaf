# SPDX-License-Identifier: Apache-2.0
"""The rows that training sees, windows of a stream of tokens.

A row is BOS and a window that begins with a paragraph. In some rows the window has a gap, from the
end of a paragraph to the beginning of a later one, and positions count what was left out: the
model meets distances between tokens, up to its context, that no row is long enough for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np

from .texts import Stream


class Windows(flax.struct.PyTreeNode):
    """Where rows come from: int32 arrays of one shape. Positions are those of the stream."""

    start: Any
    cut: Any  # tokens of the window before the gap, BOS included
    gap: Any  # tokens left out
    shift: Any  # added to the positions of all tokens but BOS


def cut_rows(stream, windows: Windows, length: int, bos: int):
    """inputs, targets and positions [rows, length]."""
    places = jnp.arange(length + 1)
    behind = jnp.where(places < windows.cut[:, None], 0, windows.gap[:, None])
    index = windows.start[:, None] + places - 1 + behind
    tokens = jnp.where(places == 0, bos, stream[index])
    positions = jnp.where(places == 0, 0, places + behind + windows.shift[:, None])
    return tokens[:, :-1], tokens[:, 1:], positions[:, :-1]


@dataclasses.dataclass
class Order:
    """Goes through the stream in shuffled windows, each epoch from another beginning."""

    stream: Stream
    length: int
    context: int
    gaps: float
    seed: int
    drawn: int = 0  # windows so far

    @property
    def per_epoch(self) -> int:
        return max(1, (len(self.stream.tokens) - 1) // self.length - 1)

    def take(self, count: int) -> Windows:
        numbers = np.arange(self.drawn, self.drawn + count)
        epochs = numbers // self.per_epoch
        places = np.concatenate(
            [self._epoch(e)[numbers[epochs == e] % self.per_epoch] for e in np.unique(epochs)]
        )
        rng = np.random.default_rng([self.seed, self.length, 1, self.drawn])
        self.drawn += count
        last = len(self.stream.tokens) - self.length - 1  # where a window may begin
        start = np.minimum(self.stream.next_start(places), last)

        # The first part ends with a paragraph, and the second begins with one.
        cut = self.stream.next_start(start + rng.integers(1, self.length, count)) - start + 1
        room = np.minimum(last - start, self.context - self.length - 1)
        far = np.exp(rng.uniform(np.log(16), np.log(self.context), count)).astype(int)
        resumed = self.stream.next_start(start + cut - 1 + np.minimum(far, np.maximum(room, 0)))
        gap = resumed - (start + cut - 1)
        usable = (cut < self.length) & (0 < gap) & (gap <= room) & (rng.random(count) < self.gaps)
        cut, gap = np.where(usable, cut, self.length + 1), np.where(usable, gap, 0)
        shift = rng.integers(0, np.maximum(self.context - self.length - gap, 1))
        shift = np.where(rng.random(count) < self.gaps, shift, 0)
        return Windows(*(np.asarray(a, np.int32) for a in (start, cut, gap, shift)))

    def _epoch(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, self.length, 0, epoch])
        begin = rng.integers(0, self.length)
        return begin + self.length * rng.permutation(self.per_epoch)

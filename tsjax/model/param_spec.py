# SPDX-License-Identifier: Apache-2.0
"""How a parameter is declared. Does not know which there are."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """The declaration of one parameter. A leaf, not a pytree.

    Matrices are [*outputs, *inputs], as HuggingFace has them. Those that share an input lie
    together, one after the other along the second axis.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axis of each dimension, see sharding.py
    dtype: str
    init: str = "normal"  # "normal", "ones" or "zeros"; "bits" of an array of a NarrowMatrix
    inputs: int = 0  # axes that a product sums over; the embedding, which is looked up, has none
    parts: tuple[int, ...] = ()  # along the second axis, where several parameters lie together
    group: int = 1  # neighbours along the axis that is split that stay on one device

    @property
    def part_shapes(self) -> list[tuple[int, ...]]:
        first, rest = self.shape[:1], self.shape[2:]
        return [(*first, size, *rest) for size in self.parts] or [self.shape]

# SPDX-License-Identifier: Apache-2.0
"""What is measured: operations on shapes, the most important first.

Knows sizes. Imports neither jax nor torch, as both sides read it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

OPS = ("decode_attention", "tree_attention", "cache_scores dot", "cache_scores softmax")
HEADS = {"GQA": (8, 4), "MHA": (32, 1)}  # kv heads, query heads for each of them
HEAD_DIM = 128
ROWS = (1, 8, 16, 32, 64, 128)
SLOTS = (106_496, 131_072, 32_768, 4096)  # the most important first


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one shape."""

    op: str
    heads: str
    S: int
    T: int = 1

    @property
    def K(self) -> int:
        return HEADS[self.heads][0]

    @property
    def G(self) -> int:
        return HEADS[self.heads][1]

    @property
    def is_attention(self) -> bool:
        return self.op.endswith("attention")

    @property
    def read_bytes(self) -> int:
        """What has to be read once, in bfloat16."""
        return (2 if self.is_attention else 1) * self.K * self.S * HEAD_DIM * 2

    def fields(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "K": self.K, "G": self.G}


def cases(ops=OPS, slots=SLOTS, rows=ROWS, heads=tuple(HEADS)) -> list[Case]:
    """The most important first: long caches before short ones, GQA before MHA."""
    found = []
    for long in (True, False):
        for name in heads:
            for S in slots:
                if (S >= 32_768) != long:
                    continue
                for op in ops:
                    for T in rows:
                        if (T > 1) == (op == "tree_attention"):
                            found.append(Case(op, name, S, T))
    return found


def tree_mask(T: int):
    """[T, T]: rows see themselves and about every other one before them."""
    return np.tril(np.random.default_rng(0).random((T, T)) < 0.5) | np.eye(T, dtype=bool)

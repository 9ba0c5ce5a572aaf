# SPDX-License-Identifier: Apache-2.0
"""Drafts as paths: those of one source, and how those of several lie beside each other in a tree.

Knows tokens, and sources by name. Does not know where the tokens come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tsjax.base.typing import Array, Bool, Int
from tsjax.decoding.method import Sizes
from tsjax.decoding.tree import SOURCES, DraftTree, merge_paths
from tsjax.methods.rates import NO_DRAFT


@dataclasses.dataclass(frozen=True)
class Paths:
    """Paths of one source.

    Attributes:
      lengths: how many tokens of each count.
      kinds: of each token, by which rates are learned; NO_DRAFT where there is none. None for
        sources that have no kinds.
    """

    tokens: Int[Array, "B R J"]
    lengths: Int[Array, "B R"]
    source: str
    kinds: Int[Array, "B R J"] | None = None

    def unless(self, rows: Bool[Array, "B"]) -> Paths:
        """Without the paths of these batch rows."""
        return dataclasses.replace(self, lengths=jnp.where(rows[:, None], 0, self.lengths))

    def after(self, first: Int[Array, "B"]) -> Paths:
        """The same with the tokens `first` in front of each path that is not empty."""
        first = jnp.broadcast_to(first[:, None, None], (*self.lengths.shape, 1))
        lengths = self.lengths + (self.lengths > 0)
        return dataclasses.replace(
            self, tokens=jnp.concatenate([first, self.tokens], axis=2), lengths=lengths
        )


def of_kinds(tokens: Int[Array, "B R J"], kinds: Int[Array, "B R J"], source: str) -> Paths:
    """Paths that end where there is no draft."""
    return Paths(tokens, jnp.sum(kinds != NO_DRAFT, axis=2, dtype=jnp.int32), source, kinds)


def padded(paths: Int[Array, "B R J"], depth: int, filler: int = 0) -> Int[Array, "B R {depth}"]:
    missing = depth - paths.shape[2]
    return jnp.pad(paths, ((0, 0), (0, 0), (0, missing)), constant_values=filler)


def all_tokens(groups: Sequence[Paths], depth: int) -> Int[Array, "B paths {depth}"]:
    return jnp.concatenate([padded(group.tokens, depth) for group in groups], axis=1)


def all_kinds(groups: Sequence[Paths], depth: int) -> Int[Array, "B paths {depth}"]:
    kinds = [group.kinds for group in groups if group.kinds is not None]
    return jnp.concatenate([padded(one, depth, NO_DRAFT) for one in kinds], axis=1)


def source_numbers(groups: Sequence[Paths], names: Sequence[str]) -> list[int]:
    """Of each path, as trees have them."""
    return [names.index(group.source) for group in groups for _ in range(group.tokens.shape[1])]


def as_tree(root: Int[Array, "B"], groups: Sequence[Paths], sizes: Sizes) -> DraftTree:
    """One tree of all paths; of equal ones the first stays."""
    return merge_paths(
        root,
        all_tokens(groups, sizes.depth),
        jnp.concatenate([group.lengths for group in groups], axis=1),
        source_numbers(groups, SOURCES),
        width=sizes.width,
        num_sources=len(SOURCES),
    )


def as_tuples(value: Any) -> Any:
    """Lists and arrays, as a command line or a file has them, as tuples."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value

# SPDX-License-Identifier: Apache-2.0
"""The draft tree: paths of drafted tokens merged into a trie of T nodes.

Knows tokens and paths. Does not know where drafts come from or how they are judged.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import lax

from tsjax.base.typing import Array, Bool, Float, Int

# What drafts a token, for the methods of this package. "model" is the model itself: its heads, its
# passes on a small cache, its drafter, or a second one.
SOURCES = ("model", "ngrams", "suffix")
NO_NODE = -1


class DraftTree(flax.struct.PyTreeNode):
    """T nodes, the root (the last known token) first, every parent before its children.

    No two nodes have the same path of tokens. Slots that no draft fills are padding: they see only
    themselves and are nobody's child.

    Attributes:
      tokens: 0 in padding.
      path: the nodes from the root (at 0) to the node itself, and NO_NODE below it. A padding node
        has its own index at 0 and nothing else.
      sources: which sources drafted the node; none for the root.
    """

    tokens: Int[Array, "B T"]
    path: Int[Array, "B T J+1"]
    sources: Bool[Array, "B T sources"]

    def narrowed(self, width: int) -> DraftTree:
        """The first `width` nodes: the same tree if its `reach` is no more than that."""
        return DraftTree(
            self.tokens[:, :width], self.path[:, :width, :width], self.sources[:, :width]
        )

    @property
    def depths(self) -> Int[Array, "B T"]:
        """0 for the root and for padding."""
        return jnp.sum(self.path != NO_NODE, axis=-1, dtype=jnp.int32) - 1

    @property
    def parents(self) -> Int[Array, "B T"]:
        """NO_NODE for the root and for padding."""
        above = jnp.maximum(self.depths - 1, 0)[..., None]
        parents = jnp.take_along_axis(self.path, above, axis=-1)[..., 0]
        return jnp.where(self.depths > 0, parents, NO_NODE)

    @property
    def mask(self) -> Bool[Array, "B T T"]:
        """Node t sees node u, that is u is t or an ancestor of t, at [b, t, u]."""
        nodes = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        return jnp.any(self.path[:, :, None, :] == nodes[None, None, :, None], axis=-1)

    @property
    def drafted(self) -> Int[Array, "B"]:
        """Nodes that a source filled."""
        return jnp.sum(self.depths > 0, axis=1, dtype=jnp.int32)

    @property
    def reach(self) -> Int[Array, "B"]:
        """Nodes up to the last one that a source filled, the root included."""
        index = jnp.arange(1, self.tokens.shape[1] + 1, dtype=jnp.int32)
        return jnp.max(jnp.where(self.depths > 0, index, 1), axis=1)


def merge_paths(
    root: Int[Array, "B"],
    paths: Int[Array, "B R J"],
    lengths: Int[Array, "B R"],
    sources: Sequence[int] = (),
    *,
    width: int,
    num_sources: int = 1,
) -> DraftTree:
    """The trie of R paths per batch row.

    Args:
      paths: tokens that might follow the root.
      lengths: how many tokens of each path count.
      sources: what each path comes from, R numbers below num_sources; by default 0.
      width: T, at least one more than the nodes that can differ.
      num_sources: of the method, see `Method.sources`.
    """
    B, R, J = paths.shape
    if R * J == 0:
        path = jnp.broadcast_to(jnp.arange(width)[:, None], (B, width, 1))
        path = jnp.pad(path, ((0, 0), (0, 0), (0, J)), constant_values=NO_NODE).astype(jnp.int32)
        tokens = jnp.pad(root[:, None], ((0, 0), (0, width - 1)))
        return DraftTree(tokens, path, jnp.zeros((B, width, num_sources), bool))

    present = jnp.arange(J, dtype=jnp.int32)[None, None] < lengths[..., None]  # [B, R, J]
    first = first_with(shared(paths, lengths), J)
    owns = present & (first == jnp.arange(R, dtype=jnp.int32)[None, :, None])
    number = jnp.cumsum(owns.reshape(B, R * J), axis=1, dtype=jnp.int32).reshape(B, R, J)
    node = jnp.where(present, jnp.take_along_axis(number, first, axis=1), NO_NODE)  # [B, R, J]

    # Each node is written by its first path.
    b = jnp.arange(B)[:, None, None]
    slot = jnp.where(owns, node, width)  # out of bounds: dropped
    tokens = jnp.zeros((B, width), jnp.int32).at[:, 0].set(root)
    tokens = tokens.at[b, slot].set(paths, mode="drop")
    earlier = jnp.tril(jnp.ones((J, J), bool))[None, None]
    ancestors = jnp.where(earlier, node[:, :, None, :], NO_NODE)
    ancestors = jnp.pad(ancestors, ((0, 0), (0, 0), (0, 0), (1, 0)))  # the root is node 0
    alone = jnp.pad(jnp.arange(width)[:, None], ((0, 0), (0, J)), constant_values=NO_NODE)
    path = jnp.broadcast_to(alone.astype(jnp.int32), (B, width, J + 1))
    path = path.at[b, slot].set(ancestors, mode="drop")
    of_source = jnp.asarray(sources or (0,) * R, jnp.int32)[None, :, None]
    named = jnp.zeros((B, width, num_sources), bool)
    named = named.at[b, jnp.where(present, node, width), of_source].set(True, mode="drop")
    return DraftTree(tokens, path, named)


def shared(paths: Int[Array, "B R J"], lengths: Int[Array, "B R"]) -> Int[Array, "B R R"]:
    """How many nodes two paths share: their first tokens, as long as they are equal."""
    J = paths.shape[2]
    differ = paths[:, :, None] != paths[:, None]
    equal = jnp.min(jnp.where(differ, _steps(J, 4), jnp.int32(J)), axis=3)
    return jnp.minimum(equal, jnp.minimum(lengths[:, :, None], lengths[:, None]))


def first_with(both: Int[Array, "B R R"], depth: int) -> Int[Array, "B R {depth}"]:
    """The first path that has the same node, for each path's tokens, by what `shared` found."""
    return jnp.argmax(both[..., None] > _steps(depth, 4), axis=2).astype(jnp.int32)


def _steps(depth: int, axes: int) -> Int[Array, "..."]:
    """0, 1, ... along the last of so many axes."""
    return lax.broadcasted_iota(jnp.int32, (*(1,) * (axes - 1), depth), axes - 1)


def grow_tree(
    root: Int[Array, "B"],
    paths: Int[Array, "B R J"],
    chances: Float[Array, "B R J"],
    sources: Sequence[int],
    *,
    width: int,
    num_sources: int,
) -> tuple[DraftTree, Float[Array, "B {width}"]]:
    """The trie of the `width` - 1 tokens that are most likely to be right, likeliest first.

    Args:
      paths: tokens that might follow the root.
      chances: how likely all tokens of a path up to this one are right: less with each token, and
        0 where there is none. Of a node that several paths have the largest counts.
      sources: what each path comes from, as for `merge_paths`.

    Returns:
      The tree, and the chance of each node: 1 for the root and 0 for padding. A tree that is cut
      after any node, by `cut`, is one of the likeliest nodes as well.
    """
    B, R, J = paths.shape
    both, steps = shared(paths, jnp.sum(chances > 0, axis=2, dtype=jnp.int32)), _steps(J, 3)
    first = first_with(both, J)
    owns = first == jnp.arange(R, dtype=jnp.int32)[None, :, None]
    same = both[..., None] > steps[None]  # [B, R, R, J]
    of_node = jnp.max(jnp.where(same, chances[:, None], 0), axis=2)
    few = min(width - 1, R * J)
    # A node's chance is less than its parent's, so the parent comes before it.
    ranked, at = lax.top_k(jnp.where(owns, of_node, 0).reshape(B, R * J), few)
    missing = ((0, 0), (0, width - 1 - few))
    ranked, at = jnp.pad(ranked, missing), jnp.pad(at, missing)
    exists, number = ranked > 0, 1 + jnp.arange(width - 1, dtype=jnp.int32)[None]
    b, row, depth = jnp.arange(B)[:, None], at // J, at % J
    slot = jnp.where(exists, at, R * J)  # out of bounds: dropped
    numbers = jnp.full((B, R * J), NO_NODE, jnp.int32).at[b, slot].set(number, mode="drop")
    numbers = numbers.reshape(B, R, J)
    above = numbers[b[..., None], first[b, row], steps]  # [B, width - 1, J]
    above = jnp.where(exists[..., None] & (steps <= depth[..., None]), above, NO_NODE)
    path = jnp.concatenate([jnp.where(exists, 0, number)[..., None], above], axis=2)
    root_path = jnp.full((B, 1, J + 1), NO_NODE, jnp.int32).at[:, :, 0].set(0)
    of_source = np.arange(num_sources) == np.asarray(sources)[:, None]  # [R, sources]
    has_node = both[b, row] > depth[..., None]  # [B, width - 1, R]
    named = jnp.any(has_node[..., None] & of_source, axis=2) & exists[..., None]
    tree = DraftTree(
        tokens=jnp.concatenate([root[:, None], jnp.where(exists, paths[b, row, depth], 0)], axis=1),
        path=jnp.concatenate([root_path, path], axis=1),
        sources=jnp.pad(named, ((0, 0), (1, 0), (0, 0))),
    )
    return tree, jnp.pad(ranked, ((0, 0), (1, 0)), constant_values=1)


def cut(tree: DraftTree, nodes: Int[Array, "B"]) -> DraftTree:
    """The tree with its first `nodes` nodes, the root included, and padding after them."""
    index = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None]
    stays = index < nodes[:, None]
    alone = jnp.full_like(tree.path, NO_NODE).at[:, :, 0].set(index)
    return DraftTree(
        tokens=jnp.where(stays, tree.tokens, 0),
        path=jnp.where(stays[..., None], tree.path, alone),
        sources=tree.sources & stays[..., None],
    )

# SPDX-License-Identifier: Apache-2.0
"""The draft tree: paths of drafted tokens merged into a trie of T nodes.

Knows tokens and paths. Does not know where drafts come from or how they are judged.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

# What drafts a token, for the methods of this package; "heads" includes the model itself.
SOURCES = ("heads", "ngrams", "suffix")
NO_NODE = -1


class DraftTree(flax.struct.PyTreeNode):
    """T nodes, the root (the last known token) first, every parent before its children.

    No two nodes have the same path of tokens. Slots that no draft fills are padding: they see only
    themselves and are nobody's child.

    Attributes:
      tokens: [B, T] int32; 0 in padding.
      path: [B, T, J + 1] int32, the nodes from the root (at 0) to the node itself, and NO_NODE
        below it. A padding node has its own index at 0 and nothing else.
      sources: [B, T, sources] bool, which sources drafted the node; none for the root.
    """

    tokens: jax.Array
    path: jax.Array
    sources: jax.Array

    def narrowed(self, width: int) -> DraftTree:
        """The first `width` nodes: the same tree if it has drafted no more than width - 1."""
        return DraftTree(
            self.tokens[:, :width], self.path[:, :width, :width], self.sources[:, :width]
        )

    @property
    def depths(self) -> jax.Array:
        """[B, T] int32, 0 for the root and for padding."""
        return jnp.sum(self.path != NO_NODE, axis=-1, dtype=jnp.int32) - 1

    @property
    def parents(self) -> jax.Array:
        """[B, T] int32, NO_NODE for the root and for padding."""
        above = jnp.maximum(self.depths - 1, 0)[..., None]
        parents = jnp.take_along_axis(self.path, above, axis=-1)[..., 0]
        return jnp.where(self.depths > 0, parents, NO_NODE)

    @property
    def mask(self) -> jax.Array:
        """[B, T, T] bool: node t sees node u, that is u is t or an ancestor of t."""
        nodes = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        return jnp.any(self.path[:, :, None, :] == nodes[None, None, :, None], axis=-1)

    @property
    def drafted(self) -> jax.Array:
        """[B] int32, nodes that a source filled."""
        return jnp.sum(self.depths > 0, axis=1, dtype=jnp.int32)


def merge_paths(
    root, paths, lengths, sources: Sequence[int] = (), *, width: int, num_sources: int = 1
) -> DraftTree:
    """The trie of R paths per batch row.

    Args:
      root: [B] int32.
      paths: [B, R, J] int32, tokens that might follow the root.
      lengths: [B, R] int32, how many tokens of each path count.
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

    present = jnp.arange(J) < lengths[..., None]  # [B, R, J]
    # first[b, r, j]: the first path that begins with the same j + 1 tokens; its node is shared.
    same, first = jnp.ones((B, R, R), bool), []
    for j in range(J):
        same &= paths[:, :, None, j] == paths[:, None, :, j]
        same &= present[:, :, None, j] & present[:, None, :, j]
        first.append(jnp.argmax(same, axis=2))
    first = jnp.stack(first, axis=2)
    owns = present & (first == jnp.arange(R)[:, None])
    number = jnp.cumsum(owns.reshape(B, R * J), axis=1, dtype=jnp.int32).reshape(B, R, J)
    node = jnp.where(present, jnp.take_along_axis(number, first, axis=1), NO_NODE)  # [B, R, J]

    # Each node is written by its first path.
    b = jnp.arange(B)[:, None, None]
    slot = jnp.where(owns, node, width)  # out of bounds: dropped
    tokens = jnp.zeros((B, width), jnp.int32).at[:, 0].set(root)
    tokens = tokens.at[b, slot].set(paths, mode="drop")
    ancestors = jnp.where(jnp.tril(jnp.ones((J, J), bool)), node[:, :, None, :], NO_NODE)
    ancestors = jnp.pad(ancestors, ((0, 0), (0, 0), (0, 0), (1, 0)))  # the root is node 0
    alone = jnp.pad(jnp.arange(width)[:, None], ((0, 0), (0, J)), constant_values=NO_NODE)
    path = jnp.broadcast_to(alone.astype(jnp.int32), (B, width, J + 1))
    path = path.at[b, slot].set(ancestors, mode="drop")
    of_source = jnp.asarray(sources or (0,) * R, jnp.int32)[None, :, None]
    named = jnp.zeros((B, width, num_sources), bool)
    named = named.at[b, jnp.where(present, node, width), of_source].set(True, mode="drop")
    return DraftTree(tokens, path, named)

# SPDX-License-Identifier: Apache-2.0
"""Judging a draft tree: one pass of the full model, one decision per node, one walk.

Knows the model and the full cache. Does not know where the drafts came from, and does not need
to: what is accepted is what plain decoding would have chosen.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from tsjax.methods import DecodeConfig
from tsjax.model import final_norm, unembed
from tsjax.passes import Rows, run_rows
from tsjax.sampling import NEVER_SEEN, best, score
from tsjax.state import DecodeState, Params
from tsjax.tree import NO_NODE, DraftTree


class Verdict(flax.struct.PyTreeNode):
    """Attributes:
    target: [B, T] int32, the token that follows each node, from its logits and its noise.
    rows: hidden states, keys, values and queries of all nodes.
    """

    target: jax.Array
    rows: Rows


class Acceptance(flax.struct.PyTreeNode):
    """Attributes:
    path: [B, J + 1] int32, the accepted nodes, the root first; beyond `count` unspecified.
    count: [B] int32, accepted nodes behind the root.
    """

    path: jax.Array
    count: jax.Array


def verify(
    params: Params, state: DecodeState, tree: DraftTree, noise, *, cfg: DecodeConfig
) -> Verdict:
    """Runs all nodes on the full cache and decides each node's successor.

    `noise` [B, J + 1, V] is that of the positions from state.length on.
    """
    with jax.named_scope("verify"):
        depths = tree.depths
        positions = state.kv.length[:, None] + depths
        rows = run_rows(params.model, state.kv, tree.tokens, positions, tree.mask, cfg=cfg.model)
        logits = unembed(
            params.model, final_norm(params.model, rows.hidden, cfg=cfg.model), cfg=cfg.model
        )
        scores = score(
            logits,
            state.last_seen,
            depths,
            state.length,
            state.prompt_length,
            noise,
            state.sampling,
            drafted_ancestors(tree, state.length),
        )
        return Verdict(target=best(scores), rows=rows)


def drafted_ancestors(tree: DraftTree, length):
    """The drafted tokens that come before each node's successor, for `sampling.process`.

    They are the node itself and its ancestors behind the root, which is part of the known text.
    """
    if tree.path.shape[2] == 1:
        return None
    path = tree.path[:, :, 1:]
    B, T, J = path.shape
    tokens = jnp.take_along_axis(tree.tokens, jnp.maximum(path, 0).reshape(B, T * J), axis=1)
    positions = length[:, None, None] + jnp.arange(J, dtype=jnp.int32)
    return tokens.reshape(B, T, J), jnp.where(path == NO_NODE, NEVER_SEEN, positions)


def accept(tree: DraftTree, verdict: Verdict) -> Acceptance:
    """The walk from the root: on to the child that is the node's target, until there is none.

    Siblings differ and every node has one target, so the nodes whose whole path was chosen lie on
    one path.
    """
    with jax.named_scope("accept"):
        T = tree.tokens.shape[1]
        parents, depths = tree.parents, tree.depths
        wanted = jnp.take_along_axis(verdict.target, jnp.maximum(parents, 0), axis=1)
        chosen = (parents != NO_NODE) & (tree.tokens == wanted)
        chosen = chosen | (jnp.arange(T) == 0)
        walked = jnp.all(chosen[:, None, :] | ~tree.mask, axis=2)  # [B, T]
        deepest = jnp.argmax(jnp.where(walked, depths, NO_NODE), axis=1)
        path = jnp.take_along_axis(tree.path, deepest[:, None, None], axis=1)[:, 0]
        count = jnp.sum(path != NO_NODE, axis=1, dtype=jnp.int32) - 1
        return Acceptance(path=jnp.maximum(path, 0), count=count)

# SPDX-License-Identifier: Apache-2.0
"""Steps whose accepted lengths are given: what drafts would be worth if so many were right.

Knows steps. All work is done as in a real one; of its tree a path of the given length is taken,
whatever the model thinks of it. The tokens mean nothing, so nothing but measurements runs this.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from tsjax.base.typing import Array, Int
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.state import Acceptance, DecodeState, Verdict
from tsjax.decoding.step import decode_step, repeated
from tsjax.decoding.tree import DraftTree
from tsjax.model.params import Params


def simulate(
    params: Params,
    state: DecodeState,
    lengths: Int[Array, "N"],
    num_steps: Int[Array, ""] | int,
    *,
    cfg: DecodeConfig,
) -> DecodeState:
    """As `decode`; step i of a row accepts lengths[i] drafts, or as many as lie on one path.

    `lengths` begin again after the last one.
    """

    def decide(state: DecodeState, tree: DraftTree, verdict: Verdict):
        acceptance = reach(tree, lengths[state.stats.steps % lengths.shape[0]])
        return as_drafted(tree, verdict, acceptance), acceptance

    step = functools.partial(decode_step, decide=decide)
    return repeated(step, params, state, num_steps, cfg=cfg)


def reach(tree: DraftTree, lengths: Int[Array, "B"]) -> Acceptance:
    """The path to the first node that is `lengths` [B] deep, or as deep as the tree goes."""
    depths = tree.depths
    deepest = jnp.argmax(jnp.where(depths <= lengths[:, None], depths, -1), axis=1)
    path = jnp.take_along_axis(tree.path, deepest[:, None, None], axis=1)[:, 0]
    count = jnp.take_along_axis(depths, deepest[:, None], axis=1)[:, 0]
    return Acceptance(path=jnp.maximum(path, 0), count=count)


def as_drafted(tree: DraftTree, verdict: Verdict, acceptance: Acceptance) -> Verdict:
    """The verdict of a model that would have chosen the accepted path."""
    T, path = tree.tokens.shape[1], acceptance.path
    b = jnp.arange(path.shape[0])[:, None]
    before, after = path[:, :-1], path[:, 1:]
    accepted = jnp.arange(before.shape[1]) < acceptance.count[:, None]
    nodes = jnp.where(accepted, before, T)  # out of bounds: dropped
    target = verdict.target.at[b, nodes].set(tree.tokens[b, after], mode="drop")
    return verdict.replace(target=target)

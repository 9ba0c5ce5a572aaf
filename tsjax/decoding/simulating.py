# SPDX-License-Identifier: Apache-2.0
"""Steps whose accepted lengths are given: what drafts would be worth if so many were right.

Knows steps. All work is done as in a real one; of its tree a path of the given length is taken,
whatever the model thinks of it. The tokens mean nothing, so nothing but measurements runs this.
"""

from __future__ import annotations

import jax.numpy as jnp

from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.sampling import step_noise
from tsjax.decoding.state import Acceptance, DecodeState, Verdict
from tsjax.decoding.step import check_tree, commit, repeated
from tsjax.decoding.tree import DraftTree
from tsjax.decoding.verification import verify_tree
from tsjax.model.params import Params


def simulate(
    params: Params, state: DecodeState, lengths, num_steps, *, cfg: DecodeConfig
) -> DecodeState:
    """As `decode`; step i of a row accepts lengths[i] drafts, or as many as lie on one path.

    `lengths` [N] int32 begin again after the last one.
    """

    def step(state: DecodeState) -> DecodeState:
        return _simulated_step(params, state, lengths, cfg=cfg)

    return repeated(step, params, state, num_steps, cfg=cfg)


def _simulated_step(params: Params, state: DecodeState, lengths, *, cfg: DecodeConfig):
    method, model = cfg.method, cfg.model
    noise = step_noise(
        state.row_key, state.length, cfg.sizes.levels, model.vocab_size, state.sampling
    )
    memory, tree = method.draft(model, params, state, noise)
    check_tree(tree, cfg)
    verdict = verify_tree(params, state, tree, noise, cfg=cfg)
    acceptance = reach(tree, lengths[state.stats.steps % lengths.shape[0]])
    verdict = as_drafted(tree, verdict, acceptance)
    after = commit(state, tree, verdict, acceptance)
    return after.replace(memory=method.learn(model, params, memory, after, verdict, acceptance))


def reach(tree: DraftTree, lengths) -> Acceptance:
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

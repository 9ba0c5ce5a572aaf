# SPDX-License-Identifier: Apache-2.0
"""TokenSwift's own acceptance rule, to tell what it inflates; nothing but benchmarks runs it.

The published program draws a token of its own for every row of the tree, a path to a leaf, at every
depth, and keeps the row that agrees the longest. Rows that share a node thus have several tries at
it, which favours what was drafted: the text is not one of the model's. Which row is kept among
equals is left to the first here, and to chance there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.sampling import step_noise
from tsjax.decoding.state import Acceptance, DecodeState, Verdict
from tsjax.decoding.step import check_tree, commit, repeated
from tsjax.decoding.tree import NO_NODE, DraftTree
from tsjax.decoding.verification import pass_over, score_nodes
from tsjax.model.params import Params


def decode_as_published(
    params: Params, state: DecodeState, num_steps, *, cfg: DecodeConfig
) -> DecodeState:
    """As `decode`, with steps that accept by the published rule."""
    return repeated(published_step, params, state, num_steps, cfg=cfg)


def published_step(params: Params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
    method, model = cfg.method, cfg.model
    noise = step_noise(
        state.row_key, state.length, cfg.sizes.levels, model.vocab_size, state.sampling
    )
    memory, tree = method.draft(model, params, state, noise)
    check_tree(tree, cfg)
    rows = pass_over(params, state, tree, cfg=cfg)
    laws = score_nodes(params.model, state, tree, rows, jnp.zeros_like(noise), cfg=cfg).scores
    keys = jax.vmap(jax.random.fold_in)(state.row_key, state.length)
    drawn, acceptance = longest_agreement(tree, draws(keys, tree, laws))
    verdict = Verdict(target=drawn, rows=rows)
    after = commit(state, tree, verdict, acceptance)
    return after.replace(memory=method.learn(model, params, memory, after, verdict, acceptance))


def draws(keys, tree: DraftTree, laws) -> jax.Array:
    """A token for each depth of the path to each node, [B, T, J + 1], all independent.

    `laws` [B, T, V] are the logits of each node's successor.
    """
    nodes = jnp.maximum(tree.path, 0)

    def of_row(key, nodes, laws):
        def of_depth(key, nodes):
            return jax.random.categorical(key, laws[nodes], axis=-1)

        depths = nodes.shape[1]
        return jax.vmap(of_depth, in_axes=(0, 1), out_axes=1)(jax.random.split(key, depths), nodes)

    return jax.vmap(of_row)(keys, nodes, laws).astype(jnp.int32)


def longest_agreement(tree: DraftTree, drawn) -> tuple[jax.Array, Acceptance]:
    """The row that agrees with its own draws the longest, and its draws as the nodes' targets."""
    path = tree.path
    B, T, steps = path.shape
    b = jnp.arange(B)
    nodes = jnp.maximum(path, 0)
    drafted = jnp.take_along_axis(tree.tokens, nodes.reshape(B, -1), axis=1).reshape(B, T, steps)
    right = (path[:, :, 1:] != NO_NODE) & (drafted[:, :, 1:] == drawn[:, :, :-1])
    agreed = jnp.sum(jnp.cumprod(right, axis=2), axis=2, dtype=jnp.int32)  # [B, T]
    # A row is the path to a leaf. Padding has itself as its root and says nothing.
    is_parent = jnp.any(tree.parents[:, :, None] == jnp.arange(T), axis=1)
    agreed = jnp.where((path[:, :, 0] == 0) & ~is_parent, agreed, -1)
    row = jnp.argmax(agreed, axis=1)
    count = agreed[b, row]
    along = nodes[b, row]
    said = drawn[b, row]
    slots = jnp.where(jnp.arange(steps) <= count[:, None], along, T)  # out of bounds: dropped
    target = jnp.zeros((B, T), jnp.int32).at[b[:, None], slots].set(said, mode="drop")
    return target, Acceptance(path=along, count=count)

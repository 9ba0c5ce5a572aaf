# SPDX-License-Identifier: Apache-2.0
"""Judging a draft tree: one pass of the full model, one decision per node, one walk.

Knows the model and the full cache. Does not know where the drafts came from, and does not need
to: what is accepted is what plain decoding would have chosen.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.typing import Array, Float
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.logprobs import log_probs_of
from tsjax.decoding.processors import NEVER_SEEN
from tsjax.decoding.sampling import best_with_score, distribution, step_noise, with_noise
from tsjax.decoding.state import Acceptance, DecodeState, Verdict
from tsjax.decoding.tree import NO_NODE, DraftTree
from tsjax.model.control_flow import run_one_of
from tsjax.model.params import Params
from tsjax.model.passes import Rows, run_rows
from tsjax.model.transformer import final_norm, unembed

OF_LAYERS = ("k", "v", "query", "attended")  # the fields of Rows with an entry for each layer


def verify_tree(
    params: Params, state: DecodeState, tree: DraftTree, noise, *, cfg: DecodeConfig
) -> Verdict:
    """Runs all nodes on the full cache and decides each node's successor.

    `noise` [B, n, V] is that of the first n positions from state.length on; drafts are chosen with
    the same noise as tokens, only then do they meet. Where the method has several pass widths, the
    narrowest that holds the trees of all batch rows is decided; what lies beyond it is unspecified.
    """
    with jax.named_scope("verify"):
        if cfg.leaves_out_rows:
            return _one_pass(params, state, tree, noise, cfg=cfg)
        return _pass_of_a_width(params, state, tree, noise, cfg=cfg)


def _one_pass(
    params: Params, state: DecodeState, tree: DraftTree, noise, *, cfg: DecodeConfig
) -> Verdict:
    """The layers are there once, and leave out what no draft fills; what follows them, which is
    small, is there for each width."""
    live = jnp.where(state.running, tree.reach, 0)
    alone = state.kv.length.shape == (1,) and tree.tokens.shape == (1, 1)
    rows = pass_over(params, state, tree, cfg=cfg, live=None if alone else live)

    def decided(width: int, tree, hidden, noise, length, row_key):
        begun = state.replace(kv=state.kv.replace(length=length), row_key=row_key)
        some = Rows(hidden[:, :width], (), (), ())
        verdict = judge(params.model, begun, tree.narrowed(width), some, noise, cfg)
        return verdict.replace(rows=None)

    inputs = tree, rows.hidden, noise, state.kv.length, state.row_key
    return _of_width(decided, tree, live, inputs, cfg=cfg).replace(rows=rows)


def _pass_of_a_width(
    params: Params, state: DecodeState, tree: DraftTree, noise, *, cfg: DecodeConfig
) -> Verdict:
    """For each width a pass of its own."""
    several = len(cfg.sizes.pass_widths) > 1

    def run(width: int, tree, noise, length, row_key):
        begun = state.replace(kv=state.kv.replace(length=length), row_key=row_key)
        tree = tree.narrowed(width)
        rows = pass_over(params, begun, tree, cfg=cfg)
        verdict = judge(params.model, begun, tree, rows, noise, cfg)
        return verdict.replace(rows=_together(verdict.rows)) if several else verdict

    live = jnp.where(state.running, tree.reach, 0)
    inputs = tree, noise, state.kv.length, state.row_key  # what a pass begins with
    verdict = _of_width(run, tree, live, inputs, cfg=cfg)
    if not several:
        return verdict
    return verdict.replace(rows=_apart(verdict.rows, cfg.model.num_layers))


def _of_width(run, tree: DraftTree, live, inputs, *, cfg: DecodeConfig):
    """What `run` gives for the narrowest width that holds all trees, as long as for the widest."""
    widths = (*cfg.sizes.pass_widths[:-1], tree.tokens.shape[1])
    if len(widths) == 1:
        return run(widths[0], *inputs)

    def padded(width: int, *inputs):
        return jax.tree.map(lambda x: _padded(x, widths[-1]), run(width, *inputs))

    narrowest = jnp.sum(jnp.max(live) > jnp.asarray(widths[:-1]))
    branches = [functools.partial(padded, width) for width in widths]
    return run_one_of(narrowest, branches, *inputs)  # no cache comes out: none is copied


def _together(rows: Rows) -> Rows:
    """`rows` with one array [B, T, layers, ...] in place of one for each layer.

    A branch then hands on a few arrays instead of a few for each layer, which a CPU takes long for.
    """

    def joined(of_layers):
        if not of_layers:
            return of_layers
        return jax.tree.map(lambda *arrays: jnp.stack(arrays, axis=2), *of_layers)

    return rows._replace(**{name: joined(getattr(rows, name)) for name in OF_LAYERS})


def _apart(rows: Rows, layers: int) -> Rows:
    """What `_together` was given."""

    def split(joined):
        if isinstance(joined, tuple) and not joined:
            return joined
        return tuple(
            jax.tree.map(operator.itemgetter(np.s_[:, :, i]), joined) for i in range(layers)
        )

    return rows._replace(**{name: split(getattr(rows, name)) for name in OF_LAYERS})


def _padded(x, width: int):
    """x [B, T, ...] with axis 1 extended to `width`."""
    missing = ((0, 0), (0, width - x.shape[1])) + ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x, missing)


def pass_over(
    params: Params, state: DecodeState, tree: DraftTree, *, cfg: DecodeConfig, live=None
) -> Rows:
    """`live` [B]: how many nodes of each row are wanted, the first ones; None is all."""
    positions = state.kv.length[:, None] + tree.depths
    return run_rows(
        params.model,
        state.kv,
        tree.tokens,
        positions,
        tree.mask,
        cfg=cfg.model,
        live=live,
        with_attended=cfg.sizes.with_attended,
        taps=cfg.model.drafter.taps if cfg.sizes.with_taps and cfg.model.drafter else (),
    )


def judge(
    weights, state: DecodeState, tree: DraftTree, rows: Rows, noise, cfg: DecodeConfig
) -> Verdict:
    """What the pass that gave `rows` decides of each node."""
    found, told = score_nodes(weights, state, tree, rows, noise, cfg=cfg), state.sampling.logprobs
    score, target = best_with_score(found.scores)
    verdict = Verdict(target=target, rows=rows, broken=~(score < jnp.inf))
    if told is None:
        return verdict
    logprobs = log_probs_of(found.logits, found.processed, target, told)
    return verdict.replace(logprobs=logprobs)


class NodeScores(NamedTuple):
    """[B, T, V] of each node's successor: the model's logits, those of the distribution it is drawn
    from, and that with the noise, whose best is the successor."""

    logits: Float[Array, "B T V"]
    processed: Float[Array, "B T V"]
    scores: Float[Array, "B T V"]


def score_nodes(
    weights, state: DecodeState, tree: DraftTree, rows: Rows, noise, *, cfg: DecodeConfig
) -> NodeScores:
    """What each node's successor is chosen by, from the pass that gave `rows`."""
    logits = unembed(weights, final_norm(weights, rows.hidden, cfg=cfg.model), cfg=cfg.model)
    known = noise.shape[1]
    missing = tree.path.shape[2] - known
    if missing > 0:
        first, size = state.length + known, cfg.model.vocab_size
        deeper = step_noise(state.row_key, first, missing, size, state.sampling)
        noise = jnp.concatenate([noise, deeper], axis=1)
    ancestors = drafted_ancestors(tree, state.length) if state.sampling.reads_text else None
    with jax.named_scope("sampling"):
        processed = distribution(logits, state.text, tree.depths, state.sampling, ancestors)
        scores = with_noise(processed, tree.depths, noise, state.sampling)
        return NodeScores(logits, processed, scores)


def drafted_ancestors(tree: DraftTree, length):
    """The drafted tokens that come before each node's successor, for `sampling.process`.

    They are the node itself and its ancestors after the root, which is part of the known text.
    """
    if tree.path.shape[2] == 1:
        return None
    path = tree.path[:, :, 1:]
    B, T, J = path.shape
    tokens = jnp.take_along_axis(tree.tokens, jnp.maximum(path, 0).reshape(B, T * J), axis=1)
    positions = length[:, None, None] + jnp.arange(J, dtype=jnp.int32)
    return tokens.reshape(B, T, J), jnp.where(path == NO_NODE, NEVER_SEEN, positions)


def accept(tree: DraftTree, target) -> Acceptance:
    """The walk from the root: on to the child that is the node's target, until there is none.

    `target` [B, T] is what follows each node.

    Siblings differ and every node has one target, so the nodes whose whole path was chosen lie on
    one path.
    """
    with jax.named_scope("accept"):
        T = tree.tokens.shape[1]
        parents, depths = tree.parents, tree.depths
        wanted = jnp.take_along_axis(target, jnp.maximum(parents, 0), axis=1)
        chosen = (parents != NO_NODE) & (tree.tokens == wanted)
        chosen = chosen | (jnp.arange(T) == 0)
        walked = jnp.all(chosen[:, None, :] | ~tree.mask, axis=2)  # [B, T]
        deepest = jnp.argmax(jnp.where(walked, depths, NO_NODE), axis=1)
        path = jnp.take_along_axis(tree.path, deepest[:, None, None], axis=1)[:, 0]
        count = jnp.sum(path != NO_NODE, axis=1, dtype=jnp.int32) - 1
        return Acceptance(path=jnp.maximum(path, 0), count=count)

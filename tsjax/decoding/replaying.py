# SPDX-License-Identifier: Apache-2.0
"""Plain decoding along a text that is given: what it would have chosen at each place.

Knows steps. Does not know where the text comes from.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import lax

from tsjax.base.typing import Array, Float, Int
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.sampling import best_few, step_noise
from tsjax.decoding.state import LENGTH, RUNNING, DecodeState, Verdict
from tsjax.decoding.step import commit
from tsjax.decoding.verification import accept, pass_over, score_nodes
from tsjax.model.params import Params


class Replay(flax.struct.PyTreeNode):
    """Plain decoding's opinion of tokens that are given; unspecified where nothing was replayed.

    Attributes:
      choice: [B, C] int32, what it chooses at each position after the given tokens before it.
      lead: [B, C], by how much the score of its choice is above the next best.
      behind: [B, C], by how much the score of the given token is below it.
    """

    choice: Int[Array, "B C"]
    lead: Float[Array, "B C"]
    behind: Float[Array, "B C"]


def init_replay(state: DecodeState) -> Replay:
    shape, dtype = state.tokens.shape, state.sampling.temperature.dtype
    return Replay(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def replay(
    params: Params, state: DecodeState, given, found: Replay, num_steps, *, cfg: DecodeConfig
) -> tuple[DecodeState, Replay]:
    """At most `num_steps` steps of plain decoding that go on with `given` [B, C], right or wrong.

    A row ends at its max_length and nowhere else; a stop token does not end it.
    """

    def unfinished(carry):
        step, state, _ = carry
        return (step < num_steps) & jnp.any(state.running)

    def body(carry):
        step, state, found = carry
        return step + 1, *_replay_step(params, state, given, found, cfg=cfg)

    _, state, found = lax.while_loop(
        unfinished, body, (jnp.zeros((), jnp.int32), _until_full(state), found)
    )
    return state, found


def _replay_step(params: Params, state: DecodeState, given, found: Replay, *, cfg: DecodeConfig):
    noise = step_noise(state.row_key, state.length, 0, cfg.model.vocab_size, state.sampling)
    _, root = cfg.method.draft(cfg.model, params, state, noise)
    if cfg.prefill is None:
        rows = pass_over(params, state, root, cfg=cfg)
    else:
        state, rows = cfg.prefill.run_root(params, state, cfg=cfg)
    scores = score_nodes(params.model, state, root, rows, noise, cfg=cfg).scores
    at = state.length[:, None]
    target = jnp.take_along_axis(given, at, axis=1)
    (first, second), (choice, _) = (jnp.moveaxis(x[:, 0], 1, 0) for x in best_few(scores, 2))
    its_own = jnp.take_along_axis(scores[:, 0], target, axis=1)[:, 0]
    b, slots = jnp.arange(target.shape[0]), jnp.where(state.running, at[:, 0], given.shape[1])
    found = Replay(
        choice=found.choice.at[b, slots].set(choice, mode="drop"),
        lead=found.lead.at[b, slots].set(first - second, mode="drop"),
        behind=found.behind.at[b, slots].set(first - its_own, mode="drop"),
    )
    verdict = Verdict(target=target, rows=rows)
    after = commit(state, root, verdict, accept(root, verdict.target))
    if cfg.prefill is not None:
        after = cfg.prefill.noted(state, after, cfg=cfg)
    return _until_full(after), found


def _until_full(state: DecodeState) -> DecodeState:
    full = state.length >= state.max_length
    return state.replace(finish=jnp.where(full, jnp.int8(LENGTH), jnp.int8(RUNNING)))

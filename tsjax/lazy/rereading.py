# SPDX-License-Identifier: Apache-2.0
"""Reading what a run had made before it was saved, so that each token sees what it saw then.

That follows from the prompt and from the tokens before it, as revivals do. Knows revivals. Chooses
no token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsjax.decoding.state import RUNNING, STOPPED, DecodeState
from tsjax.lazy.revival import lacking_tokens, revive_where_due, run_root, tokens_until_choice
from tsjax.lazy.stages import note_committed
from tsjax.lazy.state import LazyPlan
from tsjax.model.cache import write_rows
from tsjax.model.control_flow import run_if
from tsjax.model.params import Params
from tsjax.model.passes import Rows, run_rows


def reread_made(
    plan: LazyPlan, params: Params, state: DecodeState, start, width: int
) -> DecodeState:
    """Commits `width` tokens of each row that has them, from the start-th (traced) that was made.

    The prompt's last token counts as the first, as no stage has read it; a row's last known token
    is left to its next step. Until all are read `kv.length` names the goal, and what is still to
    come is absent in all layers. Tokens are read in passes that end where the next choice is due,
    as what a token sees changes there alone: one by one on demand, all in one pass where nothing
    comes back.
    """
    goal = state.kv.length

    def one_by_one(state: DecodeState, count) -> DecodeState:
        def step(_, state: DecodeState) -> DecodeState:
            state, rows = run_root(plan, params, state)
            return _committed(plan, state, rows, state.kv.length + 1, goal)

        return lax.fori_loop(jnp.int32(0), count, step, state)

    def in_one_pass(state: DecodeState, width: int, end) -> DecodeState:
        positions = state.kv.length[:, None] + jnp.arange(width, dtype=jnp.int32)
        tokens = jnp.take_along_axis(state.tokens, positions, axis=1)
        causal = jnp.tril(jnp.ones((width, width), bool))
        rows = run_rows(params.model, state.kv, tokens, positions, causal, cfg=plan.model)
        return _committed(plan, state, rows, end, goal)

    def from_choice_to_choice(state: DecodeState, end) -> DecodeState:
        most = min(plan.lazy.tokens_between_choices, width)

        def some_left(state: DecodeState):
            return jnp.any(state.kv.length < end)

        def body(state: DecodeState) -> DecodeState:
            state = revive_where_due(plan, params, state)
            few = jnp.minimum(tokens_until_choice(plan, state), most)
            return in_one_pass(state, most, jnp.minimum(state.kv.length + few, end))

        return lax.while_loop(some_left, body, state)

    with jax.named_scope("read_made"):
        begun = _at(state, jnp.minimum(state.prompt_length - 1 + start, goal), goal)
        end = jnp.minimum(begun.kv.length + width, goal)
        if plan.lazy.revive == "never":
            read = in_one_pass(begun, width, end)
        elif plan.lazy.revive == "on_demand":
            read = one_by_one(begun, jnp.max(end - begun.kv.length))
        else:
            reviving = jnp.any(lacking_tokens(plan, begun) & begun.running[:, None])
            read = from_choice_to_choice(begun, jnp.where(reviving, end, begun.kv.length))
            read = run_if(~reviving, lambda state: in_one_pass(state, width, end), read)
        return _at(read, goal, goal).replace(finish=state.finish)


def _committed(plan: LazyPlan, state: DecodeState, rows: Rows, length, goal) -> DecodeState:
    """With the tokens of a pass up to `length`, at most the goal; what lies beyond counts not."""
    width, length = rows.hidden.shape[1], jnp.minimum(length, goal)
    prompt = note_committed(plan, state, width - 1, after=rows.hidden)
    kv = write_rows(state.kv, rows.k, rows.v, state.kv.length, after=rows.hidden)
    return state.replace(kv=kv.replace(length=length), prompt=prompt, finish=_finish(length, goal))


def _at(state: DecodeState, length, goal) -> DecodeState:
    """With the same rows in each layer, but other lengths; what has reached the goal stops."""
    assert state.kv.absent is not None
    absent = state.kv.absent + (length - state.kv.length)
    kv = state.kv.replace(length=length, absent=absent)
    return state.replace(kv=kv, finish=_finish(length, goal))


def _finish(length, goal):
    return jnp.where(length < goal, jnp.int8(RUNNING), jnp.int8(STOPPED))

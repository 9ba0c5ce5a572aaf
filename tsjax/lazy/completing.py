# SPDX-License-Identifier: Apache-2.0
"""A pruned prompt becomes a whole one: what its layers lack is computed, and rows are put in order.

Knows stages and their places. Does not know when that is worth its time.
"""

from __future__ import annotations

import jax.numpy as jnp

from tsjax.decoding.state import DecodeState
from tsjax.lazy.revival import lacking_tokens
from tsjax.lazy.stages import compute, take_part
from tsjax.lazy.state import LazyPlan
from tsjax.model.params import Params


def complete_some(plan: LazyPlan, params: Params, state: DecodeState, width: int) -> DecodeState:
    """Computes the first `width` tokens of each prompt that some stage lacks, in all that do.

    As in the background: each sees those before it that the stage has. Every stage has room for
    `width` more rows.
    """
    lacking = lacking_tokens(plan, state)
    first = lacking & (jnp.cumsum(lacking, axis=1, dtype=jnp.int32) <= width)
    for stage in range(1, len(plan.stages)):
        everything = jnp.ones_like(first)
        prompt = take_part(state.prompt, stage, everything, state.prompt_length)
        wanted = first & (prompt.done == stage)
        state = compute(
            plan, params.model, state.replace(prompt=prompt), wanted, stage, width, in_order=False
        )
    return state


def slots_by_position(plan: LazyPlan, state: DecodeState) -> tuple:
    """For each stage but the first [B, C], where the token of each position is in its layers. Of
    positions that the stage lacks, or the text, some slot."""
    found = []
    for stage in range(1, len(plan.stages)):
        everything = jnp.ones_like(state.prompt.chosen[stage])
        prompt = take_part(state.prompt, stage, everything, state.prompt_length)
        order = prompt.order[stage - 1]
        B, C = order.shape
        slot = jnp.broadcast_to(jnp.arange(C, dtype=jnp.int32), (B, C))
        rows = state.kv.rows_in(plan.stages[stage].start)
        target = jnp.where(slot < rows[:, None], order, C)  # out of bounds: dropped
        found.append(slot.at[jnp.arange(B)[:, None], target].set(slot, mode="drop"))
    return tuple(found)

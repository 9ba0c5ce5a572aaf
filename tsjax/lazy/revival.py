# SPDX-License-Identifier: Apache-2.0
"""Bringing prompt tokens back that a cut left out: on demand of a new token, or in the background.

Knows stages and what they lack. Does not know what a step does with a pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsjax.decoding.state import DecodeState
from tsjax.lazy.choice import chosen_for, scores_of
from tsjax.lazy.stages import committed, compute, ranks_below, take_part, waiting
from tsjax.lazy.state import UNSEEN, Plan
from tsjax.model.control_flow import run_if
from tsjax.model.params import Params
from tsjax.model.passes import Rows, run_layers, run_rows
from tsjax.model.transformer import ModelWeights, embed

FEW_ROWS = 8  # revived at once when they are fewer than revive_rows


def choice_is_due(plan: Plan, state: DecodeState):
    """[B] bool: whether the root is a token at which the prompt's tokens are chosen again."""
    made = _made(state)
    return (made > 0) & (made % plan.lazy.choose_every == 0) & state.running


def tokens_until_choice(plan: Plan, state: DecodeState):
    """[B] int32: how many tokens a step may find; where tokens come back, up to the next choice."""
    until = plan.lazy.choose_every - _made(state) % plan.lazy.choose_every
    return jnp.where(jnp.any(lacking_tokens(plan, state), axis=1), until, state.tokens.shape[1])


def lacking_tokens(plan: Plan, state: DecodeState):
    """[B, P] bool: committed prompt tokens that some stage lacks."""
    return (state.prompt.done < len(plan.stages)) & committed(state)


def is_reviving(plan: Plan, state: DecodeState) -> bool:
    """Whether a row that still runs lacks tokens that come back in the background."""
    if plan.lazy.revive != "background":
        return False
    return bool(jnp.any(lacking_tokens(plan, state) & state.running[:, None]))


def _made(state: DecodeState):
    return state.length - state.prompt_length


def revive_in_background(plan: Plan, params: Params, state: DecodeState) -> DecodeState:
    """Where it is due, brings the first `revive_rows` tokens that lack stages through all."""
    lazy, due = plan.lazy, choice_is_due(plan, state)
    layers = range(plan.stages[1].start, plan.model.num_layers)

    def revive(changing, due):
        begun = _with(state, changing, layers)
        lacking = lacking_tokens(plan, begun) & due[:, None]
        first = lacking & (jnp.cumsum(lacking, axis=1, dtype=jnp.int32) <= lazy.revive_rows)
        for stage in range(1, len(plan.stages)):
            wanted = first & (begun.prompt.done == stage)
            begun = compute(
                plan, params.model, begun, wanted, stage, lazy.revive_rows, in_order=False
            )
        return _changing(begun, layers)

    with jax.named_scope("revive_in_background"):
        lacking = jnp.any(lacking_tokens(plan, state) & due[:, None])
        changed = run_if(lacking, revive, _changing(state, layers), due)
        return _with(state, changed, layers)


def run_root(plan: Plan, params: Params, state: DecodeState) -> tuple[DecodeState, Rows]:
    """The pass of a step of plain decoding, and the state with what is revived before it."""
    root, positions = state.root[:, None], state.kv.length[:, None]
    if plan.lazy.revive == "on_demand":
        return run_choosing(plan, params.model, state, root, positions)
    if plan.lazy.revive == "background":
        state = revive_in_background(plan, params, state)
    itself = jnp.ones((1, 1), bool)
    return state, run_rows(params.model, state.kv, root, positions, itself, cfg=plan.model)


def run_choosing(
    plan: Plan, weights: ModelWeights, state: DecodeState, tokens, positions
) -> tuple[DecodeState, Rows]:
    """One pass of the root, which chooses what it sees of the prompt and revives what is missing.

    tokens, positions: [B, 1] int32.
    """
    due, itself = choice_is_due(plan, state), jnp.ones((1, 1), bool)
    hidden, parts = embed(weights, tokens), []
    for stage, layers in enumerate(plan.stages):
        if stage:
            state = _choose_and_revive(plan, weights, state, stage, parts[-1], due)
        seen = ranks_below(state.prompt, stage, jnp.full_like(tokens, UNSEEN))
        rows = run_layers(
            weights, state.kv, hidden, positions, itself, layers, cfg=plan.model, ranks=seen,
            with_attended=True,
        )  # fmt: skip
        hidden = rows.hidden
        parts.append(rows)
    joined = [sum((getattr(part, name) for part in parts), ()) for name in ("k", "v", "query")]
    return state, Rows(hidden, *joined, attended=sum((part.attended for part in parts), ()))


def _choose_and_revive(
    plan: Plan, weights: ModelWeights, state: DecodeState, stage: int, rows: Rows, due
) -> DecodeState:
    """Chooses a stage's prompt tokens by the rows of the stage before; computes the missing."""
    lazy, layers = plan.lazy, plan.stages[stage]
    few = min(FEW_ROWS, lazy.revive_rows)

    def missing(begun):
        return waiting(begun, stage) & committed(begun) & due[:, None]

    def revive(begun, width: int, at_least: int):
        """Computes missing tokens, `width` at a time, while some row lacks `at_least`."""

        def some_left(changing):
            left = jnp.sum(missing(_with(begun, changing, layers)), axis=1, dtype=jnp.int32)
            return jnp.max(left) >= at_least

        def body(changing):
            inner = _with(begun, changing, layers)
            wanted = missing(inner)
            inner = compute(plan, weights, inner, wanted, stage, width, in_order=False)
            return _changing(inner, layers)

        return _with(begun, lax.while_loop(some_left, body, _changing(begun, layers)), layers)

    def choose(changing, attended):
        begun = _with(state, changing, layers)
        prompt, n = begun.prompt, begun.prompt_length
        attending = rows._replace(attended=attended)
        scores = scores_of(plan, prompt, begun.kv, stage - 1, attending)
        chosen = chosen_for(plan, prompt, stage, scores, n, n, lazy.recent)
        chosen = jnp.where(due[:, None], chosen, prompt.chosen[stage])
        begun = begun.replace(prompt=take_part(prompt, stage, chosen, n))
        # Results do not depend on how many are computed at once, as each sees lower ones only.
        if few < lazy.revive_rows:
            begun = revive(begun, lazy.revive_rows, few + 1)
        begun = revive(begun, few, 1)
        return _changing(begun, layers)

    carry = _changing(state, layers)
    return _with(state, run_if(jnp.any(due), choose, carry, rows.attended), layers)


def _changing(state: DecodeState, layers: range):
    """What a revival in `layers` changes, to carry through a loop and nothing else."""
    k, v = (tuple(buffers[layer] for layer in layers) for buffers in (state.kv.k, state.kv.v))
    return k, v, state.kv.absent, state.prompt


def _with(state: DecodeState, changing, layers: range) -> DecodeState:
    k, v, absent, prompt = changing
    before, after = slice(layers.start), slice(layers.stop, None)
    kv = state.kv
    kv = kv.replace(
        k=kv.k[before] + k + kv.k[after], v=kv.v[before] + v + kv.v[after], absent=absent
    )
    return state.replace(kv=kv, prompt=prompt)

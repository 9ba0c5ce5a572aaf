# SPDX-License-Identifier: Apache-2.0
"""Bringing prompt tokens back that a cut left out: those that a new token asks for, or all in turn.

Knows stages and what they lack. Does not know what a step does with a pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsjax.decoding.state import DecodeState
from tsjax.lazy.choice import best_tokens, chosen_for, scores_of
from tsjax.lazy.stages import committed, compute, ranks_below, take_part, waiting
from tsjax.lazy.state import UNSEEN, LazyPlan
from tsjax.model.control_flow import run_at_most, run_if
from tsjax.model.params import Params
from tsjax.model.passes import Rows, run_layers, run_rows
from tsjax.model.transformer import ModelWeights, embed

FEW_ROWS = 16  # revived at once on demand, when they are fewer than revive_rows
PASS_ROWS = 128  # computed at once, at most, of those that come back with a choice


def choice_is_due(plan: LazyPlan, state: DecodeState):
    """[B] bool: whether the prompt's tokens are chosen again at the root: at the first new token,
    and then every so many."""
    made = _made(state)
    return (made > 0) & ((made - 1) % plan.lazy.tokens_between_choices == 0) & state.running


def tokens_until_choice(plan: LazyPlan, state: DecodeState):
    """[B] int32: how many tokens a step may find; where tokens come back, up to the next choice."""
    every = plan.lazy.tokens_between_choices
    until = every - (_made(state) - 1) % every
    return jnp.where(jnp.any(lacking_tokens(plan, state), axis=1), until, state.tokens.shape[1])


def lacking_tokens(plan: LazyPlan, state: DecodeState):
    """[B, P] bool: committed prompt tokens that some stage lacks."""
    return (state.prompt.done < len(plan.stages)) & committed(state)


def something_comes_back(plan: LazyPlan, state: DecodeState):
    """Whether `revive_where_due` has anything to do: a choice is due in a row that lacks tokens."""
    return jnp.any(lacking_tokens(plan, state) & choice_is_due(plan, state)[:, None])


def _made(state: DecodeState):
    return state.length - state.prompt_length


def revive_where_due(plan: LazyPlan, params: Params, state: DecodeState) -> DecodeState:
    """What comes back before a step where new tokens see all that there is.

    "in_batches" the root makes all cuts again, and a stage gets those of the tokens it lacks that
    the root attends to most; stage by stage, as the root sees what came back to a stage when it
    chooses for the next one. In the "background" the first `revive_rows` tokens that lack stages
    go through all.
    """
    lazy, weights = plan.lazy, params.model
    if lazy.revive not in ("in_batches", "background"):
        return state
    due, itself = choice_is_due(plan, state), jnp.ones((1, 1), bool)
    layers = range(plan.stages[1].start, plan.model.num_layers)

    def most_attended(begun, root, due):
        hidden = embed(weights, root[:, None])
        for stage in range(1, len(plan.stages)):
            rows = run_layers(
                weights, begun.kv, hidden, state.kv.length[:, None], itself,
                plan.stages[stage - 1], cfg=plan.model, with_attended=True,
            )  # fmt: skip
            hidden = rows.hidden
            begun = _bring_most_attended(plan, weights, begun, stage, rows, due)
        return begun

    def first_ones(begun, root, due):
        lacking = lacking_tokens(plan, begun) & due[:, None]
        first = lacking & (jnp.cumsum(lacking, axis=1, dtype=jnp.int32) <= lazy.revive_rows)
        for stage in range(1, len(plan.stages)):
            begun = _bring(plan, weights, begun, stage, first)
        return begun

    def revive(changing, root, due):
        bring = most_attended if lazy.revive == "in_batches" else first_ones
        return _changing(bring(_with(state, changing, layers), root, due), layers)

    with jax.named_scope("revive"):
        wanted = something_comes_back(plan, state)
        changed = run_if(wanted, revive, _changing(state, layers), state.root, due)
        return _with(state, changed, layers)


def _bring_most_attended(
    plan: LazyPlan, weights: ModelWeights, state: DecodeState, stage: int, rows: Rows, due
) -> DecodeState:
    """With up to `revive_rows` of the tokens that a stage would take by rows of the one before and
    lacks, those with the highest scores."""
    lazy, n = plan.lazy, state.prompt_length
    scores = scores_of(plan, state.prompt, state.kv, stage - 1, rows)
    among = state.prompt.done >= stage
    chosen, scores = chosen_for(plan, stage, scores, among, state, n, lazy.recent)
    lacking = chosen & (state.prompt.done == stage) & committed(state) & due[:, None]
    wanted = best_tokens(scores, lacking, jnp.full_like(n, lazy.revive_rows))
    return _bring(plan, weights, state, stage, wanted)


def _bring(
    plan: LazyPlan, weights: ModelWeights, state: DecodeState, stage: int, wanted
) -> DecodeState:
    """Computes in a stage what it lacks of `wanted` [B, P], at most `revive_rows` of each row, some
    at a time."""
    layers, most = plan.stages[stage], plan.lazy.revive_rows
    width = min(most, PASS_ROWS)

    def left(changing):
        begun = _with(state, changing, layers)
        return wanted & (begun.prompt.done == stage)

    def body(changing):
        begun = _with(state, changing, layers)
        begun = compute(plan, weights, begun, left(changing), stage, width, in_order=False)
        return _changing(begun, layers)

    carry = _changing(state, layers)
    changed = run_at_most(-(-most // width), lambda c: jnp.any(left(c)), body, carry)
    return _with(state, changed, layers)


def run_root(plan: LazyPlan, params: Params, state: DecodeState) -> tuple[DecodeState, Rows]:
    """The pass of a step of plain decoding, and the state with what is revived before it; on demand
    within it, as each stage chooses what the root sees of the prompt."""
    weights, positions = params.model, state.kv.length[:, None]
    root, itself = state.root[:, None], jnp.ones((1, 1), bool)
    if plan.lazy.revive != "on_demand":
        state = revive_where_due(plan, params, state)
        return state, run_rows(weights, state.kv, root, positions, itself, cfg=plan.model)
    due, hidden, parts = choice_is_due(plan, state), embed(weights, root), []
    for stage, layers in enumerate(plan.stages):
        if stage:
            state = _choose_and_revive(plan, weights, state, stage, parts[-1], due)
        seen = ranks_below(state.prompt, stage, jnp.full_like(root, UNSEEN))
        rows = run_layers(
            weights, state.kv, hidden, positions, itself, layers, cfg=plan.model, ranks=seen,
            with_attended=True,
        )  # fmt: skip
        hidden = rows.hidden
        parts.append(rows)
    joined = [sum((getattr(part, name) for part in parts), ()) for name in ("k", "v", "query")]
    return state, Rows(hidden, *joined, attended=sum((part.attended for part in parts), ()))


def _choose_and_revive(
    plan: LazyPlan, weights: ModelWeights, state: DecodeState, stage: int, rows: Rows, due
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
        among = prompt.chosen[stage - 1]
        chosen, _ = chosen_for(plan, stage, scores, among, begun, n, lazy.recent)
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

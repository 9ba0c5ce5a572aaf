# SPDX-License-Identifier: Apache-2.0
"""One stage, the layers between two cuts: which tokens it has, and how it gets more.

One rule holds everywhere: a stage's tokens are computed from their hidden states, in any number at
a time, and appended to the caches of its layers. A prefill does that in order, a revival out of
order. Knows passes and a prompt's state. Does not know steps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Ranks
from tsjax.decoding.state import DecodeState
from tsjax.lazy.choice import chosen_for, goes_on, scores_of, scores_of_each_other
from tsjax.lazy.state import UNSEEN, LazyPlan, PromptState
from tsjax.model.cache import KVCache, write_rows, zero_after
from tsjax.model.params import Params
from tsjax.model.passes import Rows, run_layers
from tsjax.model.transformer import ModelWeights, embed


def fill_stage(
    plan: LazyPlan, params: Params, state: DecodeState, stage: int, width: int
) -> DecodeState:
    """Computes the next `width` chosen prompt tokens of a stage, in order.

    All but the prompt's last ones (`window`): they come with `choose_stage`, as they say what the
    stages after this one take.
    """
    with jax.named_scope("fill_stage"):
        wanted = waiting(state, stage) & _before_window(plan, state, stage)
        return compute(plan, params.model, state, wanted, stage, width, in_order=True)


def choose_stage(plan: LazyPlan, params: Params, state: DecodeState, stage: int) -> DecodeState:
    """Runs the prompt's last tokens through a stage and chooses the tokens of the next one."""
    lazy = plan.lazy
    with jax.named_scope("choose_stage"):
        window = jnp.arange(lazy.last_tokens, dtype=jnp.int32)
        positions = state.prompt_length[:, None] - lazy.last_tokens + window
        hidden = state.prompt.last
        if stage == 0:
            tokens = jnp.take_along_axis(state.tokens, positions, axis=1)
            hidden = embed(params.model, tokens)
        causal = window[:, None] >= window
        rows = _run_stage(plan, params.model, state, hidden, positions, causal, stage, attends=True)
        scores = scores_of(plan, state.prompt, state.kv, stage, rows)
        if (lazy.pool > 1 or lazy.block_tokens > 1) and lazy.scores == "attention":
            # They stay anyway, but lend their scores to those around them.
            b = jnp.arange(scores.shape[0])[:, None]
            scores = scores.at[b, positions].add(scores_of_each_other(plan, rows, causal))
        if lazy.last_tokens > 1:
            # The last one is not committed yet, here and with every method.
            others = jnp.full_like(state.prompt_length, lazy.last_tokens - 1)
            after = rows.hidden.ravel()[:1] + scores.ravel()[:1].astype(rows.hidden.dtype)
            state = _append(plan, state, stage, rows, positions, others, after=after)
        prompt, n = state.prompt, state.prompt_length
        recent = max(lazy.recent, lazy.last_tokens)
        among = prompt.chosen[stage]
        chosen, _ = chosen_for(plan, stage + 1, scores, among, state, n - 1, recent)
        prompt = prompt.replace(chosen=replaced(prompt.chosen, stage + 1, chosen))
        return state.replace(prompt=prompt.replace(last=rows.hidden))


def tokens_to_fill(plan: LazyPlan, stage: int, new_tokens):
    """How many tokens, at most, `fill_stage` has to compute in a stage, where a prompt has so many
    after its prefix; of an int or of [B]."""
    lazy, xp = plan.lazy, jnp if isinstance(new_tokens, jax.Array) else np
    count = new_tokens
    if stage:
        always = xp.minimum(lazy.sinks + max(lazy.recent, lazy.last_tokens), count)
        count = xp.maximum(goes_on(lazy, stage, count), always)
    left = 1 if stage == plan.last_stage else lazy.last_tokens
    return xp.maximum(count - left, 0)


def note_committed(plan: LazyPlan, before: DecodeState, depth: int, *, after) -> PromptState:
    """The prompt's state with the positions of the rows that a step wrote after those `before` it.

    `after` is computed from all that was read, see `write_rows`.
    """
    prompt = before.prompt
    positions = before.kv.length[:, None] + jnp.arange(depth + 1, dtype=jnp.int32)
    of_prompt = positions < before.prompt_length[:, None]  # its last token, in the first step
    positions = positions + zero_after(after)
    for stage in range(1, len(plan.stages)):
        prompt = _noted(plan, prompt, before.kv, stage, positions, of_prompt)
    return prompt


def compute(
    plan: LazyPlan,
    weights: ModelWeights,
    state: DecodeState,
    wanted,
    stage: int,
    width: int,
    *,
    in_order: bool,
) -> DecodeState:
    """Computes the first `width` prompt tokens of `wanted` [B, P] in a stage.

    A token sees those before it that the stage has and that take part. `in_order`: these are all
    that it has.
    """
    prompt = state.prompt
    ids, count = _first(wanted, width)
    safe = jnp.minimum(ids, prompt.capacity - 1)
    if stage == 0:
        hidden = embed(weights, jnp.take_along_axis(state.tokens, safe, axis=1))
    else:
        hidden = jnp.take_along_axis(prompt.hidden, safe[..., None], axis=1)
    index = jnp.arange(width, dtype=jnp.int32)
    # Rows to spare see nothing, which costs least.
    below = jnp.where(index < count[:, None], ids, 0)
    if stage == 1 and plan.halved:
        slots = jnp.arange(prompt.order[0].shape[1], dtype=jnp.int32)
        all_before = Ranks(jnp.broadcast_to(slots, (ids.shape[0], len(slots))), below)
        hidden = run_layers(
            weights, state.kv, hidden, safe, jnp.eye(width, dtype=bool), plan.halved,
            cfg=plan.model, ranks=all_before,
        ).hidden  # fmt: skip
    ranks = None if in_order else ranks_below(state.prompt, stage, below)
    causal = index[:, None] >= index
    rows = _run_stage(plan, weights, state, hidden, safe, causal, stage, ranks=ranks)
    return _append(plan, state, stage, rows, ids, count, after=_goes_on_from(plan, stage, rows))


def _run_stage(
    plan: LazyPlan, weights: ModelWeights, state: DecodeState, hidden, positions, mask, stage: int,
    *, ranks: Ranks | None = None, attends: bool = False,
) -> Rows:  # fmt: skip
    """A pass through the layers of a stage."""
    taps = plan.halved if stage == 0 else ()  # a layer's number is how many come before it
    return run_layers(
        weights, state.kv, hidden, positions, mask, plan.stages[stage], cfg=plan.model,
        ranks=ranks, with_attended=attends, taps=taps,
    )  # fmt: skip


def _goes_on_from(plan: LazyPlan, stage: int, rows: Rows):
    """[B, T, D]: of a stage's rows what the next one begins with, see PromptState.hidden."""
    return rows.taps[0] if stage == 0 and plan.halved else rows.hidden


def _append(
    plan: LazyPlan, state: DecodeState, stage: int, rows: Rows, ids, count, *, after
) -> DecodeState:
    """Adds the first `count` [B] of rows for the prompt tokens `ids` [B, T] to a stage.

    `after` is computed from all that was read, see `write_rows`.
    """
    layers, prompt = plan.stages[stage], state.prompt
    kv = write_rows(state.kv, rows.k, rows.v, state.kv.length, after=after, layers=layers)
    assert kv.absent is not None
    b = jnp.arange(ids.shape[0])[:, None]
    is_new = jnp.arange(ids.shape[1]) < count[:, None]
    target = jnp.where(is_new, ids, prompt.capacity)  # out of bounds: dropped
    hidden = prompt.hidden
    if stage:
        # As the caches, it is written when all is read, or else XLA copies it.
        prompt = _noted(plan, prompt, state.kv, stage, ids + zero_after(after), is_new)
    if stage < plan.last_stage:
        hidden = hidden.at[b, target].set(_goes_on_from(plan, stage, rows), mode="drop")
    return state.replace(
        kv=kv.replace(absent=kv.absent.at[layers.start : layers.stop].add(-count)),
        prompt=prompt.replace(
            hidden=hidden,
            done=prompt.done.at[b, target].set(jnp.int8(stage + 1), mode="drop"),
            computed=prompt.computed.at[stage, b, target].add(jnp.int8(1), mode="drop"),
        ),
    )


def _noted(
    plan: LazyPlan, prompt: PromptState, kv: KVCache, stage: int, positions, of_prompt
) -> PromptState:
    """With tokens [B, T] after the rows that a stage has, some of them `of_prompt` [B, T].

    What stands beyond the rows is unspecified, so all T may be written.
    """
    b, index = jnp.arange(positions.shape[0])[:, None], stage - 1
    slots = kv.rows_in(plan.stages[stage].start)[:, None]
    slots = slots + jnp.arange(positions.shape[1], dtype=jnp.int32)
    order = prompt.order[index].at[b, slots].set(positions, mode="drop")
    target = jnp.where(of_prompt, positions, prompt.capacity)  # out of bounds: dropped
    slots = prompt.slots[index].at[b, target].set(slots, mode="drop")
    return prompt.replace(
        order=replaced(prompt.order, index, order), slots=replaced(prompt.slots, index, slots)
    )


def take_part(prompt: PromptState, stage: int, chosen, prompt_length) -> PromptState:
    """With other tokens chosen [B, P], and all that the stage has of others hidden."""
    position, index = jnp.arange(prompt.capacity, dtype=jnp.int32), stage - 1
    order = prompt.order[index]
    slots = jnp.where(position < prompt_length[:, None], prompt.slots[index], order.shape[1])
    order = order.at[jnp.arange(order.shape[0])[:, None], slots].set(
        jnp.where(chosen, position, UNSEEN), mode="drop"
    )
    return prompt.replace(
        chosen=replaced(prompt.chosen, stage, chosen), order=replaced(prompt.order, index, order)
    )


def replaced(arrays: tuple[jax.Array, ...], index: int, array) -> tuple[jax.Array, ...]:
    return (*arrays[:index], array, *arrays[index + 1 :])


def waiting(state: DecodeState, stage: int):
    """[B, P] bool: prompt tokens that are to take part in a stage and come next in it."""
    prompt = state.prompt
    return prompt.chosen[stage] & (prompt.done == stage)


def _before_window(plan: LazyPlan, state: DecodeState, stage: int):
    """[B, P] bool: what `fill_stage` computes; the last stage has no `choose_stage`."""
    last = 1 if stage == plan.last_stage else plan.lazy.last_tokens
    return jnp.arange(state.prompt.capacity) < state.prompt_length[:, None] - last


def committed(state: DecodeState):
    """[B, P] bool: prompt tokens that steps have not left to come."""
    length = jnp.minimum(state.prompt_length, state.kv.length)
    return jnp.arange(state.prompt.capacity) < length[:, None]


def ranks_below(prompt: PromptState, stage: int, below) -> Ranks | None:
    """Lets rows see the tokens of a stage that take part and lie before `below` [B, T]."""
    return Ranks(prompt.order[stage - 1], below) if stage else None


def _first(wanted, count: int):
    """The positions [B, count] of the first `count` of `wanted` [B, P], and how many there are.

    After the last one there is P.
    """
    B, P = wanted.shape
    rank = jnp.cumsum(wanted, axis=1, dtype=jnp.int32) - 1
    target = jnp.where(wanted, rank, count)  # out of bounds: dropped
    positions = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P))
    ids = jnp.full((B, count), P, jnp.int32)
    ids = ids.at[jnp.arange(B)[:, None], target].set(positions, mode="drop")
    return ids, jnp.minimum(rank[:, -1] + 1, count)

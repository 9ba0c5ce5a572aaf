# SPDX-License-Identifier: Apache-2.0
"""Drafts of the one-layer drafter: its memory, and its candidates for the next tokens.

Knows how its keys and values are kept, and how its rows follow the verified ones. Does not know
what becomes of the candidates.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tree_attention
from tsjax.base.errors import BadValue
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Bool, Float, Int, accumulation_dtype
from tsjax.decoding.method import Noise
from tsjax.decoding.state import Acceptance, DecodeState, Verdict
from tsjax.methods.correction import after_rows, corrected, normed_state
from tsjax.methods.model_drafts import Candidates, candidates_after, no_candidates
from tsjax.model.control_flow import run_if
from tsjax.model.drafter import DrafterWeights, carried, draft_rows, fused, words_logits
from tsjax.model.params import Params
from tsjax.model.transformer import embed
from tsjax.model.writing import for_each_row, scattered


class LayerMemory(flax.struct.PyTreeNode):
    """What the drafter saw of a run, the last tokens.

    Attributes:
      k, v: of its rows, turned by their positions. Slots at `held` and beyond are unspecified.
      held: rows that count.
      next: the slot of the next rows. They lie together: where they would not fit before the end of
        the window, they begin at slot 0, and what is left behind them no longer counts.
      taps: of the last step's path; those at `fresh` and beyond are unspecified.
      fresh: how many rows the drafter has not seen yet.
      correction: what its states are corrected by; None where it does not learn.
      last: the normed state of its last row, of which the model has said nothing yet.
    """

    k: Float[Array, "B K slots H"]
    v: Float[Array, "B K slots H"]
    held: Int[Array, "B"]
    next: Int[Array, "B"]
    taps: Float[Array, "B J n D"]
    fresh: Int[Array, "B"]
    correction: Float[Array, "B D D"] | None = None
    last: Float[Array, "B D"] | None = None


def can_adapt(model: ModelConfig) -> bool:
    """Whether the drafter's states are to be what the model's last layer gives next: those that
    tsjax trains are, where they also read that layer."""
    shape = model.drafter
    return shape is not None and shape.token_in_state and shape.taps[-1] == model.num_layers


def drafter_of(params: Params) -> DrafterWeights:
    if params.drafter is None:
        raise BadValue("params is not valid: the model's config has a drafter, and they have none")
    return params.drafter


def init_layer_memory(
    model: ModelConfig, batch: int, drafts: int, longest: int, adapt: bool = False
) -> LayerMemory:
    """Knows nothing yet. `drafts` in a row; a step commits at most `longest` rows. `adapt`: it
    learns what its states miss."""
    shape = model.drafter
    assert shape is not None
    slots = max(shape.window, longest) + drafts
    buffer = jnp.zeros((batch, model.num_kv_heads, slots, model.head_dim), model.dtype)
    none, D, wide = jnp.zeros((batch,), jnp.int32), model.embed_dim, accumulation_dtype(model.dtype)
    return LayerMemory(
        k=buffer,
        v=jnp.zeros_like(buffer),
        held=none,
        next=none,
        taps=jnp.zeros((batch, longest, len(shape.taps), model.embed_dim), model.dtype),
        fresh=none,
        correction=jnp.zeros((batch, D, D), wide) if adapt else None,
        last=jnp.zeros((batch, D), wide) if adapt else None,
    )


def with_path(
    memory: LayerMemory, state: DecodeState, verdict: Verdict, acceptance: Acceptance
) -> LayerMemory:
    """With what the model has computed for the committed path, for the next step."""
    b = jnp.arange(state.emitted.shape[0])[:, None]
    taps = jnp.stack([tap[b, acceptance.path] for tap in verdict.rows.taps], axis=2)
    return memory.replace(taps=taps, fresh=state.emitted)


def draft_chain(
    model: ModelConfig,
    params: Params,
    state: DecodeState,
    memory: LayerMemory,
    noise: Noise,
    number: int,
    best_of: int,
    wanted: Callable[[int, list[Candidates]], Bool[Array, ""]],
) -> tuple[LayerMemory, list[Candidates], list[Bool[Array, ""]]]:
    """The memory with the fresh rows, the candidates of up to `number` depths, each after the best
    ones before it, and which depths were drafted: all until one is not `wanted`, by what comes
    before it.

    Where nothing is fresh, as before the first step, no candidate is possible.
    """
    drafter, (memory, states) = drafter_of(params), _read(model, params, state, memory)
    some = memory.fresh > 0
    best, ranked, runs = state.root[:, None], [], []
    ran = jnp.any(some & state.running)
    slots = memory.k, memory.v
    none = no_candidates((best.shape[0], best_of), noise.dtype)
    for depth in range(number):
        ran &= wanted(depth, ranked)
        runs.append(ran)
        inputs = best, states, memory.held, noise

        def deeper(carry, best, states, held, noise, depth=depth):
            (k, v), _, _ = carry
            if depth:
                states, k, v = _follow(model, params, state, best, states, held, k, v)
            if memory.correction is not None:
                states = corrected(memory.correction, states)
            said = words_logits(drafter, states, cfg=model)
            logits = jnp.full((*said.shape[:2], model.vocab_size), -jnp.inf, said.dtype)
            logits = logits.at[:, :, drafter.words].set(said)
            return (k, v), candidates_after(best, logits, state, noise, best_of), states

        slots, found, states = run_if(ran, deeper, (slots, none, states), *inputs, small=True)
        possible = found.possible & some[:, None]
        found = found.replace(scores=jnp.where(possible, found.scores, -jnp.inf))
        ranked.append(found)
        best = jnp.concatenate([best, found.tokens[:, :1]], axis=1)
    k, v = slots
    return memory.replace(k=k, v=v), ranked, runs


def _read(
    model: ModelConfig, params: Params, state: DecodeState, memory: LayerMemory
) -> tuple[LayerMemory, Float[Array, "B 1 D"]]:
    """The memory with the fresh rows, and the state of the last of them."""
    b, fresh, longest = jnp.arange(memory.fresh.shape[0]), memory.fresh, memory.taps.shape[1]
    index = jnp.arange(longest, dtype=jnp.int32)[None]
    positions = (state.kv.length - fresh)[:, None] + index
    following = jnp.take_along_axis(
        state.tokens, jnp.minimum(positions + 1, state.tokens.shape[1] - 1), axis=1
    )
    causal = jnp.tril(jnp.ones((longest, longest), bool))

    def attend(q, k, v):
        return tree_attention(q, memory.k, memory.v, memory.held, k, v, causal, live=fresh)

    states = fused(drafter_of(params), memory.taps, cfg=model, live=fresh)
    states, k, v = draft_rows(
        drafter_of(params),
        states,
        embed(params.model, following),
        positions,
        attend,
        cfg=model,
        live=fresh,
    )
    assert model.drafter is not None
    if memory.correction is not None:
        memory = _taught(memory, states)
    memory = with_rows(memory, k, v, fresh, model.drafter.window)
    return memory, states[b, jnp.maximum(fresh - 1, 0)][:, None]


def _taught(memory: LayerMemory, states: Float[Array, "B J D"]) -> LayerMemory:
    """With what the model has said after the last row that was read, and after the fresh ones but
    their last."""
    assert memory.correction is not None and memory.last is not None
    wide, fresh = memory.correction.dtype, memory.fresh
    normed = jnp.concatenate([memory.last[:, None], normed_state(states, wide)], axis=1)
    wanted = normed_state(memory.taps[:, :, -1], wide)
    index = jnp.arange(states.shape[1], dtype=jnp.int32)[None]
    counts = (index < fresh[:, None]) & ((index > 0) | (memory.held > 0)[:, None])
    return memory.replace(
        correction=after_rows(memory.correction, normed[:, :-1], wanted, counts),
        last=jnp.take_along_axis(normed, fresh[:, None, None], axis=1)[:, 0],
    )


def with_rows(
    memory: LayerMemory,
    k: Float[Array, "B J K H"],
    v: Float[Array, "B J K H"],
    count: Int[Array, "B"],
    window: int,
) -> LayerMemory:
    """With the first `count` of these rows, by the rule of LayerMemory."""
    longest = k.shape[1]
    fits = memory.next + longest <= max(window, longest)
    start = jnp.where(fits, memory.next, 0)
    held = jnp.maximum(jnp.where(fits, memory.held, memory.next), start + count)
    some = count > 0
    return memory.replace(
        k=_written(memory.k, k, start, count),
        v=_written(memory.v, v, start, count),
        held=jnp.where(some, held, memory.held),
        next=jnp.where(some, start + count, memory.next),
    )


def _follow(
    model: ModelConfig,
    params: Params,
    state: DecodeState,
    best: Int[Array, "B known"],
    states: Float[Array, "B 1 D"],
    held: Int[Array, "B"],
    k: Float[Array, "B K slots H"],
    v: Float[Array, "B K slots H"],
):
    """The next states, after the last of the `best` drafts, and the buffers with their rows beyond
    what counts."""
    drafter, drafted = drafter_of(params), best.shape[1] - 1
    length, alone = held + drafted - 1, jnp.ones((1, 1), bool)

    def attend(q, k_new, v_new):
        return tree_attention(q, k, v, length, k_new, v_new, alone)

    states = carried(drafter, states, cfg=model)
    positions = state.kv.length[:, None] + drafted - 1
    embedded = embed(params.model, best[:, -1:])
    states, k_new, v_new = draft_rows(drafter, states, embedded, positions, attend, cfg=model)
    one = jnp.ones_like(held)
    return states, _written(k, k_new, length, one), _written(v, v_new, length, one)


def _written(
    buffer: Float[Array, "B K slots H"],
    rows: Float[Array, "B T K H"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
) -> Float[Array, "B K slots H"]:
    """The buffer with the first `count` of the rows from slot `start` on."""
    T = rows.shape[1]
    rows = jnp.swapaxes(rows, 1, 2).astype(buffer.dtype)
    kept = (jnp.arange(T)[None] < count[:, None])[:, None, :, None]

    def one(b, buffer):
        at = (b, jnp.int32(0), start[b], jnp.int32(0))
        old = lax.dynamic_slice(buffer, at, (1, *rows.shape[1:]))
        row = lax.dynamic_slice_in_dim(rows, b, 1, axis=0)
        keep = lax.dynamic_slice_in_dim(kept, b, 1, axis=0)
        return lax.dynamic_update_slice(buffer, jnp.where(keep, row, old), at)

    def at_once(buffer, rows):
        slots = start[:, None] + jnp.arange(T, dtype=jnp.int32)
        return scattered(buffer, rows, jnp.where(kept[:, 0, :, 0], slots, buffer.shape[2]))

    return for_each_row(one, at_once, buffer, rows)

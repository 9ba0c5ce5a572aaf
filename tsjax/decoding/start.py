# SPDX-License-Identifier: Apache-2.0
"""The state before anything has run: what is known, and empty buffers.

Knows what a config needs. Does not know steps.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.base.generation_config import GenerationConfig
from tsjax.base.typing import accumulation_dtype
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.logprobs import empty_log_probs
from tsjax.decoding.method import Memory
from tsjax.decoding.noise import IMPLEMENTATION, check_keys, row_keys
from tsjax.decoding.processors import first_counts, first_last_seen
from tsjax.decoding.sampling import SamplingValues, sampling_values
from tsjax.decoding.state import RUNNING, STOPPED, DecodeState, StepStats
from tsjax.model.cache import Cache, KVCache, init_cache
from tsjax.model.parts import by_text
from tsjax.model.sharding import everywhere


def init_state(
    tokens,
    prompt_length,
    *,
    cfg: DecodeConfig,
    capacity: int,
    max_length,
    length=None,
    sampling: SamplingValues | None = None,
    row_key=None,
    mesh=None,
    prompt_capacity: int | None = None,
) -> DecodeState:
    """The state before prefill: tokens known, cache empty.

    Args:
      tokens: [B, P] int32, prompts padded on the right with anything.
      prompt_length: [B] int32, at least 1.
      capacity: slots of the cache and of the token buffer, at least P and one step's drafts.
      max_length: [B] int32, prompt and new tokens together; at most what `capacity` holds, that is
        capacity - cfg.rows_ahead: a step writes the rows of its longest path, or those it revives.
      length: [B] int32, known tokens when a run continues after its prompt; else prompt_length.
      sampling: greedy without stop tokens if None.
      row_key: [B] PRNG keys, see `row_keys`; those of seed 0 if None.
      mesh: where the parameters are placed, None for one device.
      prompt_capacity: with a lazy prefill, tokens of the longest prompt that its buffers hold; P if
        None. A run then continues nowhere but after its prompt: `length` is None or prompt_length.
    """
    tokens, prompt_length = jnp.asarray(tokens), jnp.asarray(prompt_length)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise BadValue(
            f"tokens of shape {tokens.shape} and type {tokens.dtype} is not valid: [B, P] integers"
        )
    batch, width = tokens.shape
    if prompt_length.shape != (batch,):
        raise BadValue(
            f"prompt_length of shape {prompt_length.shape} is not valid: one for each of {batch} "
            "rows"
        )
    check(width <= capacity, "capacity", capacity, f"at least the {width} prompt columns")
    ahead, what = cfg.rows_ahead, "the longest path of one step and what it revives"
    check(capacity > ahead, "capacity", capacity, f"at least {ahead + 1} slots, for {what}")
    model = cfg.model
    if sampling is None:
        sampling = sampling_values(GenerationConfig(), (), model.vocab_size, model.dtype)
    penalises, counts_tokens = sampling.repetition is not None, sampling.counts_tokens
    if row_key is None:
        row_key = row_keys([0] * batch, [0] * batch)
    check_keys(row_key)
    length = jnp.asarray(prompt_length if length is None else length, jnp.int32)
    known, vocab = jnp.arange(width) < length[:, None], model.vocab_size
    tokens = jnp.where(known, jnp.asarray(tokens, jnp.int32), 0)
    told, logprobs = sampling.logprobs, None
    if told is not None:
        logprobs = empty_log_probs(batch, capacity, told, accumulation_dtype(model.dtype))
    # A state is made to be donated, so it shares no array with its caller.
    state = DecodeState(
        kv=init_cache(model, batch, capacity, mesh).replace(length=length - 1),
        tokens=jnp.pad(tokens, ((0, 0), (0, capacity - width))),
        sources=jnp.zeros((batch, capacity), jnp.uint8),
        prompt_length=jnp.array(prompt_length, jnp.int32),
        max_length=jnp.minimum(jnp.asarray(max_length, jnp.int32), capacity - cfg.rows_ahead),
        last_seen=first_last_seen(tokens, length, vocab) if penalises else None,
        counts=first_counts(tokens, prompt_length, length, vocab) if counts_tokens else None,
        logprobs=logprobs,
        row_key=jnp.copy(row_key),
        finish=jnp.full((batch,), RUNNING, jnp.int8),
        sampling=jax.tree.map(jnp.copy, sampling),
        stats=init_stats(cfg, batch),
        emitted=jnp.zeros((batch,), jnp.int32),
        room=jnp.full((batch,), capacity, jnp.int32),
        memory=empty_memory(cfg, batch, capacity, mesh),
    )
    if cfg.prefill is not None:
        longest = width if prompt_capacity is None else prompt_capacity
        state = cfg.prefill.begin(state, longest, model)
    return state if mesh is None else _on_each_device(state, mesh)


def begin(
    tokens, prompt_length, seeds, repeats, ended, *, cfg: DecodeConfig, **more
) -> DecodeState:
    """The state of a run, of arrays alone: one program makes it.

    Args:
      tokens: [B, capacity] int32, the prompt and, for a resumed run, what was made already.
      seeds, repeats: [B] uint32, see `row_keys`.
      ended: [B] bool, rows that run no more.
      prompt_length, more: see `init_state`.
    """
    capacity, row_key = tokens.shape[1], row_keys(seeds, repeats)
    state = init_state(tokens, prompt_length, cfg=cfg, capacity=capacity, row_key=row_key, **more)
    return state.replace(finish=jnp.where(ended, jnp.int8(STOPPED), state.finish))


def adopt(state: DecodeState, cache: KVCache, length) -> DecodeState:
    """The state with a text that was read before at the beginning of each row.

    `cache` is of one row. Its first `length` (traced) tokens count; the rest is overwritten, or
    unspecified.
    """
    slots = min(cache.capacity, state.kv.capacity) // state.kv.parts

    def copied(buffer, known):
        buffer, known = by_text(buffer, state.kv.parts), by_text(known, state.kv.parts)
        buffer = buffer.at[:, :, :, :slots].set(known[:, :, :, :slots])
        return buffer.reshape(-1, *buffer.shape[2:])

    k, v = jax.tree.map(copied, (state.kv.k, state.kv.v), (cache.k, cache.v))
    kv = state.kv.replace(k=k, v=v)
    if state.prompt is None:
        return state.replace(kv=kv)
    absent = state.kv.absent - length
    return state.replace(kv=kv.replace(absent=absent), prompt=state.prompt.after_prefix(length))


def spread(state: DecodeState, cache: KVCache, of_rows) -> DecodeState:
    """The state whose row b has the texts that row of_rows[b] of `cache` has read."""

    def taken(known):
        known = jnp.take(by_text(known, cache.parts), of_rows, axis=1)
        return known.reshape(-1, *known.shape[2:])

    k, v = jax.tree.map(taken, (cache.k, cache.v))
    return state.replace(kv=state.kv.replace(k=k, v=v))


def fill_row(state: DecodeState, other: DecodeState, row) -> DecodeState:
    """The state whose `row` (traced) is the only row of another state of the same capacity.

    Memory and counters stay as they are: begin them anew (`first_memory`).
    """

    def written(whole, one):
        return lax.dynamic_update_slice_in_dim(whole, one.astype(whole.dtype), row, axis=0)

    names = "tokens sources prompt_length max_length last_seen counts logprobs finish"
    names += " emitted room"
    changes = {
        name: jax.tree.map(written, getattr(state, name), getattr(other, name))
        for name in names.split()
    }
    # Keys are no numbers: their data are.
    data = written(*map(jax.random.key_data, (state.row_key, other.row_key)))

    def filled(whole, one):
        whole, one = (by_text(x, state.kv.parts) for x in (whole, one))
        whole = lax.dynamic_update_slice_in_dim(whole, one, row, axis=1)
        return whole.reshape(-1, *whole.shape[2:])

    kv = state.kv.replace(
        k=jax.tree.map(filled, state.kv.k, other.kv.k),
        v=jax.tree.map(filled, state.kv.v, other.kv.v),
        length=written(state.kv.length, other.kv.length),
    )
    key = jax.random.wrap_key_data(data, impl=IMPLEMENTATION)
    return state.replace(kv=kv, row_key=key, **changes)


def grown(state: DecodeState, *, capacity: int) -> DecodeState:
    """The state with `capacity` slots in each buffer of tokens; what the method remembers is not
    part of it."""

    def longer(x, axis: int, size: int = capacity):
        missing = [(0, 0)] * x.ndim
        missing[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, missing)

    slots = -(-capacity // state.kv.parts)
    k, v = jax.tree.map(lambda x: longer(x, 2, slots), (state.kv.k, state.kv.v))
    kv = state.kv.replace(k=k, v=v)
    told = jax.tree.map(lambda x: longer(x, 1), state.logprobs)
    return state.replace(
        kv=kv, tokens=longer(state.tokens, 1), sources=longer(state.sources, 1), logprobs=told,
        room=jnp.full_like(state.room, capacity), memory=(),
    )  # fmt: skip


def init_stats(cfg: DecodeConfig, batch: int) -> StepStats:
    return StepStats(
        steps=jnp.zeros((batch,), jnp.int32),
        drafted=jnp.zeros((batch,), jnp.int32),
        accepted=jnp.zeros((batch, cfg.sizes.depth + 1), jnp.int32),
        by_source=jnp.zeros((batch, len(cfg.method.sources)), jnp.int32),
    )


def first_memory(lesson, *, cfg: DecodeConfig, batch: int, capacity: int, mesh):
    """What a method begins with, and its counters, on each device of a mesh. It knows no more than
    the `lesson` of one before, if there is any."""
    memory = empty_memory(cfg, batch, capacity, mesh)
    if lesson is not None:
        memory = cfg.method.taught(memory, lesson)
    begun = memory, init_stats(cfg, batch)
    return begun if mesh is None else _on_each_device(begun, mesh)


def empty_memory(cfg: DecodeConfig, batch: int, capacity: int, mesh) -> Memory:
    memory = cfg.method.init(cfg.model, batch, capacity, mesh)
    return memory if cfg.prefill is None else cfg.prefill.begin_memory(memory)


def _on_each_device(state: Any, mesh) -> Any:
    """Copies everything to all devices of the mesh but what is placed: cache and memory may be."""
    whole = everywhere(mesh)

    def place(part):
        """Keys and values of a cache are placed where they are made."""
        if not isinstance(part, Cache):
            if jnp.issubdtype(part.dtype, jax.dtypes.prng_key):
                data = jax.device_put(jax.random.key_data(part), whole)
                return jax.random.wrap_key_data(data, impl=IMPLEMENTATION)
            return jax.device_put(part, whole)
        rest = jax.device_put(part.replace(k=(), v=()), whole)
        return rest.replace(k=part.k, v=part.v)

    return jax.tree.map(place, state, is_leaf=lambda part: isinstance(part, Cache))

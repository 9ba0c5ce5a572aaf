# SPDX-License-Identifier: Apache-2.0
"""Prefill, one decode step, and the loop over steps: pure functions of (params, state).

Knows how a pass of the model reads and extends the state. Does not know text, devices or clocks.
All functions here can be jitted, donated and composed by a caller; `programs` are the compiled
ones that `generate` and `forward` run.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import tree_attention
from tsjax.cache import KVCache, init_cache, write_rows
from tsjax.config import DecodeConfig, GenerationConfig, ModelConfig
from tsjax.model import ModelWeights, forward, unembed
from tsjax.sampling import NEVER_SEEN, SamplingValues, choose, first_last_seen, sampling_values
from tsjax.state import EOS, LENGTH, RUNNING, DecodeState, Params, StepStats


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
) -> DecodeState:
    """The state before prefill: tokens known, cache empty.

    Args:
      tokens: [B, P] int32, prompts padded on the right with anything.
      prompt_length: [B] int32, at least 1.
      capacity: slots of the cache and of the token buffer, at least P.
      max_length: [B] int32, prompt and new tokens together; more than `capacity` means `capacity`.
      length: [B] int32, known tokens when a run continues behind its prompt; else prompt_length.
      sampling: greedy without stop tokens if None.
      row_key: [B] PRNG keys, see `row_keys`; those of seed 0 if None.
      mesh: where the parameters are placed, None for one device.
    """
    tokens, prompt_length = jnp.asarray(tokens), jnp.asarray(prompt_length)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens of shape {tokens.shape} and type {tokens.dtype} is not valid: [B, P] integers"
        )
    batch, width = tokens.shape
    if prompt_length.shape != (batch,):
        raise ValueError(
            f"prompt_length of shape {prompt_length.shape} is not valid: one for each of {batch} "
            "rows"
        )
    if width > capacity:
        raise ValueError(f"capacity={capacity} is not valid: at least the {width} prompt columns")
    model = cfg.model
    if sampling is None:
        sampling = sampling_values(GenerationConfig(), (), model.vocab_size, model.dtype)
    if row_key is None:
        row_key = row_keys([0] * batch, [0] * batch)
    length = jnp.asarray(prompt_length if length is None else length, jnp.int32)
    known = jnp.arange(width) < length[:, None]
    tokens = jnp.where(known, jnp.asarray(tokens, jnp.int32), 0)
    kv = init_cache(model, batch, capacity, mesh)
    # A state is made to be donated, so it shares no array with its caller.
    state = DecodeState(
        kv=kv.replace(length=length - 1),
        tokens=jnp.pad(tokens, ((0, 0), (0, capacity - width))),
        prompt_length=jnp.array(prompt_length, jnp.int32),
        max_length=jnp.minimum(jnp.asarray(max_length, jnp.int32), capacity),
        last_seen=first_last_seen(tokens, length, model.vocab_size),
        row_key=jnp.copy(row_key),
        finish=jnp.full((batch,), RUNNING, jnp.int8),
        sampling=jax.tree.map(jnp.copy, sampling),
        stats=StepStats(steps=jnp.zeros((batch,), jnp.int32)),
    )
    return state if mesh is None else replicate_but_cache(state, mesh)


def row_keys(seeds, repeats):
    """One PRNG key per row. Rows with the same seed and prompt differ by their repeat number."""
    keys = [
        jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), repeat)
        for seed, repeat in zip(seeds, repeats, strict=True)
    ]
    return jnp.stack(keys)


def replicate_but_cache(state: DecodeState, mesh) -> DecodeState:
    """Copies everything but the (already placed) cache buffers to every device of the mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    k, v = state.kv.k, state.kv.v
    rest = state.replace(kv=state.kv.replace(k=(), v=()))
    rest = jax.device_put(rest, everywhere)
    return rest.replace(kv=rest.kv.replace(k=k, v=v))


def run_rows(weights: ModelWeights, cache: KVCache, tokens, depths, mask, *, cfg: ModelConfig):
    """One pass of T rows that follow the committed tokens; the cache is only read.

    Args:
      tokens: [B, T] int32.
      depths: [T] or [B, T] int32, the position of a row is cache.length + its depth.
      mask: [T, T] or [B, T, T] bool, which fresh row sees which.

    Returns:
      hidden [B, T, D] and the fresh keys and values per layer, as `model.forward`.
    """

    def attend(layer, q, k, v):
        return tree_attention(q, cache.k[layer], cache.v[layer], cache.length, k, v, mask)

    positions = cache.length[:, None] + depths
    return forward(weights, tokens, positions=positions, attend=attend, cfg=cfg)


def prefill_chunk(params: Params, state: DecodeState, start, *, width: int, cfg: DecodeConfig):
    """Commits the known tokens at start .. start + width of every row that has them.

    All but the last known token of a row are committed by prefill: that one is the root of the
    first step. Until all chunks are through, `kv.length` names the goal, not what the cache holds.
    `start` may be traced. Rows that end earlier compute garbage, which lands in unspecified slots.
    A chunk that would leave the buffers begins earlier and computes a few tokens again.
    """
    if width > state.kv.capacity:
        raise ValueError(f"width={width} is not valid: at most the capacity {state.kv.capacity}")
    with jax.named_scope("prefill"):
        start = jnp.minimum(start, state.kv.capacity - width)
        tokens = lax.dynamic_slice_in_dim(state.tokens, start, width, axis=1)
        begin = jnp.full(state.kv.length.shape, start, jnp.int32)
        causal = jnp.tril(jnp.ones((width, width), bool))
        cache = state.kv.replace(length=begin)
        _, k, v = run_rows(params.model, cache, tokens, jnp.arange(width), causal, cfg=cfg.model)
        cache = write_rows(cache, k, v, begin, after=k[-1])
        return state.replace(kv=cache.replace(length=state.kv.length))


def logits(params: Params, tokens, *, cfg: ModelConfig, width: int = 512):
    """Logits [B, T, V] of every position of tokens [B, T]: the model without any decoding.

    Runs `width` rows at a time against a cache of its own, so no T x T array exists.
    """
    batch, length = tokens.shape
    width = min(width, length)
    chunks = -(-length // width)
    padded = jnp.pad(jnp.asarray(tokens, jnp.int32), ((0, 0), (0, chunks * width - length)))
    causal = jnp.tril(jnp.ones((width, width), bool))

    def body(cache, rows):
        hidden, k, v = run_rows(params.model, cache, rows, jnp.arange(width), causal, cfg=cfg)
        cache = write_rows(cache, k, v, cache.length, after=hidden)
        return cache.replace(length=cache.length + width), hidden

    rows = jnp.swapaxes(padded.reshape(batch, chunks, width), 0, 1)
    _, hidden = lax.scan(body, init_cache(cfg, batch, chunks * width), rows)
    hidden = jnp.swapaxes(hidden, 0, 1).reshape(batch, chunks * width, -1)[:, :length]
    return unembed(params.model, hidden, cfg=cfg)


def prefill(params: Params, state: DecodeState, *, width: int, cfg: DecodeConfig) -> DecodeState:
    """Commits all known tokens but the last of each row, `width` at a time, up to the longest."""
    chunks = (jnp.max(state.kv.length) + width - 1) // width

    def body(index, state):
        return prefill_chunk(params, state, index * width, width=width, cfg=cfg)

    return lax.fori_loop(0, chunks, body, state)


def decode_step(params: Params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
    """One step of plain decoding: run the root on the full cache, choose its successor, commit."""
    alone = jnp.ones((1, 1), bool)
    hidden, k, v = run_rows(
        params.model,
        state.kv,
        state.root[:, None],
        jnp.zeros((1,), jnp.int32),
        alone,
        cfg=cfg.model,
    )
    logits = unembed(params.model, hidden, cfg=cfg.model)  # [B, 1, V]
    target = choose(
        logits,
        state.last_seen,
        state.length[:, None],
        state.prompt_length,
        state.row_key,
        state.sampling,
    )
    return commit(state, k, v, target[:, 0])


def commit(state: DecodeState, k_rows, v_rows, token) -> DecodeState:
    """Appends the root's keys and values and the next token; the only place where lengths grow.

    A finished row changes nothing that is specified: its rows land beyond its length.
    """
    with jax.named_scope("commit"):
        running = state.running
        kv = write_rows(state.kv, k_rows, v_rows, state.kv.length, after=token)
        batch = jnp.arange(token.shape[0])
        position = state.length
        slot = jnp.where(running, position, state.tokens.shape[1])  # out of bounds: dropped
        tokens = state.tokens.at[batch, slot].set(token, mode="drop")
        last_seen = state.last_seen.at[batch, token].max(jnp.where(running, position, NEVER_SEEN))
        length = jnp.where(running, position + 1, position)
        stopped = state.sampling.stop_mask[token]
        full = length >= state.max_length
        verdict = jnp.where(stopped, EOS, jnp.where(full, LENGTH, RUNNING)).astype(jnp.int8)
        return state.replace(
            kv=kv.replace(length=length - 1),
            tokens=tokens,
            last_seen=last_seen,
            finish=jnp.where(running, verdict, state.finish),
            stats=state.stats.replace(steps=state.stats.steps + running),
        )


def decode(params: Params, state: DecodeState, num_steps, *, cfg: DecodeConfig) -> DecodeState:
    """At most `num_steps` steps (traced); ends early when every row is finished."""

    def unfinished(carry):
        step, state = carry
        return (step < num_steps) & jnp.any(state.running)

    def body(carry):
        step, state = carry
        return step + 1, decode_step(params, state, cfg=cfg)

    return lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state))[1]


class Programs(NamedTuple):
    """The functions above, compiled; those with a state donate it."""

    prefill_chunk: Any
    decode: Any
    logits: Any


@functools.cache
def programs(platform: str, dtype: str) -> Programs:
    """What `generate` and `forward` run on a platform ("cpu", "gpu", ...), for a model's type."""
    options = None
    if platform == "cpu" and dtype == "bfloat16":
        # In jax 0.10 this pass widens every bfloat16 operation to float32, slices too, and the
        # widened copy of the whole cache then moves out of the loop over its blocks.
        options = {"xla_disable_hlo_passes": "float-normalization-bf16"}
    jit = functools.partial(jax.jit, compiler_options=options)
    return Programs(
        prefill_chunk=jit(
            prefill_chunk, static_argnames=("width", "cfg"), donate_argnames=("state",)
        ),
        decode=jit(decode, static_argnames=("cfg",), donate_argnames=("state",)),
        logits=jit(logits, static_argnames=("cfg", "width")),
    )

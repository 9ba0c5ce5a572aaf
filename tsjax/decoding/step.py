# SPDX-License-Identifier: Apache-2.0
"""Prefill, one decode step, and the loop over steps: pure functions of (params, state).

Knows how a pass of the model reads and extends the state. Does not know text, devices or clocks.
All functions here can be jitted, donated and composed by a caller; `programs` are the compiled
ones that `generate` and `forward` run.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from tsjax.config import GenerationConfig, ModelConfig
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.noise import check_keys, row_keys
from tsjax.decoding.sampling import (
    NEVER_SEEN,
    SamplingValues,
    best_few,
    first_last_seen,
    sampling_values,
    step_noise,
)
from tsjax.decoding.state import EOS, LENGTH, RUNNING, DecodeState, DraftState, StepStats
from tsjax.decoding.tree import SOURCES, DraftTree
from tsjax.decoding.verification import Acceptance, Verdict, accept, score_rows, verify
from tsjax.lazy.stages import (
    choose_stage,
    fill_stage,
    init_prompt,
    note_committed,
    revive_in_background,
    tokens_to_fill,
    tokens_until_choice,
)
from tsjax.methods.drafting import draft, remember
from tsjax.methods.history import init_table
from tsjax.model.cache import (
    DraftCache,
    KVCache,
    init_cache,
    init_draft_cache,
    refresh_draft_cache,
    write_rows,
)
from tsjax.model.params import Params
from tsjax.model.passes import run_rows
from tsjax.model.transformer import final_norm, unembed


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
      length: [B] int32, known tokens when a run continues behind its prompt; else prompt_length.
      sampling: greedy without stop tokens if None.
      row_key: [B] PRNG keys, see `row_keys`; those of seed 0 if None.
      mesh: where the parameters are placed, None for one device.
      prompt_capacity: with a lazy prefill, tokens of the longest prompt that its buffers hold; P if
        None. A run then continues nowhere but behind its prompt: `length` is None or prompt_length.
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
    if capacity <= cfg.rows_ahead:
        raise ValueError(
            f"capacity={capacity} is not valid: at least {cfg.rows_ahead + 1} slots, for the "
            "longest path of one step and what it revives"
        )
    model = cfg.model
    if sampling is None:
        sampling = sampling_values(GenerationConfig(), (), model.vocab_size, model.dtype)
    if row_key is None:
        row_key = row_keys([0] * batch, [0] * batch)
    check_keys(row_key)
    length = jnp.asarray(prompt_length if length is None else length, jnp.int32)
    known = jnp.arange(width) < length[:, None]
    tokens = jnp.where(known, jnp.asarray(tokens, jnp.int32), 0)
    kv, prompt = init_cache(model, batch, capacity, mesh), None
    if cfg.prefill is not None:
        absent = jnp.broadcast_to(length - 1, (model.num_layers, batch))
        kv = kv.replace(absent=absent.astype(jnp.int32))
        if prompt_capacity is None:
            prompt_capacity = width
        _check_lazy_prompts(prompt_length, length, prompt_capacity, capacity)
        prompt = init_prompt(cfg, prompt_length, prompt_capacity, capacity)
    # A state is made to be donated, so it shares no array with its caller.
    state = DecodeState(
        kv=kv.replace(length=length - 1),
        tokens=jnp.pad(tokens, ((0, 0), (0, capacity - width))),
        sources=jnp.zeros((batch, capacity), jnp.uint8),
        prompt_length=jnp.array(prompt_length, jnp.int32),
        max_length=jnp.minimum(jnp.asarray(max_length, jnp.int32), capacity - cfg.rows_ahead),
        last_seen=first_last_seen(tokens, length, model.vocab_size),
        row_key=jnp.copy(row_key),
        finish=jnp.full((batch,), RUNNING, jnp.int8),
        sampling=jax.tree.map(jnp.copy, sampling),
        stats=StepStats(
            steps=jnp.zeros((batch,), jnp.int32),
            drafted=jnp.zeros((batch,), jnp.int32),
            accepted=jnp.zeros((batch, cfg.draft_depth + 1), jnp.int32),
            by_source=jnp.zeros((batch, len(SOURCES)), jnp.int32),
        ),
        draft=_init_draft(cfg, batch, capacity, mesh),
        prompt=prompt,
    )
    return state if mesh is None else replicate_but_cache(state, mesh)


def _init_draft(cfg: DecodeConfig, batch: int, capacity: int, mesh) -> DraftState:
    model, method = cfg.model, cfg.method
    cache = hidden = ngrams = None
    if cfg.uses_partial_cache:
        budget = min(method.draft_budget, capacity)
        cache = init_draft_cache(
            model, batch, budget, cfg.draft_passes - 1, mesh, cfg.summarizes_rest
        )
    elif cfg.draft_levels:
        hidden = jnp.zeros((batch, model.embed_dim), model.dtype)
    if cfg.ngram_depth:
        ngrams = init_table(batch, model.vocab_size, method.ngram_slots, method.ngram_size)
    return DraftState(cache=cache, hidden=hidden, ngrams=ngrams)


def draft_bytes(cfg: DecodeConfig, batch: int, capacity: int) -> int:
    """Bytes of what `init_state` allocates for the method's drafts, on one device."""
    shapes = jax.eval_shape(lambda: _init_draft(cfg, batch, capacity, None))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def replicate_but_cache(state: DecodeState, mesh) -> DecodeState:
    """Copies everything but the (already placed) cache buffers to every device of the mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def is_cache(x):
        return isinstance(x, KVCache | DraftCache)

    def place(x):
        if is_cache(x):
            return jax.device_put(x.replace(k=(), v=()), everywhere).replace(k=x.k, v=x.v)
        return jax.device_put(x, everywhere)

    return jax.tree.map(place, state, is_leaf=is_cache)


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
        positions = begin[:, None] + jnp.arange(width, dtype=jnp.int32)
        rows = run_rows(params.model, cache, tokens, positions, causal, cfg=cfg.model)
        cache = write_rows(cache, rows.k, rows.v, begin, after=rows.k[-1])
        return state.replace(kv=cache.replace(length=state.kv.length))


def hidden_states(params: Params, tokens, *, cfg: ModelConfig, width: int = 512):
    """The last layer's output [B, T, D], before the final norm, at every position of tokens [B, T].

    Runs `width` rows at a time against a cache of its own, so no T x T array exists.
    """
    batch, length = tokens.shape
    width = min(width, length)
    chunks = -(-length // width)
    padded = jnp.pad(jnp.asarray(tokens, jnp.int32), ((0, 0), (0, chunks * width - length)))
    causal = jnp.tril(jnp.ones((width, width), bool))

    def body(cache, tokens):
        positions = cache.length[:, None] + jnp.arange(width, dtype=jnp.int32)
        rows = run_rows(params.model, cache, tokens, positions, causal, cfg=cfg)
        cache = write_rows(cache, rows.k, rows.v, cache.length, after=rows.hidden)
        return cache.replace(length=cache.length + width), rows.hidden

    rows = jnp.swapaxes(padded.reshape(batch, chunks, width), 0, 1)
    cache = init_cache(cfg, batch, chunks * width)
    # Or else XLA takes a long time to find out what attention to an empty cache comes to.
    cache = cache.replace(length=lax.optimization_barrier(cache.length))
    _, hidden = lax.scan(body, cache, rows)
    return jnp.swapaxes(hidden, 0, 1).reshape(batch, chunks * width, -1)[:, :length]


def logits(params: Params, tokens, *, cfg: ModelConfig, width: int = 512):
    """Logits [B, T, V] of every position of tokens [B, T]: the model without any decoding."""
    hidden = hidden_states(params, tokens, cfg=cfg, width=width)
    return unembed(params.model, final_norm(params.model, hidden, cfg=cfg), cfg=cfg)


def prefill(params: Params, state: DecodeState, *, width: int, cfg: DecodeConfig) -> DecodeState:
    """Commits all known tokens but the last of each row, `width` at a time, up to the longest."""
    if cfg.prefill is not None:
        return _prefill_lazily(params, state, width=width, cfg=cfg)
    chunks = (jnp.max(state.kv.length) + width - 1) // width

    def body(index, state):
        return prefill_chunk(params, state, index * width, width=width, cfg=cfg)

    return lax.fori_loop(0, chunks, body, state)


def _check_lazy_prompts(prompt_length, length, prompt_capacity: int, capacity: int) -> None:
    if not 0 < prompt_capacity <= capacity:
        raise ValueError(
            f"prompt_capacity={prompt_capacity} is not valid: at most the capacity {capacity}"
        )
    if isinstance(prompt_length, Tracer) or isinstance(length, Tracer):
        return
    longest = int(jnp.max(prompt_length))
    if longest > prompt_capacity:
        raise ValueError(
            f"prompt_capacity={prompt_capacity} is not valid: at least the {longest} tokens of the "
            "longest prompt"
        )
    if bool(jnp.any(length != prompt_length)):
        raise ValueError(
            f"length={length} is not valid with a lazy prefill: a run begins behind its prompt"
        )


def _prefill_lazily(params: Params, state: DecodeState, *, width: int, cfg: DecodeConfig):
    """`prefill` stage by stage."""
    stages, prompt = len(cfg.stages), state.prompt
    assert prompt is not None
    if -(-(prompt.capacity - 1) // width) * width > state.kv.capacity:
        raise ValueError(
            f"width={width} is not valid: passes through up to {prompt.capacity} prompt tokens "
            f"would not fit into the capacity {state.kv.capacity}"
        )
    for stage in range(stages):

        def body(index, state, stage=stage):
            return fill_stage(params, state, stage=stage, width=width, cfg=cfg)

        chunks = (jnp.max(tokens_to_fill(cfg, stage, state.prompt_length)) + width - 1) // width
        state = lax.fori_loop(0, chunks, body, state)
        if stage < stages - 1:
            state = choose_stage(params, state, stage=stage, cfg=cfg)
    return state


def decode_step(params: Params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
    """One step: draft, verify, accept, commit, refresh. Plain decoding is a tree of one node."""
    state = remember(state, cfg=cfg)
    noise = step_noise(
        state.row_key, state.length, cfg.draft_levels, cfg.model.vocab_size, state.sampling
    )
    state = revive_in_background(params, state, cfg=cfg)
    state, tree = draft(params, state, noise, cfg=cfg)
    state, verdict = verify(params, state, tree, noise, cfg=cfg)
    acceptance = accept(tree, verdict)
    state = commit(state, tree, verdict, acceptance, cfg=cfg)
    return refresh(state, cfg=cfg)


def commit(
    state: DecodeState,
    tree: DraftTree,
    verdict: Verdict,
    acceptance: Acceptance,
    *,
    cfg: DecodeConfig,
) -> DecodeState:
    """Appends the accepted path and the token behind it; the only place where lengths grow.

    The rows of the whole path are written at once; those beyond the new length are unspecified. A
    path is cut behind the first stop token and where the row is full. A finished row changes
    nothing that is specified: its rows land beyond its length.
    """
    with jax.named_scope("commit"):
        B, steps = acceptance.path.shape  # J + 1
        b = jnp.arange(B)
        running, length, path = state.running, state.length, acceptance.path

        def on_path(x):  # [B, T, ...] -> [B, J + 1, ...]
            return x[b[:, None], path]

        kv = write_rows(
            state.kv,
            tuple(map(on_path, verdict.rows.k)),
            tuple(map(on_path, verdict.rows.v)),
            state.kv.length,
            after=verdict.target,
        )
        # The target of each node of the path: its drafted tokens, and one more.
        emitted = on_path(verdict.target)
        index = jnp.arange(steps, dtype=jnp.int32)
        found = index <= acceptance.count[:, None]
        stops = found & state.sampling.stop_mask[emitted]
        stopped = jnp.any(stops, axis=1)
        count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, steps)
        count = jnp.minimum(count, acceptance.count + 1)
        room = tokens_until_choice(state, state.max_length - length, cfg=cfg)
        stopped &= count <= room
        count = jnp.where(running, jnp.minimum(count, room), 0)
        new_length = length + count
        verdicts = jnp.where(
            stopped, EOS, jnp.where(new_length >= state.max_length, LENGTH, RUNNING)
        )

        positions = length[:, None] + index
        kept = index < count[:, None]
        slots = jnp.where(kept, positions, state.tokens.shape[1])  # out of bounds: dropped
        tokens = state.tokens.at[b[:, None], slots].set(emitted, mode="drop")
        drafted_by = _drafted_by(tree, path, count)
        sources = state.sources.at[b[:, None], slots].set(drafted_by, mode="drop")
        last_seen = state.last_seen.at[b[:, None], emitted].max(
            jnp.where(kept, positions, NEVER_SEEN)
        )
        last = path[b, jnp.maximum(count - 1, 0)]  # the last committed node
        return state.replace(
            kv=kv.replace(length=new_length - 1),
            prompt=note_committed(state, after=verdict.rows.hidden, cfg=cfg),
            tokens=tokens,
            sources=sources,
            last_seen=last_seen,
            finish=jnp.where(running, verdicts.astype(jnp.int8), state.finish),
            stats=_counted(state.stats, tree, path, count),
            draft=_last_verified(state.draft, verdict, last, count > 0),
        )


def _drafted_by(tree: DraftTree, path, count):
    """The sources of the tokens that a step emits, [B, J + 1] uint8 as in DecodeState.

    The token behind the path's node i is its node i + 1. The last of `count` [B] tokens counts as
    the model's own, as in the counters.
    """
    b, bits = jnp.arange(path.shape[0])[:, None], 1 << jnp.arange(len(SOURCES))
    of_node = jnp.sum(jnp.where(tree.sources[b, path], bits, 0), axis=-1)
    following = jnp.pad(of_node[:, 1:], ((0, 0), (0, 1)))
    drafted = jnp.arange(path.shape[1]) < count[:, None] - 1
    return jnp.where(drafted, following, 0).astype(jnp.uint8)


def _counted(stats: StepStats, tree: DraftTree, path, count) -> StepStats:
    """One more step, which emitted `count` [B] tokens: drafted ones and then one that is not."""
    b, steps = jnp.arange(path.shape[0]), path.shape[1]
    active = (count > 0).astype(jnp.int32)
    accepted = jnp.maximum(count - 1, 0)
    drafted_on_path = jnp.arange(steps) - 1 < accepted[:, None]
    named = tree.sources[b[:, None], path] & drafted_on_path[..., None]  # none at the root
    return StepStats(
        steps=stats.steps + active,
        drafted=stats.drafted + active * tree.drafted,
        accepted=stats.accepted.at[b, accepted].add(active),
        by_source=stats.by_source + active[:, None] * jnp.sum(named, axis=1, dtype=jnp.int32),
    )


def _last_verified(draft: DraftState, verdict: Verdict, last, rows) -> DraftState:
    """Keeps what drafts need of the nodes `last` [B], for the batch rows `rows` [B]."""
    b = jnp.arange(last.shape[0])

    def keep(new, old):
        def one(new, old):
            wanted = rows.reshape(-1, *(1,) * (old.ndim - 1))
            return jnp.where(wanted, new[b, last], old)

        return jax.tree.map(one, new, old)

    if draft.hidden is not None:
        draft = draft.replace(hidden=keep(verdict.rows.hidden, draft.hidden))
    if draft.cache is not None:
        kept = {
            "query": keep(verdict.rows.query, draft.cache.query),
            "attended": keep(verdict.rows.attended, draft.cache.attended),
        }
        draft = draft.replace(cache=draft.cache.replace(**kept))
    return draft


def refresh(state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
    """Brings the draft cache up to date with what was committed."""
    if state.draft.cache is None:
        return state
    cache = refresh_draft_cache(
        state.draft.cache,
        state.kv,
        num_sinks=cfg.method.num_sinks,
        max_rows=cfg.draft_depth + 1,
        most_new=cfg.method.draft_refresh,
    )
    return state.replace(draft=state.draft.replace(cache=cache))


def decode(params: Params, state: DecodeState, num_steps, *, cfg: DecodeConfig) -> DecodeState:
    """At most `num_steps` steps (traced); ends early when every row is finished."""

    def unfinished(carry):
        step, state = carry
        return (step < num_steps) & jnp.any(state.running)

    def body(carry):
        step, state = carry
        return step + 1, decode_step(params, state, cfg=cfg)

    return lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state))[1]


class Replay(flax.struct.PyTreeNode):
    """Plain decoding's opinion of tokens that are given; unspecified where nothing was replayed.

    Attributes:
      choice: [B, C] int32, what it chooses at each position behind the given tokens before it.
      lead: [B, C], by how much the score of its choice is above the next best.
      behind: [B, C], by how much the score of the given token is below it.
    """

    choice: jax.Array
    lead: jax.Array
    behind: jax.Array


def init_replay(state: DecodeState) -> Replay:
    shape, dtype = state.tokens.shape, state.sampling.temperature.dtype
    return Replay(
        choice=jnp.zeros(shape, jnp.int32), lead=jnp.zeros(shape, dtype),
        behind=jnp.zeros(shape, dtype),
    )  # fmt: skip


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
    noise = step_noise(
        state.row_key, state.length, cfg.draft_levels, cfg.model.vocab_size, state.sampling
    )
    state, root = draft(params, state, noise, cfg=cfg)
    rows, scores = score_rows(params, state, root, noise, cfg=cfg)
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
    return _until_full(commit(state, root, verdict, accept(root, verdict), cfg=cfg)), found


def _until_full(state: DecodeState) -> DecodeState:
    full = state.length >= state.max_length
    return state.replace(finish=jnp.where(full, jnp.int8(LENGTH), jnp.int8(RUNNING)))


class Programs(NamedTuple):
    """The functions above, compiled; those with a state donate it."""

    prefill_chunk: Any
    fill_stage: Any
    choose_stage: Any
    decode: Any
    replay: Any
    hidden_states: Any
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
        fill_stage=jit(
            fill_stage, static_argnames=("stage", "width", "cfg"), donate_argnames=("state",)
        ),
        choose_stage=jit(
            choose_stage, static_argnames=("stage", "cfg"), donate_argnames=("state",)
        ),
        decode=jit(decode, static_argnames=("cfg",), donate_argnames=("state",)),
        replay=jit(replay, static_argnames=("cfg",), donate_argnames=("state", "found")),
        hidden_states=jit(hidden_states, static_argnames=("cfg", "width")),
        logits=jit(logits, static_argnames=("cfg", "width")),
    )

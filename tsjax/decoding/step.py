# SPDX-License-Identifier: Apache-2.0
"""One decode step, and the loop over steps: pure functions of (params, state).

Knows how a pass of the model reads and extends the state. Does not know text, devices or clocks.
All functions here can be jitted, donated and composed by a caller; programs.py has the compiled
ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from tsjax.base.errors import BadValue
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.processors import NEVER_SEEN
from tsjax.decoding.sampling import step_noise
from tsjax.decoding.state import (
    BROKEN,
    EOS,
    LENGTH,
    RUNNING,
    Acceptance,
    DecodeState,
    StepStats,
    Verdict,
)
from tsjax.decoding.tree import DraftTree
from tsjax.decoding.verification import accept, verify_tree
from tsjax.model.cache import write_rows
from tsjax.model.params import Params

Decide = Callable[[DecodeState, DraftTree, Verdict], tuple[Verdict, Acceptance]]


def as_the_model(
    state: DecodeState, tree: DraftTree, verdict: Verdict
) -> tuple[Verdict, Acceptance]:
    """What the model would have said without drafts."""
    return verdict, accept(tree, verdict.target)


def decode_step(
    params: Params, state: DecodeState, *, cfg: DecodeConfig, decide: Decide = as_the_model
) -> DecodeState:
    """One step: draft, verify, accept, commit, learn. Plain decoding is a tree of one node.

    `decide` takes the path and its tokens; another one than the model's is for measurements.
    """
    if cfg.prefill is not None:
        return cfg.prefill.step(params, state, cfg=cfg, decide=decide)  # which wraps this one
    method, model = cfg.method, cfg.model
    noise = step_noise(
        state.row_key, state.length, cfg.sizes.levels, model.vocab_size, state.sampling
    )
    memory, tree = method.draft(model, params, state, noise)
    check_tree(tree, cfg)
    verdict = verify_tree(params, state, tree, noise, cfg=cfg)
    verdict, acceptance = decide(state, tree, verdict)
    after = commit(state, tree, verdict, acceptance)
    return after.replace(memory=method.learn(model, params, memory, after, verdict, acceptance))


def check_tree(tree: DraftTree, cfg: DecodeConfig) -> None:
    """Shapes are static, so a tree of other sizes than its method says is refused when traced."""
    width, depth = cfg.sizes.width, cfg.sizes.depth
    found = tree.path.shape[1:], tree.sources.shape[2]
    wanted = (width, depth + 1), len(cfg.method.sources)
    if found != wanted:
        raise BadValue(
            f"{type(cfg.method).__name__}.draft gave a tree with paths {found[0]} and "
            f"{found[1]} sources; by its sizes and sources they are {wanted[0]} and {wanted[1]}: "
            f"width={width} nodes, depth={depth} tokens after the root"
        )


def commit(
    state: DecodeState, tree: DraftTree, verdict: Verdict, acceptance: Acceptance
) -> DecodeState:
    """Appends the accepted path and the token after it; the only place where lengths grow.

    The rows of the whole path are written at once; those beyond the new length are unspecified. A
    path is cut after the first stop token, where the row is full, and before a token whose scores
    are broken. A finished row changes nothing that is specified: its rows land beyond its length.
    """
    with jax.named_scope("commit"):
        B, steps = acceptance.path.shape  # J + 1
        b = jnp.arange(B)
        running, length, path = state.running, state.length, acceptance.path

        def on_path(x):  # [B, T, ...] -> [B, J + 1, ...]
            return x[b[:, None], path]

        k, v = (tuple(map(on_path, rows)) for rows in (verdict.rows.k, verdict.rows.v))
        kv = write_rows(state.kv, k, v, state.kv.length, after=verdict.target)
        # The target of each node of the path: its drafted tokens, and one more.
        emitted = on_path(verdict.target)
        index = jnp.arange(steps, dtype=jnp.int32)
        found = index <= acceptance.count[:, None]
        stops = found & state.sampling.stop_mask[emitted]
        stopped = jnp.any(stops, axis=1)
        count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, steps)
        count = jnp.minimum(count, acceptance.count + 1)
        room = jnp.minimum(state.room, state.max_length - length)
        stopped &= count <= room
        count, sound = jnp.where(running, jnp.minimum(count, room), 0), steps
        if verdict.broken is not None:
            sound = jnp.min(jnp.where(on_path(verdict.broken), index, steps), axis=1)
        broken, count = count > sound, jnp.minimum(count, sound)
        new_length = length + count
        full = jnp.where(new_length >= state.max_length, LENGTH, RUNNING)
        verdicts = jnp.where(broken, BROKEN, jnp.where(stopped, EOS, full))

        positions = length[:, None] + index
        kept = index < count[:, None]
        slots = jnp.where(kept, positions, state.tokens.shape[1])  # out of bounds: dropped
        tokens = state.tokens.at[b[:, None], slots].set(emitted, mode="drop")
        drafted_by = _drafted_by(tree, path, count)
        sources = state.sources.at[b[:, None], slots].set(drafted_by, mode="drop")
        last_seen = state.last_seen
        if last_seen is not None:
            seen_at = jnp.where(kept, positions, NEVER_SEEN)
            last_seen = last_seen.at[b[:, None], emitted].max(seen_at)
        logprobs = state.logprobs
        if logprobs is not None:

            def told(buffer, of_nodes):
                return buffer.at[b[:, None], slots].set(on_path(of_nodes), mode="drop")

            logprobs = jax.tree.map(told, logprobs, verdict.logprobs)
        counts = state.counts
        if counts is not None:
            counts = counts.at[b[:, None], emitted].add(kept.astype(jnp.int32))
        return state.replace(
            kv=kv.replace(length=new_length - 1),
            tokens=tokens,
            sources=sources,
            last_seen=last_seen,
            counts=counts,
            logprobs=logprobs,
            finish=jnp.where(running, verdicts.astype(jnp.int8), state.finish),
            stats=_counted(state.stats, tree, path, count),
            emitted=count,
        )


def _drafted_by(tree: DraftTree, path, count):
    """The sources of the tokens that a step emits, [B, J + 1] uint8 as in DecodeState.

    The token after the path's node i is its node i + 1. The last of `count` [B] tokens counts as
    the model's own, as in the counters.
    """
    b, bits = jnp.arange(path.shape[0])[:, None], 1 << jnp.arange(tree.sources.shape[2])
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


def decode(
    params: Params, state: DecodeState, num_steps, at_least=1, *, cfg: DecodeConfig
) -> DecodeState:
    """At most `num_steps` steps (traced); ends early when fewer than `at_least` rows (traced) run:
    by default when every row is finished."""

    return repeated(decode_step, params, state, num_steps, at_least, cfg=cfg)


def repeated(
    step: Callable[..., DecodeState],
    params: Params,
    state: DecodeState,
    num_steps,
    at_least=1,
    *,
    cfg: DecodeConfig,
) -> DecodeState:
    """A step of any kind, (params, state, *, cfg) -> state, over and over, as `decode` says."""
    memory = cfg.method.read(cfg.model, params, state.memory, state)

    def unfinished(index, state: DecodeState):
        return (index < num_steps) & (jnp.sum(state.running) >= at_least)

    def one(index, state: DecodeState, cfg: DecodeConfig = cfg):
        return index + 1, step(params, state, cfg=cfg)

    begun = jnp.zeros((), jnp.int32), state.replace(memory=memory)
    lazy = cfg.prefill
    if lazy is None or not lazy.chooses_between_steps:
        return lax.while_loop(lambda carry: unfinished(*carry), lambda carry: one(*carry), begun)[1]
    # A choice comes once in many steps, outside of their loop: a step that may have one would have
    # a loop in it, about which a GPU asks the host each time.
    inner = dataclasses.replace(cfg, prefill=lazy.between_choices())

    def until_a_choice(carry):
        index, state = carry

        def goes_on(index, state, stepped):
            return unfinished(index, state) & ~(stepped & lazy.is_choice_due(state, cfg=cfg))

        def more(index, state, _):
            return *one(index, state, inner), jnp.array(True)

        begun = index, lazy.choose(params, state, cfg=cfg), jnp.array(False)
        return lax.while_loop(lambda some: goes_on(*some), lambda some: more(*some), begun)[:2]

    return lax.while_loop(lambda carry: unfinished(*carry), until_a_choice, begun)[1]

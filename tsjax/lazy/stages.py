# SPDX-License-Identifier: Apache-2.0
"""LazyLLM: layers behind a cut compute the prompt tokens that matter, and others once they do.

Knows stages (the layers between two cuts), scores, and which prompt tokens each stage has. One rule
holds everywhere: a stage's tokens are computed from their hidden states, in any number at a time,
and appended to the caches of its layers. A prefill does that in order, a revival out of order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import Ranks, cache_scores
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.noise import uniform
from tsjax.decoding.state import HIDDEN, DecodeState, PromptState
from tsjax.lazy.settings import LazyPrefill, kept
from tsjax.model.cache import write_rows, zero_after
from tsjax.model.control_flow import run_if
from tsjax.model.params import Params
from tsjax.model.passes import Rows, run_layers
from tsjax.model.transformer import ModelWeights, embed

FEW_ROWS = 8  # revived at once when they are fewer than revive_rows


def init_prompt(cfg: DecodeConfig, prompt_length, prompt_capacity: int, capacity: int):
    """A PromptState with nothing computed yet and every token to take part.

    The prompt's last token comes with the first step of decoding, so nothing here computes it.
    """
    lazy, stages, D = cfg.prefill, len(cfg.stages), cfg.model.embed_dim
    assert lazy is not None
    batch, P = prompt_length.shape[0], prompt_capacity
    is_last = jnp.arange(P) == prompt_length[:, None] - 1
    return PromptState(
        hidden=jnp.zeros((batch, P, D), cfg.model.dtype),
        done=jnp.where(is_last, stages, 0).astype(jnp.int8),
        chosen=tuple(jnp.ones((batch, P), bool) for _ in range(stages)),
        slots=tuple(jnp.full((batch, P), capacity, jnp.int32) for _ in range(stages - 1)),
        order=tuple(jnp.zeros((batch, capacity), jnp.int32) for _ in range(stages - 1)),
        computed=jnp.zeros((stages, batch, P), jnp.int8),
        last=jnp.zeros((batch, lazy.window, D), cfg.model.dtype),
    )


def prompt_bytes(cfg: DecodeConfig, batch: int, prompt_capacity: int, capacity: int) -> int:
    """Bytes of what `init_prompt` allocates."""
    length = jax.ShapeDtypeStruct((batch,), jnp.int32)
    shapes = jax.eval_shape(lambda n: init_prompt(cfg, n, prompt_capacity, capacity), length)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


# --- the prefill ---------------------------------------------------------------------------------


def fill_stage(
    params: Params, state: DecodeState, *, stage: int, width: int, cfg: DecodeConfig
) -> DecodeState:
    """Computes the next `width` chosen prompt tokens of a stage, in order.

    All but the prompt's last ones (`window`): they come with `choose_stage`, as they say what the
    stages behind this one take.
    """
    with jax.named_scope("fill_stage"):
        wanted = _waiting(state, stage) & _before_window(state, stage, cfg)
        return _compute(params.model, state, wanted, stage, width, in_order=True, cfg=cfg)


def choose_stage(
    params: Params, state: DecodeState, *, stage: int, cfg: DecodeConfig
) -> DecodeState:
    """Runs the prompt's last tokens through a stage and chooses the tokens of the next one."""
    lazy = cfg.prefill
    assert lazy is not None
    with jax.named_scope("choose_stage"):
        window = jnp.arange(lazy.window, dtype=jnp.int32)
        positions = state.prompt_length[:, None] - lazy.window + window
        hidden = _prompt(state).last
        if stage == 0:
            tokens = jnp.take_along_axis(state.tokens, positions, axis=1)
            hidden = embed(params.model, tokens)
        causal = window[:, None] >= window
        layers = cfg.stages[stage]
        rows = run_layers(
            params.model, state.kv, hidden, positions, causal, layers, cfg=cfg.model,
            with_attended=True,
        )  # fmt: skip
        scores = _scores(state, stage, rows, cfg)
        if lazy.pool > 1 and lazy.scores == "attention":
            # They stay anyway, but lend their scores to those around them.
            b = jnp.arange(scores.shape[0])[:, None]
            scores = scores.at[b, positions].add(_scores_of_each_other(rows, causal, cfg))
        if lazy.window > 1:
            # The last one is not committed yet, here and with every method.
            others = jnp.full_like(state.prompt_length, lazy.window - 1)
            after = rows.hidden.ravel()[:1] + scores.ravel()[:1].astype(rows.hidden.dtype)
            state = _append(state, stage, rows, positions, others, cfg, after=after)
        prompt, n = _prompt(state), state.prompt_length
        recent = max(lazy.recent, lazy.window)
        chosen = _chosen(prompt, stage + 1, scores, n, n - 1, recent, lazy)
        prompt = prompt.replace(chosen=_replaced(prompt.chosen, stage + 1, chosen))
        return state.replace(prompt=prompt.replace(last=rows.hidden))


def tokens_to_fill(cfg: DecodeConfig, stage: int, prompt_tokens):
    """How many tokens, at most, `fill_stage` has to compute in a stage; of an int or of [B]."""
    lazy, xp = cfg.prefill, jnp if isinstance(prompt_tokens, jax.Array) else np
    assert lazy is not None
    count = prompt_tokens
    if stage:
        always = xp.minimum(lazy.sinks + max(lazy.recent, lazy.window), count)
        count = xp.maximum(kept(lazy.cuts[stage - 1][1], count), always)
    left = 1 if stage == len(cfg.stages) - 1 else lazy.window
    return xp.maximum(count - left, 0)


# --- decoding --------------------------------------------------------------------------------


def choice_is_due(state: DecodeState, cfg: DecodeConfig):
    """[B] bool: whether the root is a token at which the prompt's tokens are chosen again."""
    lazy, made = cfg.prefill, _made(state)
    assert lazy is not None
    return (made > 0) & (made % lazy.choose_every == 0) & state.running


def tokens_until_choice(state: DecodeState, room, *, cfg: DecodeConfig):
    """[B] int32: how many of `room` [B] tokens a step may find, up to where a choice is due."""
    lazy = cfg.prefill
    if lazy is None or lazy.revive == "never":
        return room
    until = jnp.minimum(room, lazy.choose_every - _made(state) % lazy.choose_every)
    if lazy.revive == "on_demand":
        return until
    return jnp.where(jnp.any(_behind(state, cfg), axis=1), until, room)


def _behind(state: DecodeState, cfg: DecodeConfig):
    """[B, P] bool: committed prompt tokens that some stage lacks."""
    return (_prompt(state).done < len(cfg.stages)) & _committed(state)


def is_reviving(state: DecodeState, *, cfg: DecodeConfig) -> bool:
    """Whether a row that still runs lacks tokens that come back in the background."""
    if cfg.prefill is None or cfg.prefill.revive != "background":
        return False
    return bool(jnp.any(_behind(state, cfg) & state.running[:, None]))


def _made(state: DecodeState):
    return state.length - state.prompt_length


def revive_in_background(params: Params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
    """Where it is due, brings the first `revive_rows` tokens that lack stages through all."""
    lazy = cfg.prefill
    if lazy is None or lazy.revive != "background":
        return state
    stages = len(cfg.stages)
    due = choice_is_due(state, cfg)
    layers = range(cfg.stages[1].start, cfg.model.num_layers)

    def revive(changing, due):
        begun = _with(state, changing, layers)
        behind = _behind(begun, cfg) & due[:, None]
        first = behind & (jnp.cumsum(behind, axis=1, dtype=jnp.int32) <= lazy.revive_rows)
        for stage in range(1, stages):
            wanted = first & (_prompt(begun).done == stage)
            begun = _compute(
                params.model, begun, wanted, stage, lazy.revive_rows, in_order=False, cfg=cfg
            )
        return _changing(begun, layers)

    with jax.named_scope("revive_in_background"):
        lacking = jnp.any(_behind(state, cfg) & due[:, None])
        changed = run_if(lacking, revive, _changing(state, layers), due)
        return _with(state, changed, layers)


def run_choosing(
    weights: ModelWeights, state: DecodeState, tokens, positions, *, cfg: DecodeConfig
) -> tuple[DecodeState, Rows]:
    """One pass of the root, which chooses what it sees of the prompt and revives what is missing.

    tokens, positions: [B, 1] int32.
    """
    lazy = cfg.prefill
    assert lazy is not None
    due, itself = choice_is_due(state, cfg), jnp.ones((1, 1), bool)
    hidden, parts = embed(weights, tokens), []
    for stage, layers in enumerate(cfg.stages):
        if stage:
            state = _choose_and_revive(weights, state, stage, parts[-1], due, cfg)
        rows = run_layers(
            weights, state.kv, hidden, positions, itself, layers, cfg=cfg.model,
            ranks=_ranks(state, stage, jnp.full_like(tokens, HIDDEN)), with_attended=True,
        )  # fmt: skip
        hidden = rows.hidden
        parts.append(rows)
    joined = [sum((getattr(part, name) for part in parts), ()) for name in ("k", "v", "query")]
    return state, Rows(hidden, *joined, attended=sum((part.attended for part in parts), ()))


def _choose_and_revive(
    weights: ModelWeights, state: DecodeState, stage: int, rows: Rows, due, cfg: DecodeConfig
) -> DecodeState:
    """Chooses a stage's prompt tokens by the rows of the stage before; computes the missing."""
    lazy, layers = cfg.prefill, cfg.stages[stage]
    assert lazy is not None
    few = min(FEW_ROWS, lazy.revive_rows)

    def missing(begun):
        return _waiting(begun, stage) & _committed(begun) & due[:, None]

    def revive(begun, width: int, at_least: int):
        """Computes missing tokens, `width` at a time, while some row lacks `at_least`."""

        def some_left(changing):
            left = jnp.sum(missing(_with(begun, changing, layers)), axis=1, dtype=jnp.int32)
            return jnp.max(left) >= at_least

        def body(changing):
            inner = _with(begun, changing, layers)
            wanted = missing(inner)
            inner = _compute(weights, inner, wanted, stage, width, in_order=False, cfg=cfg)
            return _changing(inner, layers)

        return _with(begun, lax.while_loop(some_left, body, _changing(begun, layers)), layers)

    def choose(changing, attended):
        begun = _with(state, changing, layers)
        scores = _scores(begun, stage - 1, rows._replace(attended=attended), cfg)
        prompt = _prompt(begun)
        n = begun.prompt_length
        chosen = _chosen(prompt, stage, scores, n, n, lazy.recent, lazy)
        chosen = jnp.where(due[:, None], chosen, prompt.chosen[stage])
        begun = begun.replace(prompt=_take_part(prompt, stage, chosen, n))
        # Results do not depend on how many are computed at once, as each sees lower ones only.
        if few < lazy.revive_rows:
            begun = revive(begun, lazy.revive_rows, few + 1)
        begun = revive(begun, few, 1)
        return _changing(begun, layers)

    carry = _changing(state, layers)
    return _with(state, run_if(jnp.any(due), choose, carry, rows.attended), layers)


def note_committed(state: DecodeState, *, after, cfg: DecodeConfig) -> PromptState | None:
    """With the positions of the rows that a step writes, before lengths have grown.

    `after` is computed from all that was read, see `write_rows`.
    """
    prompt = state.prompt
    if prompt is None:
        return None
    positions = state.kv.length[:, None] + jnp.arange(cfg.draft_depth + 1, dtype=jnp.int32)
    of_prompt = positions < state.prompt_length[:, None]  # its last token, in the first step
    positions = positions + zero_after(after)
    for stage in range(1, len(cfg.stages)):
        prompt = _noted(prompt, state, stage, positions, of_prompt, cfg)
    return prompt


# --- one stage -----------------------------------------------------------------------------------


def _compute(
    weights: ModelWeights,
    state: DecodeState,
    wanted,
    stage: int,
    width: int,
    *,
    in_order: bool,
    cfg: DecodeConfig,
) -> DecodeState:
    """Computes the first `width` prompt tokens of `wanted` [B, P] in a stage.

    A token sees those before it that the stage has and that take part. `in_order`: these are all
    that it has.
    """
    prompt = _prompt(state)
    ids, count = _first(wanted, width)
    safe = jnp.minimum(ids, prompt.capacity - 1)
    if stage == 0:
        hidden = embed(weights, jnp.take_along_axis(state.tokens, safe, axis=1))
    else:
        hidden = jnp.take_along_axis(prompt.hidden, safe[..., None], axis=1)
    ranks = None if in_order else _ranks(state, stage, ids)
    index = jnp.arange(width, dtype=jnp.int32)
    causal = index[:, None] >= index
    rows = run_layers(
        weights, state.kv, hidden, safe, causal, cfg.stages[stage], cfg=cfg.model, ranks=ranks
    )
    return _append(state, stage, rows, ids, count, cfg, after=rows.hidden)


def _append(
    state: DecodeState, stage: int, rows: Rows, ids, count, cfg: DecodeConfig, *, after
) -> DecodeState:
    """Adds the first `count` [B] of rows for the prompt tokens `ids` [B, T] to a stage.

    `after` is computed from all that was read, see `write_rows`.
    """
    layers, prompt, stages = cfg.stages[stage], _prompt(state), len(cfg.stages)
    kv = write_rows(state.kv, rows.k, rows.v, state.kv.length, after=after, layers=layers)
    assert kv.absent is not None
    b = jnp.arange(ids.shape[0])[:, None]
    is_new = jnp.arange(ids.shape[1]) < count[:, None]
    target = jnp.where(is_new, ids, prompt.capacity)  # out of bounds: dropped
    hidden = prompt.hidden
    if stage:
        # As the caches, it is written when all is read, or else XLA copies it.
        prompt = _noted(prompt, state, stage, ids + zero_after(after), is_new, cfg)
    if stage < stages - 1:
        hidden = hidden.at[b, target].set(rows.hidden, mode="drop")
    return state.replace(
        kv=kv.replace(absent=kv.absent.at[layers.start : layers.stop].add(-count)),
        prompt=prompt.replace(
            hidden=hidden,
            done=prompt.done.at[b, target].set(jnp.int8(stage + 1), mode="drop"),
            computed=prompt.computed.at[stage, b, target].add(jnp.int8(1), mode="drop"),
        ),
    )


def _noted(
    prompt: PromptState, state: DecodeState, stage: int, positions, of_prompt, cfg: DecodeConfig
) -> PromptState:
    """With tokens [B, T] behind the rows that a stage has, some of them `of_prompt` [B, T].

    What stands beyond the rows is unspecified, so all T may be written.
    """
    b, index = jnp.arange(positions.shape[0])[:, None], stage - 1
    slots = state.kv.rows_in(cfg.stages[stage].start)[:, None]
    slots = slots + jnp.arange(positions.shape[1], dtype=jnp.int32)
    order = prompt.order[index].at[b, slots].set(positions, mode="drop")
    target = jnp.where(of_prompt, positions, prompt.capacity)  # out of bounds: dropped
    slots = prompt.slots[index].at[b, target].set(slots, mode="drop")
    return prompt.replace(
        order=_replaced(prompt.order, index, order), slots=_replaced(prompt.slots, index, slots)
    )


def _take_part(prompt: PromptState, stage: int, chosen, prompt_length) -> PromptState:
    """With other tokens chosen [B, P], and all that the stage has of others hidden."""
    position, index = jnp.arange(prompt.capacity, dtype=jnp.int32), stage - 1
    order = prompt.order[index]
    slots = jnp.where(position < prompt_length[:, None], prompt.slots[index], order.shape[1])
    order = order.at[jnp.arange(order.shape[0])[:, None], slots].set(
        jnp.where(chosen, position, HIDDEN), mode="drop"
    )
    return prompt.replace(
        chosen=_replaced(prompt.chosen, stage, chosen),
        order=_replaced(prompt.order, index, order),
    )


def _replaced(arrays: tuple[jax.Array, ...], index: int, array) -> tuple[jax.Array, ...]:
    return (*arrays[:index], array, *arrays[index + 1 :])


def _waiting(state: DecodeState, stage: int):
    """[B, P] bool: prompt tokens that are to take part in a stage and come next in it."""
    prompt = _prompt(state)
    return prompt.chosen[stage] & (prompt.done == stage)


def _before_window(state: DecodeState, stage: int, cfg: DecodeConfig):
    """[B, P] bool: what `fill_stage` computes; the last stage has no `choose_stage` behind it."""
    lazy = cfg.prefill
    assert lazy is not None
    last = 1 if stage == len(cfg.stages) - 1 else lazy.window
    return jnp.arange(_prompt(state).capacity) < state.prompt_length[:, None] - last


def _committed(state: DecodeState):
    """[B, P] bool: prompt tokens that steps have not left to come."""
    length = jnp.minimum(state.prompt_length, state.kv.length)
    return jnp.arange(_prompt(state).capacity) < length[:, None]


def _ranks(state: DecodeState, stage: int, below) -> Ranks | None:
    """Lets rows see the tokens of a stage that take part and lie before `below` [B, T]."""
    return Ranks(_prompt(state).order[stage - 1], below) if stage else None


def _prompt(state: DecodeState) -> PromptState:
    assert state.prompt is not None
    return state.prompt


def _changing(state: DecodeState, layers: range):
    """What a revival in `layers` changes, to carry through a loop and nothing else."""
    k, v = (tuple(buffers[layer] for layer in layers) for buffers in (state.kv.k, state.kv.v))
    return k, v, state.kv.absent, state.prompt


def _with(state: DecodeState, changing, layers: range) -> DecodeState:
    k, v, absent, prompt = changing
    before, behind = slice(layers.start), slice(layers.stop, None)
    kv = state.kv
    kv = kv.replace(
        k=kv.k[before] + k + kv.k[behind], v=kv.v[before] + v + kv.v[behind], absent=absent
    )
    return state.replace(kv=kv, prompt=prompt)


# --- scores and choices ----------------------------------------------------------------------


def _scores(state: DecodeState, stage: int, rows: Rows, cfg: DecodeConfig):
    """[B, P]: the attention that each prompt token gets from rows in a stage's last layers.

    The mean over query heads, with all that a row sees in the denominator; sums over the rows and
    over `score_layers` layers.
    """
    lazy, prompt = cfg.prefill, _prompt(state)
    assert lazy is not None
    B, P = prompt.done.shape
    if lazy.scores == "random":
        return jnp.broadcast_to(uniform(lazy.seed, P), (B, P))
    layers = cfg.stages[stage]
    total = jnp.zeros((), jnp.float32)
    for layer, attended in list(zip(layers, rows.attended, strict=True))[-lazy.score_layers :]:
        query, (_, log_totals) = attended
        for row in range(query.shape[1]):
            total = total + cache_scores(
                query[:, row], state.kv.k[layer], state.kv.rows_in(layer), "softmax",
                log_totals=log_totals[:, row],
            )  # fmt: skip
    if stage == 0:
        by_position = total[:, :P]
    else:
        slots = prompt.slots[stage - 1]
        found = jnp.take_along_axis(total, jnp.minimum(slots, total.shape[1] - 1), axis=1)
        by_position = jnp.where(slots < total.shape[1], found, 0)
    return by_position


def _scores_of_each_other(rows: Rows, causal, cfg: DecodeConfig):
    """[B, W]: what rows add to the scores of one another, which no cache holds yet."""
    lazy, model = cfg.prefill, cfg.model
    assert lazy is not None
    total = jnp.zeros((), jnp.float32)
    for keys, attended in list(zip(rows.k, rows.attended, strict=True))[-lazy.score_layers :]:
        query, (_, log_totals) = attended
        B, W, N, H = query.shape
        shape = (B, W, model.num_kv_heads, model.group_size)
        products = jnp.einsum(
            "bwkgh,bukh->bwukg", query.reshape(*shape, H), keys,
            preferred_element_type=log_totals.dtype,
        )  # fmt: skip
        weights = jnp.exp(products * H**-0.5 - log_totals.reshape(shape)[:, :, None])
        total = total + jnp.where(causal, jnp.sum(weights, axis=(3, 4)) / N, 0).sum(axis=1)
    return total


def _chosen(
    prompt: PromptState,
    stage: int,
    scores,
    prompt_length,
    committed,
    recent: int,
    lazy: LazyPrefill,
):
    """[B, P] bool: the prompt tokens that take part in a stage, by the scores of the one before.

    Of prompt_length [B] tokens, kept(share) are chosen among the first `committed` [B]; those
    beyond, of which the prompt's last token may be one, take part anyway.
    """
    position = jnp.arange(prompt.capacity)
    is_committed = position < committed[:, None]
    candidates = prompt.chosen[stage - 1] & is_committed
    if lazy.pool > 1:
        takes_part = prompt.chosen[stage - 1] & (position < prompt_length[:, None])
        scores = lax.reduce_window(
            jnp.where(takes_part, scores, 0), 0.0, lax.max, (1, lazy.pool), (1, 1), "SAME"
        )
    always = (position < lazy.sinks) | (position >= prompt_length[:, None] - recent)
    always &= candidates
    count = kept(lazy.cuts[stage - 1][1], prompt_length) - (prompt_length - committed)
    count = jnp.maximum(count, jnp.sum(always, axis=1, dtype=jnp.int32))
    best = best_tokens(jnp.where(always, jnp.inf, scores), candidates, count)
    return best | ~is_committed


def best_tokens(scores, candidates, count):
    """[B, P] bool: of the candidates, the `count` [B] with the highest scores; ties by position.

    Exact whatever P is. Scores are not negative, so they are ordered as their bits are: the lowest
    score that is taken is found bit by bit.
    """
    signed = {4: jnp.int32, 8: jnp.int64}[scores.dtype.itemsize]
    bits = lax.bitcast_convert_type(scores, signed)
    bits = jnp.where(candidates, bits, -1)

    def add_bit(index, lowest):
        trial = lowest | (jnp.ones((), signed) << (8 * scores.dtype.itemsize - 2 - index))
        enough = jnp.sum(bits >= trial[:, None], axis=1, dtype=jnp.int32) >= count
        return jnp.where(enough, trial, lowest)

    nothing = jnp.zeros(scores.shape[:1], signed)
    lowest = lax.fori_loop(0, 8 * scores.dtype.itemsize - 1, add_bit, nothing)[:, None]
    above, equal = bits > lowest, bits == lowest
    room = count[:, None] - jnp.sum(above, axis=1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, axis=1, dtype=jnp.int32) <= room))


def _first(wanted, count: int):
    """The positions [B, count] of the first `count` of `wanted` [B, P], and how many there are.

    Behind the last one there is P.
    """
    B, P = wanted.shape
    rank = jnp.cumsum(wanted, axis=1, dtype=jnp.int32) - 1
    target = jnp.where(wanted, rank, count)  # out of bounds: dropped
    positions = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P))
    ids = jnp.full((B, count), P, jnp.int32)
    ids = ids.at[jnp.arange(B)[:, None], target].set(positions, mode="drop")
    return ids, jnp.minimum(rank[:, -1] + 1, count)

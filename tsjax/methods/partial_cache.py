# SPDX-License-Identifier: Apache-2.0
"""The partial cache: keys and values of the few tokens that drafting passes see.

Knows arrays and lengths, no model. How it is kept is one rule, that of DraftCache; which tokens are
worth most, the scores say that a caller hands over (draft_choice.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from pallas_kernels import NarrowRows, Summary, best_slots, cache_scores, tree_attention, widened
from pallas_kernels.best_slots.xla import firsts_above
from pallas_kernels.threshold.xla import last_by_digits
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Bool, DTypeLike, Float, Int, accumulation_dtype
from tsjax.decoding.sampling import sortable
from tsjax.model.cache import Attended, Cache, KVCache, empty_buffers
from tsjax.model.control_flow import run_if
from tsjax.model.parts import (
    counts_by_part,
    for_each_part,
    in_order,
    positions_by_part,
    taken_by_part,
)
from tsjax.model.writing import for_each_row, scattered

# Of each layer; -inf where there is no key. Of a cache that is dealt out, as its rows are.
Scores = tuple[Float[Array, "R K S"], ...]
Slots = tuple[Int[Array, "B K count"], ...]
NOTHING = -1e30  # the logarithm of the total weight of no slots, but finite


class DraftCache(Cache):
    """Keys and values of the few tokens that a draft pass may see, chosen per layer and kv head.

    The rule. While all committed tokens fit, they are all here. When new ones no longer fit, the
    first `num_sinks` tokens and those with the highest scores are chosen, best first; by default a
    score is the importance, the product of a key with `query`. From then on new tokens overwrite
    the ones with the least scores, from the end towards the beginning; when they would reach the
    sinks, or be more than `most_new`, all are chosen again, or, where tokens are chosen `once`, the
    overwriting begins at the end again.

    Where layers of the whole cache lack tokens, the rule is each layer's, with the tokens that the
    whole one has of it; while all of these are here, those that come back are new ones too. But
    where one layer is chosen, all are, and in those that lack some here, new tokens go to the same
    slots.

    Attributes:
      k, v: the passes of a step keep the rows of its drafts in slots at `length` and beyond.
      query: of each layer, the queries of the last committed token, summed over the query heads
        that share a kv head; zero before there is one.
      newest: once not all tokens are here, slots at newest .. length hold those since the last
        choice; before that, `length`.
      seen: the length of the whole cache when this one was last brought up to date.
      absent: that of the whole cache at the same time; None where no layer lacks any. `length` is
        then of a layer with all tokens.
      attended: one entry per layer, that of the last committed token, whose attention to all of
        them says what the tokens that are not here amount to; () where they are left out.
      room: slots that committed tokens never take.
    """

    k: tuple[Float[Array, "B K slots H"], ...]  # never narrow
    v: tuple[Float[Array, "B K slots H"], ...]
    query: tuple[Float[Array, "B K H"], ...]
    newest: Int[Array, "B"]
    seen: Int[Array, "B"]
    absent: Int[Array, "L B"] | None = None
    attended: tuple[Attended, ...] = ()
    room: int = flax.struct.field(pytree_node=False, default=0)

    @property
    def capacity(self) -> int:
        """M, the committed tokens that fit."""
        return self.k[0].shape[2] - self.room

    def rows_in(self, layer: int) -> Int[Array, "B"]:
        if self.absent is None:
            return self.length
        held, most = (
            jnp.minimum(tokens, self.capacity)
            for tokens in (self.seen - self.absent[layer], self.seen)
        )
        return self.length + (held - most)

    def with_absent(self) -> DraftCache:
        """The same, still empty, for a whole cache whose layers lack tokens."""
        return self.replace(absent=jnp.zeros((len(self.k), *self.seen.shape), jnp.int32))


def init_draft_cache(
    cfg: ModelConfig,
    batch: int,
    capacity: int,
    room: int = 0,
    mesh: Mesh | None = None,
    with_rest: bool = False,
) -> DraftCache:
    """An empty draft cache for `capacity` committed tokens and `room` drafts per row."""
    query = (batch, cfg.num_kv_heads, cfg.head_dim)

    def nothing_attended():
        heads, wide = (batch, cfg.num_heads), accumulation_dtype(cfg.dtype)
        query, mean = (jnp.zeros((*heads, cfg.head_dim), cfg.dtype) for _ in range(2))
        return Attended(query, Summary(mean, jnp.full(heads, NOTHING, wide)))

    return DraftCache(
        k=empty_buffers(cfg, batch, capacity + room, mesh),
        v=empty_buffers(cfg, batch, capacity + room, mesh),
        room=room,
        query=tuple(jnp.zeros(query, cfg.dtype) for _ in range(cfg.num_layers)),
        length=jnp.zeros((batch,), jnp.int32),
        newest=jnp.zeros((batch,), jnp.int32),
        seen=jnp.zeros((batch,), jnp.int32),
        attended=tuple(nothing_attended() for _ in range(cfg.num_layers if with_rest else 0)),
    )


def refresh_draft_cache(
    draft: DraftCache,
    kv: KVCache,
    *,
    num_sinks: int,
    max_rows: int,
    most_new: int | None = None,
    once: bool = False,
    score: Callable[[Any, KVCache], Scores] | None = None,
    asks: Any = None,
) -> DraftCache:
    """Brings `draft` up to date with the committed tokens of `kv`, by the rule of DraftCache.

    `max_rows` is the most that one step commits; more new tokens than that at once, or more than
    `most_new` since the last choice, are a reason to choose again. `kv` has to have room for
    `max_rows` rows after `draft.seen`. Where all are chosen, score(asks, kv) says what each is
    worth; by default importance to `draft.query`. It has to compute from these two: what it takes
    from elsewhere alone would be computed in each step.
    """
    if score is None:
        score, asks = importance, draft.query
    max_rows = min(max_rows, draft.capacity)
    new = kv.length - draft.seen  # [B]
    back = draft.newest - new  # the slots where new tokens overwrite others
    lowest = num_sinks if most_new is None else max(num_sinks, draft.capacity - most_new)
    if once:
        back = jnp.where(back < lowest, draft.capacity - new, back)

    def slide_of(
        held: Int[Array, "B"], has_all: Bool[Array, "B"], committed: Int[Array, "B"]
    ) -> tuple[Slide, Bool[Array, "B"]]:
        """How a layer's new tokens come in, and whether they can."""
        count = jnp.where(has_all, committed - held, new)
        to = jnp.where(has_all, held, back)
        fits = jnp.where(has_all, to + count <= draft.capacity, to >= lowest)
        newest_first = ~has_all if once else None  # so that the oldest are overwritten first
        return Slide(to, committed - count, count, newest_first), fits & (count <= max_rows)

    layers, absent = range(len(kv.k)), draft.absent
    if kv.absent is None:
        has_all = draft.length == draft.seen
        slide, fits = slide_of(draft.length, has_all, kv.length)
        slides = [slide for _ in layers]
    else:
        assert absent is not None, "made for a whole cache that lacks nothing: see `with_absent`"
        held, committed = draft.seen[None] - absent, kv.length[None] - kv.absent  # [L, B]
        has_all = held <= draft.capacity
        slide, fits = jax.vmap(slide_of)(jnp.minimum(held, draft.capacity), has_all, committed)
        slides = [jax.tree.map(lambda x, layer=layer: x[layer], slide) for layer in layers]
        has_all, fits = (jnp.all(x, axis=0) for x in (has_all, fits))
        absent = jnp.where((new > 0)[None], kv.absent, absent)
    can_slide = (new > 0) & fits
    chooses = (new > 0) & ~fits
    length = jnp.minimum(kv.length, draft.capacity)
    with jax.named_scope("refresh_draft_cache"):
        draft = draft.replace(
            k=_slid(draft.k, kv.k, slides, can_slide, max_rows, kv.parts),
            v=_slid(draft.v, kv.v, slides, can_slide, max_rows, kv.parts),
            length=length,
            newest=jnp.where(can_slide, jnp.where(has_all, length, back), draft.newest),
            seen=kv.length,
            absent=absent,
        )
        return run_if(
            jnp.any(chooses),
            lambda draft, asks, length: _choose(
                draft, score(asks, kv.replace(length=length)), kv, chooses, num_sinks
            ),
            draft,
            asks,
            kv.length,
        )


def importance(query: tuple[Float[Array, "B K H"], ...], kv: KVCache) -> Scores:
    """Of each layer, the product of its query with each committed key."""
    query = tuple(for_each_part(one, kv.parts) for one in query)
    rows_in = [counts_by_part(kv.rows_in(layer), kv.parts) for layer in range(len(query))]
    return tuple(map(cache_scores, query, kv.k, rows_in))


def summarize_rest(draft: DraftCache) -> tuple[Summary, ...]:
    """What is committed but not in an up-to-date draft cache, as one slot per layer and query head.

    As the last committed token saw it: its attention to all tokens, less that to those here. The
    queries that follow are much like its own.
    """
    (B, K, _, H), itself_unseen = draft.k[0].shape, jnp.zeros((1, 1), bool)

    @jax.jit  # traced once for all layers
    def rest_of(k, v, held, attended: Attended) -> Summary:
        query, (mean, log_total) = attended
        none = jnp.zeros((B, 1, K, H), query.dtype)
        here = tree_attention(
            query[:, None], k, v, held, none, none, itself_unseen, with_log_totals=True
        )
        mean_here, log_total_here = (x[:, 0].astype(log_total.dtype) for x in here)
        share_here = jnp.exp(jnp.minimum(log_total_here - log_total, 0))
        share = 1 - share_here
        # Of less than that, rounding leaves nothing sure.
        is_some = share > 4 * float(jnp.finfo(query.dtype).eps)
        share = jnp.where(is_some, share, 1)
        elsewhere = (mean.astype(share.dtype) - share_here[..., None] * mean_here) / share[
            ..., None
        ]
        return Summary(
            jnp.where(is_some[..., None], elsewhere, 0).astype(query.dtype),
            jnp.where(is_some, log_total + jnp.log(share), NOTHING),
        )

    with jax.named_scope("summarize_rest"):
        held = map(draft.rows_in, range(len(draft.attended)))
        return tuple(map(rest_of, draft.k, draft.v, held, draft.attended))


class Slide(NamedTuple):
    """How the new tokens of a layer come into a draft cache.

    Attributes:
      to: the slot of the first one.
      first: its slot in the whole cache; the others follow it there.
      count: how many they are.
      newest_first: whether the last one comes first; None for never.
    """

    to: Int[Array, "B"]
    first: Int[Array, "B"]
    count: Int[Array, "B"]
    newest_first: Bool[Array, "B"] | None


def _slid(
    buffers: tuple[Float[Array, "B K slots H"], ...],
    committed: tuple[Float[Array, "R K S H"] | NarrowRows, ...],
    slides: Sequence[Slide],
    rows: Bool[Array, "B"],
    max_rows: int,
    parts: int,
) -> tuple[Float[Array, "B K slots H"], ...]:
    """Each layer's `buffers` after its slide in the batch rows `rows`, where none is of more than
    `max_rows` tokens."""
    zero = jnp.int32(0)
    index = jnp.arange(max_rows, dtype=jnp.int32)

    @jax.jit  # traced once for all layers
    def write(buffer, source, slide: Slide):
        B, K, M, H = buffer.shape
        to, start, count, newest_first = slide
        # A window of fixed size that holds the slots; the others in it are written as they were.
        first = jnp.clip(to, 0, M - max_rows)
        wanted = index[None] - (to - first)[:, None]  # [B, max_rows]
        fresh = (wanted >= 0) & (wanted < count[:, None]) & rows[:, None]
        if newest_first is not None:
            wanted = jnp.where(newest_first[:, None], count[:, None] - 1 - wanted, wanted)
        if parts > 1:
            tokens = jnp.broadcast_to((start[:, None] + index[None])[:, None], (B, K, max_rows))
            source = jax.tree.map(lambda x: taken_by_part(x, tokens, parts=parts), source)
            start = jnp.zeros_like(start)

        def one(b, buffer):
            old = lax.dynamic_slice(buffer, (b, zero, first[b], zero), (1, K, max_rows, H))

            def window(x):
                return lax.dynamic_slice(x, (b, zero, start[b], zero), (1, K, max_rows, x.shape[3]))

            new = widened(jax.tree.map(window, source), buffer.dtype)
            moved = jnp.take(new, jnp.clip(wanted[b], 0, max_rows - 1), axis=2)
            rows = jnp.where(fresh[b][None, None, :, None], moved, old)
            return lax.dynamic_update_slice(buffer, rows, (b, zero, first[b], zero))

        def at_once(buffer, source):
            tokens = start[:, None] + jnp.clip(wanted, 0, max_rows - 1)
            new = _taken(source, tokens[:, None], buffer.dtype)
            return scattered(buffer, new, index[None] + jnp.where(fresh, first[:, None], M))

        return for_each_row(one, at_once, buffer, source)

    return tuple(map(write, buffers, committed, slides))


def _choose(
    draft: DraftCache, scores: Scores, kv: KVCache, rows: Bool[Array, "B"], num_sinks: int
) -> DraftCache:
    """Fills the draft caches of the batch rows `rows` with the tokens of the highest scores."""
    sizes = {"count": draft.capacity, "num_sinks": num_sinks}
    if kv.parts > 1:
        chosen_slots = important_tokens(scores, kv.length, parts=kv.parts, **sizes)
    else:
        chosen_slots = important_slots(scores, kv.length, **sizes)

    def gathered(old, whole, slots):
        if kv.parts > 1:
            chosen = jax.tree.map(lambda x: taken_by_part(x, slots, parts=kv.parts), whole)
            chosen = widened(chosen, old.dtype)
        else:
            chosen = _taken(whole, slots, old.dtype)
        chosen = jnp.where(rows[:, None, None, None], chosen, old[:, :, : draft.capacity])
        return lax.dynamic_update_slice_in_dim(old, chosen, 0, axis=2)

    return draft.replace(
        k=tuple(map(gathered, draft.k, kv.k, chosen_slots)),
        v=tuple(map(gathered, draft.v, kv.v, chosen_slots)),
        newest=jnp.where(rows, draft.length, draft.newest),
    )


def _taken(
    whole: Float[Array, "B K S H"] | NarrowRows,
    slots: Int[Array, "B heads count"],
    dtype: DTypeLike,
) -> Float[Array, "B K count H"]:
    """The rows in these slots, of each head its own or the same of all."""

    def taken(x):
        return jnp.take_along_axis(x, slots[..., None], axis=2, mode="clip")

    return widened(jax.tree.map(taken, whole), dtype)


def important_slots(
    scores: Scores, length: Int[Array, "B"], *, count: int, num_sinks: int
) -> Slots:
    """The sinks and then the slots with the highest scores, best first; equal ones by position.

    If a row has fewer than `count` keys, the rest is unspecified. `length` is at least the number
    of keys in a row.
    """
    sizes = {"count": count, "num_sinks": num_sinks}
    return lax.platform_dependent(
        scores,
        length,
        cpu=functools.partial(slots_by_layer, **sizes),
        default=functools.partial(slots_at_once, **sizes),
    )


def important_tokens(
    scores: Scores, length: Int[Array, "B"], *, count: int, num_sinks: int, parts: int
) -> Slots:
    """As `important_slots`, of a cache that is dealt out: each part names its best tokens, and of
    these the best are chosen."""
    rows, _, S = scores[0].shape
    here, most = positions_by_part(rows, S, parts)[:, None], min(count, S)
    scores = tuple(firsts_above(one, here, num_sinks) for one in scores)
    there = counts_by_part(length, parts)
    slots = important_slots(scores, there, count=most, num_sinks=0)
    # Where a part has fewer tokens, the rest of what it names is nothing.
    named = (jnp.arange(most, dtype=jnp.int32)[None] < there[:, None])[:, None]

    @jax.jit  # traced once for all layers
    def of_all(scores, slots):
        best = jnp.take_along_axis(scores, slots, axis=2, mode="clip")
        best = jnp.where(named, best, -jnp.inf)
        places = jnp.broadcast_to(here, scores.shape)
        places = jnp.take_along_axis(places, slots, axis=2, mode="clip")
        # The parts' candidates side by side, the highest first and equal ones by position.
        order, places = (in_order(x, parts) for x in (~sortable(best), places))
        return lax.sort((order, places), num_keys=2)[1][..., :count]

    return tuple(map(of_all, scores, slots))


def slots_by_layer(scores: Scores, length: Int[Array, "B"], *, count: int, num_sinks: int) -> Slots:
    """As `important_slots`, at a cost that follows `length`."""
    return tuple(best_slots(one, length, count=count, first=num_sinks) for one in scores)


def slots_at_once(scores: Scores, length: Int[Array, "B"], *, count: int, num_sinks: int) -> Slots:
    """As `important_slots`, for all layers together and without a loop: as a GPU wants it.

    A threshold tells which slots there are, and only these are sorted.
    """
    every = jnp.stack(scores)  # [L, B, K, S]
    S = every.shape[-1]
    here = jnp.arange(S, dtype=jnp.int32)[None, None, None]
    keys = sortable(firsts_above(every, here, num_sinks))

    def upto(mask: Bool[Array, "..."]) -> Int[Array, "..."]:
        return jnp.cumsum(mask, axis=-1, dtype=jnp.int32)

    # The largest threshold that `count` keys reach.
    lowest = last_by_digits(
        lambda threshold: (keys >= threshold).astype(jnp.int32),
        lambda n: n >= count,
        keys,
        digit=4,
        unroll=True,
    )
    above, level = keys > lowest, keys == lowest
    # Of those on a level, the first ones.
    missing = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    # The i-th of them lies where their number reaches i + 1.
    reached = upto(above) + jnp.minimum(upto(level), missing)
    slots = _first_to_reach(reached, count)
    order = ~jnp.take_along_axis(keys, slots, axis=-1, mode="clip")
    _, slots = lax.sort((order, slots), num_keys=1, is_stable=True)
    return tuple(slots)


def _first_to_reach(reached: Int[Array, "*rows S"], count: int) -> Int[Array, "*rows {count}"]:
    """For 1, 2, ... `count` the first index at which an ascending row is as large."""
    wanted = jnp.arange(1, count + 1, dtype=jnp.int32)
    wanted = lax.broadcast_in_dim(wanted, (*reached.shape[:-1], count), (reached.ndim - 1,))
    below, step = jnp.zeros_like(wanted), 1 << (reached.shape[-1].bit_length() - 1)
    while step:  # `below` indices, the first ones, are known to be smaller
        at = jnp.minimum(below + step, reached.shape[-1]) - 1
        smaller = jnp.take_along_axis(reached, at, axis=-1, mode="clip") < wanted
        below = jnp.where(smaller, at + 1, below)
        step //= 2
    return jnp.minimum(below, reached.shape[-1] - 1)

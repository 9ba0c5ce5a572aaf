# SPDX-License-Identifier: Apache-2.0
"""The preallocated key/value caches: the whole one, and the small one for drafts.

Knows arrays and lengths, no model. The whole cache is written in one way only: T consecutive rows
per batch row, at any start. Nothing is ever shifted or compacted inside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from pallas_kernels import Summary, cache_scores, tree_attention
from tsjax.config import ModelConfig
from tsjax.model.control_flow import run_if
from tsjax.model.sharding import named_sharding
from tsjax.typing import Array, Bool, Float, Int, Shaped, accumulation_dtype

SELECT_BLOCK = 16384  # scores that are looked at together when the important ones are chosen
NOTHING = -1e30  # the logarithm of the total weight of no slots, but finite
CACHE_AXES = ("batch", "kv_heads", "slots", "head_dim")


class KVCache(flax.struct.PyTreeNode):
    """Keys and values of the committed tokens.

    Attributes:
      k, v: one array per layer. Slots at `length` and beyond are unspecified and are never read.
      length: committed tokens of each row.
      absent: how many of them are not in a layer; None where all are in all. The rows of a layer
        are then its first ones, in the order in which they were computed. In the description
        above, `length` is that of the layer.
    """

    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]
    length: Int[Array, "B"]
    absent: Int[Array, "L B"] | None = None

    @property
    def capacity(self) -> int:
        return self.k[0].shape[2]

    def rows_in(self, layer: int) -> Int[Array, "B"]:
        """The rows of each layer that count: where the next one goes."""
        return self.length if self.absent is None else self.length - self.absent[layer]

    @property
    def fewest_rows(self) -> Int[Array, "B"]:
        """The rows that every layer has."""
        return self.length if self.absent is None else self.length - jnp.max(self.absent, axis=0)


class Attended(NamedTuple):
    """One layer's attention of a token: its queries, and the summary of all that they saw."""

    query: Float[Array, "B N H"]
    summary: Summary


class DraftCache(flax.struct.PyTreeNode):
    """Keys and values of the few tokens that a draft pass may see, chosen per layer and kv head.

    The rule. While all committed tokens fit, they are all here. When new ones no longer fit, or
    where the whole cache lacks tokens of some layer, the first `num_sinks` tokens and those with
    the highest importance are chosen, best first.
    Importance is the product of a key with `query`. From then on new tokens overwrite the least
    important ones, from the end towards the beginning; when they would reach the sinks, or be more
    than `most_new`, all are chosen again.

    Attributes:
      k, v: one array per layer. Slots at `length` and beyond are unspecified; the passes of a step
        keep the rows of its drafts there.
      query: of each layer, the queries of the last committed token, summed over the query heads
        that share a kv head; zero before there is one.
      length: slots in use.
      newest: once not all tokens are here, slots at newest .. length hold those since the last
        choice; before that, `length`.
      seen: the length of the whole cache when this one was last brought up to date.
      attended: one entry per layer, that of the last committed token, whose attention to all of
        them says what the tokens that are not here amount to; () where they are left out.
      room: slots that committed tokens never take.
    """

    k: tuple[Float[Array, "B K M+room H"], ...]
    v: tuple[Float[Array, "B K M+room H"], ...]
    query: tuple[Float[Array, "B K H"], ...]
    length: Int[Array, "B"]
    newest: Int[Array, "B"]
    seen: Int[Array, "B"]
    attended: tuple[Attended, ...] = ()
    room: int = flax.struct.field(pytree_node=False, default=0)

    @property
    def capacity(self) -> int:
        """M, the committed tokens that fit."""
        return self.k[0].shape[2] - self.room

    def rows_in(self, layer: int) -> Int[Array, "B"]:
        """As of a KVCache: the same in each layer."""
        return self.length


AnyCache = TypeVar("AnyCache", KVCache, DraftCache)


def init_cache(cfg: ModelConfig, batch: int, capacity: int, mesh: Mesh | None = None) -> KVCache:
    """An empty cache of `capacity` slots per row in the model's type."""
    return KVCache(
        k=_buffers(cfg, batch, capacity, mesh),
        v=_buffers(cfg, batch, capacity, mesh),
        length=jnp.zeros((batch,), jnp.int32),
    )


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
        k=_buffers(cfg, batch, capacity + room, mesh),
        v=_buffers(cfg, batch, capacity + room, mesh),
        room=room,
        query=tuple(jnp.zeros(query, cfg.dtype) for _ in range(cfg.num_layers)),
        length=jnp.zeros((batch,), jnp.int32),
        newest=jnp.zeros((batch,), jnp.int32),
        seen=jnp.zeros((batch,), jnp.int32),
        attended=tuple(nothing_attended() for _ in range(cfg.num_layers if with_rest else 0)),
    )


def _buffers(
    cfg: ModelConfig, batch: int, capacity: int, mesh: Mesh | None
) -> tuple[Float[Array, "{batch} K {capacity} H"], ...]:
    shape = (batch, cfg.num_kv_heads, capacity, cfg.head_dim)
    sharding = named_sharding(shape, CACHE_AXES, mesh) if mesh is not None else None
    return tuple(jnp.zeros(shape, cfg.dtype, device=sharding) for _ in range(cfg.num_layers))


def cache_bytes(cfg: ModelConfig, batch: int, capacity: int, mesh: Mesh | None = None) -> int:
    """Bytes of the buffers of `init_cache` or `init_draft_cache`, on each device."""
    shape = (batch, cfg.num_kv_heads, capacity, cfg.head_dim)
    if mesh is not None:
        shape = named_sharding(shape, CACHE_AXES, mesh).shard_shape(shape)
    return 2 * cfg.num_layers * math.prod(shape) * jnp.dtype(cfg.dtype).itemsize


def write_rows(
    cache: AnyCache,
    k_rows: Sequence[Float[Array, "B T K H"]],
    v_rows: Sequence[Float[Array, "B T K H"]],
    start: Int[Array, "B"],
    *,
    after: Shaped[Array, "..."],
    layers: range | None = None,
) -> AnyCache:
    """Writes rows of `layers`, by default all, as tokens start[b] .. start[b] + T.

    Of a layer that lacks tokens, `start` counts these too. Lengths stay. The caller guarantees
    start + T <= capacity: beyond it XLA would clamp the start and overwrite committed slots.

    `after` is any array computed from all reads of this cache. Without a data dependency XLA may
    place the write before a read that does not see it, and then copies the whole cache to stay
    correct; with it the write is in place.
    """
    start = start + zero_after(after)
    zero = jnp.int32(0)

    def write(buffer, rows, slot):
        rows = jnp.swapaxes(rows, 1, 2).astype(buffer.dtype)  # [B, K, T, H]

        def one(b, buffer):
            row = lax.dynamic_slice_in_dim(rows, b, 1, axis=0)
            return lax.dynamic_update_slice(buffer, row, (b, zero, slot[b], zero))

        return _for_each_row(one, buffer)

    with jax.named_scope("write_rows"):
        k, v = list(cache.k), list(cache.v)
        for index, layer in enumerate(range(len(k)) if layers is None else layers):
            slot = start + (cache.rows_in(layer) - cache.length)
            k[layer] = write(k[layer], k_rows[index], slot)
            v[layer] = write(v[layer], v_rows[index], slot)
        return cache.replace(k=tuple(k), v=tuple(v))


def refresh_draft_cache(
    draft: DraftCache, kv: KVCache, *, num_sinks: int, max_rows: int, most_new: int | None = None
) -> DraftCache:
    """Brings `draft` up to date with the committed tokens of `kv`, by the rule of DraftCache.

    `max_rows` is the most that one step commits; more new tokens than that at once, or more than
    `most_new` since the last choice, are a reason to choose again. `kv` has to have room for
    `max_rows` rows behind `draft.seen`.
    """
    max_rows = min(max_rows, draft.capacity)
    new = kv.length - draft.seen  # [B]
    has_all = (draft.length == draft.seen) & (kv.fewest_rows == kv.length)
    to = jnp.where(has_all, draft.length, draft.newest - new)  # the slots of the new tokens
    lowest = num_sinks if most_new is None else max(num_sinks, draft.capacity - most_new)
    fits = jnp.where(has_all, to + new <= draft.capacity, to >= lowest)
    slides = (new > 0) & (new <= max_rows) & fits
    chooses = (new > 0) & ~slides
    first = [draft.seen + (kv.rows_in(layer) - kv.length) for layer in range(len(kv.k))]
    with jax.named_scope("refresh_draft_cache"):
        draft = draft.replace(
            k=_slide(draft.k, kv.k, to, first, jnp.where(slides, new, 0), max_rows),
            v=_slide(draft.v, kv.v, to, first, jnp.where(slides, new, 0), max_rows),
            length=jnp.where(slides & has_all, to + new, draft.length),
            newest=jnp.where(slides, jnp.where(has_all, to + new, to), draft.newest),
            seen=kv.length,
        )
        return run_if(
            jnp.any(chooses),
            lambda draft, query: _choose(draft, query, kv, chooses, num_sinks),
            draft,
            draft.query,
        )


def summarize_rest(draft: DraftCache) -> tuple[Summary, ...]:
    """What is committed but not in an up-to-date draft cache, as one slot per layer and query head.

    As the last committed token saw it: its attention to all tokens, less that to those here. The
    queries that follow are much like its own.
    """
    (B, K, _, H), itself_unseen = draft.k[0].shape, jnp.zeros((1, 1), bool)

    def rest_of(k, v, attended: Attended) -> Summary:
        query, (mean, log_total) = attended
        none = jnp.zeros((B, 1, K, H), query.dtype)
        here = tree_attention(
            query[:, None], k, v, draft.length, none, none, itself_unseen, with_log_totals=True
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
        return tuple(map(rest_of, draft.k, draft.v, draft.attended))


def _slide(
    buffers: tuple[Float[Array, "B K slots H"], ...],
    committed: tuple[Float[Array, "B K S H"], ...],
    to: Int[Array, "B"],
    first_slots: Sequence[Int[Array, "B"]],
    count: Int[Array, "B"],
    max_rows: int,
) -> tuple[Float[Array, "B K slots H"], ...]:
    """Copies `count` tokens, at most `max_rows`, from each layer's slot in `first_slots` of
    `committed` on to slot `to` of `buffers` on."""
    zero = jnp.int32(0)
    index = jnp.arange(max_rows, dtype=jnp.int32)

    def write(buffer, source, start):
        _, K, M, H = buffer.shape
        # A window of fixed size that holds the slots; the others in it are written as they were.
        first = jnp.clip(to, 0, M - max_rows)
        wanted = index[None] - (to - first)[:, None]  # [B, max_rows]
        fresh = (wanted >= 0) & (wanted < count[:, None])

        def one(b, buffer):
            old = lax.dynamic_slice(buffer, (b, zero, first[b], zero), (1, K, max_rows, H))
            new = lax.dynamic_slice(source, (b, zero, start[b], zero), (1, K, max_rows, H))
            moved = jnp.take(new, jnp.clip(wanted[b], 0, max_rows - 1), axis=2)
            rows = jnp.where(fresh[b][None, None, :, None], moved, old)
            return lax.dynamic_update_slice(buffer, rows, (b, zero, first[b], zero))

        return _for_each_row(one, buffer)

    return tuple(map(write, buffers, committed, first_slots))


def _choose(
    draft: DraftCache,
    queries: tuple[Float[Array, "B K H"], ...],
    kv: KVCache,
    rows: Bool[Array, "B"],
    num_sinks: int,
) -> DraftCache:
    """Fills the draft caches of the batch rows `rows` by importance to `queries`."""
    k, v = [], []
    for layer, query in enumerate(queries):
        rows_here = kv.rows_in(layer)
        slots = _important_slots(query, kv.k[layer], rows_here, draft.capacity, num_sinks)

        def gather(old, whole, slots=slots):
            chosen = jnp.take_along_axis(whole, slots[..., None], axis=2)
            chosen = jnp.where(rows[:, None, None, None], chosen, old[:, :, : draft.capacity])
            return lax.dynamic_update_slice_in_dim(old, chosen, 0, axis=2)

        k.append(gather(draft.k[layer], kv.k[layer]))
        v.append(gather(draft.v[layer], kv.v[layer]))
    length = jnp.where(rows, jnp.minimum(kv.fewest_rows, draft.capacity), draft.length)
    newest = jnp.where(rows, length, draft.newest)
    return draft.replace(k=tuple(k), v=tuple(v), length=length, newest=newest)


def _important_slots(
    query: Float[Array, "B K H"],
    keys: Float[Array, "B K S H"],
    length: Int[Array, "B"],
    count: int,
    num_sinks: int,
) -> Int[Array, "B K {count}"]:
    """The sinks and then the slots of the keys with the highest scores.

    Equal ones by position. Of the slots below `length` alone, at a cost that follows it; if
    they are fewer than `count`, the rest is unspecified.
    """
    B, K, S, _ = keys.shape
    block, zero = min(max(count, SELECT_BLOCK), S), jnp.int32(0)
    scores = cache_scores(query, keys, length)

    def merge(index, best):
        first = index * block
        start = jnp.minimum(first, S - block)  # the last block may overlap
        here = start + jnp.arange(block, dtype=jnp.int32)[None, None]
        fresh = lax.dynamic_slice_in_dim(scores, start, block, axis=2)
        fresh = jnp.where((here < num_sinks) & (fresh > -jnp.inf), jnp.inf, fresh)
        fresh = jnp.where(here >= first, fresh, -jnp.inf)
        values = jnp.concatenate([best[0], fresh], axis=2)
        slots = jnp.concatenate([best[1], jnp.broadcast_to(here, fresh.shape)], axis=2)
        values, order = lax.top_k(values, count)
        return values, jnp.take_along_axis(slots, order, axis=2)

    blocks = (jnp.max(length).astype(jnp.int32) + block - 1) // block
    real = accumulation_dtype(query.dtype)
    nothing = jnp.full((B, K, count), -jnp.inf, real), jnp.zeros((B, K, count), jnp.int32)
    return lax.fori_loop(zero, blocks, merge, nothing)[1]


def _for_each_row(
    one: Callable[[Int[Array, ""], Array], Array], buffer: Float[Array, "B K slots H"]
) -> Float[Array, "B K slots H"]:
    """one(b, buffer) for every batch row b, in place."""
    if buffer.shape[0] == 1:
        return one(jnp.int32(0), buffer)
    return lax.fori_loop(jnp.int32(0), jnp.int32(buffer.shape[0]), one, buffer)


def zero_after(x: Shaped[Array, "..."]) -> Int[Array, ""]:
    """An int32 zero that XLA can only know once x is computed."""
    first = x.ravel()[0].astype(jnp.float32)
    is_nan = (first != first).astype(jnp.int32)
    return jnp.minimum(is_nan, 0)

# SPDX-License-Identifier: Apache-2.0
"""A cache whose tokens are dealt out to several parts, so that devices share its slots.

The rule. Of P parts, part s % P has token s of a text, in its slot s // P. Row p * B + b of a
buffer is part p of text b. So at each length all parts have as much to read, within one token, and
those of a part lie together, the first ones first.

Knows arrays and lengths. Does not know devices: each holds the rows that sharding.py gives it. With
one part, all of this is what it would be without.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import NarrowRows, Ranks, Summary, tree_attention
from pallas_kernels.dispatch import on_each_device
from tsjax.base.typing import Array, Bool, Float, Int, Shaped
from tsjax.model.writing import for_each_row, write_at_once


def for_each_part(x: Shaped[Array, "B ..."], parts: int) -> Shaped[Array, "PB ..."]:
    """What all parts of a text have in common."""
    if parts == 1:
        return x
    return jnp.broadcast_to(x, (parts, *x.shape)).reshape(-1, *x.shape[1:])


def by_text(x: Shaped[Array, "PB ..."], parts: int) -> Shaped[Array, "P B ..."]:
    """Rows of parts, the texts along an axis of their own."""
    return x.reshape(parts, -1, *x.shape[1:])


def counts_by_part(count: Int[Array, "B"], parts: int) -> Int[Array, "PB"]:
    """How many of the first `count` tokens each part has."""
    if parts == 1:
        return count
    after = parts - 1 - jnp.arange(parts, dtype=jnp.int32)
    return lax.div(count[None] + after[:, None], jnp.int32(parts)).reshape(-1)


def positions_by_part(rows: int, slots: int, parts: int) -> Int[Array, "PB S"]:
    """Which token of its text belongs into each slot."""
    row, slot = (jnp.arange(size, dtype=jnp.int32) for size in (rows, slots))
    return slot[None] * parts + (row // (rows // parts))[:, None]


def in_order(x: Shaped[Array, "PB K S"], parts: int) -> Shaped[Array, "B K PS"]:
    """What there is of each token in the order of the text. Each device gets it whole."""
    if parts == 1:
        return x
    rows, K, S = x.shape
    return jnp.moveaxis(by_text(x, parts), 0, 3).reshape(rows // parts, K, S * parts)


def dealt_out(x: Shaped[Array, "B K PS"], parts: int) -> Shaped[Array, "PB K S"]:
    """The other way round than `in_order`."""
    if parts == 1:
        return x
    B, K, S = x.shape
    x = x.reshape(B, K, S // parts, parts)
    return jnp.moveaxis(x, 3, 0).reshape(parts * B, K, S // parts)


def attention_by_part(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "PB K S H"] | NarrowRows,
    v_cache: Float[Array, "PB K S H"] | NarrowRows,
    count: Int[Array, "B"],
    k_new: Float[Array, "B T K H"],
    v_new: Float[Array, "B T K H"],
    tree_mask: Bool[Array, "T T"] | Bool[Array, "B T T"],
    *,
    parts: int,
    ranks: Ranks | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """As `tree_attention` with log totals: each part attends to its own, then they are merged.

    Only the first part sees the fresh rows. `ranks` are of the slots of whole texts.
    """
    B, T, N, H = q.shape
    # No array is laid behind another: XLA would then split all that it comes from like the result.
    first = jnp.arange(parts * B) < B
    mask = for_each_part(jnp.broadcast_to(tree_mask, (B, T, T)), parts) & first[:, None, None]
    q, k_new, v_new = (for_each_part(x, parts) for x in (q, k_new, v_new))
    count = counts_by_part(count, parts)
    seen = q, k_cache, v_cache, count, k_new, v_new, mask
    if ranks is not None:
        ranks = _ranks_by_part(ranks, k_cache.shape[2], parts)
    found = tree_attention(*seen, ranks=ranks, with_log_totals=True)
    return merged(Summary(*(by_text(x, parts) for x in found)))


def _ranks_by_part(ranks: Ranks, slots: int, parts: int) -> Ranks:
    missing = slots * parts - ranks.slots.shape[1]
    by_slot = jnp.pad(ranks.slots, ((0, 0), (0, missing)))
    return Ranks(dealt_out(by_slot[:, None], parts)[:, 0], for_each_part(ranks.rows, parts))


def merged(found: Summary) -> Summary:
    """The summary of all slots, from summaries of different slots along a first axis."""
    highest = jnp.max(found.log_total, axis=0)
    # 0 of a part that sees nothing, whatever its mean is.
    weight = jnp.exp(found.log_total - highest[None])
    mean = jnp.where(weight[..., None] > 0, found.mean.astype(weight.dtype), 0)
    total = jnp.sum(weight, axis=0)
    mean = jnp.sum(mean * weight[..., None], axis=0) / total[..., None]
    return Summary(mean.astype(found.mean.dtype), highest + jnp.log(total))


def write_by_part(
    buffer: Shaped[Array, "PB K S H"],
    rows: Shaped[Array, "B T K H"],
    start: Int[Array, "B"],
    *,
    parts: int,
) -> Shaped[Array, "PB K S H"]:
    """`buffer` with rows as tokens start[b] .. start[b] + T, and anything after them."""
    T = rows.shape[1]
    most = -(-T // parts)  # rows of a part
    part = jnp.arange(parts, dtype=jnp.int32)[:, None]
    first = jnp.mod(part - start[None], parts)  # [P, B]
    taken = first[..., None] + parts * jnp.arange(most, dtype=jnp.int32)[None, None]

    def of_part(taken):
        return jnp.take_along_axis(rows, taken[..., None, None], axis=1)

    dealt = jax.vmap(of_part)(jnp.minimum(taken, T - 1)).astype(buffer.dtype)
    dealt = jnp.swapaxes(dealt.reshape(-1, *dealt.shape[2:]), 1, 2)  # [PB, K, most, H]
    slots = lax.div(start[None] + first, jnp.int32(parts)).reshape(-1)
    return _write(buffer, dealt, slots)


@on_each_device("b k s h, b k t h, b -> b k s h", group=1)
def _write(buffer, rows, slots):
    """In place on the device that has the row. Of a part that gets a row less, the last one may
    have no slot: what is there stays."""
    _, K, S, H = buffer.shape
    most, zero = rows.shape[2], jnp.int32(0)

    def one(b, buffer):
        first = jnp.minimum(slots[b], S - most)
        index = jnp.arange(most, dtype=jnp.int32) - (slots[b] - first)
        old = lax.dynamic_slice(buffer, (b, zero, first, zero), (1, K, most, H))
        new = lax.dynamic_index_in_dim(rows, b, 0)
        new = jnp.take(new, jnp.maximum(index, 0), axis=2)
        new = jnp.where(index[None, None, :, None] >= 0, new, old)
        return lax.dynamic_update_slice(buffer, new, (b, zero, first, zero))

    return for_each_row(one, write_at_once, buffer, rows, slots)


def taken_by_part(
    buffer: Shaped[Array, "PB K S H"], positions: Int[Array, "B K count"], *, parts: int
) -> Shaped[Array, "B K count H"]:
    """What the tokens at `positions` have. Every device gets them all."""
    part, slot = jnp.mod(positions, parts), lax.div(positions, jnp.int32(parts))
    slots = for_each_part(slot, parts)[..., None]
    found = jnp.take_along_axis(buffer, slots, axis=2, mode="clip")
    found = by_text(found, parts)
    here = part[None] == jnp.arange(parts, dtype=jnp.int32)[:, None, None, None]
    return jnp.sum(jnp.where(here[..., None], found, 0), axis=0, dtype=buffer.dtype)

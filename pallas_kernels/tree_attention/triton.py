# SPDX-License-Identifier: Apache-2.0
"""Two GPU kernels: attention of parts of the cache in parallel, then their merge.

The G * T rows that share one kv head form one tile, in blocks of `Blocks.rows`, so the cache is
read once for each block of rows. What a block of rows attends to, the fresh rows and then the
first `length` slots of the cache, is cut into blocks of slots and shared out evenly among
`Blocks.parts` programs, so that one row of a batch fills the chip. Each part leaves a softmax of
its own (peak, total, weighted sum); the second kernel merges those parts that had work, and the
summary of slots that are elsewhere if there is one. Where one part does it all, as in prefills on
an H100, there is no second kernel. No atomics: two runs give the same bits.

Of narrow rows the products take the numbers, which each type holds exactly, and scores and weights
get their powers of two. So nothing is rounded that would not be for the same rows in a wide cache.

Of ranks each block of slots takes one more load and one compare, in programs that have them alone.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import device
from pallas_kernels.dispatch import on_each_device
from pallas_kernels.narrow_rows import numbers_and_exponents, scales_of
from pallas_kernels.tree_attention.specs import tuned_key
from pallas_kernels.triton import (
    MASKED,
    check_supported,
    dot,
    launch,
    load,
    padded,
    quotient,
    remainder,
    scaled,
    steps,
    store,
)

MOST_PARTS = 128
LOG2_E = math.log2(math.e)
UNSEEN = 2**31 - 1  # a rank that is below none
MERGE_SIZE = 4096  # entries that one program of the merge holds


class Blocks(NamedTuple):
    """How the work is cut; changes speed and, within rounding, nothing else."""

    rows: int  # rows of a tile that one program holds, a power of two, at least 16
    slots: int  # slots that it reads at a time, likewise
    parts: int  # programs that share what one block of rows attends to
    warps: int
    stages: int


def default_blocks(
    chip: device.Gpu, B: int, T: int, N: int, K: int, S: int, H: int, dtype
) -> Blocks:
    """What was measured on a GPU, or what docs/kernels.md derives."""
    if measured := device.tuned(chip, "tree_attention", tuned_key(B, T, N, K, S, H, dtype)):
        blocks = Blocks(**measured)  # of another capacity, perhaps
        return blocks._replace(parts=min(blocks.parts, _most_parts(T, S, blocks.slots)))
    rows, slots = min(padded(T * N // K), 128), 64
    if chip.is_hopper and rows == 128 and H <= 64:
        slots = 128
    if jnp.dtype(dtype) == jnp.float32:  # not for the matrix units, so the tiles live in registers
        rows, slots = min(rows, 32), 16
    warps = 8 if rows == 128 else 4
    stages = 3 if slots >= 64 and (rows <= 32 or chip.is_hopper) else 2
    row_blocks = pl.cdiv(T * N // K, rows)
    places = chip.cores * (1 if rows == 128 else 2)
    parts = device.even_parts(B * K * row_blocks, places, _most_parts(T, S, slots))
    return Blocks(rows=rows, slots=slots, parts=parts, warps=warps, stages=stages)


def for_narrow_rows(blocks: Blocks, chip: device.Gpu, dtype) -> Blocks:
    """Those of a wide cache, or what the compiler has registers for: it widens numbers beside the
    products, and spilled those of float32 in stages and of 64 slots for an A100's largest tile."""
    if jnp.dtype(dtype) == jnp.float32:
        return blocks._replace(stages=1, warps=8)
    if blocks.rows == 128 and not chip.is_hopper:
        return blocks._replace(slots=min(blocks.slots, 32))
    return blocks


def _most_parts(T: int, S: int, slots: int) -> int:
    """As many as there are blocks of slots in a full cache."""
    return min(MOST_PARTS, pl.cdiv(T, slots) + pl.cdiv(S, slots))


def tree_attention(
    q, k_cache, v_cache, length, k_new, v_new, tree_mask, mean=None, log_total=None,
    slot_ranks=None, row_ranks=None, *, blocks=None, interpret=False,
):  # fmt: skip
    """Arguments as in `api.tree_attention`, those of `rest` one by one; returns both results."""
    B, T, N, H = q.shape
    check_supported("tree_attention", q.dtype, H)
    mask = jnp.broadcast_to(tree_mask, (B, T, T)).astype(jnp.int8)
    ranks = () if slot_ranks is None else (slot_ranks, row_ranks)
    rest = () if mean is None else (mean, log_total)
    k_cache, k_exponents = numbers_and_exponents(k_cache)
    v_cache, v_exponents = numbers_and_exponents(v_cache)
    exponents = (*k_exponents, *v_exponents)
    if len(exponents) == 1:
        raise NotImplementedError("of keys and values only one are narrow")
    given = bool(exponents), bool(ranks), bool(rest)
    attention = _on_each_device(N // k_cache.shape[1], *given, blocks, device.gpu(), interpret)
    return attention(q, k_cache, v_cache, length, k_new, v_new, mask, *exponents, *ranks, *rest)


@functools.cache
def _on_each_device(
    group: int, is_narrow: bool, with_ranks: bool, with_rest: bool, blocks, chip, interpret: bool
):
    exponents = ", b k s, b k s" if is_narrow else ""
    ranks = ", b s, b t" if with_ranks else ""
    rest = ", b (k g) h, b (k g)" if with_rest else ""
    split = on_each_device(
        f"b t (k g) h, b k s h, b k s h, b, b t k h, b t k h, b t u{exponents}{ranks}{rest} "
        "-> b t (k g) h, b t (k g)",
        group=group,
    )
    attention = functools.partial(_attention, blocks=blocks, chip=chip, interpret=interpret)
    return jax.jit(split(attention))


def _attention(
    q, k_cache, v_cache, length, k_new, v_new, mask, *others, blocks, interpret, chip=None
):
    (B, T, N, H), (_, K, S, _) = q.shape, k_cache.shape
    narrow = 2 if k_cache.dtype == jnp.int8 else 0
    ranked = 2 if others[narrow:] and others[narrow].dtype == jnp.int32 else 0
    beside, rest = others[: narrow + ranked], others[narrow + ranked :]
    if blocks is None:
        chip = chip or device.gpu()
        blocks = default_blocks(chip, B, T, N, K, S, H, q.dtype)
        blocks = for_narrow_rows(blocks, chip, q.dtype) if narrow else blocks
    length = jnp.minimum(length.astype(jnp.int32), S)
    # Rows of the mask begin where wide loads can.
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, -T % blocks.slots)))
    rows = pl.cdiv(T * (N // K), blocks.rows) * blocks.rows
    results = [((B, T, N, H), q.dtype), ((B, T, N), jnp.float32)]
    alone = blocks.parts == 1 and not rest
    of_parts = (blocks.parts, B, K, rows)
    outputs = [((*of_parts, H), jnp.float32), *[(of_parts, jnp.float32)] * 2]
    parts = launch(
        functools.partial(_attend, blocks=blocks, alone=alone, with_ranks=bool(ranked)),
        length, q, k_cache, v_cache, k_new, v_new, mask, *beside,
        grid=(rows // blocks.rows, blocks.parts, B * K),
        outputs=results if alone else outputs,
        warps=blocks.warps, stages=blocks.stages, name="tsjax_tree_attention",
        interpret=interpret,
    )  # fmt: skip
    if alone:
        return tuple(parts)
    columns = min(padded(H), max(16, MERGE_SIZE // padded(blocks.parts)))
    merge = functools.partial(_merge, fresh=T, blocks=blocks, columns=columns)
    out, log_totals = launch(
        merge,
        length, *parts, *rest,
        grid=(T * N // K, pl.cdiv(H, columns), B * K),
        outputs=results,
        warps=4, stages=1, name="tsjax_tree_attention_merge",
        interpret=interpret,
    )  # fmt: skip
    return out, log_totals


def _share(length, fresh: int, blocks: Blocks):
    """Blocks of fresh rows, all blocks, and how many of them each part takes."""
    fresh_blocks = pl.cdiv(fresh, blocks.slots)
    all_blocks = fresh_blocks + quotient(length + (blocks.slots - 1), blocks.slots)
    return fresh_blocks, all_blocks, quotient(all_blocks + (blocks.parts - 1), blocks.parts)


def _attend(
    # inputs
    length_ref,  # [B]
    q_ref,  # [B, T, N, H]
    k_cache_ref, v_cache_ref,  # [B, K, S, H]
    k_new_ref, v_new_ref,  # [B, T, K, H]
    mask_ref,  # [B, T, T padded to whole blocks of slots]
    # and if they are narrow: exponents of k_cache and of v_cache [B, K, S]
    # and if there are ranks: those of slots [B, S], of rows [B, T]
    # outputs: out [parts, B, K, rows, H], peak and total [parts, B, K, rows]
    # or, of one part that is `alone`: merged [B, T, N, H], log_totals [B, T, N]
    *refs,
    blocks: Blocks,
    alone: bool,
    with_ranks: bool,
):  # fmt: skip
    others, refs = refs[: -2 if alone else -3], refs[-2 if alone else -3 :]
    exponents_refs, ranks_refs = others[: len(others) - 2 * with_ranks], others[-2:]
    _, T, N, H = q_ref.shape
    K = k_cache_ref.shape[1]
    G = N // K
    part = pl.program_id(1)
    b, head = quotient(pl.program_id(2), K), remainder(pl.program_id(2), K)
    length = length_ref[b]
    fresh_blocks, all_blocks, share = _share(length, T, blocks)
    first = jnp.minimum(part * share, all_blocks)
    last = jnp.minimum(first + share, all_blocks)

    rows = steps(blocks.rows, pl.program_id(0) * blocks.rows)
    row_of_q, is_row = quotient(rows, G), rows < T * G
    columns = steps(padded(H))[None, :]
    is_column = columns < H
    query_head = head * G + remainder(rows, G)
    q_index = b, row_of_q[:, None], query_head[:, None], columns
    q = load(q_ref, q_index, is_row[:, None] & is_column)
    row_rank = load(ranks_refs[1], (b, row_of_q), is_row)[:, None] if with_ranks else None
    scale = H**-0.5 * LOG2_E  # powers of two are what the chip computes

    def attend_fresh(index, carry):
        other = steps(blocks.slots, index * blocks.slots)
        exists = other < T
        at = b, other[:, None], head, columns
        inside = exists[:, None] & is_column
        k, v = load(k_new_ref, at, inside), load(v_new_ref, at, inside)
        sees = b, row_of_q[:, None], other[None, :]
        visible = load(mask_ref, sees, is_row[:, None]) != 0
        return _add(q, k, v, visible, scale, carry)

    def attend_cache(index, carry, *, whole):
        slots = steps(blocks.slots, (index - fresh_blocks) * blocks.slots)
        committed = slots < length
        at = b, head, slots[:, None], columns
        inside = committed[:, None] & is_column
        k, v = load(k_cache_ref, at, inside), load(v_cache_ref, at, inside)
        scales = [scales_of(load(ref, (b, head, slots), committed)) for ref in exponents_refs]
        visible = None if whole else committed[None, :]
        if row_rank is not None:
            slot_rank = load(ranks_refs[0], (b, slots), committed, UNSEEN)
            visible = slot_rank[None, :] < row_rank
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        return _add(q, k, v, visible, scale, carry, *scales)

    nothing = (
        jnp.zeros((blocks.rows, padded(H)), jnp.float32),
        jnp.full((blocks.rows,), MASKED, jnp.float32),
        jnp.zeros((blocks.rows,), jnp.float32),
    )
    carry = lax.fori_loop(first, jnp.minimum(last, fresh_blocks), attend_fresh, nothing)
    first_cached = jnp.maximum(first, fresh_blocks)
    ragged = first_cached  # ranks are a mask of each block, whole or not
    attend_whole, attend_ragged = (functools.partial(attend_cache, whole=w) for w in (True, False))
    if not with_ranks:
        ragged = jnp.clip(fresh_blocks + quotient(length, blocks.slots), first_cached, last)
        carry = lax.fori_loop(first_cached, ragged, attend_whole, carry)
    out, peak, total = lax.fori_loop(ragged, last, attend_ragged, carry)
    if alone:
        merged_ref, log_totals_ref = refs
        merged = (out / total[:, None]).astype(merged_ref.dtype)
        store(merged_ref, q_index, merged, is_row[:, None] & is_column)
        log_total = peak * scale / LOG2_E + jnp.log(total)
        store(log_totals_ref, (b, row_of_q, query_head), log_total, is_row)
        return
    out_ref, peak_ref, total_ref = refs
    worked = first < last
    store(out_ref, (part, b, head, rows[:, None], columns), out, worked & is_column)
    store(peak_ref, (part, b, head, rows), peak * scale, worked)
    store(total_ref, (part, b, head, rows), total, worked)


def _add(q, k, v, visible, scale, carry, k_scales=None, v_scales=None):
    """Adds some slots to the softmax of each row of `q`: all, or of each row those that are
    `visible`. Peaks are those of scores without `scale`; k_scales and v_scales belong to slots."""
    out, peak, total = carry
    scores = scaled(dot(q, k, transpose_b=True), k_scales)
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
    shrink = jnp.exp2((peak - new_peak) * scale)
    weights = jnp.exp2(scores * scale - (new_peak * scale)[:, None])
    if visible is not None:
        weights = jnp.where(visible, weights, 0.0)
    total = total * shrink + jnp.sum(weights, axis=1)
    return out * shrink[:, None] + _weighted(weights, v, v_scales), new_peak, total


def _weighted(weights, v, scales):
    """The sum of values, each times its weight and, if there are scales, its scale."""
    if scales is not None and v.dtype == jnp.float16:  # weights * scales may be too small for it
        v, scales = (v.astype(jnp.float32) * scales[:, None]).astype(v.dtype), None
    return dot(scaled(weights, scales).astype(v.dtype), v)


def _merge(
    # inputs
    length_ref,  # [B]
    out_ref,  # [parts, B, K, rows, H]
    peak_ref, total_ref,  # [parts, B, K, rows]
    # and if there is a rest: mean [B, N, H], log_total [B, N]
    # outputs: merged [B, T, N, H], log_totals [B, T, N]
    *refs,
    fresh: int,
    blocks: Blocks,
    columns: int,
):  # fmt: skip
    *rest_refs, merged_ref, log_totals_ref = refs
    H, K, N = merged_ref.shape[3], out_ref.shape[2], merged_ref.shape[2]
    G = N // K
    row = pl.program_id(0)
    b, head = quotient(pl.program_id(2), K), remainder(pl.program_id(2), K)
    query_head = head * G + remainder(row, G)
    _, all_blocks, share = _share(length_ref[b], fresh, blocks)

    parts = steps(padded(blocks.parts))
    worked = (parts < blocks.parts) & (parts * share < all_blocks)
    column = steps(columns, pl.program_id(1) * columns)
    peak = load(peak_ref, (parts, b, head, row), worked, MASKED)
    total = load(total_ref, (parts, b, head, row), worked)
    at = parts[:, None], b, head, row, column[None, :]
    out = load(out_ref, at, worked[:, None] & (column < H)[None, :])
    highest = jnp.max(peak)
    if rest_refs:
        mean_ref, log_total_ref = rest_refs
        rest = load(log_total_ref, (b, query_head), row >= 0) * LOG2_E
        highest = jnp.maximum(highest, rest)
    weight = jnp.exp2(peak - highest)
    total = jnp.sum(total * weight)
    merged = jnp.sum(out * weight[:, None], axis=0)
    if rest_refs:
        mean = load(mean_ref, (b, query_head, column), column < H).astype(jnp.float32)
        weight = jnp.exp2(rest - highest)
        total, merged = total + weight, merged + mean * weight
    place = b, quotient(row, G), query_head
    store(merged_ref, (*place, column), (merged / total).astype(merged_ref.dtype), column < H)
    log_total = highest / LOG2_E + jnp.log(total)
    store(log_totals_ref, place, log_total, pl.program_id(1) == 0)

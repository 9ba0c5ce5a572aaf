# SPDX-License-Identifier: Apache-2.0
"""GPU kernels: one pass over the keys for products, two for probabilities.

Products multiply and add on the ordinary units: one query per kv head leaves nothing for the
matrix units, and the keys' bytes are what takes the time. Probabilities first leave peak and total
of each query head per part of the cache, then read the keys again: that is cheaper than keeping the
scores of every query head. Of narrow rows the numbers are multiplied, and the products get their
powers of two.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import device
from pallas_kernels.cache_scores.specs import tuned_key
from pallas_kernels.dispatch import on_each_device
from pallas_kernels.narrow_rows import numbers_and_exponents, scales_of
from pallas_kernels.triton import (
    MASKED,
    check_supported,
    dot,
    launch,
    load,
    padded,
    quotient,
    scaled,
    steps,
    store,
)


class Blocks(NamedTuple):
    """How the work is cut; changes speed and, within rounding, nothing else."""

    slots: int  # slots that one program reads at a time, a power of two, at least 16
    parts: int  # programs that share the slots when totals are computed
    warps: int
    stages: int


def default_blocks(chip: device.Gpu, B: int, N: int, K: int, S: int, H: int, dtype) -> Blocks:
    """What was measured on a GPU, or what docs/kernels.md derives."""
    if measured := device.tuned(chip, "cache_scores", tuned_key(B, N, K, S, H, dtype)):
        blocks = Blocks(**measured)  # of another capacity, perhaps
        return blocks._replace(parts=min(blocks.parts, -(-S // blocks.slots)))
    slots, stages = 64, 3 if chip.is_hopper and jnp.dtype(dtype) != jnp.float32 else 2
    parts = device.even_parts(B * K, 2 * chip.cores, most=min(128, -(-S // slots)))
    return Blocks(slots=slots, parts=parts, warps=4, stages=stages)


def cache_scores(q, k_cache, length, *totals, mode: str, blocks=None, interpret=False):
    """As `api.cache_scores`, but "softmax" is summed over each kv head's queries only."""
    check_supported("cache_scores", q.dtype, q.shape[2])
    group = q.shape[1] // k_cache.shape[1]
    k_cache, exponents = numbers_and_exponents(k_cache)
    given = bool(exponents), bool(totals)
    on_each = _on_each_device(mode, *given, group, blocks, device.gpu(), interpret)
    return on_each(q, k_cache, length, *exponents, *totals)


@functools.cache
def _on_each_device(
    mode: str, is_narrow: bool, with_totals: bool, group: int, blocks, chip, interpret: bool
):
    scores = dict(dot=_dot_scores, softmax=_softmax_scores)[mode]
    exponents = ", b k s" if is_narrow else ""
    totals = ", b (k g)" if with_totals else ""
    split = on_each_device(f"b (k g) h, b k s h, b{exponents}{totals} -> b k s", group=group)
    return jax.jit(split(functools.partial(scores, blocks=blocks, chip=chip, interpret=interpret)))


def _dot_scores(q, k_cache, length, *exponents, blocks, interpret, chip=None):
    (B, N, H), (_, K, S, _) = q.shape, k_cache.shape
    blocks = blocks or default_blocks(chip or device.gpu(), B, N, K, S, H, q.dtype)
    summed = q if N == K else jnp.sum(q.reshape(B, K, N // K, H).astype(jnp.float32), axis=2)
    (scores,) = launch(
        functools.partial(_dot, blocks=blocks),
        jnp.minimum(length.astype(jnp.int32), S), summed, k_cache, *exponents,
        grid=(pl.cdiv(S, blocks.slots), K, B),
        outputs=[((B, K, S), jnp.float32)],
        warps=blocks.warps, stages=blocks.stages, name="tsjax_cache_scores",
        interpret=interpret,
    )  # fmt: skip
    return scores


def _softmax_scores(q, k_cache, length, *others, blocks, interpret, chip=None):
    (B, N, H), (_, K, S, _) = q.shape, k_cache.shape
    narrow = 1 if k_cache.dtype == jnp.int8 else 0
    exponents, log_totals = others[:narrow], others[narrow:]
    blocks = blocks or default_blocks(chip or device.gpu(), B, N, K, S, H, q.dtype)
    length = jnp.minimum(length.astype(jnp.int32), S)
    if narrow and q.dtype == jnp.float32:  # the compiler spilled numbers that it widened in stages
        blocks = blocks._replace(stages=1, warps=8)
    options: dict[str, Any] = dict(warps=blocks.warps, stages=blocks.stages, interpret=interpret)
    if log_totals:
        peak, total = log_totals[0] * math.log2(math.e), jnp.ones_like(log_totals[0])
    else:
        peak, total = _peak_and_total(length, q, k_cache, exponents, blocks, options)
    (scores,) = launch(
        functools.partial(_shares, blocks=blocks),
        length, q, k_cache, peak, total, *exponents,
        grid=(pl.cdiv(S, blocks.slots), K, B),
        outputs=[((B, K, S), jnp.float32)],
        name="tsjax_cache_scores_softmax", **options,
    )  # fmt: skip
    return scores


def _peak_and_total(length, q, k_cache, exponents, blocks: Blocks, options):
    """The peak and the total of each query head's scores, [B, N], for exp2."""
    (B, N, _), K = q.shape, k_cache.shape[1]
    peaks, totals = launch(
        functools.partial(_totals, blocks=blocks),
        length, q, k_cache, *exponents,
        grid=(blocks.parts, K, B),
        outputs=[((blocks.parts, B, N), jnp.float32)] * 2,
        name="tsjax_cache_scores_totals", **options,
    )  # fmt: skip
    peak = jnp.max(peaks, axis=0)
    return peak, jnp.sum(totals * jnp.exp2(peaks - peak[None]), axis=0)


def _dot(
    # inputs
    length_ref,  # [B]
    q_ref,  # [B, K, H]
    k_ref,  # [B, K, S, H]
    # and if it is narrow: its exponents [B, K, S]
    # outputs: the scores [B, K, S]
    *refs,
    blocks: Blocks,
):
    *exponents_refs, scores_ref = refs
    _, _, S, H = k_ref.shape
    head, b = pl.program_id(1), pl.program_id(2)
    slots = steps(blocks.slots, pl.program_id(0) * blocks.slots)
    columns = steps(padded(H))
    committed, is_column = slots < length_ref[b], columns < H
    q = load(q_ref, (b, head, columns), is_column).astype(jnp.float32)
    k = load(
        k_ref, (b, head, slots[:, None], columns[None, :]), committed[:, None] & is_column[None, :]
    )
    scores = jnp.sum(k.astype(jnp.float32) * q[None, :], axis=1)
    for exponents_ref in exponents_refs:
        scores *= scales_of(load(exponents_ref, (b, head, slots), committed))
    store(scores_ref, (b, head, slots), jnp.where(committed, scores, -jnp.inf), slots < S)


def _group_scores(q_ref, k_ref, exponents_refs, b, head, slots, committed):
    """Scores [G padded, slots] of the query heads of one kv head, for exp2; MASKED where not
    committed. Rows beyond G are zero."""
    N, H, K = q_ref.shape[1], q_ref.shape[2], k_ref.shape[1]
    member, columns = steps(padded(N // K)), steps(padded(H))[None, :]
    is_member, is_column = member < N // K, columns < H
    at = b, (head * (N // K) + member)[:, None], columns
    q = load(q_ref, at, is_member[:, None] & is_column)
    at = b, head, slots[:, None], columns
    k = load(k_ref, at, committed[:, None] & is_column)
    products = dot(q, k.astype(q.dtype), transpose_b=True)
    for exponents_ref in exponents_refs:
        products = scaled(products, scales_of(load(exponents_ref, (b, head, slots), committed)))
    scale = H**-0.5 * math.log2(math.e)
    return jnp.where(committed[None, :], products * scale, MASKED)


def _totals(
    # inputs
    length_ref,  # [B]
    q_ref,  # [B, N, H]
    k_ref,  # [B, K, S, H]
    # and if it is narrow: its exponents [B, K, S]
    # outputs: a peak and a total of each part [parts, B, N]
    *refs,
    blocks: Blocks,
):
    *exponents_refs, peak_ref, total_ref = refs
    N, K = q_ref.shape[1], k_ref.shape[1]
    part, head, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length = length_ref[b]
    all_blocks = quotient(length + (blocks.slots - 1), blocks.slots)
    share = quotient(all_blocks + (blocks.parts - 1), blocks.parts)
    first = jnp.minimum(part * share, all_blocks)

    def add(index, carry):
        peak, total = carry
        slots = steps(blocks.slots, index * blocks.slots)
        committed = slots < length
        scores = _group_scores(q_ref, k_ref, exponents_refs, b, head, slots, committed)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_peak[:, None])
        return new_peak, total * jnp.exp2(peak - new_peak) + jnp.sum(weights, axis=1)

    size = padded(N // K)
    nothing = jnp.full((size,), MASKED, jnp.float32), jnp.zeros((size,), jnp.float32)
    peak, total = lax.fori_loop(first, jnp.minimum(first + share, all_blocks), add, nothing)
    member = steps(size)
    at, is_member = (part, b, head * (N // K) + member), member < N // K
    store(peak_ref, at, peak, is_member)
    store(total_ref, at, total, is_member)


def _shares(
    # inputs
    length_ref,  # [B]
    q_ref,  # [B, N, H]
    k_ref,  # [B, K, S, H]
    peak_ref, total_ref,  # [B, N]
    # and if the keys are narrow: their exponents [B, K, S]
    # outputs: the scores [B, K, S]
    *refs,
    blocks: Blocks,
):  # fmt: skip
    *exponents_refs, scores_ref = refs
    N, (_, K, S, _) = q_ref.shape[1], k_ref.shape
    head, b = pl.program_id(1), pl.program_id(2)
    slots = steps(blocks.slots, pl.program_id(0) * blocks.slots)
    committed = slots < length_ref[b]
    member = steps(padded(N // K))
    is_member = member < N // K
    scores = _group_scores(q_ref, k_ref, exponents_refs, b, head, slots, committed)
    at = b, head * (N // K) + member
    peak, total = load(peak_ref, at, is_member), load(total_ref, at, is_member, 1)
    shares = jnp.exp2(scores - peak[:, None]) / total[:, None]
    shares = jnp.where(is_member[:, None] & committed[None, :], shares, 0.0)
    store(scores_ref, (b, head, slots), jnp.sum(shares, axis=0), slots < S)

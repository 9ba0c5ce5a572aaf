# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values in one kernel: XLA makes three or four of it.

One program has one vector of one row.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import on_each_device
from pallas_kernels.triton import (
    LARGEST_HEAD,
    check_dtype,
    launch,
    load,
    padded,
    quotient,
    remainder,
    steps,
    store,
)


def rotary_heads(fresh, cos, sin, *, dtype, interpret: bool = False):
    """As `api.rotary_heads`."""
    dtype = jnp.dtype(dtype)
    check_dtype("rotary_heads", dtype)
    if fresh.shape[4] > LARGEST_HEAD:
        raise NotImplementedError(f"head_dim {fresh.shape[4]}: up to {LARGEST_HEAD}")
    return _kernel(fresh.shape[3] - 2, dtype, interpret)(fresh, cos, sin)


@functools.cache
def _kernel(group: int, dtype, interpret: bool):
    kernel = functools.partial(_heads, dtype=dtype, interpret=interpret)
    rule = "b t k p h, b t c, b t c -> b t (k g) h, b t k h, b t k h"
    return on_each_device(rule, group=group, leader="b t k p h")(kernel)


def _heads(fresh, cos, sin, *, dtype, interpret):
    B, T, K, P, H = fresh.shape
    queries, keys = (B, T, K * (P - 2), H), (B, T, K, H)
    return tuple(
        launch(
            _rotate,
            fresh,
            cos,
            sin,
            grid=(K * P, T, B),
            outputs=[(shape, dtype) for shape in (queries, keys, keys)],
            warps=1,
            stages=1,
            name="tsjax_rotary_heads",
            interpret=interpret,
        )  # fmt: skip
    )


def _rotate(fresh_ref, cos_ref, sin_ref, q_ref, k_ref, v_ref):
    """Fresh [B, T, K, P, H], cos and sin [B, T, H/2]; writes q [B, T, N, H], k, v [B, T, K, H]."""
    P, H = fresh_ref.shape[3:]
    group, half = P - 2, H // 2
    vector, row, batch = (pl.program_id(axis) for axis in range(3))
    head, part = quotient(vector, P), remainder(vector, P)
    pair = steps(padded(half))
    inside = pair < half
    cos, sin = (load(ref, (batch, row, pair), inside) for ref in (cos_ref, sin_ref))
    first, second = (
        load(fresh_ref, (batch, row, head, part, pair + start), inside)
        .astype(q_ref.dtype)
        .astype(jnp.float32)
        for start in (0, half)
    )
    is_value = part == group + 1
    turned = first * cos - second * sin, second * cos + first * sin
    for start, rotated, plain in zip((0, half), turned, (first, second), strict=True):
        out = jnp.where(is_value, plain, rotated).astype(q_ref.dtype)
        place = pair + start
        store(q_ref, (batch, row, head * group + part, place), out, inside & (part < group))
        store(k_ref, (batch, row, head, place), out, inside & (part == group))
        store(v_ref, (batch, row, head, place), out, inside & is_value)

# SPDX-License-Identifier: Apache-2.0
"""Norms on a GPU in one kernel, with what a layer adds to its rows: XLA makes two or three of it.

One program has one row, so a row has the same bits whatever other rows there are.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.rms_norm import reference
from pallas_kernels.rms_norm.split import on_each_device
from pallas_kernels.triton import check_dtype, launch, load, padded, steps, store

WIDEST = 16_384  # numbers of a row that the registers of one program hold


def rms_norm(rows, weight, *, eps: float, interpret: bool = False):
    """As `api.rms_norm`."""
    return _run(rows, weight, eps=eps, interpret=interpret)


def add_rms_norm(rows, update, weight, *, eps: float, interpret: bool = False):
    """As `api.add_rms_norm`."""
    return _run(rows, update, weight, eps=eps, interpret=interpret)


def _run(rows, *arrays, eps, interpret):
    check_dtype("rms_norm", rows.dtype)
    if rows.shape[-1] > WIDEST:
        raise NotImplementedError(f"rows of {rows.shape[-1]}: up to {WIDEST}")
    *update, weight = arrays
    kernel = _kernel(max(1, rows.ndim - 1), bool(update), eps, interpret)
    if rows.ndim > 1:
        return kernel(rows, *update, weight)
    out = kernel(rows[None], *(array[None] for array in update), weight)
    return tuple(array[0] for array in out) if update else out[0]


@functools.cache
def _kernel(lead: int, adds: bool, eps: float, interpret: bool):
    """For rows with so many axes before the last."""
    kernel = functools.partial(_norms, eps=eps, interpret=interpret)
    definition = reference.add_rms_norm if adds else reference.rms_norm
    return on_each_device(kernel, functools.partial(definition, eps=eps), lead=lead, adds=adds)


def _norms(rows, *arrays, eps, interpret):
    *update, weight = arrays
    width = rows.shape[-1]
    flat = [array.reshape(-1, width) for array in (rows, *update)]
    out = launch(
        functools.partial(_norm, eps=eps),
        *flat, weight,
        grid=(flat[0].shape[0],),
        outputs=[(array.shape, rows.dtype) for array in flat],
        warps=4 if width <= 2048 else 8, stages=1, name="tsjax_rms_norm",
        interpret=interpret,
    )  # fmt: skip
    out = tuple(array.reshape(rows.shape) for array in out)
    return out if update else out[0]


def _norm(rows_ref, *refs, eps: float):
    """Rows [R, D], updates [R, D] if any, weight [D]; writes the sums, if any, and the norms."""
    width = rows_ref.shape[1]
    row, column = pl.program_id(0), steps(padded(width))
    inside = column < width

    def wide(ref, *index):
        return load(ref, (*index, column), inside).astype(jnp.float32)

    numbers = wide(rows_ref, row)
    if len(refs) == 2:
        weight_ref, norms_ref = refs
    else:
        update_ref, weight_ref, sums_ref, norms_ref = refs
        update = wide(update_ref, row).astype(rows_ref.dtype)  # as it would be written
        sums = (numbers + update.astype(jnp.float32)).astype(rows_ref.dtype)
        store(sums_ref, (row, column), sums, inside)
        numbers = sums.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(numbers * numbers) / width + eps)
    norms = (numbers * scale).astype(rows_ref.dtype).astype(jnp.float32) * wide(weight_ref)
    store(norms_ref, (row, column), norms.astype(rows_ref.dtype), inside)

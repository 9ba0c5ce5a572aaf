# SPDX-License-Identifier: Apache-2.0
"""Products of up to 16 rows on a GPU: each weight is read once, as it lies, int8 ones too.

One program has some outputs, and a part of the inputs where outputs alone would not fill the chip.
It reads its weights block by block; the matrix units multiply them with all rows, of which those
beyond the given ones are zero. So the sums of a row have one order for any number of rows. Parts
of sums are added by XLA, in order, together with what reads them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import device
from pallas_kernels.product.split import on_each_device
from pallas_kernels.triton import LEAST_DOT, check_dtype, dot, launch, load, steps, store

MOST_ROWS = LEAST_DOT
DTYPES = ("bfloat16", "float16")


class Blocks(NamedTuple):
    """How the work is cut; `parts` and `inputs` also tell the order of the sums."""

    outputs: int  # of one program, a power of two, at least 16
    inputs: int  # that it reads at a time, likewise
    parts: int  # programs that share the inputs of some outputs
    warps: int
    stages: int


def default_blocks(matrix: tuple[int, int]) -> Blocks:
    """Three programs for two multiprocessors or more, with as many outputs as that allows."""
    outputs, inputs = matrix
    _, cores = device.gpu()
    least = 3 * cores // 2
    fitting = (size for size in (64, 32) if pl.cdiv(outputs, size) >= least)
    block = next(fitting, LEAST_DOT)
    width = 128 if block == 64 else 256
    parts = min(pl.cdiv(least, pl.cdiv(outputs, block)), max(1, inputs // (2 * width)))
    return Blocks(block, width, parts, warps=4, stages=4)


def product(rows, weights, scales=None, *, blocks: Blocks | None = None, interpret: bool = False):
    """As `api.product`."""
    if rows.ndim == 1:
        return product(rows[None], weights, scales, blocks=blocks, interpret=interpret)[0]
    check_dtype("product", rows.dtype, DTYPES)
    if (count := rows.size // rows.shape[-1]) > MOST_ROWS:
        raise NotImplementedError(f"{count} rows: up to {MOST_ROWS}")
    if weights.shape[1] % 16:
        raise NotImplementedError(f"{weights.shape[1]} inputs: a multiple of 16, for wide loads")
    given = () if scales is None else (scales,)
    kernel = _kernel(rows.ndim - 1, bool(given), blocks, interpret)
    return kernel(rows, weights, *given)


@functools.cache
def _kernel(lead: int, with_scales: bool, blocks: Blocks | None, interpret: bool):
    """For rows with so many axes before the last."""
    kernel = functools.partial(_product, blocks=blocks, interpret=interpret)
    return on_each_device(kernel, lead=lead, with_scales=with_scales)


def _product(rows, weights, *scales, blocks: Blocks | None, interpret: bool):
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.shape[0] > MOST_ROWS:  # of a batch that jax.vmap made
        flat = jnp.pad(flat, ((0, -flat.shape[0] % MOST_ROWS), (0, 0)))
    blocks = blocks or default_blocks(weights.shape)
    count, outputs = flat.shape[0], weights.shape[0]
    (sums,) = launch(
        functools.partial(_multiply, blocks=blocks),
        flat, weights, *scales,
        grid=(pl.cdiv(outputs, blocks.outputs), blocks.parts, pl.cdiv(count, MOST_ROWS)),
        outputs=[((blocks.parts, count, outputs), jnp.float32)],
        warps=blocks.warps, stages=blocks.stages, name="tsjax_product",
        interpret=interpret,
    )  # fmt: skip
    added = functools.reduce(jnp.add, [sums[part] for part in range(blocks.parts)])
    return added[: math.prod(rows.shape[:-1])].reshape(*rows.shape[:-1], outputs)


def _multiply(rows_ref, weights_ref, *refs, blocks: Blocks):
    """Rows [R, I], weights [O, I], with int8 weights scales [O]; writes sums [parts, R, O]."""
    *scales_ref, sums_ref = refs
    row = steps(MOST_ROWS, pl.program_id(2) * MOST_ROWS)
    output = steps(blocks.outputs, pl.program_id(0) * blocks.outputs)
    is_row = (row < rows_ref.shape[0])[:, None]
    is_output = output < weights_ref.shape[0]
    width = rows_ref.shape[1]
    part = pl.program_id(1)
    share = pl.cdiv(pl.cdiv(width, blocks.inputs), blocks.parts)
    first = part * share
    last = jnp.minimum(first + share, pl.cdiv(width, blocks.inputs))

    def add(index, sums):
        inputs = steps(blocks.inputs, index * blocks.inputs)[None, :]
        is_input = inputs < width
        some_rows = load(rows_ref, (row[:, None], inputs), is_row & is_input)
        some = load(weights_ref, (output[:, None], inputs), is_output[:, None] & is_input)
        return sums + dot(some_rows, some.astype(some_rows.dtype), transpose_b=True)

    sums = lax.fori_loop(first, last, add, jnp.zeros((MOST_ROWS, blocks.outputs), jnp.float32))
    if scales_ref:
        sums = sums * load(scales_ref[0], (output,), is_output)[None, :]
    store(sums_ref, (part, row[:, None], output[None, :]), sums, is_row & is_output[None, :])

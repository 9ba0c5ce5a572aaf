# SPDX-License-Identifier: Apache-2.0
"""Products with narrow weights on GPUs: integers on the matrix units, scales on their sums.

One program has some outputs, a block of rows and a part of the inputs. Weights become numbers of
the rows' type in registers, as integers, which is exact; the sum over each group is then multiplied
with the group's scale, in float32. So rows are not rounded, and no weight is ever wide in memory.
How the inputs are cut depends on the matrix alone: a row has the same bits whatever other rows
there are. Never run on a GPU: compiled for A100 and H100, and its PTX executed in NumPy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import device
from pallas_kernels.narrow_product.matrix import PANEL, WIDE, Format, NarrowMatrix
from pallas_kernels.narrow_product.split import Layout, on_each_device
from pallas_kernels.triton import (
    check_dtype,
    dot,
    launch,
    load,
    padded,
    quotient,
    remainder,
    steps,
    store,
)
from pallas_kernels.typing import Array, Bool, Float, Int

MOST_ROWS = 128  # of more, as in prefills, XLA's product should take less time: never measured
AT_ONCE = 4  # groups of a turn of the loop: their loads are under way together


class Blocks(NamedTuple):
    """How the work is cut; `parts` and `outputs` depend on no rows."""

    outputs: int  # of a program, in whole panels
    rows: int  # a power of two, at least 16
    parts: int  # programs that share the inputs
    warps: int
    stages: int


def default_blocks(chip: device.Gpu, layout: Layout, rows: int) -> Blocks:
    outputs = 64  # what a warp group of Hopper multiplies at a time
    turns = -(-layout.inputs // (layout.format.group * AT_ONCE))
    pieces = -(-layout.panels * PANEL // outputs)
    # A part has at least four turns, so that its loads overlap; four programs fit a processor.
    parts = device.even_parts(pieces, 4 * chip.cores, most=max(1, min(16, turns // 4)))
    most = 32 if layout.format.with_least else 64  # rows whose sums fit the registers
    return Blocks(outputs, rows=min(padded(rows), most), parts=parts, warps=4, stages=3)


def narrow_product(rows, matrix: NarrowMatrix, *, blocks=None, interpret=False):
    """As `api.narrow_product`; computes all rows."""
    check_dtype("narrow_product", rows.dtype)
    if rows.dtype == jnp.float32:
        raise NotImplementedError("float32, which matrix units would round")
    if (count := math.prod(rows.shape[:-1])) > MOST_ROWS:
        raise NotImplementedError(f"{count} rows: up to {MOST_ROWS}")
    if rows.ndim == 1:
        return narrow_product(rows[None], matrix, blocks=blocks, interpret=interpret)[0]
    layout = Layout.of(matrix)
    kernel = _kernel(rows.ndim - 1, layout, blocks, device.gpu(), interpret)
    return kernel(rows, *layout.arrays_of(matrix))[..., : math.prod(matrix.outputs)]


@functools.cache
def _kernel(lead: int, layout: Layout, blocks, chip, interpret: bool):
    """For rows with so many axes before the last. Gives all outputs of the panels."""
    kernel = functools.partial(
        _narrow_product, layout=layout, blocks=blocks, chip=chip, interpret=interpret
    )
    return on_each_device(kernel, lead=lead, layout=layout, with_live=False)


def _narrow_product(rows, *arrays, layout: Layout, blocks, chip, interpret):
    # Of one device: its panels and inputs.
    layout = layout._replace(panels=len(arrays[0]), inputs=rows.shape[-1])
    flat = rows.reshape(-1, layout.inputs)
    blocks = blocks or default_blocks(chip, layout, len(flat))
    outputs = layout.panels * PANEL
    (parts,) = launch(
        functools.partial(_multiply, layout=layout, blocks=blocks),
        flat, *arrays,
        grid=(pl.cdiv(len(flat), blocks.rows), pl.cdiv(outputs, blocks.outputs), blocks.parts),
        outputs=[((blocks.parts, len(flat), outputs), jnp.float32)],
        warps=blocks.warps, stages=blocks.stages, name="tsjax_narrow_product",
        interpret=interpret,
    )  # fmt: skip
    # One after the other: XLA's own sums may take another order for other numbers of rows.
    sums = functools.reduce(jnp.add, parts)
    return sums.reshape(*rows.shape[:-1], outputs)


def _multiply(
    rows_ref,  # [R, I]
    # the arrays of the matrix that are there, [P, ...] each; then the output, sums [parts, R, O]
    *refs,
    layout: Layout,
    blocks: Blocks,
):
    *refs, sums_ref = refs
    (R, width), (P, G, _), format = rows_ref.shape, refs[0].shape, layout.format
    row = steps(blocks.rows, pl.program_id(0) * blocks.rows)
    output = steps(blocks.outputs, pl.program_id(1) * blocks.outputs)
    panel, place = quotient(output, PANEL), remainder(output, PANEL)
    is_row, is_output = row < R, panel < P
    share = pl.cdiv(pl.cdiv(G, AT_ONCE), blocks.parts)  # turns of a part
    first = pl.program_id(2) * share
    numbers = _Numbers(dict(zip(layout.names, refs, strict=True)), format, panel, place, is_output)

    def add_group(group, sums):
        is_group = group < G
        there = is_row[:, None] & is_group
        found, total = jnp.zeros_like(sums), jnp.zeros_like(sums)
        for entry, q in numbers.integers(group, is_group):
            inputs = (group * format.group + entry)[None, :]
            inside = there if width % format.group == 0 else there & (inputs < width)
            x = load(rows_ref, (row[:, None], inputs), inside)
            found += dot(_minus(q, format.zero).astype(x.dtype), x, transpose_b=True)
            if format.with_least:  # the rows' sums, lying as the products do
                total += dot(jnp.ones(q.shape, x.dtype), x, transpose_b=True)
        sums += numbers.level("scales", "steps", group, is_group)[:, None] * found
        if format.with_least:
            sums += numbers.level("least", "least_steps", group, is_group)[:, None] * total
        return sums

    def add(turn, sums):
        group = jnp.asarray(turn, jnp.int32) * AT_ONCE
        for index in range(AT_ONCE):
            sums = add_group(group + index, sums)
        return sums

    nothing = jnp.zeros((blocks.outputs, blocks.rows), jnp.float32)
    sums = lax.fori_loop(first, first + share, add, nothing)
    inside = is_output[:, None] & is_row[None, :]
    store(sums_ref, (pl.program_id(2), row[None, :], output[:, None]), sums, inside)


def _minus(q, zero: int):
    """q - zero in float32, for q below 2^23: its bits and those of 2^23 are a number's, and such an
    addition takes less time than to convert an integer."""
    large = 1 << 23
    bits = int(np.float32(large).view(np.int32))
    return lax.bitcast_convert_type(q | bits, jnp.float32) - (large + zero)


class _Numbers(NamedTuple):
    """What some outputs have in a group of inputs; matrix.py says how it is stored."""

    refs: dict[str, Any]
    format: Format
    panel: Int[Array, "n"]
    place: Int[Array, "n"]  # in the panel
    is_output: Bool[Array, "n"]

    def level(self, name: str, steps_name: str, group, is_group) -> Float[Array, "n"]:
        """Their scales, or the least of their numbers."""
        size = self.format.group

        def of_each(name, index):
            found = load(
                self.refs[name], (self.panel, index, self.place), self.is_output & is_group
            )
            return found.astype(jnp.float32)

        if not self.format.two_levels:
            return of_each(name, group)
        return of_each(name, quotient(group * size, WIDE)) * of_each(steps_name, group)

    def integers(self, group, is_group) -> Iterator[tuple[Int[Array, "k"], Int[Array, "n k"]]]:
        """Some entries of the group, until there were all, and their q."""
        bits, size = self.format.bits, self.format.group

        def read(of_place, of_entry):
            """Bytes at the sum of both."""
            at = of_place[:, None] + of_entry[None, :]
            inside = (self.is_output & is_group)[:, None]
            found = load(self.refs["values"], (self.panel[:, None], group, at), inside)
            return found.astype(jnp.int32)

        def of_four(entry, four):
            return 4 * PANEL * quotient(entry, four) + remainder(entry, 4)

        def with_planes(entry, q):
            for plane in range(bits - 4):
                first = PANEL * size // 2 + plane * PANEL * size // 8
                of_entry = 16 * quotient(entry, 8) + 8 * remainder(quotient(entry, 4), 2)
                found = read(first + quotient(self.place, 2), of_entry)
                bit = 4 * remainder(self.place, 2)[:, None] + remainder(entry, 4)[None, :]
                q |= (found >> bit & 1) << (4 + plane)
            return entry, q

        if bits == 8:
            entry = steps(size)
            yield entry, read(4 * self.place, of_four(entry, 4))
        elif size == 16:
            entry = steps(size)
            shift = 4 * remainder(quotient(entry, 4), 2)
            found = read(4 * self.place, of_four(entry, 8)) >> shift[None, :] & 15
            yield with_planes(entry, found)
        else:  # all lower fours are one product, all upper fours another: each byte is read once
            byte = steps(size // 2)
            found = read(4 * self.place, of_four(byte, 4))
            entry = 8 * quotient(byte, 4) + remainder(byte, 4)
            yield with_planes(entry, found & 15)
            yield with_planes(entry + 4, found >> 4)

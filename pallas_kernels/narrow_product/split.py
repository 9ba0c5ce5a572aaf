# SPDX-License-Identifier: Apache-2.0
"""What XLA and jax.vmap need to know of the kernel: how it is split and batched."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.dispatch import MARKED
from pallas_kernels.narrow_product import reference
from pallas_kernels.narrow_product.matrix import (
    ENTRIES,
    PANEL,
    WIDE,
    Format,
    NarrowMatrix,
    shapes_of,
)
from pallas_kernels.product.split import split_product


class Layout(NamedTuple):
    """What the arrays of a matrix are: their format, their panels, the inputs of the rows."""

    format: Format
    panels: int
    inputs: int

    @classmethod
    def of(cls, matrix: NarrowMatrix) -> Layout:
        return cls(matrix.format, len(matrix.values), math.prod(matrix.inputs))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arrays that are there."""
        return tuple(shapes_of(self.format, PANEL, WIDE))

    def arrays_of(self, matrix: NarrowMatrix) -> tuple[jax.Array, ...]:
        return tuple(getattr(matrix, name) for name in self.names)

    def matrix_of(self, *arrays: jax.Array) -> NarrowMatrix:
        """With all outputs of the panels."""
        values, scales, *others = arrays
        there = dict(zip(self.names[2:], others, strict=True))
        steps, least, least_steps = map(there.get, ("steps", "least", "least_steps"))
        outputs, inputs = (self.panels * PANEL,), (self.inputs,)
        of_groups = scales, steps, least, least_steps
        return NarrowMatrix(values, *of_groups, self.format, outputs, inputs)

    @property
    def unit(self) -> int:
        """Inputs that stay on one device."""
        return WIDE if self.format.two_levels else ENTRIES

    def of_unit(self) -> list[int]:
        """Of each array, as many indices of the second axis belong to one unit."""
        shapes = shapes_of(self.format, PANEL, self.unit)
        return [shape[1] for shape, _ in shapes.values()]


def on_each_device(kernel: Callable, *, lead: int, layout: Layout, with_live: bool) -> Callable:
    """`kernel(rows, *arrays of the matrix[, live])` for rows with `lead` axes before the last.

    Weights are split by outputs in whole panels, and by inputs in whole units.
    """

    def of_batched(rows, *arrays):
        return reference.narrow_product(rows, layout.matrix_of(*arrays))

    how, arrays = _rule(lead, layout, with_live), (2,) * len(layout.names)
    return split_product(
        kernel, of_batched, how, lead=lead, arrays=arrays, with_live=with_live, unit=layout.unit
    )


def _rule(lead: int, layout: Layout, with_live: bool) -> dict[str, Any]:
    """Rows and arrays are split between units, if they have whole ones, or not by inputs."""
    axes = " ".join(f"r{axis}" for axis in range(lead))
    units, rest = divmod(layout.inputs, layout.unit)
    sizes = dict(enumerate((layout.unit, *layout.of_unit())))
    if rest or units < 2:
        second, sizes = [f"c{index}" for index in sizes], {}
    else:  # a factor of 1 may not be part of a product
        second = [f"(i c{index})" if size > 1 else "i" for index, size in sizes.items()]
    arrays = ", ".join(f"o {name} b{index}" for index, name in enumerate(second[1:]))
    sums = "(o p)" if layout.panels > 1 else "p"
    rule = f"{MARKED}{axes} {second[0]}, {arrays}{', r0' * with_live} -> {axes} {sums}"
    factors = {f"c{index}": size for index, size in sizes.items() if size > 1}
    if sizes and "i" not in second:
        factors["i"] = units  # the rule has no dimension of this size
    if layout.panels > 1:
        factors["p"] = PANEL
    reduced: dict[str, Any] = {"reduction_factors": ("i",)} if sizes else {}
    return dict(sharding_rule=rule, **reduced, **factors)

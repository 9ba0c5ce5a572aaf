# SPDX-License-Identifier: Apache-2.0
"""What XLA and jax.vmap need to know of the kernel: how it is split and batched."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.dispatch import MARKED, mark_of
from pallas_kernels.narrow_product import reference
from pallas_kernels.narrow_product.matrix import (
    ENTRIES,
    PANEL,
    WIDE,
    Format,
    NarrowMatrix,
    shapes_of,
)
from pallas_kernels.product.split import axes_of, fold_batches


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

    Weights split by outputs, in whole panels, give sums split alike; those split by inputs, in
    whole units, parts of sums.
    """
    marked = mark_of(kernel)
    split = custom_partitioning(marked.kernel)

    def partition(mesh, arg_shapes, result_shape):
        _, rows, values, *_ = (array.sharding.spec for array in arg_shapes)
        outputs, inputs = (*values, None, None)[:2]
        parts = math.prod(mesh.shape[axis] for axis in axes_of(inputs))
        if layout.inputs % (layout.unit * parts):
            inputs = None
        taken = {*axes_of(outputs), *axes_of(inputs)}
        # Where rows lie by an axis that splits the weights, they come together.
        rows = [None if taken & {*axes_of(axes)} else axes for axes in rows]
        rows = (*rows, *(None,) * (lead + 1 - len(rows)))

        def on_device(mark, *arrays):
            sums = kernel(*arrays)
            return sums if inputs is None else lax.psum(sums, inputs)

        def sharding(*spec):
            return NamedSharding(mesh, PartitionSpec(*spec))

        live = [sharding(rows[0])] * with_live
        given = sharding(*rows[:lead], inputs), *[sharding(outputs, inputs)] * len(layout.names)
        wanted = (sharding(), *given, *live)
        return mesh, on_device, sharding(*rows[:lead], outputs), wanted

    split.def_partition(partition, **_rule(lead, layout, with_live))

    def of_batched(rows, *arrays):
        return reference.narrow_product(rows, layout.matrix_of(*arrays))

    folded = fold_batches(lambda *arrays: split(marked.mark(), *arrays), of_batched, with_live)
    return jax.jit(folded)


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

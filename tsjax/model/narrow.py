# SPDX-License-Identifier: Apache-2.0
"""The declaration of narrow matrices: which arrays a parameter has that is stored in few bits.

Knows formats and how parts of a parameter lie together. Does not know which parameters a model has,
nor what is in files.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels import NarrowMatrix
from pallas_kernels.narrow_product.matrix import FORMATS, shapes_of
from tsjax.base.model_config import WIDE
from tsjax.model.param_spec import ParamSpec
from tsjax.model.sharding import wanted_axes

NARROW_ARRAYS = ("values", "scales", "steps", "least", "least_steps")


def declared(spec: ParamSpec, formats: Sequence[str]) -> Any:
    """A parameter whose parts have these formats: the wide one, or a NarrowMatrix of arrays; where
    the formats of its parts differ a tuple of such, which lie together along the second axis."""
    found = [
        piece if name == WIDE else _narrow(piece, name)
        for piece, name in of_one_format(spec, formats)
    ]
    return tuple(found) if found[1:] else found[0]


def is_narrow(weights: Any) -> bool:
    """Whether a matrix among them is stored in few bits."""
    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, NarrowMatrix))
    return any(isinstance(leaf, NarrowMatrix) for leaf in leaves)


def of_one_format(spec: ParamSpec, formats: Sequence[str]) -> list[tuple[ParamSpec, str]]:
    """Neighbouring parts of one format, as a parameter each."""
    if not spec.parts:
        return [(spec, formats[0])]
    found, pairs = [], zip(spec.parts, formats, strict=True)
    for name, some in itertools.groupby(pairs, key=lambda pair: pair[1]):
        parts = tuple(size for size, _ in some)
        shape = (spec.shape[0], sum(parts), *spec.shape[2:])
        found.append((dataclasses.replace(spec, shape=shape, parts=parts), name))
    return found


def _narrow(spec: ParamSpec, name: str) -> NarrowMatrix:
    format, count = FORMATS[name], len(spec.shape) - spec.inputs
    outputs, inputs = spec.shape[:count], spec.shape[count:]
    shapes = shapes_of(format, math.prod(outputs), math.prod(inputs))
    axes = spec.axes[0], spec.axes[count]
    # What a device has is whole in each of the arrays, and as the wide matrix would be split.
    whole = [spec.shape[0] // spec.group, spec.shape[count] // spec.group]
    units = [
        math.gcd(one, *(shape[axis] for shape, _ in shapes.values()))
        for axis, one in enumerate(whole)
    ]
    split = [axis if axis and wanted_axes(axis) else None for axis in axes]

    def array(shape: tuple[int, ...], dtype: str) -> ParamSpec:
        groups = [shape[axis] // units[axis] for axis, name in enumerate(split) if name]
        return dataclasses.replace(
            spec, shape=shape, axes=(*split, None), dtype=dtype, init="bits", inputs=0, parts=(),
            group=groups[0] if groups else 1,
        )  # fmt: skip

    specs = {part: array(*of_it) for part, of_it in shapes.items()}
    arrays: list[Any] = [specs.get(part) for part in NARROW_ARRAYS]
    return NarrowMatrix(*arrays, format=format, outputs=outputs, inputs=inputs)

# SPDX-License-Identifier: Apache-2.0
"""Matrices in int8, for passes that draft: half the bytes of bfloat16, and a draft may be wrong.

Knows one matrix and how it is rounded. Does not know which matrices a model has.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from tsjax.base.typing import Array, Float, accumulation_dtype

LARGEST = 127


class Int8Matrix(flax.struct.PyTreeNode):
    """A matrix [*outputs, *inputs] whose outputs have a scale each.

    Attributes:
      values: [*outputs, *inputs] int8, from -127 to 127.
      scales: [*outputs], what one step of the values is worth; in the type of sums.
    """

    values: Any
    scales: Any


def as_int8(matrix: Float[Array, "..."], inputs: int) -> Int8Matrix:
    """The matrix in int8; `inputs` axes, the last ones, are those that a product sums over.

    It lies as the matrix does, also on a mesh.
    """
    return _rounding(inputs, *_places(matrix, inputs))(matrix)


@functools.cache
def _rounding(inputs: int, place: Sharding | None, of_outputs: Sharding | None):
    places = None if place is None else Int8Matrix(place, of_outputs)
    return jax.jit(functools.partial(_rounded, inputs=inputs), out_shardings=places)


def _rounded(matrix: Float[Array, "..."], inputs: int) -> Int8Matrix:
    wide = matrix.astype(accumulation_dtype(matrix.dtype))
    axes = tuple(range(matrix.ndim - inputs, matrix.ndim))
    scales = jnp.max(jnp.abs(wide), axis=axes, keepdims=True) / LARGEST
    values = jnp.round(wide / jnp.where(scales > 0, scales, 1)).astype(jnp.int8)
    return Int8Matrix(values, jnp.squeeze(scales, axes))


def _places(matrix: Float[Array, "..."], inputs: int) -> tuple[Sharding | None, Sharding | None]:
    """Where a matrix lies, and its outputs; None leaves it to the compiler."""
    if isinstance(matrix, Tracer) or not isinstance(matrix, jax.Array):
        return None, None
    place = matrix.sharding
    if not isinstance(place, NamedSharding):
        return place, place
    spec = (*place.spec, *(None,) * (matrix.ndim - len(place.spec)))
    return place, NamedSharding(place.mesh, PartitionSpec(*spec[: matrix.ndim - inputs]))

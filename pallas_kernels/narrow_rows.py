# SPDX-License-Identifier: Apache-2.0
"""Rows of keys and values in eight bits: int8 numbers, and one power of two for each row.

What a row becomes when it is rounded are numbers that bfloat16, float16, float32 and float64 hold
exactly. So a row that was rounded once is the same wherever it lies, stored narrow or not, and it
may be stored and widened as often as one likes. Knows arrays, no cache and no attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.typing import Array, DTypeLike, Float, Int

MOST = 127  # of a number, either sign
NO_NUMBERS = -128  # the exponent of a row that is NaN
LOWEST, HIGHEST = -126, 121  # exponents: 2^LOWEST and MOST * 2^HIGHEST are normal in float32
FLOAT16_LOWEST, FLOAT16_HIGHEST = -24, 9  # the smallest float16; and MOST * 2^9 is one


class NarrowRows(NamedTuple):
    """Rows that are numbers * 2^exponents.

    Both arrays have the same dimensions, so what takes, moves or writes rows does it to both.

    Attributes:
      numbers: int8, from -127 to 127.
      exponents: int8, from -126 to 121; or -128, and the row is NaN.
    """

    numbers: Int[Array, "*rows H"]
    exponents: Int[Array, "*rows 1"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def dtype(self) -> Any:
        return self.numbers.dtype

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.exponents.nbytes


def narrowed(rows: Float[Array, "*rows H"]) -> NarrowRows:
    """Rows to the nearest numbers, ties to even.

    A row's exponent is the least with which no number is beyond MOST, as far as there are such
    exponents: what is too small for them is 0, and the largest numbers of a type become a little
    less, not infinite. A row with a NaN or an infinity in it has no numbers.
    """
    is_16 = rows.dtype == jnp.float16
    lowest, highest = (FLOAT16_LOWEST, FLOAT16_HIGHEST) if is_16 else (LOWEST, HIGHEST)
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    # Bits of positive numbers are in their order, infinity and NaN after all others.
    kind = jnp.int64 if wide.dtype == jnp.float64 else jnp.int32
    bits = lax.bitcast_convert_type(jnp.abs(wide), kind)
    largest = lax.bitcast_convert_type(jnp.max(bits, axis=-1, keepdims=True), wide.dtype)
    broken = ~jnp.isfinite(largest)
    wide, largest = jnp.where(broken, 0, wide), jnp.where(broken, 0, largest)
    share, exponent = jnp.frexp(largest)
    exponent = exponent - 7 + (share * 128 > MOST)  # share is from 1/2 to 1, or 0
    exponent = jnp.clip(exponent.astype(jnp.int32), lowest, highest)
    numbers = jnp.round(wide * power_of_2(-exponent).astype(wide.dtype))
    numbers = jnp.clip(numbers, -MOST, MOST).astype(jnp.int8)
    exponents = jnp.where(broken, NO_NUMBERS, exponent).astype(jnp.int8)
    return NarrowRows(numbers, exponents)


def widened(
    rows: Float[Array, "*rows H"] | NarrowRows, dtype: DTypeLike
) -> Float[Array, "*rows H"]:
    """Rows in a type that holds their numbers; those that are not narrow stay as they are."""
    if not isinstance(rows, NarrowRows):
        return rows
    numbers, exponents = rows
    wide = jnp.promote_types(dtype, jnp.float32)
    return (numbers.astype(wide) * scales_of(exponents).astype(wide)).astype(dtype)


def scales_of(exponents: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """What the numbers of rows are to be multiplied by, in float32."""
    return jnp.where(exponents == NO_NUMBERS, jnp.nan, power_of_2(exponents.astype(jnp.int32)))


def slots_of(
    cache: Float[Array, "B K S H"] | NarrowRows, start: Any, size: int, dtype: DTypeLike
) -> Float[Array, "B K {size} H"]:
    """Slots start .. start + size of a cache, widened."""

    def some(x):
        return lax.dynamic_slice_in_dim(x, start, size, axis=2)

    return widened(jax.tree.map(some, cache), dtype)


def rounded_rows(rows: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    """What narrow rows are when they are widened again."""
    return widened(narrowed(rows), rows.dtype)


def power_of_2(exponent: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """2^exponent in float32, from -126 to 127: its bits, as exp2 may be off by one."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def numbers_and_exponents(rows: Any) -> tuple[Any, tuple[Any, ...]]:
    """Rows as they are stored, and their exponents [*rows], none of rows that are not narrow."""
    if not isinstance(rows, NarrowRows):
        return rows, ()
    return rows.numbers, (jnp.squeeze(rows.exponents, axis=-1),)


def as_array(rows: Any) -> Any:
    """An array, or rows whose parts are arrays."""
    return jax.tree.map(jnp.asarray, rows) if isinstance(rows, NarrowRows) else jnp.asarray(rows)

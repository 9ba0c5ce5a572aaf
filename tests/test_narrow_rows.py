# SPDX-License-Identifier: Apache-2.0
"""Rows in eight bits, against the definition in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.narrow_rows import NarrowRows, narrowed, rounded_rows, widened

TYPES = ("bfloat16", "float16", "float32")


def definition(rows: np.ndarray, lowest: int, highest: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and exponents: the least exponent with max|row| / 2^e <= 127."""
    rows = np.asarray(rows, np.float64)
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    exponents = np.full(largest.shape, lowest)
    while np.any(more := (largest / 2.0**exponents > 127) & (exponents < highest)):
        exponents += more
    return np.clip(np.rint(rows / 2.0**exponents), -127, 127), exponents


def limits(dtype: str) -> tuple[int, int]:
    return (-24, 9) if dtype == "float16" else (-126, 121)


def rows_of(dtype: str, scale: float = 1.0, count: int = 300):
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(count, 16)) * scale
    rows[::3] *= 2.0 ** rng.integers(-6, 6, size=(len(rows[::3]), 1))
    return jnp.asarray(rows, jnp.float32).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_rounded_as_defined(dtype):
    """Also where the largest number is at the edge of an exponent."""
    edges = [[largest, -largest, 1, 0.25] * 4 for largest in (127, 127.25, 127.5, 128, 63.5, 64)]
    rows = jnp.concatenate([rows_of(dtype), jnp.asarray(edges, dtype)])
    found = jax.jit(narrowed)(rows)
    numbers, exponents = definition(np.asarray(rows, np.float64), *limits(dtype))
    np.testing.assert_array_equal(found.numbers, numbers)
    np.testing.assert_array_equal(found.exponents, exponents)
    assert found.numbers.dtype == found.exponents.dtype == jnp.int8
    wide = np.asarray(widened(found, dtype), np.float64)
    np.testing.assert_array_equal(wide, numbers * 2.0**exponents)
    error = np.abs(wide - np.asarray(rows, np.float64))
    assert np.all(error <= 2.0**exponents / 2)
    again = widened(narrowed(widened(found, dtype)), dtype)
    np.testing.assert_array_equal(np.asarray(again, np.float64), wide)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**12])
def test_rounded_rows_are_stored_without_loss(dtype, scale):
    once = jax.jit(rounded_rows)(rows_of(dtype, scale))
    twice = jax.jit(rounded_rows)(once)
    np.testing.assert_array_equal(np.asarray(once, np.float32), np.asarray(twice, np.float32))
    # In any other type the stored rows are the same numbers.
    wide = widened(narrowed(once), jnp.float32)
    np.testing.assert_array_equal(np.asarray(wide), np.asarray(once, np.float32))


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_zeros_of_tiny_and_of_huge_numbers(dtype):
    info = jnp.finfo(dtype)
    tiny, most = float(info.tiny), float(info.max)
    extremes = [0.0, -0.0, tiny, tiny / 2, most, -most]
    rows = jnp.asarray([[x, x / 3] for x in extremes], jnp.float32).astype(dtype)
    found = jax.jit(rounded_rows)(rows)
    wide = np.asarray(found, np.float64)
    assert np.all(np.isfinite(wide))
    assert not np.any(wide[:2]) and not np.any(np.signbit(wide[:2]))  # int8 has one zero
    np.testing.assert_allclose(wide[4:], np.asarray(rows, np.float64)[4:], rtol=1 / 64)
    if dtype == "float16":  # whose smallest number is a scale
        np.testing.assert_allclose(wide[2], np.asarray(rows, np.float64)[2], rtol=1 / 40)
    np.testing.assert_array_equal(np.asarray(jax.jit(rounded_rows)(found), np.float64), wide)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_with_no_number_stays_visible_and_others_do_not_see_it(dtype, broken):
    rows = np.array(rows_of(dtype, count=4), np.float32)
    rows[2, 3] = broken
    found = rounded_rows(jnp.asarray(rows).astype(dtype))
    assert np.all(np.isnan(np.asarray(found, np.float32)[2]))
    rest = np.asarray(found, np.float32)[[0, 1, 3]]
    sound = rounded_rows(jnp.asarray(rows[[0, 1, 3]]).astype(dtype))
    np.testing.assert_array_equal(rest, np.asarray(sound, np.float32))
    again = np.asarray(rounded_rows(found), np.float32)
    np.testing.assert_array_equal(again, np.asarray(found, np.float32))


def test_what_moves_rows_moves_both_arrays():
    found = narrowed(rows_of("float32"))
    taken = jax.tree.map(lambda x: x[5:9], found)
    assert isinstance(taken, NarrowRows) and taken.shape == (4, 16)
    some = widened(found, jnp.float32)[5:9]
    np.testing.assert_array_equal(widened(taken, jnp.float32), some)

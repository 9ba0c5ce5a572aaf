# SPDX-License-Identifier: Apache-2.0
"""Thresholds in plain XLA, digit by digit, each in one pass over the keys."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from pallas_kernels.typing import Array, Bool, Num, UInt

Terms = Callable[[UInt[Array, "*rows 1"]], Num[Array, "*rows V"]]
Holds = Callable[[Num[Array, "*rows 1"]], Bool[Array, "*rows 1"]]


def threshold(keys, most, masses=None):
    """As `api.threshold`."""
    masses = jnp.ones((), most.dtype) if masses is None else masses

    def below(threshold):
        return jnp.where(keys < threshold, masses, 0)

    return last_that_holds(below, lambda mass: mass <= most, keys)


def last_that_holds(
    terms: Terms, holds: Holds, keys: UInt[Array, "*rows V"]
) -> UInt[Array, "*rows 1"]:
    """The largest threshold for which the sum of its terms `holds`: true up to some point.

    A CPU looks for it bit by bit. A GPU waits for memory and for the start of each kernel: it takes
    four bits at a time, in one pass over the keys, and no loop.
    """
    return lax.platform_dependent(
        cpu=lambda: last_by_digits(terms, holds, keys, digit=1),
        default=lambda: last_by_digits(terms, holds, keys, digit=4, unroll=True),
    )


def last_by_digits(
    terms: Terms, holds: Holds, keys: UInt[Array, "*rows V"], *, digit: int, unroll: bool = False
) -> UInt[Array, "*rows 1"]:
    """As `last_that_holds`, with passes that find `digit` bits each."""
    bits = 8 * keys.dtype.itemsize

    def body(i, threshold):
        shift = jnp.asarray(bits - digit, keys.dtype) - jnp.asarray(digit * i, keys.dtype)
        values = (jnp.asarray(value, keys.dtype) for value in range(1, 2**digit))
        sums = _sums([terms(threshold | (value << shift)) for value in values])
        # It holds for the first few of them: their number is the digit.
        found = sum((holds(one).astype(keys.dtype) for one in sums), jnp.zeros_like(threshold))
        return threshold | (found << shift)

    begun = jnp.zeros((*keys.shape[:-1], 1), keys.dtype)
    return lax.fori_loop(0, bits // digit, body, begun, unroll=unroll)


def _sums(arrays: list[Num[Array, "*rows V"]]) -> list[Num[Array, "*rows 1"]]:
    """The sum of each along the last axis, in one pass over what they are made of."""
    axis, zero = arrays[0].ndim - 1, jnp.zeros((), arrays[0].dtype)

    def add(some, others):
        return tuple(map(lax.add, some, others))

    sums = lax.reduce(tuple(arrays), (zero,) * len(arrays), add, (axis,))
    return [lax.expand_dims(one, (axis,)) for one in sums]

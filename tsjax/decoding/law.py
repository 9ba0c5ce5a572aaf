# SPDX-License-Identifier: Apache-2.0
"""The probabilities of a row of logits, with the same bits in every program.

What XLA makes of exp, log and a sum follows the program: the ends of a loop are computed otherwise
than its middle, sums are split by shapes and threads, and a product may be rounded together with
the sum that it goes into, or before. Here a number goes through the same roundings everywhere:

* A sum is one of integers, whose order does not matter.
* A product goes into a sum only where it is exact, or out of a choice between two arrays, which no
  compiler looks through.

Knows numbers. Knows no processor.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tsjax.base.typing import Array, DTypeLike, Float, Int, UInt

LN2 = math.log(2)
BLOCK = 128  # terms of a sum that are added first


class _Type(NamedTuple):
    """What is written down for a type of numbers."""

    digits: int  # of its mantissa, after the first
    bias: int  # of its exponent
    integer: Any  # of the same size
    furthest: float  # from the best logit; what is less likely counts as that
    split: int  # bits of each half of log 2: its product with any exponent is exact
    powers: int  # of the series of exp and of log


def _of(dtype: DTypeLike) -> _Type:
    if jnp.finfo(dtype).bits == 64:
        return _Type(52, 1023, jnp.int64, 700.0, 32, 18)
    return _Type(23, 127, jnp.int32, 80.0, 15, 8)


class Law(NamedTuple):
    """Of rows of logits.

    Attributes:
      behind: how far each is behind its row's best.
      weights: e to the minus that: probabilities, but for a factor.
      total: their sum, at least 1. No more follows the order of its terms than a last bit does.
    """

    behind: Float[Array, "*rows V"]
    weights: Float[Array, "*rows V"]
    total: Float[Array, "*rows 1"]


def law_of(logits: Float[Array, "*rows V"]) -> Law:
    behind = jnp.max(logits, axis=-1, keepdims=True) - logits
    behind = jnp.minimum(behind, _of(logits.dtype).furthest)
    weights = exp_minus(behind)
    return Law(behind, weights, total(weights))


def counts(law: Law) -> tuple[UInt[Array, "*rows V"], Float[Array, "*rows 1"]]:
    """The probabilities as integers whose sums fit, and what 1 is among them: at least 2^30, or
    2^62 in float64. Each is rounded."""
    kind = _of(law.total.dtype)
    exponent = (lax.bitcast_convert_type(law.total, kind.integer) >> kind.digits) - kind.bias
    bits = 8 * law.total.dtype.itemsize
    scale = _two_to(bits - 2 - exponent, law.total.dtype)
    unsigned = {32: jnp.uint32, 64: jnp.uint64}[bits]
    rounded = lax.round(law.weights * scale, lax.RoundingMethod.TO_NEAREST_EVEN)
    return rounded.astype(unsigned), law.total * scale


@jax.custom_jvp
def log_softmax(logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    best = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - best) - log(law_of(logits).total)


@log_softmax.defjvp
def _log_softmax_slope(primals, tangents):
    """By calculus: integers, which a sum is made of, have no slope."""
    (logits,), (slope,) = primals, tangents
    found = log_softmax(logits)
    return found, slope - jnp.sum(jnp.exp(found) * slope, axis=-1, keepdims=True)


def exp_minus(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """e^-x of numbers from 0 to the furthest one, but for a last bit or two."""
    kind, known = _of(x.dtype), x >= 0
    high = math.floor(LN2 * 2**kind.split) / 2**kind.split
    low = round((LN2 - high) * 2 ** (2 * kind.split)) / 2 ** (2 * kind.split)
    halvings = lax.round(x * (1 / LN2), lax.RoundingMethod.TO_NEAREST_EVEN)
    rest = (x - halvings * high) - halvings * low  # at most log 2 / 2 from 0; products are exact
    series = jnp.full_like(x, 1 / math.factorial(kind.powers))
    for power in range(kind.powers - 1, -1, -1):
        series = 1 / math.factorial(power) - jnp.where(known, series * rest, x)
    return series * _two_to(-halvings.astype(kind.integer), x.dtype)


def total(x: Float[Array, "*rows V"]) -> Float[Array, "*rows 1"]:
    """The sum along the last axis of numbers from 0 to 1, as integers of two digits."""
    kind, bits = _of(x.dtype), 8 * x.dtype.itemsize
    digit, half = bits - 1 - BLOCK.bit_length(), bits // 2 - 1  # so that integers hold sums
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % BLOCK),))
    x = x.reshape(*x.shape[:-1], -1, BLOCK) * 2.0**digit
    upper = lax.floor(x)
    found = jnp.zeros((), x.dtype)
    for numbers, power in (((x - upper) * 2.0**digit, -2 * digit), (upper, -digit)):
        of_blocks = jnp.sum(numbers.astype(kind.integer), axis=-1, dtype=kind.integer)
        for part, more in ((of_blocks & (2**half - 1), 0), (of_blocks >> half, half)):
            whole = jnp.sum(part, axis=-1, keepdims=True, dtype=kind.integer)
            found = whole.astype(x.dtype) * 2.0 ** (power + more) + found
    return found


def log(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The natural logarithm of numbers from 1 on, but for a last bit or two."""
    kind, known = _of(x.dtype), x >= 1
    bits = lax.bitcast_convert_type(x, kind.integer)
    exponent = (bits >> kind.digits) - kind.bias
    of_one = (bits & ((1 << kind.digits) - 1)) | (kind.bias << kind.digits)
    mantissa = lax.bitcast_convert_type(of_one, x.dtype)  # from 1 to 2
    share = (mantissa - 1) / (mantissa + 1)
    series = jnp.zeros_like(x)
    for power in range(kind.powers, -1, -1):
        series = 1 / (2 * power + 1) + jnp.where(known, series * (share * share), x)
    of_exponent = exponent.astype(x.dtype) * LN2
    return jnp.where(known, of_exponent, x) + jnp.where(known, 2 * share * series, x)


def _two_to(exponent: Int[Array, "*n"], dtype: DTypeLike) -> Float[Array, "*n"]:
    kind = _of(dtype)
    return lax.bitcast_convert_type((exponent + kind.bias) << kind.digits, dtype)

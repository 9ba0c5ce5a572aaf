# SPDX-License-Identifier: Apache-2.0
"""Probabilities have the same bits in every program, so a row keeps the same tokens beside others.

Programs are compiled as users have them: with less effort XLA rounds everything by itself.
"""

import math
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsjax import GenerationConfig
from tsjax.decoding.law import counts, exp_minus, law_of, log, log_softmax, total
from tsjax.decoding.sampling import step_noise, warp, with_noise
from tsjax.steps import row_keys, sampling_values

AS_USERS = {"xla_backend_optimization_level": 3}
VOCAB, ROWS = 1000, 12  # so many rows are dealt out to threads, one is not


def compiled(function):
    return jax.jit(function, compiler_options=AS_USERS)


def numpy_exp_minus(x):
    """As it is written down, each operation rounded by itself."""
    f = np.float32
    high, low = f(22713 / 2**15), f(round((math.log(2) - 22713 / 2**15) * 2**30) / 2**30)
    halvings = np.rint(x * f(1 / math.log(2)))
    rest = (x - halvings * high) - halvings * low
    series = f(1 / math.factorial(8))
    for power in range(7, -1, -1):
        series = f(1 / math.factorial(power)) - series * rest
    return series * np.exp2(-halvings)


def numpy_log(x):
    f = np.float32
    mantissa, exponent = np.frexp(x)
    mantissa, exponent = 2 * mantissa, exponent.astype(f) - f(1)
    share = (mantissa - f(1)) / (mantissa + f(1))
    series = np.zeros_like(x)
    for power in range(8, -1, -1):
        series = f(1 / (2 * power + 1)) + series * (share * share)
    return exponent * f(math.log(2)) + f(2) * share * series


@pytest.mark.parametrize("shape", [(5,), (3, 4, 1000)])
def test_each_operation_is_rounded_by_itself(shape, rng):
    """Also where a sum follows that XLA would round together with the last product."""
    x = (rng.exponential(8, shape).clip(0, 80)).astype(np.float32)
    y = rng.standard_normal(shape).astype(np.float32)
    found, alone, logs = compiled(lambda x, y: (exp_minus(x) + y, exp_minus(x), log(x + 1)))(x, y)
    np.testing.assert_array_equal(alone, numpy_exp_minus(x))
    np.testing.assert_array_equal(found, numpy_exp_minus(x) + y)
    np.testing.assert_array_equal(logs, numpy_log(x + np.float32(1)))


@pytest.mark.parametrize("dtype, last_bits", [("float32", 1.5e-7), ("float64", 3e-15)])
def test_against_numbers_of_more_digits(dtype, last_bits, rng):
    def everything(logits):
        found = law_of(logits)
        return found, counts(found), log_softmax(logits)

    with jax.enable_x64(dtype == "float64"):
        logits = (4 * rng.standard_normal((2, 30_000))).astype(dtype)
        found, (masses, one), logs = jax.tree.map(np.asarray, jax.jit(everything)(logits))
    behind = logits.max(-1, keepdims=True) - logits
    np.testing.assert_array_equal(found.behind, behind)
    weights = np.exp(-behind.astype(np.longdouble))
    whole = weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(found.weights, weights, rtol=last_bits)
    np.testing.assert_allclose(found.total, whole, rtol=last_bits)
    np.testing.assert_allclose(logs, -behind - np.log(whole), rtol=3 * last_bits)
    assert one.min() >= 2.0 ** (30 if dtype == "float32" else 62)
    shares = masses.astype(np.longdouble) / one
    np.testing.assert_allclose(shares, weights / whole, rtol=2 * last_bits, atol=1 / one.min())
    assert sum(map(int, masses[0])) < 2 ** (8 * logits.itemsize)


@pytest.mark.parametrize("size", [1, 3, 1024, 40_000])
def test_a_sum_does_not_follow_the_order(size, rng):
    x = rng.random((1, size), np.float32) ** 9
    x[0, 0] = 1
    found, backwards = map(np.asarray, jax.jit(lambda x: (total(x), total(x[:, ::-1])))(x))
    np.testing.assert_array_equal(backwards, found)
    exact = sum(map(Fraction, x[0].tolist()))
    assert abs(Fraction(float(found[0, 0])) / exact - 1) < 2**-22


# --- settings at the edge of a mass ---------------------------------------------------------------


def at_an_edge(logits, kind, rng):
    """A setting that equals what one token has, but for a few last bits."""
    weights = np.exp(logits.astype(float) - logits.max())
    probs = weights / weights.sum()
    one = np.argsort(-probs)[rng.integers(1, 40)]
    if kind == "top_p":
        value = probs[probs > probs[one]].sum()
    elif kind == "min_p":
        value = weights[one]
    else:
        value = probs[one]
        if kind == "eta_cutoff":  # where the square root of it decides
            entropy = -(probs * np.log(probs)).sum()
            value = max(value, min((value * np.exp(entropy)) ** 2, 0.9))
    value = np.float32(value)
    away = int(rng.integers(-3, 4))
    for _ in range(abs(away)):
        value = np.nextafter(value, np.float32(2 * np.sign(away)))
    return float(np.clip(value, 1e-6, 1 - 1e-6))


def chosen(logits, noise, values):
    """What is left of the logits, and with the noise."""
    warped = warp(logits, values)
    return warped, with_noise(warped, jnp.zeros(logits.shape[:2], jnp.int32), noise, values)


WIDE = ("min_p", "epsilon_cutoff", "eta_cutoff")


@pytest.mark.parametrize(
    "kind", ["top_p", *(pytest.param(kind, marks=pytest.mark.wide) for kind in WIDE)]
)
def test_rows_beside_a_row_do_not_move_its_edge(kind):
    run = compiled(chosen)

    @hypothesis.given(seed=st.integers(0, 2**32 - 1))
    @hypothesis.settings(max_examples=25)
    def check(seed):
        rng = np.random.default_rng(seed)
        logits = rng.uniform(0.5, 3) * rng.standard_normal((1, ROWS, VOCAB)).astype(np.float32)
        temperature = float(np.float32(rng.uniform(0.5, 1.5)))
        value = at_an_edge(logits[0, 0] / np.float32(temperature), kind, rng)
        setting: dict[str, Any] = {kind: value}
        config = GenerationConfig(do_sample=True, temperature=temperature, **setting)
        values = sampling_values(config, (), VOCAB, jnp.float32)
        noise = step_noise(row_keys([seed], [0]), jnp.asarray([9]), 1, VOCAB, values)
        alone = run(logits[:, :1], noise, values)
        tree = run(logits, noise, values)
        batch = run(logits.reshape(4, 3, VOCAB), jnp.repeat(noise, 4, axis=0), values)
        for together in (tree, batch):
            jax.tree.map(
                lambda x, y: np.testing.assert_array_equal(x[0, 0], y[0, 0]), together, alone
            )

    check()

# SPDX-License-Identifier: Apache-2.0
"""tsjax.layers against float64 NumPy: rotary embeddings as published, linear layers."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rotate
from tsjax import RopeConfig
from tsjax.model.layers import accumulation_dtype, linear, rope_frequencies, rotary_angles, swiglu

pytestmark = pytest.mark.usefixtures("strict_promotion")

# --- rotary embeddings -----------------------------------------------------------------------


def define_frequency(rope, head_dim, pair):
    """The angle per position of one pair of dimensions, from the papers, in scalars."""
    frequency = 1 / rope.theta ** (2 * pair / head_dim)
    if rope.kind == "default":
        return frequency
    if rope.kind == "linear":
        return frequency / rope.factor
    turns = rope.original_max_positions * frequency / (2 * math.pi)  # in the trained context
    if rope.kind == "llama3":
        if turns < rope.low_freq_factor:
            return frequency / rope.factor
        if turns > rope.high_freq_factor:
            return frequency
        span = rope.high_freq_factor - rope.low_freq_factor
        smooth = (turns - rope.low_freq_factor) / span
        return (1 - smooth) * frequency / rope.factor + smooth * frequency

    def pair_that_turns(times):
        """Solves original / (2 pi theta^(2 i / head_dim)) = times for i, in fractions of a pair."""
        base = rope.original_max_positions / (2 * math.pi * times)
        return head_dim / 2 * math.log(base, rope.theta)

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if pair <= first:
        share = 0.0  # of interpolation
    elif pair >= last:
        share = 1.0
    else:
        share = (pair - first) / (last - first)
    return share * frequency / rope.factor + (1 - share) * frequency


ROPES = {
    "default": RopeConfig(theta=1e6),
    "linear": RopeConfig(kind="linear", factor=4.0),
    "Llama 3.1": RopeConfig(kind="llama3", theta=500000.0, factor=8.0, original_max_positions=8192),
    "YaRN-Llama-2": RopeConfig(kind="yarn", factor=32.0, original_max_positions=4096),
    "YaRN, other betas": RopeConfig(
        kind="yarn", factor=8.0, original_max_positions=2048, beta_fast=16.0, beta_slow=2.0
    ),
    "YaRN, not truncated": RopeConfig(
        kind="yarn", factor=8.0, original_max_positions=2048, truncate=False
    ),
}


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies(name, head_dim):
    rope = ROPES[name]
    expected = [define_frequency(rope, head_dim, pair) for pair in range(head_dim // 2)]
    found = rope_frequencies(rope, head_dim)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    if name == "Llama 3.1" and head_dim == 128:  # keeps, blends and slows down
        slowed = rope_frequencies(RopeConfig(theta=500000.0), head_dim) / found
        assert np.isclose(slowed[0], 1) and np.isclose(slowed[-1], 8)
        assert ((slowed > 1.01) & (slowed < 7.99)).any()


@pytest.mark.parametrize("attention_factor", [1.0, 1.2])
def test_rotation(attention_factor, rng):
    """A pair (i, i + H/2) is a complex number that turns by the angle."""
    rope = RopeConfig(attention_factor=attention_factor)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 3000, (2, 5))
    cos, sin = rotary_angles(jnp.asarray(positions), rope, 8, "float32")
    angles = positions[:, :, None, None] * rope_frequencies(rope, 8)
    pairs = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles) * attention_factor
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(rotate(x, cos, sin), expected, atol=1e-3)


def test_angles_are_computed_in_the_wide_type():
    """At position 100,000 a bfloat16 angle would be off by hundreds."""
    positions = np.asarray([0, 1, 100_000])
    cos, sin = rotary_angles(jnp.asarray(positions), RopeConfig(), 64, "bfloat16")
    assert cos.dtype == sin.dtype == "float32"
    angles = positions[:, None] * rope_frequencies(RopeConfig(), 64)
    np.testing.assert_allclose(cos, np.cos(angles), atol=2e-2)
    np.testing.assert_allclose(sin, np.sin(angles), atol=2e-2)


# --- linear layers ---------------------------------------------------------------------------


@hypothesis.given(
    outer=st.lists(st.integers(1, 4), max_size=2),
    inner=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    out=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    with_bias=st.booleans(),
)
@hypothesis.settings(max_examples=10)
def test_linear(outer, inner, out, with_bias):
    rng = np.random.default_rng(len(outer) + 10 * len(inner) + 100 * len(out))
    x = rng.standard_normal((*outer, *inner)).astype(np.float32)
    weight = rng.standard_normal((*out, *inner)).astype(np.float32)
    bias = rng.standard_normal(out).astype(np.float32) if with_bias else None
    flat = x.reshape(-1, math.prod(inner)) @ weight.reshape(-1, math.prod(inner)).T
    expected = flat.reshape(*outer, *out) + (bias if with_bias else 0)
    result = linear(x, weight, bias, contract=len(inner))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_linear_accumulates_bfloat16_in_float32(rng):
    """A sum of 4096 ones and a half: neither survives a bfloat16 accumulator."""
    x = jnp.ones((1, 4096), jnp.bfloat16)
    weight = jnp.ones((1, 4096), jnp.bfloat16)
    out = linear(x, weight, jnp.asarray([0.5], jnp.bfloat16), out_dtype=jnp.float32)
    assert out.dtype == jnp.float32 and out.item() == 4096.5
    assert linear(x, weight).dtype == jnp.bfloat16


def test_swiglu(rng):
    x, gate, up, down = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in [(2, 3, 8), (12, 8), (12, 8), (8, 12)]
    )
    biases = [rng.standard_normal(n).astype(np.float32) for n in (12, 12, 8)]
    opened = x @ gate.T + biases[0]
    expected = (opened / (1 + np.exp(-opened)) * (x @ up.T + biases[1])) @ down.T + biases[2]
    joined = np.stack([gate, up], axis=1), down, np.stack(biases[:2], axis=1), biases[2]
    np.testing.assert_allclose(swiglu(x, *joined), expected, rtol=1e-4, atol=1e-4)


def test_accumulation_dtype():
    assert accumulation_dtype("bfloat16") == accumulation_dtype("float16") == jnp.float32
    assert accumulation_dtype("float32") == jnp.float32
    with jax.enable_x64(True):
        assert accumulation_dtype("float64") == jnp.float64

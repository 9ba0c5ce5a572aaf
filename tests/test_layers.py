# SPDX-License-Identifier: Apache-2.0
"""Sums and angles of layers against NumPy; what transformers computes is in test_goldens.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from tsjax.model.layers import linear, rope_frequencies, rotary_angles
from tsjax.steps import RopeConfig

pytestmark = pytest.mark.usefixtures("strict_promotion")


def test_angles_are_computed_in_the_wide_type():
    """At position 100,000 a bfloat16 angle would be off by hundreds."""
    positions = np.asarray([0, 1, 100_000])
    cos, sin = rotary_angles(jnp.asarray(positions), RopeConfig(), 64, "bfloat16")
    assert cos.dtype == sin.dtype == "float32"
    angles = positions[:, None] * rope_frequencies(RopeConfig(), 64)
    np.testing.assert_allclose(cos, np.cos(angles), atol=2e-2)
    np.testing.assert_allclose(sin, np.sin(angles), atol=2e-2)


def test_linear_accumulates_bfloat16_in_float32(rng):
    """A sum of 4096 ones and a half: neither survives a bfloat16 accumulator."""
    x = jnp.ones((1, 4096), jnp.bfloat16)
    weight = jnp.ones((1, 4096), jnp.bfloat16)
    out = linear(x, weight, jnp.asarray([0.5], jnp.bfloat16), out_dtype=jnp.float32)
    assert out.dtype == jnp.float32 and out.item() == 4096.5
    assert linear(x, weight).dtype == jnp.bfloat16

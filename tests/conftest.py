# SPDX-License-Identifier: Apache-2.0
"""Four CPU devices for the sharding tests, a seeded NumPy generator, and the hypothesis profile."""

import os

import jax
import numpy as np
import pytest

try:
    import hypothesis
except ImportError:  # a GPU machine needs it for nothing: pytest -m gpu tests/test_on_gpu.py
    hypothesis = None

# Read when the backend starts, so it is set before any test module is imported.
jax.config.update("jax_num_cpu_devices", 4)

if hypothesis is not None:
    hypothesis.settings.register_profile("tsjax", deadline=None, derandomize="CI" in os.environ)
    hypothesis.settings.load_profile("tsjax")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)

# SPDX-License-Identifier: Apache-2.0
"""`run_if` computes what it says, and nothing of it when it is not wanted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers import entry_computation
from jax import lax

from tsjax.model.control_flow import run_if


def add_sorted(carry, x):
    return {"sum": carry["sum"] + jnp.sort(x)}


@pytest.mark.parametrize("wanted", [False, True])
def test_it_is_a_conditional(wanted):
    x, carry = jnp.asarray([3.0, 1.0, 2.0]), {"sum": jnp.ones(3)}
    found = jax.jit(run_if, static_argnums=1)(wanted, add_sorted, carry, x)
    expected = add_sorted(carry, x) if wanted else carry
    assert found["sum"].tolist() == expected["sum"].tolist()


def test_what_is_not_wanted_is_not_computed():
    """XLA moves what does not change out of a plain loop, and then always computes it."""

    def plain(wanted, function, carry, x):
        times = jnp.asarray(wanted, jnp.int32)
        return lax.fori_loop(0, times, lambda _, carry: function(carry, x), carry)

    for loop, outside in ((run_if, False), (plain, True)):
        shape = jax.ShapeDtypeStruct((50,), jnp.float32)
        lowered = jax.jit(loop, static_argnums=1).lower(True, add_sorted, {"sum": shape}, shape)
        text = lowered.compile().as_text()
        assert " sort(" in text
        assert (" sort(" in entry_computation(text)) == outside

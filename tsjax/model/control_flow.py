# SPDX-License-Identifier: Apache-2.0
"""Work that a step does only sometimes, on large buffers. Knows XLA, no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


def run_if(wanted, function: Callable[..., Any], carry, *inputs):
    """function(carry, *inputs) if the traced boolean `wanted` holds, else `carry`.

    A loop of one pass or none: for a conditional XLA copies the buffers that a branch reads. Of
    what does not change in a loop it computes all it can before the loop, wanted or not, so
    `inputs` pass a barrier that does; what `function` takes from elsewhere has to be combined with
    them before it costs anything.
    """

    def body(index, carry):
        _, held = lax.optimization_barrier((index, inputs))
        return function(carry, *held)

    return lax.fori_loop(jnp.int32(0), jnp.asarray(wanted, jnp.int32), body, carry)

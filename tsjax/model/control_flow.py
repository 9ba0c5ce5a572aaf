# SPDX-License-Identifier: Apache-2.0
"""Work that a step does only sometimes, on large buffers. Knows XLA, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tsjax.base.typing import Array, Int


def run_if(wanted, function: Callable[..., Any], carry, *inputs, small: bool = False):
    """function(carry, *inputs) if the traced boolean `wanted` holds, else `carry`.

    A loop of one pass or none: for a conditional XLA copies the buffers that a branch reads. Of
    what does not change in a loop it computes all it can before the loop, wanted or not, so
    `inputs` pass a barrier that does; what `function` takes from elsewhere has to be combined with
    them before it costs anything.

    A `small` carry may be copied. On a GPU it then is a conditional, which is part of a graph where
    a loop would ask the host (compiled, not run on one yet).
    """

    def by_loop(wanted, carry, *inputs):
        def body(index, carry):
            _, held = lax.optimization_barrier((index, inputs))
            return function(carry, *held)

        return lax.fori_loop(jnp.int32(0), jnp.asarray(wanted, jnp.int32), body, carry)

    def by_conditional(wanted, carry, *inputs):
        return lax.cond(wanted, function, lambda carry, *_: carry, carry, *inputs)

    if not small:
        return by_loop(wanted, carry, *inputs)
    return lax.platform_dependent(wanted, carry, *inputs, cuda=by_conditional, default=by_loop)


def run_at_most(most: int, wanted: Callable[[Any], Any], function: Callable[[Any], Any], carry):
    """`function` of the carry, again and again while it is `wanted`: at most `most` times, and once
    more it would change nothing that counts.

    A loop; on a GPU, where that would ask the host each turn, always `most` times.
    """

    def while_wanted(carry):
        return lax.while_loop(wanted, function, carry)

    def in_full(carry):
        return lax.fori_loop(0, most, lambda _, carry: function(carry), carry)

    return lax.platform_dependent(carry, cuda=in_full, default=while_wanted)


def run_one_of(number: Int[Array, ""], branches: Sequence[Callable], *inputs: Any) -> Any:
    """What the branch of this number makes of the inputs.

    On a GPU a conditional, which is part of a graph where a loop would ask the host (compiled, not
    run on one yet). Elsewhere loops: what is in a conditional XLA joins with what is around it, and
    sums then round otherwise than in a step without.
    """

    def by_loops(number, *inputs):
        shapes = jax.eval_shape(lambda: branches[0](*inputs))
        found = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        for index, branch in enumerate(branches):

            def run(_, *inputs, branch=branch):
                return branch(*inputs)

            found = run_if(number == index, run, found, *inputs)
        return found

    def by_conditional(number, *inputs):
        return lax.switch(number, branches, *inputs)

    return lax.platform_dependent(number, *inputs, cuda=by_conditional, default=by_loops)

# SPDX-License-Identifier: Apache-2.0
"""Programs that call an operation many times, and how long to run them.

Knows loops and times. Does not know which operations there are.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import report

L2_BYTES = 60e6  # an H200's
TURN_CALLS = 16  # the least calls in one turn of a program's loop: the loop itself costs a little
TINY = 1e-30
PATIENCE = 120.0  # seconds for all programs of one case


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long is measured."""

    rounds: int
    program: float  # seconds of one turn of a program's outer loop, at the bandwidth of a copy
    round: float  # seconds of one round of one implementation
    most: float  # seconds after which a slow implementation gets no more rounds
    workers: int  # compilations at a time
    tried: int  # candidates of --tune for each key


GPU = Effort(rounds=9, program=4e-3, round=20e-3, most=1.0, workers=6, tried=20)
QUICK = Effort(rounds=2, program=1e-4, round=1e-3, most=0.5, workers=2, tried=2)


def copies_needed(nbytes: int, is_gpu: bool) -> int:
    """Caches that take turns, together four times the L2 cache; one where one is as large."""
    return max(1, math.ceil(4 * L2_BYTES / nbytes)) if is_gpu else 2


def rounds_of_caches(copies: int, name: str, is_gpu: bool) -> int:
    """How often the caches take turns within one turn of the loop.

    "xla" is a loop itself, compiles longer, and does not notice the cost of another.
    """
    return 1 if name == "xla" or not is_gpu else math.ceil(TURN_CALLS / copies)


def repeats_needed(nbytes: int, bandwidth: float, seconds: float) -> int:
    """Calls that take `seconds` at the bandwidth of a copy."""
    return max(1, min(512, math.ceil(seconds * bandwidth / nbytes)))


def chained(call: Callable, repeats: int, unrolled: int) -> Callable:
    """A program that calls an operation times * repeats * unrolled times on each of its caches.

    `call(q, cache, *rest)` returns the next call's query and an output. The inner loop has a fixed
    count: a GPU runs it without asking the host after each turn.
    """

    def run(times, q, caches, rest):
        def turn(_, carry):
            q, out = carry
            for cache in caches * unrolled:
                q, out = call(q, cache, *rest)
            return q, out

        def turns(_, carry):
            return lax.fori_loop(0, repeats, turn, carry)

        _, out = jax.eval_shape(call, q, caches[0], *rest)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)
        q, out = lax.fori_loop(0, times, turns, (q, nothing))
        return q if out is None else out

    return jax.jit(run)


def output_is_query(attention: Callable) -> Callable:
    """For `chained`: nothing else runs between two calls."""
    return lambda *arguments: (attention(*arguments), None)


def output_hardly_counts(scores: Callable) -> Callable:
    """For `chained`: the query stays as it is, but XLA cannot know it before it has the scores."""

    def call(q, cache, length):
        out = lax.optimization_barrier(scores(q, cache, length))
        first = out[(slice(0, 1),) * out.ndim].ravel()[0]
        return q + (TINY * first).astype(q.dtype), out

    return call


class JaxRunner:
    """A compiled program of `chained` and its arguments."""

    def __init__(self, program, arguments, calls: int):
        self._program, self._arguments, self._calls = program, arguments, calls
        self.times = 1

    def warm(self, seconds: float):
        """Chooses how often it runs so that a round takes `seconds`; returns an output."""
        out = self._run()
        if not np.isfinite(np.asarray(out).astype(np.float32)).all():
            raise FloatingPointError("the output is not finite")
        self.times = max(1, math.ceil(seconds / (self.round() * self._calls)))
        return out

    def round(self) -> float:
        """Seconds per call."""
        begin = time.perf_counter()
        self._run()
        return (time.perf_counter() - begin) / (self.times * self._calls)

    def _run(self):
        times = jnp.asarray(self.times, jnp.int32)
        return jax.block_until_ready(self._program(times, *self._arguments))


def compiled(call: Callable, arguments, repeats: int, unrolled: int):
    """The program of `chained` for arguments or their shapes (q, caches, rest)."""
    times = jax.ShapeDtypeStruct((), jnp.int32)
    return chained(call, repeats, unrolled).lower(times, *arguments).compile()


def time_runners(runners: dict, effort: Effort, rounds: int, seconds: float, failed: dict):
    """Seconds per call of each runner in each round, and outputs; errors go into `failed`."""
    outputs: dict[Any, Any] = {}
    for name, runner in runners.items():
        try:
            outputs[name] = runner.warm(seconds)
        except Exception as error:
            failed[name] = report.first_line(error)
    calls = {name: runners[name].round for name in outputs}
    found = report.interleaved(calls, rounds, warmup=0, most=effort.most, keep_errors=True)
    failed |= {name: report.first_line(error) for name, error in found.failed.items()}
    return found.results, outputs


def relative_difference(ours, theirs) -> float:
    """The largest difference, over the largest value."""
    ours, theirs = (np.asarray(array).astype(np.float32) for array in (ours, theirs))
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())

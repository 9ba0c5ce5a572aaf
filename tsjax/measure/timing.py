# SPDX-License-Identifier: Apache-2.0
"""Several calls timed side by side, so that a machine whose speed drifts favours none of them.

Knows calls, rounds and a clock. Does not know what is called, and prints nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

LEAST_ROUNDS = 3


class Rounds(NamedTuple):
    """What was measured: for each name one entry per round, in the order of the rounds.

    Attributes:
      seconds: from the call until its result was ready.
      results: what the call returned. All of them are kept, so they should be small.
      failed: the error of each call that raised one, where errors are asked for.
    """

    seconds: dict[Any, list[float]]
    results: dict[Any, list[Any]]
    failed: dict[Any, Exception]


def fill(
    found: Rounds,
    calls: Mapping[Any, Callable[[], Any]],
    rounds: int,
    warmup: int,
    *,
    most: float = float("inf"),
    keep_errors: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[Any, float]]:
    """Makes every call once in each round, into `found`, where it stays if one is interrupted.

    Every second round goes backwards: a drift of the machine's speed is then cancelled over two
    rounds, and no call always follows the same other one. Yields each call's name and seconds when
    it has been made, also in rounds that do not count.

    Args:
      warmup: rounds before the first one that counts. They compile.
      most: a call that has used this many seconds and has LEAST_ROUNDS rounds gets no more.
      keep_errors: a call that raises moves to `failed`. Otherwise its error is raised.
    """
    for number in range(-warmup, rounds):
        order = list(found.seconds) if number % 2 == 0 else list(reversed(found.seconds))
        for name in order:
            times = found.seconds[name]
            if len(times) >= LEAST_ROUNDS and sum(times) > most:
                continue
            begun = clock()
            try:
                result = jax.block_until_ready(calls[name]())
            except Exception as error:
                if not keep_errors:
                    raise
                found.failed[name] = error
                del found.seconds[name], found.results[name]
                continue
            seconds = clock() - begun
            if number >= 0:
                times.append(seconds)
                found.results[name].append(result)
            yield name, seconds


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """The summary of ratios that were taken round by round, as far as both have rounds: an
    interrupted run lacks some."""
    return summary([a / b for a, b in zip(over, under, strict=False)])

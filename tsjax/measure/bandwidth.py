# SPDX-License-Identifier: Apache-2.0
"""The speed of a device's memory, which bounds a step of plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tsjax.host.measuring import REPETITIONS, Clock, Timed

MOST_READ, ROW = 2**28, 1024  # bytes of an array that is read, and its numbers that are one sum
COPY_ROUNDS, COPIES = 7, 10


def read_rate(nbytes: float, clock: Clock = time.perf_counter) -> float:
    """Bytes per second at which an array of so many bytes is read, again and again: by sums, on a
    GPU as by a copy.

    On a CPU an array that fits into a cache is read from there, as are so few weights in every
    step. A GPU's is always a large one.
    """
    return reader(nbytes, clock)()


def reader(nbytes: float, clock: Clock = time.perf_counter) -> Callable[[], float]:
    """What measures `read_rate` each time it is called, compiled once."""
    (device,) = jnp.zeros(()).devices()
    if device.platform == "gpu":
        return copier(MOST_READ, clock)
    rows = max(int(min(nbytes, MOST_READ)) // (4 * ROW), 1)
    data, sums = jnp.ones((rows, ROW), jnp.float32), jnp.zeros((rows,), jnp.float32)
    part = Timed(jax.jit, lambda sums, data: sums + data.sum(1), sums, lambda context: (data,))
    part.compile()
    return lambda: data.nbytes / min(part.seconds(0, clock) for _ in range(REPETITIONS))


def copier(nbytes: int, clock: Clock = time.perf_counter) -> Callable[[], float]:
    """What measures the bytes per second, read and written, of copying an array: the best round.

    The copies of a round are started one after the other: a loop in a program would let the host
    take part in each turn.
    """
    data = jax.random.bits(jax.random.key(0), (nbytes // 4,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ 1).lower(data).compile()  # one as it is might not be computed

    def rate() -> float:
        copy(data).block_until_ready()
        best = float("inf")
        for _ in range(COPY_ROUNDS):
            begun, x = clock(), data
            for _ in range(COPIES):
                x = copy(x)
            x.block_until_ready()
            best = min(best, clock() - begun)
        return 2 * data.nbytes * COPIES / best

    return rate

# SPDX-License-Identifier: Apache-2.0
"""Several processes that run one program, each with some of a mesh's devices.

All of them make the same calls with the same arguments, and hold the arrays together. What each
knows by itself alone, its clock, its memory and its signals, they tell each other here, so that all
decide alike. Where there is one process nothing is sent.
"""

from __future__ import annotations

import functools
import hashlib
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.model.sharding import everywhere, mesh_of

GONE = 10  # seconds without a word after which a process counts as gone


def meet_others() -> None:
    """Meets the other processes of this program, before anything else is done with jax.

    Slurm, MPI and Kubernetes say which they are; else the environment does: JAX_COORDINATOR_ADDRESS
    (HOST:PORT of the first one), JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    """
    config: Any = jax.config
    if config.jax_cpu_collectives_implementation is None:
        config.update("jax_cpu_collectives_implementation", "gloo")
    count, number = (_from_environment(f"JAX_{name}") for name in ("NUM_PROCESSES", "PROCESS_ID"))
    try:
        jax.distributed.initialize(
            num_processes=count, process_id=number, heartbeat_timeout_seconds=GONE,
            shutdown_timeout_seconds=GONE,
        )  # fmt: skip
    except (ValueError, TypeError, RuntimeError) as error:
        remedy = "start it by srun or mpirun, or set JAX_COORDINATOR_ADDRESS=HOST:PORT, "
        remedy += "JAX_NUM_PROCESSES and JAX_PROCESS_ID for each process"
        raise BadValue(f"the processes did not meet: {error}; {remedy}") from error


def _from_environment(name: str) -> int | None:
    value = os.environ.get(name)
    if value is None:
        return None
    check(value.isdecimal(), name, value, "a number")
    return int(value)


def are_several() -> bool:
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this is the one that prints and writes."""
    return jax.process_index() == 0


def check_shared(arrays: Any) -> None:
    """Refuses, where several processes run together, a model that each has by itself."""
    if are_several() and mesh_of(arrays) is None:
        raise BadValue(
            f"a model on one device is not valid among {jax.process_count()} processes, which "
            "would wait for each other: load it with mesh=, of devices of all, or start each "
            "process by itself, without jax.distributed.initialize()"
        )


def check_same(call: str, *asked: Any) -> None:
    """Refuses in all processes a call that they do not make alike, by what `asked` looks like."""
    if not are_several():
        return
    digest = hashlib.sha256(repr(asked).encode()).digest()
    number = int.from_bytes(digest[:5])  # as much as `_of_all` takes without rounding
    if len({*_of_all(number)}) > 1:
        raise BadValue(
            f"{call} is not asked for the same by all {jax.process_count()} processes: they make "
            "each call together, with the same arguments"
        )


def first_says(value: float) -> float:
    return float(_of_all(value)[0]) if are_several() else value


def most(value: float) -> float:
    return float(_of_all(value).max()) if are_several() else value


def least(value: float) -> float:
    return float(_of_all(value).min()) if are_several() else value


def _of_all(value: float) -> np.ndarray:
    from jax.experimental import multihost_utils

    # As two numbers that float32 has: jax has no float64 by default.
    high = np.float32(value)
    both = np.asarray([high, np.float32(value - float(high))], np.float32)
    found = np.asarray(multihost_utils.process_allgather(both), np.float64)
    return found.reshape(-1, 2).sum(axis=1)


def on_host(tree: Any) -> Any:
    """NumPy arrays of what all processes hold together; all have to ask."""

    def one(x: jax.Array) -> np.ndarray:
        if not x.is_fully_addressable and not x.is_fully_replicated:
            place: Any = x.sharding
            x = _copied(everywhere(place.mesh))(x)
        return np.asarray(x)

    return jax.tree.map(one, tree)


@functools.cache
def _copied(place: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=place)


def own_device(arrays: Any) -> Any:
    """One of this process's devices that hold them."""
    devices, own = jax.tree.leaves(arrays)[0].devices(), jax.process_index()
    return next(one for one in devices if not are_several() or one.process_index == own)

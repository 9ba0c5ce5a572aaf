# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: how long it takes to make them, and where they are kept.

Knows jax's settings and events and the user's cache folder. Does not know what a program does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.monitoring

import pallas_kernels

COMPILING = "/jax/core/compile/"  # how the events of tracing, lowering and compiling begin
MOST_BYTES = 4 * 2**30  # of the default folder; the least recently used go first


class _Intervals(threading.local):
    """When a thread was compiling. Events come when something ends, what encloses others last."""

    def __init__(self):
        self.total = 0.0
        self.known: list[tuple[float, float]] = []

    def add(self, begin: float, end: float) -> None:
        while self.known and self.known[-1][0] >= begin:
            inner = self.known.pop()
            self.total -= inner[1] - inner[0]
        self.known.append((begin, end))
        self.total += end - begin


_INTERVALS = _Intervals()


@functools.cache
def _listen() -> None:
    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(COMPILING):
            end = time.perf_counter()
            _INTERVALS.add(end - duration_secs, end)

    jax.monitoring.register_event_duration_secs_listener(note)


class Stopwatch:
    """The seconds of the blocks it is entered for, without those in which jax compiled.

    Tracing, lowering and reading a kept program count as compiling.

    Attributes:
      seconds: of all blocks.
      last: of the last one.
      compiling: seconds of compiling in all blocks.
    """

    def __init__(self):
        _listen()
        self.seconds = self.last = self.compiling = 0.0

    def __enter__(self) -> Stopwatch:
        self._began, self._compiled = time.perf_counter(), _INTERVALS.total
        return self

    def __exit__(self, *_) -> None:
        compiling = _INTERVALS.total - self._compiled
        self.last = max(time.perf_counter() - self._began - compiling, 0.0)
        self.seconds += self.last
        self.compiling += compiling


def enable_compilation_cache(folder: str | os.PathLike) -> None:
    """Keeps compiled programs in `folder`, also those that compile in under a second.

    They lie in a subfolder for this kind of machine and these kernels: jax's key of a program
    knows neither the instructions of a CPU nor what a kernel does on each device of a mesh.
    """
    place = os.path.join(os.fspath(folder), _kind())
    os.makedirs(place, exist_ok=True)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # A kernel on a mesh brings the address of a Python function, other in every process.
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)


def keep_programs() -> str | None:
    """Keeps compiled programs in the user's cache folder, unless jax was told what to do.

    Returns the folder; None where jax has a folder of its own or is to keep none, and where the
    folder cannot be made.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return None
    folder = default_folder()
    try:
        enable_compilation_cache(folder)
    except OSError:  # a home that cannot be written: programs are made anew
        return None
    if config.jax_compilation_cache_max_size == -1:  # jax's default: no limit
        config.update("jax_compilation_cache_max_size", MOST_BYTES)
    return folder


def default_folder() -> str:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "tsjax", "programs")


@functools.cache
def _kind() -> str:
    """Names what programs depend on beside jax's own key: the CPU's instructions, our kernels."""
    digest = hashlib.sha256()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", "rb") as file:
        digest.update(
            next((line for line in file if line.startswith((b"flags", b"Features"))), b"")
        )
    root = Path(pallas_kernels.__file__).parent
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.json")]):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return f"{platform.machine()}-{digest.hexdigest()[:16]}"

# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: how long it takes to make them, and where they are kept.

Knows jax's settings and events. Does not know what a program does.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import platform
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

import pallas_kernels
from pallas_kernels.cache_folder import cache_folder
from tsjax.base.errors import NotWritable
from tsjax.files.locked_files import lock
from tsjax.files.whole_files import place_of

_chosen: Path | None = None  # by `enable_compilation_cache`
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
    """Keeps compiled programs in `folder`, also small ones and those that compile in no time.

    They lie in a subfolder for this kind of machine and these kernels: jax's key of a program
    knows neither the instructions of a CPU nor what a kernel does on each device of a mesh. A
    folder that cannot be written is an OSError.
    """
    place = os.path.join(os.fspath(folder), kind_of_machine())
    os.makedirs(place, exist_ok=True)
    if not os.access(place, os.W_OK | os.X_OK):
        raise NotWritable(errno.EACCES, os.strerror(errno.EACCES), place)
    choose_folder(Path(place))
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A kernel on a mesh brings the address of a Python function, other in every process.
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)


def keep_programs() -> Path | None:
    """Keeps compiled programs in the user's cache folder, unless jax was told what to do.

    Returns the folder; None where jax has a folder of its own or none is wanted. One that cannot be
    written is an OSError: programs are made anew then.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return None
    if (folder := programs_folder()) is None:
        return None
    enable_compilation_cache(folder)
    if config.jax_compilation_cache_max_size == -1:  # jax's default: no limit
        config.update("jax_compilation_cache_max_size", MOST_BYTES)
    _remove_cut_programs(config.jax_compilation_cache_dir)
    return folder


def _remove_cut_programs(place: str) -> None:
    """Removes what a killed process had half written: jax cannot read it, nor does it replace it.

    jax notes the time of use beside each program, after it is written; of a cut one there is no
    note. While a process writes, it has jax's lock: then this is left to the next one.
    """
    with open(place_of(os.path.join(place, ".lockfile")), "ab") as file:
        if not lock(file):
            return
        names = set(os.listdir(place))
        for name in names:
            program = name.removesuffix("-cache")
            if program != name and f"{program}-atime" not in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(place, name))


@functools.cache
def try_to_keep_programs() -> None:
    """`keep_programs` for those who did not ask for it: trouble is a warning, once."""
    try:
        keep_programs()
    except OSError as error:
        warnings.warn(f"compiled programs are not kept: {error}", stacklevel=2)


def programs_folder() -> Path | None:
    """Where commands keep compiled programs; None for nowhere."""
    folder = cache_folder()
    return folder and folder / "programs"


def choose_folder(place: Path | None) -> None:
    """Where finished programs are kept whole; None for the user's cache folder, where jax has none
    of its own."""
    global _chosen
    _chosen = place


def executables_folder() -> Path | None:
    """Where finished programs are kept whole; None for nowhere, and where jax was told of a folder
    that is not ours."""
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return None
    if _chosen is not None:
        return _chosen
    folder = None if config.jax_compilation_cache_dir else programs_folder()
    return folder and folder / "whole"


@contextlib.contextmanager
def without_jaxs_folder() -> Iterator[None]:
    """Compiles anew what jax has kept: of a program that it read from there not all can be taken
    out again."""
    config: Any = jax.config
    if not (config.jax_compilation_cache_dir and config.jax_enable_compilation_cache):
        yield
        return
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def counted_as_compiling() -> Iterator[None]:
    """What is read in place of compiling, as a Stopwatch sees it."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        _INTERVALS.add(begin, time.perf_counter())


@functools.cache
def kind_of_machine() -> str:
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

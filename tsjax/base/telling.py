# SPDX-License-Identifier: Apache-2.0
"""What is at work, for whoever listens: a line on stderr, or a function of the user's.

Knows the standard library alone, so that it can speak while jax is still being imported. Does not
know what the works are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_LOADED = time.monotonic()


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a work is. As a string it is what a person reads: "loading 1.2 of 2.5 GB".

    Attributes:
      what: is being done: "loading", "reading the prompt", "compiling".
      done: of `total`; None where nobody counts.
      total: None where it is not known.
      unit: of both: "bytes", "tokens"; or "".
      seconds: since the work began.
      beside: what another thread does meanwhile, or None.
    """

    what: str
    done: int | None = None
    total: int | None = None
    unit: str = ""
    seconds: float = 0.0
    beside: Progress | None = None

    def __str__(self) -> str:
        text = " ".join(filter(None, (self.what, self._figures())))
        return text if self.beside is None else f"{text}; {self.beside} beside the run"

    def _figures(self) -> str:
        known = [count for count in (self.done, self.total) if count is not None]
        if not known:
            return ""
        unit, figures = self.unit, [f"{count:,}" for count in known]
        if unit == "bytes":
            scale, digits, unit = (1e9, 1, "GB") if max(known) >= 1e9 else (1e6, 0, "MB")
            figures = [f"{count / scale:,.{digits}f}" for count in known]
        return " of ".join(figures) + (f" {unit}" if unit else "")


Listener = Callable[[Progress], object]
_BESIDE: Progress | None = None  # of the process


class Works:
    """The works that one listener hears of, the innermost last.

    It is called in the thread that works: when a work begins, gets on, or gives way to the one
    around it; with None when the last one has ended.
    """

    # Works that follow each other so soon are one time of work.
    PAUSE = 0.25

    def __init__(self, hear: Callable[[Progress | None], object], clock: Callable[[], float]):
        self._hear, self._clock, self._lock = hear, clock, threading.Lock()
        self._works: list[_Work] = []
        self._ended, self._busy_since = -self.PAUSE, 0.0

    def now(self) -> Progress | None:
        """The innermost work; None where nothing is at work."""
        with self._lock:
            return self._works[-1].progress(self._clock()) if self._works else None

    @property
    def busy_since(self) -> float:
        """By the clock, when the present time of work began."""
        return self._busy_since

    @property
    def outermost_since(self) -> float:
        """By the clock, when the work around all others began."""
        with self._lock:
            return self._works[0].began if self._works else self._clock()

    def begin(self, work: _Work) -> None:
        with self._lock:
            work.began = self._clock()
            if not self._works and work.began - self._ended >= self.PAUSE:
                self._busy_since = work.began
            self._works.append(work)
        self.tell()

    def end(self, work: _Work) -> None:
        with self._lock:
            self._works.remove(work)
            self._ended = self._clock()
        self.tell()

    def tell(self) -> None:
        self._hear(self.now())


_LISTENING: ContextVar[Works | None] = ContextVar("tsjax_listening", default=None)


class _Work:
    """One of them, for the block that it is entered for."""

    def __init__(self, works: Works, what: str, total: int | None, unit: str):
        self._works, self._what, self._total, self._unit = works, what, total, unit
        self._done: int | None = None
        self.began = 0.0

    def done(self, count: int) -> None:
        """How much of `total` is done by now."""
        self._done = count
        self._works.tell()

    def progress(self, now: float) -> Progress:
        seconds = now - self.began
        return Progress(self._what, self._done, self._total, self._unit, seconds, _BESIDE)

    def __enter__(self) -> _Work:
        self._works.begin(self)
        return self

    def __exit__(self, *_) -> None:
        self._works.end(self)


class _Unheard:
    """A work while nobody listens."""

    def done(self, count: int) -> None:
        pass

    def __enter__(self) -> _Unheard:
        return self

    def __exit__(self, *_) -> None:
        pass


_UNHEARD = _Unheard()


def doing(what: str, total: int | None = None, unit: str = "") -> _Work | _Unheard:
    """Says, for a block, what is being done there: with doing("reading", total=9) as work: ...

    Whoever listens in this context hears of it; `work.done(n)` says how much of `total` is done.
    """
    works = _LISTENING.get()
    return _UNHEARD if works is None else _Work(works, what, total, unit)


def beside(what: str | None, done: int | None = None, total: int | None = None) -> None:
    """What a thread of the background does, told with the works of all others; None ends it."""
    global _BESIDE
    _BESIDE = None if what is None else Progress(what, done, total)


@contextlib.contextmanager
def hearing(
    hear: Callable[[Progress | None], object], clock: Callable[[], float] = time.monotonic
) -> Iterator[Works]:
    """As `listening`, for one that wants to know when the last work has ended."""
    works = Works(hear, clock)
    before = _LISTENING.set(works)
    try:
        yield works
    finally:
        _LISTENING.reset(before)


@contextlib.contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Calls `listener` with the Progress of what is at work in the block, in place of others that
    listen; with None nobody does."""

    def hear(progress: Progress | None) -> None:
        if listener is not None and progress is not None:
            listener(progress)

    with hearing(hear):
        yield


def seconds_of_process() -> float:
    """Since this process began; where the system does not say, since this module was loaded."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            # Its 22nd field; the name of the program, the second, may have spaces and brackets.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _LOADED

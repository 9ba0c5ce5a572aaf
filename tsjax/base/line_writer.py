# SPDX-License-Identifier: Apache-2.0
"""The line on stderr that says what is at work: renewed in place on a terminal, else line by line.

Knows streams and a timer. A thread writes, as the one that works may be deep in compiled code.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tsjax.base.errors import BadType
from tsjax.base.telling import Progress, Works, hearing, listening

SECONDS_UNTOLD = 1.0  # what takes less is not worth a line
SECONDS_BETWEEN = 2.0  # lines that stay, or where that is longer
SHARE_BETWEEN = 0.1  # of the time that the work has taken
SECONDS_PER_LOOK = 0.25
_WIDTH = 80  # of a terminal that does not tell
_ERASE = "\r\x1b[K"


class LineWriter:
    """Writes to a stream what is at work, and gets out of the way of what else is written.

    On a terminal the line is there only while nothing else is written for a while, and never
    behind a text that has not ended its own line.
    """

    def __init__(self, out: Any, clock: Callable[[], float] = time.monotonic):
        self._out, self._clock = out, clock
        self._in_place = out.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.RLock()  # a signal's handler may write, too
        self._shown: Progress | None = None  # in place
        self._written, self._inside_line = -1.0, False  # when, and how, the last text ended

    def hear(self, progress: Progress | None) -> None:
        """The line of a work that has ended goes at once."""
        with self._lock:
            if self._shown and (progress is None or progress.what != self._shown.what):
                self._erase()

    def look(self, works: Works) -> None:
        """Tells what is at work, if it is time to."""
        with self._lock:
            found, now = works.now(), self._clock()
            if found is None or self._inside_line:
                return
            begun = works.busy_since
            silent = now - max(begun, self._written)
            wait = SECONDS_UNTOLD
            if not self._in_place and self._written > begun:
                # What would be due before the next look comes now.
                share = SHARE_BETWEEN * (now - works.outermost_since)
                wait = max(SECONDS_BETWEEN, share) - SECONDS_PER_LOOK
            if silent >= wait:
                self._tell(found, now)

    def pass_on(self, stream: Any, text: str) -> int:
        """Writes what others say."""
        with self._lock:
            self._erase()
            count = stream.write(text)
            if text:
                self._written, self._inside_line = self._clock(), text[-1] not in "\r\n"
            return count

    def close(self) -> None:
        with self._lock:
            self._erase()

    def _tell(self, found: Progress, now: float) -> None:
        # Of what counts nothing, the seconds show that it goes on.
        since = "" if found.done is not None else f", {found.seconds:.0f} s"
        line = f"[{found}{since}]"
        if self._in_place:
            self._shown = found
            self._write(_ERASE + line[: _width(self._out) - 1])
        else:
            self._written = now
            self._write(line + "\n")

    def _erase(self) -> None:
        if self._shown:
            self._shown = None
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more; it was closed
            self._out.write(text)
            self._out.flush()


class _Watched:
    """A stream whose writer is told of all that is written to it."""

    def __init__(self, stream: Any, writer: LineWriter):
        self._stream, self._writer = stream, writer

    def write(self, text: str) -> int:
        return self._writer.pass_on(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_TELLS = threading.Lock()  # held by the one that writes lines in this process


@contextlib.contextmanager
def told_on_stderr() -> Iterator[None]:
    """Tells on stderr what is at work in the block; where that is told already, nothing changes."""
    out, err = sys.stdout, sys.stderr
    if err is None or not _TELLS.acquire(blocking=False):
        yield
        return
    writer, ended = LineWriter(err), threading.Event()
    try:
        with hearing(writer.hear) as works:

            def keep_looking() -> None:
                while not ended.wait(SECONDS_PER_LOOK):
                    writer.look(works)

            timer = threading.Thread(target=keep_looking, name="tsjax-tells", daemon=True)
            timer.start()
            watched: list[Any] = [contextlib.redirect_stderr(_Watched(err, writer))]  # type: ignore
            if _same_place(out, err):
                watched.append(contextlib.redirect_stdout(_Watched(out, writer)))  # type: ignore
            try:
                with contextlib.ExitStack() as stack:
                    for one in watched:
                        stack.enter_context(one)
                    yield
            finally:
                ended.set()
                timer.join()
                writer.close()
    finally:
        _TELLS.release()


def told_as(progress: Any) -> contextlib.AbstractContextManager[Any]:
    """For the argument `progress` of a call: False leaves it to the caller who hears of it, True
    tells on stderr, and a function gets each Progress."""
    check_progress(progress)
    if progress is False:
        return contextlib.nullcontext()
    return told_on_stderr() if progress is True else listening(progress)


def check_progress(progress: Any) -> None:
    if not (isinstance(progress, bool) or callable(progress)):
        wanted = "False, True, or a function that takes a tsjax.results.Progress"
        raise BadType(f"progress={progress!r:.80} is not valid: {wanted}")


def _same_place(one: Any, other: Any) -> bool:
    """Whether two streams end up in the same terminal, file or pipe."""
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError, AttributeError):  # a stream of Python's alone
        return one is other


def _width(out: Any) -> int:
    try:
        return os.get_terminal_size(out.fileno()).columns or _WIDTH
    except (OSError, ValueError, AttributeError):
        return _WIDTH

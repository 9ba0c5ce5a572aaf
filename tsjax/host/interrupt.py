# SPDX-License-Identifier: Apache-2.0
"""Signals as a flag, so that long work ends at a good place, and what is raised there.

Knows handlers and exceptions. Does not know what is interrupted: whoever enters an Interrupt asks
it now and then, brings the work to an end, and hands over the result.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from tsjax.base.checks import check
from tsjax.host import processes


class Interrupted(BaseException):
    """A signal ended the work; `result` is what there is, as it would have been returned.

    After Ctrl-C it is a KeyboardInterrupt, too; after SIGTERM a SystemExit. Uncaught, it ends the
    process with 130 or 143.
    """

    def __init__(self, result: Any):
        super().__init__("a signal ended the run; what there is lies in .result")
        self.result = result


class _CtrlC(Interrupted, KeyboardInterrupt):
    """In an interactive session, which goes on."""


class _Exit(Interrupted, SystemExit):
    def __init__(self, result: Any, code: int):
        super().__init__(result)
        self.code = code


class _CtrlCExit(_Exit, _CtrlC):
    """In a script: Python exits with 130 for KeyboardInterrupt, but not for subclasses of it."""


class Interrupt:
    """Turns SIGINT and SIGTERM into a flag while entered; re-entrant; only the main thread can.

    A second SIGINT raises KeyboardInterrupt. A signal that is ignored, or handled outside Python,
    stays so: Python could not give the latter back. Where several processes run together, a signal
    to one of them counts for all, from the next `meet` on.
    """

    def __init__(self):
        self._number: int | None = None  # of the first signal
        self._unheard = 0  # of one that the other processes do not know of yet
        self._earlier: Any = None  # the handler that would have got it
        self._depth = 0
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self._number is not None

    def meet(self) -> None:
        """Where several processes run together, each tells the others of a signal."""
        if processes.are_several():
            self._number = self._number or int(processes.most(self._unheard)) or None

    def __enter__(self):
        if self._depth == 0 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                earlier = signal.getsignal(number)
                if earlier not in (signal.SIG_IGN, None):
                    self._previous[number] = earlier
                    signal.signal(number, self._note)
        self._depth += 1
        return self

    def __exit__(self, *_):
        self._depth -= 1
        if self._depth == 0:
            for number, earlier in self._previous.items():
                signal.signal(number, earlier)
            self._previous.clear()

    def _note(self, number, frame):
        if (self.requested or self._unheard) and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self._unheard, self._earlier = number, self._previous[number]
            if not processes.are_several():
                self._number = number

    def finish(self, result: Any, on_interrupt: str) -> None:
        """After a signal: calls the handler that was there before, then raises Interrupted.

        To be called when all is saved and the Interrupt is left. With on_interrupt="return", and
        where no signal came, it does nothing.
        """
        if self._number is None or on_interrupt == "return":
            return
        if callable(self._earlier) and self._earlier is not signal.default_int_handler:
            self._earlier(self._number, None)
        if self._number == signal.SIGTERM:
            raise _Exit(result, 128 + self._number)
        if hasattr(sys, "ps1"):
            raise _CtrlC(result)
        raise _CtrlCExit(result, 128 + self._number)


def check_on_interrupt(value: Any) -> None:
    check(value in ("raise", "return"), "on_interrupt", value, "'raise' or 'return'")

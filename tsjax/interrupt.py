# SPDX-License-Identifier: Apache-2.0
"""Signals as a flag, so that long work ends at a good place."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupt:
    """Turns SIGINT and SIGTERM into a flag while entered; re-entrant; only the main thread can.

    A second SIGINT raises KeyboardInterrupt.
    """

    def __init__(self):
        self.requested = False
        self._depth = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self):
        if self._depth == 0 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        self._depth += 1
        return self

    def __exit__(self, *_):
        self._depth -= 1
        if self._depth == 0:
            while self._previous:
                signal.signal(*self._previous.popitem())

    def _note(self, number, frame):
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

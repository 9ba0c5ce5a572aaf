# SPDX-License-Identifier: Apache-2.0
"""One writer at a time: locks that end with the process that took them, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import IO

from tsjax.files.whole_files import place_of


def lock(file: IO[bytes]) -> bool:
    """Whether nobody else has locked it. It stays locked until it is closed, at the latest until
    the process ends. Where files cannot be locked, an OSError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_still(file: IO[bytes], name: str) -> bool:
    """Whether an open file is the one of that name: it may have been replaced, or removed."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))
    except FileNotFoundError:
        return False


class WriterLock:
    """Who has it is the only writer of a file that is replaced again and again.

    It is a file beside that one. A killed process leaves it there, unlocked: it hinders nobody, and
    the next one that has had it removes it.
    """

    def __init__(self, path: str):
        self._name = place_of(f"{path}.lock")
        self._file: IO[bytes] | None = None

    def take(self) -> bool:
        """Whether no other has it."""
        while self._file is None:
            with contextlib.ExitStack() as opened:
                file = opened.enter_context(open(self._name, "ab"))
                if not lock(file):
                    return False
                if is_still(file, self._name):  # else who had it has just removed it
                    opened.pop_all()
                    self._file = file
        return True

    def give_back(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name)
            self._file.close()
            self._file = None

# SPDX-License-Identifier: Apache-2.0
"""Programs that are compiled beside a run, which goes on without them until they are kept on disk.

Knows who compiles: on a CPU another process that has only the time that nobody else wants, so that
the run is as fast as before; on other devices, whose programs a second process could not compile, a
thread. The process goes on when the run has ended: what it makes is there for the next one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from typing import NamedTuple

import jax

from tsjax.base.telling import beside, doing
from tsjax.files.locked_files import lock
from tsjax.host import kept_programs
from tsjax.host.compilation import choose_folder, executables_folder
from tsjax.host.device_programs import Call, programs_on

WAITS = 0.05  # seconds between two looks
# Of the least priority before it imports anything: that takes longer than to compile a step.
START = """
import os, sys
os.nice(19)
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
except (AttributeError, OSError):
    pass
sys.path[:0] = sys.argv[1:]
from tsjax.host.beside import serve
serve()
"""


class Asked(NamedTuple):
    """A program to compile, in words and shapes that another process understands."""

    name: str
    platform: str
    dtype: str
    call: Call  # of shapes
    words: str

    def compile(self) -> None:
        """Compiles and keeps it, unless another one is at it, or it is there by now."""
        folder = kept_programs.safe_folder()
        if folder is None or kept_programs.is_kept(self.words):
            return
        device = jax.devices(self.platform)[0]
        found = kept_programs.words_of(self.name, self.call.static, self.call.arguments, device)
        if found != self.words:
            raise RuntimeError(f"it would be another program: {_difference(found, self.words)}")
        with open(folder / f".{kept_programs.name_of(self.words)}.lock", "ab") as file:
            if lock(file):
                program = getattr(programs_on(self.platform, self.dtype), self.name)
                program.make(self.call, self.words)
                with contextlib.suppress(OSError):
                    os.unlink(file.name)


def _difference(found: str, wanted: str) -> str:
    pairs = zip(found.split("\n"), wanted.split("\n"), strict=False)
    return next((f"{one!r:.99} and not {other!r:.99}" for one, other in pairs if one != other), "")


def _warn(why: str) -> None:
    warnings.warn(f"a program was not compiled beside the run: {why}", stacklevel=2)


class OtherProcess:
    """With the least priority, and not of the terminal's group: Ctrl-C is the run's."""

    def __init__(self, asked: list[Asked]):
        root = str(kept_programs.TSJAX.parent)  # as this process has found it
        names, values = kept_programs.setting_names(), kept_programs.settings()
        told = pickle.dumps((executables_folder(), dict(zip(names, values, strict=True))))
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, root], stdin=subprocess.PIPE, process_group=0,
            stdout=subprocess.DEVNULL, stderr=self._errors,
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(told + pickle.dumps(asked))

    def has_ended(self) -> bool:
        if self._process.poll() is None:
            return False
        if self._process.returncode:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").splitlines()
            _warn(lines[-1] if lines else f"exit code {self._process.returncode}")
        self._errors.close()
        return True


def serve() -> None:
    """What that process does."""
    folder, settings = pickle.load(sys.stdin.buffer)
    for name, value in settings.items():
        if getattr(jax.config, name, None) != value:
            jax.config.update(name, value)
    jax.config.update("jax_enable_compilation_cache", True)
    choose_folder(folder)
    for one in pickle.load(sys.stdin.buffer):
        one.compile()


class OtherThread:
    """Of this process, which does not end before it."""

    def __init__(self, asked: list[Asked]):
        self._asked, self._error = asked, ""
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            for one in self._asked:
                one.compile()
        except Exception as error:  # the run goes on without
            self._error = f"{error}"

    def has_ended(self) -> bool:
        if self._thread.is_alive():
            return False
        if self._error:
            _warn(self._error)
        return True


class Beside:
    """What is compiled beside the runs of this process: a few programs at a time."""

    def __init__(self) -> None:
        self._waiting: list[Asked] = []
        self._helper: OtherProcess | OtherThread | None = None
        self._asked: set[str] = set()
        self._seconds, self._since = 0.0, 0.0

    def ask(self, asked: list[Asked]) -> None:
        """What was asked for before in this process is not begun again."""
        self._waiting += [one for one in asked if one.words not in self._asked]
        self._asked |= {one.words for one in asked}
        self.look()

    def look(self) -> None:
        """Begins with what waits where nobody compiles any more."""
        if self._helper is not None and self._helper.has_ended():
            self._seconds, self._helper = self.seconds, None
        if self._helper is None and self._waiting:
            asked, self._waiting = self._waiting, []
            self._since = time.monotonic()
            on_cpu = asked[0].platform == "cpu"
            self._helper = OtherProcess(asked) if on_cpu else OtherThread(asked)
        made = sum(map(kept_programs.is_kept, self._asked)) if self._helper else 0
        beside("compiling" if self._helper else None, made, len(self._asked))

    def finish(self) -> None:
        """Waits until all is compiled that was asked for."""
        with doing("compiling"):
            while self.is_working:
                time.sleep(WAITS)
                self.look()

    @property
    def is_working(self) -> bool:
        return self._helper is not None

    @property
    def seconds(self) -> float:
        """In which something was compiled."""
        return self._seconds + (time.monotonic() - self._since if self._helper else 0.0)


BESIDE = Beside()

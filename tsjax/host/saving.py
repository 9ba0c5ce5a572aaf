# SPDX-License-Identifier: Apache-2.0
"""Keeps a run's file up to date while it goes on.

Knows where and when to write. The file's format is in saved_run.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from tsjax.base.errors import BadValue
from tsjax.decoding.processors import named
from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import model_fingerprint
from tsjax.files.locked_files import WriterLock
from tsjax.files.tensor_names import held_as
from tsjax.files.whole_files import check_place
from tsjax.host import processes
from tsjax.host.prefix import check_prefix_is_read_alike
from tsjax.host.request import Request
from tsjax.host.run import News
from tsjax.host.saved_run import SavedRun, check_savable, write_run


class Writing:
    """Writes while a run goes on. A failure is a warning and no end of the run: it may pass.

    Attributes:
      problems: why something was not written, each reason once.
      unsaved: whether the last tokens or steps of the run are in no file.
    """

    def __init__(self, stacklevel: int):
        self._stacklevel = stacklevel  # of the user's call, as seen from `attempt`
        self.problems: list[str] = []
        self.unsaved = False

    def attempt(self, what: str, write: Callable[..., object], *args: Any) -> bool:
        """Whether it was written."""
        try:
            write(*args)
        except OSError as error:  # a full disk must not cost what is in memory
            problem = f"{what} was not written: {error}"
            if problem not in self.problems:
                self.problems.append(problem)
                warnings.warn(problem, stacklevel=self._stacklevel)
            return False
        return True


class Saving(Writing):
    """Writes the file of `generate(save_to=...)`; while entered, no other run writes it."""

    def __init__(self, model: Model, request: Request, path: Any, every: int):
        super().__init__(stacklevel=6)
        self._model, self._request, self._path, self._every = model, request, path, every
        self._written = 0
        if path is not None:
            place = check_place(path, "save_to")
            check_savable(request.method)
            check_prefix_is_read_alike(request.prefix, request.prefix_length, "save_to")
            self._processors = named(request.processors)
            self._fingerprint = model_fingerprint(model)
            self._lock = WriterLock(place)

    def __enter__(self) -> Saving:
        if self._path is None:
            return self
        name, is_taken = os.fspath(self._path), False
        if processes.is_first():
            try:
                is_taken = not self._lock.take()
            except OSError as error:
                warnings.warn(f"save_to={name!r} cannot be locked: {error}", stacklevel=4)
        if processes.most(is_taken):
            wanted = "wait for it, or choose another file"
            raise BadValue(f"save_to={name!r} is being written by another run: {wanted}")
        return self

    def __exit__(self, *_) -> None:
        if self._path is not None:
            self._lock.give_back()

    def save(self, news: News, *, last: bool, alone: bool = False) -> None:
        """Writes the last news, and others when enough tokens have come since the last time.

        Of several processes the first one writes, but for one that is left `alone`. The others
        wait for the last writing.
        """
        count = max(map(len, news.all_tokens))
        if self._path is None or not (last or count - self._written >= self._every):
            return
        self._written = count
        if alone or processes.is_first():
            self._write(news)
        if last and not alone:
            self.unsaved = bool(processes.first_says(self.unsaved))

    def _write(self, news: News) -> None:
        run = SavedRun(
            fingerprint=self._fingerprint,
            model_path=self._model.path,
            dtype=self._model.cfg.dtype,
            weights=held_as(self._model.cfg),
            cache=self._model.cfg.cache,
            method=self._request.method,
            prefill=self._request.decode.prefill,
            prefix_length=self._request.prefix_length if self._request.decode.prefill else 0,
            exceed_max_positions=self._request.exceed_max_positions,
            single=self._request.single,
            config=self._request.config,
            prompts=self._request.prompts,
            tokens=news.all_tokens,
            processors=self._processors,
            logprobs=news.all_logprobs(),
            finish_reason=[None if r == "interrupted" else r for r in news.reasons],
        )
        what = f"save_to={os.fspath(self._path)!r}"
        self.unsaved = not self.attempt(what, write_run, self._path, run)

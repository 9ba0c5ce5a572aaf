# SPDX-License-Identifier: Apache-2.0
"""Keeps a run's file up to date while it goes on.

Knows when to write. The file's format is in saved_run.py.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import model_fingerprint
from tsjax.host.request import Request
from tsjax.host.run import News
from tsjax.host.saved_run import SavedRun, check_savable, check_target, write_run


class Saving:
    """Writes a run's file. A failure is a warning and no end of the run: it may pass."""

    def __init__(self, model: Model, request: Request, path: Any, every: int):
        self._model, self._request, self._path, self._every = model, request, path, every
        self._written = 0
        self.problems: list[str] = []
        self.unsaved = False
        if path is not None:
            check_target(path)
            check_savable(request.method)
            self._fingerprint = model_fingerprint(model)

    def save(self, news: News, *, last: bool) -> None:
        """Writes the last news, and others when enough tokens have come since the last time."""
        count = max(map(len, news.all_tokens))
        if self._path is None or not (last or count - self._written >= self._every):
            return
        self._written = count
        run = SavedRun(
            fingerprint=self._fingerprint,
            model_path=self._model.path,
            dtype=self._model.cfg.dtype,
            method=self._request.method,
            exceed_max_positions=self._request.exceed_max_positions,
            single=self._request.single,
            config=self._request.config,
            prompts=self._request.prompts,
            tokens=news.all_tokens,
            finish_reason=[None if r == "interrupted" else r for r in news.reasons],
        )
        try:
            write_run(self._path, run)
            self.unsaved = False
        except OSError as error:  # a full disk must not cost the tokens that are in memory
            self.unsaved = True
            problem = f"save_to={os.fspath(self._path)!r} was not written: {error}"
            if problem not in self.problems:
                self.problems.append(problem)
                warnings.warn(problem, stacklevel=3)

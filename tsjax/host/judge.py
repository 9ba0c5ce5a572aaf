# SPDX-License-Identifier: Apache-2.0
"""How a run goes on: its method is asked, by what the steps have found and how long they took.

Knows counters and clocks. Does not know when drafts pay: the method says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tsjax.decoding.method import PLAINLY, Measured, Method, Tried
from tsjax.decoding.state import DecodeState
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.costs import contradicts, forget, keep_plain
from tsjax.host.repetition import Foretold, mean_repeat
from tsjax.host.request import Request

STEPS_TO_KEEP = 16, 128  # of a row, after which what a plain one takes is kept
STEPS_TO_DOUBT = 256  # of all rows, before they say something of the table of costs
USUAL = 128  # tokens that an answer has at least, for all that is known at its start
LATELY = 10.0  # seconds of a row after which half of what was measured is forgotten


class Judge:
    """Asks the method how to go on, by what its steps have found and how long they took.

    A run that is to begin with a method may have to wait for it.
    """

    def __init__(self, model: Model, request: Request, state: DecodeState, begun: bool):
        self.costs = request.measured.costs  # another table, when it is measured
        self._to_begin = None if begun else request.decode.method
        self._foretold = Foretold(request.prompt_length)
        self._model, self._request, self._doubts = model, request, False
        self._reviving = self._is_reviving(state)
        self._context = request.measured.context
        self._tried: dict[Method, Tried] = {}
        self._to_keep = [steps * len(request.rows) for steps in STEPS_TO_KEEP]
        self._begin(Known.of(state))

    def _begin(self, known: Known) -> None:
        """From here on steps are judged; the first chunk is not, as what it does comes once."""
        self._first, self._last, self._since = True, known, 0.0
        self._seconds = self._steps = self._tokens = 0.0
        self._full = True

    def next(
        self, current: Method, state: DecodeState, tokens_left: float, took: float,
        compiling: float, moving: float,
    ) -> Method:  # fmt: skip
        """The method that is to draft the next chunk; the last one `took` so many seconds. A row is
        expected to get `tokens_left`. What was waited for `compiling` says what another program
        would take; to go over to the one that the run was to begin with takes so many seconds of
        `moving`."""
        now, last = Known.of(state), self._last
        self._reviving, was_reviving = self._is_reviving(state), self._reviving
        if self._reviving or was_reviving:  # while it revives, steps end early
            self._begin(now)
        elif not self._first:
            steps = now.steps - last.steps  # each of which some rows take
            self._full = self._full and bool(np.min(steps) == np.max(steps))
            spent = took * np.sum(steps) / max(np.max(steps), 1)
            if self._seconds > LATELY * len(steps):
                self._seconds, self._steps, self._tokens = (
                    x / 2 for x in (self._seconds, self._steps, self._tokens)
                )
            self._seconds, self._since = self._seconds + spent, self._since + spent
            self._steps += np.sum(steps)
            self._tokens += np.sum(now.length - last.length)
        self._first, self._last = False, now
        context = int(np.mean(now.length))
        tokens, waits = processes.on_host(state.tokens), self._to_begin is not None
        measured = self._request.measured._replace(
            current=current,
            costs=self.costs,
            context=context,
            steps=int(self._steps),
            tokens=int(self._tokens),
            seconds=float(self._seconds),
            since=float(self._since),
            tried=tuple(self._tried.values()),
            repeats=mean_repeat(tokens, now.length),
            first=self._to_begin,
            moving=moving,
            foretold=self._foretold.read(tokens, now.length) if waits else 0.0,
            tokens_left=tokens_left,
            compiling=processes.first_says(compiling / (1 + len(self._tried))),
        )
        if self._full:  # a step that only some rows take may take less than one of all
            self._doubt(measured)
            self._remember(measured)
        return self._request.method.next(measured)

    def _remember(self, measured: Measured) -> None:
        """For later runs, what a plain step took."""
        if measured.current == PLAINLY and self._to_keep and measured.steps >= self._to_keep[0]:
            self._to_keep.pop(0)
            seconds = measured.seconds / measured.steps
            keep_plain(self._model, measured.batch, self._context, seconds, measured.context)

    @property
    def has_begun(self) -> bool:
        """Whether the run goes on by the method that it was to begin with, or has done."""
        return self._to_begin is None

    def moved(self, current: Method) -> None:
        """Another method goes on in place of the current one."""
        self._to_begin, now = None, self._last
        if self._tokens:
            per_token, per_step = self._seconds / self._tokens, self._tokens / self._steps
            context = int(np.mean(now.length))
            self._tried[current] = Tried(current, per_token, context, per_step)
        self._begin(now._replace(steps=np.zeros_like(now.steps)))

    def refilled(self, state: DecodeState, rows: Sequence[int], prompts: list[int]) -> None:
        """Those rows have other texts, and counters are 0. What steps took is known as before."""
        self._last = Known.of(state)
        for row in rows:
            self._foretold.begin(row, prompts[row])

    def _doubt(self, measured: Measured) -> None:
        """A table that the run contradicts is not kept: no step takes less than a plain one."""
        enough = measured.steps >= STEPS_TO_DOUBT and not self._doubts
        per_step = measured.seconds / max(measured.steps, 1)
        if enough and contradicts(measured.costs, per_step, measured.context):
            self._doubts = True
            forget(self._model.params, self._model.cfg, measured.batch, self._context)

    def _is_reviving(self, state: DecodeState) -> bool:
        lazy, model = self._request.decode.prefill, self._request.decode.model
        return lazy is not None and lazy.is_reviving(model, state)


class Known(NamedTuple):
    """What the host reads of each row after a chunk."""

    steps: np.ndarray
    length: np.ndarray

    @classmethod
    def of(cls, state: DecodeState) -> Known:
        return cls(np.array(processes.on_host(state.stats.steps)), length_of(state))


def length_of(state: DecodeState) -> np.ndarray:
    """`state.length` on the host, where it takes no program."""
    return processes.on_host(state.kv.length) + 1

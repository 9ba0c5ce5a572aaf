# SPDX-License-Identifier: Apache-2.0
"""Asks a run's method how to go on, by what its steps have found.

Knows counts of steps and tokens. Does not know when drafts pay: the method does.
"""

from __future__ import annotations

import numpy as np

from tsjax.decoding.method import Method
from tsjax.decoding.state import DecodeState
from tsjax.host.request import Request


class Judge:
    def __init__(self, request: Request, state: DecodeState):
        self._request = request
        self._reviving = self._is_reviving(state)
        self._begin = 0, sum(map(len, request.rows))  # steps and tokens from which on to judge

    def next(self, current: Method, state: DecodeState) -> Method:
        """The method that drafts the next chunk."""
        now = int(np.sum(state.stats.steps)), int(np.sum(state.length))
        self._reviving, was_reviving = self._is_reviving(state), self._reviving
        if self._reviving or was_reviving:
            self._begin = now  # steps end early then, whatever their drafts are worth
        steps, tokens = (b - a for a, b in zip(self._begin, now, strict=True))
        measured = self._request.measured._replace(current=current, steps=steps, tokens=tokens)
        chosen = self._request.method.next(measured)
        if chosen != current:
            self._begin = 0, now[1]  # another method's counters begin at 0
        return chosen

    def _is_reviving(self, state: DecodeState) -> bool:
        lazy, model = self._request.decode.prefill, self._request.decode.model
        return lazy is not None and lazy.is_reviving(model, state)

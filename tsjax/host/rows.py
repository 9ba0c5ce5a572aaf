# SPDX-License-Identifier: Apache-2.0
"""The rows of a run as the host knows them: what was emitted, and why a row has ended.

Knows what there is to read after a chunk of steps. Does not know how steps run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.errors import Failed
from tsjax.decoding.logprobs import LogProbs
from tsjax.decoding.state import BROKEN, EOS, LENGTH, RUNNING, STOPPED, DecodeState
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.interrupt import Interrupt
from tsjax.host.judge import USUAL, length_of
from tsjax.host.repetition import Loops
from tsjax.host.request import Request
from tsjax.host.stop_strings import StopStrings

_REASONS = {EOS: "eos", LENGTH: "length"}


class HostRow:
    """A text in a row: of its tokens the first `begun` were known before, `known` are by now. It
    ends for a `reason`; where its scores are broken, it cannot go on for an `error`."""

    def __init__(self, model: Model, request: Request, row: int = 0, number: int | None = None):
        """Given a `number`, it ends where it cannot go on; else that is left to the run."""
        self.number, self._ends_broken = row if number is None else number, number is not None
        self.prompt, self.begun = request.prompts[row], len(request.rows[row])
        self.known, self.most = self.begun, request.config.max_new_tokens
        self.reason, self.error = request.finish_reason[row], None
        self.told = [] if request.logprobs is None else [request.logprobs[row]]
        self._watch, self._loops = StopStrings(model, request, row), Loops(request, row)
        self._half = request.decode.model.dtype == "float16"

    @property
    def made(self) -> int:
        return self.known - len(self.prompt)

    def read(self, text: np.ndarray, finish: int, interrupted: bool) -> np.ndarray:
        """What is new in the text, up to where it ends."""
        if self.reason is not None:
            return np.zeros(0, np.int32)
        new = np.array(text[self.known :])
        cut, why = self._watch.find(new), "stop_string"
        loop = self._loops.find(new if cut is None else new[: cut - 1])
        if loop is not None:
            cut, why = loop, "repetition"
        if cut is not None:
            new, self.reason = new[:cut], why
        elif finish in _REASONS:
            self.reason = _REASONS[finish]
        elif interrupted:
            self.reason = "interrupted"
        self.known += len(new)
        if self.reason is None and finish == BROKEN:
            self.error, self.reason = self._broken(), "error" if self._ends_broken else None
        return new

    def _broken(self) -> Failed:
        why = "float16 ends at 65504, so try bfloat16 or float32"
        return Failed(
            f"the scores of new token {self.made + 1} of row {self.number} (position {self.known}) "
            f"are NaN or infinite: {why if self._half else 'see to the weights'}, or to a "
            "logits_processor. What came before is kept."
        )


class HostRows:
    """The rows of a batch. Here each keeps its text.

    Attributes:
      waits: whether other texts wait for a row.
      failed: what is to be told of such, before the next step.
      made_before: tokens of texts that have left their rows.
    """

    def __init__(self, model: Model, request: Request):
        self.rows = [HostRow(model, request, row) for row in range(len(request.rows))]
        self.waits, self.failed, self.made_before = False, [], 0

    def refill(self, state: DecodeState, interrupt: Interrupt) -> tuple[DecodeState, list[int]]:
        """With other texts where one has ended, and in which rows. Their memory is to be made."""
        return state, []

    @property
    def running(self) -> int:
        return sum(row.reason is None for row in self.rows)

    @property
    def prompt_length(self) -> list[int]:
        return [len(row.prompt) for row in self.rows]

    @property
    def tokens_left(self) -> float:
        """That a row is expected to get: as many as it has got, and no more than it may."""
        made, rows = self.made_before + sum(row.made for row in self.rows), len(self.rows)
        left = math.inf if self.waits else sum(row.most - row.made for row in self.rows)
        return min(left, max(made, rows * USUAL)) / rows

    def read(self, state: DecodeState, interrupted: bool) -> dict[str, Any]:
        """What is new, as the fields of News."""
        seen = state.tokens, state.sources, state.finish, state.logprobs
        (texts, sources, finish, told), length = processes.on_host(seen), length_of(state)
        begun, before = [row.reason for row in self.rows], [row.known for row in self.rows]
        each = zip(self.rows, texts, length, finish, strict=True)
        new = [row.read(text[:n], why, interrupted) for row, text, n, why in each]
        reasons = [row.reason for row in self.rows]
        if told is not None:
            told = self._of_each(told, before)
            for row, one in zip(self.rows, told, strict=True):
                row.told += [one] if len(one.raw) else []
        return {
            "tokens": new,
            "logprobs": told,
            "all_logprobs": _together([row.told for row in self.rows]),
            "sources": self._of_each(sources, before),
            "all_tokens": self._of_each(texts, self.prompt_length),
            "reasons": reasons,
            "newly_ended": [a is not b for a, b in zip(begun, reasons, strict=True)],
            "computed": int(length.sum()) - sum(row.begun for row in self.rows),
        }

    def _of_each(self, values: Any, begin: Sequence[int]) -> list[Any]:
        """What belongs to each text, from a place on."""
        places = [slice(start, row.known) for row, start in zip(self.rows, begin, strict=True)]
        return [
            jax.tree.map(lambda x, row=row, place=place: x[row, place].copy(), values)
            for row, place in enumerate(places)
        ]

    def check(self) -> None:
        """Raises where a row can neither go on nor end."""
        for row in self.rows:
            if row.error is not None and row.reason is None:
                raise row.error

    def stop(self, state: DecodeState) -> DecodeState:
        """The state in which rows that the host has ended run no more."""
        ended = np.asarray([row.reason is not None for row in self.rows])
        stopped = ended & (processes.on_host(state.finish) == RUNNING)
        if not stopped.any():
            return state
        return state.replace(finish=jnp.where(stopped, jnp.int8(STOPPED), state.finish))


def _together(told: list[list[LogProbs]]) -> Callable[[], list[LogProbs] | None]:
    """Those of all tokens so far, which grow: put together for who asks."""
    parts = [tuple(some) for some in told]

    def together() -> list[LogProbs] | None:
        if not all(parts):
            return None
        return [jax.tree.map(lambda *xs: np.concatenate(xs), *some) for some in parts]

    return together

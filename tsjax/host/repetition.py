# SPDX-License-Identifier: Apache-2.0
"""Texts that say the same thing over and over: the token at which a row has done so.

Knows tokens as they come. Does not know a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from tsjax.host.request import Request

LONGEST_REPEAT = 16
LOOKED_BACK, FEWEST_LOOKED_AT = 64, 16  # tokens of a row


class Loops:
    """Finds the token at which the last ones are `times` equal parts of min to max tokens.

    Only generated tokens count. What is found depends on the tokens alone, so it is the same for
    every method and however they come.
    """

    def __init__(self, request: Request):
        self._asked, self._stop_ids = request.config.repetition_detection, request.stop_ids
        if self._asked is None:
            return
        least, most, _ = self._asked
        self._periods = np.arange(least, most + 1)
        # Of each row: its tokens, and for each period how many of the last ones are what stands a
        # period before them.
        room = request.config.max_new_tokens
        self._texts = [np.full(most + room, -1, np.int32) for _ in request.rows]
        self._counts = [0] * len(request.rows)
        self._repeated = [np.zeros(len(self._periods), np.int64) for _ in request.rows]
        for row, (tokens, n) in enumerate(zip(request.rows, request.prompt_length, strict=True)):
            self.find(row, tokens[n:])

    def find(self, row: int, tokens: np.ndarray) -> int | None:
        """How many of `tokens` it takes to complete a repetition, None if there is none."""
        if self._asked is None:
            return None
        _, most, times = self._asked
        text, enough = self._texts[row], self._periods * (times - 1)
        for index, token in enumerate(tokens):
            at = most + self._counts[row]  # before the text stand -1s
            same = text[at - self._periods] == token
            self._repeated[row] = np.where(same, self._repeated[row] + 1, 0)
            text[at] = token
            self._counts[row] += 1
            if (self._repeated[row] >= enough).any() and token not in self._stop_ids:
                return index + 1
        return None


class Foretold:
    """How often what stood before after the same two or three tokens has foretold the next one: the
    share of the last tokens that were made, of all rows."""

    def __init__(self, prompt_length: Sequence[int]):
        self._prompts, self._known = prompt_length, [0] * len(prompt_length)
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in prompt_length]
        self._right: deque[bool] = deque(maxlen=LOOKED_BACK * len(prompt_length))

    def read(self, tokens: np.ndarray, length: np.ndarray) -> float:
        for row, (after, prompt) in enumerate(zip(self._after, self._prompts, strict=True)):
            text, begin = tokens[row, : length[row]].tolist(), self._known[row]
            for at in range(max(begin, 2), len(text)):
                keys = [tuple(text[at - size : at]) for size in (3, 2) if size <= at]
                if at >= prompt:
                    found = next((after[key] for key in keys if key in after), None)
                    self._right.append(found == text[at])
                after.update(dict.fromkeys(keys, text[at]))
            self._known[row] = len(text)
        return sum(self._right) / max(len(self._right), FEWEST_LOOKED_AT)


def mean_repeat(tokens: np.ndarray, length: np.ndarray) -> int:
    """How many of the last tokens, up to LONGEST_REPEAT, stood together before: a mean of rows."""
    sizes = []
    for row, known in zip(tokens, length, strict=True):
        text = row[:known]
        places = np.flatnonzero(text[:-1] == text[-1]) if known else np.zeros(0, np.int64)
        size = 0
        while len(places) and size < LONGEST_REPEAT:
            size += 1
            places = places[places >= size]
            places = places[text[places - size] == text[-1 - size]]
        sizes.append(size)
    return int(np.mean(sizes))

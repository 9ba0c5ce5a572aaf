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
    """Finds the token of a row at which the last ones are `times` equal parts of min to max tokens.

    Only generated tokens count. What is found depends on the tokens alone, so it is the same for
    every method and however they come.
    """

    def __init__(self, request: Request, row: int = 0):
        self._asked, self._stop_ids = request.config.repetition_detection, request.stop_ids
        if self._asked is None:
            return
        least, most, _ = self._asked
        self._periods = np.arange(least, most + 1)
        # The tokens, and for each period how many of the last ones are what stands one before them.
        self._text = np.full(most + request.config.max_new_tokens, -1, np.int32)
        self._count, self._repeated = 0, np.zeros(len(self._periods), np.int64)
        self.find(request.rows[row][request.prompt_length[row] :])

    def find(self, tokens: np.ndarray) -> int | None:
        """How many of `tokens` it takes to complete a repetition, None if there is none."""
        if self._asked is None:
            return None
        _, most, times = self._asked
        enough = self._periods * (times - 1)
        for index, token in enumerate(tokens):
            at = most + self._count  # before the text stand -1s
            same = self._text[at - self._periods] == token
            self._repeated = np.where(same, self._repeated + 1, 0)
            self._text[at] = token
            self._count += 1
            if (self._repeated >= enough).any() and token not in self._stop_ids:
                return index + 1
        return None


class Foretold:
    """How often what stood before after the same two or three tokens has foretold the next one: the
    share of the last tokens that were made, of all rows."""

    def __init__(self, prompt_length: Sequence[int]):
        rows = len(prompt_length)
        self._prompts, self._known = list(prompt_length), [0] * rows
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(rows)]
        self._right: deque[bool] = deque(maxlen=LOOKED_BACK * rows)

    def begin(self, row: int, prompt: int) -> None:
        """Another text, with so many tokens of a prompt, is in the row from here on."""
        self._prompts[row], self._known[row], self._after[row] = prompt, 0, {}

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

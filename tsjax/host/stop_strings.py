# SPDX-License-Identifier: Apache-2.0
"""Stop strings: the token at which a row's text first holds one.

Knows text and tokens as they come. Does not know a run.
"""

from __future__ import annotations

import numpy as np

from tsjax.files.checkpoint import Model
from tsjax.files.tokenizer import Detokenizer, decode_text, special_tokens
from tsjax.host.request import Request


class StopStrings:
    """Finds the token that completes a stop string, also across token boundaries and chunks.

    As in transformers, a stop string may begin in the prompt. Special tokens are no part of the
    text, but a stop string may name one; a token that ends the row anyway is left to that.
    """

    def __init__(self, model: Model, request: Request, row: int):
        self.stops = request.config.stop_strings
        if not self.stops:
            return
        tokenizer, self.keep = model.tokenizer, max(map(len, self.stops)) - 1
        self.special = {
            index: text
            for index, text in special_tokens(tokenizer).items()
            if index not in request.stop_ids and any(text in stop for stop in self.stops)
        }
        known = request.rows[row]
        self.writer = Detokenizer(tokenizer, context=known)
        self.tail = self._tail(decode_text(tokenizer, known[-self.keep - 64 :].tolist()))

    def find(self, tokens: np.ndarray) -> int | None:
        """How many of `tokens` it takes to complete a stop string, None if none does."""
        if not self.stops:
            return None
        for index, token in enumerate(tokens):
            text = self.tail + self.writer.push([token])
            # If the row ended here, its text would end with what is still pending.
            whole = text + self.writer.pending() + self.special.get(int(token), "")
            # Only a match that ends after the tail is new.
            if any(whole.find(s, max(0, len(self.tail) - len(s) + 1)) >= 0 for s in self.stops):
                return index + 1
            self.tail = self._tail(text)
        return None

    def _tail(self, text: str) -> str:
        return text[-self.keep :] if self.keep else ""

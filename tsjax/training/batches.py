# SPDX-License-Identifier: Apache-2.0
"""Batches of whole texts of like lengths, in an order that follows from a seed.

Knows token ids and lengths alone. A text is seen whole by the model and in pieces by the drafter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tsjax.training.corpus import Order
from tsjax.training.own_text import Text

# A text takes the next of these lengths: each is a shape of its own, which is compiled.
LENGTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
LONGEST_PIECE = 1024  # of a text, that a drafter sees at once


class TokenBatch(NamedTuple):
    """Attributes:
    tokens: [B, T], padded on the right with zeros.
    ends: [B], tokens of each.
    prompts: [B], how many of them are the prompt's.
    texts: whose they are; fewer than B in an odd batch.
    """

    tokens: np.ndarray
    ends: np.ndarray
    prompts: np.ndarray
    texts: Sequence[Text]

    @property
    def pieces(self) -> int:
        """Of each text, of one length."""
        return -(-self.tokens.shape[1] // LONGEST_PIECE)


class Batches:
    """Texts that lie together in batches of about `step_tokens`, and the batches' order."""

    def __init__(self, texts: Sequence[Text], step_tokens: int, seed: int, *, parts: int = 1):
        self._texts, self._parts = texts, parts
        self._groups = _grouped([len(text.ids) for text in texts], step_tokens, parts)
        self._order = Order(len(self._groups), seed)

    def __len__(self) -> int:
        return len(self._groups)

    def number(self, index: int) -> int:
        """Which batch is the n-th from the beginning of a run."""
        (number,) = self._order.numbers(index, 1)
        return number

    def __getitem__(self, index: int) -> TokenBatch:
        """The n-th batch from the beginning of a run."""
        return self.group(self.number(index))

    def group(self, number: int) -> TokenBatch:
        length, rows, members = self._groups[number]
        tokens = np.zeros((rows, length), np.int32)
        ends, prompts = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        texts = [self._texts[i] for i in members]
        for row, text in enumerate(texts):
            ids = text.ids[:length]
            tokens[row, : len(ids)] = ids
            ends[row], prompts[row] = len(ids), min(text.prompt, len(ids))
        return TokenBatch(tokens, ends, prompts, texts)


def _grouped(
    lengths: Sequence[int], step_tokens: int, parts: int
) -> list[tuple[int, int, list[int]]]:
    """Length, rows and the texts of each batch: texts by length, so many as make a step."""
    taken: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        length = next((n for n in LENGTHS if n >= lengths[index]), LENGTHS[-1])
        taken.setdefault(length, []).append(index)
    groups = []
    for length, members in taken.items():
        rows = -(-max(step_tokens // length, 1) // parts) * parts
        groups += [(length, rows, members[i : i + rows]) for i in range(0, len(members), rows)]
    return groups


def fingerprint_of(texts: Sequence[Text]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{text.number} {text.prompt} ".encode())
        digest.update(text.ids.tobytes())
    return digest.hexdigest()[:16]


def most_frequent(texts: Sequence[Text], vocab_size: int, count: int) -> np.ndarray:
    """The tokens that answers have most, in ascending order; of equal ones the lower."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.ids[text.prompt :], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int32)

# SPDX-License-Identifier: Apache-2.0
"""Texts as the model reads them, batches of like lengths, and as a drafter learns from them: one
stream of tokens in rows of one length, whatever the texts' lengths are.

Knows token ids, lengths and an order that follows from a seed. What the model computes comes from a
function that is handed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tsjax.training.corpus import Order
from tsjax.training.own_text import OwnText

# A text takes the next of these lengths: each is a program of its own. Of longer ones the rest is
# left out.
TEXT_LENGTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ROW_TOKENS = 512  # tokens that a drafter sees at once
MODEL_TOKENS = 2048  # of texts that the model reads at once
MIXED = 64  # rows of the stream that are dealt out to steps in another order

States = Callable[[np.ndarray], np.ndarray]  # tokens [B, T] -> what the model computes [B, T, ...]


class StreamRows(NamedTuple):
    """Rows of a stream.

    Attributes:
      states: what the model computed for each token.
      tokens: of the texts.
      own: whether the token that follows is the model's, not the prompt's.
      place: of each token in the answer; below 0 in the prompt.
      kind: number of the text's kind.
    """

    states: np.ndarray  # [N, P, layers, D]
    tokens: np.ndarray  # the others [N, P]
    own: np.ndarray
    place: np.ndarray
    kind: np.ndarray

    @property
    def text(self) -> np.ndarray:
        """Of each token the number of its text in the row."""
        begins = np.diff(self.place, axis=1, prepend=self.place[:, :1] - 1) != 1
        return np.cumsum(begins, axis=1, dtype=np.int32)


class Stream:
    """The tokens of texts, one text after the other, over and over in a new order.

    Each pass over the texts takes batches of like lengths in an order by seed and pass.
    """

    def __init__(self, texts: Sequence[OwnText], states: States, seed: int, *, parts: int = 1,
                 cached: bool = False):  # fmt: skip
        """`parts`: texts of a batch are a multiple of it. `cached`: what the model has computed
        once is kept."""
        self._texts = [text._replace(ids=text.ids[: TEXT_LENGTHS[-1]]) for text in texts]
        self._states, self._seed = states, seed
        self._groups = _grouped([len(text.ids) for text in self._texts], parts)
        self._sizes = [sum(len(self._texts[i].ids) for i in group[2]) for group in self._groups]
        self._order = Order(len(self._groups), seed)
        self._kept: dict[int, StreamRows] | None = {} if cached else None
        self.kinds = tuple(dict.fromkeys(text.kind for text in self._texts))
        self.tokens = sum(self._sizes)  # of one pass

    def rows(self, count: int, first: int = 0) -> Iterator[StreamRows]:
        """`count` rows for each step, from the `first` on, without end. Of MIXED rows, or as many
        as the texts have, each step gets some, so that it meets several texts."""
        mixed = max(1, min(MIXED, self.tokens // ROW_TOKENS) // count) * count
        steps = mixed // count
        for number, several in enumerate(self._in_turn(mixed, first // steps), first // steps):
            order = np.random.default_rng([self._seed, number]).permutation(mixed)
            for step in range(first % steps, steps):
                here = order[step * count : (step + 1) * count]
                yield StreamRows(*(x[here] for x in several))
            first = 0

    def _in_turn(self, count: int, first: int) -> Iterator[StreamRows]:
        """So many rows at a time, from the `first` time on."""
        tokens = count * ROW_TOKENS
        index, skipped = 0, first * tokens
        while skipped >= (size := self._sizes[self._order.number(index)]):
            skipped, index = skipped - size, index + 1
        parts: list[StreamRows] = []
        while True:
            while sum(len(part.tokens) for part in parts) < skipped + tokens:
                parts.append(self._group(self._order.number(index)))
                index += 1
            joined = StreamRows(*map(np.concatenate, zip(*parts, strict=True)))
            some = StreamRows(*(x[skipped : skipped + tokens] for x in joined))
            parts, skipped = [StreamRows(*(x[skipped + tokens :] for x in joined))], 0
            yield StreamRows(*(x.reshape(count, ROW_TOKENS, *x.shape[1:]) for x in some))

    def _group(self, number: int) -> StreamRows:
        """A batch of texts as one row of tokens."""
        if self._kept is not None and number in self._kept:
            return self._kept[number]
        length, rows, members = self._groups[number]
        tokens = np.zeros((rows, length), np.int32)
        for row, member in enumerate(members):
            ids = self._texts[member].ids
            tokens[row, : len(ids)] = ids
        states = self._states(tokens)
        found = []
        for row, member in enumerate(members):
            text = self._texts[member]
            size = len(text.ids)
            place = np.arange(size, dtype=np.int32) - text.prompt
            kind = np.full(size, self.kinds.index(text.kind), np.int32)
            found.append(StreamRows(states[row, :size], text.ids, place >= -1, place, kind))
        joined = StreamRows(*map(np.concatenate, zip(*found, strict=True)))
        if self._kept is not None:
            self._kept[number] = joined
        return joined


def _grouped(lengths: Sequence[int], parts: int) -> list[tuple[int, int, list[int]]]:
    """Length, rows and the texts of each batch: texts by length, so many as a pass takes."""
    taken: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        taken.setdefault(next(n for n in TEXT_LENGTHS if n >= lengths[index]), []).append(index)
    groups = []
    for length, members in taken.items():
        rows = -(-max(MODEL_TOKENS // length, 1) // parts) * parts
        groups += [(length, rows, members[i : i + rows]) for i in range(0, len(members), rows)]
    return groups


def fingerprint_of(texts: Sequence[OwnText]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{text.number} {text.prompt} ".encode())
        digest.update(text.ids.tobytes())
    return digest.hexdigest()[:16]


def most_frequent_tokens(texts: Sequence[OwnText], vocab_size: int, count: int) -> np.ndarray:
    """The tokens that answers have most, in ascending order; of equal ones the lower."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.ids[text.prompt :], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int32)

# SPDX-License-Identifier: Apache-2.0
"""How much a text repeats itself, in figures. Knows tokens alone.

* distinct: of its n-grams, the share that are different (Distinct-n; of a long text it falls in any
  case, so compare texts of one length).
* repeated: the share of tokens that lie in a span that stood in the text before.
* self-BLEU: the text in pieces, each scored against all others, and the mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

SPAN = 16  # tokens of a span that counts as repeated
PIECE = 512  # tokens of the pieces that are held against each other
ORDER = 4  # the longest n-grams of BLEU


def figures(tokens: Sequence[int]) -> dict[str, float]:
    """All of them for one text."""
    found = {f"distinct_{n}": distinct(tokens, n) for n in range(1, 5)}
    return {**found, "repeated": repeated(tokens), "self_bleu": self_bleu(tokens)}


def grams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def distinct(tokens: Sequence[int], n: int) -> float:
    """1 for a text without n-grams."""
    every = grams(tokens, n)
    return len(set(every)) / len(every) if every else 1.0


def repeated(tokens: Sequence[int], span: int = SPAN) -> float:
    """A span counts where it begins again, also while its first occurrence still lasts."""
    seen: set[tuple[int, ...]] = set()
    covered, end = 0, 0  # tokens before `end` are counted already
    for start, gram in enumerate(grams(tokens, span)):
        if gram in seen:
            covered += start + span - max(start, end)
            end = start + span
        seen.add(gram)
    return covered / len(tokens) if len(tokens) else 0.0


def self_bleu(tokens: Sequence[int], piece: int = PIECE, order: int = ORDER) -> float:
    """0 for fewer than two whole pieces; what is left at the end does not count.

    BLEU with equal weights and no smoothing. All pieces are of one length, so none is too short.
    """
    pieces = [tokens[at : at + piece] for at in range(0, len(tokens) - piece + 1, piece)]
    if len(pieces) < 2:
        return 0.0
    shares = [[0.0] * order for _ in pieces]
    for n in range(1, order + 1):
        counts = [Counter(grams(one, n)) for one in pieces]
        most: dict[tuple[int, ...], tuple[int, int]] = {}  # the two largest counts of a piece
        for count in counts:
            for gram, times in count.items():
                first, second = most.get(gram, (0, 0))
                most[gram] = (times, first) if times > first else (first, max(second, times))
        for index, count in enumerate(counts):
            found = 0
            for gram, times in count.items():
                first, second = most[gram]
                found += min(times, second if times == first else first)
            shares[index][n - 1] = found / max(sum(count.values()), 1)
    return sum(map(_mean, shares)) / len(pieces)


def _mean(shares: Sequence[float]) -> float:
    """The geometric one."""
    if min(shares) == 0:
        return 0.0
    return math.exp(sum(map(math.log, shares)) / len(shares))

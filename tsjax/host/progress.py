# SPDX-License-Identifier: Apache-2.0
"""Progress bars, and how long calls will take that are still to come.

Knows tqdm, and nothing of what makes progress.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable
from typing import Any


def progress_bar(wanted: bool, total: int | None, unit: str, **options: Any) -> Any:
    """A tqdm bar on stderr, which does nothing where it is not wanted."""
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, dynamic_ncols=True, disable=not wanted, **options)


class TimeLeft:
    """Seconds that calls will still take, by those that were made.

    A call is named by a kind and a place. It takes as long as it took last in its place; where it
    was not made yet, as long as its kind took in others, or as all that is known.
    """

    def __init__(self, calls: Iterable[tuple[str, Any]]):
        """All calls that will be made, as often as they will."""
        self._left = collections.Counter(calls)
        self._took: dict[tuple[str, Any], float] = {}
        self.total, self.made = self._left.total(), 0

    def add(self, call: tuple[str, Any], seconds: float) -> None:
        self._left[call] -= 1
        self._took[call] = seconds
        self.made += 1

    def drop(self, call: tuple[str, Any]) -> None:
        self.total -= self._left.pop(call, 0)

    @property
    def seconds(self) -> float:
        return sum(count * self._expected(call) for call, count in self._left.items())

    def _expected(self, call: tuple[str, Any]) -> float:
        if call in self._took:
            return self._took[call]
        of_kind = [seconds for (kind, _), seconds in self._took.items() if kind == call[0]]
        return statistics.fmean(of_kind or self._took.values() or [0.0])


def in_words(seconds: float) -> str:
    """About how long."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

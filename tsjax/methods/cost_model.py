# SPDX-License-Identifier: Apache-2.0
"""A table of what the parts of a step take in seconds, on one device and for one model.

Knows numbers alone: the host measures them (host/measuring.py), or a formula estimates them
(devices.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tsjax.base.checks import check
from tsjax.base.errors import BadValue

# Twice the rows may take so many times as long, or right drafts do not pay; and a narrower width is
# worth compiling where the next wider one that is takes so many times as long.
DOUBLE_PAYS, NARROWER_SAVES = 1.5, 1.2
LEAST = 1e-6  # seconds of any pass
MOST_OF_ANY = 16  # rows, beyond which a CPU takes longer than right drafts save


class Line(NamedTuple):
    """Seconds, and seconds for each token of context."""

    seconds: float
    per_token: float = 0.0

    def at(self, context: float) -> float:
        return self.seconds + self.per_token * context


class Int8Costs(NamedTuple):
    """Seconds of a pass of one row, and of the candidates of all heads, with the model in int8."""

    one_row: Line
    heads: float


class Costs(NamedTuple):
    """What the parts of a step take on one device, for one model and number of batch rows.

    Attributes:
      passes: (rows, Line) of passes of the model over so many rows, which end with the choice of a
        token for each; ascending. Other widths lie between and beyond them on straight lines.
      heads: seconds for the candidates of all draft heads.
      choice: of one choice of the partial cache.
      suffix: of one search for the longest suffix match.
      ngrams: seconds for entering new n-grams and looking up drafts.
      overhead: seconds for the rest of a step.
      origin: "measured" on the device, or "estimated" by a formula from the device's name.
      int8: of drafting with the model in int8; None where that is not offered.
      any_rows: whether a program takes as few rows as a step wants, at their price; else it has a
        body for each width.
      one_layer: of a draft of the one-layer drafter; 0 for a model without one.
    """

    passes: tuple[tuple[int, Line], ...]
    heads: float
    choice: Line
    suffix: Line
    ngrams: float
    overhead: float
    origin: str
    int8: Int8Costs | None = None
    any_rows: bool = False
    one_layer: float = 0.0

    def of_pass(self, rows: int, context: float) -> float:
        """Seconds of a pass of N rows over caches of `context` tokens."""
        points = [(n, line.at(context)) for n, line in self.passes]
        upper = next((i for i, (n, _) in enumerate(points) if n >= rows), len(points) - 1)
        (n0, s0), (n1, s1) = points[max(upper, 1) - 1], points[max(upper, 1)]
        return s0 + (s1 - s0) * (rows - n0) / (n1 - n0)

    def of_draft_pass(self, context: float, in_int8: bool) -> float:
        """Seconds of a pass of one row that drafts."""
        if in_int8 and self.int8 is not None:
            return self.int8.one_row.at(context)
        return self.of_pass(1, context)

    def of_heads(self, in_int8: bool) -> float:
        return self.int8.heads if in_int8 and self.int8 is not None else self.heads

    def widths(self, context: float, most: int) -> tuple[int, ...]:
        """Powers of two as widths of passes, ascending from 1.

        Where a program takes any rows, always the same, so that another table is no other program:
        steps choose by the price. Elsewhere those that right drafts pay for, twice as many rows as
        long as they take at most half as long again, and none that saves little beside the next:
        each makes a program larger to compile and to read.
        """
        if self.any_rows:
            return tuple(2**i for i in range(min(most, MOST_OF_ANY).bit_length()))
        widths = [1, 2]
        while widths[-1] < most:
            wide, wider = (self.of_pass(rows, context) for rows in (widths[-1], 2 * widths[-1]))
            if wider > DOUBLE_PAYS * wide:
                break
            widths.append(2 * widths[-1])
        kept = widths[-1:]
        for rows in widths[-2:0:-1]:
            if self.of_pass(kept[0], context) > NARROWER_SAVES * self.of_pass(rows, context):
                kept.insert(0, rows)
        return (1, *kept)

    def with_plain(self, seconds: float, context: float) -> Costs:
        """The table for a machine on which a plain step takes so long at `context` tokens: what
        differs does so for any rows."""
        more = seconds - self.plain(context)
        shifted = (
            (rows, line._replace(seconds=max(line.seconds + more, LEAST)))
            for rows, line in self.passes
        )
        return self._replace(passes=tuple(shifted))

    def plain(self, context: float) -> float:
        """Seconds of a step of plain decoding."""
        return self.of_pass(1, context) + self.overhead


# Of programs that take others as arrays.
ANY_COSTS = Costs(
    ((1, Line(1.0)), (2, Line(1.0))), 0.0, Line(0.0), Line(0.0), 0.0, 0.0, "estimated"
)


def as_costs(value: Any) -> Costs:
    """The table from nested lists, as a file has them. ValueError for what is none."""
    wanted = "a tsjax.costs.Costs: two passes or more, the first of one row, seconds of 0 or more"
    try:
        found = Costs(*value)  # an earlier version's lacks the last ones
        int8 = found.int8
        if int8 is not None:
            one_row, heads = int8
            int8 = Int8Costs(_line(one_row), float(heads))
        costs = found._replace(
            passes=tuple((rows, _line(line)) for rows, line in found.passes),
            heads=float(found.heads),
            choice=_line(found.choice),
            suffix=_line(found.suffix),
            ngrams=float(found.ngrams),
            overhead=float(found.overhead),
            int8=int8,
            any_rows=bool(found.any_rows),
            one_layer=float(found.one_layer),
        )
    except (TypeError, ValueError) as error:
        raise BadValue(f"costs={value!r:.80} is not valid: {wanted}") from error
    lines = (costs.choice, costs.suffix, *(line for _, line in costs.passes))
    seconds = [costs.heads, costs.one_layer, costs.ngrams, costs.overhead, *itertools.chain(*lines)]
    seconds += [] if costs.int8 is None else [*costs.int8.one_row, costs.int8.heads]
    widths = [rows for rows, _ in costs.passes]
    check(all(math.isfinite(x) and x >= 0 for x in seconds), "costs", value, wanted)
    check(all(isinstance(rows, int) for rows in widths), "costs", value, wanted)
    ascending = len(widths) > 1 and widths[0] == 1 and widths == sorted(set(widths))
    check(ascending and costs.of_pass(1, 0) > 0, "costs", value, wanted)
    is_known = costs.origin in ("measured", "estimated")
    check(is_known, "costs", costs.origin, "'measured' or 'estimated'")
    return costs


def _line(value: Sequence[float]) -> Line:
    return Line(*map(float, value))

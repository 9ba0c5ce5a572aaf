# SPDX-License-Identifier: Apache-2.0
"""What a document of __main__.py says: means, losses prompt by prompt, and the best points.

Knows the document alone. A row of it has a list for each thing measured, with an entry per prompt,
and the seconds that the full prefill took beside it in the same turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

GOALS = (2.0, 3.0)  # times sooner
MOST_LOSS = 0.01

Row = dict[str, Any]


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The mean, and half the width of its 95% interval."""
    values = np.asarray(values)
    return float(values.mean()), float(1.96 * values.std() / np.sqrt(len(values)))


class Summary(NamedTuple):
    """One setting at one length: means of the tasks, each counting as much.

    Attributes:
      loss: what the full prefill scores more on the same prompts; its interval is of the prompts of
        each task, and where there is one of each of the tasks.
      worst: the largest loss of a task.
      first, whole: how many times sooner than after a full prefill the first token comes, and the
        whole answer: medians over all prompts.
      agrees: the share of first tokens that are the full prefill's.
    """

    score: float
    loss: float
    loss_interval: float
    worst: float
    first: float
    whole: float
    agrees: float
    divergence: float
    samples: int


def summary(rows: Sequence[Row], document: Row) -> Summary:
    """Of rows of one setting, a row for each task."""
    lost = []
    for row in rows:
        dense = full_row(document, row)["scores"][: len(row["scores"])]
        lost.append(interval(np.subtract(dense, row["scores"])))

    def over(key: str) -> np.ndarray:
        return np.concatenate([np.asarray(row[key], float) for row in rows])

    losses, halves = np.transpose(lost)
    half = float(np.linalg.norm(halves)) / len(rows)
    if min(len(row["scores"]) for row in rows) < 2:  # no task says how much its prompts differ
        half = interval(losses)[1]
    return Summary(
        float(np.mean([np.mean(row["scores"]) for row in rows])),
        float(losses.mean()), half, float(losses.max()),
        float(np.median(over("full_first") / over("first"))),
        float(np.median(over("full_whole") / over("whole"))),
        float(over("agrees").mean()), float(over("divergence").mean()), len(over("scores")),
    )  # fmt: skip


def full_row(document: Row, row: Row) -> Row:
    """The full prefill's, on the same prompts."""
    place = {"task": row["task"], "length": row["length"], "family": "full"}
    (found,) = [one for one in document["rows"] if place.items() <= one.items()]
    return found


class Point(NamedTuple):
    """A family's setting for a target, at one length, over all reported tasks."""

    length: int
    family: str
    target: float | None
    rows: list[Row]
    summary: Summary


def points(document: Row) -> list[Point]:
    groups: dict[tuple[int, str, float | None], list[Row]] = {}
    for row in document["rows"]:
        if row["scores"]:
            groups.setdefault((row["length"], row["family"], row["target"]), []).append(row)
    return [
        Point(length, family, target, rows, summary(rows, document))
        for (length, family, target), rows in groups.items()
    ]


def best_point(found: Sequence[Point], goal: float) -> Point:
    """Of the points that meet a goal the one that loses least; of as little, the fastest. Where
    none meets it, the fastest of those that lose at most MOST_LOSS, or the one that loses least."""
    meeting = [point for point in found if point.summary.first >= goal]
    if meeting:
        return min(meeting, key=lambda point: (round(point.summary.loss, 4), -point.summary.first))
    good = [point for point in found if point.summary.loss <= MOST_LOSS]
    if good:
        return max(good, key=lambda point: point.summary.first)
    return min(found, key=lambda point: point.summary.loss)

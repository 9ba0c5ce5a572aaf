# SPDX-License-Identifier: Apache-2.0
"""What the document of evaluate.py says: means, losses prompt by prompt, intervals, the verdict.

Knows the document alone. A row of it has a list for each thing measured, with an entry per prompt,
and the seconds that the full prefill took beside it in the same turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

GOAL = 2.34  # times sooner, where the paper loses at most 1%
MOST_LOSS = 0.01
USEFUL = 0.8  # of the full prefill's score: below, nobody would use a setting
# With revival, and without.
PAIRS = (
    ("LazyLLM", "no revival"),
    ("in batches", "no revival"),
    ("paper's cuts", "paper's cuts, no revival"),
    ("paper's cuts, in batches", "paper's cuts, no revival"),
    ("one cut", "static"),
)
T95 = (12.706, 4.303, 3.182, 2.776)  # of Student's t, for 1 to 4 degrees of freedom

Row = dict[str, Any]


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The mean, and half the width of its 95% interval."""
    values = np.asarray(values)
    return float(values.mean()), float(1.96 * values.std() / np.sqrt(len(values)))


def between_draws(values: Sequence[float] | np.ndarray, draws: int) -> tuple[float, float]:
    """As `interval`, but the wider of it and a t-interval over the means of the draws, of which
    sample i has the i-th, over and over."""
    (mean, half), draws = interval(values), min(draws, len(values))
    if draws < 2:
        return mean, half
    means = [np.mean(values[draw::draws]) for draw in range(draws)]
    return mean, max(half, float(T95[draws - 2] * np.std(means, ddof=1) / np.sqrt(draws)))


class Spread(NamedTuple):
    """A median, and the quartiles around it."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float] | np.ndarray) -> Spread:
    low, median, high = np.quantile(np.asarray(values), (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high))


class Summary(NamedTuple):
    """One setting, on one task or on the mean of several.

    Attributes:
      loss: what the full prefill scores more on the same prompts.
      first, whole: how many times sooner than after a full prefill the first token comes, and the
        whole answer.
    """

    score: float
    interval: float
    loss: float
    loss_interval: float
    dense: float
    first: Spread
    whole: Spread
    samples: int

    @property
    def of_dense(self) -> float:
        return self.score / max(self.dense, 1e-9)


def summary(rows: Sequence[Row], document: Row) -> Summary:
    """Of rows of one setting, a row for each task: means of the tasks, each counting as much."""
    parts, first, whole = [], [], []
    for row in rows:
        draws = row.get("draws", 1)
        dense = full_row(document, row)["scores"][: len(row["scores"])]
        lost = np.subtract(dense, row["scores"])
        scored, lost = between_draws(row["scores"], draws), between_draws(lost, draws)
        parts.append((*scored, *lost, np.mean(dense)))
        first.append(np.divide(row["full_first"], row["first"]))
        whole.append(np.divide(row["full_whole"], row["whole"]))
    score, half, loss, loss_half, dense = np.transpose(parts)
    return Summary(
        float(score.mean()), float(np.linalg.norm(half)) / len(rows),
        float(loss.mean()), float(np.linalg.norm(loss_half)) / len(rows), float(dense.mean()),
        spread(np.concatenate(first)), spread(np.concatenate(whole)),
        sum(len(row["scores"]) for row in rows),
    )  # fmt: skip


def full_row(document: Row, row: Row) -> Row:
    """The full prefill's, on the same prompts."""
    return one_of(document["rows"], task=row["task"], length=row["length"], family="full")


def one_of(rows: Sequence[Row], **place: Any) -> Row:
    (found,) = [row for row in rows if place.items() <= row.items()]
    return found


class Point(NamedTuple):
    """A family's setting for a target, at one length, over all reported tasks."""

    length: int
    family: str
    target: float | None
    rows: list[Row]
    summary: Summary


def points(document: Row) -> list[Point]:
    groups: dict[tuple, list[Row]] = {}
    for row in document["rows"]:
        if row["scores"]:
            groups.setdefault((row["length"], row["family"], row["target"]), []).append(row)
    return [Point(*place, rows, summary(rows, document)) for place, rows in groups.items()]


# --- the verdict ------------------------------------------------------------------------------


def verdict(document: Row) -> dict[str, Any]:
    """Whether the paper's point is reached, whether revival pays, and what whole answers take."""
    found = [point for point in points(document) if point.family != "full"]
    lengths = sorted({point.length for point in found})
    lazy = [point for point in found if point.rows[0]["revive"] is not None]
    return {
        "goal": [
            {"length": length, "family": family, **best_point(mine)}
            for length in lengths
            for family, mine in (
                ("any", [p for p in found if p.length == length]),
                ("LazyLLM", [p for p in found if (p.length, p.family) == (length, "LazyLLM")]),
            )
            if mine
        ],
        "revival": revival(document),
        "slowest": slowest(lazy, document) if lazy else None,
    }


def best_point(found: Sequence[Point]) -> dict[str, Any]:
    """The point that loses least of those that meet GOAL. If none does, the fastest of those that
    lose at most MOST_LOSS of the full prefill's score; if none does either, the one that loses
    least."""
    meeting = [point for point in found if point.summary.first.median >= GOAL]
    good = [point for point in found if point.summary.loss <= MOST_LOSS * point.summary.dense]
    if meeting or not good:
        best = min(meeting or found, key=lambda point: point.summary.loss)
    else:
        best = max(good, key=lambda point: point.summary.first.median)
    said, most = best.summary, MOST_LOSS * best.summary.dense
    return {
        "reached": bool(meeting), "best": best.family, "target": best.target,
        "first": said.first.median, "whole": said.whole.median,
        "loss": said.loss, "loss_interval": said.loss_interval, "of_dense": said.of_dense,
        "loss_is_small": said.loss <= most,
        "also_with_interval": said.loss + said.loss_interval <= most,
        "samples": said.samples,
    }  # fmt: skip


def revival(document: Row) -> dict[str, Any]:
    """Where revival and its absence differ beyond the interval of the difference prompt by prompt,
    among settings for the same target of which the better one is of use."""
    compared, better, worse = 0, [], []
    for with_it, without in PAIRS:
        for row in document["rows"]:
            place = {key: row[key] for key in ("task", "length", "target")}
            others = [
                one for one in document["rows"]
                if one["family"] == without and place.items() <= one.items()
            ]  # fmt: skip
            if row["family"] != with_it or not others:
                continue
            (other,) = others
            count = min(len(row["scores"]), len(other["scores"]))
            dense = np.mean(full_row(document, row)["scores"][:count])
            best = max(np.mean(row["scores"][:count]), np.mean(other["scores"][:count]))
            if not count or best < USEFUL * dense:
                continue
            gain, half = interval(np.subtract(row["scores"][:count], other["scores"][:count]))
            compared += 1
            if abs(gain) > half:
                (better if gain > 0 else worse).append(
                    {
                        **place,
                        "family": with_it,
                        "against": without,
                        "gain": gain,
                        "interval": half,
                        "same_cuts": row["cuts"] == other["cuts"],
                    }  # fmt: skip
                )
    return {"compared": compared, "better": better, "worse": worse}


def slowest(found: Sequence[Point], document: Row) -> dict[str, Any]:
    """Where a whole answer gains least, task by task."""
    rows = [row for point in found for row in point.rows]
    ratio, index = min(
        (summary([row], document).whole.median, index) for index, row in enumerate(rows)
    )
    place = {key: rows[index][key] for key in ("task", "length", "family", "target")}
    return {**place, "whole": ratio}

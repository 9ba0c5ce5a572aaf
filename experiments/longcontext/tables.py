# SPDX-License-Identifier: Apache-2.0
"""The tables and sentences that a page shows of documents of __main__.py, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from experiments.longcontext.verdict import GOALS, MOST_LOSS, Point, best_point, points

Document = dict[str, Any]


def setting_name(family: str, target: float | None) -> str:
    return family if target is None else f"{family}, {target:g}x"


def task_name(task: str) -> str:
    return task.replace("_", " ")


def cuts_of(row: dict[str, Any]) -> str:
    if not row["cuts"]:
        return ""
    block = f", blocks of {row['block']}" if "block" in row else ""
    return ", ".join(f"{layer}: {share:g}" for layer, share in row["cuts"]) + block


def scores(documents: Sequence[Document]) -> str:
    """Score, loss and times of each setting, a table for each model and length."""
    blocks = []
    for document in documents:
        found = points(document)
        for length in sorted({point.length for point in found}):
            here = [point for point in found if point.length == length]
            blocks += [_heading(document, here), _table(here)]
    return "\n\n".join([*blocks, _note(documents)])


def _heading(document: Document, here: Sequence[Point]) -> str:
    (full,) = [point for point in here if point.family == "full"]
    counts = [len(row["scores"]) for row in full.rows]
    seconds = [second for row in full.rows for second in row["first"]]
    each = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return (
        f"**{document['model']}**, prompts of {here[0].length:,} tokens, {each} of each task; "
        "the full prefill's first token comes after "
        f"{fmean(seconds):.0f} s:"
    )


def _table(here: Sequence[Point]) -> str:
    tasks = list(dict.fromkeys(row["task"] for point in here for row in point.rows))
    columns = ["method", "cuts", "first token", "answer", "score", "lost", "same first token",
               "divergence", *map(task_name, tasks)]  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for point in here:
        said, rows = point.summary, {row["task"]: row for row in point.rows}
        each = [
            f"{100 * fmean(rows[task]['scores']):.0f}" if task in rows else "" for task in tasks
        ]
        figures = [
            f"{said.first:.2f}x", f"{said.whole:.2f}x", f"{100 * said.score:.1f}",
            f"{100 * said.loss:.1f} ± {100 * said.loss_interval:.1f}", f"{said.agrees:.0%}",
            f"{said.divergence:.2f}",
        ]  # fmt: skip
        name = setting_name(point.family, point.target)
        if point.family == "full":
            figures = ["", "", f"{100 * said.score:.1f}", "", "", ""]
        lines.append(f"| {' | '.join([name, cuts_of(point.rows[0]), *figures, *each])} |")
    return "\n".join(lines)


def _note(documents: Sequence[Document]) -> str:
    left_out = [
        f"{task_name(row['task'])} at {row['length']:,} by {document['model']} "
        f"({100 * row['score']:.0f}%)"
        for document in documents for row in document["dense"] if row["left_out"]
    ]  # fmt: skip
    least = f"{100 * documents[0]['least_dense']:.0f}%"
    note = (
        "How many times sooner than after a full prefill the first token comes, and the whole "
        "answer (medians, prompt by prompt); the mean score of the tasks in percent; what the full "
        "prefill scores more on the same prompts, with its 95% interval; how often the first token "
        "is the full prefill's, and how far its distribution is from there, in nats; each task's "
        "score. A method's number says how many times fewer operations its setting was sought for."
    )
    if left_out:
        note += f" Left out, as the full prefill scores less than {least}: {', '.join(left_out)}."
    return note


def verdict_text(documents: Sequence[Document]) -> str:
    """The best points in sentences, one a line."""
    lines = []
    for document in documents:
        found = [point for point in points(document) if point.family not in ("full",)]
        for length in sorted({point.length for point in found}):
            here = [point for point in found if point.length == length]
            for goal in GOALS:
                lines.append(_sentence(document, best_point(here, goal), goal))
    return "\n".join(lines)


def _sentence(document: Document, point: Point, goal: float) -> str:
    said = point.summary
    reached = "reached with" if said.first >= goal else "not reached; the best there is:"
    size = "at most a point" if said.loss <= MOST_LOSS else "more than a point"
    return (
        f"* {document['model']}, {point.length:,} tokens, a first token {goal:g} times as soon: "
        f"{reached} {setting_name(point.family, point.target)} ({cuts_of(point.rows[0])}), "
        f"{said.first:.2f}x, losing {100 * said.loss:.1f} ± {100 * said.loss_interval:.1f} points "
        f"({size}) in {said.samples} prompts; whole answers {said.whole:.2f}x."
    )

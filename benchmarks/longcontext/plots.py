# SPDX-License-Identifier: Apache-2.0
"""Figures of a document of evaluate.py, after the paper's Figures 5, 6 and 7."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

COLUMNS = 4


def draw(document: dict[str, Any], out: Path) -> None:
    """One PNG for each part that the document has."""
    if document["rows"]:
        _save(scores(document["rows"]), out / "longcontext_score.png")
    if document["sweep"]:
        _save(cuts(document["sweep"]), out / "longcontext_cut.png")
    if document["growth"]:
        _save(computed(document["growth"]), out / "longcontext_computed.png")


def scores(rows: list[dict[str, Any]]):
    """Task by task, the score of each family of methods over what it saves."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = -(-len(tasks) // COLUMNS)
    figure, grid = pyplot.subplots(
        lines, COLUMNS, figsize=(4 * COLUMNS, 3.2 * lines), sharex=True, sharey=True, squeeze=False
    )
    for axes in grid.flat[len(tasks) :]:
        axes.set_axis_off()
    for axes, task in zip(grid.flat, tasks, strict=False):
        mine = [row for row in rows if row["task"] == task]
        full = max(next(row["score"] for row in mine if row["method"] == "full"), 1e-9)
        for family in dict.fromkeys(family_of(row["method"]) for row in mine):
            points = sorted(
                (row["operations"], 100 * row["score"] / full, 100 * row["interval"] / full)
                for row in mine
                if family_of(row["method"]) == family
            )
            x, y, half = np.asarray(points).T
            axes.errorbar(x, y, yerr=half, marker="o", ms=3, lw=1, label=family)
        axes.set_title(task.replace("_", " "), fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("operations of the full prefill / of this")
    for axes in grid[:, 0]:
        axes.set_ylabel("score, % of the full prefill's")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="lower right", fontsize=9)
    return figure


def cuts(sweep: list[dict[str, Any]]):
    """The score of one cut, by its layer and the share it keeps; a mean over tasks."""
    figure, axes = pyplot.subplots(figsize=(5, 3.6))
    for share in sorted({row["share"] for row in sweep}):
        rows = [row for row in sweep if row["share"] == share]
        layers = sorted({row["layer"] for row in rows})
        means = [100 * np.mean([r["score"] for r in rows if r["layer"] == at]) for at in layers]
        axes.plot(layers, means, "o-", label=f"keep {share:.0%}")
    axes.set_xlabel("layers before the one cut")
    axes.set_ylabel("score, %")
    axes.legend(fontsize=8)
    return figure


def computed(growth: list[dict[str, Any]]):
    """The share of the prompt that each stage has computed, as the answer grows."""
    tasks = list(dict.fromkeys(row["task"] for row in growth))
    figure, grid = pyplot.subplots(1, len(tasks), figsize=(5 * len(tasks), 3.6), squeeze=False)
    for axes, task in zip(grid[0], tasks, strict=True):
        rows = [row for row in growth if row["task"] == task]
        tokens = [row["tokens"] for row in rows]
        for stage, shares in enumerate(np.asarray([row["computed"] for row in rows]).T):
            axes.plot(tokens, 100 * shares, label=f"stage {stage + 1}")
        axes.set_title(task.replace("_", " "), fontsize=10)
        axes.set_xlabel("new tokens")
        axes.set_ylabel("prompt tokens computed, %")
        axes.legend(fontsize=8)
    return figure


def family_of(method: str) -> str:
    """The method without its strength: 'LazyLLM early 0.5' is one of LazyLLM."""
    return method.rstrip("0123456789. ").removesuffix(" early")


def _save(figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)

# SPDX-License-Identifier: Apache-2.0
"""Figures of a document of evaluate.py: the paper's Figures 5, 6 and 7, and a grid."""

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
    if document["grid"]:
        _save(passkeys(document["grid"]), out / "longcontext_passkey.png")


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
    """The score of one cut, by its layer and the share it keeps."""
    tasks = list(dict.fromkeys(row["task"] for row in sweep))
    figure, grid = pyplot.subplots(
        1, len(tasks), figsize=(5 * len(tasks), 3.6), sharey=True, squeeze=False
    )
    for axes, task in zip(grid[0], tasks, strict=True):
        for share in sorted({row["share"] for row in sweep}):
            rows = [row for row in sweep if (row["share"], row["task"]) == (share, task)]
            points = sorted((r["layer"], 100 * r["score"], 100 * r["interval"]) for r in rows)
            layers, scores, half = np.asarray(points).T
            axes.errorbar(layers, scores, yerr=half, marker="o", label=f"keep {share:.0%}")
        axes.set_title(task.replace("_", " "), fontsize=10)
        axes.set_xlabel("layers before the one cut")
    grid[0, 0].set_ylabel("score, %")
    grid[0, 0].legend(fontsize=8)
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


def passkeys(rows: list[dict[str, Any]]):
    """The score by the passkey's depth and the prompt's length, method by method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lengths, depths = (sorted({row[key] for row in rows}) for key in ("length", "depth"))
    figure, grid = pyplot.subplots(
        1, len(methods), figsize=(4 * len(methods), 3.2), sharey=True, squeeze=False
    )
    for axes, method in zip(grid[0], methods, strict=True):
        found = {(r["depth"], r["length"]): r["score"] for r in rows if r["method"] == method}
        values = 100 * np.asarray([[found[depth, n] for n in lengths] for depth in depths])
        axes.imshow(values, vmin=0, vmax=100, aspect="auto", cmap="RdYlGn")
        for (row, column), value in np.ndenumerate(values):
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set_title(method, fontsize=10)
        axes.set_xlabel("prompt tokens")
    grid[0, 0].set_ylabel("depth of the passkey")
    return figure


def family_of(method: str) -> str:
    """The method without its schedule or share: 'LazyLLM, early' is one of LazyLLM."""
    return method.split(",")[0]


def _save(figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)

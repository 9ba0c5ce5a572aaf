# SPDX-License-Identifier: Apache-2.0
"""Figures of a document of evaluate.py: the paper's Figures 2, 5, 6 and 7."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from benchmarks.longcontext.verdict import GOAL, points

matplotlib.use("Agg")
from matplotlib import pyplot

MARKERS = "osv^Dp*XPh<>d"


def draw(document: dict[str, Any], out: Path) -> None:
    """One PNG for each part that the document has."""
    if any(row["scores"] for row in document["rows"]):
        _save(scores(document), out / "longcontext_score.png")
    for part, figure in (("sweep", cuts), ("growth", computed), ("attention", attention)):
        if document[part]:
            name = {"sweep": "cut", "growth": "computed"}.get(part, part)
            _save(figure(document[part]), out / f"longcontext_{name}.png")


def scores(document: dict[str, Any]):
    """Of each length, the score of each family over how much sooner the first token comes: means
    of the reported tasks, a point for each target."""
    found = [point for point in points(document) if point.family != "full"]
    lengths = sorted({point.length for point in found})
    figure, grid = pyplot.subplots(
        1, len(lengths), figsize=(6.5 * len(lengths), 4.8), sharey=True, squeeze=False
    )
    families = list(dict.fromkeys(point.family for point in found))
    for axes, length in zip(grid[0], lengths, strict=True):
        axes.axhline(99, color="0.7", lw=1, ls=":")
        axes.axvline(GOAL, color="0.7", lw=1, ls=":")
        for family, marker in zip(families, MARKERS, strict=False):
            mine = [p.summary for p in found if (p.length, p.family) == (length, family)]
            line = sorted(
                (
                    one.first.median,
                    100 * one.of_dense,
                    100 * one.loss_interval / max(one.dense, 1e-9),
                )
                for one in mine
            )
            if line:
                x, y, half = np.asarray(line).T
                axes.errorbar(x, y, yerr=half, marker=marker, ms=5, lw=1.2, capsize=2, label=family)
        axes.set_title(f"prompts of {length:,} tokens", fontsize=10)
        axes.set_xlabel("first token: how many times sooner, measured")
    grid[0, 0].set_ylabel("score, % of the full prefill's")
    handles = {}
    for axes in grid[0]:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    grid[0, 0].legend(handles.values(), handles, loc="lower left", fontsize=9)
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
            if not rows:
                continue
            line = sorted((r["layer"], 100 * r["score"], 100 * r["interval"]) for r in rows)
            layers, values, half = np.asarray(line).T
            axes.errorbar(layers, values, yerr=half, marker="o", label=f"keep {share:.0%}")
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


def attention(found: list[dict[str, Any]]):
    """What the prompt's last token attends to: how many tokens hold most of it, layer by layer,
    and what each of them gets, from the one that gets most."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8))
    for row in found:
        layers = range(1, len(row["share"]) + 1)
        name = row["task"].replace("_", " ")
        left.plot(layers, 100 * np.asarray(row["share"]), marker="o", ms=4, label=name)
    left.set_yscale("log")
    left.set_xlabel("layer")
    left.set_ylabel("tokens with 90% of the attention, %")
    left.legend(fontsize=8)
    layers = len(found[0]["sorted"])
    colors = pyplot.get_cmap("viridis")(np.linspace(0, 1, layers))
    for layer, (weights, color) in enumerate(zip(found[0]["sorted"], colors, strict=True), 1):
        label = f"layer {layer}" if layer in (1, (layers + 1) // 2, layers) else None
        right.loglog(found[0]["ranks"], np.maximum(weights, 1e-8), color=color, lw=1, label=label)
    right.set_xlabel(f"tokens in their order ({found[0]['task'].replace('_', ' ')})")
    right.set_ylabel("attention, mean over heads")
    right.legend(fontsize=8)
    return figure


def _save(figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)

# SPDX-License-Identifier: Apache-2.0
"""The figure of a document of __main__.py: scores over times to the first token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from experiments.longcontext.verdict import GOALS, points

matplotlib.use("Agg")
from matplotlib import pyplot

MARKERS = "osv^Dp*XPh<>d"


def draw(document: dict[str, Any], file: Path) -> None:
    """Of each length, the points lost by each family over how much sooner the first token comes."""
    found = [point for point in points(document) if point.family != "full"]
    lengths = sorted({point.length for point in found})
    figure, grid = pyplot.subplots(
        1, len(lengths), figsize=(6.5 * len(lengths), 4.8), sharey=True, squeeze=False
    )
    families = list(dict.fromkeys(point.family for point in found))
    for axes, length in zip(grid[0], lengths, strict=True):
        axes.axhline(-1, color="0.7", lw=1, ls=":")
        for goal in GOALS:
            axes.axvline(goal, color="0.7", lw=1, ls=":")
        for family, marker in zip(families, MARKERS, strict=False):
            mine = [p.summary for p in found if (p.length, p.family) == (length, family)]
            line = sorted((one.first, -100 * one.loss, 100 * one.loss_interval) for one in mine)
            if line:
                x, y, half = zip(*line, strict=True)
                axes.errorbar(x, y, yerr=half, marker=marker, ms=5, lw=1.2, capsize=2, label=family)
        axes.set_title(f"{document['model']}, prompts of {length:,} tokens", fontsize=10)
        axes.set_xlabel("first token: how many times sooner, measured")
    grid[0, 0].set_ylabel("points of score, against the full prefill")
    handles = {}
    for axes in grid[0]:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    grid[0, 0].legend(handles.values(), handles, loc="lower left", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)

# SPDX-License-Identifier: Apache-2.0
"""Times per token by context and by output position, drawn by matplotlib.

Knows rows as `tsjax bench` makes them. matplotlib is imported where something is drawn.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tsjax.base.checks import check
from tsjax.base.errors import NotInstalled
from tsjax.files.whole_files import check_place, replacing

ENDINGS = (".png", ".svg", ".pdf")
WIDE_RANGE = 16  # times the least: then logarithms tell more


def check_plot(path: str, argument: str) -> None:
    """Refuses what could not be drawn or written, before anything is measured."""
    wanted = f"a file ending in {' or '.join(ENDINGS)}"
    check(os.path.splitext(path)[1] in ENDINGS, argument, path, wanted)
    check_place(path, argument)
    if importlib.util.find_spec("matplotlib") is None:
        raise NotInstalled(
            f"{argument}={path!r} needs matplotlib (pip install 'tsjax[plot]'); leave it out"
        )


def plot(
    path: str | os.PathLike,
    rows: Sequence[Mapping[str, Any]],
    long: Sequence[Mapping[str, Any]] = (),
    long_title: str = "",
    title: str = "",
) -> None:
    """A panel for each setting; `long` rows are drawn by output position in one more."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = list(dict.fromkeys(row["setting"] for row in rows))
    panels = len(settings) + bool(long)
    figure, grid = pyplot.subplots(1, max(panels, 1), figsize=(5 * panels, 4), squeeze=False)
    for axes, setting in zip(grid[0], settings, strict=False):
        for method in dict.fromkeys(row["method"] for row in rows):
            found = [r for r in rows if (r["setting"], r["method"]) == (setting, method)]
            times = [row["ms_per_token"]["median"] for row in found]
            axes.plot([row["context"] for row in found], times, "o-", label=method)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_title(setting)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("ms per token")
        axes.legend()
    if long:
        _plot_positions(grid[0][-1], long, long_title)
    if title:
        figure.suptitle(title)
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, format=os.path.splitext(path)[1][1:], dpi=120)
    pyplot.close(figure)


def _plot_positions(axes: Any, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Milliseconds per token on the left, tokens per step on the right."""
    right, times = axes.twinx(), [ms for row in rows for ms in row["by_position"]["ms_per_token"]]
    for number, row in enumerate(rows):
        found, colour = row["by_position"], f"C{number}"
        axes.plot(found["position"], found["ms_per_token"], color=colour, label=row["method"])
        right.plot(found["position"], found["tokens_per_step"], ":", color=colour)
    axes.set_title(title)
    axes.set_xlabel("output position, tokens")
    axes.set_ylabel("ms per token (lines)")
    if max(times) > WIDE_RANGE * min(times):
        axes.set_yscale("log", base=2)
    else:
        axes.set_ylim(bottom=0)
    right.set_ylabel("tokens per step (dots)")
    right.set_ylim(bottom=0)
    axes.legend()

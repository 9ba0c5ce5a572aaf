# SPDX-License-Identifier: Apache-2.0
"""The notebook runs from top to bottom, as a reader would run it, and draws its pictures."""

import json
from pathlib import Path

import matplotlib
import pytest

TOUR = Path(__file__).resolve().parent.parent / "examples" / "tour.ipynb"


@pytest.mark.wide
def test_it_runs_from_top_to_bottom(capsys, monkeypatch):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown: list[int] = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(len(pyplot.gca().lines)))
    notebook, names = json.loads(TOUR.read_text()), {}
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{TOUR.name}, cell {index}", "exec"), names)
    pyplot.close("all")
    assert shown == [2, 2]
    out = capsys.readouterr().out
    assert "the same text" in out and "Once" not in out.splitlines()[0]


def test_it_is_committed_without_what_a_run_left():
    for link in ("docs/generation.md", "docs/choosing.md", "docs/coming_from.md"):
        assert f"../{link}" in TOUR.read_text() and (TOUR.parent.parent / link).is_file()
    for cell in json.loads(TOUR.read_text())["cells"]:
        assert not cell.get("outputs") and not cell.get("execution_count")

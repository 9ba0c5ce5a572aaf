# SPDX-License-Identifier: Apache-2.0
"""Runs the notebook and keeps what it prints and draws, for readers who do not run it.

    python -m tools.tour

Needs matplotlib and no Jupyter. What depends on the machine, its times, is kept as it was here.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

TOUR = Path(__file__).resolve().parent.parent / "examples" / "tour.ipynb"


def main() -> None:
    notebook = json.loads(TOUR.read_text())
    for cell, outputs in zip(code_cells(notebook), outputs_of(notebook), strict=True):
        cell["outputs"] = outputs
    TOUR.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs_of(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Of each cell with code, as Jupyter writes them: a text, and pictures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names: dict[str, Any] = {}
    found = []
    for index, cell in enumerate(code_cells(notebook)):
        said, pictures = io.StringIO(), []
        pyplot.show = lambda pictures=pictures: pictures.append(_picture(pyplot))
        with contextlib.redirect_stdout(said):
            exec(compile("".join(cell["source"]), f"{TOUR.name}, cell {index}", "exec"), names)
        found.append([*_text(said.getvalue()), *pictures])
    return found


def _text(said: str) -> list[dict[str, Any]]:
    lines = said.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


def _picture(pyplot: Any) -> dict[str, Any]:
    file = io.BytesIO()
    pyplot.savefig(file, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
    pyplot.close("all")
    content = base64.b64encode(file.getvalue()).decode()
    return {"data": {"image/png": content}, "metadata": {}, "output_type": "display_data"}


if __name__ == "__main__":
    main()

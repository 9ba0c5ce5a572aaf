# SPDX-License-Identifier: Apache-2.0
"""The notebook runs from top to bottom, as a reader would run it; what it says is kept in it."""

import json

import pytest

from tools.tour import TOUR, code_cells, outputs_of

# The last cell draws times.
NOTEBOOK = json.loads(TOUR.read_text())


def texts(outputs):
    return ["".join(one["text"]) for one in outputs if one["output_type"] == "stream"]


def pictures(outputs):
    return [one["data"]["image/png"] for one in outputs if one["output_type"] == "display_data"]


@pytest.mark.wide
def test_it_runs_from_top_to_bottom_and_says_what_is_kept():
    """Pictures may differ, as one has times, and so may the order in which prompts are answered."""
    for cell, found in zip(code_cells(NOTEBOOK), outputs_of(NOTEBOOK), strict=True):
        said, kept = ("".join(texts(one)).splitlines() for one in (found, cell["outputs"]))
        assert sorted(said) == sorted(kept)
        assert len(pictures(found)) == len(pictures(cell["outputs"]))


def test_readers_see_what_it_says():
    cells = code_cells(NOTEBOOK)
    assert all(cell["outputs"] for cell in cells[1:])
    said = "".join(text for cell in cells for text in texts(cell["outputs"]))
    assert "the same text" in said
    assert sum(len(pictures(cell["outputs"])) for cell in cells) == 2
    assert not any(cell.get("execution_count") for cell in cells)
    for link in ("docs/using.md", "docs/methods.md", "docs/exactness.md"):
        assert f"../{link}" in TOUR.read_text() and (TOUR.parent.parent / link).is_file()

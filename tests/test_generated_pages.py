# SPDX-License-Identifier: Apache-2.0
"""Pages, tables and figures of docs/ are what code, docstrings and committed results say today."""

import subprocess
import sys
from pathlib import Path

import pytest

import pallas_kernels
import tsjax
from benchmarks import choosing

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.wide
@pytest.mark.parametrize("tool", ["figures", "api_page"])
def test_what_a_tool_writes_is_current(tool):
    command = [sys.executable, "-m", f"tools.{tool}", "--check"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0, f"run python -m tools.{tool}"


def test_every_public_name_has_an_entry():
    lines = (ROOT / "docs" / "api.md").read_text().splitlines()
    entries = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    names = [*tsjax.__all__, *pallas_kernels.__all__]
    for module in tsjax._MODULES:
        others = {*getattr(tsjax, module).__all__} - {*tsjax.__all__}
        names += [f"{module}.{name}" for name in others]
    assert sorted(entries) == sorted(names)


def test_the_table_of_choices_is_current_and_its_memory_is_weights_and_cache():
    assert choosing.main(["--check"]) == 0, "run python -m benchmarks choosing"
    lines = choosing.table().splitlines()
    (line,) = [line for line in lines if line.startswith("| llama3.1-8b |")]
    # 8.03e9 parameters; 32 layers of 8 kv heads of 128, keys and values, for 106,496 tokens.
    assert f"| {8.03 * 2:.1f} GB | {2 * 32 * 8 * 128 * 2 * 106_496 / 1e9:.1f} GB |" in line
    assert "no room" in line.split(" | ")[3]  # on a card of 24 GB

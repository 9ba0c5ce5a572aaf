# SPDX-License-Identifier: Apache-2.0
"""docs/api.md is what the docstrings say today."""

import subprocess
import sys
from pathlib import Path

import pallas_kernels
import tsjax

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_is_current():
    command = [sys.executable, "-m", "tools.api_page", "--check"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0, "run python -m tools.api_page"


def test_every_public_name_has_an_entry():
    lines = (ROOT / "docs" / "api.md").read_text().splitlines()
    entries = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    assert sorted(entries) == sorted([*tsjax.__all__, *pallas_kernels.__all__])

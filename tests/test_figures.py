# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/ show what tsjax does today."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_step_and_the_tree_are_drawn_from_the_code_of_today():
    command = [sys.executable, "-m", "tools.figures", "--check"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0, "run python -m tools.figures"

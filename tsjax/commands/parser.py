# SPDX-License-Identifier: Apache-2.0
"""How the command line refuses, and how it speaks: what it needs before any command is loaded."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def tell(line: str) -> None:
    print(line, file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the whole usage; no abbreviated names."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

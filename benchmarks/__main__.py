# SPDX-License-Identifier: Apache-2.0
"""One program for all benchmarks: ``python -m benchmarks NAME [flags]``; without a name, the list.

Knows their names. A benchmark is a module with a function `main` that takes the flags.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

NAMES = (
    "cpu", "narrow", "start", "prefixes", "soak", "ttft", "kernels", "step", "step_torch", "aot",
    "choosing", "scaling", "expected", "readme_table",
)  # fmt: skip


def listing() -> str:
    """The names, each with the first line of its module, which is read and not imported."""
    lines = ["python -m benchmarks NAME [flags]; NAME --help lists the flags", ""]
    for name in NAMES:
        spec = find_spec(f"benchmarks.{name}")
        assert spec is not None and spec.origin is not None
        about = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""
        lines.append(f"{name:18}{about.splitlines()[0]}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int | None:
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *flags = argv
    if name not in NAMES:
        print(f"error: {name!r} is no benchmark: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    return importlib.import_module(f"benchmarks.{name}").main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

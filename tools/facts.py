# SPDX-License-Identifier: Apache-2.0
"""The facts beside a figure: command, device, versions, commit and date.

A run may come from a copy of the checkout without its history: the variable TSJAX_COMMIT then names
the commit.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "tsjax", "jax", "jaxlib", "flax", "orbax-checkpoint", "safetensors", "transformers", "torch",
    "numpy",
)  # fmt: skip


def facts() -> dict[str, Any]:
    """Command, device, versions, commit and date of this run."""
    from tsjax.host import info

    command = shlex.join(["python", "-m", program(), *sys.argv[1:]])
    return {"command": command, **info.facts(PACKAGES), "commit": _commit()}


def program() -> str:
    """The module that this process runs."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = "" if spec is None else spec.name.removesuffix(".__main__")
    return name if name.startswith("experiments") else "benchmarks"


# What commands were called when results were recorded, and what they are called now.
RENAMED = {
    r"benchmarks/(?:bench_)?(\w+)\.py": r"-m benchmarks \1",
    r"-m benchmarks(?:\.longcontext\.evaluate| longcontext)\b": "-m experiments.longcontext",
    r"-m benchmarks longbench\b": "-m experiments.longcontext.longbench",
}


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def todays_command(command: str) -> str:
    """The command that does today what a recorded one did."""
    for then, now in RENAMED.items():
        command = re.sub(then, now, command)
    return command


def _commit() -> str | None:
    """The checkout's commit, with a + when files differ from it."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    except OSError:
        return os.environ.get("TSJAX_COMMIT")
    name = commit.stdout.decode().strip() + "+" * bool(changed.stdout.strip())
    return name or os.environ.get("TSJAX_COMMIT")

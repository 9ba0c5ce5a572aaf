# SPDX-License-Identifier: Apache-2.0
"""What all tables of the docs are made of: committed results, and how they are named."""

from __future__ import annotations

import json
import re

from benchmarks.__main__ import MODULES
from benchmarks.report import ROOT, todays_command

RESULTS = ROOT / "benchmarks" / "results" / "cpu"


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def longcontext() -> list[dict]:
    """The documents of `longcontext`, a model each."""
    return [read(path.stem) for path in sorted(RESULTS.glob("longcontext-*.json"))]


def of_gpu(name: str) -> dict:
    """What was measured on the GPU that ran last."""
    return json.loads((RESULTS.parent / "h200" / f"{name}.json").read_text())


def made_by(document: dict) -> str:
    """The command as it is today; of a benchmark that is gone as it was, and the commit that ran
    it."""
    command = todays_command(document["command"])
    name = re.search(r"-m benchmarks (\w+)", command)
    if name is None or name[1] in MODULES:
        return f"`{command}`"
    commit = document.get("commit")
    then = f"the commit {commit}" if commit else "a commit of that day"
    return f"`{document['command']}` at {then.replace('+', ', with changes')}"


def source(*documents: dict) -> str:
    """The commands, each machine once."""
    made: dict[str, list[str]] = {}
    for document in documents:
        versions = document["versions"]
        where = (
            f"({document['cpus']} cores of {document['device']}, jax {versions['jax']}, "
            f"Python {versions['python']}, {document['date']})"
        )
        made.setdefault(where, []).append(made_by(document))
    return "; ".join(f"{', '.join(commands)} {where}" for where, commands in made.items())


def head(columns: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {columns} |", "|---" * len(columns.split(" | ")) + "|"]


def machine(document: dict) -> str:
    return f"{document['cpus']} cores of {document['device']}, {document['date']}"

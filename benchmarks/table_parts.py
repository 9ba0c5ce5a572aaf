# SPDX-License-Identifier: Apache-2.0
"""What all tables of the docs are made of: committed results, and how they are named."""

from __future__ import annotations

import json

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


def source(document: dict) -> str:
    versions = document["versions"]
    return (
        f"`{todays_command(document['command'])}` "
        f"({document['cpus']} cores of {document['device']}, "
        f"jax {versions['jax']}, Python {versions['python']}, {document['date']})"
    )


def head(columns: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {columns} |", "|---" * len(columns.split(" | ")) + "|"]


def machine(document: dict) -> str:
    return f"{document['cpus']} cores of {document['device']}, {document['date']}"

# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: the facts beside the figures, and where they are written."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "tsjax",
    "jax",
    "jaxlib",
    "flax",
    "orbax-checkpoint",
    "safetensors",
    "transformers",
    "torch",
    "numpy",
)


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="folder that receives the JSON document")


def facts() -> dict[str, Any]:
    """Command, device, versions and date of this run."""
    import jax

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    name = _cpu_name() if device.platform == "cpu" else device.device_kind
    arguments = [arg for arg in sys.argv[1:]]
    script = os.path.join("benchmarks", os.path.basename(sys.argv[0]))
    return {
        "command": shlex.join(["python", script, *arguments]),
        "device": name,
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "versions": versions,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _commit() -> str | None:
    """The checkout's commit, with a + when files differ from it."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    except OSError:
        return None
    return (commit.stdout.decode().strip() + "+" * bool(changed.stdout.strip())) or None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip() + " (CPU)"
    except OSError:
        pass
    return platform.processor() or "CPU"


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write(document: dict[str, Any], out: Path | None, name: str) -> None:
    """One JSON document as the last line on stdout, and as a file in `out`."""
    document = {**facts(), **document}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {path}", file=sys.stderr)
    print(json.dumps(document))

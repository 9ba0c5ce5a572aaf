# SPDX-License-Identifier: Apache-2.0
"""Seconds from the start of a command to its first printed token: on a new machine, and later.

Each command runs three times, each in a fresh process. The first finds an empty cache folder, as on
a machine where tsjax never ran. The second finds what the first one kept but for its programs: the
kernels, and what steps cost. The third finds all that the second one kept. `tsjax demo` draws
nothing before both methods are compiled, so it counts as begun when it says that they are. CPU
seconds are those of a whole process, compiling included: where other programs run, they tell more
than the clock.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report

GENERATE = ["generate", "tsjax/small-english", "Once upon a time", "--max-new-tokens", "16"]
COMMANDS = {
    "plain": [*GENERATE, "--method", "autoregressive"],
    "tokenswift": [*GENERATE, "--method", "tokenswift"],
    "demo": ["demo", "--plain", "--greedy", "--tokens", "16"],
}
COMPILED = re.compile(rb"Compiling both methods \.\.\. \d+ s\n")
# What a process finds, and its goal in seconds, on two cores.
GOALS = {"nothing": 20.0, "all but programs": 8.0, "all": 3.0}


class Run(NamedTuple):
    seconds: float  # to the first token
    cpu_seconds: float  # of the whole process


def run(command: Sequence[str], cache: str) -> Run:
    """One command in a fresh process; RuntimeError with what it said if it failed."""
    # What jax keeps or not is the command's own affair here.
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    env |= {"TSJAX_CACHE": cache, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryFile() as errors:
        began, first, text = time.perf_counter(), None, b""
        used = os.times()
        process = subprocess.Popen(
            [sys.executable, "-m", "tsjax", *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
        )
        assert process.stdout is not None
        with process.stdout as out:
            while piece := os.read(out.fileno(), 4096):
                text += piece
                if first is None and has_begun(command[0], text):
                    first = time.perf_counter() - began
        if process.wait() or first is None:
            errors.seek(0)
            raise RuntimeError(f"tsjax {' '.join(command)}: {errors.read().decode()}")
        now = os.times()
    cpu = now.children_user + now.children_system - used.children_user - used.children_system
    return Run(first, cpu)


def has_begun(command: str, text: bytes) -> bool:
    """Whether what a command printed so far has its first token."""
    return bool(COMPILED.search(text)) if command == "demo" else bool(text)


def bars(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals, and whether they were met."""
    return [
        {
            "what": f"{row['command']}, {row['kept']} kept: seconds to the first token",
            "value": row["seconds"],
            "bar": GOALS[row["kept"]],
            "met": row["seconds"] <= GOALS[row["kept"]],
        }
        for row in rows
    ]


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("first_token", __doc__)
    parser.add_argument("--cases", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    args = parser.parse_args(argv)
    document: dict[str, Any] = {"rows": []}
    print("command       kept                 seconds   CPU seconds")
    for name in args.cases:
        with tempfile.TemporaryDirectory() as cache:
            for kept in GOALS:
                if kept == "all but programs":
                    shutil.rmtree(Path(cache, "programs"))
                found = run(COMMANDS[name], cache)
                document["rows"].append({"command": name, "kept": kept, **found._asdict()})
                print(f"{name:14}{kept:18}{found.seconds:10.2f}{found.cpu_seconds:14.2f}")
    document["bars"] = bars(document["rows"])
    report.show_bars(document)
    report.write(document, args.out, "first_token")

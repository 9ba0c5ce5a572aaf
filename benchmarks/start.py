# SPDX-License-Identifier: Apache-2.0
"""Whole commands: from the command to the first token and to its end, auto beside plain decoding.

`tsjax generate` in a process of its own, as from a shell: with all kept that an earlier one has
left, or with no program kept (kernels and wheels are there). Round by round, the methods in turn;
prompts are the reported half of prompts.json. Also the longest time without a word on either
stream. What a command has others compile beside it ends before the next one begins.

    python -m benchmarks start --model smollm2-135m.gguf --out benchmarks/results/cpu
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from pallas_kernels.cache_folder import cache_folder
from tsjax.base.input_files import read_json
from tsjax.measure.timing import ratios, summary

METHODS = "autoregressive", "auto"
CASES: dict[str, list[str]] = {
    "answer": ["--max-new-tokens", "400", "--do-sample", "--temperature", "0.8", "--top-p", "0.95",
               "--eos-token-id", "-1"],
    "edit": ["--max-new-tokens", "300", "--no-do-sample"],
}  # fmt: skip
KINDS = {"answer": ("short", "story", "code"), "edit": ("edit",)}
PROMPTS = report.ROOT / "benchmarks" / "prompts.json"
MOST_WAITED = 180  # seconds for programs that are compiled beside a command


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("start", __doc__)
    parser.add_argument("--model", required=True, help="a checkpoint of a model for chats")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--prompts", type=int, default=1, help="of each kind")
    parser.add_argument("--rounds", type=int, default=5, help="with all kept")
    parser.add_argument("--cold", type=int, default=2, help="rounds with nothing kept")
    args = parser.parse_args(argv)
    name = Path(args.model).stem
    found: list[dict[str, Any]] = []
    for case in args.cases:
        for kind, number, prompt in prompts_of(KINDS[case], args.prompts):
            for kept, rounds in ((False, args.cold), (True, args.rounds)):
                if not rounds:
                    continue
                row = measured(args.model, args.dtype, prompt, CASES[case], kept, rounds)
                found.append({"case": case, "kind": kind, "number": number, "kept": kept} | row)
                print(line_of(found[-1]), file=sys.stderr)
    document = {"model": name, "dtype": args.dtype, "rows": found}
    report.write(document, args.out, f"start-{name}")


def prompts_of(kinds: Sequence[str], count: int) -> Iterator[tuple[str, int, str]]:
    """So many of each kind, from the second half: the first one is to choose settings on."""
    every = read_json(PROMPTS)["kinds"]
    first = len(every[kinds[0]]) // 2
    for number in range(first, min(first + count, 2 * first)):
        for kind in kinds:
            yield kind, number, every[kind][number]


def line_of(row: dict[str, Any]) -> str:
    ours = row["methods"]
    first = ", ".join(f"{ours[m]['first']['median']:.2f}" for m in METHODS)
    whole = ", ".join(f"{ours[m]['whole']['median']:.2f}" for m in METHODS)
    kept = "all kept" if row["kept"] else "no program kept"
    return (
        f"{row['case']} ({row['kind']} {row['number']}, {kept}): first {first} s, whole {whole} s, "
        f"plain over auto {row['plain_over_auto']['median']:.2f}"
    )


def measured(
    model: str, dtype: str, prompt: str, flags: list[str], kept: bool, rounds: int
) -> dict[str, Any]:
    times: dict[str, dict[str, list[float]]] = {
        method: {"first": [], "whole": [], "silent": []} for method in METHODS
    }
    said = set()
    with tempfile.TemporaryDirectory(prefix="tsjax-start-") as place:
        folder = Path(place)
        own = cache_folder()
        if own is not None and (own / "native").exists():
            shutil.copytree(own / "native", folder / "native")
        for number in range(-kept, rounds):
            for method in METHODS if number % 2 == 0 else METHODS[::-1]:
                if not kept:
                    shutil.rmtree(folder / "programs", ignore_errors=True)
                command = ["generate", model, "--chat", prompt, "--dtype", dtype, "--seed", "1"]
                text, one = timed([*command, "--method", method, *flags], folder)
                said.add(text)
                wait_for_programs(folder)
                for name, seconds in one.items() if number >= 0 else ():
                    times[method][name].append(seconds)
    plain, auto = (times[method]["whole"] for method in METHODS)
    return {
        "same_text": len(said) == 1,
        "methods": {
            method: {name: summary(seconds) for name, seconds in of.items()}
            for method, of in times.items()
        },
        "plain_over_auto": ratios(plain, auto),
    }


def timed(command: list[str], folder: Path) -> tuple[str, dict[str, float]]:
    """What is said on stdout, and seconds: to its first byte, to the end, the longest silence."""
    env = {**os.environ, "TSJAX_CACHE": str(folder)}
    begun = time.perf_counter()
    running = subprocess.Popen(
        [sys.executable, "-m", "tsjax", *command], env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, cwd=report.ROOT,
    )  # fmt: skip
    assert running.stdout is not None and running.stderr is not None
    streams, text, heard, first = selectors.DefaultSelector(), b"", [begun], 0.0
    for stream in (running.stdout, running.stderr):
        streams.register(stream, selectors.EVENT_READ)
    while streams.get_map():
        for key, _ in streams.select():
            some = os.read(key.fd, 2**16)
            heard.append(time.perf_counter())
            if not some:
                streams.unregister(key.fileobj)
            elif key.fileobj is running.stdout:
                first, text = first or heard[-1], text + some
    if running.wait():
        raise SystemExit(f"{command[0]} ended with {running.returncode}")
    silent = max(b - a for a, b in zip(heard, heard[1:], strict=False))
    whole = heard[-1] - begun
    return text.decode(), {"first": first - begun, "whole": whole, "silent": silent}


def wait_for_programs(folder: Path) -> None:
    end = time.monotonic() + MOST_WAITED
    time.sleep(0.5)
    while [*folder.rglob(".*.lock")] and time.monotonic() < end:
        time.sleep(0.5)

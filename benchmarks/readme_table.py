# SPDX-License-Identifier: Apache-2.0
"""Writes the README's figures from benchmarks/results/, so that no number is typed by hand.

python benchmarks/readme_table.py            rewrites README.md between its two markers
python benchmarks/readme_table.py --check    exits with 1 if that would change it
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def decode_rows(document: dict) -> list[str]:
    what = {
        "short": "plain decoding, {prompt_tokens} + {new_tokens} tokens, whole call, per token",
        "long": "plain decoding at a context of {prompt_tokens}, per token",
    }
    rows = []
    for name, case in document["cases"].items():
        ours, theirs = case["tsjax_ms_per_token"]["median"], case["torch_ms_per_token"]["median"]
        rows += [
            f"| {what[name].format(**case)} | {ours:.2f} ms "
            f"| {theirs:.2f} ms (transformers, torch) | {case['speedup']['median']:.2f}x |",
            f"| the same | {ours:.2f} ms | {case['bound_ms_per_token']:.2f} ms (memory bandwidth) "
            f"| {case['share_of_bound']:.0%} of the bound |",
        ]
    return rows


def capacity_rows(document: dict) -> list[str]:
    (small, a), (large, b) = document["ms_per_step"].items()
    return [
        f"| a step at {document['length']} tokens, cache of {int(large):,} slots | "
        f"{b['median']:.2f} ms | {a['median']:.2f} ms (cache of {int(small):,} slots) | "
        f"{1 / document['ratio']['median']:.2f}x |",
        f"| temporary memory of the decode loop | {document['temp_bytes'] / 1e6:.1f} MB | "
        f"{document['cache_bytes'] / 1e6:,.0f} MB (its cache) | {document['temp_share']:.2%} |",
    ]


def convert_rows(document: dict) -> list[str]:
    rows = []
    for case in document["cases"]:
        peak, written = case["peak_bytes"] / 1e9, case["written_bytes"] / 1e9
        rows.append(
            f"| peak memory of converting {case['case'].replace('->', 'to')} | {peak:.2f} GB "
            f"| {written:.2f} GB (its output) | {peak - written:+.2f} GB |"
        )
    return rows


SECTIONS = {"decode": decode_rows, "capacity": capacity_rows, "convert_memory": convert_rows}


def table() -> str:
    rows, sources = [], []
    for name, render in SECTIONS.items():
        path = ROOT / "benchmarks" / "results" / "cpu" / f"{name}.json"
        document = json.loads(path.read_text())
        rows += render(document)
        versions = document["versions"]
        sources.append(
            f"`{document['command']}` ({document['cpus']} cores of {document['device']}, "
            f"jax {versions['jax']}, Python {versions['python']}, {document['date']})"
        )
    head = ["| what | tsjax | against | ratio |", "|---|---|---|---|"]
    note = (
        "Decoding: float32, medians of interleaved runs, random weights of 15M parameters. Made by "
    )
    return "\n".join([*head, *rows, "", note + "; ".join(sources) + "."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    path = ROOT / "README.md"
    text = path.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    wanted = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if args.check:
        return 0 if wanted == text else 1
    path.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())

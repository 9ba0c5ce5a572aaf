# SPDX-License-Identifier: Apache-2.0
"""Writes the table of cards in docs/speed.md: memory and times by model, from the cost model.

python -m benchmarks choosing            writes the table
python -m benchmarks choosing --check    exits with 1 if that would change it
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.report import ROOT
from benchmarks.table_parts import head
from tsjax.files.presets import model_preset_names
from tsjax.measure.roofline_table import roofline_of
from tsjax.model.cache import cache_bytes

PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
CARDS = {"rtx-4090": "RTX 4090, 24 GB", "a100-40gb": "A100, 40 GB", "a100": "A100, 80 GB",
         "h100": "H100, 80 GB", "h200": "H200, 141 GB"}  # fmt: skip
PROMPT, NEW = 4096, 102_400


def table() -> list[str]:
    cards = " | ".join(CARDS.values())
    lines = head(f"model, bfloat16 | weights | cache of {PROMPT + NEW:,} tokens | {cards}")
    alike: dict[str, list[str]] = {}  # models of one shape
    for name in model_preset_names():
        found = {card: roofline_of(name, device=card, prompt=PROMPT, new=NEW) for card in CARDS}
        one = next(iter(found.values()))
        weights = (one.step.weights + one.step.embedding) / 1e9
        cache = cache_bytes(one.model, 1, PROMPT + NEW) / 1e9
        cells = []
        for roofline in found.values():
            plain, auto = (
                1e3 * row.expected.seconds
                for row in roofline.methods
                if row.name in ("plain", "auto")
            )
            cells.append(f"{plain:.1f}, {auto:.1f}" if roofline.fits else "no room")
        figures = f"{weights:.1f} GB | {cache:.1f} GB | {' | '.join(cells)}"
        alike.setdefault(figures, []).append(name)
    lines += [f"| {', '.join(names)} | {figures} |" for figures, names in alike.items()]
    return lines


def page(text: str) -> str:
    """The page with the table of today."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return "\n".join([before + BEGIN, *table(), END + after])


def main(argv: Sequence[str]) -> int | None:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks choosing", description=about)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    old = PAGE.read_text("utf-8")
    new = page(old)
    if args.check:
        return 0 if new == old else 1
    PAGE.write_text(new, "utf-8")
    return None

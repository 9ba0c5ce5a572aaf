# SPDX-License-Identifier: Apache-2.0
"""Writes the table of cards in docs/speed.md: memory and times by model, from the cost model.

python -m benchmarks choosing            writes the table
python -m benchmarks choosing --check    exits with 1 if that would change it
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import table_parts
from tsjax.files.presets import model_preset_names
from tsjax.measure.roofline_table import Roofline, roofline_of
from tsjax.model.cache import cache_bytes

CARDS = {"rtx-4090": "RTX 4090, 24 GB", "a100-40gb": "A100, 40 GB", "a100": "A100, 80 GB",
         "h100": "H100, 80 GB", "h200": "H200, 141 GB"}  # fmt: skip
PROMPT, NEW = 4096, 102_400


def table() -> str:
    titles = "model, bfloat16", "weights", f"cache of {PROMPT + NEW:,} tokens", *CARDS.values()
    alike: dict[tuple[str, ...], list[str]] = {}  # models of one shape
    for name in model_preset_names():
        found = [roofline_of(name, device=card, prompt=PROMPT, new=NEW) for card in CARDS]
        one = found[0]
        weights = (one.step.weights + one.step.embedding) / 1e9
        cache = cache_bytes(one.model, 1, PROMPT + NEW) / 1e9
        figures = f"{weights:.1f} GB", f"{cache:.1f} GB", *map(times, found)
        alike.setdefault(figures, []).append(name)
    lines = (table_parts.line(", ".join(names), *figures) for figures, names in alike.items())
    return "\n".join([*table_parts.head(*titles), *lines])


def times(roofline: Roofline) -> str:
    """Milliseconds of a token, by plain decoding and by Auto."""
    if not roofline.fits:
        return "no room"
    expected = {row.name: 1e3 * row.expected.seconds for row in roofline.methods}
    return f"{expected['plain']:.1f}, {expected['auto']:.1f}"


def main(argv: Sequence[str]) -> int:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks choosing", description=about)
    parser.add_argument("--check", action="store_true", help="write nothing")
    return table_parts.write({("docs/speed.md", "table"): table}, parser.parse_args(argv).check)

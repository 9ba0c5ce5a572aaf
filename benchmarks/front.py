# SPDX-License-Identifier: Apache-2.0
"""The README's few rows, of those in docs/results.md and docs/lazyllm.md.

A row that a reader could not check is refused: a ratio is the one of the two times beside it.
"""

from __future__ import annotations

import re
import statistics

from benchmarks import cpu_tables, gpu_tables, real_tables
from benchmarks.table_parts import head, line, machine, matching, of_gpu, read

QUANTITY = re.compile(r"([\d,]*\.?\d+) (?:ms|s|MB)\b")
Row = tuple[str, ...]  # what, tsjax, against, ratio, machine


def table() -> str:
    rows = [*real_tables.front_rows(), *plain_decoding(), *on_the_gpu(), lazy_prefill(), memory()]
    lines = (line(*checked(*row)) for row in rows)
    return "\n".join([*head("what", "tsjax", "against", "ratio", "machine"), *lines])


def plain_decoding() -> list[Row]:
    document, found = read("cpu"), []
    for row in document["rows"]:
        if (row["shape"], row["context"]) == ("125M", 8192):
            ms, others = row["median_ms"], [name for name in row["over"] if name != "plain XLA"]
            what = f"plain decoding of {row['shape']} at a context of {row['context']:,}, per token"
            against = ", ".join(f"{ms[name]:.1f} ms ({name})" for name in others)
            ratios = ", ".join(f"{ms[name] / ms['native']:.2f}x" for name in others)
            ratios += f"; {row['share_of_bound']:.0%} of the bound"
            found.append((what, f"{ms['native']:.1f} ms", against, ratios, machine(document)))
    return found


def on_the_gpu() -> list[Row]:
    document = of_gpu("step-llama3.1-8b")
    return [
        gpu_tables.plain_step(document, row)
        for row in document["rows"]
        if row["pass"] == "plain" and row["context"] in (4096, 106_496)
    ]


def lazy_prefill() -> Row:
    """Of the largest model, after its longest prompts."""
    document = max(matching("longcontext-*"), key=lambda one: one["rows"][0]["full_first"][0])
    rows = [row for row in document["rows"] if row["family"] == "default" and row["scores"]]
    longest = max(row["length"] for row in rows)
    rows = [row for row in rows if row["length"] == longest]
    cut, full = (
        statistics.median(second for row in rows for second in row[key])
        for key in ("first", "full_first")
    )
    what = f"LazyLLM (approximate), {document['model']}, first token after {longest:,}"
    against, ratio = f"{full:.1f} s (a full prefill)", f"{full / cut:.2f}x"
    return what, f"{cut:.1f} s", against, ratio, machine(document)


def memory() -> Row:
    document = read("capacity")
    return *cpu_tables.decode_loop(document), machine(document)


def checked(*row: str) -> Row:
    """The row as it is, or ValueError: each ratio follows from its times, as they are rounded."""
    what, ours, against, ratios, *_ = row
    shown = [ratio.strip() for ratio in ratios.partition(";")[0].split(",") if ratio.strip()]
    if shown and "(1.0 tokens per step)" in what:
        raise ValueError(f"plain decoding is compared with itself: {line(*row)}")
    for ratio, other in zip(shown, QUANTITY.findall(against), strict=True):
        number, unit = re.match(r"([\d.]+)(x|%)", ratio).groups()
        lowest, highest = (end / (100 if unit == "%" else 1) for end in _as_rounded(number))
        (least, most), (low, high) = _as_rounded(*QUANTITY.findall(ours)), _as_rounded(other)
        agrees = highest >= low / most and lowest <= high / least
        if unit == "%":  # a share: of a bound that is less, or of a whole that is more
            agrees = agrees or (highest >= least / high and lowest <= most / low)
        if not agrees:
            raise ValueError(f"{ratio} does not follow from the times shown: {line(*row)}")
    return row


def _as_rounded(number: str) -> tuple[float, float]:
    """What may have been rounded to this number: from, to."""
    value, half = float(number.replace(",", "")), 0.5 / 10 ** len(number.partition(".")[2])
    return value - half, value + half

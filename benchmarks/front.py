# SPDX-License-Identifier: Apache-2.0
"""The README's few rows, of those in docs/results.md and docs/lazyllm.md.

A row that a reader could not check is refused: a ratio is the one of the two times beside it.
"""

from __future__ import annotations

import re
import statistics

from benchmarks import gpu_tables, real_tables
from benchmarks.table_parts import head, longcontext, machine, of_gpu, read

QUANTITY = re.compile(r"([\d,]*\.?\d+) (?:ms|s|MB)\b")


def table() -> str:
    lines = [*real_tables.front_rows(), *plain_decoding(), *on_the_gpu()]
    lines += [lazy_prefill(), memory()]
    return "\n".join([*head("what | tsjax | against | ratio | machine"), *map(checked, lines)])


def plain_decoding() -> list[str]:
    document, lines = read("cpu"), []
    for row in document["rows"]:
        if (row["shape"], row["context"]) == ("125M", 8192):
            ms, others = row["median_ms"], [name for name in row["over"] if name != "plain XLA"]
            against = ", ".join(f"{ms[name]:.1f} ms ({name})" for name in others)
            ratios = ", ".join(f"{ms[name] / ms['native']:.2f}x" for name in others)
            lines.append(
                f"| plain decoding of {row['shape']} at a context of {row['context']:,}, per token "
                f"| {ms['native']:.1f} ms | {against} "
                f"| {ratios}; {row['share_of_bound']:.0%} of the bound | {machine(document)} |"
            )
    return lines


def on_the_gpu() -> list[str]:
    document = of_gpu("step-llama3.1-8b")
    return [
        gpu_tables.plain_step(document, row)
        for row in document["rows"]
        if row["pass"] == "plain" and row["context"] in (4096, 106_496)
    ]


def lazy_prefill() -> str:
    """Of the largest model, after its longest prompts."""
    document = max(longcontext(), key=lambda one: one["rows"][0]["full_first"][0])
    rows = [row for row in document["rows"] if row["family"] == "default" and row["scores"]]
    longest = max(row["length"] for row in rows)
    rows = [row for row in rows if row["length"] == longest]
    cut, full = (
        statistics.median(second for row in rows for second in row[key])
        for key in ("first", "full_first")
    )
    return (
        f"| LazyLLM (approximate), {document['model']}, first token after {longest:,} "
        f"| {cut:.1f} s | {full:.1f} s (a full prefill) | {full / cut:.2f}x | {machine(document)} |"
    )


def memory() -> str:
    document = read("capacity")
    return (
        f"| temporary memory of the decode loop | {document['temp_bytes'] / 1e6:.1f} MB "
        f"| {document['cache_bytes'] / 1e6:,.0f} MB (its cache) "
        f"| {document['temp_share']:.2%} | {machine(document)} |"
    )


def checked(line: str) -> str:
    """The row as it is, or ValueError: each ratio follows from its times, as they are rounded."""
    _, what, ours, against, ratios, *_ = (cell.strip() for cell in line.split("|"))
    shown = [ratio.strip() for ratio in ratios.partition(";")[0].split(",") if ratio.strip()]
    if shown and "(1.0 tokens per step)" in what:
        raise ValueError(f"plain decoding is compared with itself: {line}")
    for ratio, other in zip(shown, QUANTITY.findall(against), strict=True):
        number, unit = re.match(r"([\d.]+)(x|%)", ratio).groups()
        lowest, highest = (end / (100 if unit == "%" else 1) for end in _as_rounded(number))
        (least, most), (low, high) = _as_rounded(*QUANTITY.findall(ours)), _as_rounded(other)
        agrees = highest >= low / most and lowest <= high / least
        if unit == "%":  # a share: of a bound that is less, or of a whole that is more
            agrees = agrees or (highest >= least / high and lowest <= most / low)
        if not agrees:
            raise ValueError(f"{ratio} does not follow from the times shown: {line}")
    return line


def _as_rounded(number: str) -> tuple[float, float]:
    """What may have been rounded to this number: from, to."""
    value, half = float(number.replace(",", "")), 0.5 / 10 ** len(number.partition(".")[2])
    return value - half, value + half

# SPDX-License-Identifier: Apache-2.0
"""The docs' table of what several rows cost on a CPU, from rows*.json."""

from __future__ import annotations

from benchmarks.table_parts import head, read, source


def rows_on_a_cpu() -> str:
    document, real = read("rows"), read("rows-smollm2-135m-bfloat16")
    counts = list(document["products"][0]["over_one_row"])
    lines = head("weights, or model and context | one row | " + " | ".join(counts[1:]))
    for one in document["products"]:
        over = one["over_one_row"]
        cells = [f"{over[rows]['median']:.2f}" for rows in counts[1:]]
        lines.append(f"| {one['kind']} | {one['bytes_per_second'] / 1e9:.0f} GB/s | "
                     f"{' | '.join(cells)} |")  # fmt: skip
    passes = [*document["passes"], *real["passes"]]
    for one in passes:
        rows = one["rows"]
        cells = [f"{rows[n]['over_one']['median']:.2f} ({rows[n]['off']:+.0%})" for n in counts[1:]]
        lines.append(
            f"| {one['model']}, {one['context']:,} | {rows['1']['ms']:.2f} ms "
            f"({rows['1']['off']:+.0%}) | {' | '.join(cells)} |"
        )
    seconds = sorted({one["seconds_to_measure"] for one in passes})
    note = (
        "How many times as long as one row so many take: products with 3072 x 576 weights that are "
        "read from memory, and passes of whole models, the sampled token of each row with them; in "
        "brackets how far from the measured pass the table is that `Auto` chooses by. To measure "
        f"one took {seconds[0]:.1f} to {seconds[-1]:.1f} s, compiling included. Instructions: "
        f"{', '.join(document['instructions'])}. Medians of {document['rounds']} rounds. Made by "
    )
    return "\n".join([*lines, "", f"{note}{source(document, real)}."])

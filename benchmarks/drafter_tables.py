# SPDX-License-Identifier: Apache-2.0
"""The docs' tables of a trained one-layer drafter: what it drafts, and what runs gain by it."""

from __future__ import annotations

import statistics

from benchmarks.real_tables import KINDS, NAMES
from benchmarks.table_parts import head, read, source
from tsjax.host.paired_runs import PLAIN

TIMED = {
    "narrow tree": "the text alone", "int8 passes": "int8 passes and text",
    "drafter": "the drafter alone", "drafter and text": "the drafter and text",
    "drafter and text, not learning": "the same, not learning", "auto": "Auto",
}  # fmt: skip
COUNTED = {
    "16 rows, text": "the text", "16 rows, heads": "TokenSwift's heads",
    "5 rows, drafter not learning": "5 rows, not learning", "5 rows, drafter": "5 rows",
    "8 rows, drafter not learning": "8 rows, not learning", "8 rows, drafter": "8 rows",
    "16 rows, drafter not learning": "16 rows, not learning", "16 rows, drafter": "16 rows",
}  # fmt: skip
MODEL = "smollm2-135m-bfloat16"


def chains() -> str:
    """By kind of prompt and by place, without learning in the run."""
    document = read(f"drafter-{MODEL}")
    lines = head("answers | tokens of a step | drafts right, each where those before were | steps")
    found = document["answers"]
    for place, one in [("all", found), *found["by"].items()]:
        what = str(KINDS.get(place, place)).replace("from ", "from token ")
        right = ", ".join(f"{share:.0%}" for share in one["right"])
        lines.append(f"| {what} | {one['tokens_per_step']:.2f} | {right} | {one['chains']:,} |")
    training, cost = document["training"], document["cost"]
    minutes, text = training["seconds"] / 60, training["text_tokens"]
    chain, plain = (cost["ms"][name]["median"] for name in ("chain", "plain step"))
    note = (
        f"{NAMES[document['model']['name']]}, {document['dtype']}, temperature "
        f"{document['temperature']}: a chain of four drafts, nothing learned in the run. "
        "The answers are to the reporting half of the prompts. "
        f"The drafter was trained for {training['steps']:,} steps, {minutes:.0f} minutes, on "
        f"{text:,} tokens of the model's own text. A chain takes "
        f"{cost['ratio']['median']:.2f} plain steps ({chain:.2f} of {plain:.2f} ms)."
    )
    return "\n".join([*lines, "", f"{note} Made by {source(document)}."])


def runs() -> str:
    """Tokens per step and speed of whole runs, by kind of prompt."""
    document = read(f"drafters-{MODEL}")
    cells = [cell for cell in document["cells"] if cell["half"] == "report"]
    return "\n\n".join([_counted(cells), _timed(cells), f"Made by {source(document)}."])


def _rows_of(cells: list[dict], kind: str, method: str) -> list[dict]:
    return [
        row for cell in cells if cell["kind"] == kind for row in cell["rows"]
        if row["method"] == method
    ]  # fmt: skip


def _known(cells: list[dict], names: dict[str, str]) -> list[str]:
    methods = {row["method"] for cell in cells for row in cell["rows"]}
    return [name for name in names if name in methods]


def _kinds(cells: list[dict]) -> dict[str, str]:
    return {kind: KINDS[kind] for kind in dict.fromkeys(cell["kind"] for cell in cells)}


def _counted(cells: list[dict]) -> str:
    names = _known(cells, COUNTED)
    lines = head(
        "tokens of a step, every row judged | " + " | ".join(COUNTED[name] for name in names)
    )
    for kind, title in _kinds(cells).items():
        found = [_mean([row["tokens_per_step"] for row in _rows_of(cells, kind, name)])
                 for name in names]  # fmt: skip
        lines.append(f"| {title} | " + " | ".join(f"{one:.2f}" for one in found) + " |")
    return "\n".join(lines)


def _timed(cells: list[dict]) -> str:
    names = _known(cells, TIMED)
    lines = head("speed over plain decoding | plain | " + " | ".join(TIMED[name] for name in names))
    for kind, title in _kinds(cells).items():
        plain = [row["ms_per_token"]["median"] for row in _rows_of(cells, kind, PLAIN)]
        found = [
            statistics.median(
                row["speedup_over_plain"]["median"] for row in _rows_of(cells, kind, name)
            )
            for name in names
        ]
        lines.append(
            f"| {title} | {statistics.median(plain):.1f} ms | "
            + " | ".join(f"{one:.2f}x" for one in found) + " |"
        )  # fmt: skip
    return "\n".join(lines)


def _mean(values: list[float]) -> float:
    """Of tokens per step: steps of equally long texts together."""
    return statistics.harmonic_mean(values)


def along_a_text() -> str:
    """Tokens per step by place of long runs, learning and not."""
    document = read(f"drafter-{MODEL}")
    rows = [row for row in document["along"] if row["method"] != PLAIN]
    ends = rows[0]["position"]
    lines = head("tokens of a step up to token | " + " | ".join(f"{end:,}" for end in ends))
    for row in rows:
        cells = " | ".join(f"{one:.2f}" for one in row["tokens_per_step"])
        lines.append(f"| {KINDS[row['text']]}, {row['method']} | {cells} |")
    parted = sum(not row["same_tokens"] for row in rows)
    note = f"{parted} of {len(rows)} runs said other tokens than plain decoding."
    return "\n".join([*lines, "", f"{note} Made by {source(document)}."])

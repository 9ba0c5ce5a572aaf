# SPDX-License-Identifier: Apache-2.0
"""The docs' tables of a trained one-layer drafter: how far its drafts come."""

from __future__ import annotations

from benchmarks.real_tables import KINDS, NAMES
from benchmarks.table_parts import head, read, source
from tsjax.host.paired_runs import PLAIN

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
    training = document["training"]
    minutes, text = training["seconds"] / 60, training["text_tokens"]
    note = (
        f"{NAMES[document['model']['name']]}, {document['dtype']}, temperature "
        f"{document['temperature']}: a chain of four drafts, nothing learned in the run. "
        "The answers are to the reporting half of the prompts. "
        f"The drafter was trained for {training['steps']:,} steps, {minutes:.0f} minutes, on "
        f"{text:,} tokens of the model's own text."
    )
    return "\n".join([*lines, "", f"{note} Made by {source(document)}."])


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

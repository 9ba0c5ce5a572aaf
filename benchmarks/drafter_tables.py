# SPDX-License-Identifier: Apache-2.0
"""The docs' tables of a trained one-layer drafter: how far its drafts come."""

from __future__ import annotations

import statistics

from benchmarks.real_models import by_kind
from benchmarks.real_tables import KINDS, NAMES
from benchmarks.table_parts import head, read, source
from tsjax.measure.paired_runs import PLAIN

MODEL = "smollm2-135m-bfloat16"


def chains() -> str:
    """By place in answers, without learning in the run."""
    document = read(f"drafter-{MODEL}")
    lines = head("answers | tokens of a step | drafts right, each where those before were")
    found = document["answers"]
    places = [row for row in found["by"].items() if row[0].startswith("from ")]
    for place, one in [("all", found), *places]:
        what = place.replace("from ", "from token ")
        right = ", ".join(f"{share:.0%}" for share in one["right"])
        lines.append(f"| {what} | {one['tokens_per_step']:.2f} | {right} |")
    training = document["training"]
    note = (
        f"{NAMES[document['model']['name']]}, {document['dtype']}, temperature "
        f"{document['temperature']}; the reporting half of the prompts, chains of four drafts, "
        f"nothing learned in the run. Trained for {training['steps']:,} steps, "
        f"{training['seconds'] / 60:.0f} minutes, on {training['text_tokens']:,} tokens of the "
        "model's own text."
    )
    return "\n".join([*lines, "", f"{note} Made by {source(document)}."])


def along_a_text() -> str:
    """Tokens per step by place of long runs, learning and not."""
    document = read(f"drafter-{MODEL}")
    rows = [row for row in document["along"] if row["method"] != PLAIN]
    ends = " | ".join(f"{end:,}" for end in rows[0]["position"])
    lines = head(f"tokens of a step up to token | {ends}")
    for row in rows:
        cells = " | ".join(f"{one:.2f}" for one in row["tokens_per_step"])
        lines.append(f"| {KINDS[row['text']]}, {row['method']} | {cells} |")
    parted = sum(not row["same_tokens"] for row in rows)
    note = f"{parted} of {len(rows)} runs said other tokens than plain decoding."
    return "\n".join([*lines, "", f"{note} Made by {source(document)}."])


# Methods of the comparison, as the table calls them: those that users choose from, by their speed;
# and trees whose rows are free, by what they find.
BY_SPEED = {
    "narrow tree": "text", "drafter": "drafter", "drafter and text": "drafter and text",
    "auto": "Auto with all of it",
}  # fmt: skip
BY_FINDS = {
    "16 rows, text": "text, 16 rows", "16 rows, heads": "TokenSwift's heads, 16 rows",
    "5 rows, drafter not learning": "drafter not learning, 5 rows",
    "5 rows, drafter": "drafter, 5 rows", "8 rows, drafter": "8 rows",
    "16 rows, drafter": "16 rows",
}  # fmt: skip


def compared() -> str:
    """The drafter beside what drafts without it, on the answers to real prompts."""
    document = read(f"drafters-{MODEL}")
    rows = by_kind(document["cells"])
    lines = head("answers | plain decoding, per token | " + " | ".join(BY_SPEED.values()))
    for row in rows:
        found = [row["methods"][name]["over_plain"] for name in BY_SPEED]
        cells = [f"{one['median']:.2f}x ({one['min']:.2f}-{one['max']:.2f})" for one in found]
        plain = row["methods"][PLAIN]["ms_per_token"]
        what = f"{KINDS[row['kind']]}: {row['prompts']}"
        lines.append(f"| {what} | {plain:.1f} ms | {' | '.join(cells)} |")
    lines += ["", *head("tokens of a step | " + " | ".join(BY_FINDS.values()))]
    steps = [
        statistics.mean(row["methods"][name]["tokens_per_step"] for row in rows)
        for name in BY_FINDS
    ]
    lines.append("| mean of the kinds | " + " | ".join(f"{one:.2f}" for one in steps) + " |")
    every = [one for cell in document["cells"] for one in cell["rows"] if one["method"] != PLAIN]
    parted = sum(not one["same_tokens"] for one in every)
    new = max(cell["new_tokens"] for cell in document["cells"])
    note = (
        f"{NAMES[document['model']['name']]}, {document['dtype']}, temperature 0.7, min-p 0.05; "
        f"the reporting half of the prompts, at most {new} new tokens. First the gain over plain "
        "decoding of the same prompt in the same round: the median, the least and the most. "
        f"{parted} of {len(every)} runs said other tokens than plain decoding. {prices()}"
    )
    return "\n".join([*lines, "", f"{note} Made by {source(document)}."])


def prices() -> str:
    """What a chain of drafts takes, with what it reads before and what it learns."""
    shares = []
    for dtype in ("bfloat16", "float32"):
        document = read(f"drafter-price-{MODEL.removesuffix('bfloat16')}{dtype}")
        share = document["price"]["in_plain_steps"]["median"]
        shares.append(f"{share:.2f} in {dtype}")
    context = document["price"]["context"]
    return f"A chain of four drafts at {context} tokens takes, in plain steps, {', '.join(shares)}."

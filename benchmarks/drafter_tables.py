# SPDX-License-Identifier: Apache-2.0
"""The docs' tables of a trained one-layer drafter: how far its drafts come."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.real_models import by_kind
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


# Methods of the comparison, as the table calls them: those that users choose from, by their speed;
# and trees whose rows are free, by what they find.
BY_SPEED = {
    "narrow tree": "text", "int8 passes": "text and int8 passes", "drafter": "drafter",
    "drafter and text": "drafter and text", "auto": "Auto with all of it",
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
        cells = [f"{one['median']:.2f}x ({one['min']:.2f} to {one['max']:.2f})" for one in found]
        plain = row["methods"][PLAIN]["ms_per_token"]
        what = f"{KINDS[row['kind']]}: {row['prompts']}"
        lines.append(f"| {what} | {plain:.1f} ms | {' | '.join(cells)} |")
    lines += ["", *head("tokens of a step | " + " | ".join(BY_FINDS.values()))]
    for row in rows:
        lines.append(_finds(KINDS[row["kind"]], [row["methods"]]))
    lines.append(_finds("mean of the kinds", [row["methods"] for row in rows]))
    every = [one for cell in document["cells"] for one in cell["rows"] if one["method"] != PLAIN]
    parted = sum(not one["same_tokens"] for one in every)
    new = max(cell["new_tokens"] for cell in document["cells"])
    note = (
        f"{NAMES[document['model']['name']]}, {document['dtype']}, temperature 0.7, min-p 0.05; "
        f"the reporting half of the prompts, {new} new tokens or fewer where the answer ends; "
        "first how many times faster than plain decoding of the same prompt in the same round: "
        "the median, the least and the most. "
        f"{parted} of {len(every)} runs said other tokens than plain decoding."
    )
    return "\n".join([*lines, "", f"{note} Made by {source(document)}."])


def _finds(what: str, kinds: Sequence[dict[str, Any]]) -> str:
    found = [statistics.mean(kind[name]["tokens_per_step"] for kind in kinds) for name in BY_FINDS]
    return f"| {what} | " + " | ".join(f"{one:.2f}" for one in found) + " |"


def prices() -> str:
    """What a chain of drafts takes."""
    lines = head("type | a plain step | a chain of four drafts | of a plain step")
    for dtype in ("bfloat16", "float32"):
        document = read(f"drafter-price-{MODEL.removesuffix('bfloat16')}{dtype}")
        price = document["price"]
        ms = [f"{price[name]['median']:.2f} ms" for name in ("plain_ms", "chain_ms")]
        of = price["in_plain_steps"]
        share = f"{of['median']:.2f} ({of['min']:.2f} to {of['max']:.2f})"
        lines.append(f"| {dtype} | {' | '.join(ms)} | {share} |")
    note = (
        f"{NAMES[document['model']['name']]} at {price['context']} tokens: the median of five "
        "tables of costs, the least and the most. The weights of both come from memory. With the "
        "chain goes what it reads before, and what it learns there."
    )
    return "\n".join([*lines, "", f"{note} Made by {source(document)}."])

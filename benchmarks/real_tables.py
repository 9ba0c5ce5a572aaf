# SPDX-License-Identifier: Apache-2.0
"""Tables of real models: what drafts gain by kind of prompt, from the cells of real_models.py."""

from __future__ import annotations

import json
import statistics

from benchmarks.real_models import PEER_TOKENS, PLAIN, SLOW_TOKENS, by_kind
from benchmarks.table_parts import RESULTS, head, machine, source

NAMES = {
    "smollm2-135m.gguf": "SmolLM2-135M-Instruct",
    "qwen2.5-coder-0.5b.gguf": "Qwen2.5-Coder-0.5B-Instruct",
    "qwen2.5-coder-1.5b.gguf": "Qwen2.5-Coder-1.5B-Instruct",
}
KINDS = {
    "short": "short answers", "story": "stories, essays", "code": "new code",
    "edit": "edits of given code and text", "summary": "summaries", "reasoning": "reasoning",
}  # fmt: skip
SETTINGS = {"greedy": "greedy", "chat": "temperature 0.7", "paper": "the paper's sampling"}
# Auto has documents of its own: in these an earlier one decoded plainly.
COLUMNS = (
    "narrow tree", "wide tree", "int8 passes", "second model", "magicdec", "paper",
    "ngrams",
)  # fmt: skip
PEERS = ("torch", "torch lookup", "llama.cpp", "llama.cpp lookup")
TITLES = {
    "auto": "Auto", "paper": "the paper's settings", "ngrams": "n-grams", "torch": "transformers",
    "torch lookup": "transformers, prompt lookup", "llama.cpp lookup": "llama.cpp, prompt lookup",
}  # fmt: skip
WITH_SPREAD = COLUMNS[:1]  # the others' is in the documents
ON_THE_FRONT = (("edit", "greedy"), ("story", "greedy"))  # the others are a link away


def documents() -> list[dict]:
    """Of the models that were measured, the smaller first."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("real-*.json")]
    found = [one for one in found if "cells" in one]  # not those of real_long
    return sorted(found, key=lambda one: [*NAMES].index(one["model"]["name"]))


def name_of(document: dict) -> str:
    return f"{NAMES[document['model']['name']]}, {document['dtype']}"


def reported(document: dict) -> list[dict]:
    return by_kind([cell for cell in document["cells"] if cell["half"] == "report"])


def table() -> str:
    return "\n\n".join([*map(_table_of, documents()), *map(_by_position, long_documents())])


def long_documents() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("real-long-*.json"))]


def _by_position(document: dict) -> str:
    """What methods take after prompts of several lengths."""
    lines = head("where | method | per token | x | tokens per step")
    for case in document["cases"]:
        if "context" in case:
            for row in case["rows"]:
                if row["method"] == "auto":  # an earlier one
                    continue
                gain = row.get("speedup_over_plain")
                cells = [f"{row['ms_per_token']['median']:.1f} ms"]
                cells += [f"{gain['median']:.2f}x" if gain else "", f"{row['tokens_per_step']:.2f}"]
                what = f"{case['new_tokens']} tokens after {case['context']:,}"
                lines.append(f"| {what} | {TITLES.get(row['method'], row['method'])} | "
                             f"{' | '.join(cells)} |")  # fmt: skip
    name = NAMES[document["model"]["name"]]
    title = f"**{name} by position, the paper's sampling**, from {source(document)}"
    return "\n".join([title, "", *lines])


def _table_of(document: dict) -> str:
    """Greedy rows, which peers have too; the documents have the sampled ones."""
    rows = [row for row in reported(document) if row["setting"] == "greedy"]
    cells = document["cells"]
    others = [name for name in (*COLUMNS, *PEERS) if any(name in row["methods"] for row in rows)]
    lines = head(
        "prompts, greedy | plain decoding, per token | "
        + " | ".join(TITLES.get(name, name) for name in others)
    )
    for row in rows:
        found = [f"{row['methods']['plain']['ms_per_token']:.1f} ms"]
        for name in others:
            one = row["methods"].get(name)
            gain = one and one["over_plain"]
            spread = ""
            if gain and name in WITH_SPREAD and row["prompts"] > 1:
                spread = f" ({gain['min']:.2f} to {gain['max']:.2f})"
            found.append(f"{gain['median']:.2f}x{spread}" if gain else "")
        lines.append(
            f"| {KINDS[row['kind']]}: {row['prompts']} | "
            + " | ".join(found) + " |"
        )  # fmt: skip
    counts = {row["prompts"] for row in rows}
    every = [one for cell in cells for one in cell["rows"] if one["method"] != PLAIN]
    ours = [one for one in every if "same_tokens" in one]
    parted = sum(not one["same_tokens"] for one in ours)
    shares = [one["share_of_bound"]["median"] for cell in cells for one in cell["rows"]
              if one["method"] == "plain"]  # fmt: skip
    new = {cell["new_tokens"] for cell in cells}
    digest = document["model"]["sha256"][:12]
    some = f"{min(counts)} to {max(counts)} prompts" if max(counts) > 1 else "one prompt alone"
    ends = (
        "or fewer where the answer ends"
        if all("answer_tokens" in cell for cell in cells)
        else "past the end of a text where that comes earlier, as in short answers: there they "
        "repeat themselves"
    )
    note = (
        f"{name_of(document)} (sha256 {digest}...). How many times faster "
        f"than plain decoding of the same prompt in the same round: the median of {some}, in "
        f"brackets the least and the most; {', '.join(map(str, sorted(new)))} new "
        f"tokens ({SLOW_TOKENS} of the two widest, {PEER_TOKENS} of peers), {ends}. "
        "Plain decoding is at "
        f"{statistics.median(shares):.0%} of the bound. llama.cpp computes with the numbers as the "
        f"file has them, the others in {document['dtype']}. "
        + (f"{parted} of {len(ours)} runs said other tokens than plain decoding."
           if parted else f"All {len(ours)} runs said the tokens of plain decoding.")
    )  # fmt: skip
    return "\n".join(
        [f"**{name_of(document)}**", "", *lines, "", f"{note} Made by {source(document)}."]
    )


def front_rows() -> list[str]:
    """Auto beside plain decoding, where drafts pay and where they hardly do."""
    lines = []
    for document in autos():
        rows = {(row["kind"], row["setting"]): row for row in reported(document)}
        for place in ON_THE_FRONT:
            if place not in rows or rows[place]["prompts"] < 2:  # one prompt tells too little
                continue
            methods = rows[place]["methods"]
            plain, ms = (methods[name]["ms_per_token"] for name in (PLAIN, "auto"))
            what = f"{name_of(document)}: {KINDS[place[0]]}, {SETTINGS[place[1]]}: `tsjax.Auto()`"
            lines.append(
                f"| {what} | {ms:.1f} ms | {plain:.1f} ms (plain decoding) | {plain / ms:.2f}x "
                f"| {machine(document)} |"
            )
    return lines


def auto_by_kind() -> str:
    """`Auto` beside plain decoding, a row for each model and kind of prompt."""
    sampled = [name for name in SETTINGS if any(name in _gains(one) for one in autos())]
    columns = [f"{SETTINGS[name]}: Auto | a narrow tree" for name in sampled]
    lines = head(" | ".join(["model", "prompts", *columns]))
    for document in autos():
        found = _gains(document)
        for kind, title in KINDS.items():
            cells = [found.get(name, {}).get(kind, " | ") for name in sampled]
            if any(cell != " | " for cell in cells):
                lines.append(f"| {name_of(document)} | {title} | {' | '.join(cells)} |")
    every = [row for one in autos() for cell in one["cells"] for row in cell["rows"]]
    ours = [row["same_tokens"] for row in every if row["method"] != PLAIN]
    said = f"{sum(ours)} of {len(ours)} runs gave the tokens of plain decoding"
    made = source(*autos())
    return "\n".join([
        *lines, "",
        "What plain decoding takes for a token, and how many times faster Auto is, and a fixed "
        "`LikelyTree` that drafts from the text: medians over the prompts of a kind, the least and "
        "the most. A run ends where plain decoding's answer "
        f"does. {said}. Made by {made}.",
    ])  # fmt: skip


def autos() -> list[dict]:
    """Documents of Auto alone beside plain decoding, the smallest model first."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("auto-*.json")]
    return sorted(found, key=lambda one: [*NAMES].index(one["model"]["name"]))


def _gains(document: dict) -> dict[str, dict[str, str]]:
    """By setting and kind."""
    found: dict[str, dict[str, str]] = {}
    for row in reported(document):
        plain, auto = (row["methods"][name] for name in (PLAIN, "auto"))
        gain, ms = auto["over_plain"], plain["ms_per_token"]
        spread = f" ({gain['min']:.2f} to {gain['max']:.2f})" if row["prompts"] > 1 else ""
        cell = f"{ms:.1f} ms, {gain['median']:.2f}x{spread}"
        narrow = row["methods"].get("narrow tree")
        cell += f" | {narrow['over_plain']['median']:.2f}x" if narrow else " | "
        found.setdefault(row["setting"], {})[row["kind"]] = cell
    return found

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
COLUMNS = (
    "auto", "narrow tree", "wide tree", "int8 passes", "second model", "magicdec", "paper",
    "ngrams",
)  # fmt: skip
PEERS = ("torch", "torch lookup", "llama.cpp", "llama.cpp lookup")
TITLES = {
    "auto": "Auto", "paper": "the paper's settings", "ngrams": "n-grams", "torch": "transformers",
    "torch lookup": "transformers, prompt lookup", "llama.cpp lookup": "llama.cpp, prompt lookup",
}  # fmt: skip
ON_THE_FRONT = (("edit", "greedy"),)  # the others are a link away


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
    """What methods take after prompts of several lengths, and along one text."""
    lines = head("where | method | per token | x | tokens per step")
    for case in document["cases"]:
        if "context" in case:
            for row in case["rows"]:
                gain = row.get("speedup_over_plain")
                cells = [f"{row['ms_per_token']['median']:.1f} ms"]
                cells += [f"{gain['median']:.2f}x" if gain else "", f"{row['tokens_per_step']:.2f}"]
                what = f"{case['new_tokens']} tokens after {case['context']:,}"
                lines.append(f"| {what} | {TITLES.get(row['method'], row['method'])} | "
                             f"{' | '.join(cells)} |")  # fmt: skip
        if case["case"] == "long":
            plain = next(row for row in case["rows"] if row["method"] == PLAIN)["by_position"]
            for row in case["rows"]:
                found = row["by_position"].values()
                for then, end, ms, steps in zip(plain["ms_per_token"], *found, strict=True):
                    over = "" if row["method"] == PLAIN else f"{then / ms:.2f}x"
                    lines.append(f"| to token {end:,} of one text | {row['method']} | {ms:.1f} ms "
                                 f"| {over} | {steps:.2f} |")  # fmt: skip
    name = NAMES[document["model"]["name"]]
    title = f"**{name} by position, the paper's sampling**, from {source(document)}"
    return "\n".join([title, "", *lines])


def _table_of(document: dict) -> str:
    rows, cells = reported(document), document["cells"]
    others = [name for name in (*COLUMNS, *PEERS) if any(name in row["methods"] for row in rows)]
    lines = head(
        "prompts | sampling | plain decoding, per token | "
        + " | ".join(TITLES.get(name, name) for name in others)
    )
    for row in rows:
        found = [f"{row['methods']['plain']['ms_per_token']:.1f} ms"]
        for name in others:
            one = row["methods"].get(name)
            gain = one and one["over_plain"]
            spread = f" ({gain['min']:.2f} to {gain['max']:.2f})" if gain else ""
            found.append(f"{gain['median']:.2f}x{spread}" if gain else "")
        lines.append(
            f"| {KINDS[row['kind']]}: {row['prompts']} | {SETTINGS[row['setting']]} | "
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
        f"than plain decoding of the same prompt in the same round: the median of {some}, the "
        f"least and the most; {', '.join(map(str, sorted(new)))} new "
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
    """Auto, and the fixed tree that does best by the medians, beside plain decoding."""
    lines = []
    for document in documents():
        rows = {(row["kind"], row["setting"]): row for row in reported(document)}
        for place in ON_THE_FRONT:
            if place not in rows or rows[place]["prompts"] < 2:  # one prompt tells too little
                continue
            methods = rows[place]["methods"]
            plain = methods["plain"]["ms_per_token"]
            what = f"{name_of(document)}: {KINDS[place[0]]}, {SETTINGS[place[1]]}"
            for name in ("auto", "narrow tree"):
                ms = methods[name]["ms_per_token"]
                title = "`tsjax.Auto()`" if name == "auto" else "a narrow `LikelyTree`"
                lines.append(
                    f"| {what}: {title} | {ms:.1f} ms | {plain:.1f} ms (plain decoding) "
                    f"| {plain / ms:.2f}x | {machine(document)} |"
                )
    return lines


def auto_by_prompt() -> str:
    """`Auto` beside the best of fixed trees, prompt by prompt."""
    lines = head("prompt | tokens | plain decoding | Auto | the best fixed setting")
    settings, sources = set(), []
    for path in sorted(RESULTS.glob("auto-*.json")):
        document = json.loads(path.read_text())
        for cell in document["cells"]:
            rows = {row["method"]: row for row in cell["rows"]}
            gains = {
                name: row["speedup_over_plain"]["median"]
                for name, row in rows.items()
                if name != PLAIN
            }
            auto = gains.pop("auto")
            best = max(gains, key=gains.__getitem__)
            settings.add(SETTINGS[cell["setting"]])
            plain, tokens = rows[PLAIN]["ms_per_token"]["median"], cell["answer_tokens"]
            lines.append(
                f"| {KINDS[cell['kind']]}, {cell['prompt'] + 1} | {tokens:,} | {plain:.1f} ms "
                f"| {auto:.2f}x | {gains[best]:.2f}x, {best} |"
            )
        sources.append(f"{name_of(document)}, {', '.join(sorted(settings))}: {source(document)}")
    return "\n".join([*lines, "", f"{'; '.join(sources)}."])

# SPDX-License-Identifier: Apache-2.0
"""The docs' table of whole commands, from start-*.json."""

from __future__ import annotations

from benchmarks.start import METHODS
from benchmarks.table_parts import head, read, source

MODELS = "smollm2-135m", "qwen2.5-coder-0.5b"
IN_WORDS = {"answer": "400 sampled tokens", "edit": "an edit of up to 300 tokens, greedy"}


def starts() -> str:
    columns = "model, prompt | kept | first token: plain, auto | whole command: plain, auto | "
    lines = head(columns + "plain over auto | longest silence")
    documents = [read(f"start-{model}") for model in MODELS]
    for document in documents:
        for row in document["rows"]:
            plain, auto = (row["methods"][method] for method in METHODS)
            pairs = (
                f"{plain[name]['median']:.2f}, {auto[name]['median']:.2f} s"
                for name in ("first", "whole")
            )
            silent = max(plain["silent"]["max"], auto["silent"]["max"])
            kept = "all" if row["kept"] else "kernels"
            what = f"{IN_WORDS[row['case']]} ({row['kind']}, {row['number'] + 1})"
            lines.append(
                f"| {document['model']}, {what} | {kept} | {' | '.join(pairs)} | "
                f"{row['plain_over_auto']['median']:.2f} | {silent:.1f} s |"
            )
    made = source(*documents)
    note = "Medians of rounds in turn, the longest silence of all of them; both said the same text."
    return "\n".join([*lines, "", f"{note} Made by {made}."])

# SPDX-License-Identifier: Apache-2.0
"""The docs' table of texts that are read once, from prefixes-*.json."""

from __future__ import annotations

from benchmarks.prefixes import FROM_FILE, READING
from benchmarks.table_parts import head, read, source

MODELS = ("qwen2.5-coder-0.5b",)


def prefixes() -> str:
    lines, notes = head("after a text of N tokens | it is read | it is known | ratio"), []
    for document in (read(f"prefixes-{model}") for model in MODELS):
        fresh, questions, chat = (document[name] for name in ("fresh", "questions", "chat"))
        own = f"{document['model']}, {document['tokens']:,}"
        for name, what in (("first", "first token, the model loaded"), ("process", FIRST)):
            seconds = [fresh["ways"][way][name]["median"] for way in (READING, FROM_FILE)]
            ratio = fresh["reading_over_prefix"][name]["median"]
            lines.append(f"| {own}: {what} | {_seconds(*seconds)} | {ratio:.1f}x |")
        parts = f"{len(questions['known_seconds'])} questions, one after another", questions, 0
        turns = f"a chat of {len(chat['known_seconds'])} turns, read from its beginning", chat, 1
        for what, found, first in (parts, turns):
            # The first turn of a chat is read either way.
            loading = found.get("loading", 0.0)
            sums = [sum(found["reading_seconds"]), sum(found["known_seconds"]) + loading]
            said = f" (the first one {found['known_seconds'][0]:.1f} s either way)" * first
            lines.append(f"| {own}: {what}{said} | {_seconds(*sums)} | {sums[0] / sums[1]:.1f}x |")
        loading = fresh["ways"][FROM_FILE]["loading"]["median"]
        same = all(found["same_text"] for found in (fresh, questions, chat))
        notes.append(
            f"Its file has {document['file_bytes'] / 1e6:.0f} MB and is loaded in {loading:.2f} s, "
            f"which counts; it took {document['seconds']['saving']:.2f} s to write. "
            + ("All said the same texts. " if same else "Some texts parted at a near-tie. ")
            + f"Answers of {document['answer']} tokens, weights as the file stores them, "
            f"{document['dtype']}. Made by {source(document)}."
        )
    return "\n".join([*lines, "", " ".join(notes)])


FIRST = "first token of a new process, all programs kept"


def _seconds(*both: float) -> str:
    return " | ".join(f"{one:.2f} s" for one in both)

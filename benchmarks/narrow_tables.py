# SPDX-License-Identifier: Apache-2.0
"""The docs' tables of narrow weights: what a token takes, and what held-out text says of them."""

from __future__ import annotations

import json

from benchmarks.narrow import PEER, WEIGHTS
from benchmarks.real_tables import NAMES
from benchmarks.table_parts import RESULTS, head, source

TITLES = {"float": "`float` (bfloat16)", **{name: f"`{name}`" for name in WEIGHTS[1:]}}


def _documents(ending: str) -> list[dict]:
    """Of the models that were measured, the smaller first."""
    files = [RESULTS / f"narrow-{name.split('.gguf')[0]}{ending}.json" for name in NAMES]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def speed() -> str:
    """By model and way, at each context."""
    lines = head("model | matrices | read a token | at tokens | a token | over `float` | "
                 "over llama.cpp | 8 rows, of one")  # fmt: skip
    documents = _documents("")
    for document in documents:
        model = NAMES[document["model"] + ".gguf"].removesuffix("-Instruct")
        for at in document["decoding"]:
            for way in (*WEIGHTS, PEER):
                if way not in at["ways"]:
                    continue
                one, rows = at["ways"][way], at["ways"][way]["rows_ms"]
                nbytes = document["bytes"].get(way)
                over = [one["speed_over_float"], one["speed_over_peer"]]
                cells = [
                    model, TITLES.get(way, f"{way}, the file's"),
                    "" if nbytes is None else f"{nbytes / 1e6:,.0f} MB", f"{at['context']:,}",
                    f"{one['ms']:.1f} ms",
                    *("" if x is None else f"{x['median']:.2f}x" for x in over),
                    "" if rows is None else f"{rows['8'] / rows['1']:.1f}",
                ]  # fmt: skip
                lines.append(f"| {' | '.join(cells)} |")
    peers = {at["peer"]["commit"] for one in documents for at in one["decoding"] if "peer" in at}
    note = (
        "Plain decoding after random tokens, medians of rounds in turn; `8 rows` are a pass "
        f"of eight against a pass of one. llama.cpp {', '.join(sorted(peers))} by llama-bench, "
        "compiled on this machine for its processor, on the same file and threads. Made by "
    )
    return "\n".join([*lines, "", f"{note}{'; '.join(map(source, documents))}."])


def quality() -> str:
    lines = head("model | matrices | text | perplexity | over float32 | same most likely token")
    documents = _documents("-quality")
    for document in documents:
        model = NAMES[document["model"] + ".gguf"].removesuffix("-Instruct")
        exact = {one["text"]: one for one in document["quality"] if one["way"] == "float32"}
        for one in document["quality"]:
            ratio = one["perplexity"] / exact[one["text"]]["perplexity"] - 1
            cells = [
                model, TITLES.get(one["way"], "float32"), one["text"], f"{one['perplexity']:.3f}",
                f"{ratio:+.2%}", f"{one['agreement']:.1%}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    note = (
        "Windows of 512 tokens of texts that no setting was chosen by. float32 is the file's own "
        "numbers, widened; `stored` are the same numbers, with rows that are rounded. Made by "
    )
    return "\n".join([*lines, "", f"{note}{'; '.join(map(source, documents))}."])

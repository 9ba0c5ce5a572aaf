# SPDX-License-Identifier: Apache-2.0
"""The table of time: whether drafts pay after a text and along a run."""

from __future__ import annotations

from benchmarks.table_parts import head, read, source


def speedup_rows(document: dict) -> dict[tuple, dict]:
    """What was measured after texts, by context, setting and method."""
    return {
        (row["context"], row["setting"], row["method"]): row
        for row in document["rows"]
        if row["text"] != "random"
    }


SPEEDUPS = {
    "paper": "the paper's settings", "ngrams": "n-grams", "torch": "torch",
    "torch lookup": "torch, prompt lookup",
}  # fmt: skip


def speedup() -> str:
    document, far, lasting = map(read, ("speedup", "speedup-32k", "speedup-2000"))
    lines = head(
        f"context | text | plain decoding | of the bound | Auto | its tokens per step "
        f"| best fixed setting | {' | '.join(SPEEDUPS.values())}"
    )
    rows = speedup_rows(document) | speedup_rows(far)

    def over_plain(row: dict | None) -> str:
        return f"{row['speedup_over_plain']['median']:.2f}x" if row else ""

    for context, setting in dict.fromkeys((context, setting) for context, setting, _ in rows):
        plain, auto = (rows[context, setting, method] for method in ("plain", "auto"))
        over, best = auto["speedup_over_plain"], auto["best_fixed"]
        best_ratio = "1.00x" if best == "plain" else over_plain(rows[context, setting, best])
        others = (over_plain(rows.get((context, setting, method))) for method in SPEEDUPS)
        bound = f"{plain['bound']['median']:.0%}" if "bound" in plain else ""
        lines.append(
            f"| {context:,} | {setting} | {plain['ms_per_token']['median']:.2f} ms | {bound} "
            f"| {over['median']:.2f}x ({over['min']:.2f} to {over['max']:.2f}) "
            f"| {auto['tokens_per_step']:.2f} | {best_ratio}, {best} | {' | '.join(others)} |"
        )
    every = [*document["rows"], *far["rows"], *far["long"]["rows"], *lasting["rows"]]
    same = all(row.get("same_tokens", True) for row in every)
    note = [
        "Time per token of plain decoding after the first N tokens of a text (N is the context), "
        f"{document['text']['name']}, for {document['new_tokens']} new tokens "
        f"({document['torch_tokens']} of torch), and how many times faster others are: medians of "
        f"{document['rounds']} interleaved rounds, for Auto also the smallest and the largest "
        "ratio. The embedded model in float32; sampled is temperature 1, min-p 0.1, penalty 1.2 "
        "over 1,024 tokens. Fixed settings are the paper's, n-grams, plain decoding, and two of "
        "`LikelyTree`: drafts from the text alone (text), and four passes as well (passes). The "
        "bound is one read of weights and cache, at the speed of torch's sum over a buffer of that "
        "size in the same round.",
        *after_random([*document["rows"], *far["rows"]]),
        *long_run(far),
        *over_runs(lasting),
        "The first of the commands was ended before 32,768 tokens, where the slow ones take "
        "too long, and the second left these out.",
    ]
    if same:
        note.append("Every run of tsjax returned the tokens of plain decoding.")
    made = f" Made by {source(document)}, by {source(far)}, and by {source(lasting)}."
    return "\n".join([*lines, "", " ".join(note) + made])


def over_runs(document: dict) -> list[str]:
    """What Auto gains or loses along a run of many tokens, its trials included."""
    found = [
        f"{row['speedup_over_plain']['median']:.2f}x ({row['context']:,}, {row['setting']}"
        f"{', random' if row['text'] == 'random' else ''})"
        for row in document["rows"]
        if row["method"] == "auto"
    ]
    return [
        f"Over {document['new_tokens']:,} tokens ({document['rounds']} rounds, ended before 32,768 "
        f"tokens were done) Auto is {', '.join(found)} as fast as plain."
    ]


def after_random(rows: list[dict]) -> list[str]:
    """What Auto loses where there is nothing to find."""
    found = [
        f"{row['speedup_over_plain']['median']:.2f}x ({row['context']:,}, {row['setting']})"
        for row in rows
        if (row["text"], row["method"]) == ("random", "auto")
    ]
    return [f"After random tokens Auto is {', '.join(found)} as fast as plain."] if found else []


def long_run(document: dict) -> list[str]:
    long = document.get("long")
    if not long:
        return []
    plain, auto = (
        next(row for row in long["rows"] if row["method"] == method) for method in ("plain", "auto")
    )
    return [
        f"{long['new_tokens']:,} new tokens after {long['prompt_tokens']}, {long['setting']}: "
        f"{plain['seconds']['median']:.0f} s plainly, {auto['seconds']['median']:.0f} s with Auto "
        f"({auto['speedup_over_plain']['median']:.2f}x, {auto['tokens_per_step']:.2f} tokens per "
        "step)."
    ]

# SPDX-License-Identifier: Apache-2.0
"""Tables of what CPUs took, and how often tokens were the same."""

from __future__ import annotations

from typing import Any

from benchmarks import prefixes, start
from benchmarks.table_parts import (
    Column,
    head,
    line,
    made_by,
    of_gpu,
    read,
    source,
    table,
    with_note,
)

FEWEST_TIMED = 3  # tokens of a run of which more than the prefill is shown


def on_a_cpu() -> str:
    document = read("cpu")
    others = document["rows"][0]["over"]
    peers = {"transformers": "transformers, torch", "plain XLA": "without the C++ kernels"}
    peers |= {name: name for name in others if name not in peers}

    def timed(cell: str):
        return lambda row: cell.format_map(row) if row["new"] >= FEWEST_TIMED else ""

    columns: list[Column] = [
        ("model, context", "{shape}, {context:,}"),
        ("tsjax", timed("{median_ms[native]:.2f} ms")),
    ]
    for name, title in peers.items():
        columns.append((title, timed(f"{{median_ms[{name}]:.2f}} ms, {{over[{name}]:.2f}}x")))
    columns += [
        ("of the bound", timed("{share_of_bound:.0%}")),
        ("prefill", "{prefill_over[transformers]:.2f}x"),
        ("first 8 tokens", timed("{first_tokens_over[transformers]:.2f}x")),
    ]
    note = [
        "Milliseconds per token of plain decoding, and how many times tsjax's they are, both "
        "medians over the rounds; prefill and the first 8 tokens of a call (prefill included) as "
        "ratios to torch. The bound is one read, at the speed of torch's sum over a buffer of that "
        "size in the same round, of the weights and of the cache's rows in use."
    ]
    slower = [
        f"{row[of][peer]:.2f}x of {peer}'s {what} ({row['shape']}, {row['context']:,})"
        for row in document["rows"] if row["new"] >= FEWEST_TIMED
        for what, of in (("prefill", "prefill_over"), ("first 8 tokens", "first_tokens_over"))
        for peer in others if peer != "plain XLA" and row[of][peer] < 1
    ]  # fmt: skip
    if slower:
        note.append(f"Behind others: {', '.join(slower)}.")
    for shape, passes in document["passes"].items():
        ratios = {rows: f"{ratio:.2f}" for rows, ratio in passes["over_one_row"].items()}
        del ratios["1"]
        note.append(
            f"A pass of {', '.join(ratios)} rows at {passes['context']:,} ({shape}) takes "
            f"{', '.join(ratios.values())} times a pass of one row ({passes['ms']['1']:.2f} ms)."
        )
    int8 = document["int8_product"]
    note.append(
        f"One row times 32,000 x 768 weights takes {int8['ms']['int8']:.2f} ms in int8, "
        f"{int8['over']:.2f} times faster than in float32. float32, random weights."
    )
    return with_note(table(document["rows"], *columns), " ".join(note), document)


# --- drafts and memory ------------------------------------------------------------------------


def measured() -> str:
    capacity, draft, convert = documents = [*map(read, ("capacity", "draft", "convert_memory"))]
    (small, a), (large, b) = capacity["ms_per_step"].items()
    ms, ratios = draft["ms"], {name: one["median"] for name, one in draft["ratios"].items()}
    short, long = (f"draft pass at {draft[end]}" for end in ("short", "long"))
    history = f"{ms['history']['median']:.2f} ms"
    rows = [
        (
            f"a step at {capacity['length']} tokens, cache of {int(large):,} slots",
            f"{b['median']:.2f} ms",
            f"{a['median']:.2f} ms (cache of {int(small):,} slots)",
            f"{1 / capacity['ratio']['median']:.2f}x",
        ),
        decode_loop(capacity),
        (
            f"draft pass with heads on {draft['budget']} slots, context {draft['long']:,}",
            f"{ms[long]['median']:.2f} ms",
            f"{ms[short]['median']:.2f} ms (context {draft['short']:,})",
            f"{ratios['draft pass, long context / short']:.2f}x the time",
        ),
        (
            f"drafts from {draft['long']:,} tokens of history (n-grams and suffix)",
            history,
            f"{ms['step with history']['median']:.1f} ms (the step they are part of)",
            f"{ratios['history / its step']:.1%}",
        ),
        (
            "the same",
            history,
            f"{ms['plain step']['median']:.1f} ms (a step of plain decoding)",
            f"{ratios['history / plain step']:.1%}",
        ),
    ]
    for case in convert["cases"]:
        peak, written = case["peak_bytes"] / 1e9, case["written_bytes"] / 1e9
        what = f"peak memory of converting {case['case'].replace('->', 'to')}"
        against = f"{written:.2f} GB (its output)"
        rows.append((what, f"{peak:.2f} GB", against, f"{peak - written:+.2f} GB"))
    note = (
        "Times: float32, medians of interleaved runs, random weights of the shapes named (15M "
        "parameters where none is)."
    )
    lines = [*head("what", "tsjax", "against", "ratio"), *(line(*row) for row in rows)]
    return with_note(lines, note, *documents)


def decode_loop(capacity: dict) -> tuple[str, ...]:
    return (
        "temporary memory of the decode loop",
        f"{capacity['temp_bytes'] / 1e6:.1f} MB",
        f"{capacity['cache_bytes'] / 1e6:,.0f} MB (its cache)",
        f"{capacity['temp_share']:.2%}",
    )


def rows_on_a_cpu() -> str:
    document, real = read("rows"), read("rows-smollm2-135m-bfloat16")
    _, *counts = document["products"][0]["over_one_row"]
    lines = head("weights, or model and context", "one row", *counts)
    for one in document["products"]:
        over = (f"{one['over_one_row'][rows]['median']:.2f}" for rows in counts)
        lines.append(line(one["kind"], f"{one['bytes_per_second'] / 1e9:.0f} GB/s", *over))
    passes = [*document["passes"], *real["passes"]]
    for one in passes:
        rows = one["rows"]
        what = f"{one['model']}, {one['context']:,}"
        of_one = f"{rows['1']['ms']:.2f} ms ({rows['1']['off']:+.0%})"
        over = (f"{rows[n]['over_one']['median']:.2f} ({rows[n]['off']:+.0%})" for n in counts)
        lines.append(line(what, of_one, *over))
    seconds = sorted({one["seconds_to_measure"] for one in passes})
    note = (
        "How many times as long as one row so many take: products with 3072 x 576 weights that are "
        "read from memory, and passes of whole models, the sampled token of each row with them; in "
        "brackets how far from the measured pass the table is that `Auto` chooses by. To measure "
        f"one took {seconds[0]:.1f} to {seconds[-1]:.1f} s, compiling included. Instructions: "
        f"{', '.join(document['instructions'])}. Medians of {document['rounds']} rounds."
    )
    return with_note(lines, note, document, real)


# --- whole commands, and texts that are read once ---------------------------------------------


def beginnings() -> str:
    document = read("first_token")
    seconds: dict[str, list[float]] = {}
    for row in document["rows"]:
        seconds.setdefault(row["command"], []).append(row["seconds"])
    goals = {bar["what"].split(", ")[1]: bar["bar"] for bar in document["bars"]}
    lines = head("seconds to the first token", "nothing kept", "all but programs", "all")
    lines += [line(BEGUN[one], *(f"{s:.1f}" for s in found)) for one, found in seconds.items()]
    lines.append(line("the goal", *(f"{goal:g}" for goal in goals.values())))
    return with_note(lines, "", document)


BEGUN = {
    "plain": "`tsjax generate`",
    "tokenswift": "`tsjax generate --method tokenswift`",
    "demo": "`tsjax demo`, both methods compiled",
}


def starts() -> str:
    cases = {"answer": "400 sampled tokens", "edit": "an edit of up to 300 tokens, greedy"}

    def prompt(row: dict) -> str:
        return f"{row['model']}, {cases[row['case']]} ({row['kind']}, {row['number'] + 1})"

    def both(what: str) -> str:
        of = (f"{{methods[{method}][{what}][median]:.2f}}" for method in start.METHODS)
        return f"{', '.join(of)} s"

    def silence(row: dict) -> str:
        return f"{max(one['silent']['max'] for one in row['methods'].values()):.1f} s"

    documents = [read(f"start-{model}") for model in ("smollm2-135m", "qwen2.5-coder-0.5b")]
    lines = table(
        [{"model": one["model"], **row} for one in documents for row in one["rows"]],
        ("model, prompt", prompt),
        ("kept", lambda row: "all" if row["kept"] else "kernels"),
        ("first token: plain, auto", both("first")),
        ("whole command: plain, auto", both("whole")),
        ("plain over auto", "{plain_over_auto[median]:.2f}"),
        ("longest silence", silence),
    )
    note = "Medians of rounds in turn, the longest silence of all of them; both said the same text."
    return with_note(lines, note, *documents)


def texts_read_once() -> str:
    document = read("prefixes-qwen2.5-coder-0.5b")
    fresh, questions, chat = (document[name] for name in ("fresh", "questions", "chat"))
    reading, known = (fresh["ways"][way] for way in (prefixes.READING, prefixes.FROM_FILE))
    rows = []
    for name, what in (
        ("first", "first token, the model loaded"),
        ("process", "first token of a new process, all programs kept"),
    ):
        seconds = reading[name]["median"], known[name]["median"]
        rows.append((what, *seconds, fresh["reading_over_prefix"][name]["median"]))
    turns = chat["known_seconds"]
    for what, found in (
        (f"{len(questions['known_seconds'])} questions, one after another", questions),
        (  # the first turn is read either way
            f"a chat of {len(turns)} turns, read from its beginning (the first one "
            f"{turns[0]:.1f} s either way)",
            chat,
        ),
    ):
        anew = sum(found["reading_seconds"])
        reused = sum(found["known_seconds"]) + found.get("loading", 0.0)
        rows.append((what, anew, reused, anew / reused))
    lines = table(
        rows,
        (
            "after a text of N tokens",
            lambda row: f"{document['model']}, {document['tokens']:,}: {row[0]}",
        ),
        ("it is read", lambda row: f"{row[1]:.2f} s"),
        ("it is known", lambda row: f"{row[2]:.2f} s"),
        ("ratio", lambda row: f"{row[3]:.1f}x"),
    )
    same = all(found["same_text"] for found in (fresh, questions, chat))
    note = (
        f"Its file has {document['file_bytes'] / 1e6:.0f} MB and is loaded in "
        f"{known['loading']['median']:.2f} s, which counts; it took "
        f"{document['seconds']['saving']:.2f} s to write. "
        + ("All said the same texts. " if same else "Some texts parted at a near-tie. ")
        + f"Answers of {document['answer']} tokens, weights as the file stores them, "
        f"{document['dtype']}."
    )
    return with_note(lines, note, document)


# --- the same tokens --------------------------------------------------------------------------


def verification_rules() -> str:
    document = read("exactness")
    lines = table(
        [{"rule": name, **row} for name, row in document["rows"].items()],
        ("rule", "{rule}"),
        ("share of the best token", "{best_token:.3f}"),
        ("total variation", "{total_variation:.3f}"),
        ("entropy", "{entropy:.2f}"),
        (
            "accepted per step",
            lambda row: f"{row['accepted_per_step']:.2f}" if row["accepted_per_step"] else "",
        ),
    )
    tokens = document["rows"]["plain decoding"]["tokens"]
    note = (
        f"Under the published rule, {document['published_first_of_step']:.2%} of the steps began "
        f"with the best token. tsjax and plain decoding returned the same {tokens:,} tokens."
    )
    return with_note(lines, note, document)


def equality() -> str:
    here, there = read("equality-float32"), of_gpu("equality-float32")
    gpu, jax = there["device"], there["versions"]["jax"]
    return (
        f"In float32 {_held(here)}, with the kernels in C++. Made by {source(here)}.\n\n"
        f"On one {gpu} ({there['date']}, jax {jax}) {_held(there)}. Made by "
        f"{made_by(there)}."
    )


def _held(document: dict[str, Any]) -> str:
    return (
        f"{document['tokens']:,} tokens of each of {len(document['methods'])} methods "
        f"({'; '.join(document['methods'])}) were held against plain decoding, greedy, sampled "
        f"and penalised, in batches of {document['asked']['batch']}: {len(document['parted'])} "
        "rows parted"
    )


def near_ties() -> str:
    document, kernels = read("near_ties-xla"), read("near_ties-kernels")
    models = " and ".join(dict.fromkeys(row["model"] for row in document["rows"]))
    first, per_1000 = document["parted_after"], document["departures_per_1000"]
    largest = max(r["largest_behind"] for r in document["rows"] if r["setting"] == "greedy")
    return (
        f"In {document['dtype']} and plain XLA, {document['parted']} of {document['runs']} runs of "
        f'{document["tokens_per_run"]} tokens with n-gram drafts or method="tokenswift" parted '
        f"from plain decoding, after {first['min']:.0f} to {first['max']:.0f} tokens (median "
        f"{first['median']:.0f}). {per_1000:.1f} of 1,000 tokens were not the one that plain "
        f"decoding chooses after the same text; in these greedy runs their scores were lower by at "
        f"most {largest:.2g}, in the sampled ones the edge of min-p decided some. Of plain "
        f"decoding's own tokens it was {document['plain_departures']}. Models: {models}. Made by "
        f"`TSJAX_NATIVE=0 {source(document)[1:]}. With the kernels in C++, the same command "
        f"without `TSJAX_NATIVE=0`: {kernels['parted']} of {kernels['runs']} runs parted, and "
        f"{kernels['departures']} of {kernels['tokens']:,} tokens were others."
    )

# SPDX-License-Identifier: Apache-2.0
"""Tables of real models: what drafts gain by kind of prompt, weights in few bits, a drafter."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.narrow import INT8_CACHE, PEER, WEIGHTS
from benchmarks.table_parts import (
    RESULTS,
    Column,
    head,
    line,
    machine,
    matching,
    read,
    source,
    table,
    times,
    with_note,
)
from tsjax.measure.paired_runs import PLAIN
from tsjax.measure.timing import summary

MODELS = {
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
    "ngrams", "torch", "torch lookup", "llama.cpp", "llama.cpp lookup",
)  # fmt: skip
TITLES = {
    "auto": "Auto", "paper": "the paper's settings", "ngrams": "n-grams", "torch": "transformers",
    "torch lookup": "transformers, prompt lookup", "llama.cpp lookup": "llama.cpp, prompt lookup",
}  # fmt: skip
WITH_SPREAD = "narrow tree"  # the others' is in the documents
SLOW_TOKENS, PEER_TOKENS = 32, 64  # of runs of the two widest, and of peers
ON_THE_FRONT = (("edit", "greedy"), ("story", "greedy"))  # the others are a link away


# --- documents of cells: a prompt and a setting each -------------------------------------------


def documents_of(pattern: str) -> list[dict]:
    """Those with cells, the smaller model first."""
    found = [one for one in matching(pattern) if "cells" in one]
    return sorted(found, key=lambda one: [*MODELS].index(one["model"]["name"]))


def name_of(document: dict) -> str:
    return f"{MODELS[document['model']['name']]}, {document['dtype']}"


def by_kind(document: dict) -> list[dict[str, Any]]:
    """Each kind and setting with medians over its prompts; of the gain over plain decoding the
    least and the most as well."""
    places: dict[tuple[str, str], list[dict]] = {}
    for cell in document["cells"]:
        places.setdefault((cell["setting"], cell["kind"]), []).append(cell)
    found = []
    for (setting, kind), cells in places.items():
        methods = {}
        for name in dict.fromkeys(one["method"] for cell in cells for one in cell["rows"]):
            rows = [one for cell in cells for one in cell["rows"] if one["method"] == name]
            methods[name] = {
                "ms_per_token": statistics.median(one["ms_per_token"]["median"] for one in rows),
                "tokens_per_step": statistics.median(one["tokens_per_step"] for one in rows),
            }
            if name != PLAIN:
                gains = [one["speedup_over_plain"]["median"] for one in rows]
                methods[name]["over_plain"] = summary(gains)
        found.append({"setting": setting, "kind": kind, "prompts": len(cells), "methods": methods})
    return found


def runs_of(documents: Iterable[dict]) -> list[dict]:
    """All but plain decoding's."""
    cells = (cell for document in documents for cell in document["cells"])
    return [one for cell in cells for one in cell["rows"] if one["method"] != PLAIN]


def parted(runs: Sequence[dict]) -> str:
    others = sum(not one["same_tokens"] for one in runs)
    return f"{others} of {len(runs)} runs said other tokens than plain decoding."


def kind_and_count(row: dict) -> str:
    return f"{KINDS[row['kind']]}: {row['prompts']}"


def gain_of(name: str, title: str, spread: str) -> Column:
    """Of a method over plain decoding, from `by_kind`."""

    def cell(row: dict) -> str:
        if name not in row["methods"]:
            return ""
        return times(row["methods"][name]["over_plain"], spread if row["prompts"] > 1 else "")

    return title, cell


PLAIN_MS: Column = ("plain decoding, per token", "{methods[plain][ms_per_token]:.1f} ms")


# --- what drafts gain -------------------------------------------------------------------------


def gains() -> str:
    return "\n\n".join(
        [*map(_gains_of, documents_of("real-*")), *map(_by_position, matching("real-long-*"))]
    )


def _gains_of(document: dict) -> str:
    """Greedy rows, which peers have too; the documents have the sampled ones."""
    rows = [row for row in by_kind(document) if row["setting"] == "greedy"]

    columns = [("prompts, greedy", kind_and_count), PLAIN_MS]
    columns += [
        gain_of(name, TITLES.get(name, name), " to " if name == WITH_SPREAD else "")
        for name in COLUMNS if any(name in row["methods"] for row in rows)
    ]  # fmt: skip
    counts, cells = {row["prompts"] for row in rows}, document["cells"]
    ours = [one for one in runs_of([document]) if "same_tokens" in one]
    shares = [one["share_of_bound"]["median"] for cell in cells for one in cell["rows"]
              if one["method"] == PLAIN]  # fmt: skip
    new = ", ".join(map(str, sorted({cell["new_tokens"] for cell in cells})))
    some = f"{min(counts)} to {max(counts)} prompts" if max(counts) > 1 else "one prompt alone"
    ends = (
        "or fewer where the answer ends"
        if all("answer_tokens" in cell for cell in cells)
        else "past the end of a text where that comes earlier, as in short answers: there they "
        "repeat themselves"
    )
    all_same = all(one["same_tokens"] for one in ours)
    note = (
        f"{name_of(document)} (sha256 {document['model']['sha256'][:12]}...). How many times "
        "faster than plain decoding of the same prompt in the same round: the median of "
        f"{some}, in brackets the least and the most; {new} new tokens ({SLOW_TOKENS} of the two "
        f"widest, {PEER_TOKENS} of peers), {ends}. Plain decoding is at "
        f"{statistics.median(shares):.0%} of the bound. llama.cpp computes with the numbers as the "
        f"file has them, the others in {document['dtype']}. "
        + (f"All {len(ours)} runs said the tokens of plain decoding." if all_same else parted(ours))
    )
    lines = [f"**{name_of(document)}**", "", *table(rows, *columns)]
    return with_note(lines, note, document)


def _by_position(document: dict) -> str:
    """What methods take after prompts of several lengths."""
    rows = [
        {**row, "what": f"{case['new_tokens']} tokens after {case['context']:,}"}
        for case in document["cases"] if "context" in case
        for row in case["rows"] if row["method"] != "auto"  # an earlier one
    ]  # fmt: skip
    lines = table(
        rows,
        ("where", "{what}"),
        ("method", lambda row: TITLES.get(row["method"], row["method"])),
        ("per token", "{ms_per_token[median]:.1f} ms"),
        ("x", lambda row: times(row["speedup_over_plain"]) if row["method"] != PLAIN else ""),
        ("tokens per step", "{tokens_per_step:.2f}"),
    )
    name = MODELS[document["model"]["name"]]
    title = f"**{name} by position, the paper's sampling**, from {source(document)}"
    return "\n".join([title, "", *lines])


def front_rows() -> list[tuple[str, ...]]:
    """Auto beside plain decoding, where drafts pay and where they hardly do."""
    found = []
    for document in documents_of("auto-*"):
        rows = {(row["kind"], row["setting"]): row for row in by_kind(document)}
        for kind, setting in ON_THE_FRONT:
            row = rows.get((kind, setting))
            if row is None or row["prompts"] < 2:  # one prompt tells too little
                continue
            plain, auto = (row["methods"][name]["ms_per_token"] for name in (PLAIN, "auto"))
            what = f"{name_of(document)}: {KINDS[kind]}, {SETTINGS[setting]}: `tsjax.Auto()`"
            against, ratio = f"{plain:.1f} ms (plain decoding)", f"{plain / auto:.2f}x"
            found.append((what, f"{auto:.1f} ms", against, ratio, machine(document)))
    return found


def auto_by_kind() -> str:
    """`Auto` beside plain decoding, a row for each model and kind of prompt."""
    documents = documents_of("auto-*")
    tables = [{(row["kind"], row["setting"]): row for row in by_kind(one)} for one in documents]
    shown = [name for name in SETTINGS if any(name == of for found in tables for _, of in found)]
    titles = (title for name in shown for title in (f"{SETTINGS[name]}: Auto", "a narrow tree"))
    lines = head("model", "prompts", *titles)
    for document, found in zip(documents, tables, strict=True):
        for kind, title in KINDS.items():
            rows = [found.get((kind, setting)) for setting in shown]
            if any(rows):
                cells = (cell for row in rows for cell in _auto_cells(row))
                lines.append(line(name_of(document), title, *cells))
    ours = runs_of(documents)
    note = (
        "What plain decoding takes for a token, and how many times faster Auto is, and a fixed "
        "`LikelyTree` that drafts from the text: medians over the prompts of a kind, the least and "
        "the most. A run ends where plain decoding's answer does. "
        f"{sum(one['same_tokens'] for one in ours)} of {len(ours)} runs gave the tokens of plain "
        "decoding."
    )
    return with_note(lines, note, *documents)


def _auto_cells(row: dict | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    methods = row["methods"]
    gain = times(methods["auto"]["over_plain"], " to " if row["prompts"] > 1 else "")
    narrow = times(methods["narrow tree"]["over_plain"]) if "narrow tree" in methods else ""
    return f"{methods[PLAIN]['ms_per_token']:.1f} ms, {gain}", narrow


# --- weights in few bits ----------------------------------------------------------------------

WITH_CACHE = "stored" + INT8_CACHE
WAYS = {
    "float32": "float32", **{name: f"`{name}`" for name in WEIGHTS},
    WITH_CACHE: '`stored`, `cache="int8"`', PEER: f"{PEER}, the file's",
}  # fmt: skip


def _narrow(ending: str = "") -> list[dict]:
    """Of the models that were measured, the smaller first."""
    names = (f"narrow-{name.removesuffix('.gguf')}{ending}" for name in MODELS)
    return [read(name) for name in names if (RESULTS / "cpu" / f"{name}.json").exists()]


def _short(model: str) -> str:
    return MODELS[model].removesuffix("-Instruct")


def narrow() -> str:
    """By model and way: what a token takes at each context, and what texts say."""
    documents, judged, cached = map(_narrow, ("", "-quality", "-cache-quality"))
    of_cache = {one["model"]: one["quality"] for one in cached}
    contexts = sorted({at["context"] for one in documents for at in one["decoding"]})
    texts = [*dict.fromkeys(one["text"] for document in judged for one in document["quality"])]
    columns = ["model", "matrices", "read a token"]
    for context in contexts:
        columns += [f"at {context:,} tokens", "over `float`, llama.cpp"]
    columns += ["8 rows", *(f"perplexity, {text}" for text in texts), "same token"]
    lines = head(*columns)
    for document, quality in zip(documents, judged, strict=True):
        for way, title in WAYS.items():
            judgements = quality["quality"]
            if way == WITH_CACHE:
                judgements = of_cache.get(document["model"])
                if judgements is None:
                    continue
            nbytes = document["bytes"].get(way)
            cells = [_short(f"{document['model']}.gguf"), title]
            cells.append("" if nbytes is None else f"{nbytes / 1e6:,.0f} MB")
            at = {one["context"]: one["ways"].get(way) for one in document["decoding"]}
            for context in contexts:
                cells += _speed(at.get(context))
            rows = (at[contexts[0]] or {}).get("rows_ms")
            cells.append(f"{rows['8'] / rows['1']:.1f}" if rows else "")
            cells += _quality([one for one in judgements if one["way"] == way], texts)
            lines.append(line(*cells))
    peers = {at["peer"]["commit"] for one in documents for at in one["decoding"] if "peer" in at}
    note = (
        "Plain decoding after random tokens, medians of rounds in turn; 8 rows: of a pass of one. "
        f"llama.cpp {', '.join(sorted(peers))} by llama-bench, compiled for this processor, on the "
        "same file and threads. Perplexity in windows of 512 tokens of texts that nothing was "
        "chosen by, and how often the most likely token is that of float32, which has the file's "
        "own numbers, as has `stored`."
    )
    return with_note(lines, note, *documents, *judged, *cached)


def _speed(one: dict | None) -> list[str]:
    if one is None:
        return ["", ""]
    over = [times(one[f"speed_over_{other}"]) for other in ("float", "peer")]
    return [f"{one['ms']:.1f} ms", ", ".join(over)]


def _quality(found: list[dict], texts: list[str]) -> list[str]:
    if not found:
        return [""] * (len(texts) + 1)
    by_text = {one["text"]: one for one in found}
    same = ", ".join(f"{by_text[text]['agreement']:.1%}" for text in texts)
    return [*(f"{by_text[text]['perplexity']:.2f}" for text in texts), same]


def narrow_cache() -> str:
    """By model and length: a token with the cache in the model's type and in eight bits."""
    documents = _narrow("-cache")
    rows = [
        {
            "model": _short(f"{document['model']}.gguf"), "context": at["context"],
            "wide": at["ways"]["stored"], "narrow": at["ways"][WITH_CACHE],
        }
        for document in documents for at in document["decoding"]
    ]  # fmt: skip
    lines = table(
        rows,
        ("model", "{model}"),
        ("tokens before", "{context:,}"),
        ('`cache="same"`', "{wide[ms]:.1f} ms"),
        ('`cache="int8"`', "{narrow[ms]:.1f} ms"),
        ("faster", lambda row: f"{row['wide']['ms'] / row['narrow']['ms']:.2f}x"),
        (
            "8 rows: faster",
            lambda row: f"{row['wide']['rows_ms']['8'] / row['narrow']['rows_ms']['8']:.2f}x",
        ),
    )
    note = "Weights as stored; medians of plain decoding in turn, and of passes of 8 rows."
    return with_note(lines, note, *documents)


def narrow_drafts() -> str:
    """What drafts gain over plain decoding of the narrow model, by kind of prompt."""
    documents = documents_of("narrow-drafts-*")
    rows = [
        {"model": _short(document["model"]["name"]), **row}
        for document in documents
        for row in by_kind(document)
    ]
    lines = table(
        rows,
        ("model", "{model}"),
        ("prompts", kind_and_count),
        PLAIN_MS,
        *(
            gain_of(name, TITLES.get(name, name), " to ")
            for name in rows[0]["methods"]
            if name != PLAIN
        ),
    )
    note = (
        "Weights as stored, temperature 0.7; over plain decoding of the same weights and prompt: "
        f"the median, the least and the most. {parted(runs_of(documents))}"
    )
    return with_note(lines, note, *documents)


# --- a drafter of one layer -------------------------------------------------------------------

DRAFTER = "smollm2-135m-bfloat16"
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


def drafter_chains() -> str:
    """By place in answers, without learning in the run."""
    document = read(f"drafter-{DRAFTER}")
    found = document["answers"]
    places = {
        "all": found,
        **{name: one for name, one in found["by"].items() if name[:5] == "from "},
    }
    lines = table(
        [{"place": name.replace("from ", "from token "), **one} for name, one in places.items()],
        ("answers", "{place}"),
        ("tokens of a step", "{tokens_per_step:.2f}"),
        (
            "drafts right, each where those before were",
            lambda row: ", ".join(f"{share:.0%}" for share in row["right"]),
        ),
    )
    training = document["training"]
    note = (
        f"{name_of(document)}, temperature {document['temperature']}; the reporting half of the "
        "prompts, chains of four drafts, nothing learned in the run. Trained for "
        f"{training['steps']:,} steps, {training['seconds'] / 60:.0f} minutes, on "
        f"{training['text_tokens']:,} tokens of the model's own text."
    )
    return with_note(lines, note, document)


def drafter_along() -> str:
    """Tokens per step by place of long runs, learning and not."""
    document = read(f"drafter-{DRAFTER}")
    rows = [row for row in document["along"] if row["method"] != PLAIN]
    lines = head("tokens of a step up to token", *(f"{end:,}" for end in rows[0]["position"]))
    for row in rows:
        cells = (f"{one:.2f}" for one in row["tokens_per_step"])
        lines.append(line(f"{KINDS[row['text']]}, {row['method']}", *cells))
    return with_note(lines, parted(rows), document)


def drafters_compared() -> str:
    """The drafter beside what drafts without it, on the answers to real prompts."""
    document = read(f"drafters-{DRAFTER}")
    rows = by_kind(document)
    lines = table(
        rows,
        ("answers", kind_and_count),
        PLAIN_MS,
        *(gain_of(name, title, "-") for name, title in BY_SPEED.items()),
    )
    finds = (
        statistics.mean(row["methods"][name]["tokens_per_step"] for row in rows)
        for name in BY_FINDS
    )
    lines += ["", *head("tokens of a step", *BY_FINDS.values())]
    lines.append(line("mean of the kinds", *(f"{one:.2f}" for one in finds)))
    prices = [read(f"drafter-price-smollm2-135m-{dtype}") for dtype in ("bfloat16", "float32")]
    shares = (f"{one['price']['in_plain_steps']['median']:.2f} in {one['dtype']}" for one in prices)
    note = (
        f"{name_of(document)}, temperature 0.7, min-p 0.05; the reporting half of the prompts, at "
        f"most {max(cell['new_tokens'] for cell in document['cells'])} new tokens. First the gain "
        "over plain decoding of the same prompt in the same round: the median, the least and the "
        f"most. {parted(runs_of([document]))} A chain of four drafts at "
        f"{prices[0]['price']['context']} tokens takes, in plain steps, {', '.join(shares)}."
    )
    return with_note(lines, note, document)

# SPDX-License-Identifier: Apache-2.0
"""The docs' table of narrow weights: what a token takes, and what held-out text says of them."""

from __future__ import annotations

import json

from benchmarks.narrow import INT8_CACHE, PEER, WEIGHTS
from benchmarks.real_tables import KINDS, NAMES, reported
from benchmarks.real_tables import TITLES as METHODS
from benchmarks.table_parts import RESULTS, head, source

TITLES = {"float32": "float32", "float": "`float`", PEER: f"{PEER}, the file's"}
TITLES |= {name: f"`{name}`" for name in WEIGHTS[1:]}
WITH_CACHE = "stored" + INT8_CACHE
TITLES[WITH_CACHE] = '`stored`, `cache="int8"`'


def _documents(ending: str) -> list[dict]:
    """Of the models that were measured, the smaller first."""
    files = [RESULTS / f"narrow-{name.split('.gguf')[0]}{ending}.json" for name in NAMES]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def table() -> str:
    """By model and way: what a token takes at each context, and what texts say."""
    columns = ["model", "matrices", "read a token"]
    documents, judged, cached = map(_documents, ("", "-quality", "-cache-quality"))
    of_cache = {one["model"]: one["quality"] for one in cached}
    contexts = sorted({at["context"] for one in documents for at in one["decoding"]})
    texts = [*dict.fromkeys(one["text"] for document in judged for one in document["quality"])]
    for context in contexts:
        columns += [f"at {context:,} tokens", "over `float`, llama.cpp"]
    columns += ["8 rows", *(f"perplexity, {text}" for text in texts), "same token"]
    lines = head(" | ".join(columns))
    for document, quality in zip(documents, judged, strict=True):
        model = NAMES[document["model"] + ".gguf"].removesuffix("-Instruct")
        for way in ("float32", *WEIGHTS, WITH_CACHE, PEER):
            judgements = quality["quality"]
            if way == WITH_CACHE:
                judgements = of_cache.get(document["model"])
                if judgements is None:
                    continue
            nbytes = document["bytes"].get(way)
            cells = [model, TITLES[way], "" if nbytes is None else f"{nbytes / 1e6:,.0f} MB"]
            at = {one["context"]: one["ways"].get(way) for one in document["decoding"]}
            for context in contexts:
                cells += _speed(at.get(context))
            rows = (at[contexts[0]] or {}).get("rows_ms")
            cells.append(f"{rows['8'] / rows['1']:.1f}" if rows else "")
            cells += _quality([one for one in judgements if one["way"] == way], texts)
            lines.append(f"| {' | '.join(cells)} |")
    peers = {at["peer"]["commit"] for one in documents for at in one["decoding"] if "peer" in at}
    note = (
        "Plain decoding after random tokens, medians of rounds in turn; 8 rows: of a pass of one. "
        f"llama.cpp {', '.join(sorted(peers))} by llama-bench, compiled for this processor, on the "
        "same file and threads. Perplexity in windows of 512 tokens of texts that nothing was "
        "chosen by, and how often the most likely token is that of float32, which has the file's "
        "own numbers, as has `stored`. Made by "
    )
    made = source(*documents, *judged, *cached)
    return "\n".join([*lines, "", f"{note}{made}."])


def _speed(one: dict | None) -> list[str]:
    if one is None:
        return ["", ""]
    over = [one[f"speed_over_{other}"]["median"] for other in ("float", "peer")]
    return [f"{one['ms']:.1f} ms", f"{over[0]:.2f}x, {over[1]:.2f}x"]


def _quality(found: list[dict], texts: list[str]) -> list[str]:
    if not found:
        return [""] * (len(texts) + 1)
    by_text = {one["text"]: one for one in found}
    same = ", ".join(f"{by_text[text]['agreement']:.1%}" for text in texts)
    return [*(f"{by_text[text]['perplexity']:.2f}" for text in texts), same]


def cache_table() -> str:
    """By model and length: a token with the cache in the model's type and in eight bits."""
    lines = head(
        'model | tokens before | `cache="same"` | `cache="int8"` | faster | 8 rows: faster'
    )
    documents = _documents("-cache")
    for document in documents:
        model = NAMES[document["model"] + ".gguf"].removesuffix("-Instruct")
        for at in document["decoding"]:
            wide, narrow = at["ways"]["stored"], at["ways"][WITH_CACHE]
            by_rows = wide["rows_ms"]["8"] / narrow["rows_ms"]["8"]
            lines.append(
                f"| {model} | {at['context']:,} | {wide['ms']:.1f} ms | {narrow['ms']:.1f} ms "
                f"| {wide['ms'] / narrow['ms']:.2f}x | {by_rows:.2f}x |"
            )
    note = "Weights as stored; medians of plain decoding in turn, and of passes of 8 rows. Made by "
    return "\n".join([*lines, "", f"{note}{source(*documents)}."])


def drafts_table() -> str:
    """What drafts gain over plain decoding of the narrow model, by kind of prompt."""
    documents = [json.loads(file.read_text()) for file in RESULTS.glob("narrow-drafts-*.json")]
    documents.sort(key=lambda one: [*NAMES].index(one["model"]["name"]))
    methods = [*dict.fromkeys(
        name for one in documents for row in reported(one) for name in row["methods"]
    )][1:]  # fmt: skip
    names = " | ".join(METHODS.get(name, name) for name in methods)
    lines = head(f"model | prompts | plain decoding, per token | {names}")
    for document in documents:
        model = NAMES[document["model"]["name"]].removesuffix("-Instruct")
        for row in reported(document):
            found = [model, f"{KINDS[row['kind']]}: {row['prompts']}"]
            found.append(f"{row['methods']['plain']['ms_per_token']:.1f} ms")
            for name in methods:
                gain = row["methods"][name]["over_plain"]
                spread = f" ({gain['min']:.2f} to {gain['max']:.2f})"
                found.append(f"{gain['median']:.2f}x{spread}")
            lines.append(f"| {' | '.join(found)} |")
    runs = [one for document in documents for cell in document["cells"] for one in cell["rows"]]
    parted = sum(not one["same_tokens"] for one in runs)
    note = (
        "Weights as stored, temperature 0.7; over plain decoding of the same weights and prompt: "
        f"the median, the least and the most. {parted} of {len(runs)} runs said other tokens than "
        "plain decoding. Made by "
    )
    return "\n".join([*lines, "", f"{note}{source(*documents)}."])

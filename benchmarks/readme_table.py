# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of README and docs from benchmarks/results/: no number is typed by hand.

python -m benchmarks readme_table            rewrites the files between their pairs of markers
python -m benchmarks readme_table --check    exits with 1 if that would change one
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from benchmarks import (
    drafter_tables,
    expected,
    front,
    gpu_tables,
    narrow_tables,
    papers_tables,
    real_tables,
)
from benchmarks.prefix_table import prefixes
from benchmarks.report import ROOT
from benchmarks.rows_table import rows_on_a_cpu
from benchmarks.start_table import starts
from benchmarks.table_parts import head, longcontext, made_by, of_gpu, read, source
from experiments.longcontext import tables


def on_a_cpu() -> str:
    document = read("cpu")
    peers = {"transformers": "transformers, torch", "plain XLA": "without the C++ kernels"}
    others = document["rows"][0]["over"]
    peers |= {name: name for name in others if name not in peers}
    lines = head(
        f"model, context | tsjax | {' | '.join(peers.values())} | of the bound | prefill "
        "| first 8 tokens"
    )
    for row in document["rows"]:
        ms, over = row["median_ms"], row["over"]
        decoding = [
            f"{ms['native']:.2f} ms", *(f"{ms[peer]:.2f} ms, {over[peer]:.2f}x" for peer in peers),
            f"{row['share_of_bound']:.0%}",
        ]  # fmt: skip
        prefill_only = row["new"] <= 2  # too few tokens to time
        cells = [
            f"{row['shape']}, {row['context']:,}",
            *([""] * len(decoding) if prefill_only else decoding),
            f"{row['prefill_over']['transformers']:.2f}x",
            "" if prefill_only else f"{row['first_tokens_over']['transformers']:.2f}x",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    note = [
        "Milliseconds per token of plain decoding, and how many times tsjax's they are, both "
        "medians over the rounds; prefill and the first 8 tokens of a call (prefill included) as "
        "ratios to torch. The bound is one read, at the speed of torch's sum over a buffer of that "
        "size in the same round, of the weights and of the cache's rows in use."
    ]
    slower = [
        f"{row[of][peer]:.2f}x of {peer}'s {what} ({row['shape']}, {row['context']:,})"
        for row in document["rows"] if row["new"] > 2
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
        f"{int8['over']:.2f} times faster than in float32. float32, random weights. Made by "
    )
    return "\n".join([*lines, "", " ".join(note) + source(document) + "."])


def capacity_rows(document: dict) -> list[str]:
    (small, a), (large, b) = document["ms_per_step"].items()
    return [
        f"| a step at {document['length']} tokens, cache of {int(large):,} slots | "
        f"{b['median']:.2f} ms | {a['median']:.2f} ms (cache of {int(small):,} slots) | "
        f"{1 / document['ratio']['median']:.2f}x |",
        f"| temporary memory of the decode loop | {document['temp_bytes'] / 1e6:.1f} MB | "
        f"{document['cache_bytes'] / 1e6:,.0f} MB (its cache) | {document['temp_share']:.2%} |",
    ]


def draft_rows(document: dict) -> list[str]:
    ms, ratios = document["ms"], document["ratios"]
    short, long = f"draft pass at {document['short']}", f"draft pass at {document['long']}"
    history = f"drafts from {document['long']:,} tokens of history (n-grams and suffix)"
    return [
        f"| draft pass with heads on {document['budget']} slots, context {document['long']:,} "
        f"| {ms[long]['median']:.2f} ms | {ms[short]['median']:.2f} ms "
        f"(context {document['short']:,}) "
        f"| {ratios['draft pass, long context / short']['median']:.2f}x the time |",
        f"| {history} | {ms['history']['median']:.2f} ms "
        f"| {ms['step with history']['median']:.1f} ms (the step they are part of) "
        f"| {ratios['history / its step']['median']:.1%} |",
        f"| the same | {ms['history']['median']:.2f} ms "
        f"| {ms['plain step']['median']:.1f} ms (a step of plain decoding) "
        f"| {ratios['history / plain step']['median']:.1%} |",
    ]


def convert_rows(document: dict) -> list[str]:
    rows = []
    for case in document["cases"]:
        peak, written = case["peak_bytes"] / 1e9, case["written_bytes"] / 1e9
        rows.append(
            f"| peak memory of converting {case['case'].replace('->', 'to')} | {peak:.2f} GB "
            f"| {written:.2f} GB (its output) | {peak - written:+.2f} GB |"
        )
    return rows


def measured() -> str:
    lines, sources = head("what | tsjax | against | ratio"), []
    for name, render in {
        "capacity": capacity_rows,
        "draft": draft_rows,
        "convert_memory": convert_rows,
    }.items():
        document = read(name)
        lines += render(document)
        sources.append(document)
    note = (
        "Times: float32, medians of interleaved runs, random weights of the shapes named (15M "
        "parameters where none is). Made by "
    )
    return "\n".join([*lines, "", note + source(*sources) + "."])


def exactness() -> str:
    document = read("exactness")
    lines = head("rule | share of the best token | total variation | entropy | accepted per step")
    for name, row in document["rows"].items():
        accepted = f"{row['accepted_per_step']:.2f}" if row["accepted_per_step"] else ""
        lines.append(
            f"| {name} | {row['best_token']:.3f} | {row['total_variation']:.3f} "
            f"| {row['entropy']:.2f} | {accepted} |"
        )
    tokens = document["rows"]["plain decoding"]["tokens"]
    note = (
        f"Under the published rule, {document['published_first_of_step']:.2%} of the steps began "
        f"with the best token. tsjax and plain decoding returned the same {tokens:,} tokens. Made "
        "by "
    )
    return "\n".join([*lines, "", note + source(document) + "."])


def equality() -> str:
    here, there = read("equality-float32"), of_gpu("equality-float32")
    gpu, jax = there["device"], there["versions"]["jax"]
    return (
        f"In float32 {held(here)}, with the kernels in C++. Made by {source(here)}.\n\n"
        f"On one {gpu} ({there['date']}, jax {jax}) {held(there)}. Made by "
        f"{made_by(there)}."
    )


def held(document: dict) -> str:
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


def longcontext_scores() -> str:
    made = source(*longcontext())
    return f"{tables.scores(longcontext())} Made by {made}."


def longcontext_verdict() -> str:
    return tables.verdict_text(longcontext())


def beginnings() -> str:
    document = read("first_token")
    goals = {bar["what"].split(", ")[1]: bar["bar"] for bar in document["bars"]}
    seconds: dict[str, dict[str, float]] = {}
    for row in document["rows"]:
        seconds.setdefault(row["command"], {})[row["kept"]] = row["seconds"]
    lines = head("seconds to the first token | nothing kept | all but programs | all")
    lines += [
        f"| {BEGUN[name]} | " + " | ".join(f"{found:.1f}" for found in kept.values()) + " |"
        for name, kept in seconds.items()
    ]
    lines.append("| the goal | " + " | ".join(f"{goal:g}" for goal in goals.values()) + " |")
    return "\n".join([*lines, "", f"Made by {source(document)}."])


BEGUN = {
    "plain": "`tsjax generate`",
    "tokenswift": "`tsjax generate --method tokenswift`",
    "demo": "`tsjax demo`, both methods compiled",
}

SECTIONS = {
    ("docs/decoding.md", "beginnings"): beginnings,
    ("docs/decoding.md", "starts"): starts,
    ("docs/using.md", "prefixes"): prefixes,
    ("README.md", "front"): front.table,
    ("docs/results.md", "real-models"): real_tables.table,
    ("docs/models.md", "narrow"): narrow_tables.table,
    ("docs/models.md", "narrow-cache"): narrow_tables.cache_table,
    ("docs/models.md", "narrow-drafts"): narrow_tables.drafts_table,
    ("docs/results.md", "on-a-cpu"): on_a_cpu,
    ("docs/results.md", "rows-on-a-cpu"): rows_on_a_cpu,
    ("docs/methods.md", "auto"): real_tables.auto_by_kind,
    ("docs/methods.md", "at-100k"): expected.at_100k,
    ("docs/results.md", "drafter-chains"): drafter_tables.chains,
    ("docs/results.md", "drafter-along"): drafter_tables.along_a_text,
    ("docs/methods.md", "drafter-compared"): drafter_tables.compared,
    ("docs/results.md", "measured"): measured,
    ("docs/results.md", "papers"): papers_tables.tables,
    ("docs/results.md", "killed"): papers_tables.killed_runs,
    ("docs/lazyllm.md", "longcontext-scores"): longcontext_scores,
    ("docs/lazyllm.md", "longcontext-verdict"): longcontext_verdict,
    ("docs/exactness.md", "exactness"): exactness,
    ("docs/exactness.md", "near-ties"): near_ties,
    ("docs/exactness.md", "equality"): equality,
    ("docs/speed.md", "errors"): functools.partial(expected.errors, "h100"),
    ("docs/speed.md", "errors-h200"): functools.partial(expected.errors, "h200"),
    ("docs/speed.md", "run-h200"): gpu_tables.run_on_h200,
    ("docs/kernels.md", "products"): gpu_tables.products,
    ("docs/speed.md", "choices"): expected.choices,
    ("docs/speed.md", "expected-times"): expected.times,
    ("docs/kernels.md", "compiled"): gpu_tables.registers,
    ("docs/kernels.md", "steps"): gpu_tables.steps,
    ("docs/lazyllm.md", "lazy-generation"): gpu_tables.lazy_generation,
    ("docs/speed.md", "expected-narrow"): expected.narrow,
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks readme_table", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    changed = 0
    for (name, section), render in SECTIONS.items():
        path = ROOT / name
        text = path.read_text()
        begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
        head, rest = text.split(begin)
        wanted = f"{head}{begin}\n{render()}\n{end}{rest.split(end)[1]}"
        changed += wanted != text
        if not args.check:
            path.write_text(wanted)
    return 1 if args.check and changed else 0

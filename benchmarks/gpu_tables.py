# SPDX-License-Identifier: Apache-2.0
"""The tables of GPUs: what was measured on one, and what was compiled for one without."""

from __future__ import annotations

import functools

from benchmarks.table_parts import head, line, of_gpu, read, table, times, with_note


def plain_step(document: dict, row: dict) -> tuple[str, ...]:
    """A row of the README's."""
    return (
        f"a step of plain decoding, {document['model']} in {document['dtype']}, random weights, "
        f"at {row['context']:,}",
        f"{row['ms']['median']:.1f} ms",
        f"{row['bound_ms']:.1f} ms (reading at the speed of a copy)",
        f"{1 / row['over_bound']:.0%} of the bound",
        f"{document['device']}, {document['date']}",
    )


compiled = functools.partial(read, folder="aot")
COMPILED = ("aot", "narrow", "lazy")  # most cases, those with narrow numbers, lazy prefills
CHIPS = ("a100", "h100")


def registers() -> str:
    """For each kernel and chip, the case with the fewest registers and the one with the most."""
    documents = [compiled(name) for name in COMPILED]
    spilled, found = 0, {}
    for name, case in (pair for document in documents for pair in document["cases"].items()):
        if "bound_us" not in case:
            continue
        shape = name.split(" ", 2 if name.startswith("cache_scores") else 1)[-1]
        for chip in CHIPS:
            for kernel in case[chip]["kernels"]:
                spilled += kernel["spilled_bytes"]
                size = kernel["registers"], kernel["shared_bytes"]
                used = ", wgmma" if kernel["wgmma"] else ", mma" if kernel["mma"] else ""
                cell = f"{size[0]}, {size[1] / 1024:.0f} KiB{used} ({shape})"
                of_chip = found.setdefault(kernel["name"].removeprefix("tsjax_"), {})
                of_chip.setdefault(chip, []).append((size, cell))
    lines = head("kernel", "A100: fewest registers", "most", "H100: fewest", "most")
    for kernel, chips in sorted(found.items()):
        cells = []
        for chip in CHIPS:
            sizes = [size for size, _ in chips[chip]]
            cells += [chips[chip][sizes.index(one)][1] for one in (min(sizes), max(sizes))]
        lines.append(line(kernel, *cells))
    made = (
        f"{name}.json ({document['date']}, jax {document['versions']['jax']})"
        for name, document in zip(COMPILED, documents, strict=True)
    )
    note = (
        f"Spilled bytes in all cases together: {spilled}. Made by `python -m benchmarks aot` with "
        f"the options that each file names: {', '.join(made)}."
    )
    return with_note(lines, note)


def run_on_h200() -> str:
    """Whole runs with simulated drafts, beside torch and the reading of prompts."""
    names = "bench-llama3.1-8b", "step-torch-llama3.1-8b", "ttft"
    run, torch, lazy = map(of_gpu, names)
    lines = head("what", "context", "result", "against")
    by_method = {name: [row for row in run["rows"] if row["method"] == name]
                 for name in ("plain", "tokenswift")}  # fmt: skip
    for method, rows in by_method.items():
        contexts = "; ".join(f"{row['context']:,}" for row in rows)
        ms = "; ".join(f"{row['ms_per_token']['median']:.2f}" for row in rows)
        what, gain = "plain decoding", ""
        if method != "plain":
            what = f"TokenSwift, {rows[0]['tokens_per_step']:.2f} a step"
            gain = f"{'; '.join(times(row['speedup_over_plain']) for row in rows)} plain decoding"
        lines.append(line(f"{what}, per token", contexts, f"{ms} ms", gain))
    (row,) = torch["rows"]
    (ours,) = (
        one["ms_per_token"]["median"]
        for one in by_method["plain"]
        if one["context"] == row["context"]
    )
    what, ms = f"torch `generate`, {row['cache']}, per token", row["median_ms"]
    lines.append(line(what, f"{row['context']:,}", f"{ms:.2f} ms", f"{ms / ours:.1f} times ours"))
    for row in lazy["rows"]:
        gain = ""
        if "speedup" in row:
            gain = f"{times(row['speedup'])}, {row['predicted']:.2f}x by operations"
        what, seconds = f"first token, prefill: {row['schedule']}", row["first_token_seconds"]
        lines.append(line(what, f"{row['prompt_tokens']:,}", f"{seconds['median']:.2f} s", gain))
    for case in lazy["generations"]:
        for revived, one in case["runs"].items():
            seconds = f"{one['generation_seconds']['median']:.2f} s"
            how, gain = "full", ""
            if revived != "full":
                how, gain = f"{case['schedule']}, revived: {revived}", times(one["speedup"])
            what = f"{case['new_tokens']} tokens, prefill: {how}"
            lines.append(line(what, f"{case['prompt_tokens']:,}", seconds, gain))
    note = (
        f"One {run['device']}, {run['date']}, jax {run['versions']['jax']}, torch "
        f"{torch['versions']['torch']}; random weights of {run['model']} in {run['dtype']}. "
        "Accepted lengths are those of the embedded model. Commands: "
        f"{', '.join(f'`{name}.json`' for name in names)} of `benchmarks/results/h200/`."
    )
    return with_note(lines, note)


def products() -> str:
    """Passes of few rows by a kernel of our own, which is gone, and by XLA."""
    document = of_gpu("step-products")
    names = {None: "a kernel of our own", PADDED: "XLA, padded to 8 rows", "xla": "XLA"}
    contexts = sorted({row["context"] for row in document["rows"]})
    ends = contexts[0], contexts[-1]
    found: dict[tuple, dict[str | None, list[float]]] = {}
    for row in document["rows"]:
        if row["rows"] <= 16 and row["context"] in ends:
            by_name = found.setdefault((row["pass"], row["rows"]), {})
            by_name.setdefault(row.get("products"), []).append(row["ms"]["median"])
    lines = head("pass", "rows", *names.values())
    for (kind, rows), by_name in found.items():
        cells = (
            f"{', '.join(f'{ms:.2f}' for ms in by_name[name])} ms" if name in by_name else ""
            for name in names
        )
        lines.append(line(kind, str(rows), *cells))
    note = (
        f"At contexts of {ends[0]:,} and {ends[1]:,}. One {document['device']}, "
        f"{document['date']}, jax {document['versions']['jax']}, llama3.1-8b in bfloat16, in "
        f"turns; by `{document['command']}` at the commit {document['commit']}."
    )
    return with_note(lines, note)


PADDED = "xla, few rows"  # as that commit called it


LAZY_TOKENS, LAZY_EVERY = 128, 8  # new ones, and a choice with each so many by default


def lazy_generation() -> str:
    """What a whole generation starts, by what was compiled."""
    cases = compiled("lazy")["cases"]
    lazy, plain = (
        cases[f"step llama3.1-8b {kind}, 16K"]["a100"]["program"] for kind in ("lazily", "plain")
    )
    ((_, usual),), (_, (_, choice), (_, step)) = plain["loops"], lazy["loops"]
    choices = LAZY_TOKENS // LAZY_EVERY
    total, full = LAZY_TOKENS * step + choices * choice, LAZY_TOKENS * usual
    return (
        f"Of Llama-3.1-8B after 16,384 tokens a step starts {step} kernels, one of plain decoding "
        f"{usual}, and a choice {choice:,} more: {total:,} for {LAZY_TOKENS} tokens with {choices} "
        f"choices, {total / full:.2f} times those of plain decoding. Counted in what was compiled "
        "for an A100, never measured."
    )


# What the page shows of what was compiled, by document: what decides a method or a card.
STEPS = {
    "aot": (
        "step llama3.1-8b plain", "step llama3.1-8b tokenswift", "step llama3.1-8b int8 drafts",
        "step llama3.1-8b auto", "step llama3.1-8b magicdec",
        "step llama2-7b-yarn-128k tokenswift", "step qwen2.5-14b tokenswift",
        "step qwen2.5-32b tokenswift, 2 devices", "prefill llama2-7b-yarn-128k by 2048",
    ),
    "narrow": (
        "step llama3.1-8b plain, narrow int4", "step llama3.1-8b plain, narrow int8 and cache",
    ),
    "lazy": ("step llama3.1-8b lazily, 16K", "step llama3.1-8b lazily"),
}  # fmt: skip


def steps() -> str:
    rows, copies = [], 0
    for document, names in STEPS.items():
        cases = compiled(document)["cases"]
        copies += sum(case["a100"].get("cache_copies", 0) for case in cases.values())
        rows += [{"name": name.removeprefix("step "), **cases[name]["a100"]} for name in names]

    def held(row: dict) -> str:
        each = ", each device" if "devices" in row["name"] else ""
        return f"{row['argument_bytes'] / 1e9:.1f} GB{each}"

    lines = table(
        rows,
        ("step", "{name}"),
        ("weights, cache and state", held),
        ("temporary", lambda row: f"{row['temp_bytes'] / 1e6:,.0f} MB"),
        ("kernels in graphs", "{program[graph_kernels]:,}"),
        ("started by the host", "{program[loose_kernels]}"),
        ("loops that ask the host", "{program[host_loops]}"),
    )
    note = f"Copies of a cache in all cases together: {copies}. Made by the same commands."
    return with_note(lines, note)

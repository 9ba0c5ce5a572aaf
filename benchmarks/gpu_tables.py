# SPDX-License-Identifier: Apache-2.0
"""The tables of GPUs: what was measured on one, and what was compiled for one without."""

from __future__ import annotations

import json

from benchmarks.table_parts import RESULTS, head, made_by, of_gpu, source


def plain_step(document: dict, row: dict) -> str:
    return (
        f"| a step of plain decoding, {document['model']} in {document['dtype']}, random weights, "
        f"at {row['context']:,} | {row['ms']['median']:.1f} ms | {row['bound_ms']:.1f} ms "
        f"(reading at the speed of a copy) | {1 / row['over_bound']:.0%} of the bound "
        f"| {document['device']}, {document['date']} |"
    )


def compiled(name: str = "aot") -> dict:
    return json.loads((RESULTS.parent / "aot" / f"{name}.json").read_text())


# What a call is expected to reach of a chip before anything is measured; docs/kernels.md says why.
EXPECTED_BANDWIDTH, EXPECTED_MATRIX, LAUNCHES_US = 0.85, 0.5, 5.0


def paper() -> str:
    lines = head("call | read | operations | per byte | A100: bound, expected | H100 | H200")
    document = compiled()
    for name, case in document["cases"].items():
        if not case.get("bound_us"):
            continue
        read, operations = case["read_bytes"], case["operations"]
        cells = []
        for chip, bound in case["bound_us"].items():
            bandwidth, peak = document["chips"][chip]
            memory = read / (EXPECTED_BANDWIDTH * bandwidth)
            # Scores need next to no operations, and "dot" no matrix units.
            compute = 0 if "dot" in name else operations / (EXPECTED_MATRIX * peak)
            cells.append(f"{bound:.0f}, {1e6 * max(memory, compute) + LAUNCHES_US:.0f} us")
        lines.append(
            f"| {name} | {read / 1e6:.0f} MB | {operations / 1e9:.1f} G "
            f"| {operations / read:.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def registers(document_name: str = "aot") -> str:
    document = compiled(document_name)
    spilled, alike = 0, {}
    for name, case in document["cases"].items():
        if "bound_us" not in case:
            continue
        for kernel in case["a100"]["kernels"]:
            # A merge is not there where one part does it all.
            other = [k for k in case["h100"]["kernels"] if k["name"] == kernel["name"]]
            both = (kernel, *other)
            spilled += sum(k["spilled_bytes"] for k in both)
            cells = [f"{k['registers']}, {k['shared_bytes'] / 1024:.0f} KiB" for k in both]
            cells += [] if other else ["-"]
            used = ["wgmma" if k["wgmma"] else "mma" if k["mma"] else "" for k in both]
            cells.append(" / ".join(used) if any(used) else "")
            key = kernel["name"].removeprefix("tsjax_"), *cells
            shape = name.split(" ", 2 if name.startswith("cache_scores") else 1)[-1]
            alike.setdefault(key, []).append(shape)
    lines = head("kernel | A100: registers, shared memory | H100 | instructions | shapes")
    for key, shapes in sorted(alike.items(), key=lambda item: item[0][0]):
        lines.append(f"| {' | '.join(key)} | {', '.join(shapes)} |")
    note = f"Spilled bytes in all of them together: {spilled}. Made by "
    return "\n".join([*lines, "", note + source(document) + "."])


def run_on_h200() -> str:
    """Whole runs with simulated drafts, beside torch and the reading of prompts."""
    run, torch, lazy = map(of_gpu, ("bench-llama3.1-8b", "step-torch-llama3.1-8b", "ttft"))
    lines = head("what | context | result | against")
    for row in run["rows"]:
        ms, plain = row["ms_per_token"]["median"], row["method"] == "plain"
        what = "plain decoding" if plain else f"TokenSwift, {row['tokens_per_step']:.2f} a step"
        gain = "" if plain else f"{row['speedup_over_plain']['median']:.2f}x plain decoding"
        lines.append(f"| {what}, per token | {row['context']:,} | {ms:.2f} ms | {gain} |")
    (row,) = torch["rows"]
    (ours,) = (
        one["ms_per_token"]["median"]
        for one in run["rows"]
        if (one["method"], one["context"]) == ("plain", row["context"])
    )
    lines.append(
        f"| torch `generate`, {row['cache']}, per token | {row['context']:,} "
        f"| {row['median_ms']:.2f} ms | {row['median_ms'] / ours:.1f} times ours |"
    )
    for row in lazy["rows"]:
        seconds, speedup = row["first_token_seconds"]["median"], row.get("speedup")
        gain = f"{speedup['median']:.2f}x, {row['predicted']:.2f}x by operations" if speedup else ""
        lines.append(
            f"| first token, prefill: {row['schedule']} | {row['prompt_tokens']:,} "
            f"| {seconds:.2f} s | {gain} |"
        )
    for case in lazy["generations"]:
        for revived, one in case["runs"].items():
            seconds = one["generation_seconds"]["median"]
            how, gain = "full", ""
            if revived != "full":
                how = f"{case['schedule']}, revived: {revived}"
                gain = f"{one['speedup']['median']:.2f}x"
            lines.append(
                f"| {case['new_tokens']} tokens, prefill: {how} "
                f"| {case['prompt_tokens']:,} | {seconds:.2f} s | {gain} |"
            )
    facts = ", ".join(map(made_by, (run, torch, lazy)))
    note = (
        f"One {run['device']}, {run['date']}, jax {run['versions']['jax']}, torch "
        f"{torch['versions']['torch']}; random weights of {run['model']} in {run['dtype']}. "
        f"Accepted lengths are those of the embedded model. By {facts}."
    )
    return "\n".join([*lines, "", note])


def products() -> str:
    """Passes of few rows by a kernel of our own, which is gone, and by XLA."""
    document = of_gpu("step-products")
    names = {None: "a kernel of our own", PADDED: "XLA, padded to 8 rows", "xla": "XLA"}
    found: dict[tuple, dict[str | None, float]] = {}
    for row in document["rows"]:
        if row["rows"] <= 16:
            place = row["pass"], row["rows"], row["context"]
            found.setdefault(place, {})[row.get("products")] = row["ms"]["median"]
    lines = head(f"pass | rows | context | {' | '.join(names.values())}")
    for (kind, rows, context), times in found.items():
        cells = (f"{times[name]:.2f} ms" if name in times else "" for name in names)
        lines.append(f"| {kind} | {rows} | {context:,} | {' | '.join(cells)} |")
    note = (
        f"One {document['device']}, {document['date']}, jax {document['versions']['jax']}, "
        f"llama3.1-8b in bfloat16, in turns; by `{document['command']}` at the commit "
        f"{document['commit']}."
    )
    return "\n".join([*lines, "", note])


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


def steps(document_name: str = "aot") -> str:
    lines = head(
        "step | weights, cache and state | temporary | copies of a cache | kernels in graphs | "
        "started by the host | loops that ask the host"
    )
    for name, case in compiled(document_name)["cases"].items():
        found = case["a100"]
        if "cache_copies" not in found:
            continue
        each = ", each device" if "devices" in name else ""
        lines.append(
            f"| {name.removeprefix('step ')} | {found['argument_bytes'] / 1e9:.1f} GB{each} "
            f"| {found['temp_bytes'] / 1e6:,.0f} MB | {found['cache_copies']} "
            f"| {found['program']['graph_kernels']:,} | {found['program']['loose_kernels']} "
            f"| {found['program']['host_loops']} |"
        )
    return "\n".join([*lines, "", "Made by the same command."])

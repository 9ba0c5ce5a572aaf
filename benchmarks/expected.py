# SPDX-License-Identifier: Apache-2.0
"""What the cost model expects of GPUs, and what two of them took, as tables. Runs no model.

    python -m benchmarks expected            prints the tables, with every model, chip and length

Knows presets, the formula of `tsjax.methods.devices`, and the runs that it is held against;
`python -m benchmarks readme_table` writes the part of them that docs/speed.md shows.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import tsjax
from benchmarks.report import use_configs
from benchmarks.table_parts import head, line, read, with_note
from tsjax.files.tensor_names import with_weights
from tsjax.methods import likely_growth, model_drafts
from tsjax.methods.auto import choose
from tsjax.methods.cost_model import Costs
from tsjax.methods.devices import GPU_OF_THE_RUN, GPUS, Device, estimated, plain_bytes
from tsjax.methods.roofline import has_room

use_configs()
MODELS = ("llama3.1-8b", "llama2-7b-yarn-128k", "qwen2.5-1.5b", "qwen2.5-14b")
CHIPS = {
    "A100 40GB": "a100 40gb", "A100 80GB": "a100", "H100": "h100", "H200": "h200", "L40S": "l40s",
    "RTX 4090": "rtx 4090",
}  # fmt: skip
LENGTHS = (4096, 16_384, 32_768, 65_536, 131_072)
# What the page shows of all.
SHOWN_MODELS = ("llama3.1-8b", "qwen2.5-1.5b")
SHOWN_CHIPS = ("A100 80GB", "H100", "H200")
SHOWN_LENGTHS = (4096, 32_768, 131_072)
SHOWN_CHOICES = (4096, 131_072)
SHOWN_NARROW = ("H100", "RTX 4090"), (4096, 65_536)
SHOWN_PASSES = {("plain", 1), ("tokenswift", 101), ("verify", 8), ("verify", 64), ("verify", 101)}
HEADS = 3
LONG_RUN = 100_000  # tokens
BIAS = 0.9  # drafts that are right so many times as often as assumed
# The GPUs that steps were measured on, as they were when they were.
MEASURED = {"h100": GPUS["h100"]._replace(reach=GPU_OF_THE_RUN), "h200": GPUS["h200"]}


def measured(chip: str) -> dict:
    return read("step-llama3.1-8b", chip)


def plain_step(model: tsjax.ModelConfig, costs: Costs, device: Device, context: int) -> str:
    """Its milliseconds, and in brackets those of the bound."""
    bound = 1e3 * plain_bytes(model, context) / device.bytes_per_second
    return f"{1e3 * costs.plain(context):.1f} ({bound:.1f})"


def gain(model: tsjax.ModelConfig, costs: Costs, device: Device, context: int) -> float:
    if not has_room(model, device, context, in_int8=True):
        costs = costs._replace(int8=None)
    method = choose(model, costs, context)
    return costs.plain(context) / method.promise(model, costs, context).seconds_per_token


def times(whole: bool = False) -> str:
    """Plain steps, their bound, and what drafts are expected to gain, by model, chip and length."""
    lengths = LENGTHS if whole else SHOWN_LENGTHS
    lines = head("model", "chip", *(f"{length:,}" for length in lengths))
    for name in MODELS if whole else SHOWN_MODELS:
        plain, heads = (tsjax.model_preset(name).with_heads(n) for n in (0, HEADS))
        for chip in CHIPS if whole else SHOWN_CHIPS:
            device, cells = GPUS[CHIPS[chip]], []
            tables = [(model, estimated(model, device, 1)) for model in (plain, heads)]
            for length in lengths:
                if not has_room(plain, device, length):
                    cells.append("no room")
                    continue
                gains = ", ".join(f"{gain(*table, device, length):.1f}x" for table in tables)
                cells.append(f"{plain_step(*tables[0], device, length)} ms; {gains}")
            lines.append(line(name, chip, *cells))
        for chip in MEASURED:
            document = measured(chip)
            if document["model"] == name:
                found = {
                    step["context"]: step["ms"]["median"]
                    for step in document["rows"]
                    if step["pass"] == "plain"
                }
                cells = [f"**{found[n]:.1f} ms**" if n in found else "" for n in lengths]
                lines.append(line(name, f"**{chip.upper()}, measured**", *cells))
    note = (
        "Estimates, except where marked. Milliseconds of a plain step; in brackets the bandwidth "
        "bound (weights and cache read once at the data sheet's speed); then the speed-up that "
        f"`tsjax.Auto()` expects without draft heads, and with {HEADS}. bfloat16, one row, no "
        "filters."
    )
    return with_note(lines, note)


NARROW = (
    ("float", "same"), ("int8", "same"), ("int4", "same"), ("float", "int8"), ("int8", "int8"),
)  # fmt: skip


def narrow(whole: bool = False) -> str:
    """Plain steps of Llama-3.1-8B with narrow weights and caches."""
    model = tsjax.model_preset(MODELS[0])
    every = ("A100 80GB", "H100", "H200", "RTX 4090"), LENGTHS
    chips, lengths = every if whole else SHOWN_NARROW
    lines = head("weights", "cache", "chip", *(f"{length:,}" for length in lengths))
    for weights, cache in NARROW:
        one = dataclasses.replace(with_weights(model, weights, {}, ""), cache=cache)
        for chip in chips:
            device = GPUS[CHIPS[chip]]
            costs = estimated(one, device, 1)
            cells = (
                plain_step(one, costs, device, length)
                if has_room(one, device, length)
                else "no room"
                for length in lengths
            )
            lines.append(line(f"`{weights}`", f"`{cache}`", chip, *cells))
    note = (
        "Estimates: no GPU has run the kernels that read narrow weights and caches. Milliseconds "
        f"of a plain step of {MODELS[0]}, in brackets the bandwidth bound."
    )
    return with_note(lines, note)


def choices(whole: bool = False) -> str:
    """What is chosen for Llama-3.1-8B with heads, and what its verification takes."""
    model = tsjax.model_preset(MODELS[0]).with_heads(HEADS)
    columns = ["drafts", "draft weights", "rows", "verification, in plain steps"]
    lines = head("chip", "length", *columns)
    for chip in ("A100 80GB", "H100"):
        costs = estimated(model, GPUS[CHIPS[chip]], 1)
        for length in LENGTHS if whole else SHOWN_CHOICES:
            method = choose(model, costs, length)
            promise = method.promise(model, costs, length)
            cost = (costs.of_pass(promise.width, length) + costs.overhead) / costs.plain(length)
            cells = [chip, f"{length:,}", _drafts(method), method.draft_weights]
            lines.append(line(*cells, str(promise.width), f"{cost:.2f}"))
    note = (
        f"Estimates: {MODELS[0]} with {HEADS} heads. Rows of the step that promises most, before a "
        "run has shown how often drafts are right."
    )
    return with_note(lines, note)


def _drafts(method: tsjax.LikelyTree) -> str:
    passes = f"{method.draft_passes} pass{'' if method.draft_passes == 1 else 'es'}"
    passes += f" on {method.draft_budget:,} slots"
    found = [passes] if method.draft_passes else []
    found += ["heads"] if method.heads else []
    return ", ".join([*found, "text"])


@contextlib.contextmanager
def less_often_right(bias: float) -> Iterator[None]:
    """Within it a draft of the text, a pass or a head is right `bias` times as often as assumed
    when all before it were."""
    right = likely_growth.PASS_WITH_REST_IS_RIGHT
    others = bias * (1 - right) / (1 - bias * right)  # what is left beside the best is more now
    heads = {place: bias * share for place, share in model_drafts.HEAD_IS_RIGHT.items()}
    with (
        patch.object(likely_growth, "TEXT_IS_RIGHT", bias * likely_growth.TEXT_IS_RIGHT),
        patch.object(likely_growth, "PASS_WITH_REST_IS_RIGHT", bias * right),
        patch.object(
            likely_growth, "OTHERS_OF_PASS", [others * x for x in likely_growth.OTHERS_OF_PASS]
        ),
        patch.object(model_drafts, "HEAD_IS_RIGHT", heads),
    ):
        yield


def at_100k() -> str:
    """What Llama-3.1-8B with heads gains at 100,000 tokens, by two assumptions of its drafts."""
    model = tsjax.model_preset(MODELS[0]).with_heads(HEADS)
    columns = ["tokens per step", "rows", "ms of a step", "ms of a plain step", "gain"]
    lines = head("chip", "drafts are right", *columns)
    for chip in ("A100 80GB", "H100"):
        device = GPUS[CHIPS[chip]]
        costs = estimated(model, device, 1)
        assert has_room(model, device, LONG_RUN, in_int8=True)
        method, plain = choose(model, costs, LONG_RUN), costs.plain(LONG_RUN)
        assert method.draft_rest  # as `less_often_right` has it
        for name, bias in (("as assumed", 1.0), (f"{1 - BIAS:.0%} less often", BIAS)):
            with less_often_right(bias):
                tokens, seconds, rows, *_ = method.promise(model, costs, LONG_RUN)
            cells = [f"{tokens:.2f}", str(rows), f"{1e3 * seconds:.1f}", f"{1e3 * plain:.1f}"]
            lines.append(line(chip, name, *cells, f"{plain * tokens / seconds:.2f}x"))
    note = (
        f"Estimates, not measured: {MODELS[0]} with {HEADS} heads, a row of {LONG_RUN:,} tokens; "
        f"{_drafts(method)}, drafted in {method.draft_weights}. As assumed: "
        "`tsjax/methods/model_drafts.py` and `likely_growth.py`, heads as in TokenSwift's Table 3. "
        "Less often: each draft, when all before it were right."
    )
    return with_note(lines, note)


def errors(chip: str, whole: bool = False) -> str:
    """The formula against the figures of a GPU; the page has some passes and two lengths."""
    document = measured(chip)
    model = tsjax.model_preset(document["model"]).with_heads(HEADS)
    costs = estimated(model, MEASURED[chip], 1)
    found: dict[tuple[str, int], dict[int, str]] = {}
    differences = []
    for step in document["rows"]:
        kind, rows, context, ms = (
            step["pass"], step["rows"], step["context"], step["ms"]["median"]
        )  # fmt: skip
        slots = min(context, document["draft_budget"])
        if kind == "tokenswift":
            seconds = costs.of_pass(rows, context) + costs.of_pass(1, slots)
            seconds += costs.heads + costs.ngrams + costs.suffix.at(context) + costs.overhead
        else:
            seconds = costs.of_pass(rows, slots if kind == "draft" else context)
            seconds += costs.overhead if kind == "plain" else 0
        differences.append(1e3 * seconds / ms - 1)
        cell = f"{ms:.2f}, {differences[-1]:+.1%}"
        found.setdefault((kind, rows), {})[context] = cell
    contexts = sorted({step["context"] for step in document["rows"]})
    contexts = contexts if whole else [contexts[0], contexts[-1]]
    lines = head("pass", "rows", *(f"{context:,}" for context in contexts))
    for (kind, rows), cells in sorted(found.items()):
        if whole or (kind, rows) in SHOWN_PASSES:
            lines.append(line(kind, str(rows), *(cells.get(context, "") for context in contexts)))
    note = (
        f"Milliseconds measured on one {document['device']} ({document['date']}, jax "
        f"{document['versions']['jax']}), and how far the formula is from them: "
        f"{min(differences):+.1%} to {max(differences):+.1%} over all passes and lengths."
    )
    note += f" Made by `{document['command']}`." if whole else ""
    return with_note(lines, note)


def main(argv: Sequence[str]) -> None:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks expected", description=about)
    parser.parse_args(argv)
    tables = [
        *(errors(chip, whole=True) for chip in MEASURED),
        choices(whole=True), times(whole=True), narrow(whole=True), at_100k(),
    ]  # fmt: skip
    print("\n\n".join(tables))

# SPDX-License-Identifier: Apache-2.0
"""What the cost model expects of GPUs, as tables for docs/performance.md. Runs nothing.

Knows presets, the formula of `tsjax.methods.devices`, and the runs that it is held against;
`python -m benchmarks readme_table` writes the tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from unittest.mock import patch

import tsjax
from benchmarks.report import ROOT, use_configs
from benchmarks.table_parts import made_by
from tsjax.files.tensor_names import with_weights
from tsjax.methods import likely_growth, model_drafts
from tsjax.methods.auto import choose
from tsjax.methods.cost_model import Costs
from tsjax.methods.devices import GPU, GPU_OF_THE_RUN, GPUS, Device, estimated, plain_bytes
from tsjax.methods.roofline import USABLE, has_room

MODELS = ("llama3.1-8b", "llama2-7b-yarn-128k", "qwen2.5-1.5b", "qwen2.5-14b")
CHIPS = {
    "A100 40GB": "a100 40gb",
    "A100 80GB": "a100",
    "H100": "h100",
    "H200": "h200",
    "L40S": "l40s",
    "RTX 4090": "rtx 4090",
}
LENGTHS = (4096, 16_384, 32_768, 65_536, 131_072)
HEADS = 3
LONG_RUN = 100_000  # tokens
BIAS = 0.9  # drafts that are right so many times as often as assumed
# The GPUs that steps were measured on, as they were when they were.
MEASURED = {"h100": GPUS["h100"]._replace(reach=GPU_OF_THE_RUN), "h200": GPUS["h200"]}


def measured(chip: str) -> dict:
    file = ROOT / "benchmarks" / "results" / chip / "step-llama3.1-8b.json"
    return json.loads(file.read_text())


def head(columns: list[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def gain(model: tsjax.ModelConfig, costs: Costs, device: Device, context: int) -> float:
    if not has_room(model, device, context, in_int8=True):
        costs = costs._replace(int8=None)
    method = choose(model, costs, context)
    return costs.plain(context) / method.promise(model, costs, context).seconds_per_token


def times() -> str:
    """Plain steps, their bound, and what drafts are expected to gain, by model, chip and length."""
    use_configs()
    lengths = [f"{length:,}" for length in LENGTHS]
    lines = head(["model", "chip", *lengths])
    for name in MODELS:
        plain, heads = (tsjax.model_preset(name).with_heads(n) for n in (0, HEADS))
        for chip, key in CHIPS.items():
            device, cells = GPUS[key], []
            tables = [(model, estimated(model, device, 1)) for model in (plain, heads)]
            for length in LENGTHS:
                if not has_room(plain, device, length):
                    cells.append("no room")
                    continue
                bound = 1e3 * plain_bytes(plain, length) / device.bytes_per_second
                gains = ", ".join(f"{gain(*table, device, length):.1f}x" for table in tables)
                cells.append(f"{1e3 * tables[0][1].plain(length):.1f} ({bound:.1f}) ms; {gains}")
            lines.append(row([name, chip, *cells]))
        for chip in MEASURED:
            document = measured(chip)
            if document["model"] == name:
                found = {
                    step["context"]: step["ms"]["median"]
                    for step in document["rows"]
                    if step["pass"] == "plain"
                }
                cells = [f"**{found[n]:.1f} ms**" if n in found else "" for n in LENGTHS]
                lines.append(row([name, f"**{chip.upper()}, measured**", *cells]))
    note = (
        "Estimates, not measured, but for the rows that say so. Milliseconds of a plain step, in "
        "brackets the bandwidth bound (weights and cache read once at the data sheet's speed); "
        f"then how many times faster `tsjax.Auto()` expects to be without draft heads, and with "
        f"{HEADS}. bfloat16, one row, no sampling filters. No room: weights and cache exceed "
        f"{USABLE:.0%} of the chip's memory; drafts in int8 are offered where their copy fits too."
    )
    return "\n".join([*lines, "", note])


NARROW = (
    ("float", "same"),
    ("int8", "same"),
    ("int4", "same"),
    ("float", "int8"),
    ("int8", "int8"),
)


def narrow() -> str:
    """Plain steps of Llama-3.1-8B with narrow weights and caches."""
    use_configs()
    model = tsjax.model_preset(MODELS[0])
    lines = head(["weights", "cache", "chip", *(f"{length:,}" for length in LENGTHS)])
    for weights, cache in NARROW:
        one = dataclasses.replace(with_weights(model, weights, {}, ""), cache=cache)
        for chip in ("A100 80GB", "H100", "H200", "RTX 4090"):
            device = GPUS[CHIPS[chip]]
            costs, cells = estimated(one, device, 1), []
            for length in LENGTHS:
                bound = 1e3 * plain_bytes(one, length) / device.bytes_per_second
                found = f"{1e3 * costs.plain(length):.1f} ({bound:.1f}) ms"
                cells.append(found if has_room(one, device, length) else "no room")
            lines.append(row([f"`{weights}`", f"`{cache}`", chip, *cells]))
    note = (
        "Estimates, not measured: no GPU has run the kernels that read narrow weights and caches. "
        f"{MODELS[0]}, milliseconds of a plain step, in brackets the bandwidth bound. A narrow "
        f"weight is taken to need as long as {GPU.narrow_bytes} bytes at least, by the "
        "instructions that were counted."
    )
    return "\n".join([*lines, "", note])


def choices() -> str:
    """What is chosen for Llama-3.1-8B with heads, and what its verification takes."""
    use_configs()
    model = tsjax.model_preset(MODELS[0]).with_heads(HEADS)
    columns = ["drafts", "draft weights", "rows", "verification, in plain steps"]
    lines = head(["chip", "length", *columns])
    for chip in ("A100 80GB", "H100"):
        costs = estimated(model, GPUS[CHIPS[chip]], 1)
        for length in LENGTHS:
            method = choose(model, costs, length)
            promise = method.promise(model, costs, length)
            cost = (costs.of_pass(promise.width, length) + costs.overhead) / costs.plain(length)
            cells = [chip, f"{length:,}", _drafts(method), method.draft_weights]
            lines.append(row([*cells, str(promise.width), f"{cost:.2f}"]))
    note = (
        f"Estimates, not measured: {MODELS[0]} with {HEADS} heads. Rows: of the step that promises "
        "most, before the run has shown how often its drafts are right."
    )
    return "\n".join([*lines, "", note])


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
    use_configs()
    model = tsjax.model_preset(MODELS[0]).with_heads(HEADS)
    columns = ["tokens per step", "rows", "ms of a step", "ms of a plain step", "gain"]
    lines = head(["chip", "drafts are right", *columns])
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
            lines.append(row([chip, name, *cells, f"{plain * tokens / seconds:.2f}x"]))
    note = (
        f"Estimates, not measured: {MODELS[0]} with {HEADS} heads, one row of {LONG_RUN:,} tokens, "
        f"{_drafts(method)}, drafted in {method.draft_weights}. As assumed: heads as in "
        "TokenSwift's Table 3, passes and text as `tsjax/methods/model_drafts.py` and "
        "`likely_growth.py` have them. Less often: every draft, when all before it were right."
    )
    return "\n".join([*lines, "", note])


def errors(chip: str) -> str:
    """The formula against the figures of a GPU."""
    use_configs()
    document = measured(chip)
    model = tsjax.model_preset(document["model"]).with_heads(HEADS)
    costs = estimated(model, MEASURED[chip], 1)
    found: dict[tuple[str, int], dict[int, str]] = {}
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
        cell = f"{ms:.2f} ms, {1e3 * seconds / ms - 1:+.1%}"
        found.setdefault((kind, rows), {})[context] = cell
    contexts = list(dict.fromkeys(step["context"] for step in document["rows"]))
    lines = head(["pass", "rows", *(f"{context:,}" for context in contexts)])
    for (kind, rows), cells in sorted(found.items()):
        lines.append(row([kind, str(rows), *(cells.get(context, "") for context in contexts)]))
    note = (
        f"Measured on one {document['device']} ({document['date']}, jax "
        f"{document['versions']['jax']}), and how much the formula differs. Made by "
        f"{made_by(document)}."
    )
    return "\n".join([*lines, "", note])

# SPDX-License-Identifier: Apache-2.0
"""Accuracy of pruned prompts, task by task, beside what pruning saves.

    python -m benchmarks longcontext --model longcontext-model/checkpoint --out FOLDER

Every method reads the same prompts and answers greedily. The share of right tokens is a mean over
samples, with the 95% interval of a normal mean. What a method saves is counted in operations of the
prompt's layers, and in the share of tokens that each stage computed by the end of the answer. Four
parts, each of which goes on from what is in FOLDER already: a table of all methods and tasks, a
sweep of one cut (its layer and the share it keeps), what is computed as an answer grows, and the
passkey by its depth and the prompt's length. Plots of all are made at the end.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tsjax
from benchmarks import report
from benchmarks.longcontext.tasks import TASKS, Example, passkey, score
from benchmarks.ttft import SCHEDULES, schedule
from tsjax.lazy.settings import prompt_flops

BATCH = 10  # prompts that are read together
SLOTS = 64  # of which the cache has a multiple
TOLD = ("multi_query", "late_query")  # what a prompt's last token does not ask for all at once


class Rival(NamedTuple):
    """A way to read a prompt: what is made of it before, and how it is computed."""

    prefill: Any = "full"
    compress: Callable[[tsjax.Model, np.ndarray], np.ndarray] | None = None
    compress_layers: int = 0  # that read the whole prompt for it


def at(layers: int, part: float) -> int:
    """The last layer of this part of the model."""
    return max(1, round(part * layers))


def rivals(cfg: tsjax.ModelConfig, seed: int = 0) -> dict[str, Rival]:
    """The paper's method with several schedules, its ablation, its baselines, and newer ones."""
    layers, found = cfg.num_layers, {"full": Rival()}
    for name in SCHEDULES:
        keep = schedule(name, layers)
        found[f"LazyLLM, {name}"] = Rival(tsjax.LazyPrefill(keep=keep))
        found[f"no revival, {name}"] = Rival(tsjax.LazyPrefill(keep=keep, revive="never"))
        found[f"background, {name}"] = Rival(tsjax.LazyPrefill(keep=keep, revive="background"))
    for share in (0.5, 0.3):
        drop = tsjax.LazyPrefill(keep={0: share}, revive="never", scores="random", seed=seed)
        static = tsjax.LazyPrefill(keep={at(layers, 0.25): share}, revive="never")
        found[f"random drop, {share}"] = Rival(drop)
        found[f"static, {share}"] = Rival(static)
        compress = functools.partial(tsjax.compress_prompt, share=share, by="self_information")
        found[f"self-information, {share}"] = Rival("full", compress, layers)
        layer = at(layers, 0.4)
        compress = functools.partial(tsjax.compress_prompt, share=share, layer=layer)
        found[f"GemFilter, {share}"] = Rival("full", compress, layer)
    found["FastKV, 0.2"] = Rival(
        tsjax.LazyPrefill(keep={at(layers, 0.47): 0.2}, revive="never", window=8, pool=7, recent=8)
    )
    return found


def operations(cfg: tsjax.ModelConfig, rival: Rival, tokens: int, read: int) -> float:
    """How many times fewer than those of the full prefill."""
    cuts = rival.prefill.keep if isinstance(rival.prefill, tsjax.LazyPrefill) else ()
    whole = prompt_flops(cfg, tokens)
    before = whole * rival.compress_layers / cfg.num_layers
    return whole / (before + prompt_flops(cfg, read, cuts))


def answers(
    model: tsjax.Model, rival: Rival, examples: list[Example], tokens: int | None = None
) -> dict[str, Any]:
    """Scores [samples], and the means of what was computed when N tokens are known."""
    scores, computed, read = [], [], []
    for begin in range(0, len(examples), BATCH):
        batch = examples[begin : begin + BATCH]
        prompts = [one.prompt for one in batch]
        if rival.compress is not None:
            prompts = [rival.compress(model, prompt) for prompt in prompts]
        new = tokens or max(len(one.answer) for one in batch)
        longest = max(map(len, prompts))
        passes = 1 << (longest - 1).bit_length()  # at most what the prefill's passes cover
        needed = max(longest + new + tsjax.LazyPrefill().revive_rows, passes)
        result = tsjax.generate(
            model,
            [row.tolist() for row in prompts],
            max_new_tokens=new,
            prefill=rival.prefill,
            capacity=-(-needed // SLOTS) * SLOTS,  # empty slots take time on a CPU
        )
        pairs = zip(batch, result.tokens, strict=True)
        scores += [score(one.answer, said) for one, said in pairs]
        computed.append(result.stats.prompt_computed)
        read += [len(row) for row in prompts]
    stages = np.mean(computed, axis=0).tolist() if computed[0] else []
    return {"scores": scores, "computed": stages, "read": float(np.mean(read))}


def interval(scores) -> tuple[float, float]:
    """The mean, and half the width of its 95% interval."""
    values = np.asarray(scores)
    return float(values.mean()), float(1.96 * values.std() / np.sqrt(len(values)))


# --- the four parts --------------------------------------------------------------------------


DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a passkey in its prompt
GRID = ("full", "LazyLLM, halves", "LazyLLM, early", "random drop, 0.5")  # methods


def examples_of(task: str, length: int, samples: int, seed: int) -> list[Example]:
    rng = np.random.default_rng([seed, length])
    return [TASKS[task](rng, length) for _ in range(samples)]


def measure(model, rival: Rival, task: str, length: int, samples: int, seed: int) -> dict[str, Any]:
    found = answers(model, rival, examples_of(task, length, samples, seed))
    mean, half = interval(found["scores"])
    return {
        "task": task, "length": length, "samples": samples, "score": mean, "interval": half,
        "operations": operations(model.cfg, rival, length, round(found["read"])),
        "computed": found["computed"],
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    computed = " ".join(f"{share:.0%}" for share in row["computed"])
    print(
        f"{row['task']:18}{row['length']:6} {row['method']:22}{100 * row['score']:6.1f} +- "
        f"{100 * row['interval']:.1f}{row['operations']:6.2f}x  {computed}",
        flush=True,
    )


def sweep_rivals(cfg: tsjax.ModelConfig) -> dict[tuple[int, float], Rival]:
    """One cut each, everything else the paper's."""
    return {
        (layer, share): Rival(tsjax.LazyPrefill(keep={layer: share}))
        for layer in range(1, cfg.num_layers, 2)
        for share in (0.1, 0.3, 0.5, 0.7, 0.9)
    }


def growth(model, task: str, length: int, samples: int, seed: int) -> list[dict[str, Any]]:
    """The share of the prompt that each stage has computed when N tokens are known."""
    examples = examples_of(task, length, samples, seed)
    rival = Rival(tsjax.LazyPrefill(keep=schedule("halves", model.cfg.num_layers)))
    longest = max(len(example.answer) for example in examples)
    return [
        {
            "task": task,
            "length": length,
            "samples": samples,
            "tokens": tokens,
            "computed": answers(model, rival, examples, tokens)["computed"],
        }  # fmt: skip
        for tokens in range(1, longest + 1)
    ]


def passkey_grid(model, length: int, samples: int, seed: int) -> list[dict[str, Any]]:
    """The score by where the passkey stands, for some methods."""
    rows, methods = [], rivals(model.cfg)
    for depth in DEPTHS:
        rng = np.random.default_rng([seed, length])
        examples = [passkey(rng, length, depth=depth) for _ in range(samples)]
        for name in GRID:
            mean, half = interval(answers(model, methods[name], examples)["scores"])
            row = {"method": name, "length": length, "depth": depth, "samples": samples}
            rows.append({**row, "score": mean, "interval": half})
    return rows


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("longcontext", __doc__)
    parser.add_argument("--model", required=True, help="made by longcontext_model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256])
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--sweep-tasks", nargs="*", choices=TASKS, default=TOLD)
    parser.add_argument("--sweep-samples", type=int, default=200)
    parser.add_argument("--growth-tasks", nargs="*", choices=TASKS, default=TOLD)
    parser.add_argument("--growth-samples", type=int, default=100)
    parser.add_argument("--grid-lengths", type=int, nargs="*", default=[64, 128, 192, 256])
    parser.add_argument("--grid-samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if args.out is None:
        parser.error("--out is missing: the folder of the results and plots")

    model = tsjax.load(args.model)
    document = begun(args.out, {"model": model.cfg.to_dict(), "seed": args.seed})
    rows, length = document["rows"], args.lengths[0]
    for task in args.tasks:
        for length in args.lengths:
            for name, rival in rivals(model.cfg).items():
                if has(rows, task=task, length=length, samples=args.samples, method=name):
                    continue
                row = measure(model, rival, task, length, args.samples, args.seed)
                rows.append({"method": name, **row})
                show(rows[-1])
                report.save(document, args.out, NAME)
    sweep, length = document["sweep"], args.lengths[0]
    for task in args.sweep_tasks:
        for (layer, share), rival in sweep_rivals(model.cfg).items():
            place = {"layer": layer, "share": share}
            if has(sweep, task=task, length=length, samples=args.sweep_samples, **place):
                continue
            row = measure(model, rival, task, length, args.sweep_samples, args.seed)
            row |= {"method": f"cut {layer}, keep {share}", **place}
            sweep.append(row)
            show(row)
            report.save(document, args.out, NAME)
    for task in args.growth_tasks:
        if not has(document["growth"], task=task, length=length, samples=args.growth_samples):
            document["growth"] += growth(model, task, length, args.growth_samples, args.seed)
            report.save(document, args.out, NAME)
    for length in args.grid_lengths:
        if not has(document["grid"], length=length, samples=args.grid_samples):
            document["grid"] += passkey_grid(model, length, args.grid_samples, args.seed)
            report.save(document, args.out, NAME)
    report.save(document, args.out, NAME)
    from benchmarks.longcontext import plots  # needs matplotlib

    plots.draw(document, args.out)


NAME = "longcontext"
PARTS = ("rows", "sweep", "growth", "grid")


def has(rows: list[dict[str, Any]], **place: Any) -> bool:
    """Whether one of the results is of this place, and need not be measured again."""
    return any(place.items() <= row.items() for row in rows)


def begun(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The document that is in the folder, if it is of the same model and seed, or a new one."""
    file, empty = out / f"{NAME}.json", {name: [] for name in PARTS}
    if file.exists():
        document = json.loads(file.read_text())
        if {key: document.get(key) for key in settings} == json.loads(json.dumps(settings)):
            return {**empty, **document, **report.facts()}  # of the command that makes it whole
        raise SystemExit(f"{file} is of another model or seed: remove it, or give another --out")
    return {**report.facts(), **settings, **empty}

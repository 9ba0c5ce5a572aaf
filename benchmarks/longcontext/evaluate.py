# SPDX-License-Identifier: Apache-2.0
"""Accuracy and time of pruned prompts, task by task, with settings that other tasks have chosen.

    python -m benchmarks longcontext --model benchmarks/longcontext/checkpoint --out FOLDER

Half of the tasks choose: for each family of methods and each target, the best mean score of a few
candidates (rivals.py) wins, on prompts of their own. The other half is reported: prompt by prompt,
one at a time, all methods answer in turn, and what is scored is what was timed. Tasks that the
model does not master without pruning are left out of both, and named.

Besides, a sweep of one cut (its layer and the share it keeps), what is computed as an answer
grows, how sparse the attention is, and the figures. Everything goes on from what is in FOLDER
already, part by part (--parts): more --samples may be asked for later.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tsjax
from benchmarks import report
from benchmarks.longcontext.asking import answers
from benchmarks.longcontext.attention import sparsity
from benchmarks.longcontext.rivals import TARGETS, Rival
from benchmarks.longcontext.selection import (
    LONGEST_ANSWER,
    REPORTED,
    Document,
    develop,
    examples_of,
    forget_programs,
    has,
    measure_dense,
    scores_of,
)
from benchmarks.longcontext.tasks import TASKS
from benchmarks.longcontext.turns import measure
from benchmarks.longcontext.verdict import interval, verdict
from tsjax.files.fingerprint import model_fingerprint

NAME = "longcontext"
TOLD = ("multi_query", "late_query")  # what a prompt's last token does not ask for all at once
SHARES = (0.02, 0.1, 0.3, 0.6)  # of the sweep


def sweep_cuts(layers: int) -> list[tuple[int, float]]:
    return [(layer, share) for layer in range(1, layers, 2) for share in SHARES]


def sweep(model, document: Document, args, save: Callable[[], object]) -> None:
    """The score of one cut, by its layer and the share it keeps, as the paper revives."""
    for layer, share in sweep_cuts(model.cfg.num_layers):
        rival = Rival(tsjax.LazyPrefill(keep={layer: share}, revive="on_demand"))
        for task in args.sweep_tasks:
            place = {"task": task, "layer": layer, "share": share}
            place |= {"length": args.sweep_length, "samples": args.sweep_samples}
            if has(document["sweep"], **place):
                continue
            examples = examples_of(task, args.sweep_length, range(args.sweep_samples), args.seed)
            mean, half = interval(scores_of(model, rival, examples))
            document["sweep"].append(place | {"score": mean, "interval": half})
            print(f"cut {layer}, keep {share}, {task}: {100 * mean:.1f}", flush=True)
            save()
        forget_programs()


def growth(model, document: Document, args, save: Callable[[], object]) -> None:
    """The share of the prompt that each stage has computed when N tokens are known."""
    paper = tsjax.LazyPrefill(revive="on_demand").resolved(model.cfg, args.sweep_length)
    rival = Rival(paper)
    for task in args.growth_tasks:
        place = {"task": task, "length": args.sweep_length, "samples": args.growth_samples}
        if has(document["growth"], **place):
            continue
        examples = examples_of(task, args.sweep_length, range(args.growth_samples), args.seed)
        prompts = [example.prompt for example in examples]
        for tokens in range(1, max(len(example.answer) for example in examples) + 1):
            computed = answers(model, rival, prompts, tokens, LONGEST_ANSWER).computed
            document["growth"].append(place | {"tokens": tokens, "computed": computed})
        save()


def attend(model, document: Document, args, save: Callable[[], object]) -> None:
    """How sparse the attention of a prompt's last token is."""
    for task in args.growth_tasks:
        place = {"task": task, "length": args.attention_length, "samples": args.attention_samples}
        if has(document["attention"], **place):
            continue
        examples = examples_of(task, args.attention_length, range(place["samples"]), args.seed)
        found = sparsity(model, [example.prompt for example in examples])
        document["attention"].append(place | found)
        save()


# The development half first: a rule that follows from it can be measured on the other one.
STEPS = {
    "dense": measure_dense, "develop": develop, "sweep": sweep, "growth": growth,
    "attention": attend, "measure": measure,
}  # fmt: skip


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    model = tsjax.load(args.model, dtype="float32")
    document = begun(args.out, asked(model, args))
    save = functools.partial(report.save, document, args.out, NAME)
    for name in STEPS:
        if name in args.parts:
            STEPS[name](model, document, args, save)
    if not document["rows"]:
        return
    document["verdict"] = verdict(document)
    save()
    print(json.dumps(document["verdict"]))
    from benchmarks.longcontext import plots  # needs matplotlib

    plots.draw(document, args.out)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = report.parser_of(NAME, __doc__)
    parser.add_argument("--model", required=True, help="made by longcontext_model")
    parser.add_argument(
        "--samples", nargs="+", default=["4096:40", "8192:12"], metavar="LENGTH:SAMPLES",
        help="prompts of each reported task, by their length",
    )  # fmt: skip
    parser.add_argument("--tasks", nargs="+", choices=REPORTED, default=list(REPORTED))
    parser.add_argument("--targets", type=float, nargs="+", default=list(TARGETS))
    parser.add_argument("--develop-length", type=int, default=1024)
    parser.add_argument("--develop-samples", type=int, default=30)
    parser.add_argument(
        "--least-dense", type=float, default=0.95, help="tasks with a lower score are left out"
    )
    parser.add_argument("--sweep-length", type=int, default=1024, help="of the figures' prompts")
    parser.add_argument("--sweep-tasks", nargs="*", choices=TASKS, default=TOLD)
    parser.add_argument("--sweep-samples", type=int, default=40)
    parser.add_argument("--growth-tasks", nargs="*", choices=TASKS, default=TOLD)
    parser.add_argument("--growth-samples", type=int, default=20)
    parser.add_argument("--attention-length", type=int, default=4096)
    parser.add_argument("--attention-samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=STEPS, default=list(STEPS))
    args = parser.parse_args(argv)
    if args.out is None:
        parser.error("--out is missing: the folder of the results and plots")
    args.samples = dict(tuple(map(int, pair.split(":"))) for pair in args.samples)
    return args


PARTS = ("dense", "candidates", "rows", "sweep", "growth", "attention")
ASKED = ("seed", "targets", "develop_length", "develop_samples", "least_dense")


def asked(model: tsjax.Model, args: argparse.Namespace) -> dict[str, Any]:
    """What all parts of a document have in common."""
    of_model = {"model": model.cfg.to_dict(), "fingerprint": model_fingerprint(model)}
    return of_model | {key: getattr(args, key) for key in ASKED}


def begun(out: Path, settings: dict[str, Any]) -> Document:
    """The document that is in the folder, if it was asked the same of the same model, or a new
    one."""
    file, empty = out / f"{NAME}.json", {name: [] for name in PARTS}
    if file.exists():
        document = json.loads(file.read_text())
        wanted = json.loads(json.dumps(settings))
        other = [key for key in wanted if document.get(key) != wanted[key]]
        if not other:
            return {**empty, **document, **report.facts()}  # of the command that makes it whole
        raise SystemExit(
            f"{file} is of another {other[0].replace('_', ' ')}: remove it, or give another --out"
        )
    return {**report.facts(), **settings, **empty}

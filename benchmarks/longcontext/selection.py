# SPDX-License-Identifier: Apache-2.0
"""Which tasks a model masters, and which setting of a family is the best for a target.

The full prefill's score says which tasks are left out. The candidates of rivals.py are scored on
the tasks for development alone, on prompts that are not met again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import tsjax
from benchmarks.longcontext.asking import answers
from benchmarks.longcontext.rivals import FAMILIES, FULL, Rival, candidates, operations, solved
from benchmarks.longcontext.tasks import PART_TOKENS, QUERIES, TASKS, VALUE_TOKENS, Example, score
from benchmarks.longcontext.verdict import interval

DEVELOPMENT = ("key_values", "late_query", "common_word")
REPORTED = ("passkey", "multi_query", "long_copy", "variable_tracking")
HALVES = ("development", "reported")  # whose prompts have seeds of their own
LONGEST_ANSWER = max(PART_TOKENS, QUERIES * (1 + VALUE_TOKENS))

Document = dict[str, Any]


def examples_of(
    task: str, length: int, samples: range, seed: int, half: str = "development"
) -> list[Example]:
    """Each sample has a seed, so more of them may follow later."""
    return [
        TASKS[task](np.random.default_rng([seed, HALVES.index(half), length, index]), length)
        for index in samples
    ]


def scores_of(model: tsjax.Model, rival: Rival, examples: Sequence[Example]) -> list[float]:
    """Of prompts that are read together."""
    new = max(len(one.answer) for one in examples)
    prompts = [one.prompt for one in examples]
    said = answers(model, rival, prompts, new, LONGEST_ANSWER).tokens
    return [score(one.answer, row) for one, row in zip(examples, said, strict=True)]


def forget_programs() -> None:
    """Each program keeps memory, and hundreds of settings are compiled and never met again."""
    jax.clear_caches()
    gc.collect()


def has(rows: list[dict[str, Any]], **place: Any) -> bool:
    """Whether one of the results is of this place, and need not be measured again."""
    return any(place.items() <= row.items() for row in rows)


def measure_dense(model, document: Document, args, save: Callable[[], object]) -> None:
    """The full prefill's scores on prompts for development, which say what tasks are left out."""
    places = [(task, args.develop_length) for task in DEVELOPMENT]
    places += [(task, length) for length in args.samples for task in args.tasks]
    for task, length in places:
        if has(document["dense"], task=task, length=length):
            continue
        examples = examples_of(task, length, range(args.develop_samples), args.seed)
        mean, half = interval(scores_of(model, FULL, examples))
        row = {"task": task, "length": length, "score": mean, "interval": half}
        row["left_out"] = mean < args.least_dense
        document["dense"].append(row)
        left_out = " left out" if row["left_out"] else ""
        print(f"full, {task}, {length}: {100 * mean:.1f} +- {100 * half:.1f}{left_out}", flush=True)
        save()


def mastered(document: Document, tasks: Sequence[str], length: int) -> list[str]:
    kept = [row for row in document["dense"] if row["length"] == length and not row["left_out"]]
    return [task for task in tasks if has(kept, task=task)]


def develop(model, document: Document, args, save: Callable[[], object]) -> None:
    """The scores of all candidates on the tasks that choose."""
    length, cfg = args.develop_length, model.cfg
    tasks = mastered(document, DEVELOPMENT, length)
    if not tasks:
        raise SystemExit(
            "no task is left to choose settings on: of "
            f"{', '.join(DEVELOPMENT)} the full prefill masters none"
        )
    for name, family in FAMILIES.items():
        for target in args.targets:
            for shape, cuts in candidates(cfg, family, length, target):
                place = {"family": name, "target": target, "shape": listed(shape.powers)}
                if has(document["candidates"], **place):
                    continue
                saved = operations(cfg, family.build(cuts, 0), length)
                scores = {}
                for task in tasks:
                    examples = examples_of(task, length, range(args.develop_samples), args.seed)
                    found = []
                    for draw in range(min(family.draws, len(examples))):
                        rival = family.build(cuts, draw)
                        found += scores_of(model, rival, examples[draw :: family.draws])
                    scores[task] = float(np.mean(found))
                mean = float(np.mean(list(scores.values())))
                place |= {"cuts": listed(cuts), "operations": saved}
                document["candidates"].append(place | {"scores": scores, "score": mean})
                print(f"{name}, {target}x, {dict(cuts)}: {100 * mean:.1f}", flush=True)
                save()
                forget_programs()


def listed(pairs) -> list[list[float]]:
    """As JSON gives them back."""
    return [list(pair) for pair in pairs]


def chosen(document: Document, family: str, target: float) -> dict[str, Any] | None:
    """The candidate with the best mean score; of equal ones the first, which cuts latest."""
    rows = document["candidates"]
    rows = [row for row in rows if (row["family"], row["target"]) == (family, target)]
    return max(rows, key=lambda row: row["score"], default=None)


def settings_for(cfg: tsjax.ModelConfig, document: Document, length: int) -> list[dict[str, Any]]:
    """Family by family and target by target, the chosen shape with its shares for this length."""
    found: list[dict[str, Any]] = [{"family": "full", "target": None, "cuts": []}]
    for name, family in FAMILIES.items():
        if family.rule is not None:
            found += [
                {"family": name, "target": target, "cuts": listed(cuts)}
                for target, cuts in family.rule(cfg, length, document["targets"])
            ]
            continue
        shapes = family.shapes(cfg.num_layers)
        for target in document["targets"]:
            best = chosen(document, name, target)
            named = [shape for shape in shapes if best and listed(shape.powers) == best["shape"]]
            cuts = [solved(cfg, family, shape, length, target) for shape in named]
            found += [
                {"family": name, "target": target, "cuts": listed(one)} for one in cuts if one
            ]
        if family.falls_short and not has(found, family=name):
            cuts = shapes[0].cuts(0.0)
            found.append({"family": name, "target": None, "cuts": listed(cuts)})
    return found

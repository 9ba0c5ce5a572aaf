# SPDX-License-Identifier: Apache-2.0
"""Which tasks a model masters, and which setting of a family is the best for a target.

The full prefill's score says which tasks are left out. The candidates of rivals.py are scored on
the half for development alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.longcontext.asking import TOLD, ask, divergence
from experiments.longcontext.rivals import (
    FAMILIES,
    FULL,
    Asked,
    Rival,
    Setting,
    candidates,
    fixed_setting,
    operations,
    rival_of,
    solved,
)
from experiments.longcontext.tasks import Example, Sources, examples_of

Document = dict[str, Any]
Save = Callable[[], object]
ANSWER_ROOM = 128 + 64  # tokens of an answer, and rows of a revival

# The full prefill's log-probabilities of the first token, by the example: kept for one process.
_FULL: dict[tuple, dict[int, float]] = {}


def ways_to_ask(example: Example, length: int, share: float = 1.0) -> dict[str, Any]:
    """What all methods are asked with; the cache has the slots that the prompt may need. Answers
    are as long whatever they say, for their times to be of as many tokens."""
    slots = max(256, int(length * share) + 512) + ANSWER_ROOM
    return {
        "max_new_tokens": example.new_tokens, "eos_token_id": (), "logprobs": TOLD,
        "capacity": -(-slots // 64) * 64,
    }  # fmt: skip


def points_of(asked: Asked, rival: Rival, examples: Sequence[Example], length: int):
    """Each example's score and the first token's log-probabilities."""
    found = []
    for example in examples:
        how = ways_to_ask(example, length, rival.compress_share)
        reply = ask(asked.model, rival, example.prompt, **how)
        found.append((example.by(reply.text, example.answers), reply.likely))
    return found


def forget_programs() -> None:
    """Each program keeps memory, and hundreds of settings are compiled and never met again."""
    jax.clear_caches()
    gc.collect()


def has(rows: list[dict[str, Any]], **place: Any) -> bool:
    """Whether one of the results is of this place, and need not be measured again."""
    return any(place.items() <= row.items() for row in rows)


def measure_dense(asked: Asked, sources: dict[str, Sources], document: Document, args, save: Save):
    """The full prefill's scores on prompts for development, which say what tasks are left out."""
    for length in dict.fromkeys([args.develop_length, *args.samples]):
        for task in args.tasks:
            if has(document["dense"], task=task, length=length) or args.budget.is_used_up:
                continue
            samples = range(args.dense_samples)
            half = sources["development"]
            examples = examples_of(half, task, length, samples, args.seed, "development")
            scores = [score for score, _ in points_of(asked, FULL, examples, length)]
            row = {"task": task, "length": length, "score": float(np.mean(scores))}
            row["left_out"] = row["score"] < args.least_dense
            document["dense"].append(row)
            left_out = ", left out" if row["left_out"] else ""
            print(f"full, {task}, {length}: {100 * row['score']:.1f}{left_out}", flush=True)
            save()


def mastered(document: Document, tasks: Sequence[str], length: int) -> list[str]:
    kept = [row for row in document["dense"] if row["length"] == length and not row["left_out"]]
    return [task for task in tasks if has(kept, task=task)]


def develop(asked: Asked, sources: dict[str, Sources], document: Document, args, save: Save):
    """The scores of all candidates on the half that chooses."""
    length = args.develop_length
    tasks = mastered(document, args.tasks, length)
    if not tasks:
        raise SystemExit("no task is left to choose settings on: the full prefill masters none")
    examples = {
        task: examples_of(
            sources["development"], task, length, range(args.develop_samples), args.seed,
            "development",
        )
        for task in tasks
    }  # fmt: skip
    for family in args.families:
        for target in args.targets[FAMILIES[family].targets]:
            found = candidates(asked, family, length, target)
            for setting in found:
                if has(document["candidates"], **setting) or args.budget.is_used_up:
                    continue
                if len(found) > 1:
                    candidate_scored(asked, setting, examples, document, length)
                else:  # there is nothing to choose
                    document["candidates"].append({**setting, "score": None, "divergence": None})
                save()
                forget_programs()


def candidate_scored(asked: Asked, setting: Setting, examples, document: Document, length: int):
    rival, scores, diverged = rival_of(asked, setting), {}, []
    for task, some in examples.items():
        found = points_of(asked, rival, some, length)
        scores[task] = float(np.mean([score for score, _ in found]))
        for index, (_, likely) in enumerate(found):
            place = task, length, index
            if place not in _FULL:
                ((_, _FULL[place]),) = points_of(asked, FULL, some[index : index + 1], length)
            diverged.append(divergence(_FULL[place], likely))
    row = {
        **setting, "operations": operations(asked.model.cfg, rival, length), "scores": scores,
        "score": float(np.mean(list(scores.values()))), "divergence": float(np.mean(diverged)),
    }  # fmt: skip
    document["candidates"].append(row)
    said = f"{setting['family']}, {setting['target']}x, {setting['cuts']}"
    print(f"{said}: {100 * row['score']:.1f}, {row['divergence']:.3f} nats", flush=True)


def chosen(document: Document, family: str, target: float) -> dict[str, Any] | None:
    """The candidate with the best mean score; of equal ones the one that diverges least."""
    named = FAMILIES[family].chosen_as or family
    rows = [row for row in document["candidates"] if row["family"] == named]
    rows = [row for row in rows if row["target"] == target]
    if len(rows) < 2:
        return rows[0] if rows else None
    return max(rows, key=lambda row: (row["score"], -row["divergence"]))


def settings_for(asked: Asked, document: Document, args, length: int) -> list[Setting]:
    """Family by family and target by target, the chosen shape with its shares for this length."""
    found: list[Setting] = [{"family": "full", "target": None, "cuts": []}]
    for name in args.families:
        family = FAMILIES[name]
        if family.fixed:
            found.append(fixed_setting(name, asked, length))
            continue
        for target in document["targets"][family.targets]:
            best = chosen(document, name, target)
            if best is None:
                continue
            layers, block = [layer for layer, _ in best["cuts"]], best.get("block")
            shares = [share for _, share in best["cuts"]]
            for shape in family.shapes(asked):
                same = [layer for layer, _ in shape.powers] == layers
                if not same or dict(shape.more).get("block") != block:
                    continue
                setting = solved(asked, name, shape, length, target)
                if setting is not None and falls_alike(setting, shares):
                    found.append(setting)
                    break
    return found


def falls_alike(setting: Setting, shares: Sequence[float]) -> bool:
    """Whether shares fall as steeply as others, which tells shapes with the same layers apart."""
    mine = [share for _, share in setting["cuts"]]
    if len(mine) < 2:
        return True

    def power(some: Sequence[float]) -> float:
        return np.log(max(some[1], 1e-6)) / np.log(min(some[0], 0.999))

    at_floor = min(mine[1], shares[1]) <= 0.02
    return at_floor or abs(power(mine) - power(shares)) < 1

# SPDX-License-Identifier: Apache-2.0
"""What is reported: prompt by prompt, all settings answer in turn, with score and times.

Knows the chosen settings. The first call of each is not kept, and nor is one that compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.longcontext.asking import Reply, ask_compiled, capacity_of
from benchmarks.longcontext.rivals import FAMILIES, FULL, Rival, computed_share, operations
from benchmarks.longcontext.selection import (
    LONGEST_ANSWER,
    Document,
    examples_of,
    forget_programs,
    mastered,
    settings_for,
)
from benchmarks.longcontext.tasks import Example, score
from tsjax.lazy.settings import kept

MEASURED = ("scores", "first", "whole", "full_first", "full_whole")  # a number for each prompt


def measure(model, document: Document, args, save: Callable[[], object]) -> None:
    """Answers and times on the reported tasks, sample by sample."""
    for length, samples in args.samples.items():
        settings = settings_for(model.cfg, document, length)
        tasks = mastered(document, args.tasks, length)
        is_warm = False
        for index in range(samples):
            for task in tasks:
                rows = [row_of(model.cfg, document, task, length, one) for one in settings]
                missing = [row for row in rows if len(row["scores"]) == index]
                if not missing:
                    continue
                if not is_warm:
                    warm_up(model, lacking(settings, document, length, samples), length, args.seed)
                    is_warm = True
                this = range(index, index + 1)
                (example,) = examples_of(task, length, this, args.seed, "reported")
                take_turns(model, example, missing, length)
                save()
                print(f"{task}, {length}: sample {index + 1} of {samples}", flush=True)
        forget_programs()


def lacking(settings: list[dict[str, Any]], document: Document, length: int, samples: int):
    """The settings that no task has enough samples of, and the full prefill, which all take turns
    with. A call of another one that compiles is made again."""
    complete = [
        row for row in document["rows"] if row["length"] == length and len(row["scores"]) >= samples
    ]
    return [
        one
        for one in settings
        if one["family"] == "full" or not any(one.items() <= row.items() for row in complete)
    ]


def row_of(cfg, document: Document, task: str, length: int, setting: dict[str, Any]) -> dict:
    """The row that a setting has, or a new one."""
    place = {"task": task, "length": length, **setting}
    for row in document["rows"]:
        if place.items() <= row.items():
            return row
    rival, family = rival_of(setting, 0), FAMILIES.get(setting["family"])
    share = computed_share(cfg, rival)
    row = place | {
        "draws": family.draws if family else 1,
        "revive": rival.revive,
        "operations": operations(cfg, rival, length),
        "let_through": share,  # of the prompt, by the cuts of the prefill
        "computed_share": share,  # by the end of the answer; the mean over layers
        "computed": [],  # in each stage
        **{key: [] for key in MEASURED},
    }
    document["rows"].append(row)
    return row


def rival_of(setting: dict[str, Any], sample: int) -> Rival:
    if setting["family"] == "full":
        return FULL
    family = FAMILIES[setting["family"]]
    cuts = tuple((layer, share) for layer, share in setting["cuts"])
    return family.build(cuts, sample % family.draws)


def warm_up(model, settings: list[dict[str, Any]], length: int, seed: int) -> None:
    (example,) = examples_of("long_copy", length, range(1), seed)
    for setting in settings:
        family = FAMILIES.get(setting["family"])
        for draw in range(family.draws if family else 1):
            timed(model, rival_of(setting, draw), example, length)


def timed(model, rival: Rival, example: Example, length: int) -> Reply:
    room = capacity_of(kept(rival.compress_share, length), LONGEST_ANSWER)
    new = len(example.answer)
    return ask_compiled(model, rival, example.prompt, max_new_tokens=new, capacity=room)


def take_turns(model, example: Example, missing: list[dict[str, Any]], length: int) -> None:
    """One prompt, in all settings that lack it and by the full prefill. Every second one goes
    backwards, so that a drift of the machine's speed favours none."""
    index = len(missing[0]["scores"])
    others = [row for row in missing if row["family"] != "full"]
    calls = [FULL, *(rival_of(row, index) for row in others)]
    order = list(range(len(calls)))
    replies = {
        place: timed(model, calls[place], example, length)
        for place in (order if index % 2 == 0 else reversed(order))
    }
    full = replies[0]
    places = {id(row): place for place, row in enumerate(others, start=1)}
    for row in missing:
        place = places.get(id(row), 0)
        note(row, score(example.answer, replies[place].tokens), replies[place], full)
        if row["computed"]:
            row["computed_share"] = computed_share(model.cfg, calls[place], row["computed"])


def note(row: dict[str, Any], points: float, reply: Reply, full: Reply) -> None:
    """Adds a prompt to a row."""
    before = len(row["scores"])
    row["scores"].append(round(points, 4))
    for key, one in (("", reply), ("full_", full)):
        row[f"{key}first"].append(round(one.first_token_seconds, 4))
        row[f"{key}whole"].append(round(one.seconds, 4))
    if reply.computed:
        sums = before * np.asarray(row["computed"] or [0.0] * len(reply.computed))
        row["computed"] = ((sums + reply.computed) / (before + 1)).tolist()

# SPDX-License-Identifier: Apache-2.0
"""What is reported: prompt by prompt, all settings answer in turn, with score and times.

Knows the chosen settings. The first call of each is not kept, and nor is one that compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.longcontext.asking import Reply, ask_compiled, divergence
from experiments.longcontext.rivals import Asked, Setting, operations, rival_of
from experiments.longcontext.selection import (
    Document,
    Save,
    forget_programs,
    mastered,
    settings_for,
    ways_to_ask,
)
from experiments.longcontext.tasks import Example, Sources, examples_of

# A number for each prompt.
MEASURED = ("scores", "first", "whole", "full_first", "full_whole", "agrees", "divergence")


def measure(asked: Asked, sources: dict[str, Sources], document: Document, args, save: Save):
    """Answers and times on the reported half, sample by sample."""
    for length, samples in args.samples.items():
        settings = settings_for(asked, document, args, length)
        tasks = mastered(document, args.tasks, length)
        for index in range(samples):
            for task in tasks:
                rows = [row_of(asked, document, task, length, one) for one in settings]
                missing = [row for row in rows if len(row["scores"]) == index]
                if not missing or args.budget.is_used_up:
                    continue
                this = range(index, index + 1)
                (example,) = examples_of(
                    sources["reported"], task, length, this, args.seed, "reported"
                )
                take_turns(asked, example, missing, length)
                save()
                print(f"{task}, {length}: sample {index + 1} of {samples}", flush=True)
        forget_programs()


def row_of(asked: Asked, document: Document, task: str, length: int, setting: Setting) -> dict:
    """The row that a setting has, or a new one."""
    place = {"task": task, "length": length, **setting}
    for row in document["rows"]:
        if place.items() <= row.items():
            return row
    rival = rival_of(asked, setting)
    row = place | {
        "revive": rival.revive,
        "operations": operations(asked.model.cfg, rival, length),
        "computed": [],  # in each stage
        **{key: [] for key in MEASURED},
    }
    document["rows"].append(row)
    return row


def take_turns(asked: Asked, example: Example, missing: list[dict[str, Any]], length: int) -> None:
    """One prompt, in all settings that lack it and by the full prefill. Every second one goes
    backwards, so that a drift of the machine's speed favours none."""
    index = len(missing[0]["scores"])
    others = [row for row in missing if row["family"] != "full"]
    full: Setting = {"family": "full", "target": None, "cuts": []}
    order = list(enumerate([full, *others]))
    replies = {}
    for place, setting in order if index % 2 == 0 else reversed(order):
        rival = rival_of(asked, setting, index)
        how = ways_to_ask(example, length, rival.compress_share)
        replies[place] = ask_compiled(asked.model, rival, example.prompt, **how)
    places = {id(row): place for place, row in enumerate(others, start=1)}
    for row in missing:
        note(row, example, replies[places.get(id(row), 0)], replies[0])


def note(row: dict[str, Any], example: Example, reply: Reply, full: Reply) -> None:
    """Adds a prompt to a row."""
    before = len(row["scores"])
    row["scores"].append(round(example.by(reply.text, example.answers), 4))
    row["agrees"].append(int(reply.tokens[:1] == full.tokens[:1]))
    row["divergence"].append(round(divergence(full.likely, reply.likely), 5))
    for key, one in (("", reply), ("full_", full)):
        row[f"{key}first"].append(round(one.first_token_seconds, 4))
        row[f"{key}whole"].append(round(one.seconds, 4))
    if reply.computed:
        sums = before * np.asarray(row["computed"] or [0.0] * len(reply.computed))
        row["computed"] = ((sums + reply.computed) / (before + 1)).round(4).tolist()

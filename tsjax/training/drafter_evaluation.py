# SPDX-License-Identifier: Apache-2.0
"""How far a chain of drafts of a one-layer drafter comes along texts, by kind of text and by place.

Knows what a run would do with the drafts: it steps from what was right to the token after it.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tsjax.base.telling import doing
from tsjax.base.training_config import DrafterTraining
from tsjax.host import processes
from tsjax.methods.cost_model import Costs
from tsjax.model.drafter import DrafterWeights
from tsjax.training import drafter_loss
from tsjax.training.batches import StreamRows
from tsjax.training.tapped_texts import TappedTexts

OUTPUT_PLACES = (0, 256, 512, 1024, 2048, 4096, 6144)  # where evaluation begins a new row


def evaluated(
    drafter: DrafterWeights, texts: TappedTexts, settings: DrafterTraining, steps: int | None = None
) -> dict[str, Any]:
    """Of one pass over the texts, or of so many steps of it: over all and "by" kind and place,
    "tokens_per_step", the number of "chains", and "right": how often each draft was right where
    those before it were."""
    found = collections.defaultdict(lambda: np.zeros(settings.depth + 1))
    steps = texts.steps if steps is None else min(steps, texts.steps)
    with doing("evaluating", steps, "steps") as work:
        for number, (rows, pieces) in zip(range(steps), texts.rows(), strict=False):
            work.done(number)
            drafted: Any = processes.on_host(
                _drafted(drafter, texts.model.params.model, pieces, settings=settings,
                         cfg=texts.cfg)
            )  # fmt: skip
            _add(found, rows, texts.kinds, drafted)
    every = _told(found.pop("all"))
    return {**every, "by": {name: _told(sums) for name, sums in found.items() if sums[-1]}}


_drafted: Any = jax.jit(drafter_loss.drafted, static_argnames=("settings", "cfg"))


def _add(
    found: dict[str, np.ndarray], rows: StreamRows, kinds: tuple[str, ...],
    drafted: Any,
) -> None:  # fmt: skip
    """Sums, for all and by kind and place, of how often drafts up to each depth were right; a
    `Drafted` on the host says it."""
    right = np.concatenate([drafted.right, np.ones((*rows.tokens.shape, 1))], axis=2)
    met = stepped(drafted.right.sum(axis=2), drafted.counted)
    right, kind, place = right[met], rows.kind[met], rows.place[met] + 2
    found["all"] += right.sum(axis=0)
    for number, name in enumerate(kinds):
        found[name] += right[kind == number].sum(axis=0)
    for first, end in zip(OUTPUT_PLACES, (*OUTPUT_PLACES[1:], np.inf), strict=True):
        found[f"from {first}"] += right[(place >= first) & (place < end)].sum(axis=0)


def stepped(accepted: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Where steps begin [N, P], if at each place so many drafts are right."""
    met, places = np.zeros(counted.shape, bool), counted.shape[1]
    for row in range(len(met)):
        place = 0
        while place < places:
            met[row, place] = counted[row, place]
            place += 1 + (int(accepted[row, place]) if counted[row, place] else 0)
    return met


def expected_speedup(right: Sequence[float], costs: Costs, context: float) -> float:
    """How many times faster than plain decoding steps with a chain of drafts are, of as many as do
    best, by what passes and drafts take; 1 where none pays."""
    plain, best, tokens = costs.plain(context), 1.0, 1.0
    for drafts, survived in enumerate(itertools.accumulate(right, operator.mul), 1):
        tokens += survived
        drafting = drafts * costs.one_layer + costs.overhead
        best = max(best, tokens * plain / (costs.of_pass(drafts + 1, context) + drafting))
    return best


def _told(sums: np.ndarray) -> dict[str, Any]:
    """From how often all drafts were right up to each depth, and the number of chains."""
    chains = max(float(sums[-1]), 1.0)
    so_far = np.concatenate([[chains], sums[:-1]])
    right = so_far[1:] / np.maximum(so_far[:-1], 1.0)
    return {
        "tokens_per_step": 1 + float(sums[:-1].sum()) / chains,
        "right": right.tolist(),
        "chains": int(sums[-1]),
    }

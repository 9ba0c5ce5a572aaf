# SPDX-License-Identifier: Apache-2.0
"""Auto: the settings of TokenSwift that promise most on a machine, and none where none pay.

Knows the cost model. A wrong choice costs time, never tokens: a run gives it up when it finds fewer
tokens per step than a step costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from tsjax.config import ModelConfig
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.method import Autoregressive, Measured, Method, Sizes
from tsjax.decoding.tree import SOURCES
from tsjax.methods.cost_model import Chip, chip_of, expected_tokens, step_cost
from tsjax.methods.ngram import NGram
from tsjax.methods.tokenswift import TokenSwift

MOST_PASSES = 6
LEAST_GAIN = 1.05  # that drafts of the model must promise
STEPS_TO_JUDGE = 64  # of all rows together, before drafts may be given up
# On a CPU the partial cache is small and often chosen anew.
CPU_BUDGET, CPU_REFRESH = 512, 8
# Repetitions of the text, where rows cost time: a match has to be long, and then is drafted alone.
CPU_SUFFIX: dict[str, Any] = {"num_ngrams": 0, "suffix_length": 7, "suffix_match": 8}


@dataclasses.dataclass(frozen=True)
class Auto(Method):
    """Lets a cost model choose, which knows the chip, the model and the length of the run.

    A narrow tree for a CPU, a wide one for a GPU, and no drafts of the model where they cannot pay,
    from the start or as soon as a run shows it. Without them a CPU still looks for repetitions.
    """

    sources: ClassVar[tuple[str, ...]] = SOURCES

    def sizes(self, model: ModelConfig) -> Sizes:
        raise ValueError(
            "Auto() is not valid here: tsjax.generate chooses by the length of its run; "
            "tsjax.choose_method('tokenswift', model, context) does the same"
        )

    def next(self, measured: Measured) -> Method:
        current = measured.current
        if current is None:
            return choose(measured)
        if isinstance(current, Autoregressive) or measured.steps < STEPS_TO_JUDGE:
            return current
        pays = measured.tokens >= cost_of(current, measured) * measured.steps
        return current if pays else Autoregressive()


class Choice(NamedTuple):
    """Attributes:
    method: one that `DecodeConfig` takes.
    step_cost: the time of one of its steps, in plain steps.
    """

    method: Method
    step_cost: float


def cost_of(method: Method, measured: Measured) -> float:
    """The time of one of its steps, in plain steps."""
    decode = DecodeConfig(model=measured.model, method=method)
    chip = chip_of(measured.platform, measured.device_kind)
    return step_cost(decode, chip, measured.context, measured.batch)


def choose(measured: Measured) -> Method:
    """The fastest of all options; without drafts of the model unless they promise LEAST_GAIN."""
    chip = chip_of(measured.platform, measured.device_kind)

    def speed(option: Method) -> float:
        decode = DecodeConfig(model=measured.model, method=option)
        return expected_tokens(decode, chip) / cost_of(option, measured)

    drafting = _narrow(measured.model) if chip.rows else _wide(measured.model)
    best, without = max(drafting, key=speed), _without_model(chip)
    return best if speed(best) >= LEAST_GAIN * speed(without) else without


def _without_model(chip: Chip) -> Method:
    """What is left where drafts of the model cannot pay. On a CPU, to look for repetitions costs
    little beside a step, and one without any is a plain one; on a GPU it has not been measured."""
    return NGram(**CPU_SUFFIX, pass_widths=(1,)) if chip.rows else Autoregressive()


def _wide(model: ModelConfig) -> Iterator[Method]:
    """As the paper's, with one pass or more: rows are nearly free."""
    heads = (3,) * min(model.num_draft_heads, 3)
    for passes in range(1, MOST_PASSES + 1):
        yield TokenSwift(tree=(1,) * passes + heads, draft_passes=passes)
    if heads:
        yield TokenSwift(tree=heads, draft_from="verified_state")


def _narrow(model: ModelConfig) -> Iterator[Method]:
    """One path, as every row costs; a second, wider program serves steps that repeat the text."""

    def chain(depth: int, source: str, passes: int) -> Method:
        return TokenSwift(
            tree=(1,) * depth,
            draft_from=source,
            draft_passes=passes,
            draft_budget=CPU_BUDGET,
            draft_refresh=CPU_REFRESH,
            draft_rest=True,
            suffix_alone=CPU_SUFFIX["suffix_match"],
            pass_widths=(1 + depth,),
            **CPU_SUFFIX,
        )

    for passes in range(1, MOST_PASSES + 1):
        yield chain(passes, "partial_cache", passes)
    if model.num_draft_heads:
        yield chain(model.num_draft_heads, "verified_state", 1)

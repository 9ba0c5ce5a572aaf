# SPDX-License-Identifier: Apache-2.0
"""Auto: the method that promises the fewest seconds per token on a machine, plain decoding too.

Knows the cost model. A wrong choice costs time, never tokens: a run goes on with plain decoding
when its drafts take longer per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from tsjax.config import ModelConfig
from tsjax.decoding.method import Autoregressive, Measured, Method, Sizes
from tsjax.decoding.tree import SOURCES
from tsjax.methods.cost_model import (
    Costs,
    as_costs,
    device_of,
    estimated,
    seconds_per_token,
    step_seconds,
)
from tsjax.methods.ngram import NGram
from tsjax.methods.tokenswift import TokenSwift

MOST_PASSES = 6
FEW_PASSES = 2  # up to which many shapes of trees are offered
STEPS_TO_JUDGE = 64  # of all rows together, before a run may go on with another method
CLEARLY = 1.1  # so many times as long per token, a run goes on with the other one
# A run that has gone on with plain decoding tries its drafts again, as a text may have changed.
# What that may cost of its time; how long a trial takes, beside the steps that it is judged by; and
# the share of a trial that is lost at least, as the drafts' memory is made anew.
TRIALS_COST, TRIAL_SECONDS, LEAST_LOST = 0.02, 0.4, 0.25
# Where rows cost time: a repetition has to be long, and then is drafted alone.
LONG_REPEATS: dict[str, Any] = {"num_ngrams": 0, "suffix_length": 7, "suffix_match": 8}
# A few n-grams beside them, and passes for steps that find few of all n-grams.
FEW_NGRAMS: dict[str, Any] = {**LONG_REPEATS, "num_ngrams": 5}
WIDTHS = (16, 32, 64)
# Children of each node, for heads: paths and trees of few nodes up to the paper's tree.
SHAPES = ((1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 2, 2), (3, 2, 1), (3, 3, 3))
EVEN = ((1, 1, 1), (2, 2, 2), (3, 3, 3))
# A small partial cache that is often chosen anew, and the paper's.
PARTIAL_CACHES: tuple[dict[str, Any], ...] = (
    {"draft_budget": 512, "draft_refresh": 8, "draft_rest": True},
    {},
)


@dataclasses.dataclass(frozen=True)
class Auto(Method):
    """Chooses by what the parts of a step take on this machine, for this model and length of run.

    A narrow path where rows cost time, a wide tree where they are nearly free, repetitions of the
    text alone or plain decoding where drafts of the model cannot pay. A run that takes longer per
    token than plain decoding goes on with it. It returns where that turns out to be slower, and
    tries its drafts again from time to time, for at most a fiftieth of its time.

    Attributes:
      costs: the table to choose by; None measures one on the device, at the first run of a model
        on a machine, and keeps it in the user's cache folder.
    """

    sources: ClassVar[tuple[str, ...]] = SOURCES

    costs: Costs | None = None

    def __post_init__(self):
        if self.costs is not None:
            object.__setattr__(self, "costs", as_costs(self.costs))

    @property
    def wants_costs(self) -> bool:
        return self.costs is None

    def sizes(self, model: ModelConfig) -> Sizes:
        raise ValueError(
            "Auto() is not valid here: tsjax.generate chooses by the length of its run; "
            "tsjax.choose_method('tokenswift', model, context) does the same"
        )

    def next(self, measured: Measured) -> Method:
        current = measured.current
        if current is None:
            costs = self._costs(measured)
            costs = costs if measured.int8_fits else costs._replace(int8=None)
            return choose(measured.model, costs, measured.context)
        if measured.steps < STEPS_TO_JUDGE or not measured.tokens:
            return current
        other = measured.other
        if other is None:
            if isinstance(current, Autoregressive):
                return current
            other = Autoregressive(), self._plain_seconds(current, measured)
        method, seconds = other
        slower = measured.seconds > CLEARLY * seconds * measured.tokens
        retries = isinstance(current, Autoregressive) and _trial_is_cheap(measured, seconds)
        return method if slower or retries else current

    def _costs(self, measured: Measured) -> Costs:
        device = device_of(measured.platform, measured.device_kind)
        return self.costs or measured.costs or estimated(measured.model, device, measured.batch)

    def _plain_seconds(self, current: Method, measured: Measured) -> float:
        """Of a plain step. An estimate has the proportions alone: the run has the seconds."""
        costs, context = self._costs(measured), measured.context
        plain = costs.plain(context)
        if costs.origin == "measured":
            return plain
        expected = step_seconds(current, measured.model, costs, context) * measured.steps
        return plain * measured.seconds / expected


def _trial_is_cheap(measured: Measured, seconds: float) -> bool:
    """Whether plain decoding has lasted so long that drafts, of which a token took `seconds` when
    they were given up, may be tried again."""
    trial = measured.batch * TRIAL_SECONDS + 2 * STEPS_TO_JUDGE * seconds  # of two tokens each
    lost = max(1 - measured.seconds / (seconds * measured.tokens), LEAST_LOST)
    return trial * lost <= TRIALS_COST * measured.seconds


class Choice(NamedTuple):
    """Attributes:
    method: one that `DecodeConfig` takes.
    step_cost: the time of one of its steps, in plain steps.
    costs: the table that says so.
    """

    method: Method
    step_cost: float
    costs: Costs


def choose(model: ModelConfig, costs: Costs, context: float) -> Method:
    """The option with the fewest expected seconds per token; of equal ones the simplest.

    What a text gives is not known yet: one whose steps clearly take longer than plain ones has to
    be clearly better than plain decoding.
    """
    most = CLEARLY * costs.plain(context)

    def seconds(option: Method) -> float:
        found = seconds_per_token(option, model, costs, context)
        risky = step_seconds(option, model, costs, context) > most
        return found * CLEARLY if risky else found

    return min(options(model, in_int8=costs.int8 is not None), key=seconds)


def options(model: ModelConfig, *, in_int8: bool = False) -> Iterator[Method]:
    """What can be chosen, simple ones first; `in_int8` also with a copy of the model in int8."""
    for option in _options(model):
        yield option
        # For heads alone only the unembedding would be read of a whole copy.
        if in_int8 and isinstance(option, TokenSwift) and option.draft_from == "partial_cache":
            yield dataclasses.replace(option, draft_weights="int8")


def _options(model: ModelConfig) -> Iterator[Method]:
    yield Autoregressive()
    yield NGram(**LONG_REPEATS, pass_widths=(1,))
    yield NGram()
    yield NGram(**FEW_NGRAMS, pass_widths=WIDTHS[:1])
    heads = model.num_draft_heads
    for passes in range(1, MOST_PASSES + 1):
        for cache in PARTIAL_CACHES:
            for tree in _trees(passes, heads):
                yield from _with_text(tree, draft_passes=passes, **cache)
    for tree in _trees(0, heads)[1:]:
        yield from _with_text(tree, draft_from="verified_state")


def _trees(passes: int, heads: int) -> list[tuple[int, ...]]:
    """One token for each pass, and then branches for each head, at most three deep."""
    path, shapes = (1,) * passes, SHAPES if passes <= FEW_PASSES else EVEN
    cut = dict.fromkeys(shape[:heads] for shape in shapes)
    return [path, *(path + shape for shape in cut if heads)]


def _with_text(tree: tuple[int, ...], **settings: Any) -> Iterator[Method]:
    """With long repetitions in a second, wider program; also with few n-grams; with many n-grams
    and any repetition, in one program or in several."""
    rows = 1 + _nodes(tree)
    narrow = TokenSwift(tree=tree, suffix_alone=8, **LONG_REPEATS, **settings)
    yield dataclasses.replace(narrow, pass_widths=(rows,))
    yield TokenSwift(tree=tree, **settings)
    yield dataclasses.replace(narrow, **FEW_NGRAMS, pass_widths=_widths(rows))
    yield TokenSwift(tree=tree, pass_widths=_widths(rows), **settings)


def _widths(rows: int) -> tuple[int, ...]:
    """Those that hold a tree of N rows."""
    return tuple(width for width in WIDTHS if width >= rows)


def _nodes(tree: tuple[int, ...]) -> int:
    count, nodes = 0, 1
    for children in tree:
        nodes *= children
        count += nodes
    return count

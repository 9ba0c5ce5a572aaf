# SPDX-License-Identifier: Apache-2.0
"""Auto: drafts that pay on a machine, for a model, a length and a text; else plain decoding.

Knows what the drafting methods promise and what they kept in this run. A wrong choice costs time,
never tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from tsjax.config import ModelConfig
from tsjax.decoding.method import Autoregressive, Measured, Method, Sizes
from tsjax.errors import BadValue
from tsjax.methods.cost_model import Costs, as_costs
from tsjax.methods.devices import costs_for
from tsjax.methods.likely_sources import LIKELY_SOURCES
from tsjax.methods.likely_tree import LikelyTree
from tsjax.methods.ngram import LONG_MATCH

SHORT_RUN = 256  # new tokens: no more are decoded plainly, as compiling would take longer
STEPS_TO_JUDGE = 64  # of all rows together, before a run may go on with another method
BETTER = 1.02  # a run goes on with another method where the present one takes 2% more per token
LEAST_FOUND = 1.02  # tokens that a step with drafts has to find
PROMISES = 1.05  # passes have to promise to be 5% faster than drafts from the text alone
# Plain decoding is tried early, unless drafts are clearly faster than it takes by the table.
CLEARLY_FASTER = 0.85
# Other methods are tried again, as text and context change: what that may cost of a run's time, how
# many steps a trial takes, and the share of it that is lost at least. A text that begins to repeat
# itself is worth more: what a trial may cost then.
TRIALS_COST, TRIAL_STEPS, LEAST_LOST = 0.01, 96, 0.15
TRIALS_COST_OF_REPEATS = 0.1
PASSES = (1, 2, 4, 6)
# Where rows cost time: of more than 8 even right drafts save hardly anything.
NARROW: dict[str, Any] = {"width": 8, "pass_widths": (1, 2, 3, 4, 6), "places": 8}
WIDE: dict[str, Any] = {"width": 64, "pass_widths": (1, 16, 32)}
# Small partial caches that see the rest summed up, and the paper's.
PARTIAL_CACHES: tuple[dict[str, Any], ...] = (
    {"draft_budget": 512, "draft_refresh": 8},
    {"draft_budget": 512, "draft_refresh": 32},
    {"draft_budget": 4096, "draft_refresh": None, "draft_rest": False},
)


@dataclasses.dataclass(frozen=True)
class Auto(Method):
    """Chooses by what the parts of a step take on this machine, and by what drafts find in a run.

    A LikelyTree drafts from the text, and from the model where its passes promise to pay. Whether
    that takes less time per token than plain decoding the run itself shows: it goes on with what
    did, and tries the other again from time to time, for at most a hundredth of its time, or a
    tenth where the text begins to repeat itself. A run of at most 256 new tokens is decoded
    plainly, unless there is a corpus.

    Attributes:
      costs: the table to choose by; None measures one on the device, at the first run of a model
        on a machine, and keeps it in the user's cache folder.
    """

    sources: ClassVar[tuple[str, ...]] = LIKELY_SOURCES
    reads_corpus: ClassVar[bool] = True
    chooses: ClassVar[bool] = True

    costs: Costs | None = None

    def __post_init__(self):
        if self.costs is not None:
            object.__setattr__(self, "costs", as_costs(self.costs))

    @property
    def wants_costs(self) -> bool:
        return self.costs is None

    def sizes(self, model: ModelConfig) -> Sizes:
        raise BadValue(
            "Auto() is not valid here: tsjax.generate chooses by the length of its run; "
            "tsjax.choose_method('auto', model, context) does the same"
        )

    def next(self, measured: Measured) -> Method:
        costs = self.costs or costs_for(measured)
        costs = costs if measured.int8_fits else costs._replace(int8=None)
        if measured.current is None:
            if is_short(measured.new_tokens):
                return Autoregressive()
            return choose(measured.model, costs, measured.context, corpus=measured.corpus)
        return follow(measured, costs)


def is_short(new_tokens: int | None) -> bool:
    """Whether a run is too short for drafts to be worth their compiling and measuring."""
    return new_tokens is not None and new_tokens <= SHORT_RUN


def follow(measured: Measured, costs: Costs) -> Method:
    """The method that goes on, by what each took in plain steps per token."""
    current = measured.current
    assert current is not None
    if measured.steps < STEPS_TO_JUDGE or not measured.tokens:
        return current
    plain = Autoregressive()
    if current != plain and measured.tokens < LEAST_FOUND * measured.steps:
        return plain  # a step with drafts takes no less than a plain one, whatever the clock says
    here = measured.seconds / measured.tokens / costs.plain(measured.context)
    known = {
        tried.method: tried.seconds / costs.plain(tried.context)
        for tried in measured.tried
        if tried.method != current
        and (tried.method == plain or tried.tokens_per_step >= LEAST_FOUND)
    }
    best = min(known, key=known.__getitem__, default=current)
    if best != current and here > BETTER * known[best]:
        return best
    is_measured = costs.origin == "measured"
    if current != plain and plain not in known and (here > CLEARLY_FASTER or not is_measured):
        return plain
    repeats = current == plain and measured.repeats >= LONG_MATCH
    most = (TRIALS_COST_OF_REPEATS if repeats else TRIALS_COST) * measured.since
    trial = TRIAL_STEPS * measured.batch * here * costs.plain(measured.context)
    if trial * LEAST_LOST > most:
        return current
    for rival in _rivals(measured, costs):
        lost = max(known.get(rival, 0) / here - 1, LEAST_LOST)
        if rival != current and trial * lost <= most:
            return rival
    return current


def _rivals(measured: Measured, costs: Costs) -> Iterator[Method]:
    """What might be better by now. Trees stay as deep as they were, as the buffers are; and only
    before a run is it known whether there is memory for a copy in int8."""
    model = measured.model
    known = [tried.method for tried in measured.tried]
    drafts = known if measured.current is None else [*known, measured.current]
    depth = max((method.sizes(model).depth for method in drafts), default=0)
    promising = choose(model, costs, measured.context, corpus=measured.corpus)
    has_copy = any(method.wants_int8 for method in drafts)
    if promising.sizes(model).depth <= depth and (has_copy or not promising.wants_int8):
        yield promising
    yield from known


class Choice(NamedTuple):
    """Attributes:
    method: one that `DecodeConfig` takes.
    step_cost: the time of one of its steps, in plain steps; None where what a step of it finds and
      takes is not known, see `Method.promise`.
    costs: the table that says so.
    """

    method: Method
    step_cost: float | None
    costs: Costs


def choose(model: ModelConfig, costs: Costs, context: float, *, corpus: bool = False) -> LikelyTree:
    """The option with the fewest expected seconds per token; of equal ones the simplest.

    What a text repeats is not known yet, and to look costs little: without passes that pay, drafts
    come from the text alone.
    """
    text, *others = options(model, costs, corpus=corpus)

    def seconds(option: LikelyTree) -> float:
        return option.promise(model, costs, context).seconds_per_token

    best = min(others, key=seconds)
    return best if seconds(best) * PROMISES < seconds(text) else text


def options(model: ModelConfig, costs: Costs, *, corpus: bool = False) -> Iterator[LikelyTree]:
    """What can be chosen, drafts from the text alone first."""
    rows_cost = costs.of_pass(8, 0) > 1.5 * costs.of_pass(1, 0)
    sizes = {**(NARROW if rows_cost else WIDE), "corpus": corpus, "costs": costs}
    yield LikelyTree(**sizes)
    if model.num_draft_heads:
        yield LikelyTree(heads=True, **sizes)
    for cache in PARTIAL_CACHES:
        for passes in PASSES:
            for heads in (False, True) if model.num_draft_heads else (False,):
                found = LikelyTree(draft_passes=passes, heads=heads, **cache, **sizes)
                yield found
                if costs.int8 is not None:
                    yield dataclasses.replace(found, draft_weights="int8")

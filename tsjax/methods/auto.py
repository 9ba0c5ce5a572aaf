# SPDX-License-Identifier: Apache-2.0
"""Auto: drafts that pay on a machine, for a model, a length and a text; else plain decoding.

Knows what the drafting methods promise and what they kept in this run. A wrong choice costs time,
never tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from tsjax.base.errors import BadValue
from tsjax.base.model_config import ModelConfig
from tsjax.decoding.method import PLAINLY, Measured, Method, Sizes
from tsjax.methods.cost_model import Costs, as_costs
from tsjax.methods.devices import costs_for
from tsjax.methods.likely_sources import LIKELY_SOURCES
from tsjax.methods.likely_tree import LikelyTree
from tsjax.methods.ngram import LONG_MATCH

SHORT_RUN = 256  # new tokens: for no more the seconds are not measured, but said by a formula
STEPS_TO_JUDGE = 64  # of all rows together, before a run may go on with another method
BETTER = 1.02  # a run goes on with another method where the present one takes 2% more per token
PROMISES = 1.05  # passes, and what is unknown, have to promise to be 5% faster
UNSURE = 0.15  # so much less may plain steps take than the table says; and so much may a trial lose
# What was slower is tried again, as text and context change: for how many steps, and what share of
# the run's time that may cost. A text that begins to repeat itself is worth more, unless it is what
# is drafted from already.
TRIAL_STEPS, TRIALS_COST, TRIALS_COST_OF_REPEATS = 96, 0.01, 0.1
DRIFTS = 1.1  # plain steps that one took in an earlier run: a machine's speed drifts
PLAIN_STEPS = 16  # of a row, after which it is known what a plain one takes
MOVES_FOR = 2  # times the seconds of moving: answers end before they were to, and texts change
WIDEST, LOOKED_AT = 64, 8  # rows of a tree; earlier places of the last token
PASSES = (1, 2, 4)
DRAFTS = (2, 4)  # in a row, of a one-layer drafter
# Small partial caches that see the rest summed up, and the paper's.
PARTIAL_CACHES: tuple[dict[str, Any], ...] = (
    {"draft_budget": 512, "draft_refresh": 8},
    {"draft_budget": 512, "draft_refresh": 32},
    {"draft_budget": 4096, "draft_refresh": None, "draft_rest": False},
)


@dataclasses.dataclass(frozen=True)
class Auto(Method):
    """Chooses by what the parts of a step take on this machine, and by what drafts find in a run.

    A run begins with a LikelyTree that drafts from the text, which costs little; plainly, until its
    program is there and pays. The seconds of its tokens then say whether plain decoding, or passes
    of the model that draft, would take less: what promises clearly more is tried, and what takes
    the least goes on.

    Attributes:
      costs: the table to choose by; None for the one that was measured on the device and kept in
        the user's cache folder. Until there is one a formula says the seconds, and a long run
        measures them between its chunks of steps.
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
            "tsjax.costs.choose_method('auto', model, context) does the same"
        )

    def next(self, measured: Measured) -> Method:
        costs, plain = self.costs or costs_for(measured), measured.plain
        costs = costs if plain is None else costs.with_plain(plain.seconds, plain.context)
        costs = costs if measured.int8_fits else costs._replace(int8=None)
        if measured.current is None:
            return opening(measured.model, costs, measured.context, corpus=measured.corpus)
        waited = plain is not None or measured.steps >= PLAIN_STEPS * measured.batch
        if measured.first is not None and waited and begins_to_pay(measured, costs):
            return measured.first
        return follow(measured, costs)


def begins_to_pay(measured: Measured, costs: Costs) -> bool:
    """Whether a run that goes on plainly gains by the method that it was to begin with, and more
    than moving to it takes: by what that one promises, or by what the text has foretold so far."""
    assert measured.first is not None
    model, context, right = measured.model, measured.context, measured.foretold
    plain = costs.plain(context)
    promise = measured.first.promise(model, costs, context)
    promised = [plain if promise is None else promise.seconds_per_token]
    for width in measured.first.sizes(model).pass_widths:
        tokens = sum(right**depth for depth in range(width))
        promised.append((costs.of_pass(width, context) + costs.overhead) / tokens)
    return (plain - min(promised)) * measured.tokens_left > MOVES_FOR * measured.moving


def is_short(new_tokens: int | None) -> bool:
    """Whether a run is too short to measure for."""
    return new_tokens is not None and new_tokens <= SHORT_RUN


def follow(measured: Measured, costs: Costs) -> Method:
    """The method that goes on, by what each took, or promises to take, in plain steps per token."""
    current, plain_step = measured.current, costs.plain(measured.context)
    assert current is not None
    if measured.steps < STEPS_TO_JUDGE or not measured.tokens:
        return current
    here = measured.seconds / measured.tokens / plain_step
    known = {
        tried.method: tried.seconds / costs.plain(tried.context)
        for tried in measured.tried
        if tried.method != current
    }
    if measured.plain is not None and current != PLAINLY and PLAINLY not in known:
        known[PLAINLY] = DRIFTS
    best = min(known, key=known.__getitem__, default=current)
    if best != current and here > BETTER * known[best]:
        return best

    trial = TRIAL_STEPS * measured.batch * here * plain_step
    first = set() if measured.first is None else {measured.first}
    promised = _promises(measured, costs, {current, *known} | first)
    most = min(promised, key=promised.__getitem__, default=current)
    if here > PROMISES * promised.get(most, here):
        saved = (here - promised[most]) * plain_step * measured.tokens_left
        if saved > measured.compiling + UNSURE * trial:
            return most

    repeats = measured.repeats >= LONG_MATCH and not current.drafts_from_text_alone
    budget = (TRIALS_COST_OF_REPEATS if repeats else TRIALS_COST) * measured.since
    for rival, seconds in known.items():
        if trial * max(seconds / here - 1, UNSURE) <= budget:
            return rival
    return current


def _promises(measured: Measured, costs: Costs, known: set[Method]) -> dict[Method, float]:
    """What is unknown, and the plain steps that a token of it is expected to take. Passes are known
    once any were tried: as the context grows, others of them promise a little more."""
    model, context = measured.model, measured.context
    found = {}
    if is_short(measured.new_tokens):
        return found
    if PLAINLY not in known:  # what a step of drafts takes beside its passes, no table knows
        found[PLAINLY] = 1 - UNSURE
    if all(method == PLAINLY or method.drafts_from_text_alone for method in known):
        drafts = best_with_passes(model, costs, context, corpus=measured.corpus)
        deepest = max(one.sizes(model).depth for one in known)  # as the buffers are
        if drafts not in known and drafts.sizes(model).depth <= deepest:
            seconds = drafts.promise(model, costs, context).seconds_per_token
            found[drafts] = seconds / costs.plain(context)
    return found


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
    """What promises most: passes of the model where it is 5% more than from the text alone."""
    begun = opening(model, costs, context, corpus=corpus)
    drafts = best_with_passes(model, costs, context, corpus=corpus)

    def seconds(option: LikelyTree) -> float:
        return option.promise(model, costs, context).seconds_per_token

    return drafts if seconds(drafts) * PROMISES < seconds(begun) else begun


def opening(
    model: ModelConfig, costs: Costs, context: float, *, corpus: bool = False
) -> LikelyTree:
    """Drafts from the text, and from heads or a drafter where they promise more."""
    return _best(model, costs, context, corpus=corpus)


def best_with_passes(
    model: ModelConfig, costs: Costs, context: float, *, corpus: bool = False
) -> LikelyTree:
    """Drafts from passes of the model beside them."""
    return _best(model, costs, context, corpus=corpus, passes=True)


def _best(model: ModelConfig, costs: Costs, context: float, **how: bool) -> LikelyTree:
    """The fewest expected seconds per token; of equal ones the simplest."""
    found = options(model, costs, context, **how)
    return min(found, key=lambda one: one.promise(model, costs, context).seconds_per_token)


def options(
    model: ModelConfig, costs: Costs, context: float, *, corpus: bool = False, passes: bool = False
) -> Iterator[LikelyTree]:
    """What can be chosen: drafts from the text and from heads or a drafter, or with `passes` of the
    model too."""
    widths = costs.widths(context, WIDEST)
    sizes: dict[str, Any] = dict(width=widths[-1], pass_widths=widths[:-1], places=LOOKED_AT)
    sizes |= {"corpus": corpus, "costs": costs}
    heads = (False, True) if model.num_draft_heads else (False,)
    if not passes:
        yield from (LikelyTree(heads=one, **sizes) for one in heads)
        if model.drafter is not None:
            yield from (LikelyTree(drafter=number, **sizes) for number in DRAFTS)
        return
    for cache, number, one in itertools.product(PARTIAL_CACHES, PASSES, heads):
        found = LikelyTree(draft_passes=number, heads=one, **cache, **sizes)
        yield found
        if costs.int8 is not None:
            yield dataclasses.replace(found, draft_weights="int8")

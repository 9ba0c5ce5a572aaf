# SPDX-License-Identifier: Apache-2.0
"""How LikelyTree's tree grows as far as it pays, and what its steps teach it.

Knows prices in seconds, and how likely drafts are. Does not know where they come from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.struct
import jax.numpy as jnp

from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Bool, Float, Int
from tsjax.decoding.state import DecodeState
from tsjax.decoding.tree import first_with, shared
from tsjax.methods.cost_model import Costs
from tsjax.methods.history import NgramTable
from tsjax.methods.likely_sources import grid
from tsjax.methods.model_drafts import (
    PASS_IS_RIGHT,
    PASS_WITH_REST_IS_RIGHT,
    drafts_are_right,
    heads_are_right,
)
from tsjax.methods.ngram import TEXT_IS_RIGHT
from tsjax.methods.on_partial_cache import OnPartialCache
from tsjax.methods.one_layer import LayerMemory
from tsjax.methods.partial_cache import DraftCache
from tsjax.methods.paths import Paths
from tsjax.methods.rates import KINDS, NO_DRAFT, Rates, chances

FORGETS = 0.98  # of a pace the share that is left after a step
# Assumed before a run: of the share that the best candidate of a pass leaves, what the others get;
# that of the one-layer drafter, as it was for SmolLM2; and of what the three best candidates of a
# head get, the share of each.
OTHERS_OF_PASS, OTHERS_OF_LAYER, RANK_IS_RIGHT = (0.4, 0.2), (0.17, 0.07), (0.7, 0.18, 0.12)
FAR_CONTEXT = float(2**20)


class Offered(NamedTuple):
    """Paths that a step may draft: their tokens, and the kind of each, NO_DRAFT where there is
    none."""

    tokens: Int[Array, "B R J"]
    kinds: Int[Array, "B R J"]


def nothing_offered(batch: int, paths: int, depth: int) -> Offered:
    shape = (batch, paths, depth)
    return Offered(jnp.zeros(shape, jnp.int32), jnp.full(shape, NO_DRAFT, jnp.int32))


# --- prices --------------------------------------------------------------------------------------


class Prices(NamedTuple):
    """Seconds of a step with each of the pass widths, of a plain one, of a row more in it, of a
    pass that drafts, and of a draft of the one-layer drafter."""

    rows: Float[Array, "widths"]
    plain: Float[Array, ""]
    one_row: Float[Array, ""]
    one_pass: Float[Array, ""]
    one_layer: Float[Array, ""]


class PriceList(NamedTuple):
    """Seconds, and seconds for each token of context: of a step with each of the pass widths, of a
    plain one, of a pass that drafts, and of a draft of the one-layer drafter. Arrays, so that other
    seconds make no other program."""

    begun: Float[Array, "widths+3"]
    per_token: Float[Array, "widths+3"]

    def at(self, method: OnPartialCache, widest: int, state: DecodeState) -> Prices:
        """At the mean length of the rows that run."""
        running = jnp.maximum(jnp.sum(state.running), 1).astype(jnp.float32)
        context = jnp.sum(jnp.where(state.running, state.kv.length, 0)).astype(jnp.float32)
        slots = context = context / running
        if method.draft_choice != "all":
            slots = jnp.minimum(context, method.draft_budget)
        of_steps = self.begun[:-2] + self.per_token[:-2] * context
        return Prices(
            rows=of_steps[:-1],
            plain=of_steps[-1],
            one_row=(of_steps[-2] - of_steps[-1]) / (widest - 1),
            one_pass=self.begun[-2] + self.per_token[-2] * slots,
            one_layer=self.begun[-1],
        )


def price_list(method: OnPartialCache, costs: Costs, widths: Sequence[int]) -> PriceList:
    def of_pass(slots: float) -> float:
        seconds = costs.of_draft_pass(slots, method.wants_int8)
        if method.draft_rest:  # which reads the partial cache once more
            seconds += costs.of_pass(1, slots) - costs.of_pass(1, 0)
        return seconds

    def of_step(rows: int) -> Callable[[float], float]:
        return lambda context: costs.of_pass(rows, context) + costs.overhead

    # Each is linear in the context.
    lines = [*map(of_step, widths), of_step(1), of_pass, lambda context: costs.one_layer]
    begun, far = ([line(context) for line in lines] for context in (0.0, FAR_CONTEXT))
    slopes = [(end - begin) / FAR_CONTEXT for begin, end in zip(begun, far, strict=True)]
    return PriceList(jnp.asarray(begun, jnp.float32), jnp.asarray(slopes, jnp.float32))


class Pace(NamedTuple):
    """What the last steps took by the prices, and the tokens of all rows that they found."""

    seconds: Float[Array, ""]
    tokens: Float[Array, ""]

    def after(self, spent: Float[Array, ""], tokens: Float[Array, ""]) -> Pace:
        """With one more step."""
        return Pace(FORGETS * self.seconds + spent, FORGETS * self.tokens + tokens)

    def worth(self, prices: Prices, state: DecodeState) -> Float[Array, ""]:
        """Seconds that a token is worth: those it takes in this run, or by plain decoding."""
        plain = prices.plain / jnp.maximum(jnp.sum(state.running), 1).astype(jnp.float32)
        here = jnp.minimum(self.seconds / jnp.maximum(self.tokens, 1), plain)
        return jnp.where(self.tokens > 0, here, plain)


def right_beforehand(
    model: ModelConfig, *, text: bool, passes: int, with_rest: bool, heads: int, drafter: int
) -> list[float]:
    """How likely each draft is before anything is known of a run, the likeliest first."""
    begun, found = 1.0, [TEXT_IS_RIGHT] if text else []
    of_pass = PASS_WITH_REST_IS_RIGHT if with_rest else PASS_IS_RIGHT
    of_passes = [(of_pass, OTHERS_OF_PASS)] * passes
    of_layer = [(right, OTHERS_OF_LAYER) for right in drafts_are_right(model, drafter)]
    for right, others in of_passes + of_layer:
        found += [begun * right, *(begun * (1 - right) * share for share in others)]
        begun *= right
    of_heads = heads_are_right(model, heads, passes > 0)
    for depth in range(1, heads + 1):
        for path in grid(depth):
            ranks = zip(path, of_heads, strict=False)
            found.append(begun * math.prod(RANK_IS_RIGHT[rank] * head for rank, head in ranks))
    return sorted(found, reverse=True)


# --- growing -------------------------------------------------------------------------------------


def best_by_depth(rates: Rates, groups: list[Paths]) -> Float[Array, "B J"]:
    """How likely the likeliest draft of each depth is."""
    kinds = [group.kinds for group in groups if group.kinds is not None]
    if not kinds:
        return jnp.zeros((1, 0), jnp.float32)
    return functools.reduce(jnp.maximum, (jnp.max(chances(rates, one), axis=1) for one in kinds))


def gain_of_pass(
    rates: Rates,
    survival: Float[Array, "B"],
    found: Float[Array, "B"] | float,
    prices: Prices,
    pace: Float[Array, ""],
    of_best: slice,
) -> Float[Array, ""]:
    """Seconds that the best token of a pass is expected to save beyond a draft that has been
    `found`, with that chance, less those of its row.

    It is judged only where it is likely enough, which the pass will say. `of_best` are its kinds.
    """
    tried, values = rates.tried[of_best], rates.values[of_best]
    better = survival[:, None] * values[None] - jnp.reshape(found, (-1, 1))
    saved = jnp.maximum(better * pace - prices.one_row, 0)
    return jnp.sum(saved * (tried / jnp.sum(tried))[None])


def best_width(
    widths: Sequence[int],
    chance: Float[Array, "B T"],
    prices: Prices,
    pace: Float[Array, ""],
    running: Bool[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, ""]]:
    """The nodes that the step's tree may have, root included, and the seconds of its pass.

    More nodes bring more tokens, a wider pass takes longer: that is chosen which saves most.
    """
    found = jnp.sum(jnp.where(running[:, None], jnp.cumsum(chance, axis=1), 0), axis=0)
    saves = pace * found[jnp.asarray(widths) - 1] - prices.rows
    at = jnp.argmax(saves)
    nodes = jnp.asarray(widths, jnp.int32)[at]
    return jnp.full(running.shape, nodes), prices.rows[at]


# --- learning ------------------------------------------------------------------------------------


def judged(
    offered: Offered, state: DecodeState
) -> tuple[Bool[Array, "B R J"], Bool[Array, "B R J"]]:
    """Which offered drafts the step's tokens judge, and which of them are right.

    A draft is judged where all before it on its path are right and the token is known; of several
    of one kind at one node the first.
    """
    tokens, kinds = offered
    B, R, J = tokens.shape
    index = jnp.arange(J, dtype=jnp.int32)[None]
    slots = jnp.minimum((state.length - state.emitted)[:, None] + index, state.tokens.shape[1] - 1)
    said = jnp.take_along_axis(state.tokens, slots, axis=1)[:, None]  # [B, 1, J]
    known = (index < state.emitted[:, None])[:, None]
    right = (tokens == said) & (kinds != NO_DRAFT) & known
    so_far = jnp.cumprod(right.astype(jnp.int32), axis=2)
    before = jnp.concatenate([jnp.ones((B, R, 1), bool), so_far[:, :, :-1] > 0], axis=2)
    tried = before & (kinds != NO_DRAFT) & known
    # A kind is part of a node's name here.
    both = shared(tokens * KINDS.count + kinds, jnp.sum(tried, axis=2, dtype=jnp.int32))
    return tried & (first_with(both, J) == jnp.arange(R)[None, :, None]), right


class Lesson(flax.struct.PyTreeNode):
    """What a tree hands on to the next one of the run: how often drafts were right, and what the
    one-layer drafter has learned."""

    rates: Rates
    correction: Float[Array, "B D D"] | None


class Learned(flax.struct.PyTreeNode):
    """LikelyTree's memory; None where the settings do not need it.

    Attributes:
      cache: for passes of the model on few tokens.
      hidden: last layer's output for the last committed token; zero before there is one.
      layer: of the one-layer drafter.
      table: of prompt and output.
      prices: what rows and passes take.
      offered: what the last step could have drafted.
      rates: how often drafts of each kind were right.
      pace: of the last steps.
      spent: seconds of the last step, by the prices.
    """

    cache: DraftCache | None
    hidden: Float[Array, "B D"] | None
    layer: LayerMemory | None
    table: NgramTable | None
    prices: PriceList
    offered: Offered
    rates: Rates
    pace: Pace
    spent: Float[Array, ""]

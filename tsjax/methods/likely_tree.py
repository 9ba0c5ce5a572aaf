# SPDX-License-Identifier: Apache-2.0
"""LikelyTree: one tree of the drafts that are most likely to be right, as many as pay.

Knows its settings and what a step does. What is drafted, likely_sources.py knows; how far that
pays, likely_growth.py. Does not know how a draft is judged.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tsjax.base.checks import check, check_fields, check_int
from tsjax.base.errors import BadValue
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Bool, Float, Int
from tsjax.decoding.method import Measured, Method, Noise, Promise, Sizes
from tsjax.decoding.state import DecodeState
from tsjax.decoding.tree import DraftTree, cut, grow_tree
from tsjax.methods.corpus import PLACES
from tsjax.methods.cost_model import ANY_COSTS, Costs, as_costs
from tsjax.methods.devices import costs_for
from tsjax.methods.history import enter, enter_few, init_table
from tsjax.methods.likely_growth import (
    Learned,
    Lesson,
    Offered,
    Pace,
    Prices,
    best_by_depth,
    best_width,
    gain_of_pass,
    judged,
    nothing_offered,
    price_list,
    right_beforehand,
)
from tsjax.methods.likely_sources import (
    CHILDREN,
    LIKELY_SOURCES,
    best_of_layer,
    best_of_pass,
    from_chain,
    from_corpus,
    from_heads,
    from_text,
    grid,
    heads_after,
    kinds_of_layer,
    kinds_of_pass,
)
from tsjax.methods.model_drafts import Drafter, newest, noise_after, weights_for
from tsjax.methods.ngram import fading_window
from tsjax.methods.on_partial_cache import OnPartialCache
from tsjax.methods.one_layer import can_adapt, draft_chain, init_layer_memory, with_path
from tsjax.methods.paths import Paths, all_kinds, all_tokens, as_tuples, source_numbers
from tsjax.methods.rates import MOST_HEADS, NO_DRAFT, chances, first_rates, learned
from tsjax.model.params import Params

EXPLORES = 32  # steps after which a pass runs although it does not seem to pay
PAIR = 2  # tokens of an n-gram: one that is known, and what follows it
MOST_DEPTH, MOST_LAYER_DRAFTS = 24, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class LikelyTree(OnPartialCache):
    """One tree of the drafts that are most likely to be right, as many of them as pay.

    What followed earlier matches of the last tokens, passes of the model on a small part of the
    cache, and its heads offer tokens. How often such a token was right in this run, by what is
    known of it beforehand, says how likely it is; the likeliest ones are judged, as many as bring
    more tokens than their rows take time, and a pass runs where it promises to pay.

    Attributes:
      width: rows of the widest pass, the root's included.
      pass_widths: narrower passes to compile; a step takes the one that promises most.
      places: earlier places of the last token that are looked at, the latest ones, beside that of
        the longest match; 0 leaves the text out.
      draft_passes: the most passes on the partial cache in a step; 0 runs none.
      heads: whether the model's draft heads draft too, after the last pass; without passes, from
        the verified hidden state.
      drafter: tokens in a row that the model's one-layer drafter drafts at most; a step leaves out
        those that do not seem to pay. Not with passes or heads.
      adapt: whether the drafter learns from what it missed in the run. One that tsjax has trained
        does; another's states are not those of the model, and it stays as it is.
      draft_budget, draft_choice, num_sinks, draft_refresh, draft_rest, draft_weights: see
        TokenSwift.
      corpus: whether `params.corpus`, earlier texts, is drafted from; `generate(corpus=...)` says
        it.
      costs: what rows and passes take; `generate` fills in what it has measured on the device, and
        `choose_method` does. A state cannot be made without.
    """

    sources: ClassVar[tuple[str, ...]] = LIKELY_SOURCES
    reads_corpus: ClassVar[bool] = True

    width: int = 16
    pass_widths: tuple[int, ...] = (1, 2, 4, 8)
    places: int = 16
    draft_passes: int = 0
    heads: bool = False
    drafter: int = 0
    adapt: bool = True
    draft_budget: int = 512
    draft_choice: str = "importance"
    num_sinks: int = 16
    draft_refresh: int | str | None = 32
    draft_rest: bool = True
    draft_weights: str = "model"
    corpus: bool = False
    costs: Costs | None = None

    def __post_init__(self):
        object.__setattr__(self, "pass_widths", as_tuples(self.pass_widths))
        check_fields(self, may_be_0=("places", "draft_passes", "drafter", "num_sinks"))
        check_int(self.width, "width", 2, 4096)
        check(isinstance(self.pass_widths, tuple), "pass_widths", self.pass_widths, "a tuple")
        for width in self.pass_widths:
            check_int(width, "pass_widths", 1)
        check_int(self.places, "places", 0, 1024)
        check_int(self.draft_passes, "draft_passes", 0, 64)
        check_int(self.drafter, "drafter", 0, MOST_LAYER_DRAFTS)
        alone = "0, with draft_passes or heads"
        check(not (self.drafter and self.of_passes_or_heads), "drafter", self.drafter, alone)
        something = "1 or more, without draft_passes, heads, a drafter and a corpus"
        drafts = self.places or self.of_passes_or_heads or self.drafter or self.corpus
        check(bool(drafts), "places", self.places, something)
        self.check_cache()
        if self.costs is not None:
            object.__setattr__(self, "costs", as_costs(self.costs))

    @property
    def of_passes_or_heads(self) -> bool:
        return self.draft_passes > 0 or self.heads

    @property
    def wants_costs(self) -> bool:
        return self.costs is None

    @property
    def drafts_from_text_alone(self) -> bool:
        return not self.draft_passes

    def in_steps(self) -> Method:
        return dataclasses.replace(self, costs=ANY_COSTS)

    def priced(self, model: ModelConfig, memory: Learned) -> Learned:
        assert self.costs is not None
        prices = price_list(self, self.costs, self.sizes(model).pass_widths)
        return memory.replace(prices=prices)

    def next(self, measured: Measured) -> Method:
        if measured.current is not None:
            return measured.current
        costs, corpus = self.costs or costs_for(measured), self.corpus or measured.corpus
        return dataclasses.replace(self, costs=costs, corpus=corpus)

    def sizes(self, model: ModelConfig) -> Sizes:
        levels = self.draft_passes + self._num_heads(model)
        drafter = self._num_drafts(model)
        return Sizes(
            width=self.width,
            depth=max(levels, drafter, min(self.width - 1, MOST_DEPTH) if self._text else 0),
            # A pass that runs makes the noise of what lies deeper.
            levels=drafter or min(levels, 1),
            narrower=self.pass_widths,
            with_attended=self.draft_passes > 0 and self.draft_rest,
            with_taps=drafter > 0,
        )

    @property
    def _text(self) -> bool:
        return self.places > 0 or self.corpus

    def _num_heads(self, model: ModelConfig) -> int:
        if self.heads and not model.num_draft_heads:
            raise BadValue(
                "heads=True needs draft heads, and the model has none: load some with "
                "tsjax.load(..., heads=...), or leave them out"
            )
        return min(model.num_draft_heads, MOST_HEADS) if self.heads else 0

    def _num_drafts(self, model: ModelConfig) -> int:
        if self.drafter and model.drafter is None:
            raise BadValue(
                f"drafter={self.drafter} needs a one-layer drafter, and the model has none: load "
                "one with tsjax.load(..., drafter=...), or leave it out"
            )
        return self.drafter

    def init(self, model: ModelConfig, batch: int, capacity: int, mesh: Any) -> Learned:
        if self.costs is None:
            raise BadValue(
                "costs=None is not valid in a state: tsjax.generate and "
                "tsjax.costs.choose_method(method, model, context) choose them, or give "
                "LikelyTree(costs=...)"
            )
        cache = hidden = layer = table = None
        drafts, longest = self._num_drafts(model), self.sizes(model).depth + 1
        if self.draft_passes:
            cache = self.new_cache(model, batch, capacity, mesh, room=self.draft_passes - 1)
        elif self._num_heads(model):
            hidden = jnp.zeros((batch, model.embed_dim), model.dtype)
        if drafts:
            adapt = self.adapt and can_adapt(model)
            layer = init_layer_memory(model, batch, drafts, longest, adapt)
        if self.places:
            table = init_table(batch, model.vocab_size, self.places)
        return Learned(
            cache=cache,
            hidden=hidden,
            layer=layer,
            table=table,
            prices=price_list(self, self.costs, self.sizes(model).pass_widths),
            offered=nothing_offered(batch, self._num_paths(model), self.sizes(model).depth),
            rates=first_rates(
                model.head_accuracy, () if model.drafter is None else model.drafter.accuracy
            ),
            pace=Pace(jnp.float32(0), jnp.float32(0)),
            spent=jnp.float32(0),
        )

    def _num_paths(self, model: ModelConfig) -> int:
        of_text, of_corpus = 1 + self.places, PLACES if self.corpus else 0
        chain, heads = self.draft_passes + self._num_drafts(model), self._num_heads(model)
        found = of_corpus + (of_text if self.places else 0) + (len(grid(heads)) if heads else 0)
        return found + (1 + (CHILDREN - 1) * chain if chain else 0)

    def read(
        self, model: ModelConfig, params: Params, memory: Learned, state: DecodeState
    ) -> Learned:
        if memory.table is None:
            return memory
        table = enter(memory.table, state.tokens, self._known(state), PAIR)
        return memory.replace(table=table)

    def _known(self, state: DecodeState) -> Int[Array, "B"]:
        """Tokens that are remembered: what a penalty makes less likely waits until it has left its
        window."""
        return jnp.where(state.running, state.length - fading_window(state.sampling), 0)

    # --- what it promises ------------------------------------------------------------------------

    def promise(self, model: ModelConfig, costs: Costs, context: float) -> Promise:
        """What a step finds and takes, as far as that is known without the text and the run."""
        runs = range(self.draft_passes + 1)  # a step may leave out passes
        promises = (self._promise_of(n, model, costs, context) for n in runs)
        return min(promises, key=lambda promise: promise.seconds_per_token)

    def _promise_of(self, passes: int, model: ModelConfig, costs: Costs, context: float) -> Promise:
        heads = self._num_heads(model) if passes == self.draft_passes else 0
        found = right_beforehand(
            model,
            text=self._text,
            passes=passes,
            with_rest=self.draft_rest,
            heads=heads,
            drafter=self._num_drafts(model),
        )
        drafting = self.pass_seconds(costs, context, passes)
        drafting += costs.of_heads(self.wants_int8) if heads else 0.0
        drafting += costs.one_layer * self.drafter
        drafting += costs.suffix.at(context) + costs.ngrams if self.places else 0.0
        positions = self.draft_passes + self._num_heads(model) + self.drafter

        def of_width(width: int) -> Promise:
            tokens = 1 + sum(found[: width - 1])
            seconds = costs.of_pass(width, context) + costs.overhead + drafting
            seconds += self.choice_seconds(costs, context, tokens) if passes else 0.0
            return Promise(tokens, seconds, width, passes, positions, None)

        promises = map(of_width, self.sizes(model).pass_widths)
        return min(promises, key=lambda promise: promise.seconds_per_token)

    # --- drafting --------------------------------------------------------------------------------

    def draft(
        self, model: ModelConfig, params: Params, state: DecodeState, noise: Noise
    ) -> tuple[Learned, DraftTree]:
        with jax.named_scope("draft"):
            memory, sizes = state.memory, self.sizes(model)
            prices = memory.prices.at(self, self.width, state)
            pace, groups, spent = memory.pace.worth(prices, state), [], jnp.float32(0)
            if self.places:
                groups += from_text(state, memory.table, self.places, sizes.depth)
            if self.corpus:
                groups.append(from_corpus(state, params.corpus, sizes.depth))
            if sizes.levels:
                found = best_by_depth(memory.rates, groups)
                changes, more, spent = self._by_the_model(
                    model, params, state, noise, prices, pace, found
                )
                memory, groups = memory.replace(**changes), [*groups, *more]
            kinds = jnp.where(
                state.running[:, None, None], all_kinds(groups, sizes.depth), NO_DRAFT
            )
            offered = Offered(all_tokens(groups, sizes.depth), kinds)
            tree, chance = grow_tree(
                state.root,
                offered.tokens,
                chances(memory.rates, offered.kinds),
                source_numbers(groups, self.sources),
                width=self.width,
                num_sources=len(self.sources),
            )
            nodes, seconds = best_width(sizes.pass_widths, chance, prices, pace, state.running)
            return memory.replace(offered=offered, spent=spent + seconds), cut(tree, nodes)

    def _by_the_model(
        self,
        model: ModelConfig,
        params: Params,
        state: DecodeState,
        noise: Noise,
        prices: Prices,
        pace: Float[Array, ""],
        found: Float[Array, "B J"],
    ) -> tuple[dict[str, Any], list[Paths], Float[Array, ""]]:
        """What changes in the memory, the paths of the model's passes and heads or of its drafter,
        and the seconds that they take. `found` is how likely the text alone is right, by depth."""
        memory, root, zero = state.memory, state.root[:, None], jnp.float32(0)

        def wanted(price, best_of, kinds_of, depth, ranked) -> Bool[Array, ""]:
            """Whether a draft at a depth, after the candidates before it, promises to save more
            than its price; at the first depth it runs now and then to see."""
            kinds = (kinds_of(one, at)[:, :1, None] for at, one in enumerate(ranked))
            right = (chances(memory.rates, kind)[:, 0, 0] for kind in kinds)
            survival = functools.reduce(jnp.multiply, right, state.running.astype(jnp.float32))
            known = found[:, depth] if depth < found.shape[1] else 0.0
            gain = gain_of_pass(memory.rates, survival, known, prices, pace, best_of(depth))
            explores = jnp.max(state.stats.steps) % EXPLORES == 0
            return (gain > price) | (explores if depth == 0 else False)

        if self.drafter:
            price = prices.one_layer
            pays = functools.partial(wanted, price, best_of_layer, kinds_of_layer)
            layer, ranked, runs = draft_chain(
                model, params, state, memory.layer, noise, self.drafter, CHILDREN, pays
            )
            spent = sum((jnp.where(ran, price, 0) for ran in runs[1:]), price)  # the first runs
            return {"layer": layer}, [from_chain(ranked, kinds_of_layer)], spent
        number, passes = self._num_heads(model), self.draft_passes
        heads, weights = params.heads[:number], weights_for(self, params)
        drafter = Drafter(model, weights, heads, state, CHILDREN, passes, self.draft_rest)
        if not passes:  # from the verified hidden state
            noise = noise_after(model, state, (state.row_key, state.length), 0, number)
            return {}, [from_heads(drafter.by_heads(memory.hidden, root, noise))], zero
        pays = functools.partial(wanted, prices.one_pass, best_of_pass, kinds_of_pass)
        cache, ranked, runs = drafter.run(memory.cache, root, noise, pays)
        chain = from_chain(ranked[:passes], kinds_of_pass)
        paths = [chain, heads_after(chain, ranked[passes:])] if heads else [chain]
        return {"cache": cache}, paths, sum((jnp.where(x, prices.one_pass, 0) for x in runs), zero)

    # --- learning --------------------------------------------------------------------------------

    def learn(self, model, params, memory, state, verdict, acceptance) -> Learned:
        with jax.named_scope("learn"):
            most, table = self.sizes(model).depth + 1, memory.table
            hidden, layer, cache = memory.hidden, memory.layer, memory.cache
            if table is not None:
                table = enter_few(table, state.tokens, self._known(state) - PAIR + 1, most)
            if hidden is not None:
                hidden = newest(verdict.rows.hidden, hidden, state, acceptance)
            if layer is not None:
                layer = with_path(layer, state, verdict, acceptance)
            if cache is not None:
                cache = self.kept(model, params, cache, state, verdict, acceptance, most)
            offered, tokens = memory.offered, jnp.sum(state.emitted).astype(jnp.float32)
            return memory.replace(
                cache=cache,
                hidden=hidden,
                layer=layer,
                table=table,
                rates=learned(memory.rates, offered.kinds, *judged(offered, state)),
                pace=memory.pace.after(memory.spent, tokens),
            )

    def lesson(self, memory: Learned) -> Lesson:
        return Lesson(memory.rates, None if memory.layer is None else memory.layer.correction)

    def taught(self, memory: Learned, lesson: Any) -> Learned:
        if not isinstance(lesson, Lesson):
            return memory
        layer = memory.layer
        if layer is not None and layer.correction is not None and lesson.correction is not None:
            layer = layer.replace(correction=lesson.correction)
        return memory.replace(rates=lesson.rates, layer=layer)

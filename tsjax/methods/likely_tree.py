# SPDX-License-Identifier: Apache-2.0
"""LikelyTree: one tree of the drafts that are most likely to be right, as many as pay.

Knows the sources of drafts, how often drafts of each kind were right in this run, and what rows
and passes take here. Does not know how a draft is judged.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from tsjax.config import ModelConfig, check, check_fields, check_int
from tsjax.decoding.method import Measured, Method, Promise, Sizes
from tsjax.decoding.state import DecodeState
from tsjax.decoding.tree import SOURCES, cut, first_with, grow_tree, shared
from tsjax.errors import BadValue
from tsjax.methods.corpus import PLACES, match_sizes_in, places_in, what_followed_in
from tsjax.methods.cost_model import Costs, as_costs
from tsjax.methods.devices import device_of, estimated
from tsjax.methods.history import (
    NgramTable,
    enter,
    enter_few,
    init_table,
    last_tokens,
    longest_match,
    match_sizes,
    what_followed,
)
from tsjax.methods.model_drafts import (
    PASS_IS_RIGHT,
    PASS_WITH_REST_IS_RIGHT,
    Candidates,
    Drafter,
    heads_are_right,
    newest,
    noise_after,
    rank_heads,
    weights_for,
)
from tsjax.methods.ngram import TEXT_IS_RIGHT, as_tuples, fading_window
from tsjax.methods.on_partial_cache import OnPartialCache
from tsjax.methods.partial_cache import DraftCache
from tsjax.methods.rates import (
    GAPS,
    HEAD_AXES,
    KINDS,
    LONGEST,
    MOST_HEADS,
    NO_DRAFT,
    PASS_AXES,
    SHARES,
    TEXT_AXES,
    WIDE_GAPS,
    Rates,
    between,
    chances,
    first_rates,
    kind_number,
    learned,
)
from tsjax.model.control_flow import run_if
from tsjax.model.params import Params

FORGETS = 0.98  # of a pace the share that is left after a step
EXPLORES = 32  # steps after which a pass runs although it does not seem to pay
CHILDREN = 3  # candidates of a pass
HEAD_CHILDREN = (3, 3, 3, 1)  # candidates of each head
LIKELY_SOURCES = (*SOURCES, "corpus")
PAIR = 2  # tokens of an n-gram: one that is known, and what follows it
VOTE = 4.0  # how many times more a match counts that is a token longer
MOST_DEPTH = 24
# Assumed before a run: of the share of a pass that its best candidate leaves, what the others get;
# and of what the three best candidates of a head get, the share of each.
OTHERS_ARE_RIGHT, RANK_IS_RIGHT = (0.4, 0.2), (0.7, 0.18, 0.12)


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
      draft_budget, draft_choice, num_sinks, draft_refresh, draft_rest, draft_weights: see
        TokenSwift.
      corpus: whether `params.corpus`, earlier texts, is drafted from; `generate(corpus=...)` says
        it.
      costs: what rows and passes take; `generate` fills in what it has measured on the device.
        Without a table, and without `generate`, an A100's are estimated.
    """

    sources: ClassVar[tuple[str, ...]] = LIKELY_SOURCES

    width: int = 16
    pass_widths: tuple[int, ...] = (1, 2, 4, 8)
    places: int = 16
    draft_passes: int = 0
    heads: bool = False
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
        check_fields(self, may_be_0=("places", "draft_passes", "num_sinks"))
        check_int(self.width, "width", 2, 4096)
        check(isinstance(self.pass_widths, tuple), "pass_widths", self.pass_widths, "a tuple")
        for width in self.pass_widths:
            check_int(width, "pass_widths", 1)
        check_int(self.places, "places", 0, 1024)
        check_int(self.draft_passes, "draft_passes", 0, 64)
        something = "1 or more, without draft_passes, heads and a corpus"
        drafts = self.places or self.draft_passes or self.heads or self.corpus
        check(bool(drafts), "places", self.places, something)
        self.check_cache()
        if self.costs is not None:
            object.__setattr__(self, "costs", as_costs(self.costs))

    @property
    def wants_costs(self) -> bool:
        return self.costs is None

    @property
    def reads_corpus(self) -> bool:
        return True

    def next(self, measured: Measured) -> Method:
        if measured.current is not None:
            return measured.current
        costs, corpus = self.costs or measured.costs, self.corpus or measured.corpus
        return dataclasses.replace(self, costs=costs, corpus=corpus)

    def sizes(self, model: ModelConfig) -> Sizes:
        levels = self.draft_passes + self._num_heads(model)
        return Sizes(
            width=self.width,
            depth=max(levels, min(self.width - 1, MOST_DEPTH) if self._text else 0),
            levels=min(levels, 1),  # a pass that runs makes the noise of what lies deeper
            narrower=self.pass_widths,
            with_attended=self.draft_passes > 0 and self.draft_rest,
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

    def init(self, model, batch, capacity, mesh) -> Learned:
        cache = hidden = table = None
        if self.draft_passes:
            cache = self.new_cache(model, batch, capacity, mesh, room=self.draft_passes - 1)
        elif self._num_heads(model):
            hidden = jnp.zeros((batch, model.embed_dim), model.dtype)
        if self.places:
            table = init_table(batch, model.vocab_size, self.places)
        paths = len(self._sources_of_paths(model))
        return Learned(
            cache=cache,
            hidden=hidden,
            table=table,
            offered=_nothing(batch, paths, self.sizes(model).depth),
            rates=first_rates(model.head_accuracy or ()),
            pace=Pace(jnp.float32(0), jnp.float32(0)),
            spent=jnp.float32(0),
        )

    def read(self, model, params, memory, state) -> Learned:
        if memory.table is None:
            return memory
        known = jnp.where(state.running, state.length - _delay(state), 0)
        return memory.replace(table=enter(memory.table, state.tokens, known, PAIR))

    # --- what it promises ------------------------------------------------------------------------

    def promise(self, model: ModelConfig, costs: Costs, context: float) -> Promise:
        """What a step finds and takes, as far as that is known without the text and the run."""
        runs = range(self.draft_passes + 1)  # a step may leave out passes
        promises = (self._promise_of(n, model, costs, context) for n in runs)
        return min(promises, key=lambda promise: promise.seconds_per_token)

    def _promise_of(self, passes: int, model: ModelConfig, costs: Costs, context: float) -> Promise:
        begun, found = 1.0, [TEXT_IS_RIGHT] if self._text else []
        right = PASS_WITH_REST_IS_RIGHT if self.draft_rest else PASS_IS_RIGHT
        for _ in range(passes):
            found += [begun * right, *(begun * (1 - right) * share for share in OTHERS_ARE_RIGHT)]
            begun *= right
        number = self._num_heads(model) if passes == self.draft_passes else 0
        of_heads = heads_are_right(model, number, passes > 0)
        for depth in range(1, number + 1):
            for path in _grid(depth):
                ranks = zip(path, of_heads, strict=False)
                found.append(begun * math.prod(RANK_IS_RIGHT[rank] * head for rank, head in ranks))
        found.sort(reverse=True)

        drafting = self.pass_seconds(costs, context, passes)
        drafting += costs.of_heads(self.wants_int8) if number else 0.0
        drafting += costs.suffix.at(context) + costs.ngrams if self.places else 0.0
        positions = self.draft_passes + self._num_heads(model)

        def of_width(width: int) -> Promise:
            tokens = 1 + sum(found[: width - 1])
            seconds = costs.of_pass(width, context) + costs.overhead + drafting
            seconds += self.choice_seconds(costs, context, tokens) if passes else 0.0
            return Promise(tokens, seconds, width, passes, positions, None)

        promises = map(of_width, self.sizes(model).pass_widths)
        return min(promises, key=lambda promise: promise.seconds_per_token)

    # --- drafting --------------------------------------------------------------------------------

    def draft(self, model, params, state, noise):
        with jax.named_scope("draft"):
            memory, prices = state.memory, self._prices(model, state)
            pace, groups, spent = self._pace(memory, prices, state), [], jnp.float32(0)
            if self.places:
                groups.append(self._of_text(model, state))
            if self.corpus:
                groups.append(self._of_corpus(model, params, state))
            if self.sizes(model).levels:
                cache, drafts, spent = self._of_model(
                    model, params, state, noise, prices, pace, _best_of(memory.rates, groups)
                )
                memory = memory.replace(cache=cache)
                groups += drafts
            offered = _joined(groups, self.sizes(model).depth, state.running)
            tree, chance = grow_tree(
                state.root,
                offered.tokens,
                chances(memory.rates, offered.kinds),
                self._sources_of_paths(model),
                width=self.width,
                num_sources=len(self.sources),
            )
            nodes, seconds = _best_width(self.sizes(model), chance, prices, pace, state.running)
            return memory.replace(offered=offered, spent=spent + seconds), cut(tree, nodes)

    def _sources_of_paths(self, model: ModelConfig) -> list[int]:
        """The number of the source of each path that a step offers, in their order."""
        heads, ngrams, suffix, corpus = range(len(self.sources))
        of_passes = 1 + (CHILDREN - 1) * self.draft_passes if self.draft_passes else 0
        number = self._num_heads(model)
        of_heads = len(_grid(number)) if number else 0
        of_text = [suffix, *(ngrams,) * self.places] if self.places else []
        of_corpus = [corpus] * PLACES if self.corpus else []
        return of_text + of_corpus + [heads] * (of_passes + of_heads)

    def _prices(self, model: ModelConfig, state: DecodeState) -> Prices:
        """At the mean length of the rows that run."""
        costs = self.costs or estimated(model, device_of("gpu", ""), state.root.shape[0])
        running = jnp.maximum(jnp.sum(state.running), 1).astype(jnp.float32)
        context = jnp.sum(jnp.where(state.running, state.kv.length, 0)).astype(jnp.float32)
        context = context / running

        def at(seconds, length) -> jax.Array:
            """`seconds` is linear in the context."""
            begun, far = seconds(0.0), seconds(float(2**20))
            return jnp.float32(begun) + jnp.float32((far - begun) / 2**20) * length

        def of_rows(rows: int) -> jax.Array:
            return at(lambda context: costs.of_pass(rows, context) + costs.overhead, context)

        slots = context
        if self.draft_choice != "all":
            slots = jnp.minimum(context, self.draft_budget)
        one_pass = at(lambda slots: costs.of_draft_pass(slots, self.wants_int8), slots)
        if self.draft_rest:  # which reads the partial cache once more
            one_pass += at(lambda slots: costs.of_pass(1, slots) - costs.of_pass(1, 0), slots)
        plain, widest = of_rows(1), of_rows(self.width)
        return Prices(
            rows=jnp.stack(list(map(of_rows, self.sizes(model).pass_widths))),
            plain=plain,
            one_row=(widest - plain) / (self.width - 1),
            one_pass=one_pass,
        )

    def _pace(self, memory: Learned, prices: Prices, state: DecodeState) -> jax.Array:
        """Seconds that a token is worth: those it takes in this run, or by plain decoding."""
        plain = prices.plain / jnp.maximum(jnp.sum(state.running), 1).astype(jnp.float32)
        seconds, tokens = memory.pace
        return jnp.where(tokens > 0, jnp.minimum(seconds / jnp.maximum(tokens, 1), plain), plain)

    def _of_text(self, model: ModelConfig, state: DecodeState) -> Offered:
        """What followed where the text stood before as it stands now."""
        depth, table, root = self.sizes(model).depth, state.memory.table, state.root
        tokens, length, b = state.tokens, state.length, jnp.arange(root.shape[0])
        longest, size = longest_match(tokens, length)
        places, count = table.places[b, root], table.counts[b, root]
        sizes = match_sizes(tokens, last_tokens(tokens, length), places)
        counts = jnp.arange(self.places)[None] < count[:, None]
        counts &= (places < length[:, None] - 1) & (places != longest[:, None])
        places = jnp.concatenate([longest[:, None], places], axis=1)
        sizes = jnp.concatenate([size[:, None], jnp.where(counts, sizes, 0)], axis=1)
        followed = what_followed(tokens, length, places, depth)
        lengths = jnp.where(sizes > 0, depth, 0)
        return Offered(followed, _kinds_of_text(followed, lengths, sizes, state, KINDS.text))

    def _of_corpus(self, model: ModelConfig, params: Params, state: DecodeState) -> Offered:
        """What followed where earlier texts stood as the text stands now."""
        if params.corpus is None:
            raise BadValue(
                "corpus=True needs params with a corpus: tsjax.generate(..., corpus=...) adds one"
            )
        recent = last_tokens(state.tokens, state.length)
        places = places_in(params.corpus, recent)
        sizes = match_sizes_in(params.corpus, recent, places)
        followed, left = what_followed_in(params.corpus, places, self.sizes(model).depth)
        lengths = jnp.where(sizes > 0, left, 0)
        return Offered(followed, _kinds_of_text(followed, lengths, sizes, state, KINDS.corpus))

    def _of_model(self, model, params: Params, state: DecodeState, noise, prices, pace, found):
        """The partial cache with the drafts' rows after its length, what passes and heads offer,
        and the seconds that they take. `found` is how likely the text alone is right, by depth."""
        memory, number, zero = state.memory, self._num_heads(model), jnp.float32(0)
        if not self.draft_passes:
            return None, [self._of_heads_alone(model, params, state)], zero
        weights, heads = weights_for(self, params), params.heads[:number]
        drafter = Drafter(
            model, weights, heads, state, self.draft_passes, CHILDREN, self.draft_rest
        )
        running = state.running.astype(jnp.float32)
        explores = jnp.max(state.stats.steps) % EXPLORES == 0

        def wanted(depth: int, ranked: list[Candidates]):
            """Whether a pass promises to save more than it takes."""
            best = [_kinds_of_pass(one)[:, :1, None] for one in ranked]
            survival = functools.reduce(
                jnp.multiply, (chances(memory.rates, kinds)[:, 0, 0] for kinds in best), running
            )
            known = found[:, depth] if depth < found.shape[1] else 0.0
            gain = _gain_of_pass(memory.rates, survival, known, prices, pace)
            return (gain > prices.one_pass) | (explores if depth == 0 else False)

        cache, ranked, runs = drafter.run_while(wanted, memory.cache, noise)
        groups = [_chain(ranked[: self.draft_passes])]
        if number:
            of_heads = _of_heads(ranked[self.draft_passes :])
            groups.append(_after(groups[0], of_heads, self.draft_passes))
        spent = (jnp.where(ran, prices.one_pass, 0) for ran in runs)
        return cache, groups, functools.reduce(jnp.add, spent, zero)

    def _of_heads_alone(self, model, params: Params, state: DecodeState) -> Offered:
        """From the verified hidden state."""
        number, weights = self._num_heads(model), weights_for(self, params)

        def run(_, hidden, root, row):
            noise, heads = noise_after(model, state, row, 0, number), params.heads[:number]
            return _of_heads(
                rank_heads(model, weights, heads, state, hidden, root, noise, CHILDREN)
            )

        nothing = _nothing(state.root.shape[0], len(_grid(number)), number)
        inputs = state.memory.hidden, state.root[:, None], (state.row_key, state.length)
        return run_if(jnp.any(state.running), run, nothing, *inputs)

    # --- learning --------------------------------------------------------------------------------

    def learn(self, model, params, memory, state, verdict, acceptance) -> Learned:
        with jax.named_scope("learn"):
            offered, depth = memory.offered, self.sizes(model).depth
            tokens = jnp.sum(state.emitted).astype(jnp.float32)
            memory = memory.replace(
                rates=learned(memory.rates, offered.kinds, *_judged(offered, state)),
                pace=Pace(
                    FORGETS * memory.pace.seconds + memory.spent,
                    FORGETS * memory.pace.tokens + tokens,
                ),
            )
            if memory.table is not None:
                known = jnp.where(state.running, state.length - _delay(state), 0)
                table = enter_few(memory.table, state.tokens, known - PAIR + 1, depth + 1)
                memory = memory.replace(table=table)
            if memory.cache is None and memory.hidden is None:
                return memory
            rows = verdict.rows
            if memory.hidden is not None:
                memory = memory.replace(
                    hidden=newest(rows.hidden, memory.hidden, state, acceptance)
                )
            cache = memory.cache
            if cache is not None:
                cache = self.kept(model, params, cache, state, verdict, acceptance, depth + 1)
                memory = memory.replace(cache=cache)
            return memory

    def lesson(self, memory) -> Rates:
        return memory.rates

    def taught(self, memory, lesson) -> Learned:
        return memory.replace(rates=lesson) if isinstance(lesson, Rates) else memory


class Offered(NamedTuple):
    """Paths that a step may draft: their tokens, and the kind of each, NO_DRAFT where there is
    none."""

    tokens: jax.Array  # [B, R, J] int32
    kinds: jax.Array  # [B, R, J] int32


class Pace(NamedTuple):
    """What the last steps took by the prices, and the tokens of all rows that they found."""

    seconds: jax.Array
    tokens: jax.Array


class Prices(NamedTuple):
    """Seconds of a step with each of the pass widths, of a plain one, of a row more in it, and of
    a pass that drafts."""

    rows: jax.Array
    plain: jax.Array
    one_row: jax.Array
    one_pass: jax.Array


class Learned(flax.struct.PyTreeNode):
    """LikelyTree's memory; None where the settings do not need it.

    Attributes:
      cache: for passes of the model on few tokens.
      hidden: [B, D], last layer's output for the last committed token; zero before there is one.
      table: of prompt and output.
      offered: what the last step could have drafted.
      rates: how often drafts of each kind were right.
      pace: of the last steps.
      spent: seconds of the last step, by the prices.
    """

    cache: DraftCache | None
    hidden: jax.Array | None
    table: NgramTable | None
    offered: Offered
    rates: Rates
    pace: Pace
    spent: jax.Array


def _nothing(batch: int, paths: int, depth: int) -> Offered:
    shape = (batch, paths, depth)
    return Offered(jnp.zeros(shape, jnp.int32), jnp.full(shape, NO_DRAFT, jnp.int32))


def _joined(groups: list[Offered], depth: int, running) -> Offered:
    """All paths, as long as the longest; none for rows that have ended."""

    def padded(x, filler: int):
        missing = ((0, 0), (0, 0), (0, depth - x.shape[2]))
        return jnp.pad(x, missing, constant_values=filler)

    tokens = jnp.concatenate([padded(group.tokens, 0) for group in groups], axis=1)
    kinds = jnp.concatenate([padded(group.kinds, NO_DRAFT) for group in groups], axis=1)
    return Offered(tokens, jnp.where(running[:, None, None], kinds, NO_DRAFT))


def _delay(state: DecodeState):
    """What a penalty makes less likely is not remembered before it has left its window."""
    return fading_window(state.sampling)


def _kinds_of_text(followed, lengths, sizes, state: DecodeState, first: int) -> jax.Array:
    """By the longest match that goes on like this, its share among all, and the penalty.

    The first `lengths` tokens of each path count; `sizes` are those of the matches before them.
    """
    depth = followed.shape[2]
    steps = jnp.arange(depth, dtype=jnp.int32)[None, None]
    weights = jnp.where(sizes > 0, VOTE ** jnp.minimum(sizes, 12).astype(jnp.float32), 0)
    both = shared(followed, lengths)
    same = both[..., None] > steps[None]  # [B, P, P, J]
    through = jnp.sum(jnp.where(same, weights[:, None, :, None], 0), axis=2)
    longest = jnp.max(jnp.where(same, sizes[:, None, :, None], 0), axis=2) + steps
    every = jnp.broadcast_to(jnp.sum(weights, axis=1)[:, None, None], (*weights.shape, 1))
    share = through / jnp.maximum(jnp.concatenate([every, through[:, :, :-1]], axis=2), 1)
    indices = between(LONGEST, longest), between(SHARES, share), _penalised(followed, state)
    kinds = kind_number(first, TEXT_AXES, *indices)
    return jnp.where(steps < lengths[..., None], kinds, NO_DRAFT)


def _penalised(tokens, state: DecodeState) -> jax.Array:
    """Whether a penalty acts on each token, as 0 or 1."""
    if state.sampling.repetition is None or state.last_seen is None:
        return jnp.zeros(tokens.shape, jnp.int32)
    b, window = jnp.arange(tokens.shape[0])[:, None, None], state.sampling.repetition.window
    seen = state.last_seen[b, tokens]
    return (seen >= (state.length - window)[:, None, None]).astype(jnp.int32)


def _kinds_of_pass(candidates: Candidates) -> jax.Array:
    """By whether a candidate is the best one, and the gap to the other one. [B, CHILDREN]"""
    scores, index = candidates.scores, jnp.arange(CHILDREN)[None]
    gap = _gaps(scores)
    kinds = kind_number(KINDS.passes, PASS_AXES, index, between(GAPS, gap))
    return jnp.where(candidates.possible, kinds, NO_DRAFT)


def _gaps(scores) -> jax.Array:
    """How far the best score lies above each; of the best one, above the second."""
    other = jnp.concatenate([scores[:, 1:2], scores[:, 1:]], axis=1)
    return jnp.where(other > -jnp.inf, scores[:, :1] - other, jnp.inf)


def _chain(found: list[Candidates]) -> Offered:
    """The path of the best candidates, and the others each as the end of a path. [B, R, passes]"""
    passes, kinds = len(found), [_kinds_of_pass(one) for one in found]
    best = jnp.stack([one.tokens[:, 0] for one in found], axis=1)
    of_best = jnp.stack([kind[:, 0] for kind in kinds], axis=1)
    tokens, all_kinds = [best], [of_best]
    for depth, rank_number in itertools.product(range(passes), range(1, CHILDREN)):
        other = found[depth].tokens[:, rank_number]
        tokens.append(best.at[:, depth].set(other))
        ends = jnp.arange(passes)[None] > depth
        path = of_best.at[:, depth].set(kinds[depth][:, rank_number])
        all_kinds.append(jnp.where(ends, NO_DRAFT, path))
    return Offered(jnp.stack(tokens, axis=1), jnp.stack(all_kinds, axis=1))


def _grid(number: int) -> list[tuple[int, ...]]:
    """The ranks along each path of the heads' candidates."""
    return list(itertools.product(*map(range, HEAD_CHILDREN[:number])))


def _of_heads(ranked: list[Candidates]) -> Offered:
    """Every combination of the heads' candidates: none knows which one came before it."""
    grid, tokens, kinds = _grid(len(ranked)), [], []
    of_depth = []
    for depth, one in enumerate(ranked):
        index, gap = jnp.arange(one.tokens.shape[1])[None], _gaps(one.scores)
        kind = kind_number(KINDS.heads, HEAD_AXES, depth, index, between(WIDE_GAPS, gap))
        of_depth.append(jnp.where(one.possible, kind, NO_DRAFT))
    for path in grid:
        tokens.append(jnp.stack([one.tokens[:, r] for one, r in zip(ranked, path, strict=True)], 1))
        kinds.append(jnp.stack([one[:, r] for one, r in zip(of_depth, path, strict=True)], 1))
    return Offered(jnp.stack(tokens, axis=1), jnp.stack(kinds, axis=1))


def _after(chain: Offered, paths: Offered, length: int) -> Offered:
    """`paths` after the first path of `chain`."""

    def joined(first, others):
        first = jnp.broadcast_to(first[:, :1], (*others.shape[:2], length))
        return jnp.concatenate([first, others], axis=2)

    return Offered(joined(chain.tokens, paths.tokens), joined(chain.kinds, paths.kinds))


def _best_of(rates: Rates, groups: list[Offered]) -> jax.Array:
    """How likely the likeliest draft of each depth is. [B, J]"""
    if not groups:
        return jnp.zeros((1, 0), jnp.float32)
    return functools.reduce(
        jnp.maximum, (jnp.max(chances(rates, one.kinds), axis=1) for one in groups)
    )


def _gain_of_pass(rates: Rates, survival, found, prices: Prices, pace) -> jax.Array:
    """Seconds that the best token of a pass is expected to save beyond a draft that has been
    `found`, with that chance, less those of its row.

    It is judged only where it is likely enough, which the pass will say.
    """
    of_best = slice(KINDS.passes, KINDS.passes + PASS_AXES[1])
    tried, values = rates.tried[of_best], rates.values[of_best]
    better = survival[:, None] * values[None] - jnp.reshape(found, (-1, 1))
    saved = jnp.maximum(better * pace - prices.one_row, 0)
    return jnp.sum(saved * (tried / jnp.sum(tried))[None])


def _best_width(sizes: Sizes, chance, prices: Prices, pace, running):
    """The nodes that the step's tree may have, root included, [B], and the seconds of its pass.

    More nodes bring more tokens, a wider pass takes longer: that is chosen which saves most.
    """
    widths = sizes.pass_widths
    found = jnp.sum(jnp.where(running[:, None], jnp.cumsum(chance, axis=1), 0), axis=0)
    saves = pace * found[jnp.asarray(widths) - 1] - prices.rows
    at = jnp.argmax(saves)
    nodes = jnp.asarray(widths, jnp.int32)[at]
    return jnp.full(running.shape, nodes), prices.rows[at]


def _judged(offered: Offered, state: DecodeState):
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

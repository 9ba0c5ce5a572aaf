# SPDX-License-Identifier: Apache-2.0
"""NGram: drafts from the text so far, prompt and output. No heads, no pass of the model.

Knows the table of frequent n-grams and the longest suffix match of history.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import jax.numpy as jnp

from tsjax.base.checks import check, check_int
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Int
from tsjax.decoding.method import Measured, Method, Noise, Promise, Sizes
from tsjax.decoding.sampling import WHOLE_CONTEXT, SamplingValues
from tsjax.decoding.state import DecodeState
from tsjax.decoding.tree import SOURCES, DraftTree
from tsjax.methods.cost_model import Costs
from tsjax.methods.devices import costs_for
from tsjax.methods.history import (
    MATCH_LIMIT,
    NgramTable,
    enter,
    enter_few,
    init_table,
    longest_suffix,
    most_frequent,
)
from tsjax.methods.paths import Paths, as_tree, as_tuples
from tsjax.model.params import Params

# Repetitions of the text vary most, so these are assumptions: the share of the steps with a long
# match, how often its tokens are right, and the tokens that n-grams find in a step (the paper's
# Figure 3: 0.8 after 20,000 tokens, and more later). A run with fewer gives its drafts up.
REPEATS, REPEAT_IS_RIGHT, NGRAMS_FIND = 0.02, 0.85, 0.5
TEXT_IS_RIGHT = 0.2  # the likeliest draft from the text, whatever it matches
# Of fewer n-grams than the paper's 20, which are the most frequent ones: 5 find 0.7 of it.
ALL_NGRAMS, FEWER_FIND = 20, 0.25
# The share of the rows for n-grams, and for a suffix that need not be long, that usual steps fill.
FILLED = 0.5
LONG_MATCH = 8  # equal tokens that are rare enough
# Of settings that are left open: the paper's, and what a device may have instead of them.
PAPER: dict[str, Any] = {"num_ngrams": ALL_NGRAMS, "suffix_length": 16, "pass_widths": ()}
FEWER: dict[str, tuple[Any, ...]] = {"num_ngrams": (1, 2, 5, 10, 20), "suffix_length": (4, 8, 16)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram(Method):
    """Drafts from the text so far alone (prompt and output): no heads, no pass of the model.

    Settings that are None are open: `generate` and `choose_method` take what promises most where
    rows cost what they do on the device. `NGram.paper()` has the numbers of TokenSwift's paper.

    Attributes:
      num_ngrams: how many of the most frequent n-grams that begin with the last token are drafted.
      ngram_size: tokens of an n-gram, its first token included.
      ngram_slots: n-grams that are counted for each first token, the latest ones, see
        `history.NgramTable`.
      ngram_delay: an n-gram may be drafted once this many tokens follow it. None is the repetition
        window while a penalty with a limited window is on, and 0 otherwise.
      suffix_length: the longest continuation that is drafted after the longest earlier match of
        the last tokens, see `history.longest_suffix`; 0 for none.
      suffix_match: the fewest equal tokens that count as such a match.
      pass_widths: narrower passes to compile beside the one that holds every draft a step can
        make: a step takes the narrowest that holds its own. They pay where rows cost time, on a
        CPU, and when drafts vary in number.
    """

    sources: ClassVar[tuple[str, ...]] = SOURCES

    num_ngrams: int | None = None
    ngram_size: int = 4
    ngram_slots: int = 32
    ngram_delay: int | None = None
    suffix_length: int | None = None
    suffix_match: int = 1
    pass_widths: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.pass_widths is not None:
            object.__setattr__(self, "pass_widths", as_tuples(self.pass_widths))
            check(isinstance(self.pass_widths, tuple), "pass_widths", self.pass_widths, "a tuple")
            for width in self.pass_widths:
                check_int(width, "pass_widths", 1)
        check_int(self.ngram_size, "ngram_size", 2, 64)
        check_int(self.ngram_slots, "ngram_slots", 1, 4096)
        if self.num_ngrams is not None:
            check_int(self.num_ngrams, "num_ngrams", 0, 1024)
            enough = f"at least num_ngrams={self.num_ngrams}"
            check(self.ngram_slots >= self.num_ngrams, "ngram_slots", self.ngram_slots, enough)
        if self.ngram_delay is not None:
            check_int(self.ngram_delay, "ngram_delay", 0)
        if self.suffix_length is not None:
            check_int(self.suffix_length, "suffix_length", 0, 256)
        check_int(self.suffix_match, "suffix_match", 1, MATCH_LIMIT)

    @classmethod
    def paper(cls, **changes: Any):
        """With the paper's numbers, whatever the device: made for a GPU."""
        return cls(**cls._papers() | changes)

    @classmethod
    def _papers(cls) -> dict[str, Any]:
        """What stands in the place of a setting that is still open in a step."""
        return PAPER

    def _choices(self) -> dict[str, tuple[Any, ...]]:
        """What a device may have, of settings that can be open."""
        ngrams = tuple(n for n in FEWER["num_ngrams"] if n <= self.ngram_slots)
        return {**FEWER, "num_ngrams": ngrams}

    def setting(self, name: str) -> Any:
        """One that can be open; then the paper's."""
        value = getattr(self, name)
        return self._papers()[name] if value is None else value

    def next(self, measured: Measured) -> Method:
        """Before a run, where settings are open: those that promise most."""
        if measured.current is not None:
            return measured.current
        open_ones = {n: of for n, of in self._choices().items() if getattr(self, n) is None}
        costs, context = costs_for(measured), measured.context
        if not open_ones:
            return self
        found = []
        for values in itertools.product(*open_ones.values()):
            one = dataclasses.replace(self, **dict(zip(open_ones, values, strict=True)))
            if self.pass_widths is None:
                width = one.sizes(measured.model).width
                narrower = tuple(rows for rows in costs.widths(context, width) if rows < width)
                one = dataclasses.replace(one, pass_widths=narrower)
            found.append(one)

        def seconds(method: NGram) -> float:
            return method.promise(measured.model, costs, context).seconds_per_token

        return min(found, key=seconds)

    @property
    def ngram_depth(self) -> int:
        """Drafted tokens of an n-gram."""
        return self.ngram_size - 1 if self.setting("num_ngrams") else 0

    def sizes(self, model: ModelConfig) -> Sizes:
        suffix = self.setting("suffix_length")
        return Sizes(
            width=1 + self.setting("num_ngrams") * self.ngram_depth + suffix,
            depth=max(self.ngram_depth, suffix),
            narrower=self.setting("pass_widths"),
            positions=self.ngram_depth,
        )

    def promise(self, model: ModelConfig, costs: Costs, context: float) -> Promise:
        return self._promise_beside(0.0, 1, model, costs, context)

    def _promise_beside(
        self, found: float, rows: int, model: ModelConfig, costs: Costs, context: float
    ) -> Promise:
        """With the text's drafts beside others, which find so many tokens in so many rows, the
        root's included."""
        found += NGRAMS_FIND * min(self.setting("num_ngrams") / ALL_NGRAMS, 1.0) ** FEWER_FIND
        repeated = sum(REPEAT_IS_RIGHT**n for n in range(1, self.setting("suffix_length") + 1))
        found += REPEATS * max(repeated - found, 0.0)
        # The pass of a usual step, and that of one that has found a long repetition.
        often = self.setting("suffix_length") if self.suffix_match < LONG_MATCH else 0
        rows += round(FILLED * (self.setting("num_ngrams") * self.ngram_depth + often))
        sizes = self.sizes(model)
        width = next(n for n in sizes.pass_widths if n >= min(rows, sizes.width))
        usual, wide = (costs.of_pass(n, context) for n in (width, sizes.width))
        seconds = (1 - self._repeats) * usual + self._repeats * wide + costs.overhead
        seconds += costs.suffix.at(context) if self.setting("suffix_length") else 0.0
        seconds += costs.ngrams if self.setting("num_ngrams") else 0.0
        return Promise(1.0 + found, seconds, width)

    @property
    def _repeats(self) -> float:
        """The share of steps that find a long repetition."""
        return REPEATS if self.setting("suffix_length") else 0.0

    def init(self, model: ModelConfig, batch: int, capacity: int, mesh: Any) -> NgramTable | None:
        if not self.setting("num_ngrams"):
            return None
        return init_table(batch, model.vocab_size, self.ngram_slots)

    def read(
        self, model: ModelConfig, params: Params, memory: NgramTable | None, state: DecodeState
    ):
        return self.remember(memory, state)

    def draft(
        self, model: ModelConfig, params: Params, state: DecodeState, noise: Noise
    ) -> tuple[NgramTable | None, DraftTree]:
        suffix, _ = self.suffix(state)
        groups = [suffix, *self.ngrams(state.memory, state, state.root)]
        return state.memory, as_tree(state.root, groups, self.sizes(model))

    def learn(self, model, params, memory, state, verdict, acceptance):
        return self.remember(memory, state, most=self.sizes(model).depth + 1)

    def remember(
        self, table: NgramTable | None, state: DecodeState, most: int | None = None
    ) -> NgramTable | None:
        """With the n-grams that have become old enough, of each row the first `most` of them.

        The repetition penalty makes what was said within its window less likely, so n-grams wait
        until they have left it.
        """
        if table is None:
            return None
        delay = self.ngram_delay
        if delay is None:
            delay = fading_window(state.sampling)
        known, size = jnp.where(state.running, state.length - delay, 0), self.ngram_size
        if most is None:
            return enter(table, state.tokens, known, size)
        return enter_few(table, state.tokens, known - size + 1, most)

    def suffix(self, state: DecodeState) -> tuple[Paths, Int[Array, "B"]]:
        """What followed the longest earlier match of the last tokens, and how long that is."""
        length = self.setting("suffix_length")
        if not length:
            batch = state.root.shape[0]
            none = jnp.zeros((batch, 0, 0), jnp.int32), jnp.zeros((batch, 0), jnp.int32)
            return Paths(*none, "suffix"), jnp.zeros((batch,), jnp.int32)
        tokens, count, matched = longest_suffix(state.tokens, state.length, length)
        count = jnp.where(matched >= self.suffix_match, count, 0)
        return Paths(tokens[:, None], count[:, None], "suffix"), matched

    def ngrams(
        self, table: NgramTable | None, state: DecodeState, first: Int[Array, "B"]
    ) -> list[Paths]:
        """What most often followed the tokens `first`."""
        if table is None:
            return []
        k, size = self.setting("num_ngrams"), self.ngram_size
        following, exists = most_frequent(table, state.tokens, first, k, size)
        return [Paths(following, following.shape[2] * exists.astype(jnp.int32), "ngrams")]


def fading_window(values: SamplingValues) -> Any:
    """The window in which a penalty makes tokens less likely, 0 where there is none or no end."""
    if values.repetition is None:
        return 0
    penalty, window = values.repetition
    return jnp.where((penalty > 1) & (window < WHOLE_CONTEXT), window, 0)

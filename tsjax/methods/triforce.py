# SPDX-License-Identifier: Apache-2.0
"""TriForce (arXiv 2404.11912): three levels. A cheap drafter, the model on a part of its cache, and
the model on all of it.

Knows how the middle level judges the lowest one. What the whole model judges is the middle's chain.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from tsjax.base.checks import check, check_fields, check_int
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Bool
from tsjax.decoding.method import DraftPasses, Measured, Method, Noise, Promise, Sizes
from tsjax.decoding.state import DecodeState
from tsjax.decoding.tree import DraftTree, merge_paths
from tsjax.methods.cost_model import Costs
from tsjax.methods.draft_model import GUESS_IS_RIGHT, DraftModel, guess_seconds
from tsjax.methods.history import longest_suffix
from tsjax.methods.model_drafts import PASS_IS_RIGHT, tokens_of_chain, weights_for, with_draft
from tsjax.methods.ngram import TEXT_IS_RIGHT
from tsjax.methods.on_partial_cache import OnPartialCache
from tsjax.methods.partial_cache import DraftCache
from tsjax.methods.second_model import (
    Reader,
    Text,
    forgotten,
    guess,
    known_text,
    next_tokens,
    second_of,
)
from tsjax.model.params import Params
from tsjax.model.passes import run_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriForce(OnPartialCache):
    """A second model drafts for the model on its retrieval cache, and this for the whole model.

    The middle level's chain is what the model would say if it saw the retrieval cache alone; the
    lowest level saves passes of it and changes no token of the chain. In the published program a
    rejected token is sampled in a way that biases the text; here both levels share the noise of
    each position, and neither changes what is said. Without a second model, what followed an
    earlier match of the last tokens is the lowest level.

    Attributes:
      length: tokens of the middle level's chain.
      inner_length: tokens that the lowest level offers to one pass of the middle one.
      inner_budget, inner_sinks: tokens that the second model sees, and first ones among them.
      draft_choice, draft_budget, num_sinks, draft_refresh, draft_weights: of the retrieval cache,
        see TokenSwift. As published it is chosen once; draft_refresh=None chooses it again as the
        text grows (TriForce*).
      model: the second model's config; `generate(draft_model=...)` fills it in.
    """

    sources: ClassVar[tuple[str, ...]] = ("retrieval",)
    takes_draft_model: ClassVar[bool] = True

    length: int = 6
    inner_length: int = 1
    inner_budget: int = 256
    inner_sinks: int = 16
    draft_choice: str = "retrieval"
    draft_budget: int = 4096
    num_sinks: int = 8
    draft_refresh: int | str | None = "never"
    draft_weights: str = "model"
    model: ModelConfig | None = None

    def __post_init__(self):
        check_fields(self, may_be_0=("num_sinks", "inner_sinks"))
        check_int(self.length, "length", 1, 64)
        check_int(self.inner_length, "inner_length", 1, 16)
        larger = f"larger than inner_sinks={self.inner_sinks}"
        check(self.inner_budget > self.inner_sinks, "inner_budget", self.inner_budget, larger)
        self.check_cache()
        if isinstance(self.model, dict):  # of a file
            object.__setattr__(self, "model", ModelConfig.from_dict(self.model))

    @property
    def inner(self) -> DraftModel:
        """The second model, which sees the first tokens and the last ones, as in StreamingLLM."""
        return DraftModel(
            length=self.inner_length,
            draft_choice="streaming",
            draft_budget=self.inner_budget,
            num_sinks=self.inner_sinks,
            model=self.model,
        )

    def next(self, measured: Measured) -> Method:
        if measured.current is not None:
            return measured.current
        return dataclasses.replace(self, model=measured.draft_model or self.model)

    @property
    def _most(self) -> int:
        """Tokens of a chain and what the last pass may find beyond it."""
        return self.length + self.inner_length

    def sizes(self, model: ModelConfig) -> Sizes:
        return Sizes(width=1 + self.length, depth=self.length, levels=self._most)

    def promise(self, model: ModelConfig, costs: Costs, context: float) -> Promise:
        """A pass of the middle level finds one token more than it accepts of the lowest one's."""
        guess, offers, slots = self.inner.model, self.inner_length, self.slots_at(context)
        right = TEXT_IS_RIGHT if guess is None else GUESS_IS_RIGHT
        passes = self.length / tokens_of_chain(right, offers)
        one = costs.of_draft_pass(slots, self.wants_int8)
        one += costs.of_pass(1 + offers, slots) - costs.of_pass(1, slots)
        if guess is None:
            one += costs.suffix.at(context)
        else:
            one += guess_seconds(self.inner, model, costs, context, offers)
        tokens = tokens_of_chain(PASS_IS_RIGHT, self.length)
        seconds = costs.of_pass(1 + self.length, context) + costs.overhead + passes * one
        seconds += self.choice_seconds(costs, context, tokens)
        drafting = (DraftPasses(passes, slots, model, self.wants_int8),)
        if guess is not None:
            of_inner = self.inner.slots_at(context)
            drafting += (DraftPasses(passes * offers, of_inner, guess),)
        return Promise(tokens, seconds, 1 + self.length, passes, self.length, drafting)

    def init(self, model: ModelConfig, batch: int, capacity: int, mesh: Any) -> Levels:
        reader = None
        if self.model is not None:
            reader = self.inner.init(model, batch, capacity, mesh)
        cache = self.new_cache(model, batch, capacity, mesh, room=self._most + 1)
        return Levels(cache=cache, reader=reader)

    def read(
        self, model: ModelConfig, params: Params, memory: Levels, state: DecodeState
    ) -> Levels:
        if memory.reader is None:
            return memory
        return memory.replace(reader=self.inner.read(model, params, memory.reader, state))

    def draft(
        self, model: ModelConfig, params: Params, state: DecodeState, noise: Noise
    ) -> tuple[Levels, DraftTree]:
        with jax.named_scope("draft"):
            memory = state.memory
            begun = memory.cache, memory.reader, known_text(state, self._most)

            def is_short(carry: Any) -> Bool[Array, ""]:
                return jnp.any(state.running & (carry[2].count < self.length))

            def lengthen(carry: Any) -> Any:
                return self._lengthen(model, params, state, noise, *carry)

            cache, reader, text = lax.while_loop(is_short, lengthen, begun)
            count = jnp.where(state.running, jnp.minimum(text.count, self.length), 0)
            tree = merge_paths(
                state.root,
                text.guesses[:, None, : self.length],
                count[:, None],
                width=1 + self.length,
            )
            return memory.replace(cache=cache, reader=reader), tree

    def _lengthen(
        self,
        model: ModelConfig,
        params: Params,
        state: DecodeState,
        noise: Noise,
        cache: DraftCache,
        reader: Reader | None,
        text: Text,
    ) -> tuple[DraftCache, Reader | None, Text]:
        """One pass of the middle level: what it accepts of the lowest one's, and one token more.

        Its rows of the chain lie in the slots after the cache's length.
        """
        short = state.running & (text.count < self.length)
        reader, offered, number = self._offered(params, state, noise, reader, text, short)
        last = text.at(text.end[:, None] - 1)
        tokens = jnp.concatenate([last, offered], axis=1)
        steps = jnp.arange(1 + self.inner_length, dtype=jnp.int32)
        depths = text.count[:, None] + steps[None]
        positions = state.kv.length[:, None] + depths
        known = cache.replace(length=cache.length + text.count)
        causal = jnp.tril(jnp.ones((len(steps), len(steps)), bool))
        weights = weights_for(self, params)
        rows = run_rows(weights, known, tokens, positions, causal, cfg=model)
        cache = with_draft(cache, rows, known.length, jnp.any(state.running))
        guesses = text.followed_by(offered, number).guesses
        target = next_tokens(weights, state, rows.hidden, depths, guesses, noise, cfg=model)
        right = (offered == target[:, :-1]) & (steps[:-1] < number[:, None])
        right = jnp.cumprod(right, axis=1, dtype=jnp.int32)
        accepted = jnp.sum(right, axis=1, dtype=jnp.int32)
        count = jnp.where(short, accepted + 1, 0)
        text = text.followed_by(target, count)
        if reader is not None:
            reader = forgotten(reader, text.end - 1)
        return cache, reader, text

    def _offered(self, params, state, noise, reader: Reader | None, text: Text, short):
        """What the lowest level offers, and how many tokens of it."""
        number = jnp.where(short, self.inner_length, 0)
        if reader is not None:
            weights, cfg = second_of(params, self.model)
            reader, offered = guess(
                reader, weights, state, text, noise, self.inner_length, short, cfg=cfg
            )
            return reader, offered, number
        b = jnp.arange(text.tokens.shape[0])[:, None]
        index = jnp.arange(self._most, dtype=jnp.int32)[None]
        slots = jnp.where(
            index < text.count[:, None], text.length[:, None] + index, text.tokens.shape[1]
        )  # out of bounds: dropped
        tokens = text.tokens.at[b, slots].set(text.guesses, mode="drop")
        offered, found, _ = longest_suffix(tokens, text.end, self.inner_length)
        return None, offered, jnp.minimum(number, found)

    def learn(self, model, params, memory, state, verdict, acceptance) -> Levels:
        most, reader = self.length + 1, memory.reader
        cache = self.kept(model, params, memory.cache, state, verdict, acceptance, most)
        if reader is not None:
            reader = self.inner.learn(model, params, reader, state, verdict, acceptance)
        return Levels(cache=cache, reader=reader)


class Levels(flax.struct.PyTreeNode):
    """What the two lower levels remember.

    Attributes:
      cache: the middle level's.
      reader: the second model's; None without one.
    """

    cache: DraftCache
    reader: Reader | None

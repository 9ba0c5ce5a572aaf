# SPDX-License-Identifier: Apache-2.0
"""MagicDec (arXiv 2408.11049): the model drafts a few tokens in a row on a small part of its cache.

Knows what sets it apart from TokenSwift, whose passes it runs: one chain, no heads, no n-grams.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tsjax.base.checks import check_fields, check_int
from tsjax.base.model_config import ModelConfig
from tsjax.decoding.method import DraftPasses, Noise, Promise, Sizes
from tsjax.decoding.state import DecodeState
from tsjax.decoding.tree import SOURCES, DraftTree
from tsjax.methods.cost_model import Costs
from tsjax.methods.model_drafts import PASS_IS_RIGHT, Drafter, tokens_of_chain, weights_for
from tsjax.methods.on_partial_cache import OnPartialCache
from tsjax.methods.partial_cache import DraftCache
from tsjax.methods.paths import as_tree
from tsjax.methods.tokenswift import tree_of
from tsjax.model.params import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class MagicDec(OnPartialCache):
    """The model drafts a chain of tokens on a small part of its cache; the whole one judges it.

    The published program decodes greedily and for 80 tokens; this one samples too, for as long as
    the text goes on. Two more things differ: keys stay rotated by their place in the text, and
    tokens in the partial cache are those that the whole one has computed.

    Attributes:
      draft_choice: "streaming" or "snapkv", as published; or another one, see TokenSwift.
      draft_passes: tokens that are drafted in a step.
      draft_budget, num_sinks, draft_refresh, draft_weights, noise_coupled: see TokenSwift. The
        published cache is chosen once, and new tokens go into it.
    """

    sources: ClassVar[tuple[str, ...]] = SOURCES

    draft_choice: str = "streaming"
    draft_passes: int = 3
    draft_budget: int = 512
    num_sinks: int = 16
    draft_refresh: int | str | None = "never"
    draft_weights: str = "model"
    noise_coupled: bool = True

    def __post_init__(self):
        check_fields(self, may_be_0=("num_sinks",))
        check_int(self.draft_passes, "draft_passes", 1, 64)
        self.check_cache()

    def sizes(self, model: ModelConfig) -> Sizes:
        drafts = self.draft_passes
        return Sizes(width=1 + drafts, depth=drafts, levels=drafts, positions=drafts)

    def promise(self, model: ModelConfig, costs: Costs, context: float) -> Promise:
        passes, width = self.draft_passes, 1 + self.draft_passes
        tokens = tokens_of_chain(PASS_IS_RIGHT, passes)
        seconds = costs.of_pass(width, context) + costs.overhead
        seconds += self.pass_seconds(costs, context, passes)
        seconds += self.choice_seconds(costs, context, tokens)
        drafting = DraftPasses(passes, self.slots_at(context), model, self.wants_int8)
        return Promise(tokens, seconds, width, passes, passes, (drafting,))

    def init(self, model: ModelConfig, batch: int, capacity: int, mesh: Any) -> DraftCache:
        return self.new_cache(model, batch, capacity, mesh, room=self.draft_passes - 1)

    def draft(
        self, model: ModelConfig, params: Params, state: DecodeState, noise: Noise
    ) -> tuple[DraftCache, DraftTree]:
        with jax.named_scope("draft"):
            weights, chain = weights_for(self, params), (0,) * self.draft_passes
            noise = noise if self.noise_coupled else jnp.zeros_like(noise)
            drafter = Drafter(model, weights, (), state, 1, self.draft_passes)
            cache, ranked, _ = drafter.run(state.memory, state.root[:, None], noise)
            return cache, as_tree(state.root, [tree_of(ranked, (chain,))], self.sizes(model))

    def learn(self, model, params, memory, state, verdict, acceptance) -> DraftCache:
        return self.kept(model, params, memory, state, verdict, acceptance, self.draft_passes + 1)

# SPDX-License-Identifier: Apache-2.0
"""MagicDec (arXiv 2408.11049): the model drafts a few tokens in a row on a small part of its cache.

Knows what sets it apart from TokenSwift, whose passes it runs: one chain, no heads, no n-grams.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tsjax.config import check_fields, check_int
from tsjax.decoding.method import Method, Sizes
from tsjax.decoding.tree import SOURCES
from tsjax.methods.tokenswift import Recalled, TokenSwift


@dataclasses.dataclass(frozen=True, kw_only=True)
class MagicDec(Method):
    """The model drafts a chain of tokens on a small part of its cache; the whole one judges it.

    The published program decodes greedily and for 80 tokens; this one samples too, for as long as
    the text goes on. Two more things differ: keys stay rotated by their place in the text, and
    tokens in the partial cache are those that the whole one has computed.

    Attributes:
      draft_choice: "streaming" or "snapkv", as published; any of `draft_choice.CacheSettings`.
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
        self.drafter  # says what is wrong with the others  # noqa: B018

    @property
    def drafter(self) -> TokenSwift:
        """TokenSwift with a chain of passes, and nothing else."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tree = (1,) * self.draft_passes
        return TokenSwift(tree=tree, num_ngrams=0, suffix_length=0, **settings)

    @property
    def wants_int8(self) -> bool:
        return self.drafter.wants_int8

    def sizes(self, model) -> Sizes:
        return self.drafter.sizes(model)

    def init(self, model, batch, capacity, mesh) -> Recalled:
        return self.drafter.init(model, batch, capacity, mesh)

    def draft(self, model, params, state, noise):
        return self.drafter.draft(model, params, state, noise)

    def learn(self, model, params, memory, state, verdict, acceptance) -> Recalled:
        return self.drafter.learn(model, params, memory, state, verdict, acceptance)

# SPDX-License-Identifier: Apache-2.0
"""DraftModel: a second, smaller model drafts a few tokens, what transformers calls assisted.

Knows how far it guesses. How it reads along is second_model.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from tsjax.base.checks import check, check_fields, check_int, one_of
from tsjax.base.model_config import ModelConfig
from tsjax.decoding.method import DraftPasses, Measured, Memory, Method, Noise, Promise, Sizes
from tsjax.decoding.state import DecodeState
from tsjax.decoding.tree import DraftTree, merge_paths
from tsjax.methods.cost_model import Costs
from tsjax.methods.devices import plain_bytes
from tsjax.methods.model_drafts import tokens_of_chain
from tsjax.methods.on_partial_cache import OnPartialCache
from tsjax.methods.second_model import (
    Reader,
    forgotten,
    guess,
    init_reader,
    kept_up,
    known_text,
    second_of,
)
from tsjax.model.params import Params

# Assumed: how often a guess is right when all before it were. It hangs on both models.
GUESS_IS_RIGHT = 0.65
OWN_RULES = ("all", "streaming", "importance", "retrieval")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel(OnPartialCache):
    """A second model of the same vocabulary drafts, `generate(draft_model=...)`.

    Its guesses share the noise of their positions with the model, so samples agree as often as
    they can.

    Attributes:
      length: tokens that are drafted in a step.
      draft_choice: what the second model sees of the text. "all": everything. "streaming": the
        first tokens and the last ones, at positions up to draft_budget, so that it may have been
        made for short texts. "importance", "retrieval": a part of its own cache, chosen as
        TokenSwift's is.
      draft_budget, num_sinks, draft_refresh: of that part, see TokenSwift.
      model: the second model's config; `generate` fills it in.
    """

    sources: ClassVar[tuple[str, ...]] = ("draft_model",)
    takes_draft_model: ClassVar[bool] = True

    length: int = 4
    draft_choice: str = "all"
    draft_budget: int = 512
    num_sinks: int = 16
    draft_refresh: int | str | None = None
    model: ModelConfig | None = None

    def __post_init__(self):
        check_fields(self, may_be_0=("num_sinks",))
        check_int(self.length, "length", 1, 64)
        known = self.draft_choice in OWN_RULES
        check(known, "draft_choice", self.draft_choice, one_of(OWN_RULES))
        self.check_cache()
        if isinstance(self.model, dict):  # of a file
            object.__setattr__(self, "model", ModelConfig.from_dict(self.model))

    def next(self, measured: Measured) -> Method:
        if measured.current is not None:
            return measured.current
        config = measured.draft_model or self.model
        check(config is not None, "draft_model", None, "a smaller model, as tsjax.load returns")
        return dataclasses.replace(self, model=config)

    def sizes(self, model: ModelConfig) -> Sizes:
        return Sizes(width=1 + self.length, depth=self.length, levels=self.length)

    def promise(self, model: ModelConfig, costs: Costs, context: float) -> Promise | None:
        """A pass of the second model takes the share of a plain step that it reads of what that
        reads. None without one."""
        if self.model is None:
            return None
        tokens = tokens_of_chain(GUESS_IS_RIGHT, self.length)
        seconds = costs.of_pass(1 + self.length, context) + costs.overhead
        seconds += guess_seconds(self, model, costs, context, self.length)
        drafting = DraftPasses(self.length, self.slots_at(context), self.model)
        return Promise(tokens, seconds, 1 + self.length, self.length, self.length, (drafting,))

    def init(self, model: ModelConfig, batch: int, capacity: int, mesh: Any) -> Memory:
        if self.model is None:
            return ()
        return init_reader(self, self.model, batch, capacity, room=self.length)

    def read(
        self, model: ModelConfig, params: Params, memory: Reader, state: DecodeState
    ) -> Reader:
        weights, cfg = second_of(params, self.model)
        return kept_up(memory, self, weights, state.tokens, state.kv.length, self.length, cfg=cfg)

    def draft(
        self, model: ModelConfig, params: Params, state: DecodeState, noise: Noise
    ) -> tuple[Reader, DraftTree]:
        weights, cfg = second_of(params, self.model)
        text = known_text(state, self.length)
        reader, guesses = guess(
            state.memory, weights, state, text, noise, self.length, state.running, cfg=cfg
        )
        count = state.running[:, None] * self.length
        tree = merge_paths(
            state.root, guesses[:, None], count, width=1 + self.length, num_sources=1
        )
        return reader, tree

    def learn(self, model, params, memory, state, verdict, acceptance) -> Reader:
        return self.read(model, params, forgotten(memory, state.kv.length), state)


def guess_seconds(
    method: DraftModel, model: ModelConfig, costs: Costs, context: float, passes: float
) -> float:
    """Of so many passes of the second model."""
    assert method.model is not None
    share = plain_bytes(method.model, method.slots_at(context)) / plain_bytes(model, context)
    return passes * share * costs.of_pass(1, context)

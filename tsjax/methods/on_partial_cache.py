# SPDX-License-Identifier: Apache-2.0
"""What methods that draft on a partial cache have in common: its settings, its upkeep, its price.

Knows when its tokens are chosen and what that costs. Which ones, draft_choice.py says, and how they
are kept, partial_cache.py.
"""

from __future__ import annotations

import math
from typing import Any

from tsjax.base.checks import check, check_int, one_of
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Int
from tsjax.decoding.method import Method
from tsjax.decoding.state import Acceptance, DecodeState, Verdict
from tsjax.methods.cost_model import Costs
from tsjax.methods.draft_choice import RULES, WINDOW, scores_by
from tsjax.methods.model_drafts import newest
from tsjax.methods.partial_cache import DraftCache, Scores, init_draft_cache, refresh_draft_cache
from tsjax.model.cache import KVCache
from tsjax.model.params import Params

NEVER = "never"
DRAFT_WEIGHTS = ("model", "int8")


class OnPartialCache(Method):
    """A method that drafts on a partial cache. It has these fields, with defaults of its own; what
    they mean, TokenSwift says.
    """

    draft_choice: str
    draft_budget: int
    num_sinks: int
    draft_refresh: int | str | None
    draft_rest: bool = False
    draft_weights: str = "model"

    @property
    def wants_int8(self) -> bool:
        return self.draft_weights == "int8"

    def check_cache(self) -> None:
        """ValueError for a setting that is not valid."""
        rule, budget = self.draft_choice, self.draft_budget
        check(rule in RULES, "draft_choice", rule, one_of(RULES))
        least, why = self.num_sinks, f"num_sinks={self.num_sinks}"
        if rule == "snapkv":
            least, why = least + WINDOW, f"{why} and the last {WINDOW} tokens together"
        check(budget > least, "draft_budget", budget, f"larger than {why}")
        wait = self.draft_refresh
        if isinstance(wait, str):
            check(wait == NEVER, "draft_refresh", wait, f"a number of tokens, None or {NEVER!r}")
        elif wait is not None:
            check_int(wait, "draft_refresh", 1)
        known = self.draft_weights in DRAFT_WEIGHTS
        check(known, "draft_weights", self.draft_weights, one_of(DRAFT_WEIGHTS))

    def new_cache(
        self, model: ModelConfig, batch: int, capacity: int, mesh: Any, *, room: int = 0
    ) -> DraftCache:
        """An empty draft cache for texts of up to `capacity` tokens."""
        budget = capacity if self.draft_choice == "all" else min(self.draft_budget, capacity)
        return init_draft_cache(model, batch, budget, room, mesh, self.draft_rest)

    def kept(
        self,
        model: ModelConfig,
        params: Params,
        cache: DraftCache,
        state: DecodeState,
        verdict: Verdict,
        acceptance: Acceptance,
        max_rows: int,
    ) -> DraftCache:
        """The cache after a step, which commits at most `max_rows` tokens."""
        rows, old = verdict.rows, (cache.query, cache.attended)
        query, attended = newest((rows.query, rows.attended), old, state, acceptance)
        cache = cache.replace(query=query, attended=attended)
        return self.caught_up(model, params, cache, state.kv, state.tokens, max_rows)

    def caught_up(
        self,
        model: ModelConfig,
        params: Params,
        cache: DraftCache,
        kv: KVCache,
        tokens: Int[Array, "B C"],
        max_rows: int,
    ) -> DraftCache:
        """The cache with the tokens that are new in `kv`, or with others where it is time."""
        wait = self.draft_refresh

        def score(asks: Any, kv: KVCache) -> Scores:
            query, tokens = asks
            return scores_by(self.draft_choice, model, params, kv, query, tokens)

        return refresh_draft_cache(
            cache,
            kv,
            num_sinks=self.num_sinks,
            max_rows=max_rows,
            score=score,
            asks=(cache.query, tokens),
            most_new=None if isinstance(wait, str) else wait,
            once=wait == NEVER,
        )

    # --- what it costs -------------------------------------------------------------------------

    def slots_at(self, context: float) -> float:
        """Slots that hold something once a text is so long."""
        return context if self.draft_choice == "all" else min(self.draft_budget, context)

    def pass_seconds(self, costs: Costs, context: float, passes: float) -> float:
        """Of so many drafting passes in a step."""
        slots = self.slots_at(context)
        seconds = passes * costs.of_draft_pass(slots, self.wants_int8)
        if passes and self.draft_rest:  # the partial cache is read once more
            seconds += costs.of_pass(1, slots) - costs.of_pass(1, 0)
        return seconds

    def choice_seconds(self, costs: Costs, context: float, tokens: float) -> float:
        """Of choosing the cache's tokens, for a step that emits so many."""
        slots, wait = self.slots_at(context), self.draft_refresh
        if slots >= context or isinstance(wait, str):
            return 0.0
        between = max(min(wait or math.inf, slots - self.num_sinks), 1)
        return costs.choice.at(context) * min(tokens / between, 1.0)

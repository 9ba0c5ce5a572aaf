# SPDX-License-Identifier: Apache-2.0
"""Drafts of the model itself: candidates for the next tokens, by its passes and its heads.

Knows the model's weights, in int8 too, how its logits become scores, and how often they are right.
Does not know what becomes of the candidates.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from tsjax.base.errors import BadValue
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Bool, DTypeLike, Float, Int, Shaped
from tsjax.decoding.method import Method, Noise
from tsjax.decoding.sampling import best_few, score_choices, step_noise
from tsjax.decoding.state import Acceptance, DecodeState
from tsjax.methods.partial_cache import DraftCache, summarize_rest
from tsjax.model.cache import write_rows
from tsjax.model.control_flow import run_if
from tsjax.model.heads import Head, run_heads, unembed_with_heads
from tsjax.model.narrow import is_narrow
from tsjax.model.params import Params
from tsjax.model.passes import Rows, run_rows
from tsjax.model.transformer import ModelWeights, final_norm

# How often a draft is right when all before it were. Heads among three candidates: what TokenSwift
# reports (Table 3: 3.36 accepted tokens of 4 after a pass, 1.6 of 4 from verified states), spread
# evenly over the depths; where the accuracy of a model's heads is known, it stands for that. The
# rest are assumptions: passes on the partial cache without and with the rest summed up, and the
# share that is left when fewer candidates are drafted.
HEAD_IS_RIGHT = {"partial_cache": 0.83, "verified_state": 0.65}
PASS_IS_RIGHT, PASS_WITH_REST_IS_RIGHT = 0.8, 0.87
SHARE_AMONG = (0.7, 0.88, 1.0)  # the best one, the best two, the best three
DRAFT_IS_RIGHT = 0.5  # of a one-layer drafter of which nothing is known


def tokens_of_chain(right: float, length: int) -> float:
    """Tokens of a step that drafts a chain, each of it right so often when all before it were."""
    return 1.0 + sum(itertools.accumulate([right] * length, operator.mul))


def heads_are_right(model: ModelConfig, count: int, after_a_pass: bool) -> list[float]:
    """How often one of the three best candidates of each of the first heads is right."""
    if model.head_accuracy:
        return [min(share / SHARE_AMONG[0], 1.0) for share in model.head_accuracy[:count]]
    return [HEAD_IS_RIGHT["partial_cache" if after_a_pass else "verified_state"]] * count


def drafts_are_right(model: ModelConfig, count: int) -> list[float]:
    """How often each of the first drafts in a row of the one-layer drafter is right."""
    known = model.drafter.accuracy[:count] if model.drafter is not None else ()
    return [*known, *[known[-1] if known else DRAFT_IS_RIGHT] * (count - len(known))]


class Candidates(flax.struct.PyTreeNode):
    """The candidates of one depth, best first; a score of -inf may not be drafted at all."""

    tokens: Int[Array, "B best_of"]
    scores: Float[Array, "B best_of"]

    @property
    def possible(self) -> Any:
        return self.scores > -jnp.inf


def no_candidates(shape: tuple[int, int], dtype: DTypeLike) -> Candidates:
    return Candidates(jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf, dtype))


def candidates_after(
    best: Int[Array, "B known"],
    logits: Float[Array, "B 1 V"],
    state: DecodeState,
    noise: Noise,
    best_of: int,
) -> Candidates:
    """Candidates for the token after `best`, the root and what is drafted so far, by logits that
    are processed as the model's own will be: the penalty sees these tokens."""
    depth, ancestors = best.shape[1] - 1, None
    if depth:
        positions = state.length[:, None] + jnp.arange(depth, dtype=jnp.int32)
        ancestors = best[:, None, 1:], positions[:, None]
    depths = jnp.full((best.shape[0], 1), depth, jnp.int32)
    scores = score_choices(logits, state.text, depths, noise, state.sampling, ancestors)
    values, tokens = best_few(scores[:, 0], best_of)
    return Candidates(tokens, values)


def weights_for(method: Method, params: Params) -> ModelWeights:
    """Those that a method drafts with. A narrow model drafts with itself."""
    if not method.wants_int8 or is_narrow(params.model):
        return params.model
    if params.drafts is None:
        raise BadValue(
            "draft_weights='int8' needs params with the model in int8: "
            "tsjax.steps.with_int8_drafts(params, cfg), or tsjax.generate, which makes it"
        )
    return params.drafts


def noise_after(
    model: ModelConfig,
    state: DecodeState,
    row: tuple[Array, Int[Array, "B"]],
    known: int,
    more: int,
) -> Float[Array, "B {known+more} V"]:
    """Noise of the positions from a row's length on; 0 at the first `known` ones."""
    row_key, length = row
    noise = step_noise(row_key, length + known, more, model.vocab_size, state.sampling)
    return jnp.pad(noise, ((0, 0), (known, 0), (0, 0)))


class Drafter(NamedTuple):
    """Passes on a partial cache, each a token deeper, and the draft heads after the last one; or
    the heads alone.

    Attributes:
      best_of: candidates of each depth.
      passes: how many.
      with_rest: whether passes also see the tokens that the cache lacks, summed up.
    """

    model: ModelConfig
    weights: ModelWeights
    heads: Sequence[Head]
    state: DecodeState
    best_of: int
    passes: int = 0
    with_rest: bool = False

    def by_heads(
        self, hidden: Float[Array, "B D"], root: Int[Array, "B 1"], noise: Noise
    ) -> list[Candidates]:
        """Candidates of the heads alone, from the hidden state before the root."""
        normed = run_heads(self.heads, self.weights, hidden, cfg=self.model)
        return self._ranked(self.heads, normed, root, noise)

    def _ranked(
        self,
        heads: Sequence[Head],
        normed: Float[Array, "B n D"],
        best: Int[Array, "B known"],
        noise: Noise,
    ) -> list[Candidates]:
        """Candidates for the n tokens after `best`, each after the best ones before it.

        `normed` are the states for them; the last ones are those of `heads`.
        """
        ranked = []
        logits = unembed_with_heads(self.weights, heads, normed, cfg=self.model)
        for index in range(normed.shape[1]):
            one = logits[:, index : index + 1]
            ranked.append(candidates_after(best, one, self.state, noise, self.best_of))
            best = jnp.concatenate([best, ranked[-1].tokens[:, :1]], axis=1)
        return ranked

    def run(
        self,
        cache: DraftCache,
        best: Int[Array, "B 1"],
        noise: Noise,
        wanted: Callable[[int, list[Candidates]], Bool[Array, ""]] | None = None,
    ) -> tuple[DraftCache, list[Candidates], list[Bool[Array, ""]]]:
        """The cache with the drafts' rows after its length, the candidates of each depth, and which
        passes ran: all, or those until one is not `wanted`, by its depth and what comes before it.

        `best`, the root, is what the first pass drafts on. Of a pass that did not run no candidate
        is possible.
        """
        ranked, runs = [], [jnp.any(self.state.running)]
        rest, row = (), (self.state.row_key, self.state.length)
        if wanted is not None and self.with_rest:
            shapes = jax.eval_shape(lambda: summarize_rest(cache))
            rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        for depth in range(self.passes):
            none = no_candidates((best.shape[0], self.best_of), noise.dtype)
            carry = cache, rest, [none] * (1 + len(self._heads_after(depth)))
            inputs = best, noise, row
            if wanted is None:
                cache, rest, found = self._pass(depth, runs[0], carry, *inputs)
            else:
                runs.append(runs[-1] & wanted(depth, ranked))
                one = functools.partial(self._pass, depth, jnp.bool_(True))
                cache, rest, found = run_if(runs[-1], one, carry, *inputs)
            ranked += found
            best = jnp.concatenate([best, found[0].tokens[:, :1]], axis=1)
        return cache, ranked, runs[1:]

    def _pass(self, depth: int, writes: Bool[Array, ""], carry: Any, best, noise: Noise, row):
        """The cache, what it lacks and the candidates after a pass. `best` is what it drafts
        after; noise that is missing is made."""
        (cache, rest, _), heads = carry, self._heads_after(depth)
        if depth + 1 + len(heads) > noise.shape[1]:
            noise = noise_after(self.model, self.state, row, depth, 1 + len(heads))
        if depth == 0 and self.with_rest:
            rest = summarize_rest(cache)
        known = cache.replace(length=cache.length + depth)
        positions, alone = self.state.kv.length[:, None] + depth, jnp.ones((1, 1), bool)
        rows = run_rows(
            self.weights, known, best[:, -1:], positions, alone, cfg=self.model, rest=rest
        )
        normed = final_norm(self.weights, rows.hidden, cfg=self.model)
        if heads:
            deeper = run_heads(heads, self.weights, rows.hidden[:, 0], cfg=self.model)
            normed = jnp.concatenate([normed, deeper], axis=1)
        if depth < self.passes - 1:
            cache = with_draft(cache, rows, known.length, writes)
        return cache, rest, self._ranked(heads, normed, best, noise)

    def _heads_after(self, depth: int) -> Sequence[Head]:
        return self.heads if depth == self.passes - 1 else ()


def with_draft(
    cache: DraftCache, rows: Rows, start: Int[Array, "B"], wanted: Bool[Array, ""]
) -> DraftCache:
    """Writes a draft's row at the slots `start`, in place.

    In a loop, as XLA would merge the write with each reader of the cache and copy it for that.
    """

    def write(cache: DraftCache, rows: Rows, start: Int[Array, "B"]) -> DraftCache:
        return write_rows(cache, rows.k, rows.v, start, after=rows.hidden)

    return run_if(wanted, write, cache, rows, start)


def newest(new: Any, old: Any, state: DecodeState, acceptance: Acceptance) -> Any:
    """Of arrays with a row for each node, those of the last committed nodes; `old` where a batch
    row committed none."""
    b = jnp.arange(state.emitted.shape[0])
    last = acceptance.path[b, jnp.maximum(state.emitted - 1, 0)]

    def one(new: Shaped[Array, "B T ..."], old: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
        changed = (state.emitted > 0).reshape(-1, *(1,) * (old.ndim - 1))
        return jnp.where(changed, new[b, last], old)

    return jax.tree.map(one, new, old)

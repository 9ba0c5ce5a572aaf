# SPDX-License-Identifier: Apache-2.0
"""Drafts of the model itself: candidates for the next tokens, and the rows of a drafting pass.

Knows the model's weights, in int8 too, and how its logits become scores. Does not know how many
passes a method runs, nor what becomes of the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from tsjax.config import ModelConfig
from tsjax.decoding.method import Method
from tsjax.decoding.sampling import best_few, score_choices
from tsjax.decoding.state import Acceptance, DecodeState
from tsjax.errors import BadValue
from tsjax.methods.partial_cache import DraftCache
from tsjax.model.cache import write_rows
from tsjax.model.control_flow import run_if
from tsjax.model.heads import Head, unembed_with_heads
from tsjax.model.params import Params
from tsjax.model.passes import Rows
from tsjax.model.transformer import ModelWeights
from tsjax.typing import Array, Float, Int


class Candidates(flax.struct.PyTreeNode):
    """The candidates of one depth, best first; a score of -inf may not be drafted at all."""

    tokens: Int[Array, "B best_of"]
    scores: Float[Array, "B best_of"]

    @property
    def possible(self) -> Any:
        return self.scores > -jnp.inf


def no_candidates(shape: tuple[int, int], dtype) -> Candidates:
    return Candidates(jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf, dtype))


def weights_for(method: Method, params: Params) -> ModelWeights:
    """Those that a method drafts with."""
    if not method.wants_int8:
        return params.model
    if params.drafts is None:
        raise BadValue(
            "draft_weights='int8' needs params with the model in int8: "
            "tsjax.with_int8_drafts(params, cfg), or tsjax.generate, which makes it"
        )
    return params.drafts


def rank(
    model: ModelConfig,
    weights: ModelWeights,
    heads: Sequence[Head],
    state: DecodeState,
    normed: Float[Array, "B n D"],
    best: Int[Array, "B known"],
    noise: Float[Array, "B levels V"],
    best_of: int,
) -> list[Candidates]:
    """Candidates by the drafts' logits, processed as the model's own will be.

    `normed` are the states for the n tokens after `best`, the root and what is drafted so far; the
    last ones are those of `heads`. The penalty sees these tokens, and the best of the n in turn.
    """
    ranked = []
    logits = unembed_with_heads(weights, heads, normed, cfg=model)
    for index in range(normed.shape[1]):
        depth = best.shape[1] - 1
        ancestors = None
        if depth:
            positions = state.length[:, None] + jnp.arange(depth, dtype=jnp.int32)
            ancestors = best[:, None, 1:], positions[:, None]
        depths = jnp.full((best.shape[0], 1), depth, jnp.int32)
        one = logits[:, index : index + 1]
        scores = score_choices(one, state.text, depths, noise, state.sampling, ancestors)
        values, tokens = best_few(scores[:, 0], best_of)
        ranked.append(Candidates(tokens, values))
        best = jnp.concatenate([best, tokens[:, :1]], axis=1)
    return ranked


def with_draft(cache: DraftCache, rows: Rows, start, wanted) -> DraftCache:
    """Writes a draft's row at the slots `start` [B], in place.

    In a loop, as XLA would merge the write with each reader of the cache and copy it for that.
    """

    def write(cache, rows, start):
        return write_rows(cache, rows.k, rows.v, start, after=rows.hidden)

    return run_if(wanted, write, cache, rows, start)


def newest(new, old, state: DecodeState, acceptance: Acceptance):
    """Of arrays with a row for each node, those of the last committed nodes; `old` where a batch
    row committed none."""
    b = jnp.arange(state.emitted.shape[0])
    last = acceptance.path[b, jnp.maximum(state.emitted - 1, 0)]

    def one(new, old):
        changed = (state.emitted > 0).reshape(-1, *(1,) * (old.ndim - 1))
        return jnp.where(changed, new[b, last], old)

    return jax.tree.map(one, new, old)

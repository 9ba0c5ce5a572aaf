# SPDX-License-Identifier: Apache-2.0
"""Which prompt tokens the layers after a cut take: scores by attention, and the best of them.

Knows what rows attended to and what a prompt's state says. Computes no token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import cache_scores, threshold
from tsjax.decoding.noise import uniform
from tsjax.decoding.sampling import sortable
from tsjax.decoding.state import DecodeState
from tsjax.lazy.settings import LazySettings, kept
from tsjax.lazy.state import LazyPlan, PromptState
from tsjax.model.cache import KVCache
from tsjax.model.parts import counts_by_part, for_each_part, in_order
from tsjax.model.passes import Rows


def scores_of(plan: LazyPlan, prompt: PromptState, kv: KVCache, stage: int, rows: Rows):
    """[B, P]: the attention that each prompt token gets from rows in a stage's last layers.

    The mean over query heads, with all that a row sees in the denominator; sums over the rows and
    over `score_layers` layers.
    """
    lazy, (B, P) = plan.lazy, prompt.done.shape
    if lazy.scores == "random":
        return jnp.broadcast_to(uniform(lazy.seed, P), (B, P))
    layers = plan.stages[stage]
    total = jnp.zeros((), jnp.float32)
    for layer, attended in list(zip(layers, rows.attended, strict=True))[-lazy.score_layers :]:
        query, (_, log_totals) = attended
        for row in range(query.shape[1]):
            asks = (for_each_part(x[:, row], kv.parts) for x in (query, log_totals))
            total = total + _by_slot(kv, layer, *asks)
    if stage == 0:
        return total[:, :P]
    slots, lacks = prompt.slots[stage - 1], prompt.order[stage - 1].shape[1]
    found = jnp.take_along_axis(total, jnp.minimum(slots, lacks - 1), axis=1)
    return jnp.where(slots < lacks, found, 0)


def _by_slot(kv: KVCache, layer: int, query, log_totals):
    """[B, C or more]: the attention that each slot of a layer gets from a query [PB, N, H]."""
    count = counts_by_part(kv.rows_in(layer), kv.parts)
    found = cache_scores(query, kv.k[layer], count, "softmax", log_totals=log_totals)
    return in_order(found[:, None], kv.parts)[:, 0]


def scores_of_each_other(plan: LazyPlan, rows: Rows, causal):
    """[B, W]: what rows add to the scores of one another, which no cache holds yet."""
    lazy, model = plan.lazy, plan.model
    total = jnp.zeros((), jnp.float32)
    for keys, attended in list(zip(rows.k, rows.attended, strict=True))[-lazy.score_layers :]:
        query, (_, log_totals) = attended
        B, W, N, H = query.shape
        shape = (B, W, model.num_kv_heads, model.group_size)
        products = jnp.einsum(
            "bwkgh,bukh->bwukg", query.reshape(*shape, H), keys,
            preferred_element_type=log_totals.dtype,
        )  # fmt: skip
        weights = jnp.exp(products * H**-0.5 - log_totals.reshape(shape)[:, :, None])
        total = total + jnp.where(causal, jnp.sum(weights, axis=(3, 4)) / N, 0).sum(axis=1)
    return total


def goes_on(lazy: LazySettings, stage: int, tokens):
    """How many of a prompt's tokens take part in a stage after a cut; of an int or of [B]."""
    xp, share = jnp if isinstance(tokens, jax.Array) else np, kept(lazy.cuts[stage - 1][1], tokens)
    return xp.maximum(share, xp.minimum(lazy.at_least, tokens)) if lazy.at_least else share


def _lent_around(plan: LazyPlan, scores, among, state: DecodeState):
    """Scores [B, P] by which tokens are compared: each has lent its own to those around it, or to
    its block, as far as these are `among` those to choose from."""
    lazy, position = plan.lazy, jnp.arange(among.shape[1])
    takes_part = among & (position >= state.prompt.prefix)
    takes_part &= position < state.prompt_length[:, None]
    if lazy.pool > 1:
        scores = lax.reduce_window(
            jnp.where(takes_part, scores, 0), 0.0, lax.max, (1, lazy.pool), (1, 1), "SAME"
        )
    if lazy.block_tokens > 1:
        (B, P), block = scores.shape, lazy.block_tokens  # the last of which may be shorter
        blocks = jnp.pad(jnp.where(takes_part, scores, 0), ((0, 0), (0, -P % block)))
        sums = jnp.sum(blocks.reshape(B, -1, block), axis=2)
        scores = jnp.repeat(sums, block, axis=1)[:, :P]
    return scores


def chosen_for(plan: LazyPlan, stage: int, scores, among, state: DecodeState, committed, recent):
    """[B, P] bool: the prompt tokens that take part in a stage; and the scores that they are
    compared by.

    Of the prompts' tokens after the prefix, `goes_on` are chosen `among` some [B, P] that are
    also among the first `committed` [B]. Those beyond, of which the prompt's last token may be one,
    and those of the prefix take part anyway. The last `recent` (an int) are always chosen.
    """
    lazy, position, prompt_length = plan.lazy, jnp.arange(among.shape[1]), state.prompt_length
    scores, prefix = _lent_around(plan, scores, among, state), state.prompt.prefix
    is_committed, is_new = position < committed[:, None], position >= prefix
    candidates = among & is_committed & is_new
    always = (position < lazy.sinks) | (position >= prompt_length[:, None] - recent)
    always &= candidates
    count = goes_on(lazy, stage, prompt_length - prefix) - (prompt_length - committed)
    count = jnp.maximum(count, jnp.sum(always, axis=1, dtype=jnp.int32))
    best = best_tokens(jnp.where(always, jnp.inf, scores), candidates, count)
    return best | ~is_committed | ~is_new, scores


def best_tokens(scores, candidates, count):
    """[B, P] bool: of the candidates, the `count` [B] with the highest scores; ties by position.

    Exact whatever P is: the lowest score that is taken is found digit by digit.
    """
    count, keys = count[:, None], jnp.where(candidates, sortable(scores), 0)
    others = jnp.maximum(keys.shape[1] - count, 0)
    lowest = threshold(keys, others.astype(keys.dtype))
    above, equal = keys > lowest, candidates & (keys == lowest)
    room = count - jnp.sum(above, axis=1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, axis=1, dtype=jnp.int32) <= room))

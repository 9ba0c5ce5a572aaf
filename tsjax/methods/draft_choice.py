# SPDX-License-Identifier: Apache-2.0
"""Which tokens a draft cache holds: rules that score the committed ones.

Knows what each rule reads. Does not know how a cache is kept: that is partial_cache.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import NarrowRows, cache_scores
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Float, Int, Num, Shaped
from tsjax.methods.partial_cache import Scores, importance
from tsjax.model.cache import KVCache
from tsjax.model.params import Params
from tsjax.model.parts import counts_by_part, dealt_out, for_each_part, in_order, positions_by_part
from tsjax.model.passes import run_rows

CHUNK = 8  # tokens that "retrieval" takes together
WINDOW, POOL = 32, 5  # of "snapkv": the last tokens, which ask, and neighbours that count together
RULES = ("importance", "retrieval", "streaming", "snapkv", "all")


def scores_by(
    rule: str,
    model: ModelConfig,
    params: Params,
    kv: KVCache,
    query: tuple[Float[Array, "B K H"], ...],
    tokens: Int[Array, "B C"],
) -> Scores:
    """Of each layer, how much a rule wants each committed token; `query` is the newest one's."""
    layers = range(len(kv.k))
    if rule == "streaming":
        return tuple(by_position(kv.k[layer], kv.rows_in(layer), kv.parts) for layer in layers)
    if rule == "snapkv":
        return asked_by_window(model, params, kv, tokens)
    scores = importance(query, kv)
    if rule == "retrieval":
        ordered = (in_order(one, kv.parts) for one in scores)
        chunks = map(by_chunk, ordered, map(kv.rows_in, layers))
        return tuple(dealt_out(one, kv.parts) for one in chunks)
    return scores


def by_position(
    keys: Float[Array, "R K S H"] | NarrowRows, count: Int[Array, "B"], parts: int = 1
) -> Float[Array, "R K S"]:
    """The later the better."""
    R, K, S, _ = keys.shape
    here = positions_by_part(R, S, parts)
    exists = here < for_each_part(count, parts)[:, None]
    scores = jnp.where(exists, here.astype(jnp.float32), -jnp.inf)
    return jnp.broadcast_to(scores[:, None], (R, K, S))


def by_chunk(scores: Float[Array, "B K S"], rows: Int[Array, "B"]) -> Float[Array, "B K S"]:
    """The mean of a chunk for each of its tokens: what its mean key would have. The last chunk is
    of the tokens that it has."""
    B, K, S = scores.shape
    whole = -(-S // CHUNK) * CHUNK
    exists = (jnp.arange(S, dtype=jnp.int32)[None] < rows[:, None])[:, None]  # [B, 1, S]

    def sums(x: Num[Array, "B K S"]) -> Num[Array, "B K chunks"]:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, whole - S)))
        return jnp.sum(x.reshape(*x.shape[:2], -1, CHUNK), axis=-1)

    count = sums(exists.astype(scores.dtype))
    means = sums(jnp.where(exists, scores, 0)) / jnp.maximum(count, 1)
    means = jnp.repeat(means, CHUNK, axis=2)[..., :S]
    return jnp.where(exists, means, -jnp.inf)


def asked_by_window(
    model: ModelConfig, params: Params, kv: KVCache, tokens: Int[Array, "B C"]
) -> Scores:
    """The attention of the last WINDOW tokens to those before them, a mean over them, the query
    heads of a kv head and POOL neighbours. These tokens themselves come first.

    They run through the model once more for that, so nothing has to be kept from step to step.
    """
    begin = jnp.maximum(kv.length - WINDOW, 0)
    positions = begin[:, None] + jnp.arange(WINDOW, dtype=jnp.int32)[None]
    tokens = jnp.take_along_axis(tokens, positions, axis=1, mode="clip")
    exists = positions < kv.length[:, None]  # [B, WINDOW]
    causal = jnp.tril(jnp.ones((WINDOW, WINDOW), bool))
    before = kv.replace(length=begin)
    if kv.absent is not None:  # of a lazily read prompt: then less than a layer has is seen
        before = before.replace(absent=jnp.minimum(kv.absent, begin[None]))
    rows = run_rows(params.model, before, tokens, positions, causal, cfg=model, with_attended=True)

    @jax.jit  # traced once for all layers
    def of_layer(query, log_totals, keys, length):
        R, K, S, _ = keys.shape

        def by_kv_head(x: Shaped[Array, "B W N ..."]):  # -> [R * K, WINDOW * N / K, ...]
            x = x.reshape(*x.shape[:2], K, -1, *x.shape[3:])
            x = for_each_part(jnp.moveaxis(x, 2, 1), kv.parts)
            return x.reshape(R * K, -1, *x.shape[4:])

        # What a row beyond the text asks for is nothing.
        log_totals = jnp.where(exists[..., None], log_totals, jnp.inf)
        scores = cache_scores(
            by_kv_head(query),
            jax.tree.map(lambda x: x.reshape(R * K, 1, *x.shape[2:]), keys),
            jnp.repeat(counts_by_part(length, kv.parts), K),
            "softmax",
            log_totals=by_kv_head(log_totals),
        ).reshape(R, K, S)
        scores = in_order(scores, kv.parts)
        S, length = scores.shape[2], length[:, None, None]
        here = jnp.arange(S, dtype=jnp.int32)[None, None]
        asks = here >= length - WINDOW
        near = jnp.pad(jnp.where(asks, 0, scores), ((0, 0), (0, 0), (POOL // 2, POOL // 2)))
        pooled = sum(near[..., shift : shift + S] for shift in range(POOL)) / POOL
        first = 1 + here.astype(scores.dtype)  # more than any attention
        found = jnp.where(here < length, jnp.where(asks, first, pooled), -jnp.inf)
        return dealt_out(found, kv.parts)

    return tuple(
        of_layer(asked.query, asked.summary.log_total, kv.k[layer], kv.rows_in(layer))
        for layer, asked in enumerate(rows.attended)
    )

# SPDX-License-Identifier: Apache-2.0
"""What the model says of a whole text: hidden states and logits, without any decoding.

Knows passes and a cache of its own. Does not know how tokens are chosen.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from tsjax.config import ModelConfig
from tsjax.model.cache import init_cache, write_rows
from tsjax.model.params import Params
from tsjax.model.passes import run_rows
from tsjax.model.transformer import final_norm, unembed


def hidden_states(params: Params, tokens, *, cfg: ModelConfig, width: int = 512):
    """The last layer's output [B, T, D], before the final norm, at every position of tokens [B, T].

    Runs `width` rows at a time against a cache of its own, so no T x T array exists.
    """
    return tapped_states(params, tokens, cfg=cfg, taps=(cfg.num_layers,), width=width)[:, :, 0]


def tapped_states(
    params: Params, tokens, *, cfg: ModelConfig, taps: tuple[int, ...], width: int = 512
):
    """As `hidden_states`, what there is after so many layers: [B, T, taps, D]."""
    batch, length = tokens.shape
    width = min(width, length)
    chunks = -(-length // width)
    padded = jnp.pad(jnp.asarray(tokens, jnp.int32), ((0, 0), (0, chunks * width - length)))
    causal = jnp.tril(jnp.ones((width, width), bool))

    def body(cache, tokens):
        positions = cache.length[:, None] + jnp.arange(width, dtype=jnp.int32)
        rows = run_rows(params.model, cache, tokens, positions, causal, cfg=cfg, taps=taps)
        cache = write_rows(cache, rows.k, rows.v, cache.length, after=rows.hidden)
        return cache.replace(length=cache.length + width), jnp.stack(rows.taps, axis=2)

    rows = jnp.swapaxes(padded.reshape(batch, chunks, width), 0, 1)
    cache = init_cache(cfg, batch, chunks * width)
    # Or else XLA takes a long time to find out what attention to an empty cache comes to.
    cache = cache.replace(length=lax.optimization_barrier(cache.length))
    _, found = lax.scan(body, cache, rows)
    return jnp.swapaxes(found, 0, 1).reshape(batch, chunks * width, len(taps), -1)[:, :length]


def logits(params: Params, tokens, *, cfg: ModelConfig, width: int = 512):
    """Logits [B, T, V] of every position of tokens [B, T]: the model without any decoding."""
    hidden = hidden_states(params, tokens, cfg=cfg, width=width)
    return unembed(params.model, final_norm(params.model, hidden, cfg=cfg), cfg=cfg)

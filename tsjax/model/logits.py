# SPDX-License-Identifier: Apache-2.0
"""What the model says of a whole text: hidden states and logits, without any decoding.

Knows passes and a cache of its own. Does not know how tokens are chosen.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsjax.base.model_config import ModelConfig
from tsjax.model.cache import init_cache, write_rows
from tsjax.model.params import Params
from tsjax.model.passes import run_layers, run_rows
from tsjax.model.transformer import embed, final_norm, unembed


def hidden_states(
    params: Params, tokens, *, cfg: ModelConfig, width: int = 512, remat: bool = False
):
    """The last layer's output [B, T, D], before the final norm, at every position of tokens [B, T].

    Runs `width` rows at a time against a cache of its own, so no T x T array exists. With `remat` a
    gradient keeps what goes into each layer, and computes the rest of it once more.
    """
    taps, run = (cfg.num_layers,), _by_layer if remat else _at_once
    return _states(params, tokens, run, cfg=cfg, taps=taps, width=width)[:, :, 0]


def tapped_states(
    params: Params, tokens, *, cfg: ModelConfig, taps: tuple[int, ...], width: int = 512
):
    """As `hidden_states`, what there is after so many layers: [B, T, taps, D]."""
    return _states(params, tokens, _at_once, cfg=cfg, taps=taps, width=width)


def _at_once(weights, cache, tokens, positions, mask, *, cfg: ModelConfig, taps):
    """Keys and values of a pass, the last layer's output, and what there is at the taps."""
    rows = run_rows(weights, cache, tokens, positions, mask, cfg=cfg, taps=taps)
    return rows.k, rows.v, rows.hidden, rows.taps


def _by_layer(weights, cache, tokens, positions, mask, *, cfg: ModelConfig, taps):
    """The same, of which a gradient keeps little. The only tap is the last layer's."""
    hidden, keys, values = embed(weights, tokens), [], []

    def one(hidden, cache, weights, index):
        layers = range(index, index + 1)
        rows = run_layers(weights, cache, hidden, positions, mask, layers, cfg=cfg)
        return rows.hidden, rows.k[0], rows.v[0]

    again = jax.checkpoint(one, static_argnums=3)
    for index in range(cfg.num_layers):
        hidden, k, v = again(hidden, cache, weights, index)
        keys.append(k)
        values.append(v)
    return tuple(keys), tuple(values), hidden, (hidden,)


def _states(params: Params, tokens, run, *, cfg: ModelConfig, taps: tuple[int, ...], width: int):
    batch, length = tokens.shape
    width = min(width, length)
    chunks = -(-length // width)
    padded = jnp.pad(jnp.asarray(tokens, jnp.int32), ((0, 0), (0, chunks * width - length)))
    causal = jnp.tril(jnp.ones((width, width), bool))

    def body(cache, tokens):
        positions = cache.length[:, None] + jnp.arange(width, dtype=jnp.int32)
        found = run(params.model, cache, tokens, positions, causal, cfg=cfg, taps=taps)
        keys, values, hidden, tapped = found
        cache = write_rows(cache, keys, values, cache.length, after=hidden)
        return cache.replace(length=cache.length + width), jnp.stack(tapped, axis=2)

    rows = jnp.swapaxes(padded.reshape(batch, chunks, width), 0, 1)
    cache = init_cache(cfg, batch, chunks * width)
    # Or else XLA takes a long time to find out what attention to an empty cache comes to.
    cache = cache.replace(length=lax.optimization_barrier(cache.length))
    _, found = lax.scan(body, cache, rows)
    return jnp.swapaxes(found, 0, 1).reshape(batch, chunks * width, len(taps), -1)[:, :length]


def logits(params: Params, tokens, *, cfg: ModelConfig, width: int = 512, remat: bool = False):
    """Logits [B, T, V] of every position of tokens [B, T]: the model without any decoding."""
    hidden = hidden_states(params, tokens, cfg=cfg, width=width, remat=remat)
    return unembed(params.model, final_norm(params.model, hidden, cfg=cfg), cfg=cfg)

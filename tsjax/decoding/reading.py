# SPDX-License-Identifier: Apache-2.0
"""Reading what is known before the first step: the prefill, in parts and passes.

Knows how passes fill the cache. A part is a row of passes of one width and, where the parts that
follow depend on it, an end of its own. A whole prompt is one part; a lazy prefill has one for each
of its stages. What a resumed run had made is read with the prompt, or after a lazy prefill by
itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tsjax.base.checks import check
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.state import DecodeState
from tsjax.model.cache import write_rows
from tsjax.model.params import Params
from tsjax.model.passes import run_rows

# Of a state, what differs from run to run and no pass reads: without it all runs share programs.
UNREAD = ("memory", "stats", "sampling", "last_seen", "counts", "logprobs")


def parts(cfg: DecodeConfig, known) -> list:
    """How many of `known` tokens, at most, each part reads; of an int or of [B]. Tokens that were
    read before are not among them.

    The last known token of a row is read by no part: it is the root of the first step.
    """
    return [known - 1] if cfg.prefill is None else cfg.prefill.parts(cfg.model, known)


def reading_config(cfg: DecodeConfig) -> DecodeConfig:
    """What the passes of a prefill are compiled for: runs of all methods share them."""
    return DecodeConfig(model=cfg.model, prefill=cfg.prefill and cfg.prefill.for_reading())


def prefill(params: Params, state: DecodeState, *, width: int, cfg: DecodeConfig) -> DecodeState:
    """Commits all known tokens but the last of each row, `width` at a time, up to the longest."""
    if cfg.prefill is not None:
        cfg.prefill.check_width(state, width)
    for part, tokens in enumerate(parts(cfg, state.length)):

        def body(index, state, part=part):
            return read_part(params, state, index * width, part=part, width=width, cfg=cfg)

        passes = (jnp.max(tokens) + width - 1) // width
        state = lax.fori_loop(0, passes, body, state)
        if cfg.prefill is not None:
            state = finish_part(params, state, part=part, cfg=cfg)
    return state


def read_part(
    params: Params, state: DecodeState, start, *, part: int, width: int, cfg: DecodeConfig
) -> DecodeState:
    """One pass of a part: its next `width` tokens, from the `start`-th (traced) on, of every row
    that has them.

    All but the last known token of a row are committed by prefill: that one is the root of the
    first step. Until all passes are through, `kv.length` names the goal, not what the cache holds.
    Rows that end earlier compute garbage, which lands in unspecified slots. A pass that would leave
    the buffers begins earlier and computes a few tokens again.
    """
    if cfg.prefill is not None:
        return cfg.prefill.read_part(params, state, part=part, width=width, cfg=cfg)
    capacity = state.tokens.shape[1]
    check(width <= capacity, "width", width, f"at most the capacity {capacity}")
    with jax.named_scope("prefill"):
        start = jnp.minimum(start, capacity - width)
        tokens = lax.dynamic_slice_in_dim(state.tokens, start, width, axis=1)
        begin = jnp.full(state.kv.length.shape, start, jnp.int32)
        causal = jnp.tril(jnp.ones((width, width), bool))
        cache = state.kv.replace(length=begin)
        positions = begin[:, None] + jnp.arange(width, dtype=jnp.int32)
        rows = run_rows(params.model, cache, tokens, positions, causal, cfg=cfg.model)
        cache = write_rows(cache, rows.k, rows.v, begin, after=rows.k[-1])
        return state.replace(kv=cache.replace(length=state.kv.length))


def finish_part(params: Params, state: DecodeState, *, part: int, cfg: DecodeConfig) -> DecodeState:
    """What comes after the passes of a part."""
    if cfg.prefill is None:
        return state
    return cfg.prefill.finish_part(params, state, part=part, cfg=cfg)


def complete(params: Params, state: DecodeState, *, width: int, cfg: DecodeConfig) -> DecodeState:
    """After a lazy prefill, one pass over what it has left out: the next `width` tokens, in all
    layers that lack some of them."""
    return cfg.prefill.complete(params, state, width=width, cfg=cfg)


def slots_of_layers(state: DecodeState, *, cfg: DecodeConfig) -> dict[int, jax.Array]:
    """After a lazy prefill, which slot has the token of each position [B, C], for each layer where
    that is not the same."""
    return cfg.prefill.slots_of_layers(state, cfg=cfg)


def read_made(params: Params, state: DecodeState, start, *, width: int, cfg: DecodeConfig):
    """After a lazy prefill, one pass over what a resumed run had made: its next `width` tokens."""
    return cfg.prefill.read_made(params, state, start, width=width, cfg=cfg)

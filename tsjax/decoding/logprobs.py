# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens: by the model's own distribution, and by the one it was drawn from.

Knows logits. Does not know who chose a token.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from tsjax.base.model_config import ModelConfig
from tsjax.decoding.law import log_softmax
from tsjax.decoding.sampling import best_few
from tsjax.model.logits import hidden_states
from tsjax.model.params import Params
from tsjax.model.transformer import final_norm, unembed

SCORED_AT_ONCE = 128  # positions whose logits exist at a time


class LogProbs(flax.struct.PyTreeNode):
    """Natural logarithms, one entry for each token; on the host one object for each row.

    Attributes:
      raw: of each token by the softmax of the model's logits.
      top_tokens, top: the most probable tokens by the same, best first, and theirs; -1 where no
        more tokens are possible.
      processed: of each token by the distribution it was drawn from: after penalties and
        processors and, when sampling, temperature and truncations. None where a text was given.
      processed_top_tokens, processed_top: the most probable ones by that.
    """

    raw: Any  # [..., n]
    top_tokens: Any  # [..., n, k]
    top: Any
    processed: Any = None
    processed_top_tokens: Any = None
    processed_top: Any = None


def empty_log_probs(batch: int, capacity: int, count: int, dtype) -> LogProbs:
    one = jnp.zeros((batch, capacity), dtype)
    some, tokens = (jnp.zeros((batch, capacity, count), kind) for kind in (dtype, jnp.int32))
    # A state is donated, so no two of its arrays are one.
    return LogProbs(one, tokens, some, *map(jnp.copy, (one, tokens, some)))


def log_probs_of(logits, processed, tokens, count: int) -> LogProbs:
    """Log-probabilities of tokens [B, T] by the logits [B, T, V], and by the processed ones."""
    return LogProbs(*_of(logits, tokens, count), *_of(processed, tokens, count))


def _of(logits, tokens, count: int):
    found = log_softmax(logits)
    chosen = jnp.take_along_axis(found, tokens[..., None], axis=-1)[..., 0]
    if not count:
        nothing = (*tokens.shape, 0)
        return chosen, jnp.zeros(nothing, jnp.int32), jnp.zeros(nothing, found.dtype)
    top, top_tokens = best_few(found, count)
    return chosen, jnp.where(top > -jnp.inf, top_tokens, -1), top


def text_log_probs(
    params: Params, tokens, *, cfg: ModelConfig, count: int, width: int = 512, remat: bool = False
):
    """The log-probability of each of tokens [B, T] after those before it; the first's is 0.

    A few positions at a time: logits of a whole text are never there at once, with `remat` not for
    a gradient either, see `hidden_states`.
    """
    hidden = hidden_states(params, tokens, cfg=cfg, width=width, remat=remat)
    batch, length = tokens.shape
    blocks = -(-length // SCORED_AT_ONCE)
    missing = blocks * SCORED_AT_ONCE - length
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1 + missing)))
    hidden = jnp.pad(hidden, ((0, 0), (0, missing), (0, 0)))

    def block(carry, index):
        start = index * SCORED_AT_ONCE
        some = lax.dynamic_slice_in_dim(hidden, start, SCORED_AT_ONCE, axis=1)
        wanted = lax.dynamic_slice_in_dim(following, start, SCORED_AT_ONCE, axis=1)
        logits = unembed(params.model, final_norm(params.model, some, cfg=cfg), cfg=cfg)
        return carry, _of(logits, wanted, count)

    body = jax.checkpoint(block) if remat else block
    _, found = lax.scan(body, None, jnp.arange(blocks, dtype=jnp.int32))

    def shifted(x):  # [blocks, B, n, ...] -> [B, T, ...], each entry at the token it is of
        x = jnp.moveaxis(x, 0, 1).reshape(batch, blocks * SCORED_AT_ONCE, *x.shape[3:])
        return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, : length - 1]], axis=1)

    return LogProbs(*map(shifted, found))

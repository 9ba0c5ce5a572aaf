# SPDX-License-Identifier: Apache-2.0
"""What a drafter of one layer is trained by: pure functions of arrays.

Knows the loss and how a drafter is unrolled at all positions of a text at once. Does not know
texts, files, optimisers or how long a run lasts.

A drafter that starts at position p drafts the tokens p + 2, p + 3, ...: its row j, from 0, stands
for position p + j and takes the text's own token p + j + 1, as a draft matters only where those
before it were right. It sees what was fused from the model's states up to p, and its own rows
after that.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import rms_norm
from tsjax.config import ModelConfig
from tsjax.model.drafter import DrafterWeights, draft_rows, fused
from tsjax.model.layers import linear
from tsjax.model.transformer import ModelWeights, final_norm, unembedding
from tsjax.typing import Array, Float, Int, accumulation_dtype

NEVER = -1e30  # the score of what a row does not see
OF_VARIATION = 0.9  # what total variation counts in the loss; cross-entropy has the rest


class Batch(flax.struct.PyTreeNode):
    """Pieces of texts: what the model computed for them, and what it says next.

    Attributes:
      taps: of the model's layers.
      last: the last layer's output, before the final norm.
      tokens: of the pieces.
      ends: tokens of each piece; what follows is unspecified.
      first: of each piece, the first token whose drafts count.
    """

    taps: Float[Array, "N P n D"]
    last: Float[Array, "N P D"]
    tokens: Int[Array, "N P"]
    ends: Int[Array, "N"]
    first: Int[Array, "N"]


class Agreement(flax.struct.PyTreeNode):
    """Sums over positions, for each of J drafts in a row: what is minimised, the share of the
    model's distribution that the drafter's covers, and how many were counted."""

    loss: Float[Array, "J"]
    overlap: Float[Array, "J"]
    counted: Float[Array, "J"]


def unrolled(
    weights: DrafterWeights,
    embed: Float[Array, "V D"],
    taps: Float[Array, "N P n D"],
    tokens: Int[Array, "N P"],
    starts: Int[Array, "A"],
    depth: int,
    *,
    cfg: ModelConfig,
) -> list[Float[Array, "N rows D"]]:
    """The states after each of `depth` rows: the first of drafters that start at every position,
    the others of those alone that start at `starts`.

    The last positions lack tokens: what is there is unspecified.
    """
    assert cfg.drafter is not None
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    states, embedded, found = fused(weights, taps, cfg=cfg), embed[tokens], []
    rows = _Rows(places, cfg.drafter.window, [], [])
    for row in range(depth):
        if row == 1:
            states, places = states[:, starts], starts
            rows = rows.from_starts(starts)
        following = jnp.roll(embedded, -(row + 1), axis=1)[:, places]
        positions = jnp.broadcast_to(places[None] + row, states.shape[:2])
        states, _, _ = draft_rows(weights, states, following, positions, rows.attend, cfg=cfg)
        found.append(states)
    return found


class _Rows:
    """Keys and values of the rows so far: the first ones of all positions, and those that drafters
    add which start at `places`."""

    def __init__(self, places: Int[Array, "A"], window: int, keys: list, values: list):
        self._places, self._window, self._keys, self._values = places, window, keys, values

    def from_starts(self, starts: Int[Array, "A"]) -> _Rows:
        return _Rows(starts, self._window, self._keys, self._values)

    def attend(self, q, k, v):
        """Attention to the first rows of all positions up to a drafter's start, and to its own rows
        after that, of which these are the last."""
        self._keys.append(k)
        self._values.append(v)
        N, A, heads, H = q.shape
        K, P, wide = k.shape[2], self._keys[0].shape[1], accumulation_dtype(q.dtype)
        grouped = q.reshape(N, A, K, heads // K, H)
        behind = self._places[:, None] - jnp.arange(P, dtype=jnp.int32)[None]
        seen = (behind >= 0) & (behind < self._window)
        of_all = jnp.einsum(
            "nakgh,nskh->nkgas", grouped, self._keys[0], preferred_element_type=wide
        )
        scores = [jnp.where(seen, of_all, NEVER)]
        for key in self._keys[1:]:
            own = jnp.einsum("nakgh,nakh->nkga", grouped, key)
            scores.append(own[..., None].astype(wide))
        shares = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * H**-0.5, axis=-1)
        shares = shares.astype(q.dtype)
        mixed = jnp.einsum("nkgas,nskh->nakgh", shares[..., :P], self._values[0])
        for index, value in enumerate(self._values[1:]):
            share = jnp.moveaxis(shares[..., P + index], 3, 1)[..., None]  # [N, A, K, G, 1]
            mixed = mixed + share * value[:, :, :, None]
        return mixed.reshape(N, A, heads, H)


def measure(
    weights: DrafterWeights,
    model: ModelWeights,
    batch: Batch,
    temperature: Any,
    starts: Int[Array, "A"],
    *,
    depth: int,
    cfg: ModelConfig,
) -> Agreement:
    """How far `depth` drafts in a row agree with what the model says, at a temperature; all but the
    first ones of drafters that start at `starts`."""
    states = unrolled(weights, model.embed, batch.taps, batch.tokens, starts, depth, cfg=cfg)
    wanted = said_by_model(weights, model, batch.last, temperature, cfg=cfg)
    places, found = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32), []
    for row, state in enumerate(states):
        if row == 1:
            places = starts
        # What the model says after token p + row + 1, where there is such a token.
        at = places[None] + row + 1
        counts = (at < batch.ends[:, None]) & (at + 1 >= batch.first[:, None])
        said = jnp.roll(wanted, -(row + 1), axis=1)[:, places]
        normed = rms_norm(state, weights.out_norm, cfg.norm_eps)
        loss, overlap = _loss(normed, weights.unembed, said, counts, temperature, cfg)
        found.append(Agreement(loss, overlap, jnp.sum(counts, dtype=jnp.float32)))
    return jax.tree.map(lambda *each: jnp.stack(each), *found)


def said_by_model(weights, model: ModelWeights, last, temperature, *, cfg: ModelConfig):
    """The model's distribution over the drafter's words, in the model's type."""
    normed = final_norm(model, last, cfg=cfg)
    logits = linear(
        normed, unembedding(model)[weights.words], out_dtype=accumulation_dtype(cfg.dtype)
    )
    return jax.nn.softmax(logits / temperature, axis=-1).astype(cfg.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _loss(normed, matrix, said, counts, temperature, cfg):
    return _loss_and_slope(normed, matrix, said, counts, temperature, cfg)[0]


def _loss_and_slope(normed, matrix, said, counts, temperature, cfg):
    wide = accumulation_dtype(cfg.dtype)
    logits = jnp.einsum("npd,wd->npw", normed, matrix, preferred_element_type=wide) / temperature
    log_shares = jax.nn.log_softmax(logits, axis=-1)
    shares, said = jnp.exp(log_shares), said.astype(wide)
    entropy = -jnp.sum(said * log_shares, axis=-1)
    overlap = jnp.sum(jnp.minimum(said, shares), axis=-1)
    each = OF_VARIATION * (1 - overlap) + (1 - OF_VARIATION) * entropy
    less = (shares < said).astype(wide)  # more of it is more overlap
    gain = shares * (less - jnp.sum(shares * less, axis=-1, keepdims=True))
    slope = (1 - OF_VARIATION) * (shares - said) - OF_VARIATION * gain
    slope = jnp.where(counts[..., None], slope / temperature, 0).astype(normed.dtype)
    slope = jnp.einsum("npw,wd->npd", slope, matrix)
    total = jnp.sum(jnp.where(counts, each, 0)), jnp.sum(jnp.where(counts, overlap, 0))
    return total, slope


def _loss_backward(cfg, slope, cotangents):
    factor = cotangents[0].astype(slope.dtype)
    return slope * factor, None, None, None, None


_loss.defvjp(_loss_and_slope, _loss_backward)

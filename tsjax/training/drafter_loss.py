# SPDX-License-Identifier: Apache-2.0
"""What a drafter of one layer is trained by: pure functions of arrays.

Knows the loss, how a drafter is unrolled at all positions of a text at once, and the optimiser.
Does not know files or how long a run lasts.

A drafter that starts at position p drafts the tokens p + 2, p + 3, ...: its row j, from 0, stands
for position p + j and takes the text's own token p + j + 1, as a draft matters only where those
before it were right. It sees what was fused from the model's states up to p, and its own rows
after that.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import rms_norm
from tsjax.base.model_config import ModelConfig
from tsjax.base.training_config import DrafterTraining
from tsjax.base.typing import Array, Bool, Float, Int, accumulation_dtype
from tsjax.model.drafter import DrafterWeights, carried, draft_rows, fused, words_logits
from tsjax.model.layers import linear
from tsjax.model.transformer import ModelWeights, final_norm, unembedding, unembedding_rows

NOT_SEEN = -1e30  # the score of what a row does not see


class Pieces(flax.struct.PyTreeNode):
    """Rows of a stream of texts, and what the model computed for them.

    Attributes:
      taps: of the model's layers.
      last: the last layer's output, before the final norm.
      text: of each token the number of its text in the row.
      own: whether the token that follows is the model's, not the prompt's.
    """

    taps: Float[Array, "N P n D"]
    last: Float[Array, "N P D"]
    tokens: Int[Array, "N P"]
    text: Int[Array, "N P"]
    own: Bool[Array, "N P"]

    def known(self, places: Int[Array, "A"], more: int) -> Bool[Array, "N A"]:
        """Where so many tokens further there is one of the same text; what the model says after
        that one is `ahead` of it."""
        inside = (places + more < self.tokens.shape[1])[None]
        return inside & (ahead(self.text, more)[:, places] == self.text[:, places])


def ahead(x, places: int):
    """What stands so many places further, along the second axis."""
    return jnp.roll(x, -places, axis=1)


class Agreement(flax.struct.PyTreeNode):
    """Sums over positions, for each of J drafts in a row: what is minimised, what the drafter's
    distribution has in common with the model's, and how many were counted."""

    loss: Float[Array, "J"]
    overlap: Float[Array, "J"]
    counted: Float[Array, "J"]


def unrolled(
    weights: DrafterWeights,
    embed: Float[Array, "V D"],
    pieces: Pieces,
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
    places = jnp.arange(pieces.tokens.shape[1], dtype=jnp.int32)
    states, embedded, found = fused(weights, pieces.taps, cfg=cfg), embed[pieces.tokens], []
    rows = _Rows(pieces.text, places, cfg.drafter.window)
    for row in range(depth):
        if row == 1:
            states, places = states[:, starts], starts
            rows.places = starts
        if row:
            states = carried(weights, states, cfg=cfg)
        following = ahead(embedded, row + 1)[:, places]
        positions = jnp.broadcast_to(places[None] + row, states.shape[:2])
        states, _, _ = draft_rows(weights, states, following, positions, rows.attend, cfg=cfg)
        found.append(states)
    return found


class _Rows:
    """Keys and values of the rows so far: the first ones of all positions, and those that drafters
    add which start at `places`."""

    def __init__(self, text: Int[Array, "N P"], places: Int[Array, "A"], window: int):
        self.places, self._text, self._window = places, text, window
        self._keys, self._values = [], []

    def attend(self, q, k, v):
        """Attention to the first rows of all positions up to a drafter's start, and to its own rows
        after that, of which these are the last."""
        self._keys.append(k)
        self._values.append(v)
        N, A, heads, H = q.shape
        K, P, wide = k.shape[2], self._keys[0].shape[1], accumulation_dtype(q.dtype)
        grouped = q.reshape(N, A, K, heads // K, H)
        behind = self.places[:, None] - jnp.arange(P, dtype=jnp.int32)[None]
        seen = ((behind >= 0) & (behind < self._window))[None]
        seen &= self._text[:, self.places, None] == self._text[:, None]
        of_all = jnp.einsum(
            "nakgh,nskh->nkgas", grouped, self._keys[0], preferred_element_type=wide
        )
        scores = [jnp.where(seen[:, None, None], of_all, NOT_SEEN)]
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


def agreement(
    weights: DrafterWeights,
    model: ModelWeights,
    pieces: Pieces,
    starts: Int[Array, "A"],
    *,
    settings: DrafterTraining,
    cfg: ModelConfig,
) -> Agreement:
    """Of drafts in a row; all but the first ones of drafters that start at `starts`."""
    states = unrolled(weights, model.embed, pieces, starts, settings.depth, cfg=cfg)
    wanted = said_by_model(weights, model, pieces.last, settings.temperature, cfg=cfg)
    places, found = jnp.arange(pieces.tokens.shape[1], dtype=jnp.int32), []
    for row, state in enumerate(states):
        if row == 1:
            places = starts
        counts = pieces.known(places, row + 1) & ahead(pieces.own, row + 1)[:, places]
        said = ahead(wanted, row + 1)[:, places]
        normed = rms_norm(state, weights.out_norm, cfg.norm_eps)
        both: Any = _loss(normed, weights.unembed, said, counts, settings, cfg)
        found.append(Agreement(both[0], both[1], jnp.sum(counts, dtype=jnp.float32)))
    return jax.tree.map(lambda *each: jnp.stack(each), *found)


def said_by_model(weights, model: ModelWeights, last, temperature, *, cfg: ModelConfig):
    """The model's distribution over the drafter's words, in the model's type."""
    normed, wide = final_norm(model, last, cfg=cfg), accumulation_dtype(cfg.dtype)
    logits = linear(normed, unembedding_rows(model, weights.words), out_dtype=wide)
    return jax.nn.softmax(logits / temperature, axis=-1).astype(cfg.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _loss(normed, matrix, said, counts, settings: DrafterTraining, cfg: ModelConfig):
    """The loss of states with what the model says, and what both have in common. The matrix is
    frozen. The gradient is computed together with the loss, so logits are computed once."""
    return _loss_and_slope(normed, matrix, said, counts, settings, cfg)[0]


def _loss_and_slope(normed, matrix, said, counts, settings, cfg):
    wide, of_variation = accumulation_dtype(cfg.dtype), settings.variation
    logits = jnp.einsum("npd,wd->npw", normed, matrix, preferred_element_type=wide)
    log_shares = jax.nn.log_softmax(logits / settings.temperature, axis=-1)
    shares, said = jnp.exp(log_shares), said.astype(wide)
    entropy = -jnp.sum(said * log_shares, axis=-1)
    overlap = jnp.sum(jnp.minimum(said, shares), axis=-1)
    each = of_variation * (1 - overlap) + (1 - of_variation) * entropy
    slope = (1 - of_variation) * (shares - said)
    if of_variation:
        less = (shares < said).astype(wide)  # more of it is more in common
        gain = shares * (less - jnp.sum(shares * less, axis=-1, keepdims=True))
        slope -= of_variation * gain
    slope = jnp.where(counts[..., None], slope / settings.temperature, 0).astype(normed.dtype)
    slope = jnp.einsum("npw,wd->npd", slope, matrix)
    total = jnp.sum(jnp.where(counts, each, 0)), jnp.sum(jnp.where(counts, overlap, 0))
    return total, slope


def _loss_backward(settings, cfg, slope, cotangents):
    return slope * cotangents[0].astype(slope.dtype), None, None, None


_loss.defvjp(_loss_and_slope, _loss_backward)


def objective(weights, model, pieces: Pieces, starts, *, settings: DrafterTraining, cfg):
    """The mean loss of each draft in a row, summed by weight; and the agreement."""
    found = agreement(weights, model, pieces, starts, settings=settings, cfg=cfg)
    weight = jnp.asarray([settings.depth_weight**row for row in range(settings.depth)])
    each = found.loss / jnp.maximum(found.counted, 1)
    return jnp.sum(each * weight.astype(each.dtype)), found


# --- how often drafts are right ------------------------------------------------------------------

PLACES_AT_ONCE = 128  # whose logits over the whole vocabulary exist at a time


class Drafted(flax.struct.PyTreeNode):
    """Attributes:
    right: whether all drafts in a row up to each are what the model draws with the same noise.
    counted: whether a drafter starts there whose drafts are all known.
    """

    right: Bool[Array, "N P J"]
    counted: Bool[Array, "N P"]


def drafted(
    weights: DrafterWeights,
    model: ModelWeights,
    pieces: Pieces,
    *,
    settings: DrafterTraining,
    cfg: ModelConfig,
) -> Drafted:
    """How drafts in a row would fare after each token, where the text goes on as it does."""
    N, P = pieces.tokens.shape
    places = jnp.arange(P, dtype=jnp.int32)
    states = unrolled(weights, model.embed, pieces, places, settings.depth, cfg=cfg)
    drawn, noise = _drawn(weights, model, pieces.last, settings.temperature, cfg)
    so_far, right = jnp.ones((N, P), bool), []
    for row, state in enumerate(states):
        logits = words_logits(weights, state, cfg=cfg) / settings.temperature
        said = jnp.argmax(logits + ahead(noise, row + 1), axis=-1)
        so_far &= said == ahead(drawn, row + 1)
        right.append(so_far)
    counted = pieces.known(places, settings.depth) & ahead(pieces.own, 1)
    return Drafted(jnp.stack(right, axis=-1), counted)


def _drawn(weights, model: ModelWeights, last, temperature: float, cfg: ModelConfig):
    """Which of the words the model draws after each token, or their number for another token, and
    the noise that decided it. The best of the others is drawn as one token of all their weight."""
    N, P, D = last.shape
    blocks, W = last.reshape(-1, min(PLACES_AT_ONCE, P), D), len(weights.words)

    def one(number, block):
        normed, wide = final_norm(model, block, cfg=cfg), accumulation_dtype(cfg.dtype)
        logits = linear(normed, unembedding(model), out_dtype=wide) / temperature
        words, most = logits[:, weights.words], jnp.max(logits, axis=-1, keepdims=True)
        of_words, of_all = (jnp.sum(jnp.exp(x - most), axis=-1) for x in (words, logits))
        others = jnp.log(jnp.maximum(of_all - of_words, 1e-30)) + most[:, 0]
        key = jax.random.fold_in(jax.random.key(0), number)
        noise = jax.random.gumbel(key, (len(block), W + 1), wide)
        scores = jnp.concatenate([words, others[:, None]], axis=1) + noise
        return jnp.argmax(scores, axis=-1), noise[:, :W]

    numbers = jnp.arange(len(blocks), dtype=jnp.uint32)
    drawn, noise = jax.lax.map(lambda each: one(*each), (numbers, blocks))
    return drawn.reshape(N, P), noise.reshape(N, P, W)


# --- the optimiser -------------------------------------------------------------------------------

# What least squares have found needs small steps; the rest of the layer begins from nothing.
FITTED, OF_FITTED = ("fuse", "token", "carry"), 0.1


@functools.partial(jax.jit, static_argnames="settings", donate_argnames=("weights", "moments"))
def adam_step(weights, moments, gradient, rate, *, settings: DrafterTraining):
    """One step of Adam at that rate: weights, moments, and the norm of the gradient."""
    import optax

    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
    changes, moments = adam(settings).update(gradient, moments, weights)
    assert isinstance(changes, DrafterWeights)
    slower = {name: OF_FITTED * getattr(changes, name) for name in FITTED}
    changes = jax.tree.map(lambda change: -rate * change, changes.replace(**slower))
    return optax.apply_updates(weights, changes), moments, norm


def adam(settings: DrafterTraining):
    import optax

    clip = optax.clip_by_global_norm(settings.max_grad_norm)
    return optax.chain(clip, optax.scale_by_adam(settings.beta1, settings.beta2))


def rate_at(settings: DrafterTraining, step: int, share: float) -> float:
    """The learning rate of a step, from 0, after a share of the run."""
    warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    return settings.learning_rate * warm * (0.05 + 0.475 * (1 + math.cos(math.pi * min(share, 1))))

# SPDX-License-Identifier: Apache-2.0
"""Training of draft heads on a frozen model: pure functions of arrays.

Knows the loss, its gradient and the optimiser. Does not know texts, files or how long a run lasts.

A step adds up the gradients of its micro-batches with `add_gradients` and applies them once with
`update`. The model's hidden states come from `decoding.hidden_states`, outside of everything that
is differentiated: a gradient exists for the heads and for nothing else. Heads look at one position
at a time, so positions are worked on in chunks, each with its own gradient: only [chunk, V] logits
exist, whatever the length of a sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import NarrowMatrix
from tsjax.base.model_config import OWN_VOCABULARY, ModelConfig
from tsjax.base.training_config import HeadTraining
from tsjax.base.typing import Array, Bool, Float, Int, accumulation_dtype
from tsjax.model.heads import Head, declare_heads, run_heads
from tsjax.model.layers import linear
from tsjax.model.params import inputs_first, join
from tsjax.model.transformer import (
    ModelWeights,
    ParamSpec,
    final_norm,
    unembedding,
    unembedding_rows,
)

TOP = 3  # accuracies are counted for the 1, 2 ... TOP most probable tokens


class HeadMetrics(flax.struct.PyTreeNode):
    """Sums over positions, one entry per head; for a single head without that axis."""

    loss: Float[Array, "*heads"]  # cross-entropy in nats
    hits: Int[Array, "*heads top"]  # labels among the 1, 2 ... TOP most probable


class GradientSum(flax.struct.PyTreeNode):
    """What the micro-batches of a step add up."""

    gradient: tuple[Head, ...]
    metrics: HeadMetrics


def init_heads(
    cfg: ModelConfig, settings: HeadTraining, weights: ModelWeights | None = None
) -> tuple[Head, ...]:
    """The first weights of heads, in the optimiser's type: float32 also for 16-bit models.

    Vocabulary matrices begin as that of the model, whose `weights` these heads need.
    """
    cfg = cfg.with_heads(settings.num_heads, settings.head_kind)
    dtype = accumulation_dtype(cfg.dtype)
    rng = np.random.default_rng(settings.seed)

    def make(spec: ParamSpec):
        if spec.init != "normal":
            return jnp.full(spec.shape, 1 if spec.init == "ones" else 0, dtype)
        if "vocab" in spec.axes:
            assert weights is not None
            tokens = jnp.arange(cfg.vocab_size)
            # A copy: a step gives its heads away.
            return jnp.array(unembedding_rows(weights, tokens), dtype)
        drawn = [rng.normal(scale=settings.init_scale, size=s.shape) for s in inputs_first(spec)]
        return jnp.asarray(join(spec, drawn, numpy=np), dtype)

    specs = declare_heads(cfg)
    return jax.tree.map(make, specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def cast_heads(heads: Sequence[Head], cfg: ModelConfig) -> tuple[Head, ...]:
    """The heads in the model's type, as the forward pass and a checkpoint take them."""
    return jax.tree.map(lambda x: x.astype(cfg.dtype), tuple(heads))


def zero_gradients(heads: Sequence[Head]) -> GradientSum:
    metrics = _zero_metrics(len(heads), jax.tree.leaves(heads)[0].dtype)
    return GradientSum(jax.tree.map(jnp.zeros_like, tuple(heads)), metrics)


def _zero_metrics(count: int, dtype) -> HeadMetrics:
    return HeadMetrics(jnp.zeros((count,), dtype), jnp.zeros((count, TOP), jnp.int32))


def add_gradients(
    heads: Sequence[Head],
    weights: ModelWeights,
    hidden,
    tokens,
    total: GradientSum,
    *,
    cfg: ModelConfig,
    chunk_tokens: int,
    loss_decay: float = 1.0,
) -> GradientSum:
    """Adds one micro-batch of tokens [B, T] with the model's `hidden` [B, T, D].

    The gradient is that of the sum over positions of all heads' losses, each head's scaled to as
    many labels as there are tokens, and by `loss_decay` for each head before it. So the terms are
    of the size of one position's gradient, which 16-bit types can hold; `update` divides. `cfg`
    says the heads' kind.
    """
    length = tokens.shape[1]
    scale = np.asarray([loss_decay**i * length / (length - 2 - i) for i in range(len(heads))])

    def objective(heads, chunk: _Chunk):
        heads = cast_heads(heads, cfg)
        with jax.named_scope("heads"):
            states = run_heads(heads, weights, chunk.hidden, cfg=cfg)  # [B, n, c, D]
        metrics = _measure_states(jnp.moveaxis(states, 1, 0), weights, heads, chunk, cfg=cfg)
        return jnp.sum(metrics.loss * scale.astype(metrics.loss.dtype)), metrics

    def body(total: GradientSum, chunk: _Chunk):
        gradient, metrics = jax.grad(objective, has_aux=True)(tuple(heads), chunk)
        return jax.tree.map(jnp.add, total, GradientSum(gradient, metrics))

    shifts = range(2, len(heads) + 2)
    return _over_chunks(body, total, hidden, tokens, shifts, chunk_tokens)


def measure_heads(
    heads: Sequence[Head],
    weights: ModelWeights,
    hidden,
    tokens,
    *,
    cfg: ModelConfig,
    chunk_tokens: int,
) -> HeadMetrics:
    """The metrics of the model itself (entry 0: the next token) and of the heads, in that order."""

    def body(total: HeadMetrics, chunk: _Chunk):
        own = final_norm(weights, chunk.hidden, cfg=cfg)[:, None]
        cast = cast_heads(heads, cfg)
        states = run_heads(cast, weights, chunk.hidden, cfg=cfg)
        states = jnp.moveaxis(jnp.concatenate([own, states], axis=1), 1, 0)
        found = _measure_states(states, weights, cast, chunk, cfg=cfg)
        return jax.tree.map(jnp.add, total, found)

    total = _zero_metrics(len(heads) + 1, accumulation_dtype(cfg.dtype))
    return _over_chunks(body, total, hidden, tokens, range(1, len(heads) + 2), chunk_tokens)


class _Chunk(flax.struct.PyTreeNode):
    """c positions of each sequence; a label that is not valid does not exist or was counted."""

    hidden: Float[Array, "B c D"]
    labels: Int[Array, "n B c"]
    valid: Bool[Array, "n c"]


def _over_chunks(body, total, hidden, tokens, shifts: Sequence[int], chunk_tokens: int):
    """Folds `body` over all positions; entry i's label at t is token t + shifts[i]."""
    batch, length = tokens.shape
    width = max(1, min(chunk_tokens // batch, length))
    count = -(-length // width)
    width = -(-length // count)
    padded = jnp.pad(tokens, ((0, 0), (0, max(shifts))))

    def at(total, index):
        first = index * width
        start = jnp.minimum(first, length - width)  # the last chunk may overlap
        position = start + jnp.arange(width, dtype=jnp.int32)

        def cut(array, start):
            return lax.dynamic_slice_in_dim(array, start, width, axis=1)

        labels = jnp.stack([cut(padded, start + shift) for shift in shifts])
        valid = [(position >= first) & (position + shift < length) for shift in shifts]
        return body(total, _Chunk(cut(hidden, start), labels, jnp.stack(valid))), None

    return lax.scan(at, total, jnp.arange(count, dtype=jnp.int32))[0]


def _measure_states(
    states, weights: ModelWeights, heads: Sequence[Any], chunk: _Chunk, *, cfg: ModelConfig
):
    """HeadMetrics of normed states [n, B, c, D], of which the last are those of `heads`, one head
    after the other."""
    valid = jnp.broadcast_to(chunk.valid[:, None], chunk.labels.shape)
    inputs, frozen = (states, chunk.labels, valid), unembedding(weights)
    if cfg.head_kind != OWN_VOCABULARY:
        return lax.map(lambda head: _cross_entropy(*head, frozen, cfg, False), inputs)
    before = len(states) - len(heads)
    found = []
    for index, head in enumerate([None] * before + [*heads]):
        matrix = frozen if head is None else head.unembed
        of_one = jax.tree.map(lambda x, index=index: x[index], inputs)
        found.append(_cross_entropy(*of_one, matrix, cfg, head is not None))
    return jax.tree.map(lambda *each: jnp.stack(each), *found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _cross_entropy(normed, labels, valid, matrix, cfg: ModelConfig, trains_matrix: bool):
    """HeadMetrics of the normed states [B, c, D] of one head, with labels [B, c].

    The vocabulary `matrix` has a gradient where it is the head's own; the model's is frozen. The
    gradients are computed together with the loss, so logits are computed once.
    """
    return _loss_and_slope(normed, labels, valid, matrix, cfg, trains_matrix, slope=False)[0]


def _loss_and_slope(normed, labels, valid, matrix, cfg, trains_matrix, *, slope=True):
    wide = accumulation_dtype(cfg.dtype)
    with jax.named_scope("cross_entropy"):
        with jax.named_scope("unembed"):
            logits = linear(normed, matrix, out_dtype=wide)  # [B, c, V]
        token = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        is_label = token == labels[..., None]
        label_logit = jnp.sum(jnp.where(is_label, logits, 0), axis=-1, keepdims=True)
        norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        loss = jnp.sum(jnp.where(valid, (norm - label_logit)[..., 0], 0))
        # The label's rank counts the tokens before it; of equal ones the lower comes first.
        ahead = (logits > label_logit) | ((logits == label_logit) & (token < labels[..., None]))
        rank = jnp.sum(ahead, axis=-1, dtype=jnp.int32)
        hits = jnp.stack([jnp.sum(valid & (rank < k), dtype=jnp.int32) for k in range(1, TOP + 1)])
        metrics = HeadMetrics(loss, hits)
        if not slope:
            return metrics, None
        excess = jnp.exp(logits - norm) - is_label.astype(logits.dtype)
        excess = jnp.where(valid[..., None], excess, 0).astype(normed.dtype)
        product = functools.partial(
            jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=wide
        )
        if isinstance(matrix, NarrowMatrix):
            matrix = matrix.numbers().astype(normed.dtype)
        slope_of_states = product("bcv,vd->bcd", excess, matrix).astype(normed.dtype)
        if not trains_matrix:
            return metrics, (slope_of_states, None)
        slope_of_matrix = product("bcv,bcd->vd", excess, normed)
        return metrics, (slope_of_states, slope_of_matrix.astype(matrix.dtype))


def _cross_entropy_backward(cfg, trains_matrix, slopes, cotangent: HeadMetrics):
    factor = cotangent.loss
    of_states, of_matrix = jax.tree.map(
        lambda slope: (slope.astype(factor.dtype) * factor).astype(slope.dtype), slopes
    )
    return of_states, None, None, of_matrix


_cross_entropy.defvjp(_loss_and_slope, _cross_entropy_backward)


def learning_rates(settings: HeadTraining):
    """A function of the step, counted from 0. As in the published code it begins with rate 0."""
    import optax

    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if settings.warmup_steps else settings.learning_rate,
        peak_value=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        decay_steps=settings.steps,
    )


def optimiser(settings: HeadTraining):
    """AdamW after the clipping of gradients. Norms and biases do not decay."""
    import optax

    def decays(heads):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, heads)

    clip = optax.clip_by_global_norm(settings.max_grad_norm)
    adam = optax.adamw(
        learning_rates(settings),
        b1=settings.beta1,
        b2=settings.beta2,
        weight_decay=settings.weight_decay,
        mask=decays,
    )
    return optax.chain(clip if settings.max_grad_norm else optax.identity(), adam)


def update(heads, moments, total: GradientSum, *, settings: HeadTraining):
    """One step with the gradients of `batch_size` sequences.

    Returns:
      heads, the optimiser's state, and the norm of the mean gradient before it was clipped.
    """
    import optax

    tokens = settings.batch_size * settings.sequence_length
    gradient = jax.tree.map(lambda g: g / tokens, total.gradient)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
    changes, moments = optimiser(settings).update(gradient, moments, heads)
    return optax.apply_updates(heads, changes), moments, norm

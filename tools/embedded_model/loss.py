# SPDX-License-Identifier: Apache-2.0
"""The loss of a small model by tsjax's own forward pass, without a cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tsjax.model.transformer import ModelWeights, apply_layers, embed, final_norm, unembed

ATTENTION_BLOCK = 128  # queries at a time


def causal_attention(layer: int, q, k, v):
    """q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H], in blocks of queries.

    The queries of a group are rows of one product with their keys, and a block sees no later
    key: on a CPU that trains 1.5 times faster than one product of all heads.
    """
    del layer
    B, T, N, H = q.shape
    K = k.shape[2]
    G = N // K
    q = (q * H**-0.5).reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # [B, K, T, H]
    block = ATTENTION_BLOCK if jax.default_backend() == "cpu" else T
    mixed = []
    for begin in range(0, T, block):
        end = min(begin + block, T)
        rows = slice(begin * G, end * G)
        scores = jnp.einsum(
            "bkth,bksh->bkts", q[:, :, rows], k[:, :, :end], preferred_element_type=jnp.float32
        )
        visible = (jnp.arange(begin * G, end * G) // G)[:, None] >= jnp.arange(end)
        scores = jnp.where(visible, scores, -jnp.inf)
        weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
        total = weights.sum(-1, keepdims=True)
        found = jnp.einsum(
            "bkts,bksh->bkth",
            weights.astype(v.dtype),
            v[:, :, :end],
            preferred_element_type=jnp.float32,
        )
        mixed.append((found / total).astype(v.dtype))
    mixed = jnp.concatenate(mixed, axis=2).reshape(B, K, T, G, H)
    return mixed.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)


def token_losses(weights, inputs, targets, positions, cfg, attend=causal_attention):
    """Minus the log-probability of each target, [B, T] float32, with no cache."""
    hidden, *_ = apply_layers(
        weights, embed(weights, inputs), positions=positions, attend=attend, cfg=cfg
    )
    logits = unembed(weights, final_norm(weights, hidden, cfg=cfg), cfg=cfg)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def drop_units(weights: ModelWeights, rate: float, key) -> ModelWeights:
    """Dropout of the attention's and the feed-forward part's units, as inputs of their outputs.

    The rows of a batch share it, which leaves the forward pass as it is.
    """

    def drop(matrix, number: int):
        units = matrix.shape[1:]
        kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, units)
        return jnp.where(kept[None], matrix / (1 - rate), 0).astype(matrix.dtype)

    layers = tuple(
        layer.replace(o=drop(layer.o, 2 * i), down=drop(layer.down, 2 * i + 1))
        for i, layer in enumerate(weights.layers)
    )
    return weights.replace(layers=layers)


@functools.partial(jax.jit, static_argnames=("cfg", "bos"))
def loss_by_position(weights, tokens, *, cfg, bos):
    """Minus the log-probability of each of `tokens` [n] after all before it, in one long row.

    n is a multiple of ATTENTION_BLOCK.
    """

    def attend(layer, q, k, v):
        positions = jnp.arange(q.shape[1])

        def block(inputs):
            q, rows = inputs  # [block, N, H], [block]
            q = q.reshape(-1, cfg.num_kv_heads, cfg.group_size, cfg.head_dim)
            scores = jnp.einsum("tkgh,skh->kgts", q, k[0]) * cfg.head_dim**-0.5
            scores = jnp.where(rows[:, None] >= positions, scores, -jnp.inf)
            mixed = jnp.einsum("kgts,skh->tkgh", jax.nn.softmax(scores), v[0])
            return mixed.reshape(-1, cfg.num_heads, cfg.head_dim)

        blocks = (
            q[0].reshape(-1, ATTENTION_BLOCK, *q.shape[2:]),
            positions.reshape(-1, ATTENTION_BLOCK),
        )
        return lax.map(block, blocks).reshape(q.shape)

    inputs = jnp.concatenate([jnp.array([bos]), tokens[:-1]])[None]
    positions = jnp.arange(len(tokens))[None]
    return token_losses(weights, inputs, tokens[None], positions, cfg, attend)[0]

# SPDX-License-Identifier: Apache-2.0
"""A drafter's first weights by least squares: what taps and a token, each through a matrix, say of
the model's next state. Drafts are often right before any training; the more text, the more often.

Knows arrays alone.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tsjax.training.drafter_loss import Pieces, ahead

RIDGE = 1e-3  # of the features' mean square: what a weight has to be worth
EPSILON = 1e-6


def first_matrices(
    batches: Iterable[Pieces], embed: Any, kept: int
) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """Matrices for the taps [D, n, D], the token [D, D] and the last row's state [D, D]; None
    without a batch.

    Args:
      batches: each is read once. The last `kept` of them say what a state becomes.
      embed: the model's embedding.
    """
    sums, last = [], collections.deque[Pieces](maxlen=kept)
    for pieces in batches:
        sums = [functools.reduce(_added, [*sums, _sums_of_first_rows(pieces, embed)])]
        last.append(pieces)
    if not sums:
        return None
    both = _solved(*sums[0])  # [(n + 1) D, D]
    nexts = (_sums_of_next_rows(pieces, embed, both) for pieces in last)
    carry = _solved(*functools.reduce(_added, nexts))
    size = both.shape[1]
    taps = both[:-size].reshape(-1, size, size)  # [n, inputs, outputs]
    return jnp.transpose(taps, (2, 0, 1)), both[-size:].T, carry.T


def _added(one, other):
    return jax.tree.map(jnp.add, one, other)


def _normed(x):
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON)


def _features(pieces: Pieces, embed):
    N, P, n, D = pieces.taps.shape
    taps = _normed(pieces.taps).reshape(N, P, n * D)
    return jnp.concatenate([taps, ahead(_normed(embed[pieces.tokens]), 1)], axis=-1)


def _counts(pieces: Pieces, places: int):
    every = jnp.arange(pieces.tokens.shape[1])
    return pieces.known(every, places) & ahead(pieces.own, 1)


def _products(features, wanted, counts):
    features = jnp.where(counts[..., None], features, 0)

    def product(x, y):
        return jnp.einsum("npi,npj->ij", x, y, precision=lax.Precision.HIGHEST)

    return product(features, features), product(features, wanted)


@jax.jit
def _sums_of_first_rows(pieces: Pieces, embed):
    wanted = ahead(_normed(pieces.last), 1)
    return _products(_features(pieces, embed), wanted, _counts(pieces, 1))


@jax.jit
def _sums_of_next_rows(pieces: Pieces, embed, both):
    size = both.shape[1]
    states = _normed(_features(pieces, embed) @ both)
    of_token = ahead(_normed(embed[pieces.tokens]), 2) @ both[-size:]
    wanted = ahead(_normed(pieces.last), 2) - of_token
    return _products(states, wanted, _counts(pieces, 2))


@jax.jit
def _solved(squares, products):
    ridge = RIDGE * jnp.trace(squares) / len(squares)
    return jnp.linalg.solve(squares + ridge * jnp.eye(len(squares)), products)

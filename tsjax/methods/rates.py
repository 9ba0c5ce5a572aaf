# SPDX-License-Identifier: Apache-2.0
"""How often drafts of a kind are right: counters that learn while a run goes on.

Knows kinds of drafts as numbers, and how what is known before a run turns into counters. Does not
know where drafts come from.

A draft's kind is what its source knows of it before it is judged: how long a match it continues,
how far a draft's score lies above the next one. Each kind has a rate: how often such a draft is
right when all drafts before it on its path were.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import flax.struct
import jax.numpy as jnp
import numpy as np

from tsjax.base.typing import Array, Bool, Float, Int, Num

NO_DRAFT = -1
MOST_RATE = 0.98  # so that a draft is never as likely as the one before it
TRUST = 4.0  # drafts that the rates before a run count for
REMEMBERED = 64.0  # drafts of a kind that count: what was longer ago is forgotten

LONGEST = (2, 3, 4, 6, 8, 12, 16)  # bounds between the kinds of matches, by equal tokens
SHARES = (0.3, 0.6, 0.9)  # ... by the share of the matches that go on like this
GAPS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # ... by the gap between two scores
WIDE_GAPS = (0.5, 1.5, 3.0)
MOST_HEADS, RANKS = 4, 3
LAYER_DEPTHS = 4  # of the one-layer drafter that are told apart


class Kinds(NamedTuple):
    """Where the kinds of each source begin, and their axes."""

    text: int
    corpus: int
    passes: int
    heads: int
    layer: int
    count: int


TEXT_AXES = (len(LONGEST) + 1, len(SHARES) + 1, 2)  # match, share, whether a penalty acts on it
PASS_AXES = (2, len(GAPS) + 1)  # whether it is the best one, gap
HEAD_AXES = (MOST_HEADS, RANKS, len(WIDE_GAPS) + 1)  # depth, rank, gap
LAYER_AXES = (LAYER_DEPTHS, RANKS, len(GAPS) + 1)  # depth, rank, gap
_SIZES = [int(np.prod(axes)) for axes in (TEXT_AXES, TEXT_AXES, PASS_AXES, HEAD_AXES, LAYER_AXES)]
KINDS = Kinds(0, *itertools.accumulate(_SIZES))


class Rates(flax.struct.PyTreeNode):
    """Attributes:
    tried: drafts of each kind whose path before them was right, as far as they are remembered.
    right: how many of these were right.
    """

    tried: Float[Array, "kinds"]
    right: Float[Array, "kinds"]

    @property
    def values(self) -> Float[Array, "kinds"]:
        return jnp.minimum(self.right / self.tried, MOST_RATE)


def first_rates(
    head_accuracy: tuple[float, ...] = (), layer_accuracy: tuple[float, ...] | None = None
) -> Rates:
    """What is assumed before a run; how often each head's best token is right, and each draft in a
    row of the one-layer drafter."""
    longest = np.asarray([0.10, 0.20, 0.32, 0.45, 0.58, 0.70, 0.82, 0.92])
    text = longest[:, None, None] * np.asarray([0.3, 0.6, 0.85, 1.0])[:, None] * [1.0, 0.5]
    best = np.asarray([0.35, 0.45, 0.55, 0.65, 0.75, 0.82, 0.90, 0.95])
    other = np.asarray([0.30, 0.25, 0.20, 0.15, 0.10, 0.06, 0.03, 0.02])
    passes = np.stack([best, other])

    def known(accuracy: tuple[float, ...] | None, depths: int) -> np.ndarray:
        shares, accuracy = np.full(depths, 0.5), accuracy or ()
        shares[: len(accuracy)] = accuracy[:depths]
        return shares[:, None, None]

    by_gap = np.asarray([[0.7, 0.9, 1.2, 1.6], [0.4, 0.3, 0.2, 0.1], [0.25, 0.2, 0.1, 0.05]])
    heads = known(head_accuracy, MOST_HEADS) * by_gap
    # Of a pass half of the best candidates are right.
    layer = known(layer_accuracy, LAYER_DEPTHS) / 0.5 * np.stack([best, other, other / 2])
    values = np.concatenate([x.ravel() for x in (text, text, passes, heads, layer)])
    values = np.clip(values, 0.01, MOST_RATE).astype(np.float32)
    return Rates(
        tried=jnp.full(values.shape, TRUST, jnp.float32), right=jnp.asarray(TRUST * values)
    )


def chances(rates: Rates, kinds: Int[Array, "B R J"]) -> Float[Array, "B R J"]:
    """How likely all tokens of a path up to each one are right; 0 where there is none."""
    each = jnp.where(kinds == NO_DRAFT, 0, rates.values[jnp.maximum(kinds, 0)])
    return jnp.cumprod(each, axis=2)


def learned(
    rates: Rates,
    kinds: Int[Array, "B R J"],
    tried: Bool[Array, "B R J"],
    right: Bool[Array, "B R J"],
) -> Rates:
    """With the drafts of a step: those that were `tried`, and which of these were right."""
    slot = jnp.where(tried, kinds, KINDS.count).ravel()  # out of bounds: dropped
    none = jnp.zeros_like(rates.tried)
    new = none.at[slot].add(1.0, mode="drop")
    hits = none.at[slot].add(right.ravel().astype(none.dtype), mode="drop")
    keep = jnp.minimum(REMEMBERED / (rates.tried + new), 1)
    return Rates(tried=(rates.tried + new) * keep, right=(rates.right + hits) * keep)


def kind_number(first: int, axes: tuple[int, ...], *indices) -> Int[Array, "..."]:
    """The number of a kind of the source whose kinds begin at `first`."""
    number = jnp.int32(0)
    for size, index in zip(axes, indices, strict=True):
        number = number * size + jnp.minimum(index, size - 1)
    return (first + number).astype(jnp.int32)


def between(bounds: tuple[float, ...], values: Num[Array, "..."]) -> Int[Array, "..."]:
    """How many of the bounds each value reaches."""
    reached = [(values >= bound).astype(jnp.int32) for bound in bounds]
    return functools.reduce(jnp.add, reached)

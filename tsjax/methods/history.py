# SPDX-License-Identifier: Apache-2.0
"""Drafts from the text itself: frequent n-grams, and the longest suffix match.

Knows token buffers and their lengths. Does not know models. All of it is plain integers on the
device: the host is never asked.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from tsjax.base.typing import Array, Bool, Int

MATCH_LIMIT = 16  # tokens of a suffix that are compared
TOKENS_PER_MATCH = 4  # a match of m tokens is continued by up to this times m
SEARCH_BLOCK = 4096
ENTER_BLOCK = 512  # n-grams of a prompt that are entered together


class NgramTable(flax.struct.PyTreeNode):
    """For every token, where it stood last: the places where n-grams that it begins are found.

    The rule. Places are entered in their order, and each takes that of the oldest once its token
    has `slots` of them. A lookup counts the equal n-grams at the places of their first token and
    gives those of the highest count, among equals those seen last first.

    Attributes:
      places: the i-th place of a token is in slot i % slots. Slots at `counts` and beyond are
        unspecified.
      counts: places of each token that were entered.
      entered: n-grams entered so far: those that begin at positions below it.
    """

    places: Int[Array, "B V slots"]
    counts: Int[Array, "B V"]
    entered: Int[Array, "B"]


def init_table(batch: int, vocab_size: int, slots: int) -> NgramTable:
    return NgramTable(
        places=jnp.zeros((batch, vocab_size, slots), jnp.int32),
        counts=jnp.zeros((batch, vocab_size), jnp.int32),
        entered=jnp.zeros((batch,), jnp.int32),
    )


def enter(
    table: NgramTable, tokens: Int[Array, "B C"], known: Int[Array, "B"], size: int
) -> NgramTable:
    """Enters all n-grams of `size` tokens that lie within the first `known` and are new."""
    goal, block = known - size + 1, min(ENTER_BLOCK, tokens.shape[1])

    def is_behind(table: NgramTable) -> Bool[Array, ""]:
        return jnp.any(table.entered < goal)

    return lax.while_loop(is_behind, lambda table: enter_few(table, tokens, goal, block), table)


def enter_few(
    table: NgramTable, tokens: Int[Array, "B C"], goal: Int[Array, "B"], most: int
) -> NgramTable:
    """Enters those that begin below `goal` and are new, the first `most` of them."""
    with jax.named_scope("enter_ngrams"):
        B, V, slots = table.places.shape
        b = jnp.arange(B, dtype=jnp.int32)[:, None]
        order = jnp.arange(most, dtype=jnp.int32)[None]
        positions = table.entered[:, None] + order
        is_new = positions < goal[:, None]
        first = jnp.take_along_axis(tokens, jnp.minimum(positions, tokens.shape[1] - 1), axis=1)
        equal = (first[:, :, None] == first[:, None]) & is_new[:, :, None] & is_new[:, None]
        is_later = order[:, None] > order[:, :, None]  # [1, one, other]
        later = jnp.sum(equal & is_later, axis=2, dtype=jnp.int32)
        earlier = jnp.sum(equal & is_later.swapaxes(1, 2), axis=2, dtype=jnp.int32)
        slot = (table.counts[b, first] + earlier) % slots
        nowhere = jnp.full_like(first, V)  # out of bounds: dropped
        stays = is_new & (later < slots)  # others would be overwritten at once
        places = table.places.at[b, jnp.where(stays, first, nowhere), slot]
        counts = table.counts.at[b, jnp.where(is_new, first, nowhere)]
        return NgramTable(
            places=places.set(positions, mode="drop"),
            counts=counts.add(1, mode="drop"),
            entered=jnp.maximum(table.entered, jnp.minimum(goal, table.entered + most)),
        )


def most_frequent(
    table: NgramTable, tokens: Int[Array, "B C"], first: Int[Array, "B"], k: int, size: int
) -> tuple[Int[Array, "B {k} {size-1}"], Bool[Array, "B {k}"]]:
    """The followers of first tokens in n-grams of `size`, best first, and which of them exist."""
    with jax.named_scope("most_frequent_ngrams"):
        b, slots = jnp.arange(first.shape[0], dtype=jnp.int32), table.places.shape[2]
        places, C = table.places[b, first], tokens.shape[1]  # [B, slots]
        index = jnp.arange(slots, dtype=jnp.int32)[None]
        exists = index < table.counts[b, first][:, None]
        steps = jnp.arange(1, size, dtype=jnp.int32)[None, None]
        after = jnp.minimum(places[..., None] + steps, C - 1)
        following = tokens[b[:, None, None], after]  # [B, slots, size - 1]
        equal = jnp.all(following[:, :, None] == following[:, None], axis=3)
        equal &= exists[:, :, None] & exists[:, None]
        count = jnp.sum(equal, axis=2, dtype=jnp.int32)
        last = jnp.max(jnp.where(equal, places[:, None], -1), axis=2)
        # One place stands for all that are equal. Its rank, found without a sort.
        stands = exists & (last == places)
        more, as_many = (f(count[:, None], count[:, :, None]) for f in (jnp.greater, jnp.equal))
        better = more | (as_many & (places[:, None] > places[:, :, None]))
        rank = jnp.sum(better & stands[:, None], axis=2, dtype=jnp.int32)
        is_best = (rank[:, None] == jnp.arange(k, dtype=jnp.int32)[None, :, None]) & stands[:, None]
        chosen = jnp.sum(jnp.where(is_best, index[None], 0), axis=2)  # [B, k]
        return jnp.take_along_axis(following, chosen[..., None], axis=1), jnp.any(is_best, axis=2)


# Tokens, how many of them are drafted, and how many tokens matched.
Match = tuple[Int[Array, "B {limit}"], Int[Array, "B"], Int[Array, "B"]]
# Where the longest match ends, and how many tokens it has.
Place = tuple[Int[Array, "B"], Int[Array, "B"]]


def longest_suffix(tokens: Int[Array, "B C"], length: Int[Array, "B"], limit: int) -> Match:
    """What followed the longest earlier match of the last tokens, and how long the match is.

    TOKENS_PER_MATCH tokens are drafted for each equal one and at most `limit`; where what followed
    reaches the end of the text, it goes on as it would if the text from there on repeated itself.
    """
    position, size = longest_match(tokens, length)
    count = jnp.minimum(TOKENS_PER_MATCH * size, limit)
    return what_followed(tokens, length, position[:, None], limit)[:, 0], count, size


def longest_match(tokens: Int[Array, "B C"], length: Int[Array, "B"]) -> Place:
    """The longest earlier match of the last tokens.

    The rule. Among the positions before the last known token, that is chosen at which most tokens
    equal those at the end of the text, counted backwards and at most MATCH_LIMIT of them; among
    equals the last; no equal token is no match.
    """
    C = tokens.shape[1]
    in_blocks, at_once = _search(min(SEARCH_BLOCK, C)), _search(C)  # all is no time for a GPU
    return lax.platform_dependent(tokens, length, cpu=in_blocks, default=at_once)


@functools.cache
def _search(block: int) -> Callable[..., Place]:
    """The same function for the same block, as jax knows by it what is traced already."""
    return functools.partial(match_in_blocks, block=block)


def what_followed(
    tokens: Int[Array, "B C"], length: Int[Array, "B"], places: Int[Array, "B P"], limit: int
) -> Int[Array, "B P {limit}"]:
    """The tokens after each place; at the end of the text it repeats itself from there on."""
    period = jnp.maximum(length[:, None] - 1 - places, 1)[..., None]
    offset = jnp.arange(limit, dtype=jnp.int32)[None, None] % period
    source = jnp.clip(places[..., None] + 1 + offset, 0, tokens.shape[1] - 1)
    return tokens[jnp.arange(tokens.shape[0])[:, None, None], source]


def last_tokens(tokens: Int[Array, "B C"], length: Int[Array, "B"]) -> Int[Array, "B 16"]:
    """The last MATCH_LIMIT known tokens, the newest first; -1 before the first one."""
    recent = length[:, None] - 1 - jnp.arange(MATCH_LIMIT, dtype=jnp.int32)[None]
    # Nothing equals what lies before the first token.
    return jnp.where(recent >= 0, jnp.take_along_axis(tokens, jnp.maximum(recent, 0), axis=1), -1)


def match_sizes(
    tokens: Int[Array, "B C"], recent: Int[Array, "B L"], places: Int[Array, "B P"]
) -> Int[Array, "B P"]:
    """How many tokens before and at each place equal the `recent` ones, see `last_tokens`."""
    before = places[..., None] - jnp.arange(recent.shape[1], dtype=jnp.int32)
    there = tokens[jnp.arange(tokens.shape[0])[:, None, None], jnp.maximum(before, 0)]
    same = (before >= 0) & (there == recent[:, None])
    return leading(same[:, :, i] for i in range(recent.shape[1]))


def leading(equal: Iterable[Bool[Array, "B P"]]) -> Int[Array, "B P"]:
    """How many are true before the first one that is not."""
    so_far = itertools.accumulate(equal, jnp.logical_and)
    return functools.reduce(jnp.add, (one.astype(jnp.int32) for one in so_far))


def match_in_blocks(tokens: Int[Array, "B C"], length: Int[Array, "B"], block: int) -> Place:
    """As `longest_match`, at a cost that follows `length`; of one block without a loop."""
    B, C = tokens.shape
    pattern = last_tokens(tokens, length)

    def search(index: Int[Array, ""], best: Int[Array, "B"]) -> Int[Array, "B"]:
        """`best` [B] is the match's size times C plus its position: the larger the better."""
        start = jnp.minimum(index * block, C - block).astype(jnp.int32)
        here = lax.dynamic_slice_in_dim(tokens, start, block, axis=1)
        before = start - MATCH_LIMIT + jnp.arange(MATCH_LIMIT, dtype=jnp.int32)
        before = jnp.where(before >= 0, tokens[:, jnp.maximum(before, 0)], -1)
        window = jnp.concatenate([before, here], axis=1)
        equal, size = jnp.ones((B, block), bool), jnp.zeros((B, block), jnp.int32)
        for i in range(MATCH_LIMIT):
            shifted = window[:, MATCH_LIMIT - i : MATCH_LIMIT - i + block]
            equal &= shifted == pattern[:, i : i + 1]
            size += equal.astype(jnp.int32)
        position = start + jnp.arange(block, dtype=jnp.int32)[None]
        earlier = position < length[:, None] - 1
        score = jnp.where(earlier, size * C + position, -1)
        return jnp.maximum(best, jnp.max(score, axis=1))

    with jax.named_scope("longest_suffix"):
        best = jnp.full((B,), -1, jnp.int32)
        if block == C:
            best = search(jnp.int32(0), best)
        else:
            blocks = (jnp.max(length).astype(jnp.int32) + block - 1) // block
            best = lax.fori_loop(jnp.int32(0), blocks, search, best)
        return best % C, jnp.maximum(best // C, 0)

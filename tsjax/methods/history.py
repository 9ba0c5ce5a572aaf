# SPDX-License-Identifier: Apache-2.0
"""Drafts from the text itself: a table of frequent n-grams, and the longest suffix match.

Knows token buffers and their lengths. Does not know models. All of it is plain integers on the
device: the host is never asked.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

MATCH_LIMIT = 16  # tokens of a suffix that are compared
TOKENS_PER_MATCH = 4  # a match of m tokens is continued by up to this times m
SEARCH_BLOCK = 4096


class NgramTable(flax.struct.PyTreeNode):
    """For every first token, the n-grams that began with it: the frequent ones, and the newest.

    The rule. N-grams are entered in the order of their positions. One that is there already counts
    one more and remembers its new position. A new one takes a free slot of its first token, or
    that of the entry with the lowest count, among equals of the one seen longest ago. A lookup
    gives the entries of the highest count, among equals those seen last first.

    Attributes:
      entries: [B, V, slots, n + 1] int32: the n - 1 tokens that follow, the count (0: free slot),
        and the last position of the first token.
      entered: [B] int32, n-grams entered so far: those that begin at positions below it.
    """

    entries: jax.Array
    entered: jax.Array

    @property
    def size(self) -> int:
        """n, tokens of an n-gram."""
        return self.entries.shape[3] - 1


def init_table(batch: int, vocab_size: int, slots: int, size: int) -> NgramTable:
    return NgramTable(
        entries=jnp.zeros((batch, vocab_size, slots, size + 1), jnp.int32),
        entered=jnp.zeros((batch,), jnp.int32),
    )


def enter(table: NgramTable, tokens, known) -> NgramTable:
    """Enters the n-grams of tokens [B, C] that lie within the first `known` [B] and are new."""
    n, zero = table.size, jnp.int32(0)
    goal = jnp.maximum(table.entered, known - n + 1)

    def enter_row(b, entries):
        def enter_one(position, entries):
            gram = lax.dynamic_slice(tokens, (b, position), (1, n))[0]
            old = lax.dynamic_slice(entries, (b, gram[0], zero, zero), (1, 1, *entries.shape[2:]))
            new = _counted(old[0, 0], gram[1:], position)[None, None]
            return lax.dynamic_update_slice(entries, new, (b, gram[0], zero, zero))

        return lax.fori_loop(table.entered[b], goal[b], enter_one, entries)

    with jax.named_scope("enter_ngrams"):
        rows = jnp.int32(table.entries.shape[0])
        entries = lax.fori_loop(zero, rows, enter_row, table.entries)
        return NgramTable(entries=entries, entered=goal)


def _counted(slots, following, position):
    """The slots [slots, n + 1] of one first token after one more n-gram."""
    count, last = slots[:, -2], slots[:, -1]
    found = jnp.all(slots[:, :-2] == following, axis=1) & (count > 0)
    # Free slots have count 0 and come first; last positions differ, so nothing is left to chance.
    rarest = count == jnp.min(count)
    oldest = jnp.argmin(jnp.where(rarest, last, jnp.iinfo(jnp.int32).max))
    at = jnp.where(jnp.any(found), jnp.argmax(found), oldest)
    new_count = jnp.where(jnp.any(found), count[at] + 1, 1)
    entry = jnp.concatenate([following, new_count[None], position[None]])
    return jnp.where(jnp.arange(slots.shape[0])[:, None] == at, entry, slots)


def most_frequent(table: NgramTable, first, k: int):
    """The followers [B, k, n - 1] of first tokens [B], best first, and [B, k] which exist."""

    def one(entries, first):
        slots = lax.dynamic_index_in_dim(entries, first, keepdims=False)
        _, _, order = lax.sort(
            (-slots[:, -2], -slots[:, -1], jnp.arange(slots.shape[0])), num_keys=2
        )
        chosen = slots[order[:k]]
        return chosen[:, :-2], chosen[:, -2] > 0

    with jax.named_scope("most_frequent_ngrams"):
        return jax.vmap(one)(table.entries, first)


def longest_suffix(tokens, length, limit: int):
    """What followed the longest earlier match of the last tokens, and how long the match is.

    The rule. Among the positions before the last known token, that is chosen at which most tokens
    equal those at the end of the text, counted backwards and at most MATCH_LIMIT of them; among
    equals the last; no equal token is no match. What followed there is drafted, TOKENS_PER_MATCH
    tokens for each equal one and at most `limit`; where it reaches the end of the text, it goes on
    as it would if the text from there on repeated itself.

    Args:
      tokens: [B, C] int32.
      length: [B] int32, known tokens.

    Returns:
      [B, limit] int32 tokens, [B] int32, how many of them are drafted, and [B] int32, how many
      tokens matched.
    """
    B, C = tokens.shape
    block = min(SEARCH_BLOCK, C)
    recent = length[:, None] - 1 - jnp.arange(MATCH_LIMIT, dtype=jnp.int32)
    # Nothing equals what lies before the first token.
    pattern = jnp.where(
        recent >= 0, jnp.take_along_axis(tokens, jnp.maximum(recent, 0), axis=1), -1
    )

    def search(index, best):
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
            size += equal
        position = start + jnp.arange(block, dtype=jnp.int32)
        earlier = position < length[:, None] - 1
        score = jnp.where(earlier, size * C + position, -1)
        return jnp.maximum(best, jnp.max(score, axis=1))

    with jax.named_scope("longest_suffix"):
        longest = jnp.max(length).astype(jnp.int32)
        blocks = (longest + block - 1) // block
        best = lax.fori_loop(jnp.int32(0), blocks, search, jnp.full((B,), -1, jnp.int32))
        size, position = best // C, best % C
        count = jnp.minimum(TOKENS_PER_MATCH * jnp.maximum(size, 0), limit)
        period = jnp.maximum(length - 1 - position, 1)
        offset = jnp.arange(limit, dtype=jnp.int32) % period[:, None]
        source = jnp.clip(position[:, None] + 1 + offset, 0, C - 1)
        return jnp.take_along_axis(tokens, source, axis=1), count, jnp.maximum(size, 0)

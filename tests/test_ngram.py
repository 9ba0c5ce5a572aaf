# SPDX-License-Identifier: Apache-2.0
"""N-grams against the rules of their docstrings in plain Python: dicts, lists and loops."""

import collections
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from tsjax.methods import history as ngram
from tsjax.methods.history import MATCH_LIMIT, SEARCH_BLOCK, TOKENS_PER_MATCH

pytestmark = pytest.mark.usefixtures("strict_promotion")

# --- the n-gram table ------------------------------------------------------------------------

B, V, C = 3, 4, 48  # few tokens, so that n-grams repeat and slots run out

run_enter = jax.jit(ngram.enter, static_argnames="size")
run_enter_few = jax.jit(ngram.enter_few, static_argnames="most")
look_up = jax.jit(ngram.most_frequent, static_argnames=("k", "size"))


class Table:
    """The rule of NgramTable for one batch row: first token -> its latest places."""

    def __init__(self, slots, size):
        self.slots, self.size = slots, size
        self.entered = 0
        self.places = collections.defaultdict(list)

    def enter(self, tokens, known, most=C):
        for _ in range(most):
            if self.entered + self.size <= known:
                places = self.places[tokens[self.entered]]
                places.append(self.entered)
                del places[: -self.slots]
                self.entered += 1

    def most_frequent(self, tokens, first, k):
        seen = {}
        for place in self.places[first]:
            following = tuple(tokens[place + 1 : place + self.size])
            seen[following] = (seen.get(following, (0,))[0] + 1, place)
        return sorted(seen, key=seen.get, reverse=True)[:k]


def check_table(table, tokens, models, k):
    assert table.places.dtype == table.counts.dtype == table.entered.dtype == np.int32
    assert table.entered.tolist() == [model.entered for model in models]
    size = models[0].size
    for first in range(V):
        firsts = np.full((B,), first, np.int32)
        following, exists = look_up(table, tokens, firsts, k=k, size=size)
        assert following.dtype == np.int32 and exists.dtype == bool
        assert following.shape == (B, k, size - 1) and exists.shape == (B, k)
        for b, model in enumerate(models):
            expected = model.most_frequent(tokens[b].tolist(), first, k)
            assert exists[b].tolist() == [i < len(expected) for i in range(k)]
            found = np.asarray(following[b])[np.asarray(exists[b])]
            assert list(map(tuple, found.tolist())) == expected


@st.composite
def texts(draw, count, width, vocab):
    """Random, periodic and constant rows of tokens [count, width]."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = rng.integers(0, draw(st.integers(1, vocab)), (count, width), np.int32)
    for row in range(count):
        if draw(st.booleans()):
            period = draw(st.integers(1, width))
            tokens[row] = np.resize(tokens[row, :period], width)
            changed = rng.random(width) < draw(st.sampled_from([0, 0, 0.03, 0.2]))
            tokens[row, changed] = rng.integers(0, vocab, changed.sum())
    return tokens


# How many tokens of each row are known, step by step: ragged, and now and then going backwards.
steps_strategy = st.lists(st.tuples(*[st.integers(-3, C)] * B), min_size=1, max_size=5)


def check_entering(size, slots, most, tokens, steps):
    """Few at a time and all that is known, in turns."""
    table = ngram.init_table(B, V, slots)
    models = [Table(slots, size) for _ in range(B)]
    for index, step in enumerate(steps):
        known = np.asarray(step, np.int32)
        if index % 2:
            table = run_enter_few(table, tokens, known - size + 1, most=most)
        else:
            table = run_enter(table, tokens, known, size=size)
        for row, known, model in zip(tokens.tolist(), step, models, strict=True):
            model.enter(row, known, most if index % 2 else C)
        check_table(table, tokens, models, slots)
    check_table(table, tokens, models, 1)


# Of an n-gram, and slots of a token.
@pytest.mark.parametrize("size, slots, x64", [(3, 2, True), (5, 6, False)])
@hypothesis.given(texts(B, C, V), steps_strategy)
@hypothesis.settings(max_examples=20)
def test_table(size, slots, x64, tokens, steps):
    with jax.enable_x64(x64):
        check_entering(size, slots, 5, tokens, steps)


@pytest.mark.parametrize("block", [1, 7])
@hypothesis.given(texts(B, C, V), st.tuples(*[st.integers(-3, C)] * B))
@hypothesis.settings(max_examples=10)
def test_blocks_of_a_prompt(block, tokens, known):
    """All that is known enters, in blocks that are wider than the slots or narrower."""
    models = [Table(4, 3) for _ in range(B)]
    for row, n, model in zip(tokens.tolist(), known, models, strict=True):
        model.enter(row, n)
    table = in_blocks(ngram.init_table(B, V, 4), tokens, np.asarray(known, np.int32), block)
    check_table(table, tokens, models, 3)


@functools.partial(jax.jit, static_argnames="block")
def in_blocks(table, tokens, known, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "ENTER_BLOCK", block)
        return ngram.enter(table, tokens, known, 3)


# --- the longest suffix ----------------------------------------------------------------------

ROWS, WIDTH = 3, 100


def define_suffix(text, limit):
    """The rule of longest_suffix for one row, by comparing token by token: what is drafted, and
    how many tokens match."""
    most, place = 0, None
    for position in range(len(text) - 1):
        equal = 0
        while equal <= position and equal < MATCH_LIMIT and text[position - equal] == text[~equal]:
            equal += 1
        if equal >= most:
            most, place = equal, position
    if most == 0:
        return [], 0
    drafted = min(TOKENS_PER_MATCH * most, limit)
    repeated = text[place + 1 :]
    return [repeated[i % len(repeated)] for i in range(drafted)], most


def check_suffix(search, tokens, length, limit):
    drafted, count, matched = search(tokens, np.asarray(length, np.int32), limit=limit)
    assert drafted.dtype == count.dtype == matched.dtype == np.int32
    assert drafted.shape == (len(tokens), limit) and count.shape == (len(tokens),)
    for b, row in enumerate(tokens.tolist()):
        expected, most = define_suffix(row[: length[b]], limit)
        assert np.asarray(drafted[b, : count[b]]).tolist() == expected
        assert matched[b] == most


@functools.partial(jax.jit, static_argnames=("limit", "block"))
def suffix_search(tokens, length, limit, block=SEARCH_BLOCK):
    """In one block as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "SEARCH_BLOCK", block)
        return ngram.longest_suffix(tokens, length, limit)


lengths_strategy = st.tuples(
    *[st.one_of(st.integers(0, WIDTH), st.sampled_from([WIDTH - 1, WIDTH]))] * ROWS
)


@hypothesis.given(texts(ROWS, WIDTH, 4), lengths_strategy, st.sampled_from([1, 16, 80]))
@hypothesis.settings(max_examples=40)
def test_longest_suffix(tokens, length, limit):
    check_suffix(suffix_search, tokens, length, limit)


@pytest.mark.parametrize("block, x64", [(1, False), (33, True), (99, False)])
@hypothesis.given(texts(ROWS, WIDTH, 3), lengths_strategy)
@hypothesis.settings(max_examples=20)
def test_blocks_of_the_search(block, x64, tokens, length):
    with jax.enable_x64(x64):
        check_suffix(functools.partial(suffix_search, block=block), tokens, length, 16)

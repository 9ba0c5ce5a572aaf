# SPDX-License-Identifier: Apache-2.0
"""Synthetic tasks over token ids, of any length, each with the answers that are right.

A small vocabulary of names, values and filler takes the place of words, so that a small model can
learn to retrieve. Every task is a function (generator, length, questions) -> Example. Its context
and the first question together have at most `length` tokens, and nearly as many; more questions
about the same context are for training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

BEGIN, PAIR, ASK, COUNT, PART, COPY, ORDER, GO = range(8)
NAMES = range(16, 144)
VALUES = range(144, 240)
FILLER = range(240, 288)
VOCAB = 288
VALUE_TOKENS = 2  # of each value
HOPS = 1
QUERIES = 4  # answered one after the other
PART_TOKENS = 16


class Question(NamedTuple):
    tokens: list[int]
    answer: list[int]  # what greedy decoding is to say
    depth: float = 0.0  # where in the context the answer lies, from 0 to 1


class Example(NamedTuple):
    context: list[int]
    questions: list[Question]

    @property
    def prompt(self) -> np.ndarray:
        """The context and its first question, [P] int32."""
        return np.asarray([*self.context, *self.questions[0].tokens], np.int32)

    @property
    def answer(self) -> np.ndarray:
        """What is right to say after the prompt, [A] int32."""
        return np.asarray(self.questions[0].answer, np.int32)


def passkey(
    rng: np.random.Generator, length: int, questions: int = 1, depth: float | None = None
) -> Example:
    """One name and its value in filler."""
    del questions  # there is one
    depth = rng.random() if depth is None else depth
    (name,), (value,) = _names(rng, 1), _values(rng, 1)
    needle, question = [PAIR, name, *value], [ASK, name]
    room = max(0, length - len(needle) - len(question) - 1)
    before = round(depth * room)
    filler = _filler(rng, room)
    context = [BEGIN, *filler[:before], *needle, *filler[before:]]
    return Example(context, [Question(question, value, depth)])


def key_values(rng: np.random.Generator, length: int, questions: int = 1) -> Example:
    """Names and values, nothing else; one is asked for."""
    names, values = _pairs(rng, length - 3)
    asked = rng.choice(len(names), size=min(questions, len(names)), replace=False)
    return Example(
        _spread(rng, _listed(names, values), length - 2),
        [Question([ASK, names[i]], values[i], i / len(names)) for i in asked],
    )


def multi_query(rng: np.random.Generator, length: int, questions: int = 1) -> Example:
    """Several names are asked for at once, and answered one after the other.

    When the first is answered, the prompt's last token has no reason to look for the others.
    """
    size = QUERIES + 2
    names, values = _pairs(rng, length - size - 1)
    found = []
    for _ in range(questions):
        asked = rng.choice(len(names), size=min(QUERIES, len(names)), replace=False)
        answer = [token for i in asked for token in (names[i], *values[i])]
        found.append(Question([ORDER, *(names[i] for i in asked), GO], answer))
    return Example(_spread(rng, _listed(names, values), length - size), found)


def late_query(rng: np.random.Generator, length: int, questions: int = 1) -> Example:
    """A table at the start of the prompt says which names to give the values of.

    The table is read while the answer is made; the prompt's last token asks for nothing.
    """
    del questions  # there is one table
    table = QUERIES + 2
    names, values = _pairs(rng, length - table - 2)
    asked = rng.choice(len(names), size=min(QUERIES, len(names)), replace=False)
    answer = [token for i in asked for token in (names[i], *values[i])]
    pairs = _spread(rng, _listed(names, values), length - table - 1, begin=())
    order = [ORDER, *(names[i] for i in asked)]
    return Example([BEGIN, *order, *pairs], [Question([GO], answer)])


def variable_tracking(rng: np.random.Generator, length: int, questions: int = 1) -> Example:
    """A value goes from name to name; which value has the last name? Other chains lie between.

    Questions after the first ask for any name of a chain.
    """
    chains = max(1, (length - 3) // (2 + VALUE_TOKENS + HOPS * 3))
    names = _names(rng, min(chains * (HOPS + 1), len(NAMES)))
    chains = len(names) // (HOPS + 1)
    values = _values(rng, chains)
    members = [names[chain * (HOPS + 1) : (chain + 1) * (HOPS + 1)] for chain in range(chains)]
    queues = []
    for mine, value in zip(members, values, strict=True):
        steps = [[PAIR, after, before] for before, after in zip(mine, mine[1:], strict=False)]
        queues.append([[PAIR, mine[0], *value], *steps])
    statements = []
    while any(queues):  # interleaved, each chain in its order
        chain = int(rng.choice([i for i, steps in enumerate(queues) if steps]))
        statements.append(queues[chain].pop(0))
    found = []
    for index in range(questions):
        chain = int(rng.integers(chains))
        hop = int(rng.integers(HOPS + 1)) if index else HOPS
        found.append(Question([ASK, members[chain][hop]], values[chain]))
    return Example(_spread(rng, statements, length - 2), found)


def common_word(rng: np.random.Generator, length: int, questions: int = 1) -> Example:
    """Which name occurs most often: wide attention."""
    del questions  # there is one
    count = length - 2
    names = _names(rng, 8)
    share = max(2, count // 4)
    others = np.resize(names[1:], count - share)  # each of them as often
    words = rng.permutation([*[names[0]] * share, *others])
    return Example([BEGIN, *words.tolist()], [Question([COUNT], [names[0]])])


def long_copy(rng: np.random.Generator, length: int, questions: int = 1) -> Example:
    """One of several paragraphs, named by its first token, word for word."""
    number = max(1, (length - 3) // (PART_TOKENS + 2))
    names = _names(rng, min(number, len(NAMES)))
    texts = rng.choice(np.asarray(VALUES), size=(len(names), PART_TOKENS)).tolist()
    parts = [[PART, name, *text] for name, text in zip(names, texts, strict=True)]
    asked = rng.choice(len(names), size=min(questions, len(names)), replace=False)
    return Example(
        _spread(rng, parts, length - 2),
        [Question([COPY, names[i]], texts[i], i / len(names)) for i in asked],
    )


TASKS: dict[str, Callable[..., Example]] = {
    "passkey": passkey,
    "key_values": key_values,
    "multi_query": multi_query,
    "late_query": late_query,
    "variable_tracking": variable_tracking,
    "common_word": common_word,
    "long_copy": long_copy,
}
RETRIEVAL = ("passkey", "key_values", "multi_query")


def score(answer: np.ndarray, said: Sequence[int] | np.ndarray) -> float:
    """The share of the answer's values that were said at their places, or of all it consists of."""
    said = np.asarray(said)[: len(answer)]
    said = np.pad(said, (0, len(answer) - len(said)), constant_values=-1)
    values = np.isin(answer, VALUES)
    return float(np.mean((said == answer)[values if values.any() else ...]))


def _names(rng: np.random.Generator, count: int) -> list[int]:
    return rng.choice(np.asarray(NAMES), size=count, replace=False).tolist()


def _values(rng: np.random.Generator, count: int) -> list[list[int]]:
    return rng.choice(np.asarray(VALUES), size=(count, VALUE_TOKENS)).tolist()


def _filler(rng: np.random.Generator, count: int) -> list[int]:
    return rng.choice(np.asarray(FILLER), size=count).tolist()


def _pairs(rng: np.random.Generator, length: int) -> tuple[list[int], list[list[int]]]:
    count = max(1, min(length // (2 + VALUE_TOKENS), len(NAMES)))
    return _names(rng, count), _values(rng, count)


def _listed(names, values) -> list[list[int]]:
    return [[PAIR, name, *value] for name, value in zip(names, values, strict=True)]


def _spread(
    rng: np.random.Generator,
    statements: list[list[int]],
    length: int,
    begin: Sequence[int] = (BEGIN,),
) -> list[int]:
    """`length` tokens: the beginning, then the statements in their order, with filler anywhere
    between them."""
    room = max(0, length - len(begin) - sum(map(len, statements)))
    before = np.bincount(
        rng.integers(len(statements) + 1, size=room), minlength=len(statements) + 1
    )
    found = list(begin)
    for count, statement in zip(before, [*statements, []], strict=True):
        found += [*_filler(rng, count), *statement]
    return found

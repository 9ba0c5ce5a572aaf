# SPDX-License-Identifier: Apache-2.0
"""How much a text repeats itself, against plain Python that looks at everything."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest

from benchmarks.text_figures import distinct, figures, repeated, self_bleu

texts = st.lists(st.integers(0, 4), max_size=60)


def spans(text, n):
    return [tuple(text[at : at + n]) for at in range(len(text) - n + 1)]


@hypothesis.given(texts, st.integers(1, 4))
def test_distinct(text, n):
    every = spans(text, n)
    assert distinct(text, n) == (len(set(every)) / len(every) if every else 1)


@hypothesis.given(texts, st.integers(1, 5))
def test_repeated(text, span):
    every, lies = spans(text, span), [False] * len(text)
    for at, one in enumerate(every):
        if one in every[:at]:
            lies[at : at + span] = [True] * span
    assert repeated(text, span) == pytest.approx(sum(lies) / max(len(text), 1))


def bleu(candidate, references, order):
    """Papineni's, of equal weights."""
    product = 1.0
    for n in range(1, order + 1):
        every = spans(candidate, n)
        clipped = 0
        for one in set(every):
            most = max(spans(reference, n).count(one) for reference in references)
            clipped += min(every.count(one), most)
        product *= (clipped / len(every)) ** (1 / order)
    return product


@hypothesis.given(texts, st.integers(4, 9), st.integers(1, 4))
def test_self_bleu(text, piece, order):
    pieces = [text[at : at + piece] for at in range(0, len(text), piece)]
    pieces = [one for one in pieces if len(one) == piece]
    found = self_bleu(text, piece, order)
    if len(pieces) < 2:
        assert found == 0
        return
    scores = [
        bleu(one, pieces[:index] + pieces[index + 1 :], order) for index, one in enumerate(pieces)
    ]
    assert found == pytest.approx(math.fsum(scores) / len(scores), abs=1e-12)


def test_a_text_that_repeats_itself_and_one_that_does_not():
    said, new = figures([1, 2, 3, 4] * 512), figures(list(range(2048)))
    assert said["distinct_4"] < 0.01 and said["repeated"] > 0.99 and said["self_bleu"] == 1
    assert new == {**{f"distinct_{n}": 1.0 for n in range(1, 5)}, "repeated": 0, "self_bleu": 0}

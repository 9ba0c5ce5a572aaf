# SPDX-License-Identifier: Apache-2.0
"""Earlier texts to draft from: the index finds what a search would, and repeated work takes fewer
steps with the same tokens."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SIZES, save_tokenizer, tiny_model

import tsjax
from tsjax.costs import Costs, Line
from tsjax.methods import corpus
from tsjax.methods.corpus import ORDERS, WAYS, Corpus
from tsjax.methods.history import last_tokens

MODEL = tiny_model()
LINE = Line(1.0)
COSTS = Costs(
    passes=((1, LINE), (16, Line(2.0))), heads=0.0, choice=LINE, suffix=Line(0.0),
    ngrams=0.0, overhead=0.0, origin="measured",
)  # fmt: skip
SETTINGS = dict(max_new_tokens=60, do_sample=True, temperature=1.5, seed=3, **SIZES)
PROMPT = [1, 2, 3, 4, 5, 6, 7]


# --- the index -----------------------------------------------------------------------------------

rows = st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=4)


@hypothesis.given(rows, st.lists(st.integers(0, 3), min_size=1, max_size=12))
@hypothesis.settings(max_examples=40, deadline=None)
def test_places_are_those_of_a_search(rows, text):
    """Of each order the latest WAYS places are found, unless two matches share a bucket; what is
    found is as long as the definition says, and so is what followed."""
    if not any(rows):
        return
    made = Corpus(rows)
    flat = [token for row in made.rows for token in [-1, *row.tolist()]]
    recent = last_tokens(jnp.asarray([text], jnp.int32), jnp.asarray([len(text)], jnp.int32))
    index = jax.tree.map(jnp.asarray, made.index)
    places = corpus.places_in(index, recent)
    sizes = np.asarray(corpus.match_sizes_in(index, recent, places))[0]
    followed, left = map(np.asarray, corpus.what_followed_in(index, places, 5))
    places = np.asarray(places)[0].tolist()

    def match_at(place):
        size = 0
        while size < min(16, len(text)) and flat[place - size] == text[-1 - size]:
            size += 1
        return size

    found = [place for place in places if place]
    assert len(set(found)) == len(found)
    for at, place in enumerate(places):
        if not place:
            assert sizes[at] == 0
            continue
        assert sizes[at] == match_at(place)
        after = flat[place + 1 : place + 6]
        after = after[: after.index(-1)] if -1 in after else after
        assert followed[0, at, : left[0, at]].tolist() == after
    # Where no other window has the bucket, the latest place is there.
    size = made.index.tokens.shape[0]

    def bucket_of(window):
        last_first = np.asarray(window[::-1], np.uint32)[:, None]
        return int(corpus.bucket_of(last_first, size, np)[0])

    for order in ORDERS:
        mine, windows = text[-order:], {}
        for place in range(order, len(flat)):
            windows[place] = flat[place - order + 1 : place + 1]
        latest = max((p for p, window in windows.items() if window == mine), default=None)
        others = (w for w in windows.values() if -1 not in w and w != mine)
        if len(mine) == order and latest and bucket_of(mine) not in map(bucket_of, others):
            assert latest in found, order


def test_the_index_is_bounded_and_keeps_the_latest(monkeypatch):
    monkeypatch.setattr(corpus, "MOST_TOKENS", 2048)
    made = Corpus([np.arange(1500), np.arange(1500, 3000)])
    assert made.index.tokens.shape == (2048,) and made.index.tokens[2047] == 2999
    assert made.nbytes == 4 * 2048 * (1 + len(ORDERS) * WAYS)
    small = [Corpus([[1] * n]).index.tokens.shape for n in (1, 1000)]
    assert small == [(1024,), (1024,)], "one program for both"


# --- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    return tsjax.generate(MODEL, PROMPT, **SETTINGS)


@pytest.fixture(scope="module")
def repeated(plain):
    return Corpus([np.concatenate([PROMPT, plain.tokens[0]])])


METHOD = tsjax.LikelyTree(costs=COSTS, width=8, places=4)


def test_the_same_prompt_again_takes_a_quarter_of_the_steps(plain, repeated):
    found = tsjax.generate(MODEL, PROMPT, method=METHOD, corpus=repeated, **SETTINGS)
    assert found.tokens[0].tolist() == plain.tokens[0].tolist()
    assert sum(found.stats.steps) <= 15 and found.stats.method.corpus is True
    assert found.stats.accepted_by_source["corpus"] > 40
    # Other texts change nothing.
    other = Corpus([np.random.default_rng(1).integers(0, 61, 500)])
    found = tsjax.generate(MODEL, PROMPT, method=METHOD, corpus=other, **SETTINGS)
    assert found.tokens[0].tolist() == plain.tokens[0].tolist() and sum(found.stats.steps) > 40


@pytest.mark.wide
def test_auto_reads_it_too_in_batches_on_a_mesh(repeated):
    batch = [PROMPT, [9, 8], PROMPT]
    settings = {**SETTINGS, "seed": (3, 5, 4)}
    expected = tsjax.generate(MODEL, batch, **settings)
    auto, model = tsjax.Auto(costs=COSTS), tiny_model(mesh=jax.make_mesh((2,), ("model",)))
    found = tsjax.generate(model, batch, method=auto, corpus=repeated, **settings)
    for one, other in zip(found.tokens, expected.tokens, strict=True):
        assert one.tolist() == other.tolist()
    assert found.stats.accepted_by_source["corpus"] > 40


@pytest.mark.wide
def test_a_run_is_resumed_with_a_corpus_or_without(plain, repeated, tmp_path):
    file = tmp_path / "run.json"
    begun = {**SETTINGS, "max_new_tokens": 20}
    tsjax.generate(MODEL, PROMPT, method=METHOD, corpus=repeated, save_to=file, **begun)
    for given in (None, repeated):
        found = tsjax.generate(MODEL, resume_from=file, max_new_tokens=60, corpus=given, **SIZES)
        assert found.tokens[0].tolist() == plain.tokens[0].tolist()


def test_files_become_a_corpus(plain, tmp_path):
    run = tmp_path / "run.json"
    tsjax.generate(MODEL, PROMPT, save_to=run, **SETTINGS)
    found = tsjax.read_corpus(MODEL, run)
    assert found.rows[0].tolist() == PROMPT + plain.tokens[0].tolist()
    model = dataclasses.replace(MODEL, path=save_tokenizer(tmp_path / "model"))
    text = tmp_path / "text.txt"
    text.write_text("a b")
    both = tsjax.read_corpus(model, run, text)
    assert len(both.rows) == 2 and len(both.rows[1]) > 0
    assert (found + Corpus([[1]])).rows[1].tolist() == [1]
    with pytest.raises(FileNotFoundError, match="files='missing' is not valid"):
        tsjax.read_corpus(model, "missing")
    with pytest.raises(ValueError, match="files=\\(\\) is not valid"):
        tsjax.read_corpus(model)


def test_what_is_no_corpus_and_where_one_is_refused():
    for given in ([], [[]], [1, 2], [[0.5]], [[-1]], [[2**31]]):
        with pytest.raises(ValueError, match="rows=.* is not valid"):
            Corpus(given)
    one = Corpus([[1, 2, 3]])
    with pytest.raises(TypeError, match="corpus=\\[1\\] is not valid: a tsjax.Corpus"):
        tsjax.generate(MODEL, PROMPT, method="auto", corpus=[1])
    with pytest.raises(ValueError, match="corpus=.*NGram does not"):
        tsjax.generate(MODEL, PROMPT, method="ngram", corpus=one)
    with pytest.raises(ValueError, match="corpus=.*a largest id of 61.*below the vocabulary"):
        tsjax.generate(MODEL, PROMPT, method="auto", corpus=Corpus([[61]]))

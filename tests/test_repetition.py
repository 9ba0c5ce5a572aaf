# SPDX-License-Identifier: Apache-2.0
"""A text that loops ends at the same token by every method; against a plain loop."""

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import SIZES, chain, chain_model

import tsjax
from tsjax.host.repetition import Loops

LOOP = chain(1, 2, 3, 4, 5, 6, 4)  # 4 5 6 4 5 6 ...


def by_hand(text, least, most, times):
    """How many tokens it takes; None where the text does not loop."""
    for end in range(1, len(text) + 1):
        for period in range(least, most + 1):
            part = text[end - period : end] if end >= period * times else None
            if part is not None and text[end - period * times : end] == part * times:
                return end
    return None


def request_of(asked, prompt=(), made=(), stop_ids=()):
    return SimpleNamespace(
        config=tsjax.GenerationConfig(max_new_tokens=500, repetition_detection=asked),
        rows=[np.asarray([*prompt, *made], np.int32)], prompt_length=[len(prompt)],
        stop_ids=stop_ids,
    )  # fmt: skip


@hypothesis.given(
    text=st.lists(st.integers(0, 2), max_size=60), least=st.integers(1, 4),
    more=st.integers(0, 5), times=st.integers(2, 4), data=st.data(),
)  # fmt: skip
@hypothesis.settings(max_examples=100)
def test_it_is_found_where_a_plain_loop_finds_it(text, least, more, times, data):
    asked, wanted = (least, least + more, times), by_hand(text, least, least + more, times)
    # The first part may have come before a run was resumed, the rest in chunks of any size.
    known = data.draw(st.integers(0, max((wanted or len(text) + 1) - 1, 0)))
    loops = Loops(request_of(asked, prompt=(0, 0, 0, 0), made=text[:known]))
    place, found = known, None
    while found is None and place < len(text):
        size = data.draw(st.integers(1, 20))
        inside = loops.find(np.asarray(text[place : place + size], np.int32))
        found = None if inside is None else place + inside
        place += size
    assert found == wanted


def test_a_stop_token_ends_a_row_as_such():
    loops = Loops(request_of((1, 1, 3), stop_ids=(7,)))
    assert loops.find(np.asarray([7, 7, 7])) is None
    assert Loops(request_of(None)).find(np.asarray([1, 1, 1, 1])) is None


@pytest.mark.parametrize("method", [None, AnyTree()], ids=str)
def test_drafts_stop_at_the_same_token(method):
    """Also where a step finds several rounds of the loop."""
    model = chain_model(LOOP)
    how = dict(max_new_tokens=100, repetition_detection=(2, 8, 5), method=method, **SIZES)
    found = tsjax.generate(model, [[1], [9]], **how)
    assert found.finish_reason == ["repetition", "repetition"]
    assert found.tokens[0].tolist() == [2, 3, *[4, 5, 6] * 5]
    assert found.tokens[1].tolist() == [0] * 10  # 0 0, five times
    chunks = list(tsjax.stream(model, [[1], [9]], **how))
    joined = np.concatenate([chunk.tokens[0] for chunk in chunks])
    assert joined.tolist() == found.tokens[0].tolist()


def test_a_text_that_loops_goes_on_where_nobody_asks():
    off = tsjax.generate(chain_model(LOOP), [1], max_new_tokens=100, **SIZES)
    assert off.finish_reason == ["length"] and len(off.tokens[0]) == 100


def test_a_resumed_run_remembers(tmp_path):
    model, path = chain_model(LOOP), tmp_path / "run.json"
    how = dict(repetition_detection=(2, 8, 5), **SIZES)
    tsjax.generate(model, [1], max_new_tokens=10, save_to=path, **how)
    found = tsjax.generate(model, resume_from=path, max_new_tokens=100, **SIZES)
    assert found.finish_reason == ["repetition"] and len(found.tokens[0]) == 17
    tsjax.generate(model, resume_from=path, max_new_tokens=100, save_to=path, **SIZES)
    again = tsjax.generate(model, resume_from=path, max_new_tokens=100, **SIZES)
    assert again.finish_reason == ["repetition"] and len(again.tokens[0]) == 17


@pytest.mark.parametrize("asked", [(0, 3, 2), (4, 3, 2), (1, 3, 1), (1, 2), (1, 2, "3"), 5])
def test_wrong_measures_are_refused(asked):
    with pytest.raises(ValueError, match="repetition_detection=.*min_period, max_period, times"):
        tsjax.GenerationConfig(repetition_detection=asked)

# SPDX-License-Identifier: Apache-2.0
"""Settings that change what a method runs, in many cases: tokens are those of plain decoding.

Each method in one setting is in test_method_contract.py, and what tools/record_acceptance.py runs
in test_acceptance.py; here are the settings that neither has. test_any_tree.py draws the cases.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import pytest
from helpers import LOOPING, SIZES, looping_model, tiny_model
from test_any_tree import cases, compare, rows_of

import tsjax

pytestmark = pytest.mark.wide

NO_TEXT = dict(num_ngrams=0, suffix_length=0)  # nothing but the model's drafts
METHODS = {  # and heads
    # The least draft cache there is; a tree that is deeper than the drafts is cut to its first.
    "one_token": (tsjax.TokenSwift(tree=(1, 2), draft_budget=2, num_sinks=0, **NO_TEXT), 0),
    "121_rows": (tsjax.TokenSwift(tree=(3, 3, 3, 3), draft_budget=128, **NO_TEXT), 3),
    "paths": (
        tsjax.TokenSwift(
            tree=((0,), (1,), (0, 0), (0, 2), (1, 0)), num_ngrams=3, ngram_size=2, ngram_slots=3,
            suffix_length=4, draft_budget=12, num_sinks=2, noise_coupled=False,
        ),
        1,
    ),
    "passes_and_heads": (
        tsjax.TokenSwift(
            tree=(1, 2, 1, 1), draft_passes=2, draft_budget=4096, num_ngrams=2, ngram_size=4,
            suffix_match=2, suffix_alone=4,
        ),
        2,
    ),
    "no_tree": (
        tsjax.TokenSwift(tree=(), num_ngrams=3, ngram_size=3, suffix_length=3, draft_budget=40), 0
    ),
    "magicdec": (tsjax.methods.MagicDec(draft_budget=12, num_sinks=2, draft_weights="int8"), 0),
    "triforce": (
        tsjax.methods.TriForce(
            length=3, inner_length=2, draft_budget=16, num_sinks=0, draft_refresh=None,
            draft_weights="int8",
        ),
        0,
    ),
}  # fmt: skip


@functools.cache
def models(heads: int) -> tuple[tsjax.Model, ...]:
    shape = dict(num_draft_heads=heads, dtype="float64")
    return looping_model(**shape), *(tiny_model(seed=n, **LOOPING, **shape) for n in (0, 1))


@pytest.mark.parametrize("name", METHODS)
def test_tokens_are_those_of_plain_decoding(name):
    (method, heads), steps, emitted = METHODS[name], 0, 0

    @hypothesis.settings(max_examples=15)
    @hypothesis.given(cases(st.just((True, {"min_p", "repetition_penalty"}))))
    def equal(case):
        nonlocal steps, emitted
        index, rows, settings = case
        model, settings = models(heads)[index], SIZES | settings
        found = tsjax.generate(model, rows, method=method, **settings)
        # Without heads: what plain decoding needs, and one program for all.
        headless = tsjax.Model(model.params.replace(heads=()), cfg=model.cfg.with_heads(0))
        assert rows_of(found) == rows_of(tsjax.generate(headless, rows, **settings))
        steps, emitted = steps + sum(found.stats.steps), emitted + found.stats.computed_tokens

    with jax.enable_x64(True):
        equal()
    assert emitted > 1.05 * steps, "next to nothing was accepted, so next to nothing was tested"


@pytest.mark.slow
def test_20000_tokens():
    """A draft cache of 256 slots is chosen again at least 80 times."""
    method = tsjax.TokenSwift(tree=(2, 2), draft_budget=256, draft_passes=2)
    how = dict(do_sample=True, repetition_penalty=1.1, repetition_window=512)
    how.update(max_new_tokens=20_000, capacity=32768)
    result = compare(tiny_model(), [1, 2, 3], method, **how)
    assert result.stats.new_tokens == (20_000,) and result.stats.tokens_per_step > 1.2

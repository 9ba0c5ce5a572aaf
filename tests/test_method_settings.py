# SPDX-License-Identifier: Apache-2.0
"""The settings of the methods, one by one and in many cases: tokens are those of plain decoding.

Each method in one setting is in the default tier, in test_method_contract.py; how the cases are
drawn is in test_any_tree.py. Here are the settings that change what a method runs.
"""

import functools
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import pytest
from helpers import LOOPING, looping_model, tiny_model
from test_any_tree import FEW, cases, compare, rows_of

import tsjax

pytestmark = pytest.mark.wide


class Setup(NamedTuple):
    """What a step is compiled for."""

    method: Any
    num_draft_heads: int = 0
    batch: int = 1
    head_kind: str = "chained"
    second: bool = False  # whether there is a second model


NO_TEXT = dict(num_ngrams=0, suffix_length=0)  # nothing but the model's drafts
LINE = tsjax.Line(1.0)
CHEAP_ROWS = tsjax.Costs(  # what is drafted at all is judged
    passes=((1, LINE), (64, tsjax.Line(1.01))), heads=0.0, choice=LINE, suffix=LINE, ngrams=0.0,
    overhead=0.0, origin="measured", int8=tsjax.Int8Costs(tsjax.Line(0.01), 0.0),
)  # fmt: skip
SETUPS = {
    "ngrams_alone": Setup(tsjax.NGram(ngram_size=5, ngram_delay=3, suffix_length=0)),
    "suffix_alone": Setup(tsjax.NGram(num_ngrams=0, suffix_length=16), batch=4),
    # The least draft cache there is; a tree that is deeper than the drafts is cut to its first.
    "one_token": Setup(
        tsjax.TokenSwift(tree=(1, 2), draft_budget=2, num_sinks=0, **NO_TEXT), batch=2
    ),
    "paper": Setup(
        tsjax.TokenSwift(
            draft_budget=32, num_sinks=4, draft_refresh=3, draft_rest=True, suffix_length=0
        ),
        num_draft_heads=3,
    ),
    "121_rows": Setup(
        tsjax.TokenSwift(tree=(3, 3, 3, 3), draft_budget=128, **NO_TEXT), num_draft_heads=3
    ),
    "paths": Setup(
        tsjax.TokenSwift(
            tree=((0,), (1,), (0, 0), (0, 2), (1, 0)), num_ngrams=3, ngram_size=2, ngram_slots=3,
            suffix_length=4, draft_budget=12, num_sinks=2, noise_coupled=False,
        ),
        num_draft_heads=1,
        batch=2,
    ),
    "passes_and_heads": Setup(
        tsjax.TokenSwift(
            tree=(1, 2, 1, 1), draft_passes=2, draft_budget=4096, num_ngrams=2, ngram_size=4,
            suffix_match=2, suffix_alone=4,
        ),
        num_draft_heads=2,
        batch=4,
    ),
    "int8_drafts": Setup(
        tsjax.TokenSwift(
            tree=(2, 1, 2), draft_passes=2, draft_budget=16, num_sinks=2, draft_weights="int8",
            num_ngrams=2, ngram_size=3, suffix_length=3, draft_choice="retrieval",
            draft_refresh="never",
        ),
        num_draft_heads=1,
        batch=2,
    ),
    "magicdec_streaming": Setup(
        tsjax.MagicDec(draft_budget=12, num_sinks=2, draft_weights="int8"), batch=2
    ),
    "draft_model_streaming": Setup(
        tsjax.DraftModel(draft_choice="streaming", draft_budget=12, num_sinks=2),
        batch=4,
        second=True,
    ),
    "triforce_alone": Setup(
        tsjax.TriForce(
            length=3, inner_length=2, draft_budget=16, num_sinks=0, draft_refresh=None,
            draft_weights="int8",
        ),
        batch=2,
    ),
    "no_tree": Setup(
        tsjax.TokenSwift(tree=(), num_ngrams=3, ngram_size=3, suffix_length=3, draft_budget=40)
    ),
    "verified": Setup(
        tsjax.TokenSwift(
            tree=(2, 2, 2), draft_from="verified_state", num_ngrams=4, suffix_length=6,
            pass_widths=(17, 5),
        ),
        num_draft_heads=3,
        batch=4,
    ),
    "likely_text": Setup(tsjax.LikelyTree(width=12, places=6, costs=CHEAP_ROWS), batch=2),
    "likely_passes": Setup(
        tsjax.LikelyTree(
            width=9, pass_widths=(4,), draft_passes=3, draft_budget=16, num_sinks=2,
            draft_refresh=5, costs=CHEAP_ROWS, draft_choice="streaming",
        ),
        batch=2,
    ),
    "medusa_own": Setup(
        tsjax.Medusa(tree=(8, 2, 1), noise_coupled=False), num_draft_heads=3,
        head_kind="parallel_own_vocabulary",
    ),
    "medusa_star": Setup(
        tsjax.TokenSwift(
            tree=(1, 3, 2), draft_budget=24, num_sinks=2, num_ngrams=2, suffix_length=3
        ),
        num_draft_heads=2,
        batch=2,
        head_kind="parallel_own_vocabulary",
    ),
}  # fmt: skip


@functools.cache
def models(heads: int, dtype: str, head_kind: str) -> tuple[tsjax.Model, ...]:
    shape = dict(num_draft_heads=heads, head_kind=head_kind, dtype=dtype)
    return looping_model(**shape), *(tiny_model(seed=n, **LOOPING, **shape) for n in (0, 1))


@functools.cache
def second_model(dtype: str) -> tsjax.Model:
    return looping_model(dtype=dtype, num_layers=1)


def headless(model: tsjax.Model) -> tsjax.Model:
    """The same model without its heads: what plain decoding needs, and one program for all."""
    return tsjax.Model(model.params.replace(heads=()), cfg=model.cfg.with_heads(0))


def check_equality(name: str, dtype: str, max_examples: int, combinations) -> None:
    setup, steps, emitted = SETUPS[name], 0, 0

    @hypothesis.settings(max_examples=max_examples)
    @hypothesis.given(cases(combinations, setup.batch))
    def equal(case):
        nonlocal steps, emitted
        index, rows, settings = case
        model = models(setup.num_draft_heads, dtype, setup.head_kind)[index]
        second = second_model(dtype) if setup.second else None
        how = dict(settings, capacity=160, prefill_width=16)
        found = tsjax.generate(model, rows, method=setup.method, draft_model=second, **how)
        assert rows_of(found) == rows_of(tsjax.generate(headless(model), rows, **how))
        steps, emitted = steps + sum(found.stats.steps), emitted + found.stats.computed_tokens

    with jax.enable_x64(dtype == "float64"):
        equal()
    assert emitted > 1.05 * steps, "next to nothing was accepted, so next to nothing was tested"


@pytest.mark.parametrize("name", SETUPS)
def test_tokens_are_those_of_plain_decoding(name):
    check_equality(name, "float64", 15, st.just((True, {"min_p", "repetition_penalty"})))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", SETUPS)
def test_tokens_are_those_of_plain_decoding_in_many_cases(name, dtype):
    check_equality(name, dtype, 1000 if dtype == "float64" else 300, st.sampled_from(FEW))


@pytest.mark.slow
def test_20000_tokens():
    """A draft cache of 256 slots is chosen again at least 80 times."""
    method = tsjax.TokenSwift(tree=(2, 2), draft_budget=256, draft_passes=2)
    how = dict(do_sample=True, repetition_penalty=1.1, repetition_window=512)
    how.update(max_new_tokens=20_000, capacity=32768)
    result = compare(tiny_model(), [1, 2, 3], method, **how)
    assert result.stats.new_tokens == (20_000,) and result.stats.tokens_per_step > 1.2


def test_a_draft_cache_smaller_than_one_step():
    """Two slots beside the sinks, and up to nine tokens per step: it is often chosen again."""
    method = tsjax.TokenSwift(
        tree=(2, 2), draft_budget=4, num_sinks=2, num_ngrams=2, suffix_length=8
    )
    how = dict(max_new_tokens=60, do_sample=True, seed=7)
    result = compare(looping_model(num_draft_heads=1), [[1, 2, 3] * 6, [4]], method, **how)
    assert result.stats.tokens_per_step > 1

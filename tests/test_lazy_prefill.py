# SPDX-License-Identifier: Apache-2.0
"""The settings of a lazy prefill: schedules, presets, counts of tokens and of operations."""

import fractions
import math

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import pytest
from helpers import tiny_config

import tsjax
from tsjax.lazy.choice import goes_on
from tsjax.lazy.settings import (
    AUTO_AT_LEAST,
    AUTO_BLOCK,
    AUTO_SHARE,
    AUTO_WINDOW,
    LONGEST_PROMPT,
    auto_cuts,
    kept,
    paper_cuts,
)

LLAMA2_7B = dict(
    vocab_size=32000, embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128,
    mlp_dim=11008,
)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(keep={4: 0.0}), r"keep=\{4: 0.0\} .*the share 0.0 after layer 4 is not in \(0, 1\]"),
        (dict(keep={4: "half"}), r"the share 'half' after layer 4"),
        (dict(keep={4: 0.5, 2: 0.3}), r"0.5 after layer 4 cannot be more than 0.3 after layer 2"),
        (dict(keep={-1: 0.5}), r"-1 is no layer"),
        (dict(keep={2: 1e-5}), r"shares have 4 decimals, so 1e-05 would be none"),
        (dict(keep=((2, 0.5), (2, 0.5))), "each layer once"),
        (dict(keep={}), r"keep=\(\) is not valid: 'paper', 'auto', or shares"),
        (dict(keep=0.5), r"keep=0.5 is not valid: 'paper', 'auto', or shares"),
        (dict(keep="auto", speedup=0.5), r"speedup=0.5 is not valid"),
        (dict(keep={1: 0.5}, speedup=2), r"speedup=2 is not valid: left out unless keep='auto'"),
        (dict(revive="later"), r"revive='later' is not valid: one of 'in_batches'"),
        (dict(scores="length"), r"scores='length' is not valid"),
        (dict(scores="random"), r"revive='in_batches' is not valid: 'never' or 'background'"),
        (dict(window=0), r"window=0"),
        (dict(pool=2), r"pool=2 is not valid: an odd number"),
        (dict(block=0), r"block=0"),
        (dict(at_least=-1), r"at_least=-1"),
        (dict(recent=1.5), r"recent=1.5"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        tsjax.LazyPrefill(**settings)


def test_schedules_that_do_not_fit_are_refused():
    lazy, cfg = tsjax.LazyPrefill(keep={4: 0.5, 8: 0.2}), tiny_config(num_layers=8)
    stages = lazy.plan(tiny_config(num_layers=9)).stages
    assert stages == (range(0, 4), range(4, 8), range(8, 9))
    for given, message in (
        (dict(prefill=lazy), "after layer 8, but the model has 8 layers: at most 7"),
        (dict(prefill=tsjax.LazyPrefill()), "keep='auto' is not valid here"),
        (dict(prefill=tsjax.LazyPrefill(keep={4: 0.5}, revive="on_demand"), method=tsjax.NGram()),
         "revive='on_demand' is not valid with method=NGram"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            tsjax.steps.DecodeConfig(model=cfg, **given)


@hypothesis.given(
    st.integers(1, 10_000),
    st.integers(1, 200_000) | st.integers(LONGEST_PROMPT - 9, LONGEST_PROMPT),
)
@hypothesis.settings(max_examples=40)
def test_shares_are_counted_exactly(parts, tokens):
    share = parts / 10_000
    expected = math.ceil(fractions.Fraction(parts, 10_000) * tokens)
    assert kept(share, tokens) == expected
    assert int(kept(share, jnp.int32(tokens))) == expected


def test_settings_are_compared_and_how_often_they_choose():
    one, other = (tsjax.LazyPrefill(keep=x) for x in ({2: 0.7, 4: 0.49}, {4: 0.49, 2: 0.7}))
    assert one == other and hash(one) == hash(other)
    assert tsjax.LazyPrefill().tokens_between_choices == 8
    assert tsjax.LazyPrefill(revive="on_demand").tokens_between_choices == 1
    assert tsjax.LazyPrefill(choose_every=5).tokens_between_choices == 5


def test_the_papers_schedule():
    assert paper_cuts(32) == ((9, 0.7), (19, 0.49), (28, 0.343))
    lazy = tsjax.LazyPrefill(keep="paper").resolved(tiny_config(num_layers=32), 1000)
    assert dict(lazy.keep) == {9: 0.7, 19: 0.49, 28: 0.343}
    for layers in range(4, 64):
        assert len(paper_cuts(layers)) == 3 and paper_cuts(layers)[-1][0] < layers


def operations(cfg, keys_of, rest_of) -> fractions.Fraction:
    """Of layers that compute keys and values of `keys_of` tokens and the rest of `rest_of`, from
    the shapes of their matrix products."""
    total, queries = fractions.Fraction(0), cfg.num_heads * cfg.head_dim
    keys = cfg.num_kv_heads * cfg.head_dim
    for stored, others in zip(keys_of, rest_of, strict=True):
        total += 2 * stored * cfg.embed_dim * 2 * keys
        total += 2 * others * cfg.embed_dim * (2 * queries + 3 * cfg.mlp_dim)  # q, o; the MLP
        # Scores, of half of the stored ones, and values, likewise.
        total += 2 * others * 2 * queries * fractions.Fraction(stored, 2)
    return total


@hypothesis.given(st.floats(1.0, 2.6), st.integers(2, 80), st.integers(200, 100_000), st.data())
@hypothesis.settings(max_examples=20)
def test_auto_is_the_latest_cut_with_the_largest_share_that_meets_the_factor(
    speedup, layers, tokens, data
):
    cfg = tiny_config(**{**LLAMA2_7B, "num_layers": layers})
    earliest = data.draw(st.integers(1, layers - 1))
    whole = operations(cfg, [tokens] * layers, [tokens] * (layers - 1) + [0])

    def factor(layer: int, hundredths: int) -> fractions.Fraction:
        few = math.ceil(fractions.Fraction(hundredths, 100) * tokens)
        after = layers - layer
        stored = [tokens] * layer + [few] * after
        return whole / operations(cfg, stored, [tokens] * (layer - 1) + [few] * after + [0])

    late = [layer for layer in range(earliest, layers) if factor(layer, 2) >= speedup]
    if late:
        share = max(one for one in range(2, 101) if factor(late[-1], one) >= speedup)
        assert auto_cuts(cfg, tokens, earliest, speedup) == ((late[-1], share / 100),)
    else:
        with pytest.raises(ValueError, match=f"in its layer {earliest} and is not cut") as caught:
            auto_cuts(cfg, tokens, earliest, speedup)
        assert f"at most {math.floor(100 * factor(earliest, 2)) / 100} with" in str(caught.value)


def test_auto_cuts_where_the_model_looks_things_up():
    cfg = tiny_config(num_layers=8)
    found = tsjax.LazyPrefill().resolved(cfg, 9000, 5)
    assert found.cuts == ((5, AUTO_SHARE),) and found.at_least == AUTO_AT_LEAST
    assert (found.window, found.block) == (AUTO_WINDOW, AUTO_BLOCK)
    given = tsjax.LazyPrefill(at_least=7, window=2, block=3).resolved(cfg, 9000, 5)
    assert (given.at_least, given.window, given.block) == (7, 2, 3)
    paper = tsjax.LazyPrefill(keep="paper").resolved(cfg, 9)
    assert (paper.at_least, paper.window, paper.block) == (0, 1, 1)
    for looks_up in (None, 0, 8):
        with pytest.raises(ValueError, match=f"looks_up={looks_up} is not valid: a layer from 1"):
            tsjax.LazyPrefill().resolved(cfg, 9000, looks_up)
    lazy = tsjax.LazyPrefill(speedup=50)
    with pytest.raises(ValueError, match=r"speedup=50 is not valid: .* at most 2\.29 with 8 "):
        lazy.resolved(cfg, 1000, 4)
    lazy = tsjax.LazyPrefill(speedup=2).resolved(tiny_config(**LLAMA2_7B), 4096, 14)
    assert dict(lazy.cuts) == {16: 0.02}


@hypothesis.given(st.integers(1, 3000), st.floats(1e-4, 1), st.integers(0, 600))
@hypothesis.settings(max_examples=40)
def test_so_many_go_on_at_least(tokens, share, at_least):
    lazy = tsjax.LazyPrefill(keep={1: share}, at_least=at_least)
    expected = max(kept(lazy.cuts[0][1], tokens), min(at_least, tokens))
    assert goes_on(lazy, 1, tokens) == expected
    assert goes_on(lazy, 1, jnp.asarray([tokens])).tolist() == [expected]

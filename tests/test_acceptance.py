# SPDX-License-Identifier: Apache-2.0
"""How many drafts are right: against recorded runs, and step by step where that can be foreseen.

No draft can change a token, so drafts that became worse fail no other test but the recorded numbers
of test_method_contract.py. record_acceptance.py says what is recorded here, of more settings and
longer texts; the other tests say why a number in it may have changed.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import chain_model, decoded, fresh_state, oracle_hidden, tiny_config, tiny_model

import tsjax
from tools import record_acceptance
from tsjax.model.cache import init_cache
from tsjax.model.passes import run_rows

NO_TEXT = dict(num_ngrams=0, suffix_length=0)

# --- recorded runs -------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "case"),
    [(model, name) for name, case in record_acceptance.CASES.items() for model in case.models],
)
def test_as_many_drafts_are_accepted_as_were(model, case):
    with record_acceptance.FILE.open(encoding="utf-8") as file:
        expected = json.load(file)[f"{model}: {case}"]
    actual = record_acceptance.run(model, case)
    assert actual.pop("tokens") == expected.pop("tokens"), "the text itself, not only its drafts"
    assert actual == expected


@pytest.mark.parametrize("revive", [pytest.param("never", marks=pytest.mark.wide), "background"])
def test_every_draft_is_right_where_a_draft_cache_holds_all_that_layers_do(revive):
    """A pass on it is then one of the model, whatever a lazy prefill left out. In the first step
    nothing is in it yet, and it does not know of tokens that come back in the same one."""
    lazy = tsjax.LazyPrefill(keep={1: 0.2}, revive=revive, revive_rows=12)
    method = tsjax.methods.MagicDec(draft_passes=2, draft_budget=128, draft_choice="importance")
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        model = tiny_model(dtype="float64")
        prompts = [rng.integers(0, model.cfg.vocab_size, n).tolist() for n in (60, 23)]
        stats = tsjax.generate(
            model, prompts, method=method, prefill=lazy, max_new_tokens=1 + 12 * 3,
            capacity=160, prefill_width=64,
        ).stats  # fmt: skip
    *fewer, both = stats.accepted_lengths
    if revive == "never":
        assert fewer == [2, 0] and both == 2 * 12
        assert stats.prompt_computed[-1] < 0.3
    else:
        assert stats.prompt_computed[-1] == 1.0 and both >= 2 * 10


# --- a step at a time ----------------------------------------------------------------------------


def states_of(model, method, prompts: list[list[int]], num_steps: int, **settings):
    """The states before the first step and after each of `num_steps`, on the host.

    In place of the prompts' rows the cache holds any: what is tested here does not depend on them.
    """
    cfg = tsjax.steps.DecodeConfig(model=model.cfg, method=method)
    state = fresh_state(model, prompts, method=method, capacity=160, **settings)
    rng = np.random.default_rng(0)
    pairs = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), (state.kv.k, state.kv.v)
    )
    state = state.replace(kv=state.kv.replace(k=pairs[0], v=pairs[1]))
    states = [jax.device_get(state)]
    for _ in range(num_steps):
        state = decoded(model.params, state, 1, cfg=cfg)
        states.append(jax.device_get(state))
    return states


# --- n-grams -------------------------------------------------------------------------------------

PERIOD = 11


def window(size: int | None, penalty: float = 1.0001):
    """A penalty so small that it changes nothing that the model says."""
    return dict(repetition_penalty=penalty, repetition_window=size)


@pytest.mark.parametrize(
    ("delay", "settings"),
    [
        *((None, window(size)) for size in (PERIOD - 1, 2 * PERIOD - 2, 2 * PERIOD - 1, None)),
        (None, window(PERIOD, penalty=1.0)),
        (PERIOD - 1, {}),
    ],
)
def test_the_step_at_which_an_ngram_first_counts(delay, settings):
    """Its last token is then as many tokens old as the delay says, and not one fewer.

    The text counts round and round. Token p is followed by what followed p - PERIOD, and the token
    a period before that: one of these n-grams has to be old enough.
    """
    size, steps = 3, 40
    method = tsjax.NGram(num_ngrams=1, ngram_size=size, ngram_delay=delay, suffix_length=0)
    if delay is None:
        is_on = settings["repetition_penalty"] > 1 and settings["repetition_window"]
        delay = settings["repetition_window"] if is_on else 0
    expected = []
    for length in (1, 5):
        row = [length]
        for _ in range(steps):
            root = row[-1] - 1
            ends = [first + size - 1 for first in range(root % PERIOD, root, PERIOD)]
            found = any(root - end >= delay for end in ends)
            row.append(row[-1] + (size if found else 1))
        assert row[-1] > length + steps  # some were drafted
        expected.append(row)
    prompts = [[0], [0, 1, 2, 3, 4]]
    model = chain_model({i: (i + 1) % PERIOD for i in range(PERIOD)})  # 0, 1, ... 10, 0, 1, ...
    states = states_of(model, method, prompts, steps, **settings)
    assert np.stack([state.length for state in states], axis=1).tolist() == expected


# --- the draft cache -----------------------------------------------------------------------------

BUDGET, SINKS = 24, 3


@pytest.mark.parametrize("draft_refresh", [5, None])
def test_the_step_at_which_the_draft_cache_is_chosen_again(draft_refresh):
    """When more tokens are new than it says, or than there is room for beside the sinks."""
    method = tsjax.TokenSwift(
        tree=(3,), draft_budget=BUDGET, num_sinks=SINKS, draft_refresh=draft_refresh, **NO_TEXT
    )
    most_new = min(draft_refresh or BUDGET, BUDGET - SINKS)
    prompts = [list(range(20)), list(range(40))]
    states = states_of(tiny_model(), method, prompts, 60)
    assert states[0].memory.cache.capacity == BUDGET
    for row in range(len(prompts)):
        news, choices = None, 0  # tokens since the last choice; None before the first
        for before, state in zip(states, states[1:], strict=False):
            cache, committed = state.memory.cache, int(state.kv.length[row])
            assert cache.seen[row] == committed
            if committed <= BUDGET:
                assert cache.length[row] == cache.newest[row] == committed
                continue
            added = committed - int(before.kv.length[row])
            if news is None or news + added > most_new:
                news, choices = 0, choices + 1
                pairs = zip((*cache.k, *cache.v), (*state.kv.k, *state.kv.v), strict=True)
                for held, whole in pairs:
                    np.testing.assert_array_equal(held[row, :, :SINKS], whole[row, :, :SINKS])
            else:
                news += added
            assert (cache.length[row], cache.newest[row]) == (BUDGET, BUDGET - news)
        assert choices >= 3


def test_what_truncation_has_removed_is_not_drafted():
    method = tsjax.TokenSwift(tree=(3,), draft_budget=BUDGET, num_sinks=SINKS, **NO_TEXT)
    prompts = [list(range(20)), list(range(40))]
    states = states_of(tiny_model(), method, prompts, 3, do_sample=True, top_k=2)
    assert states[-1].stats.drafted.tolist() == [3 * 2] * 2


def test_importance_is_that_of_all_query_heads_of_a_group():
    """Rows.query against NumPy: the sum over the query heads that share a kv head."""
    cfg = tiny_config(num_layers=2, num_heads=6, num_kv_heads=2)
    model = tsjax.Model(tsjax.steps.init_params(cfg, seed=3, scale=0.4), cfg=cfg)
    weights = model.params.model
    tokens = np.random.default_rng(1).integers(0, cfg.vocab_size, 13)
    positions, causal = np.arange(13, dtype=np.int32)[None], np.tril(np.ones((13, 13), bool))
    rows = jax.jit(functools.partial(run_rows, cfg=cfg))(
        weights, init_cache(cfg, 1, 16), tokens[None], positions, causal
    )
    expected = np.zeros((cfg.num_layers, 13, 2, cfg.head_dim))

    def watch(layer, head, q, k, attention):
        expected[layer, :, head // 3] += q

    oracle_hidden(model, tokens.tolist(), watch)
    for query, summed in zip(rows.query, expected, strict=True):
        np.testing.assert_allclose(query[0], summed, rtol=0, atol=2e-4)

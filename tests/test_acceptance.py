# SPDX-License-Identifier: Apache-2.0
"""How many drafts are right: against recorded runs, and step by step where that can be foreseen.

No draft can change a token, so drafts that became worse fail no other test but the recorded numbers
of test_method_contract.py. record_acceptance.py says what is recorded here, of more settings and
longer texts; the other tests say why a number in it may have changed.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import chain_model, oracle_hidden, oracle_norm, tiny_config, tiny_model, unpacked

import tsjax
from tools import record_acceptance
from tsjax.decoding.programs import programs
from tsjax.model.cache import init_cache
from tsjax.model.passes import run_rows

NO_TEXT = dict(num_ngrams=0, suffix_length=0)

# --- recorded runs -------------------------------------------------------------------------------

CASES = [
    (model, case)
    for model in record_acceptance.MODELS
    for case in record_acceptance.CASES
    if model in record_acceptance.CASES[case].models
]


def recorded(name: str) -> dict:
    with record_acceptance.FILE.open(encoding="utf-8") as file:
        return json.load(file)[name]


@pytest.mark.wide
@pytest.mark.parametrize(("model", "case"), CASES)
def test_as_many_drafts_are_accepted_as_were(model, case):
    expected = recorded(f"{model}: {case}")
    actual = record_acceptance.run(model, case)
    assert actual.pop("tokens") == expected.pop("tokens"), "the text itself, not only its drafts"
    assert actual == expected


@pytest.mark.wide
@pytest.mark.parametrize(
    ("case", "revive"),
    [("partial cache", "background"), ("likely passes and heads", "never"), ("snapkv", "never")],
)
def test_as_many_are_accepted_after_a_lazy_prefill_that_leaves_nothing_out(case, revive):
    expected = recorded(f"small: {case}")
    lazy = tsjax.LazyPrefill(keep={1: 1.0, 2: 1.0}, revive=revive)
    assert record_acceptance.run("small", case, prefill=lazy) == expected


@pytest.mark.parametrize("revive", ["never", pytest.param("background", marks=pytest.mark.wide)])
def test_every_draft_is_right_where_a_draft_cache_holds_all_that_layers_do(revive):
    """A pass on it is then one of the model, whatever a lazy prefill left out. Only in the first
    step nothing is in it yet, and while tokens come back, it does not know of those of the same
    step."""
    lazy = tsjax.LazyPrefill(keep={1: 0.5, 2: 0.2}, revive=revive, revive_rows=12)
    method = tsjax.MagicDec(draft_passes=3, draft_budget=128, draft_choice="importance")
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        model = tiny_model(num_layers=3, dtype="float64")
        prompts = [rng.integers(0, model.cfg.vocab_size, n).tolist() for n in (60, 23)]
        stats = tsjax.generate(
            model, prompts, method=method, prefill=lazy, max_new_tokens=1 + 12 * 4,
            capacity=160, prefill_width=64,
        ).stats  # fmt: skip
    *fewer, all_three = stats.accepted_lengths
    if revive == "never":
        assert fewer == [2, 0, 0] and all_three == 2 * 12
        assert stats.prompt_computed[-1] < 0.3
    else:
        assert stats.prompt_computed[-1] == 1.0 and all_three >= 2 * 10


# --- a step at a time ----------------------------------------------------------------------------

CAPACITY = 160  # one size for all prompts, as init_state compiles single operations for each


def states_of(model, method, prompts: list[list[int]], num_steps: int, **settings):
    """The states before the first step and after each of `num_steps`, on the host.

    In place of the prompts' rows the cache holds any: what is tested here does not depend on them.
    """
    cfg = tsjax.DecodeConfig(model=model.cfg, method=method)
    config = tsjax.GenerationConfig(**settings)
    tokens = np.zeros((len(prompts), 40), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    state = tsjax.init_state(
        tokens, np.asarray(list(map(len, prompts))), cfg=cfg, capacity=CAPACITY,
        max_length=[CAPACITY] * len(prompts),
        sampling=tsjax.sampling_values(config, (), model.cfg.vocab_size, model.cfg.dtype),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    k, v = (
        tuple(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in buffers)
        for buffers in (state.kv.k, state.kv.v)
    )
    state = state.replace(kv=state.kv.replace(k=k, v=v))
    decode = programs("cpu", model.cfg.dtype).decode
    states = [jax.device_get(state)]
    for _ in range(num_steps):
        state = decode(model.params, state, 1, cfg=cfg)
        states.append(jax.device_get(state))
    return states


def lengths_of(states) -> list[list[int]]:
    """Of each row: its lengths over the steps."""
    return np.stack([state.length for state in states], axis=1).tolist()


# --- n-grams -------------------------------------------------------------------------------------

PERIOD = 11


def counting_model() -> tsjax.Model:
    """It says 0, 1, ... PERIOD - 1, 0, 1, ..."""
    return chain_model({i: (i + 1) % PERIOD for i in range(PERIOD)})


def window(size: int | None, penalty: float = 1.0001):
    """A penalty so small that it changes nothing that the model says."""
    return dict(repetition_penalty=penalty, repetition_window=size)


@pytest.mark.parametrize(
    ("delay", "settings"),
    [
        *((None, window(size)) for size in (1, PERIOD - 1, 2 * PERIOD - 2, 2 * PERIOD - 1, None)),
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
    assert lengths_of(states_of(counting_model(), method, prompts, steps, **settings)) == expected


@pytest.mark.parametrize(("draft_from", "found"), [("partial_cache", 4), ("verified_state", 3)])
def test_what_an_ngram_continues(draft_from, found):
    """The best draft where the model drafts a token on its own, the last token elsewhere."""
    method = tsjax.TokenSwift(
        tree=(), draft_from=draft_from, num_ngrams=1, ngram_size=4, suffix_length=0
    )
    prompts = [[*range(PERIOD)] * 2, [*range(4, PERIOD)] + [*range(PERIOD)]]
    states = states_of(counting_model(), method, prompts, 6)
    expected = [[len(row) + (found + 1) * step for step in range(7)] for row in prompts]
    assert lengths_of(states) == expected


# --- trees ---------------------------------------------------------------------------------------

COUNT, ELSEWHERE = 12, 20  # the model counts to COUNT and begins again; it never says ELSEWHERE


def doubtful_model(depth: int) -> tsjax.Model:
    """It counts, and so do its three heads, but the head of that depth (from 1) has it second."""
    plain = chain_model({i: (i + 1) % COUNT for i in range(COUNT)} | {ELSEWHERE: ELSEWHERE + 1})
    vocab = plain.cfg.vocab_size
    cfg = tiny_config(vocab_size=vocab, embed_dim=vocab, num_layers=1, num_draft_heads=3)
    follow = np.zeros((vocab, vocab), np.float32)
    follow[np.arange(COUNT), (np.arange(COUNT) + 1) % COUNT] = 1
    # A head's vector outweighs those of the heads before it, of which it reads the last one.
    heads = []
    for index, head in enumerate(tsjax.init_params(cfg).heads, start=1):
        matrix = 10.0**index * follow
        if index == depth:
            matrix[:COUNT, ELSEWHERE] = 1.5 * 10.0**index
        heads.append(head.replace(linear=jnp.asarray(matrix.T)))
    return tsjax.Model(plain.params.replace(heads=tuple(heads)), cfg=cfg)


@pytest.mark.parametrize(
    ("draft_from", "tree"), [("verified_state", (2, 2, 2)), ("partial_cache", (1, 2, 2, 2))]
)
def test_a_second_rank_is_accepted_at_each_depth(draft_from, tree):
    """And what follows it. The first step of verified_state drafts from no state."""
    method = tsjax.TokenSwift(tree=tree, draft_from=draft_from, **NO_TEXT)
    emitted = len(tree) + 1
    for depth in (1, 2, 3):
        lengths = lengths_of(states_of(doubtful_model(depth), method, [[0], [0, 1]], 5))
        for _, first, *others in lengths:
            assert others == [first + emitted * step for step in range(1, 5)]


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


def test_importance_is_that_of_all_query_heads_of_a_group():
    """Rows.query against NumPy: the sum over the query heads that share a kv head."""
    cfg = tiny_config(num_layers=2, num_heads=6, num_kv_heads=2)
    model = tsjax.Model(tsjax.init_params(cfg, seed=3, scale=0.4), cfg=cfg)
    weights = model.params.model
    tokens = np.random.default_rng(1).integers(0, cfg.vocab_size, 13)
    positions, causal = np.arange(13, dtype=np.int32)[None], np.tril(np.ones((13, 13), bool))
    rows = jax.jit(functools.partial(run_rows, cfg=cfg))(
        weights, init_cache(cfg, 1, 16), tokens[None], positions, causal
    )
    # What comes into the second layer is what a model of the first one gives.
    first = model.params.replace(model=weights.replace(layers=weights.layers[:1]))
    first = tsjax.Model(first, cfg=dataclasses.replace(cfg, num_layers=1))
    hidden = [np.asarray(weights.embed, np.float64)[tokens], oracle_hidden(first, tokens)]
    half = cfg.head_dim // 2
    angle = np.arange(13)[:, None, None] * cfg.rope.theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    for x, layer, query in zip(hidden, weights.layers, rows.query, strict=True):
        norm, matrix = np.asarray(layer.attn_norm, np.float64), unpacked(layer)["q"]
        q = np.einsum("td,nhd->tnh", oracle_norm(x, norm, cfg.norm_eps), matrix)
        a, b = q[..., :half], q[..., half:]
        q = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        summed = np.stack([q[:, :3].sum(1), q[:, 3:].sum(1)], axis=1)
        np.testing.assert_allclose(query[0], summed, rtol=0, atol=2e-4)

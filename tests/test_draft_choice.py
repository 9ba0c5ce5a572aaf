# SPDX-License-Identifier: Apache-2.0
"""What each rule of the draft cache scores, against NumPy in float64; how "never" makes room."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import entry_computation, oracle_hidden, tiny_config, tiny_model

import tsjax
from tsjax.methods import draft_choice
from tsjax.methods.draft_choice import CHUNK, POOL, RULES, WINDOW, scores_by
from tsjax.methods.partial_cache import init_draft_cache, refresh_draft_cache
from tsjax.model.cache import KVCache

CAPACITY = 80
LENGTHS = (CAPACITY - 8, 41, 9)  # of three rows, one of them shorter than the window


@functools.cache
def read():
    """A model, three rows of tokens, and the state that has read all but their last one."""
    model = tiny_model(seed=3)
    rng = np.random.default_rng(0)
    tokens = rng.integers(model.cfg.vocab_size, size=(len(LENGTHS), max(LENGTHS) + 1))
    cfg = tsjax.DecodeConfig(model=model.cfg)
    prompt_length = np.asarray(LENGTHS) + 1
    state = tsjax.init_state(
        tokens, prompt_length, cfg=cfg, capacity=CAPACITY, max_length=[CAPACITY] * len(LENGTHS)
    )
    state = tsjax.prefill(model.params, state, width=16, cfg=cfg)
    return model, tokens, state


@functools.cache
def watched(row: int):
    """Of each layer and query head of a row: the last query, the products q.k, the attention."""
    model, tokens, _ = read()
    queries, products, attention = {}, {}, {}

    def watch(layer, head, q, k, weights):
        queries[layer, head] = q[-1]
        products[layer, head], attention[layer, head] = q @ k.T, weights

    oracle_hidden(model, tokens[row, : LENGTHS[row]].tolist(), watch)
    return queries, products, attention


def expected(rule: str, row: int, layer: int, kv_head: int) -> np.ndarray:
    """The scores of a row's committed tokens, one by one."""
    model, _, _ = read()
    _, products, attention = watched(row)
    length, heads = LENGTHS[row], range(kv_head * 2, kv_head * 2 + 2)
    assert model.cfg.group_size == 2
    importance = np.sum([products[layer, head][-1] for head in heads], axis=0)
    if rule in ("importance", "all"):
        return importance
    if rule == "streaming":
        return np.arange(length, dtype=float)
    if rule == "retrieval":
        chunks = [importance[i : i + CHUNK] for i in range(0, length, CHUNK)]
        return np.concatenate([np.full(len(chunk), np.mean(chunk)) for chunk in chunks])
    asking = range(max(length - WINDOW, 0), length)
    asked = sum(attention[layer, head][at] for head in heads for at in asking) / (2 * WINDOW)
    last = np.arange(length) >= length - WINDOW
    near = np.pad(np.where(last, 0, asked), POOL // 2)
    pooled = np.asarray([near[i : i + POOL].sum() / POOL for i in range(length)])
    return np.where(last, 1 + np.arange(length), pooled)


@pytest.mark.parametrize("rule", RULES)
def test_scores(rule):
    model, _, state = read()
    queries = np.zeros((model.cfg.num_layers, len(LENGTHS), 2, model.cfg.head_dim), np.float32)
    for row in range(len(LENGTHS)):
        for (layer, head), query in watched(row)[0].items():
            queries[layer, row, head // 2] += query
    scores = jax.jit(functools.partial(scores_by, rule, model.cfg))(
        model.params, state.kv, tuple(map(jnp.asarray, queries)), state.tokens
    )
    for layer, row, head in np.ndindex(model.cfg.num_layers, len(LENGTHS), 2):
        found = np.asarray(scores[layer][row, head])
        assert np.all(found[LENGTHS[row] :] == -np.inf)
        wanted = expected(rule, row, layer, head)
        np.testing.assert_allclose(found[: LENGTHS[row]], wanted, rtol=2e-4, atol=2e-4)


def test_a_chunk_is_scored_as_its_mean_key():
    """What TriForce multiplies the query with."""
    rng = np.random.default_rng(1)
    keys, query = rng.standard_normal((1, 1, 3 * CHUNK, 4)), rng.standard_normal((1, 1, 4))
    scores = jnp.asarray(np.einsum("bksh,bkh->bks", keys, query))
    means = keys.reshape(1, 1, 3, CHUNK, 4).mean(3)
    wanted = np.repeat(np.einsum("bkch,bkh->bkc", means, query), CHUNK, axis=-1)
    found = draft_choice.by_chunk(scores, jnp.asarray([3 * CHUNK], jnp.int32))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


# --- once and never again -------------------------------------------------------------------------

M, SINKS, MAX_ROWS, S = 12, 2, 3, 64
ONE = tiny_config(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2)


@jax.jit
def refresh(draft, length):
    """Keys and values say their position; the later a token, the less it is worth."""
    positions = jnp.broadcast_to(
        jnp.arange(S, dtype=jnp.float32)[None, None, :, None], (1, 1, S, 2)
    )
    kv = KVCache(k=(positions,), v=(positions,), length=length)

    def score(length, kv):
        scores = draft_choice.by_position(kv.k[0], length)
        return (jnp.where(scores >= 0, -scores, -jnp.inf),)

    return refresh_draft_cache(
        draft, kv, num_sinks=SINKS, max_rows=MAX_ROWS, once=True, score=score, asks=length
    )


@hypothesis.given(st.integers(0, 30), st.lists(st.integers(0, MAX_ROWS), max_size=20))
@hypothesis.settings(max_examples=20)
def test_a_cache_that_is_chosen_once_keeps_the_newest(prompt, steps):
    """The sinks stay; the newest tokens are there, as many as fit behind the sinks; nothing is
    there twice."""
    draft, length, chosen_at = init_draft_cache(ONE, 1, M), 0, None
    for new in (prompt, *steps):
        if length + new > S - MAX_ROWS:
            break
        length += new
        draft = refresh(draft, jnp.asarray([length], jnp.int32))
        held = np.asarray(draft.v[0][0, 0, : int(draft.length[0]), 0]).astype(int).tolist()
        assert len(held) == len(set(held)) == min(length, M)
        assert set(held) >= set(range(min(SINKS, length))) and max(held, default=-1) < length
        if length > M and chosen_at is None:
            chosen_at = length
        if chosen_at is not None:
            # Before the end of the slots is reached, up to MAX_ROWS - 1 slots stay as they were.
            newest = min(length - chosen_at, M - SINKS - MAX_ROWS + 1)
            assert set(held) >= set(range(length - newest, length))


@pytest.mark.parametrize("rule", ["importance", "retrieval", "snapkv"])
def test_tokens_are_scored_only_when_they_are_chosen(rule):
    """That reads all keys, and for "snapkv" runs the model."""
    model, _, state = read()
    method = tsjax.TokenSwift(draft_choice=rule, draft_budget=48, num_sinks=4)
    cache = method.new_cache(model.cfg, len(LENGTHS), CAPACITY, None)

    def refreshed(params, cache, state):
        def score(asks, kv):
            return scores_by(rule, model.cfg, params, kv, *asks)

        of_rows = dict(num_sinks=4, max_rows=4, asks=(cache.query, state.tokens))
        return refresh_draft_cache(cache, state.kv, score=score, **of_rows)

    text = jax.jit(refreshed).lower(model.params, cache, state).compile().as_text()
    assert text is not None
    names = ("tsjax_", "top_k", "sort(", "dot(")
    assert any(name in text for name in names)
    assert not any(name in entry_computation(text) for name in names)


@pytest.mark.parametrize("method", [tsjax.TokenSwift, tsjax.LikelyTree, tsjax.MagicDec])
def test_wrong_settings(method):
    for name, value in (
        ("draft_choice", "h2o"), ("draft_budget", 16), ("draft_refresh", 0)
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            method(**{name: value})
    with pytest.raises(ValueError, match="draft_budget=40"):
        method(draft_choice="snapkv", draft_budget=40)

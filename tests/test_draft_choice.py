# SPDX-License-Identifier: Apache-2.0
"""What each rule of the draft cache scores, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import entry_computation, fresh_state, oracle_hidden, prefilled, tiny_model

import tsjax
from tsjax.methods.draft_choice import CHUNK, POOL, RULES, WINDOW, scores_by
from tsjax.methods.partial_cache import refresh_draft_cache

CAPACITY = 80
LENGTHS = (CAPACITY - 8, 41, 9)  # of three rows, one of them shorter than the window


@functools.cache
def read():
    """A model, three rows of tokens, and the state that has read all but their last one."""
    model = tiny_model(seed=3)
    rng = np.random.default_rng(0)
    tokens = rng.integers(model.cfg.vocab_size, size=(len(LENGTHS), max(LENGTHS) + 1))
    texts = [row[: length + 1] for row, length in zip(tokens, LENGTHS, strict=True)]
    state = fresh_state(model, texts, capacity=CAPACITY)
    cfg = tsjax.steps.DecodeConfig(model=model.cfg)
    return model, tokens, prefilled(model.params, state, cfg=cfg)


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


@pytest.mark.parametrize("method", [tsjax.TokenSwift, tsjax.LikelyTree, tsjax.methods.MagicDec])
def test_wrong_settings(method):
    for name, value in (
        ("draft_choice", "h2o"), ("draft_budget", 16), ("draft_refresh", 0)
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            method(**{name: value})
    with pytest.raises(ValueError, match="draft_budget=40"):
        method(draft_choice="snapkv", draft_budget=40)

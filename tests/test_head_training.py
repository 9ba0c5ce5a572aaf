# SPDX-License-Identifier: Apache-2.0
"""The mathematics of training draft heads, against NumPy in float64 and against AdamW on paper."""

import dataclasses
import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsjax
from tsjax.base.training_config import HeadTraining
from tsjax.files.presets import training_preset_names
from tsjax.model.heads import HeadWeights
from tsjax.model.logits import hidden_states
from tsjax.model.params import abstract_params
from tsjax.training.loss import (
    HeadMetrics,
    add_gradients,
    init_heads,
    learning_rates,
    measure_heads,
    optimiser,
    update,
    zero_gradients,
)

LENGTH = 23
SETTINGS = HeadTraining(
    num_heads=3, sequence_length=LENGTH, steps=10, warmup_steps=2, batch_size=2, micro_batch=2,
    init_scale=0.3,
)  # fmt: skip


def random_tokens(*shape, seed=1):
    return np.random.default_rng(seed).integers(0, helpers.VOCAB, shape).astype(np.int32)


def random_heads(model, settings=SETTINGS):
    """Heads whose norms are not one."""
    rng = np.random.default_rng(7)
    heads = init_heads(model.cfg, settings)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.1, x.dtype), heads)


def oracle(model, heads, tokens):
    """Summed loss and hits of the model and of each head, in float64, one position at a time."""
    eps = model.cfg.norm_eps
    heads = jax.tree.map(lambda x: np.asarray(x, np.float64), heads)
    loss, hits = np.zeros(len(heads) + 1), np.zeros((len(heads) + 1, 3), int)
    for row in tokens:
        h = helpers.oracle_hidden(model, row)
        final = np.asarray(model.params.model.final_norm, np.float64)
        states = [helpers.oracle_norm(h, final, eps)]
        for head in heads:
            h = h + helpers.oracle_norm(h, head.norm_in, eps) @ head.linear.T
            states.append(helpers.oracle_norm(h, head.norm_out, eps))
        for i, state in enumerate(states):
            logits = helpers.oracle_unembed(model, state)
            for t in range(len(row) - 1 - i):
                label = row[t + 1 + i]
                loss[i] += math.log(sum(np.exp(logits[t] - logits[t, label])))
                rank = list(np.argsort(-logits[t], kind="stable")).index(label)
                hits[i] += np.arange(3) >= rank
    return loss, hits


@functools.cache
def model_of(tied: bool):
    return helpers.tiny_model(tie_embeddings=tied)


run_add_gradients = jax.jit(add_gradients, static_argnames=("cfg", "chunk_tokens"))
run_measure = jax.jit(measure_heads, static_argnames=("cfg", "chunk_tokens"))
run_model = jax.jit(hidden_states, static_argnames=("cfg", "width"))
run_update = jax.jit(update, static_argnames="settings")


def gradients(model, heads, tokens, chunk_tokens=1024):
    hidden = run_model(model.params, tokens, cfg=model.cfg, width=16)
    total, options = zero_gradients(heads), dict(cfg=model.cfg, chunk_tokens=chunk_tokens)
    return run_add_gradients(heads, model.params.model, hidden, tokens, total, **options)


# Chunks: some that do not divide the length, less than a position of each row.
@pytest.mark.parametrize(("tied", "chunk_tokens"), [(True, 20), (False, 1)])
def test_losses_and_hits_are_those_of_an_independent_computation(tied, chunk_tokens):
    model, tokens = model_of(tied), random_tokens(2, LENGTH)
    heads = random_heads(model)
    loss, hits = oracle(model, heads, tokens)

    def same(metrics: HeadMetrics, first: int):
        np.testing.assert_allclose(metrics.loss, loss[first:], rtol=2e-5)
        np.testing.assert_array_equal(metrics.hits, hits[first:])

    same(gradients(model, heads, tokens, chunk_tokens).metrics, 1)
    hidden = run_model(model.params, tokens, cfg=model.cfg, width=16)
    options = dict(cfg=model.cfg, chunk_tokens=chunk_tokens)
    same(run_measure(heads, model.params.model, hidden, tokens, **options), 0)


def test_equal_logits_are_ranked_by_their_ids():
    model = model_of(False)
    weights = model.params.model
    flat = weights.replace(unembed=jnp.zeros_like(weights.unembed))
    tokens = np.asarray([[0, 1, 2, 3, 4, 0, 1, 2]], np.int32)
    hidden = jnp.ones((1, 8, model.cfg.embed_dim))
    heads = init_heads(model.cfg, SETTINGS)
    metrics = run_measure(heads, flat, hidden, tokens, cfg=model.cfg, chunk_tokens=100)
    labels = [tokens[0, 1 + i :] for i in range(4)]
    wanted = [[int((row < k).sum()) for k in (1, 2, 3)] for row in labels]
    np.testing.assert_array_equal(metrics.hits, wanted)


def test_the_gradient_is_that_of_the_summed_mean_losses():
    model, tokens = model_of(True), random_tokens(2, LENGTH)
    heads = random_heads(model)
    sums = gradients(model, heads, tokens, 20)
    mean = jax.tree.map(lambda g: np.asarray(g, np.float64) / tokens.size, sums.gradient)
    labels = 2 * np.asarray(SETTINGS.labels)

    def loss(heads):
        return (oracle(model, heads, tokens)[0][1:] / labels).sum()

    rng = np.random.default_rng(3)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), heads)
    for head in range(3):  # in a random direction of each array, in float64
        for name in ("linear", "norm_in", "norm_out"):
            there = rng.normal(size=getattr(wide[head], name).shape)

            def moved(step, head=head, name=name, there=there):
                changed = {name: getattr(wide[head], name) + step * there}
                return [*wide[:head], wide[head].replace(**changed), *wide[head + 1 :]]

            slope = (loss(moved(1e-5)) - loss(moved(-1e-5))) / 2e-5
            found = (getattr(mean[head], name) * there).sum()
            assert found == pytest.approx(slope, rel=1e-3, abs=1e-6), (head, name)


def test_nothing_but_the_heads_has_a_gradient():
    model, tokens = model_of(True), random_tokens(2, LENGTH)
    heads = random_heads(model)
    hidden = run_model(model.params, tokens, cfg=model.cfg, width=16)

    @jax.jit
    @jax.grad
    def gradient(weights):
        metrics = measure_heads(heads, weights, hidden, tokens, cfg=model.cfg, chunk_tokens=1024)
        return jnp.sum(metrics.loss[1:])

    # The unembedding is the only part of the model that a loss sees, and it counts as a constant.
    for one in jax.tree.leaves(gradient(model.params.model)):
        assert not np.any(one)


def test_heads_of_a_bfloat16_model_are_kept_in_float32():
    model, tokens = helpers.tiny_model(dtype="bfloat16"), random_tokens(2, LENGTH)
    heads = random_heads(model)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(heads))
    sums = gradients(model, heads, tokens)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(sums.gradient)} == {"float32"}
    assert all(np.any(leaf) for leaf in jax.tree.leaves(sums.gradient))
    wide = tsjax.Model(
        jax.tree.map(lambda x: x.astype(jnp.float32), model.params), cfg=helpers.tiny_config()
    )
    loss, _ = oracle(wide, heads, tokens)
    np.testing.assert_allclose(sums.metrics.loss, loss[1:], rtol=0.02)


def test_logits_of_a_whole_sequence_never_exist():
    cfg = helpers.tiny_config(vocab_size=50_000, dtype="bfloat16")
    settings = dataclasses.replace(SETTINGS, sequence_length=4096)
    heads = jax.eval_shape(lambda: init_heads(cfg, settings))
    weights = abstract_params(cfg).model
    hidden = jax.ShapeDtypeStruct((2, 4096, cfg.embed_dim), jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    total = jax.eval_shape(zero_gradients, heads)
    lowered = run_add_gradients.lower(
        heads, weights, hidden, tokens, total, cfg=cfg, chunk_tokens=128
    )
    memory = lowered.compile().memory_analysis()
    chunk, whole = 128 * 50_000 * 4, 2 * 4096 * 50_000 * 4
    assert memory.temp_size_in_bytes < 8 * chunk < whole / 4


# --- the optimiser ---------------------------------------------------------------------------


def test_update_is_adamw_after_clipping_without_decay_of_norms():
    settings = dataclasses.replace(SETTINGS, max_grad_norm=0.5)
    rng = np.random.default_rng(5)
    D = 6

    def head():
        return HeadWeights(
            *(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((D, D), (D,), (D,)))
        )

    heads = (head(), head())
    mine = [np.asarray(x, np.float64) for x in jax.tree.leaves(heads)]
    decay = [0.1, 0, 0] * 2
    first, second = [np.zeros_like(x) for x in mine], [np.zeros_like(x) for x in mine]
    moments = optimiser(settings).init(heads)
    for step in range(4):
        total = zero_gradients(heads).replace(gradient=(head(), head()))
        scale = settings.batch_size * settings.sequence_length
        gradient = [np.asarray(x, np.float64) / scale for x in jax.tree.leaves(total.gradient)]
        heads, moments, norm = run_update(heads, moments, total, settings=settings)

        mine_norm = math.sqrt(sum((g**2).sum() for g in gradient))
        assert float(norm) == pytest.approx(mine_norm, rel=1e-5)
        clip = min(1.0, 0.5 / mine_norm)
        if step < 2:
            rate = 5e-3 * step / 2
        else:
            rate = 5e-3 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 8))
        for i, g in enumerate(g * clip for g in gradient):
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g * g
            m, v = first[i] / (1 - 0.9 ** (step + 1)), second[i] / (1 - 0.999 ** (step + 1))
            mine[i] = mine[i] - rate * (m / (np.sqrt(v) + 1e-8) + decay[i] * mine[i])
        for found, wanted in zip(jax.tree.leaves(heads), mine, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert mine_norm > 0.5 * 0.2  # the clipping took part


def test_default_settings_are_the_papers():
    paper = HeadTraining()
    assert (paper.num_heads, paper.sequence_length, paper.steps) == (3, 8192, 200)
    assert (paper.batch_size, paper.learning_rate, paper.warmup_steps) == (120, 5e-3, 50)
    assert (paper.weight_decay, paper.beta1, paper.beta2) == (0.1, 0.9, 0.999)
    for name in training_preset_names():
        assert tsjax.model_preset(name).embed_dim  # a model of this name is known
        settings = tsjax.training.training_preset(name)
        if name == "qwen2.5-14b":
            assert (settings.learning_rate, settings.steps, settings.batch_size) == (1e-3, 600, 40)
        else:
            assert settings == paper
    rates = learning_rates(paper)
    assert [float(rates(step)) for step in (0, 25, 50, 125, 200)] == pytest.approx(
        [0, 2.5e-3, 5e-3, 2.5e-3, 0], abs=1e-8
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads=0 is not valid: an integer, at least 1"),
        ({"learning_rate": math.nan}, "learning_rate=nan is not valid"),
        ({"beta2": 1.0}, r"beta2=1.0 is not valid: below 1"),
        ({"warmup_steps": 10}, "warmup_steps=10 is not valid: less than steps=10"),
        ({"sequence_length": 4}, "sequence_length=4 is not valid: at least 5"),
        ({"batch_size": 2.0}, "batch_size=2.0 is not valid: an integer"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **changes)

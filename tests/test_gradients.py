# SPDX-License-Identifier: Apache-2.0
"""Gradients of what a model says of given texts: by differences, with all kernels and by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, oracle_logits, tiny_model

import tsjax
from tsjax.decoding.logprobs import text_log_probs

TOKENS = np.random.default_rng(0).integers(0, 64, (3, 20))
STEP = 1e-4  # of a difference, along a direction of length 1


def by_log_probs(model, tokens, weight, remat):
    return jnp.sum(weight * tsjax.log_probs(model, tokens, remat=remat))


def by_forward(model, tokens, weight, remat):
    """The same, from all logits."""
    told = jax.nn.log_softmax(tsjax.forward(model, tokens, remat=remat))
    found = jnp.take_along_axis(told[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(weight[:, 1:] * found)


def oracle_total(model, tokens, weight):
    total = 0.0
    for row, of_row in zip(tokens, weight, strict=True):
        logits = oracle_logits(model, row)
        told = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
        total += sum(w * told[t - 1, row[t]] for t, w in enumerate(of_row) if t)
    return total


def directed(model, rng):
    """A direction of length 1, and the model so far along it, in float64."""
    leaves, tree = jax.tree.flatten(model.params)
    way = [rng.standard_normal(leaf.shape) for leaf in leaves]
    length = np.sqrt(sum(np.sum(one**2) for one in way))
    way = [one / length for one in way]

    def moved(by):
        wide = [np.asarray(leaf, np.float64) for leaf in leaves]
        pairs = zip(wide, way, strict=True)
        return model.replace(params=tree.unflatten([a + by * b for a, b in pairs]))

    return tree.unflatten(way), moved


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_are_those_of_the_definition(remat):
    """In float32 with this machine's kernels, against differences of a float64 definition."""
    model, rng = tiny_model(tie_embeddings=True), np.random.default_rng(1)
    tokens = TOKENS % model.cfg.vocab_size
    weight = rng.standard_normal(tokens.shape)

    def slope(total, params):
        given = jnp.asarray(tokens), weight, remat
        return jax.grad(lambda p: total(model.replace(params=p), *given))(params)

    slopes = jax.jit(lambda p: (slope(by_log_probs, p), slope(by_forward, p)))(model.params)
    for _ in range(3):
        way, moved = directed(model, rng)
        ahead, behind = (oracle_total(moved(by), tokens, weight) for by in (STEP, -STEP))
        for one in slopes:
            found = sum(map(np.vdot, jax.tree.leaves(one), jax.tree.leaves(way)))
            np.testing.assert_allclose(found, (ahead - behind) / (2 * STEP), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_families_differ_in_has_gradients(dtype):
    """Of a text in several passes, against the same in float64 in plain XLA in one."""
    flags = dict(qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
    model = tiny_model(dtype=dtype, **flags)
    tokens = TOKENS % model.cfg.vocab_size

    def gradient(params, cfg, width, remat):
        def total(params):
            how = dict(cfg=cfg, count=0, width=width, remat=remat)
            return text_log_probs(params, jnp.asarray(tokens), **how).raw.sum()

        return jax.tree.leaves(jax.jit(jax.grad(total))(params))

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
        wanted = gradient(wide, tiny_model(dtype="float64", **flags).cfg, 64, False)
    rtol = {"float32": 1e-3, "bfloat16": 0.2}[dtype]
    for remat in (False, True):
        for one, other in zip(gradient(model.params, model.cfg, 8, remat), wanted, strict=True):
            assert one.dtype == dtype
            size = np.abs(other).max()
            np.testing.assert_allclose(np.asarray(one, float), other, rtol=0, atol=rtol * size)


def test_log_probs_are_what_score_tells():
    """Bit for bit, whatever stands beside a row and after it."""
    model = tiny_model()
    tokens = TOKENS % model.cfg.vocab_size
    found = np.asarray(tsjax.log_probs(model, tokens))
    assert not found[:, 0].any()
    for row, told in zip(tokens, found, strict=True):
        scored = tsjax.score(model, row[:7], row[7:15])
        assert_same_bits(told[7:15], scored.logprobs[0].raw)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA for CPUs in jax 0.10 undoes it")
def test_a_gradient_by_layer_keeps_less():
    model = tiny_model(num_layers=8, vocab_size=512)
    tokens = jnp.zeros((2, 256), jnp.int32)

    def temporary(remat):
        def loss(params):
            return tsjax.log_probs(model.replace(params=params), tokens, remat=remat).sum()

        compiled = jax.jit(jax.grad(loss)).lower(model.params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(True) < temporary(False) / 3


@pytest.mark.parametrize("call", [tsjax.forward, tsjax.log_probs])
def test_what_is_no_text_is_refused(call):
    model = tiny_model()
    for tokens, message in (
        ([1, 2], r"tokens of shape \(2,\)"),
        ([[0.5]], "type float32"),
        ([[10**6]], "token id 1000000"),
    ):
        with pytest.raises(ValueError, match=message):
            call(model, tokens)
    with pytest.raises(ValueError, match="remat=1 is not valid"):
        call(model, [[1]], remat=1)

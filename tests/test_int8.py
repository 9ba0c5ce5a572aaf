# SPDX-License-Identifier: Apache-2.0
"""Drafts with the model in int8: how it is rounded, who reads it, and that no token changes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config, tiny_model

import tsjax
from pallas_kernels import product
from tsjax.model import params as params_module
from tsjax.model.int8 import Int8Matrix, as_int8
from tsjax.model.transformer import int8_weights

INT8 = dict(draft_weights="int8", num_ngrams=0, suffix_length=0)
PASSES = tsjax.TokenSwift(tree=(2, 2), draft_passes=2, draft_budget=24, num_sinks=2, **INT8)
METHODS = {
    "passes": PASSES,
    "heads": tsjax.TokenSwift(
        tree=(1, 2, 2), draft_budget=24, num_sinks=2, draft_rest=True, **INT8
    ),
    "verified state": tsjax.TokenSwift(tree=(2, 2), draft_from="verified_state", **INT8),
}
SIZES = dict(capacity=128, prefill_width=16, eos_token_id=())


@functools.cache
def model(dtype: str = "float32", **shape) -> tsjax.Model:
    return tiny_model(seed=3, dtype=dtype, num_draft_heads=2, **shape)


def ask(model: tsjax.Model):
    return tsjax.generate(model, [1, 2, 3], method=PASSES, max_new_tokens=60, **SIZES)


def rounded(matrix, inputs: int) -> np.ndarray:
    """The definition, in float64: steps of each output's largest weight / 127."""
    wide = np.asarray(matrix, np.float64)
    axes = tuple(range(wide.ndim - inputs, wide.ndim))
    steps = np.abs(wide).max(axes, keepdims=True) / 127
    return np.round(wide / np.where(steps > 0, steps, 1)) * steps


def values_of(matrix: Int8Matrix) -> np.ndarray:
    scales = np.asarray(matrix.scales, np.float64)
    inputs = matrix.values.ndim - scales.ndim
    return np.asarray(matrix.values, np.float64) * scales[(..., *(None,) * inputs)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape, inputs", [((6, 8), 1), ((2, 3, 4, 8), 1), ((8, 3, 4), 2)])
def test_each_output_has_its_scale(shape, inputs, dtype, rng):
    numbers = rng.standard_normal(shape) * 10.0 ** rng.integers(
        -3, 3, (shape[0], *(1,) * len(shape[1:]))
    )
    matrix = jnp.asarray(numbers, dtype).at[0].set(0)  # an output without weights stays zero
    found = as_int8(matrix, inputs)
    assert found.values.dtype == jnp.int8 and found.values.shape == shape
    assert found.scales.dtype == jnp.float32 and found.scales.shape == shape[: len(shape) - inputs]
    step = np.asarray(found.scales, np.float64).max() * 1e-5
    np.testing.assert_allclose(values_of(found), rounded(matrix, inputs), rtol=1e-6, atol=step)
    assert np.abs(np.asarray(found.values, int)).max() == 127


def test_only_exact_products_go_without_the_highest_precision():
    """XLA's: of int8 and 16 bits, in float32. The bits are those of the highest."""

    def precision(dtype, in_int8: bool) -> str:
        weights = (
            as_int8(jnp.ones((8, 16)), 1) if in_int8 else Int8Matrix(jnp.ones((8, 16), dtype), None)
        )
        run = functools.partial(product, implementation="xla", scales=weights.scales)
        text = jax.jit(run).lower(jnp.ones((1, 16), dtype), weights.values).as_text()
        (found,) = re.findall(r"precision = \[(\w+), \1\]", text)
        return found

    kinds = ("bfloat16", "float16", "float32")
    assert [precision(kind, True) for kind in kinds] == ["DEFAULT", "DEFAULT", "HIGHEST"]
    assert [precision(kind, False) for kind in kinds] == ["HIGHEST"] * 3


@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_of_a_product_and_nothing_else(tied):
    one = model(tie_embeddings=tied)
    params = tsjax.steps.with_int8_drafts(one.params, one.cfg)
    assert params.model is one.params.model and params.heads is one.params.heads
    drafts, own = params.drafts, params.model
    assert drafts.embed is own.embed and drafts.final_norm is own.final_norm
    for layer, from_model in zip(drafts.layers, own.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            weight, inputs = getattr(from_model, name), 2 if name == "o" else 1
            np.testing.assert_allclose(
                values_of(getattr(layer, name)), rounded(weight, inputs), rtol=1e-5, atol=1e-7
            )
        assert layer.attn_norm is from_model.attn_norm and layer.mlp_norm is from_model.mlp_norm
    unembed = own.embed if tied else own.unembed
    np.testing.assert_allclose(values_of(drafts.unembed), rounded(unembed, 1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    ["passes", *(pytest.param(n, marks=pytest.mark.wide) for n in ("heads", "verified state"))],
)
def test_a_model_that_int8_holds_drafts_as_with_its_own_weights(name):
    """Step by step: the same drafts, and as many accepted."""
    one = model()

    def exact(matrix, inputs):
        return jnp.asarray(values_of(as_int8(matrix, inputs)), matrix.dtype)

    weights = int8_weights(one.params.model, one.cfg, exact)
    held = tsjax.Model(one.params.replace(model=weights), cfg=one.cfg)
    settings = dict(SIZES, max_new_tokens=100, do_sample=True, temperature=0.6, seed=9)
    found = [
        tsjax.generate(held, [1, 2, 3], method=method, **settings).stats
        for method in (METHODS[name], dataclasses.replace(METHODS[name], draft_weights="model"))
    ]
    assert found[0].accepted_lengths == found[1].accepted_lengths
    assert sum(found[0].accepted_lengths[1:]) > 5


def test_passes_read_the_copy_and_verification_does_not():
    """A copy of another model changes what is accepted, never a token."""
    one, other = model(), tiny_model(seed=11, num_draft_heads=2)
    right = ask(one)
    wrong = tsjax.Model(one.params, cfg=one.cfg)
    copy = tsjax.steps.with_int8_drafts(other.params, one.cfg).drafts
    wrong.__dict__["_with_int8"] = one.params.replace(drafts=copy)
    misled = ask(wrong)
    np.testing.assert_array_equal(right.tokens[0], misled.tokens[0])
    assert sum(right.stats.accepted_lengths[1:]) > 0
    assert misled.stats.tokens_per_step < right.stats.tokens_per_step


def test_the_copy_is_made_once_and_where_it_is_wanted(monkeypatch):
    made = []
    original = params_module.as_int8

    def counted(matrix, inputs):
        made.append(matrix.shape)
        return original(matrix, inputs)

    monkeypatch.setattr(params_module, "as_int8", counted)
    one = tsjax.Model(model().params, cfg=model().cfg)
    tsjax.generate(one, [1, 2, 3], max_new_tokens=4, **SIZES)
    assert not made
    for _ in range(2):
        ask(one)
    assert len(made) == 4 * one.cfg.num_layers + 1
    assert one.params.drafts is None, "checkpoints and fingerprints know the model alone"


def test_other_weights_have_a_copy_of_their_own():
    one, other = model(), tiny_model(seed=11, num_draft_heads=2)
    ask(one)
    found, wanted = (ask(of_it) for of_it in (one.with_params(other.params), other))
    np.testing.assert_array_equal(found.tokens[0], wanted.tokens[0])
    assert found.stats.accepted_lengths == wanted.stats.accepted_lengths
    assert sum(wanted.stats.accepted_lengths[1:]) > 5


def test_a_model_that_has_a_copy_is_saved_and_counted_without_it(tmp_path):
    one = model()
    two = tsjax.Model(tsjax.steps.with_int8_drafts(one.params, one.cfg), cfg=one.cfg)
    assert two.num_params == one.num_params and two.bytes_for(PASSES) == 0
    assert two.params_for(PASSES) is two.params
    tsjax.save(two, tmp_path / "saved")
    read = tsjax.load(tmp_path / "saved").params
    assert read.drafts is None
    assert jax.tree.all(jax.tree.map(np.array_equal, read, one.params))


def test_pure_functions_say_what_they_need():
    one = model()
    cfg = tsjax.steps.DecodeConfig(model=one.cfg, method=PASSES)
    state = tsjax.steps.init_state(
        np.asarray([[1, 2, 3]], np.int32), np.asarray([3]), cfg=cfg, capacity=64, max_length=[40]
    )
    with pytest.raises(ValueError, match=r"draft_weights='int8' needs .*with_int8_drafts"):
        jax.eval_shape(functools.partial(tsjax.steps.decode_step, cfg=cfg), one.params, state)
    params = tsjax.steps.with_int8_drafts(one.params, one.cfg)
    jax.eval_shape(functools.partial(tsjax.steps.decode_step, cfg=cfg), params, state)


@pytest.mark.parametrize("method", [tsjax.TokenSwift, tsjax.LikelyTree])
def test_other_types_are_refused(method):
    with pytest.raises(ValueError, match="draft_weights='int4' is not valid: one of 'model', "):
        method(draft_weights="int4")


def test_values_lie_as_the_weights_do_and_scales_as_their_outputs():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    cfg = tiny_config(num_draft_heads=2)
    params = tsjax.steps.init_params(cfg, seed=3, mesh=mesh)
    drafts = tsjax.steps.with_int8_drafts(params, cfg).drafts
    for layer, own in zip(drafts.layers, params.model.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            matrix, weight = getattr(layer, name), getattr(own, name)
            assert matrix.values.sharding == weight.sharding
            outputs = len(matrix.scales.shape)
            assert tuple(matrix.scales.sharding.spec) == tuple(weight.sharding.spec[:outputs])

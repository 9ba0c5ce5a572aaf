# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on narrow caches, without a GPU: interpreted, and in NumPy.

The judges are NumPy, and the same numbers in a wide cache. Their programs, and how they are split,
are in test_kernels.py; test_ptx_kernels.py executes their PTX.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    check_near,
    check_scores,
    define_both,
    define_scores,
    make_inputs,
    make_rest,
    make_score_inputs,
    with_wide_caches,
)
from kernel_programs import in_numpy, kernel_names, lower_for_cuda

from pallas_kernels import NarrowRows, narrowed, tree_attention, widened
from pallas_kernels.cache_scores import triton as scores_triton
from pallas_kernels.narrow_rows import numbers_and_exponents
from pallas_kernels.tree_attention import triton as attention_triton

pytestmark = pytest.mark.kernels

LARGEST_ERROR = {"float32": 3e-6, "bfloat16": 1e-2, "float16": 2e-3}
MODES = ["dot", "softmax"]


def attention(*inputs, parts=3, **ranks):
    blocks = attention_triton.Blocks(16, 16, parts, warps=4, stages=2)
    return attention_triton.tree_attention(*inputs, **ranks, blocks=blocks, interpret=True)


def scores(*inputs, mode):
    blocks = scores_triton.Blocks(16, 3, warps=4, stages=2)
    return scores_triton.cache_scores(*inputs, mode=mode, blocks=blocks, interpret=True)


def narrow_inputs(rng, **shape):
    """For attention, with rows whose exponents are far apart."""
    q, k, v, *others = make_inputs(rng, **shape)
    sizes = (jnp.asarray(2.0 ** rng.integers(-9, 2, k.shape[:3]), k.dtype) for _ in "kv")
    k, v = (narrowed(cache * size[..., None]) for cache, size in zip((k, v), sizes, strict=True))
    return q, k, v, *others


def same_bits(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def unseen_poisoned(rows, length):
    """Narrow rows of which those beyond the lengths are NaN."""
    beyond = (np.arange(rows.shape[2]) >= np.asarray(length)[:, None])[:, None, :, None]
    numbers = jnp.where(beyond, 99, rows.numbers).astype(jnp.int8)
    return NarrowRows(numbers, jnp.where(beyond, -128, rows.exponents).astype(jnp.int8))


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "T", "parts", "with_rest"),
    [
        ("bfloat16", 1, 3, True),
        ("bfloat16", 5, 1, False),
        ("float32", 1, 1, False),
        ("float32", 5, 3, True),
        ("float16", 1, 3, True),
        ("float16", 5, 3, False),
    ],
)
def test_attention(dtype, T, parts, with_rest, rng):
    inputs = narrow_inputs(rng, B=3, T=T, K=2, G=3, H=24, S=40, length=(40, 0, 17), dtype=dtype)
    rest = make_rest(rng, inputs) if with_rest else ()
    run = functools.partial(attention, parts=parts)
    found = run(*inputs, *rest)
    same_bits(found, run(*with_wide_caches(inputs, dtype), *rest))
    expected = define_both(*with_wide_caches(inputs, "float32"), rest=rest or None)
    assert [one.dtype for one in found] == [dtype, "float32"]
    check_near(found, expected, (LARGEST_ERROR[dtype], LARGEST_ERROR["float32"]))
    q, k, v, length, *others = inputs
    poisoned = (unseen_poisoned(cache, length) for cache in (k, v))
    same_bits(run(q, *poisoned, length, *others, *rest), found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_scores(dtype, mode, rng):
    q, k, length = make_score_inputs(rng, G=3, H=24, length=(40, 0, 17), dtype=dtype)
    k = narrowed(k)
    found = scores(q, k, length, mode=mode)
    wide = q, widened(k, dtype), length
    np.testing.assert_allclose(found, scores(*wide, mode=mode), rtol=1e-5, atol=1e-6)
    same_bits(scores(q, unseen_poisoned(k, length), length, mode=mode), found)
    whole = found if mode == "dot" else jnp.sum(found, axis=1) / q.shape[1]
    check_scores(whole, wide, mode)
    if mode == "softmax":
        totals = np.asarray(rng.uniform(4, 9, q.shape[:2]), np.float32)
        found = scores(q, k, length, totals, mode=mode)
        expected = define_scores(q, widened(k, "float32"), length, "shares", log_totals=totals)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_values_from_the_smallest_to_the_largest(dtype, rng):
    """Weights times powers of two stay numbers: those of float16 take another way."""
    q, k, v, *others = make_inputs(rng, T=2, K=1, G=2, S=40, length=[39], dtype=dtype)
    least, most = (-24, 9) if dtype == "float16" else (-60, 100)
    numbers = rng.integers(-127, 128, v.shape).astype(np.int8)
    for exponent in (least, most):
        exponents = np.full((*v.shape[:3], 1), exponent, np.int8)
        inputs = q, narrowed(k), NarrowRows(jnp.asarray(numbers), jnp.asarray(exponents)), *others
        q, k_cache, v_cache, length, k_new, v_new, mask = inputs
        inputs = q, k_cache, v_cache, length, k_new, v_new * 0, mask
        found = attention(*inputs)
        same_bits(found, attention(*with_wide_caches(inputs, dtype)))
        assert np.max(np.abs(np.asarray(found[0], np.float32))) > 2.0**exponent


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_a_row_without_numbers_is_seen_by_who_sees_it(dtype, which, rng):
    inputs = q, k, v, *others = narrow_inputs(
        rng, B=2, T=2, K=2, G=3, H=16, S=50, length=(50, 30), dtype=dtype
    )

    def broken(rows):
        return rows._replace(exponents=rows.exponents.at[0, 1, 35].set(-128))

    k, v = (broken(k), v) if which == "keys" else (k, broken(v))
    found = np.asarray(attention(q, k, v, *others)[0], np.float32)
    heads = np.isnan(found)
    assert heads[0, :, 3:].all() and not heads[0, :, :3].any() and not heads[1].any()
    clean = np.asarray(attention(*inputs)[0], np.float32)
    np.testing.assert_array_equal(found[~heads], clean[~heads])
    if which == "keys":
        products = np.isnan(np.asarray(scores(q[:, 0], k, others[0], mode="dot")))
        assert products[0, 1, 35] and products.sum() == 1
        shares = np.isnan(np.asarray(scores(q[:, 0], k, others[0], mode="softmax")))
        assert shares[0, 1].all() and shares.sum() == 50


# --- what they touch -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_they_touch_what_they_should(dtype, rng):
    """And operation by operation they give the bits of a wide cache."""
    blocks = attention_triton.Blocks(16, 16, 2, warps=4, stages=2)
    scores_blocks = scores_triton.Blocks(16, 2, warps=4, stages=2)
    q, k, v, length, *fresh, mask = narrow_inputs(
        rng, B=2, T=3, K=2, G=2, S=37, length=(37, 18), dtype=dtype
    )
    wide = widened(k, dtype), widened(v, dtype)
    (k, k_exponents), (v, v_exponents) = map(numbers_and_exponents, (k, v))
    with in_numpy():
        read = functools.partial(attention_triton._attention, blocks=blocks, interpret=False)
        others = length, *fresh, mask.astype(np.int8)
        same_bits(read(q, k, v, *others, *k_exponents, *v_exponents), read(q, *wide, *others))
        for score in (scores_triton._dot_scores, scores_triton._softmax_scores):
            read = functools.partial(score, blocks=scores_blocks, interpret=False)
            same_bits(read(q[:, 0], k, length, *k_exponents), read(q[:, 0], wide[0], length))


def test_a_wide_cache_has_no_exponents(rng):
    """Its kernels take and do no more than for wide rows alone: no number is made of bits."""
    inputs = narrow_inputs(rng, T=5, H=16)
    for given, has in ((inputs, True), (with_wide_caches(inputs, "float32"), False)):
        program = str(jax.make_jaxpr(attention)(*given))
        assert ("bitcast_convert_type" in program) == has


def test_of_keys_and_values_only_one_are_narrow(rng):
    q, k, v, *others = narrow_inputs(rng, T=2)
    for inputs in ((q, widened(k, "float32"), v, *others), (q, k, widened(v, "float32"), *others)):
        assert not kernel_names(lower_for_cuda(tree_attention, *inputs).as_text())
        with pytest.raises(NotImplementedError, match="only one are narrow"):
            attention(*inputs)


def test_blocks_that_the_compiler_has_registers_for():
    rows = attention_triton.Blocks(128, 64, 3, warps=8, stages=2)
    cut = attention_triton.for_narrow_rows
    a100, h100 = (attention_triton.device.Gpu(None, 108, capability) for capability in (8.0, 9.0))
    assert cut(rows, a100, "bfloat16") == rows._replace(slots=32)
    assert cut(rows, h100, "bfloat16") == rows
    assert cut(rows._replace(rows=64), a100, "float16") == rows._replace(rows=64)
    assert cut(rows, h100, "float32") == rows._replace(stages=1, warps=8)

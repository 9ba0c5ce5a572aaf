# SPDX-License-Identifier: Apache-2.0
"""pallas_kernels.cache_scores against float64 NumPy, in both modes.

The bound on the error: products err by a few roundings of what is summed; a probability errs,
relative to the largest of its row, by the error of two scores.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import check_scores, define_scores, make_score_inputs

from pallas_kernels import cache_scores
from pallas_kernels.cache_scores import reference, xla
from pallas_kernels.typing import accumulation_dtype

pytestmark = pytest.mark.usefixtures("strict_promotion")

BLOCK = 16
MODES = ["dot", "softmax"]


@pytest.fixture
def blockwise(monkeypatch):
    """xla.cache_scores in small blocks, so that a cache of a few dozen slots has several."""
    monkeypatch.setattr(xla, "BLOCK", BLOCK)
    return jax.jit(public, static_argnames="mode")


def public(*inputs, mode):
    return cache_scores(*inputs, mode, implementation="xla")


run_public = jax.jit(lambda *inputs, mode: cache_scores(*inputs, mode), static_argnames="mode")
run_reference = jax.jit(reference.cache_scores, static_argnames="mode")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("capacity", [BLOCK - 1, BLOCK, 2 * BLOCK, 40])
def test_all_lengths(mode, dtype, capacity, blockwise, rng):
    edges = {0, 1, BLOCK - 1, BLOCK, BLOCK + 1, capacity - 1, capacity}
    with jax.enable_x64(dtype == "float64"):
        for n in sorted(edge for edge in edges if edge <= capacity):
            for length in [(n, n), (n, 0), (1, n)]:
                inputs = make_score_inputs(rng, S=capacity, length=length, dtype=dtype)
                check_scores(blockwise(*inputs, mode=mode), inputs, mode)
                check_scores(run_reference(*inputs, mode=mode), inputs, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("S", [1, 1023, 1024, 1025, 2500])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_default_blocks(mode, S, dtype, rng):
    """The public function."""
    for length in [(S, S // 2), (0, S), (1, 0)]:
        inputs = make_score_inputs(rng, S=S, length=length, dtype=dtype)
        check_scores(run_public(*inputs, mode=mode), inputs, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("G", [1, 4, 5, 7, 8])
@pytest.mark.parametrize("shape", [dict(K=1), dict(K=5, H=80), dict(H=1)])
def test_groups_and_other_shapes(mode, G, shape, blockwise, rng):
    inputs = make_score_inputs(rng, G=G, **shape)
    check_scores(blockwise(*inputs, mode=mode), inputs, mode)
    check_scores(run_reference(*inputs, mode=mode), inputs, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [(40,), (3, 40, 17), (0, 40, 16, 1)])
def test_batches_of_different_lengths(mode, length, blockwise, rng):
    """And each row alone gives what it gives in the batch."""
    inputs = make_score_inputs(rng, G=4, length=length)
    together = blockwise(*inputs, mode=mode)
    check_scores(together, inputs, mode)
    for b in range(len(length)):
        alone = tuple(array[b : b + 1] for array in inputs)
        np.testing.assert_allclose(blockwise(*alone, mode=mode)[0], together[b], atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("length", [(0, 5), (16, 40), (17, 1)])
def test_nothing_beyond_the_length_is_read(mode, poison, length, blockwise, rng):
    q, k_cache, length = make_score_inputs(rng, G=2, length=length)
    beyond = (np.arange(40) >= length[:, None])[:, None, :, None]
    poisoned = jnp.where(beyond, poison, k_cache)
    for score in (blockwise, run_reference, run_public):
        clean = score(q, k_cache, length, mode=mode)
        np.testing.assert_array_equal(score(q, poisoned, length, mode=mode), clean)


def test_probabilities_sum_to_one(rng):
    """Over the committed slots; a row without any has none."""
    inputs = make_score_inputs(rng, S=2500, G=5, length=(2500, 1025, 1, 0))
    sums = np.asarray(jnp.sum(run_public(*inputs, mode="softmax"), axis=1))
    np.testing.assert_allclose(sums, [1, 1, 1, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("G", [1, 3])
def test_weights_among_more_than_these_slots(G, dtype, blockwise, rng):
    """What a query head saw in all is given; the weights are parts of that."""
    with jax.enable_x64(dtype == "float64"):
        inputs = make_score_inputs(rng, G=G, length=(40, 0, 17), dtype=dtype)
        wide = accumulation_dtype(inputs[0].dtype)
        totals = jnp.asarray(rng.uniform(4, 9, inputs[0].shape[:2]), wide)
        expected = define_scores(*inputs, "softmax", log_totals=np.asarray(totals, float))
        for score in (functools.partial(cache_scores, implementation="xla"), cache_scores):
            out = score(*inputs, "softmax", log_totals=totals)
            assert out.dtype == wide
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=0)
        out = reference.cache_scores(*inputs, "softmax", log_totals=totals)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("shape", "dtype", "mode", "message"),
    [
        ((2, 2), "float32", "dot", "mode='dot' is not valid with log_totals: 'softmax'"),
        ((2, 3), "float32", "softmax", r"log_totals of shape \(2, 3\).* not valid: \(2, 2\)"),
        ((2, 2), "bfloat16", "softmax", "type bfloat16 is not valid: .* of float32"),
    ],
)
def test_totals_that_do_not_fit_are_refused(shape, dtype, mode, message, rng):
    with pytest.raises(ValueError, match=message):
        cache_scores(*make_score_inputs(rng), mode, log_totals=jnp.zeros(shape, dtype))


def test_implementations_give_probabilities_for_each_kv_head(blockwise, rng):
    """Summed over its queries: the public function adds the kv heads and divides."""
    inputs = make_score_inputs(rng, K=3, G=4, length=(40, 0, 17))
    shares = np.asarray(xla.cache_scores(*inputs, mode="softmax"))
    assert shares.shape == (3, 3, 40)
    np.testing.assert_allclose(shares, define_scores(*inputs, "shares"), rtol=0, atol=1e-5)


def test_extreme_scores(blockwise, rng):
    """Probabilities where the running maximum jumps from block to block, and nothing overflows."""
    q, k_cache, length = make_score_inputs(rng, G=4, length=(40, 23))
    ramp = jnp.linspace(-30, 30, 40)[:, None] * jnp.ones((1, 8))
    inputs = (jnp.abs(q) * 8, k_cache + ramp[None, None], length)
    shares = blockwise(*inputs, mode="softmax")
    np.testing.assert_allclose(shares, define_scores(*inputs, "softmax"), rtol=0, atol=2e-3)
    np.testing.assert_allclose(np.sum(shares, axis=1), 1, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_twice_the_same_bits(mode, rng):
    inputs = make_score_inputs(rng, S=2500, G=4, length=(2500, 1023))
    first, second = (np.asarray(run_public(*inputs, mode=mode)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_products_are_the_default(rng):
    inputs = make_score_inputs(rng, G=2)
    np.testing.assert_array_equal(cache_scores(*inputs), cache_scores(*inputs, "dot"))


# --- what is refused -------------------------------------------------------------------------

# Positions of the arguments, the shape each is given, and what the message must name. With
# q_last [2, 4, 8] and k_cache [2, 2, 40, 8].
WRONG_SHAPES = [
    (0, (2, 4, 7), "k_cache"),
    (0, (1, 4, 8), "k_cache"),
    (0, (2, 8), r"\(q_last"),
    (0, (2, 3, 8), "not a multiple"),
    (0, (2, 1, 8), "not a multiple"),
    (0, (2, 0, 8), "N is 0"),
    (1, (2, 2, 8), r"\(k_cache\)"),
    (1, (2, 0, 40, 8), "not a multiple"),
    (1, (2, 2, 0, 8), "S is 0"),
    (1, (2, 2, 40, 8, 1), r"\(k_cache\)"),
    (2, (1,), r"\(length\)"),
    (2, (2, 1), r"\(length\)"),
    (2, (), r"\(length\)"),
]


@pytest.mark.parametrize("index, shape, message", WRONG_SHAPES)
def test_wrong_shapes_are_refused_with_the_shapes(index, shape, message, rng):
    inputs = list(make_score_inputs(rng, G=2))
    inputs[index] = jnp.zeros(shape, inputs[index].dtype)
    with pytest.raises(ValueError, match=message) as caught:
        cache_scores(*inputs)
    assert "q_last [B, N, H], k_cache [B, K, S, H], length [B]" in str(caught.value)
    for array in inputs:
        assert str(tuple(array.shape)) in str(caught.value)


@pytest.mark.parametrize(
    "index, dtype, message",
    [
        (0, jnp.int32, "q_last of type int32"),
        (0, jnp.bfloat16, "k_cache of type float32"),
        (1, jnp.float16, "k_cache of type float16"),
        (2, jnp.float32, "length of type float32"),
        (2, jnp.bool, "length of type bool"),
    ],
)
def test_wrong_types_are_refused(index, dtype, message, rng):
    inputs = list(make_score_inputs(rng, G=2))
    inputs[index] = jnp.asarray(inputs[index], dtype)
    with pytest.raises(ValueError, match=message):
        cache_scores(*inputs)


@pytest.mark.parametrize("length", [(40, 41), (-1, 3)])
def test_lengths_outside_the_cache_are_refused(length, rng):
    q, k_cache, _ = make_score_inputs(rng)
    with pytest.raises(ValueError, match=r"length=\[.*\] is not valid: from 0 to the 40 slots"):
        cache_scores(q, k_cache, np.asarray(length, np.int32))


@pytest.mark.parametrize("mode", ["mean", "", None])
def test_unknown_modes_are_refused(mode, rng):
    with pytest.raises(ValueError, match=f"mode={mode!r} is not valid: one of 'dot', 'softmax'"):
        cache_scores(*make_score_inputs(rng), mode)

# SPDX-License-Identifier: Apache-2.0
"""All implementations of cache scores against float64 NumPy, in both modes.

As test_tree_attention.py: at the edges of blocks, nothing beyond a length is read, twice the same
bits; the Triton kernel is interpreted.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import check_scores, define_scores, make_score_inputs, poison

from pallas_kernels import cache_scores
from pallas_kernels.cache_scores import reference, triton, xla

pytestmark = pytest.mark.usefixtures("strict_promotion")

kernels = pytest.mark.kernels
BLOCK = 16
MODES = ["dot", "softmax"]
ALL = ("reference", "small blocks", "xla", "public", "triton")
CASES = [  # blocks of 16 slots here, of 64 and parts of 1024 in the C++ kernel
    (dict(length=(40, 0, 1, 15, 16, 17, 32, 33, 39)), ALL),
    (dict(K=1, S=1, length=(1, 0)), ("reference", "small blocks", "public")),
    (dict(K=5, G=4, H=80, length=(40, 11)), ALL),
    (dict(K=3, G=7, S=300, H=48, length=(300, 65)), ("public", "triton")),
    (dict(G=1, S=2100, H=80, length=(1024, 2049, 1023, 1025)), ("public",)),
    (dict(K=1, G=8, S=70, H=128, length=(64,)), ("public", "triton")),
    (dict(K=2, G=5, S=2500, H=16, length=(2500, 1025, 1, 0)), ("public", "xla")),
]


def interpreted(q, k_cache, length, mode, log_totals=None):
    blocks = triton.Blocks(16, parts=3, warps=4, stages=2)
    run = functools.partial(triton.cache_scores, mode=mode, blocks=blocks, interpret=True)
    scores = run(q, k_cache, length, *(() if log_totals is None else (log_totals,)))
    return scores if mode == "dot" else jnp.sum(scores, axis=1) / q.shape[1]


def small_blocks(*inputs, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "BLOCK", BLOCK)
        return cache_scores(*inputs, implementation="xla", **options)


RUNS = {
    "reference": reference.cache_scores,
    "small blocks": small_blocks,
    "xla": functools.partial(cache_scores, implementation="xla"),
    "public": cache_scores,  # in C++, where there is a compiler
    "triton": interpreted,
}
CALLS = [
    (name, dtype, index)
    for dtype in ("float32", "bfloat16")
    for index, (_, names) in enumerate(CASES)
    for name in names
]
CALLS += [(name, "float64", 0) for name in ("reference", "small blocks", "public")]


# Of each implementation a few slots, also where the kernels are known.
FEW = [(name, "float32", dict(G=3, H=16, length=(40, 17))) for name in RUNS]
ALL_CALLS = [pytest.param(name, dtype, CASES[at][0], marks=kernels) for name, dtype, at in CALLS]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "dtype", "shape"), [*FEW, *ALL_CALLS])
def test_values(name, dtype, shape, mode, rng):
    with jax.enable_x64(dtype == "float64"):
        inputs = make_score_inputs(rng, **shape, dtype=dtype)
        q, k_cache, length = inputs
        run = jax.jit(functools.partial(RUNS[name], mode=mode))
        scores = run(*inputs)
        check_scores(scores, inputs, mode)
        if mode == "softmax":
            np.testing.assert_allclose(np.sum(scores, axis=1), length > 0, rtol=0, atol=1e-5)
        for bad in (np.nan, np.inf):
            np.testing.assert_array_equal(run(q, poison(k_cache, length, bad), length), scores)
        if mode == "softmax":  # of more slots than these: what each query saw in all is given
            totals = jnp.asarray(rng.uniform(4, 9, q.shape[:2]), scores.dtype)
            found = run(*inputs, log_totals=totals)
            expected = define_scores(*inputs, mode, log_totals=np.asarray(totals, float))
            assert found.dtype == scores.dtype
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=0)


@kernels
@pytest.mark.parametrize("name", RUNS)
def test_extreme_scores(name, rng):
    """Probabilities where the running maximum jumps from block to block, and nothing overflows."""
    q, k_cache, length = make_score_inputs(rng, G=4, length=(40, 23))
    ramp = jnp.linspace(-30, 30, 40)[:, None] * jnp.ones((1, 8))
    inputs = (jnp.abs(q) * 8, k_cache + ramp[None, None], length)
    shares = jax.jit(functools.partial(RUNS[name], mode="softmax"))(*inputs)
    np.testing.assert_allclose(shares, define_scores(*inputs, "softmax"), rtol=0, atol=2e-3)
    np.testing.assert_allclose(np.sum(shares, axis=1), 1, rtol=0, atol=1e-5)


# --- what is refused -------------------------------------------------------------------------

# Positions of the arguments, the shape each is given, and what the message must name. With
# q_last [2, 4, 8] and k_cache [2, 2, 40, 8].
WRONG_SHAPES = [
    (0, (2, 4, 7), "k_cache"),
    (0, (2, 8), r"\(q_last"),
    (0, (2, 3, 8), "not a multiple"),
    (0, (2, 0, 8), "N is 0"),
    (1, (2, 0, 40, 8), "not a multiple"),
    (1, (2, 2, 0, 8), "S is 0"),
    (1, (2, 2, 40, 8, 1), r"\(k_cache\)"),
    (2, (1,), r"\(length\)"),
]


@pytest.mark.parametrize("index, shape, message", WRONG_SHAPES)
def test_wrong_shapes_are_refused_with_the_shapes(index, shape, message, rng):
    inputs = list(make_score_inputs(rng, G=2))
    inputs[index] = np.zeros(shape, inputs[index].dtype)
    with pytest.raises(ValueError, match=message) as caught:
        cache_scores(*inputs)
    assert "q_last [B, N, H], k_cache [B, K, S, H], length [B]" in str(caught.value)
    for array in inputs:
        assert str(tuple(array.shape)) in str(caught.value)


def test_wrong_types_are_refused(rng):
    for index, dtype, message in (
        (0, jnp.int32, "q_last of type int32"),
        (1, jnp.float16, "k_cache of type float16"),
        (2, jnp.bool, "length of type bool"),
    ):
        inputs = list(make_score_inputs(rng, G=2))
        inputs[index] = jnp.asarray(inputs[index], dtype)
        with pytest.raises(ValueError, match=message):
            cache_scores(*inputs)


def test_other_arguments_are_refused(rng):
    inputs = q, k_cache, _ = make_score_inputs(rng)
    for totals, mode, message in (
        (jnp.zeros((2, 2)), "dot", "mode='dot' is not valid with log_totals: 'softmax'"),
        (jnp.zeros((2, 3)), "softmax", r"log_totals of shape \(2, 3\).* not valid: \(2, 2\)"),
        (jnp.zeros((2, 2), "bfloat16"), "softmax", "bfloat16 is not valid: .* of float32"),
        (None, "mean", "mode='mean' is not valid: one of 'dot', 'softmax'"),
    ):
        with pytest.raises(ValueError, match=message):
            cache_scores(*inputs, mode, log_totals=totals)
    for length in ((40, 41), (-1, 3)):
        with pytest.raises(ValueError, match=r"length=\[.*\] is not valid: from 0 to the 40 slots"):
            cache_scores(q, k_cache, np.asarray(length, np.int32))

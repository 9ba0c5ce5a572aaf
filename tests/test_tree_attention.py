# SPDX-License-Identifier: Apache-2.0
"""All implementations of tree attention against a float64 NumPy loop, at the edges of their blocks.

The Triton kernel is interpreted by Pallas here. Each call is also held against itself: no slot
beyond the lengths is read, and it gives the same bits twice.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import define_both, make_inputs, make_ranks, make_rest, poison, relative_error

from pallas_kernels.tree_attention import reference, triton, xla
from pallas_kernels.tree_attention.api import Ranks, Summary, decode_attention, tree_attention
from pallas_kernels.typing import accumulation_dtype

pytestmark = pytest.mark.usefixtures("strict_promotion")

LARGEST_ERROR = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 1e-2, "float16": 2e-3}
# Blocks of 16 slots here; of 64 and parts of 1024 slots, and groups of 96 rows in the C++ kernel,
# which turns keys for AVX-512: long ones for many rows, and some that are no whole vectors.
ALL = ("reference", "small blocks", "xla", "public", "triton")
CASES = [
    (dict(B=9, T=1, length=(40, 0, 1, 15, 16, 17, 32, 33, 39)), ALL),
    (dict(B=3, T=5, K=3, G=1, length=(40, 1, 39)), ALL),
    (dict(B=2, T=7, K=2, G=3, H=48, S=300, length=(300, 191)), ALL),
    (dict(B=2, T=1, K=2, G=8, H=128, S=130, length=(128, 127)), ("public", "triton")),
    (dict(T=20, K=1, G=5, H=80, S=130, length=(65,)), ("public", "triton")),
    (dict(B=4, T=17, K=2, G=7, H=96, S=101, length=(101, 0, 33, 16)), ("public", "triton")),
    (dict(B=4, T=3, K=5, G=1, H=24, S=2100, length=(1024, 1023, 1025, 2100)), ("public", "xla")),
    (dict(T=150, K=2, G=1, H=64, S=2500, length=(2040,)), ("public", "xla")),
    (dict(T=100, B=2, K=2, G=2, H=8, S=1100, length=(1000, 64)), ("public",)),
    (dict(T=40, K=1, G=2, H=128, S=300, length=(300,)), ("public",)),
    (dict(T=9, K=2, G=1, H=24, S=200, length=(190,)), ("public",)),
]


def small_blocks(*inputs, rest=(), ranks=None, block=16):
    ranks = {} if ranks is None else dict(slot_ranks=ranks.slots, row_ranks=ranks.rows)
    return xla.tree_attention(*inputs, *rest, **ranks, block=block)


def interpreted(*inputs, rest=(), ranks=None, parts=3):
    ranks = {} if ranks is None else dict(slot_ranks=ranks.slots, row_ranks=ranks.rows)
    rows = 16 if inputs[0].shape[1] < 16 else 64
    blocks = triton.Blocks(rows, slots=16, parts=parts, warps=4, stages=2)
    return triton.tree_attention(*inputs, *rest, **ranks, blocks=blocks, interpret=True)


def by_name(*inputs, rest=(), ranks=None, name=None):
    rest = Summary(*rest) if rest else None
    return tree_attention(
        *inputs, rest=rest, ranks=ranks, implementation=name, with_log_totals=True
    )


RUNS: dict[str, Callable] = {
    "reference": lambda *inputs, rest=(): reference.tree_attention(*inputs, *rest),
    "small blocks": small_blocks,
    "xla": functools.partial(by_name, name="xla"),
    "public": by_name,  # in C++, where there is a compiler
    "triton": interpreted,
}
TAKE_RANKS = {"small blocks", "xla", "public", "triton"}
CALLS = [
    (name, dtype, index)
    for dtype in ("float32", "bfloat16")
    for index, (_, names) in enumerate(CASES)
    for name in names
    if (name, dtype) != ("reference", "bfloat16")
]
CALLS += [("xla", "float64", 2), ("public", "float64", 1), ("triton", "float16", 1)]


def check(name, dtype, shape, rng, with_rest):
    with jax.enable_x64(dtype == "float64"):
        inputs = make_inputs(rng, **shape, dtype=dtype)
        if shape.get("B") == 2 and not with_rest:  # one mask for all rows of the batch
            inputs = *inputs[:-1], inputs[-1][0]
        given, expected = {}, dict(rest=None)
        if with_rest:
            mean, log_total = make_rest(rng, inputs)
            rest = mean, log_total.astype(accumulation_dtype(dtype))
            given["rest"] = expected["rest"] = rest
        if with_rest and name in TAKE_RANKS:
            ranks, expected["visible"] = make_ranks(rng, inputs)
            given["ranks"] = Ranks(*ranks)
        run = jax.jit(functools.partial(RUNS[name], **given))
        out, log_totals = run(*inputs)
        wanted, wanted_logs = define_both(*inputs, **expected)
        assert out.dtype == dtype and log_totals.dtype == accumulation_dtype(dtype)
        assert relative_error(out, wanted) < LARGEST_ERROR[dtype]
        assert relative_error(log_totals, wanted_logs) < 3e-6
        q, k_cache, v_cache, length, *fresh = inputs
        for bad in (np.nan, np.inf):
            caches = (poison(cache, length, bad) for cache in (k_cache, v_cache))
            for found, clean in zip(
                run(q, *caches, length, *fresh), (out, log_totals), strict=True
            ):
                np.testing.assert_array_equal(found, clean)


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "dtype", "index"), CALLS)
def test_values(name, dtype, index, rng):
    """With a summary of other slots, and of ranks, in half of the cases of each type."""
    check(name, dtype, CASES[index][0], rng, with_rest=(index + len(dtype)) % 2 == 1)


@pytest.mark.parametrize("name", RUNS)
def test_a_few_rows(name, rng):
    check(name, "float32", dict(B=2, T=5, G=3, H=16, length=(40, 17)), rng, with_rest=True)


@pytest.mark.kernels
@pytest.mark.parametrize("block", [1, 39, 1000])
def test_block_sizes(block, rng):
    inputs = make_inputs(rng, B=2, length=(40, 17))
    out, _ = jax.jit(functools.partial(small_blocks, block=block))(*inputs)
    assert relative_error(out, define_both(*inputs)[0]) < LARGEST_ERROR["float32"]


@pytest.mark.kernels
@pytest.mark.parametrize("name", RUNS)
def test_extreme_scores(name, rng):
    """The running maximum jumps from block to block, and nothing overflows."""
    q, k_cache, v_cache, *rest = make_inputs(rng, B=2, T=4, length=(40, 23))
    ramp = jnp.linspace(-30, 30, 40)[:, None] * jnp.ones((1, 8))
    inputs = (jnp.abs(q) * 4, k_cache + ramp[None, None], v_cache, *rest)
    out, _ = jax.jit(RUNS[name])(*inputs)
    # The scores themselves, up to some thousands, carry the rounding error here.
    np.testing.assert_allclose(out, define_both(*inputs)[0], rtol=0, atol=2e-3)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["xla", "public"])
def test_the_log_total_of_a_row_that_sees_nothing_weighs_nothing(name, dtype, rng):
    with jax.enable_x64(dtype == "float64"):
        inputs = make_inputs(rng, B=2, T=3, G=2, length=(0, 9), dtype=dtype)
        _, log_total = jax.jit(RUNS[name])(*inputs[:-1], np.zeros((2, 3, 3), bool))
        assert np.all(np.asarray(log_total)[0] <= -1e29)
        assert np.all(np.abs(np.asarray(log_total)[1]) < 1e3)


# --- what is refused --------------------------------------------------------------------------


def test_ranks_and_a_rest_that_do_not_fit_are_refused(rng):
    inputs = make_inputs(rng)
    good, few = np.ones((1, 40), np.int32), np.ones((1, 39), np.int32)
    for ranks, message in (
        (Ranks(few, good[:, :3]), r"ranks.slots .*39.*: \(1, 40\)"),
        (Ranks(good, good[:, :2]), r"ranks.rows .*2.*: \(1, 3\) of"),
        (Ranks(good.astype(np.float32), good[:, :3]), "type float32 is not valid"),
    ):
        with pytest.raises(ValueError, match=message):
            tree_attention(*inputs, ranks=ranks)
    mean, log_total = make_rest(rng, inputs)
    with pytest.raises(ValueError, match=r"rest.mean .* is not valid: \(1, 4, 8\) of float32"):
        tree_attention(*inputs, rest=Summary(mean[:, :2], log_total))
    with pytest.raises(ValueError, match="rest.log_total .* of float32, by q"):
        tree_attention(*inputs, rest=Summary(mean, log_total.astype(jnp.bfloat16)))


# Positions of the arguments, the shape each is given, and what the message must name.
WRONG_SHAPES = [
    (0, (1, 3, 32), r"\(q\)"),
    (0, (1, 3, 5, 8), "not a multiple"),
    (0, (1, 3, 4, 16), "k_cache, v_cache, k_new, v_new"),
    (1, (2, 40, 8), "k_cache"),
    (3, (2,), r"\(length\)"),
    (4, (1, 4, 2, 8), r"\(k_new\)"),
    (6, (3, 4), r"\(tree_mask\)"),
]


@pytest.mark.parametrize("index, shape, message", WRONG_SHAPES)
def test_wrong_shapes_are_refused_with_the_shapes(index, shape, message, rng):
    inputs = list(make_inputs(rng))
    inputs[index] = np.zeros(shape, inputs[index].dtype)
    with pytest.raises(ValueError, match=message) as caught:
        tree_attention(*inputs)
    assert all(str(tuple(array.shape)) in str(caught.value) for array in inputs)


@pytest.mark.kernels
def test_decode_attention_is_tree_attention_of_one_row(rng):
    inputs = make_inputs(rng, B=3, T=1, G=4, H=64, length=[40, 0, 17])
    q, *caches, length, k_new, v_new, _ = inputs
    out = decode_attention(q[:, 0], *caches, length, k_new[:, 0], v_new[:, 0])[:, None]
    np.testing.assert_array_equal(out, tree_attention(*inputs))

# SPDX-License-Identifier: Apache-2.0
"""pallas_kernels.tree_attention against a float64 NumPy loop, and against its own reference.

The bound on the error is a few roundings of the largest value times the square root of what is
summed: all committed slots and fresh rows, and the head dimension.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import define, define_both, make_inputs, make_rest, tolerance

from pallas_kernels.tree_attention import reference, xla
from pallas_kernels.tree_attention.api import Ranks, Summary, tree_attention

pytestmark = pytest.mark.usefixtures("strict_promotion")

BLOCK = 16  # small, so that a cache of a few dozen slots has several


@functools.partial(jax.jit, static_argnames="block")
def blockwise(*args, block=BLOCK):
    return xla.tree_attention(*args, block=block)[0]


@jax.jit
def reference_attention(*args):
    return reference.tree_attention(*args)[0]


def check(inputs, block=BLOCK):
    out, tol = blockwise(*inputs, block=block), tolerance(inputs)
    assert out.dtype == inputs[0].dtype
    np.testing.assert_allclose(out, define(*inputs), rtol=0, atol=tol)
    np.testing.assert_allclose(out, reference_attention(*inputs), rtol=0, atol=tol)


@pytest.mark.parametrize("with_rest", [False, True])
@pytest.mark.parametrize("T, G", [(1, 1), (1, 3), (5, 1), (5, 4)])
def test_rest_and_log_totals(T, G, with_rest, rng):
    inputs = make_inputs(rng, B=3, T=T, G=G, length=[40, 0, 17])
    rest = make_rest(rng, inputs) if with_rest else None
    both = jax.jit(functools.partial(tree_attention, with_log_totals=True))
    found = [
        both(*inputs, rest=None if rest is None else Summary(*rest)),
        xla.tree_attention(*inputs, *(rest or ()), block=BLOCK),
        reference.tree_attention(*inputs, *(rest or ())),
    ]
    expected, expected_logs = define_both(*inputs, rest=rest)
    for out, log_totals in found:
        assert out.dtype == jnp.float32 and log_totals.dtype == jnp.float32
        np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance(inputs))
        np.testing.assert_allclose(log_totals, expected_logs, rtol=0, atol=2e-5)


def test_the_rest_stands_for_the_slots_it_sums_up(rng):
    """Attention to some slots, beside a summary of the others, is attention to all of them."""
    inputs = make_inputs(rng, B=2, T=1, G=4, length=[40, 33])
    q, k, v, length, *fresh, _ = inputs
    blind = np.zeros((1, 1), bool)  # the summary is of the cache alone
    rest = tree_attention(q, k, v, length, *fresh, blind, with_log_totals=True)
    rest = Summary(rest[0][:, 0], rest[1][:, 0])
    none = np.zeros(2, np.int32)
    alone = tree_attention(q, k, v, none, *fresh, np.ones((1, 1), bool), rest=rest)
    np.testing.assert_allclose(alone, define(*inputs), rtol=0, atol=tolerance(inputs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_log_total_of_a_row_that_sees_nothing_weighs_nothing(dtype, rng):
    with jax.enable_x64(dtype == "float64"):
        inputs = make_inputs(rng, B=2, T=3, G=2, length=[0, 9], dtype=dtype)
        blind = np.zeros((2, 3, 3), bool)
        for implementation in (None, "xla"):
            _, log_total = tree_attention(
                *inputs[:-1], blind, with_log_totals=True, implementation=implementation
            )
            assert np.all(np.asarray(log_total)[0] <= -1e29)
            assert np.all(np.abs(np.asarray(log_total)[1]) < 1e3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("T, G", [(1, 3), (5, 2)])
def test_a_row_sees_the_committed_slots_of_lower_rank(T, G, dtype, rng):
    with jax.enable_x64(dtype == "float64"):
        inputs = make_inputs(rng, B=3, T=T, G=G, S=2 * BLOCK + 3, length=[35, 0, 17], dtype=dtype)
        slots = rng.integers(0, 9, (3, 35)).astype(np.int32)
        rows = rng.integers(1, 9, (3, T)).astype(np.int32)
        rows[0, 0] = 0  # a row may see nothing but itself
        visible = slots[:, None] < rows[..., None]
        for block in (BLOCK, None):
            out, log_totals = xla.tree_attention(
                *inputs, slot_ranks=jnp.asarray(slots), row_ranks=jnp.asarray(rows), block=block
            )
            expected, expected_logs = define_both(*inputs, visible=visible)
            np.testing.assert_allclose(
                np.asarray(out, float), expected, rtol=0, atol=tolerance(inputs, dtype)
            )
            np.testing.assert_allclose(log_totals, expected_logs, rtol=0, atol=2e-5)
        by_name = functools.partial(tree_attention, *inputs, implementation="xla")
        np.testing.assert_array_equal(by_name(ranks=Ranks(slots, rows)), out)
        everything = Ranks(slots, np.full_like(rows, 9))
        np.testing.assert_array_equal(
            tree_attention(*inputs, ranks=everything), tree_attention(*inputs)
        )


@pytest.mark.parametrize(
    ("slots", "rows", "message"),
    [
        (np.ones((1, 39), np.int32), np.ones((1, 3), np.int32), r"ranks.slots .*39.*: \(1, 40\)"),
        (np.ones((1, 40), np.int32), np.ones((1, 2), np.int32), r"ranks.rows .*2.*: \(1, 3\) of"),
        (np.ones((1, 40), np.float32), np.ones((1, 3), np.int32), "type float32 is not valid"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(slots, rows, message, rng):
    with pytest.raises(ValueError, match=message):
        tree_attention(*make_inputs(rng), ranks=Ranks(slots, rows))


def test_the_gpu_kernel_takes_no_ranks(rng):
    ranks = Ranks(np.ones((1, 40), np.int32), np.ones((1, 3), np.int32))
    kernel = functools.partial(tree_attention, ranks=ranks, implementation="triton")
    with pytest.raises(NotImplementedError, match="triton: ranks"):
        jax.make_jaxpr(kernel)(*make_inputs(rng))


def test_a_rest_that_does_not_fit_is_refused(rng):
    inputs = make_inputs(rng, B=2, T=1, G=4, length=[40, 33])
    mean, log_total = make_rest(rng, inputs)
    with pytest.raises(ValueError, match=r"rest.mean .* is not valid: \(2, 8, 8\) of float32"):
        tree_attention(*inputs, rest=Summary(mean[:, :2], log_total))
    with pytest.raises(ValueError, match="rest.log_total .* of float32, by q"):
        tree_attention(*inputs, rest=Summary(mean, log_total.astype(jnp.bfloat16)))


@pytest.mark.parametrize("capacity", [BLOCK - 1, BLOCK, 2 * BLOCK, 40])
def test_lengths(capacity, rng):
    edges = {0, 1, BLOCK - 1, BLOCK, BLOCK + 1, capacity - 1, capacity}
    for length in sorted(n for n in edges if n <= capacity):
        check(make_inputs(rng, S=capacity, length=[length]))


@pytest.mark.parametrize("T", [1, 2, 5, 16, 17, 33])
def test_rows(T, rng):
    check(make_inputs(rng, T=T, B=2, length=[40, 11]))


@pytest.mark.parametrize("G", [1, 4, 5, 7, 8])
def test_groups(G, rng):
    check(make_inputs(rng, G=G, B=2, length=[7, 40]))


@pytest.mark.parametrize("H", [8, 64, 80])
def test_head_dims(H, rng):
    check(make_inputs(rng, H=H, length=[37]))


@pytest.mark.parametrize("S", [1023, 1025, 2500])
@pytest.mark.parametrize("T", [1, 33])
def test_default_blocks(S, T, rng):
    """The public function: few rows take large blocks, many rows smaller ones."""
    for length in (S, S // 2 + 3):
        inputs = make_inputs(rng, S=S, T=T, length=[length])
        out = jax.jit(tree_attention)(*inputs)
        np.testing.assert_allclose(out, define(*inputs), rtol=0, atol=tolerance(inputs))


@pytest.mark.parametrize("block", [1, 3, 16, 39, 40, 1000])
def test_block_sizes(block, rng):
    check(make_inputs(rng, B=2, length=[40, 17]), block=block)


def test_one_mask_for_all_rows_of_the_batch(rng):
    *inputs, mask = make_inputs(rng, B=3, T=6, length=[0, 20, 40])
    shared = blockwise(*inputs, mask[0])
    repeated = blockwise(*inputs, np.stack([mask[0]] * 3))
    np.testing.assert_array_equal(shared, repeated)
    check((*inputs, mask[0]))


def test_a_row_alone_equals_the_row_in_a_batch(rng):
    inputs = make_inputs(rng, B=4, T=5, length=[0, 40, 17, 16])
    together, tol = blockwise(*inputs), tolerance(inputs)
    for b in range(4):
        alone = blockwise(*(x[b : b + 1] for x in inputs))
        np.testing.assert_allclose(alone[0], together[b], rtol=0, atol=tol)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("length", [[0, 5], [16, 40], [17, 1]])
def test_slots_beyond_the_length_are_never_read(poison, length, rng):
    q, k_cache, v_cache, length, *rest = make_inputs(rng, B=2, length=length)
    beyond = (np.arange(40) >= length[:, None])[:, None, :, None]
    poisoned = [jnp.where(beyond, poison, cache) for cache in (k_cache, v_cache)]
    for attention in (blockwise, jax.jit(tree_attention), reference_attention):
        clean = attention(q, k_cache, v_cache, length, *rest)
        np.testing.assert_array_equal(attention(q, *poisoned, length, *rest), clean)


def test_extreme_scores(rng):
    """Scores far apart: the running maximum jumps from block to block and nothing overflows."""
    q, k_cache, v_cache, *rest = make_inputs(rng, B=2, T=4, length=[40, 23])
    ramp = jnp.linspace(-30, 30, 40)[:, None] * jnp.ones((1, 8))
    inputs = (jnp.abs(q) * 4, k_cache + ramp[None, None], v_cache, *rest)
    out = np.asarray(blockwise(*inputs))
    assert np.isfinite(out).all()
    # The scores themselves, up to some thousands, carry the rounding error here.
    np.testing.assert_allclose(out, define(*inputs), rtol=0, atol=2e-3)


def test_float64(rng):
    with jax.enable_x64(True):
        inputs = make_inputs(rng, B=2, T=5, length=[40, 9], dtype=jnp.float64)
        out = blockwise(*inputs)
        assert out.dtype == np.float64
        np.testing.assert_allclose(out, define(*inputs), rtol=0, atol=tolerance(inputs, np.float64))


@pytest.mark.parametrize("shape", [dict(T=1, S=1500), dict(T=17, G=4, H=64), dict(T=5, H=80)])
def test_bfloat16(shape, rng):
    """Against float64 from the same bfloat16 inputs, relative to the largest output."""
    inputs = make_inputs(rng, dtype=jnp.bfloat16, **shape)
    out, expected = jax.jit(tree_attention)(*inputs), define(*inputs)
    assert out.dtype == jnp.bfloat16
    error = np.abs(np.asarray(out, np.float64) - expected).max() / np.abs(expected).max()
    assert error < 1e-2


def test_twice_the_same_bits(rng):
    inputs = make_inputs(rng, B=2, T=7, S=600, length=[600, 123])
    first, second = (np.asarray(jax.jit(tree_attention)(*inputs)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


# Positions of the arguments, the shape each is given, and what the message must name.
WRONG_SHAPES = [
    (0, (1, 3, 32), r"\(q\)"),
    (0, (1, 3, 5, 8), "not a multiple"),
    (0, (1, 3, 4, 16), "k_cache, v_cache, k_new, v_new"),
    (1, (2, 40, 8), "k_cache"),
    (2, (1, 2, 39, 8), r"\(v_cache\)"),
    (3, (2,), r"\(length\)"),
    (4, (1, 4, 2, 8), r"\(k_new\)"),
    (5, (1, 3, 1, 8), r"\(v_new\)"),
    (6, (3, 4), r"\(tree_mask\)"),
    (6, (2, 3, 3), r"\(tree_mask\)"),
]


@pytest.mark.parametrize("index, shape, message", WRONG_SHAPES)
def test_wrong_shapes_are_refused_with_the_shapes(index, shape, message, rng):
    inputs = list(make_inputs(rng))
    inputs[index] = jnp.zeros(shape, inputs[index].dtype)
    with pytest.raises(ValueError, match=message) as caught:
        tree_attention(*inputs)
    for array in inputs:
        assert str(tuple(array.shape)) in str(caught.value)

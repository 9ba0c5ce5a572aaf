# SPDX-License-Identifier: Apache-2.0
"""The choice of a token: ties, the nucleus, the noise of positions, and what sampling asks for."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import define_process, define_warp, softmax
from test_sampling import choose, draw_logits, make_config, make_values, run_warp

from pallas_kernels import native, threshold
from pallas_kernels.threshold.xla import last_by_digits
from tsjax.decoding.noise import position_noise
from tsjax.decoding.processors import first_last_seen
from tsjax.decoding.sampling import largest, nucleus, sortable
from tsjax.steps import row_keys

HAS_KERNELS = native.status(try_now=True).state == "ready"
pytestmark = pytest.mark.usefixtures("strict_promotion")

# --- largest and nucleus: ties ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("digit", "unroll"), [(1, True), (4, False)])
def test_a_threshold_is_found_in_digits(digit, unroll, dtype, rng):
    """The k-th largest number, whatever its bits are: CPUs and GPUs take digits of their own."""
    with jax.enable_x64(dtype == "float64"):
        bits = {"float32": np.uint32, "float64": np.uint64}[dtype]
        raw = rng.integers(0, np.iinfo(bits).max, (40, 33), bits, endpoint=True).view(dtype)
        x = np.where(np.isfinite(raw), raw, np.where(raw > 0, np.inf, -np.inf)).astype(dtype)
        k = rng.integers(1, 34, (40, 1), np.int32)
        keys = sortable(jnp.asarray(x))

        def counted(threshold):
            return (keys >= threshold).astype(jnp.int32)

        found = last_by_digits(counted, lambda n: n >= k, keys, digit=digit, unroll=unroll)
        expected = np.take_along_axis(np.sort(x, axis=1), 33 - k, axis=1)
        np.testing.assert_array_equal(keys >= found, x >= expected)


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
@pytest.mark.parametrize("shape", [(1, 1, 70_000), (3, 5, 37), (4, 1), (9,)])
def test_a_threshold_is_the_last_that_masses_allow(dtype, shape, rng):
    """By all implementations, of keys that share their first digits too; and under vmap."""
    with jax.enable_x64(dtype == "uint64"):
        bits = rng.integers(0, 32, shape)  # that are left of a key
        keys = rng.integers(0, 2**32, shape, np.uint64) >> bits.astype(np.uint64)
        masses = rng.integers(0, 2**32 // shape[-1], shape, np.uint64, endpoint=True)
        for given in (masses, None):
            whole = np.ones_like(keys) if given is None else given
            most = (whole.sum(-1, keepdims=True) * rng.random((*shape[:-1], 1))).astype(np.uint64)
            order = np.argsort(keys, axis=-1)
            ordered = np.take_along_axis(keys, order, -1)
            below = np.cumsum(np.take_along_axis(whole, order, -1), axis=-1)
            # The first key with which they are too many; equal keys lie above or below together.
            first = np.argmax(below > most, axis=-1)[..., None]
            wanted = np.take_along_axis(ordered, first, -1).astype(dtype)
            arrays = [None if x is None else jnp.asarray(x, dtype) for x in (keys, most, given)]
            names = ["xla", None] + ["native"] * (HAS_KERNELS and dtype == "uint32")
            for name in names:
                found = jax.jit(threshold, static_argnames="implementation")
                np.testing.assert_array_equal(found(*arrays, implementation=name), wanted)
            if len(shape) == 3:
                found = jax.vmap(threshold, (0, 0, None if given is None else 0))(*arrays)
                np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("most", "masses", "message"),
    [
        (np.ones((2,), np.uint32), None, r"keys \(2, 3\), most \(2,\)"),
        (np.ones((2, 1), np.uint32), np.ones((2, 2), np.uint32), r"most \(2, 1\), masses \(2, 2\)"),
        (np.ones((2, 1), np.int32), None, "of int32, uint32 is not valid: uint32 or uint64"),
    ],
)
def test_a_threshold_of_what_does_not_fit_is_refused(most, masses, message):
    with pytest.raises(ValueError, match=message):
        threshold(np.ones((2, 3), np.uint32), most, masses)


TIED = st.lists(
    st.sampled_from([-np.inf, -3.0, -0.5, -0.0, 0.0, 0.5, 1.0, 1.25]), min_size=33, max_size=33
)
run_largest, run_nucleus = jax.jit(largest), jax.jit(nucleus)


@hypothesis.given(x=TIED, k=st.integers(1, 33))
def test_largest(x, k):
    x = np.asarray(x, np.float32)
    np.testing.assert_array_equal(run_largest(x, k), x >= np.sort(x)[-k])


@hypothesis.given(x=TIED, top_p=st.sampled_from([0.0, 0.1, 0.37, 0.71, 0.9, 0.99]))
def test_nucleus_keeps_or_removes_equal_tokens_together(x, top_p):
    x = np.asarray([1.5, *x[1:]], np.float32)  # something finite
    probs = softmax(x.astype(np.float64))
    mass = np.asarray([probs[x <= value].sum() for value in x])
    hypothesis.assume(np.min(np.abs(mass - (1 - top_p))[mass < 0.999]) > 1e-5)
    expected = mass > 1 - top_p if top_p else x == x.max()
    protected = run_nucleus(x, np.float32(top_p)) | (x == x.max())  # as `warp` does
    np.testing.assert_array_equal(protected, expected)


def test_tied_best_tokens_are_never_removed():
    logits = np.log(np.asarray([[[0.3, 0.1, 0.3, 0.3]]], np.float32))
    for settings in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"epsilon_cutoff": 0.9}):
        out = np.asarray(run_warp(logits, make_values(make_config(**settings), 4)))
        assert np.isfinite(out[0, 0]).tolist() == [True, False, True, True], settings


# --- noise and choice ------------------------------------------------------------------------


def test_noise_depends_on_row_key_and_position_only():
    keys = row_keys([5, 6, 5], [0, 0, 1])
    positions = np.asarray([[3, 9], [3, 9], [3, 9]])
    noise = np.asarray(position_noise(keys, positions, 17, jnp.float32))
    alone = position_noise(keys[1:2], np.asarray([[100, 9, 4, 3]]), 17, jnp.float32)
    np.testing.assert_array_equal(noise[1, 0], alone[0, 3])
    np.testing.assert_array_equal(noise[1, 1], alone[0, 1])
    rows = {noise[index].tobytes() for index in np.ndindex(3, 2)}
    assert len(rows) == 6, "each row and position has its own noise"


def test_a_row_chooses_alone_as_in_a_batch(rng):
    config = make_config(top_p=0.9, repetition_penalty=1.2, temperature=1.3)
    logits = np.asarray(draw_logits(rng, (3, 2, 33)) / 8, np.float32)
    tokens = rng.integers(0, 33, (3, 20), np.int32)
    length = np.asarray([4, 20, 9], np.int32)
    keys, values = row_keys([1, 2, 3], [0, 0, 0]), make_values(config, 33)

    def pick(rows, columns):
        last_seen = first_last_seen(tokens[rows], length[rows], 33)
        positions = length[rows, None] + np.arange(2)[columns]
        return jax.jit(choose)(
            logits[rows][:, columns], last_seen, positions, length[rows], keys[rows], values
        )

    together = pick(slice(0, 3), slice(0, 2))
    for row, column in np.ndindex(3, 2):
        alone = pick(slice(row, row + 1), slice(column, column + 1))
        assert alone[0, 0] == together[row, column]


def test_greedy_takes_the_first_of_the_best_and_ignores_the_warpers():
    config = make_config(temperature=0.1, top_k=1, repetition_penalty=2.0)
    values = make_values(config, 5).replace(do_sample=jnp.asarray(False))
    logits = np.asarray([[[1.0, 3.0, 7.0, 4.0, 4.0]]], np.float32)
    last_seen = first_last_seen(np.asarray([[2, 2]], np.int32), np.asarray([2]), 5)
    where = np.asarray([[2]]), np.asarray([2])
    token = choose(logits, last_seen, *where, row_keys([0], [0]), values)
    assert token.tolist() == [[3]]


# chi-square quantiles at 0.999, by degrees of freedom
CRITICAL = {4: 18.467, 63: 103.442}
LOGITS = np.asarray([0.1, 1.3, -0.7, 0.9, 2.0, -2.0, 0.0, 0.6])


def draw_samples(config, count=30_000, seed=0):
    """Tokens [count] at positions 100, 101, ... after token 4, all from LOGITS."""
    logits = jnp.broadcast_to(LOGITS.astype(np.float32), (1, count, 8))
    last_seen = first_last_seen(np.full((1, 100), 4, np.int32), np.asarray([100]), 8)
    positions = 100 + np.arange(count)[None]
    values = make_values(config, 8)
    tokens = jax.jit(choose)(
        logits, last_seen, positions, np.asarray([100]), row_keys([seed], [0]), values
    )
    return np.asarray(tokens[0])


def chi_square(counts, probs):
    expected = probs * counts.sum()
    assert (counts[probs == 0] == 0).all(), "a removed token was drawn"
    possible = probs > 0
    return (((counts - expected) ** 2)[possible] / expected[possible]).sum(), possible.sum() - 1


def test_samples_follow_the_warped_logits():
    config = make_config(
        temperature=1.7, top_k=6, min_p=0.4, suppress_tokens=(1,), repetition_penalty=1.8,
        repetition_window=50_000,
    )  # fmt: skip
    processed = define_process(LOGITS, [4] * 100, 100, config)
    probs = softmax(define_warp(processed, config)[0])
    counts = np.bincount(draw_samples(config), minlength=8)
    statistic, freedom = chi_square(counts, probs)
    assert statistic < CRITICAL[freedom]


def test_samples_are_independent():
    first, probs = draw_samples(make_config()), softmax(LOGITS)
    for second in (np.roll(first, 1), draw_samples(make_config(), seed=1)):
        joint = np.bincount(first * 8 + second, minlength=64)
        statistic, freedom = chi_square(joint, np.outer(probs, probs).ravel())
        assert statistic < CRITICAL[freedom]

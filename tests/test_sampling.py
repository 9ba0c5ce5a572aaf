# SPDX-License-Identifier: Apache-2.0
"""Sampling against float64 NumPy definitions that sort, as transformers does.

Rows that came too close to a decision that rounding could turn (`slack`) are drawn again.
"""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import define_process, define_warp

from tsjax import GenerationConfig
from tsjax.decoding.processors import KnownText, first_counts, first_last_seen
from tsjax.decoding.sampling import (
    best,
    best_by_two_reductions,
    best_few,
    few_by_one_reduction,
    process,
    score_choices,
    step_noise,
    warp,
)
from tsjax.steps import row_keys, sampling_values

pytestmark = pytest.mark.usefixtures("strict_promotion")

# --- calling tsjax ---------------------------------------------------------------------------


def run(logits, tokens, length, positions, prompt_length, values):
    """Processed and warped logits [B, T, V] after `length` [B] of tokens [B, C].

    Not compiled as a whole, as there would be a program for each combination of processors.
    """
    logits, positions, length = map(jnp.asarray, (logits, positions, length))
    tokens, prompt_length = jnp.asarray(tokens), jnp.asarray(prompt_length)
    vocab = logits.shape[-1]
    counts = first_counts(tokens, prompt_length, length, vocab)
    text = KnownText(tokens, length, prompt_length, first_last_seen(tokens, length, vocab), counts)
    processed = process(logits, text, positions, values)
    return processed, warp(processed, values)


run_warp = jax.jit(warp)


def make_values(config, vocab_size, dtype=jnp.float32):
    return sampling_values(config, config.eos_token_id or (), vocab_size, dtype)


def make_config(**settings):
    return GenerationConfig(max_new_tokens=10_000, do_sample=True, **settings)


def draw_logits(rng, shape, barred=0.0):
    """Distinct multiples of 1/64 in each row; a share `barred` of them is -inf, never all."""
    x = np.empty(shape)
    for index in np.ndindex(shape[:-1]):
        x[index] = rng.choice(np.arange(-1000, 1000), shape[-1], replace=False) / 64
    x[..., 1:][rng.random(x[..., 1:].shape) < barred] = -np.inf
    return x


SETTINGS = {
    "temperature": st.floats(0.3, 4.0),
    "top_k": st.integers(1, 310),
    "top_p": st.one_of(st.just(0.0), st.floats(0.01, 0.999)),
    "min_p": st.one_of(st.just(1.0), st.floats(0.001, 0.9)),
    "epsilon_cutoff": st.floats(1e-5, 0.5),
    "eta_cutoff": st.floats(1e-5, 0.5),
    "min_tokens_to_keep": st.integers(1, 12),
    "repetition_penalty": st.floats(0.3, 3.0),
    "repetition_window": st.integers(1, 40),
    "min_new_tokens": st.integers(0, 12),
}
settings_strategy = st.fixed_dictionaries({}, optional=SETTINGS)

# One compiled program for each shape, so a few shapes stand for all: V -> (B, T).
SHAPES = {2: (3, 1), 33: (2, 3), 300: (2, 1)}


# --- warp: each alone, and all together ------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 3, "min_tokens_to_keep": 8},
        {"top_k": 1000},
        {"top_p": 0.0},
        {"top_p": 0.3},
        {"top_p": 0.3, "min_tokens_to_keep": 20},
        {"min_p": 1.0},
        {"min_p": 0.5, "min_tokens_to_keep": 5},
        {"epsilon_cutoff": 0.9},
        {"epsilon_cutoff": 0.9, "min_tokens_to_keep": 4},
        {"eta_cutoff": 0.5, "min_tokens_to_keep": 2},
        {"min_tokens_to_keep": 1000, "top_p": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("barred", [0.0, 0.5])
def test_one_warper(settings, barred, rng):
    config = make_config(**settings)
    values = make_values(config, 33)
    logits = draw_logits(rng, (2, 3, 33), barred)
    logits /= np.array([[[1.0], [4.0], [0.3]], [[16.0], [8.0], [99.0]]])  # peaked and flat rows
    ours = run_warp(jnp.asarray(logits, jnp.float32), values)
    for row in np.ndindex(2, 3):
        expected, slack = define_warp(logits[row].astype(np.float32), config)
        assert slack > 1e-5
        np.testing.assert_allclose(ours[row], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "epsilon_cutoff", "eta_cutoff"])
def test_thresholds(name, rng):
    logits = 0.1 * rng.permutation(33)[None, None]  # a small shift of a threshold removes more
    for setting in np.linspace(0.011, 0.93, 60):
        config = make_config(**{name: int(33 * setting) + 1 if name == "top_k" else setting})
        expected, slack = define_warp(logits[0, 0], config)
        assert slack > 1e-5
        ours = run_warp(jnp.asarray(logits, jnp.float32), make_values(config, 33))
        np.testing.assert_allclose(ours[0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.wide)])
def test_all_processors_together(dtype):
    sizes = list(SHAPES) if dtype == "float32" else [33]
    least_slack, rtol = (1e-5, 2e-6) if dtype == "float32" else (1e-11, 1e-12)

    @hypothesis.given(
        settings=settings_strategy,
        vocab=st.sampled_from(sizes),
        seed=st.integers(0, 2**32 - 1),
        barred=st.sampled_from([0.0, 0.0, 0.3, 0.9]),
        scale=st.sampled_from([0.02, 0.05, 0.1, 0.2, 0.5, 2.0]),
    )
    @hypothesis.settings(max_examples=50)
    def check(settings, vocab, seed, barred, scale):
        rng = np.random.default_rng(seed)
        batch, rows = SHAPES[vocab]
        # The last token is neither stopped nor suppressed: something must be left.
        lists = {
            "eos_token_id": tuple(rng.integers(0, vocab - 1, 2).tolist()),
            "suppress_tokens": tuple(rng.integers(0, vocab - 1, rng.integers(0, 4)).tolist()),
        }
        config = make_config(**settings, **lists)
        logits = (draw_logits(rng, (batch, rows, vocab), barred) * scale).astype(dtype)
        logits[..., -1] = np.where(np.isfinite(logits[..., -1]), logits[..., -1], 1.0)
        tokens = rng.integers(0, vocab, (batch, 40), np.int32)
        length = rng.integers(1, 41, batch).astype(np.int32)
        prompt_length = np.maximum(length - rng.integers(0, 15, batch), 1).astype(np.int32)

        expected = np.empty(logits.shape), np.empty(logits.shape)
        for b, t in np.ndindex(batch, rows):
            history = tokens[b, : length[b]].tolist()
            expected[0][b, t] = define_process(logits[b, t], history, prompt_length[b], config)
            expected[1][b, t], slack = define_warp(expected[0][b, t], config)
            hypothesis.assume(slack > least_slack)
        positions = np.broadcast_to(length[:, None], (batch, rows))
        values = make_values(config, vocab, dtype)
        ours = run(logits, tokens, length, positions, prompt_length, values)
        assert ours[0].dtype == ours[1].dtype == dtype
        np.testing.assert_allclose(ours[0], expected[0], rtol=rtol)
        np.testing.assert_allclose(ours[1], expected[1], rtol=rtol)

    with jax.enable_x64(dtype == "float64"):
        check()


def choose(logits, last_seen, positions, prompt_length, row_key, values):
    """The tokens at consecutive positions [B, T], as a step chooses them."""
    length = jnp.asarray(positions[:, 0])
    depths = jnp.asarray(positions) - length[:, None]
    _, T, V = logits.shape
    noise = step_noise(row_key, length, T, V, values)
    text = KnownText(jnp.zeros((len(length), 8), jnp.int32), length, prompt_length, last_seen)
    return best(score_choices(logits, text, depths, noise, values))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8, 40])
def test_the_best_few(k, rng):
    """As a stable sort has them, of few also as GPUs find them: with ties, absent scores, fewer
    real ones than k, and NaN."""
    scores = rng.integers(0, 4, (5, 300)).astype(np.float32)
    scores[1, 2:] = scores[2] = -np.inf
    scores[3] = rng.standard_normal(300)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    for few in (best_few, few_by_one_reduction)[: 1 + (k <= 4)]:
        values, indices = few(jnp.asarray(scores), k)
        np.testing.assert_array_equal(values, np.take_along_axis(scores, order, -1))
        real = np.asarray(values) > -np.inf
        np.testing.assert_array_equal(np.asarray(indices)[real], order[real])
    if k > 4:
        return
    for broken in (False, True):
        scores[:, 7] = np.nan if broken else scores[:, 7]
        values, indices = few_by_one_reduction(jnp.asarray(scores), k)
        best, index = best_by_two_reductions(jnp.asarray(scores))
        np.testing.assert_array_equal(indices[:, 0], index)
        np.testing.assert_array_equal(values[:, 0], best)
        assert np.isnan(best).all() == broken


def test_values_do_not_retrace_and_what_is_on_does(rng):
    traces = 0

    @jax.jit
    def counted(logits, last_seen, positions, prompt_length, key, values):
        nonlocal traces
        traces += 1
        return choose(logits, last_seen, positions, prompt_length, key, values)

    logits = jnp.asarray(draw_logits(rng, (1, 1, 33)), jnp.float32)
    last_seen = first_last_seen(np.zeros((1, 4), np.int32), np.full((1,), 4), 33)
    programs = [
        [GenerationConfig(), GenerationConfig(eos_token_id=(3, 4), seed=3)],
        [
            make_config(temperature=0.5, top_k=4, top_p=0.5, min_p=0.1, repetition_window=3),
            make_config(top_k=9, top_p=0.25, min_p=0.01, repetition_window=2),
        ],
        [
            make_config(epsilon_cutoff=0.1, eta_cutoff=0.2, min_new_tokens=4, eos_token_id=(3,)),
            make_config(epsilon_cutoff=0.2, eta_cutoff=0.1, min_new_tokens=1),
        ],
    ]
    for known, configs in enumerate(programs):
        for config in configs:
            where = np.full((1, 1), 4), np.full((1,), 2)
            counted(logits, last_seen, *where, row_keys([0], [0]), make_values(config, 33))
            assert traces == known + 1, config


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"do_sample": True, "min_p": 0.1}])
def test_what_is_off_is_not_in_the_program(settings):
    """No comparison with a value, no conditional, no noise without sampling, no loop."""
    values = make_values(GenerationConfig(**settings), 33)

    def step(logits, positions, key):
        return choose(logits, None, positions, positions[:, 0], key, values)

    positions = jnp.asarray([[4, 5, 6, 7]])
    text = str(jax.make_jaxpr(step)(jnp.ones((1, 4, 33)), positions, row_keys([0], [0])))
    assert " while[" not in text and " scan[" not in text
    assert text.count(" cond[") == text.count(" platform_index[")  # known when it is lowered
    assert (" log " in text) == ("do_sample" in settings)  # of the noise
    assert (" round[" in text) == ("min_p" in settings)  # of a law


# --- process: the history --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "penalty"),
    [(1, 1.7), (2, 0.6), (5, 1.7), (19, 0.6), (20, 1.7), (1000, 0.6), (None, 1.7)],
)
def test_repetition_window(window, penalty, rng):
    """Against the set of the last W tokens before the position, for rows of different positions."""
    config = make_config(repetition_penalty=penalty, repetition_window=window)
    tokens = rng.integers(0, 12, (3, 20), np.int32)
    length = np.asarray([20, 1, 11], np.int32)
    ahead = np.arange(4, dtype=np.int32)  # positions beyond the known tokens: the window moves on
    logits = np.asarray(draw_logits(rng, (3, 4, 15)), np.float32)
    values = make_values(config, 15)
    ours, _ = run(logits, tokens, length, length[:, None] + ahead, length, values)
    for b, t in np.ndindex(3, 4):
        position = length[b] + t
        oldest = 0 if window is None else max(position - window, 0)
        recent = set(tokens[b, oldest : length[b]].tolist())
        for token, x in enumerate(logits[b, t]):
            expected = x if token not in recent else x * penalty if x < 0 else x / penalty
            np.testing.assert_allclose(ours[b, t, token], expected, rtol=1e-6)


@pytest.mark.parametrize("new", [0, 1, 4, 5, 6])
def test_min_new_tokens_bars_only_the_stop_tokens(new, rng):
    values = make_values(make_config(min_new_tokens=5, eos_token_id=(1, 3)), 6)
    logits = np.asarray(draw_logits(rng, (1, 1, 6)), np.float32)
    length, prompt_length = np.asarray([10 + new]), np.asarray([10])
    tokens = np.zeros((1, 20), np.int32)
    ours, _ = run(logits, tokens, length, length[:, None], prompt_length, values)
    barred = np.flatnonzero(np.isneginf(ours[0, 0])).tolist()
    assert barred == ([1, 3] if new < 5 else [])

# SPDX-License-Identifier: Apache-2.0
"""The noise of a position follows from seed, repeat and position, whatever jax is told."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config

import tsjax
from tsjax.decoding.noise import position_noise, row_keys, uniform
from tsjax.decoding.start import init_state

SEEDS, REPEATS = [0, 5, 2**32 - 1], [0, 3, 1]
POSITIONS = np.asarray([[0, 1, 70_000], [9, 9, 2**31 - 1], [3, 2, 1]], np.int32)

# A text that must never change: these settings, this model, any jax. No choice of it is near:
# weights that differ by a ten-thousandth say the same.
PROMPT, SETTINGS = "The old house stood", {
    "max_new_tokens": 200, "do_sample": True, "temperature": 0.8, "repetition_penalty": 1.2,
    "repetition_window": 64, "eos_token_id": (),
}  # fmt: skip
TEXT = {"seed": 2, "sha256": "3114eeb46a1a4f2d6e09936c2664703ef1f9aef1ea7452ef768936f6514017e5"}


# --- Threefry-2x32 (Salmon et al., 2011) in NumPy, and what is made of its words -----------------


def threefry(key, words):
    """Two words for two words, in twenty rounds."""
    key = [np.uint32(key[0]), np.uint32(key[1])]
    key.append(key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    a, b = (np.atleast_1d(np.asarray(word, np.uint32)) for word in words)
    a, b = a + key[0], b + key[1]
    for block in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            a = a + b
            b = (b << np.uint32(turn)) | (b >> np.uint32(32 - turn))
            b = b ^ a
        a, b = a + key[(block + 1) % 3], b + key[(block + 2) % 3] + np.uint32(block + 1)
    return a, b


def fold_in(key, number):
    return tuple(int(word[0]) for word in threefry(key, (0, number)))


def uniform_oracle(key, size, dtype):
    counter = np.arange(size, dtype=np.uint32)
    high, low = threefry(key, (np.zeros_like(counter), counter))
    if dtype == np.float32:
        share = ((high ^ low) >> np.uint32(9)) / 2.0**23
    else:
        share = ((high.astype(np.uint64) << np.uint64(32)) + low >> np.uint64(12)) / 2.0**52
    return np.maximum(share, float(np.finfo(dtype).tiny))


def noise_oracle(seed, repeat, position, size, dtype):
    key = fold_in(fold_in((0, seed), repeat), position)
    return -np.log(-np.log(uniform_oracle(key, size, dtype)))


def test_the_hash_is_threefry():
    """The first known answers of the Random123 library."""
    assert [int(x[0]) for x in threefry((0, 0), (0, 0))] == [0x6B200159, 0x99BA4EFE]
    ones = 2**32 - 1
    assert [int(x[0]) for x in threefry((ones, ones), (ones, ones))] == [0x1CB996FC, 0xBB002BE7]


def test_noise_in_float64_against_numpy():
    with jax.enable_x64(True):
        noise = np.asarray(position_noise(row_keys(SEEDS, REPEATS), POSITIONS, 64, jnp.float64))
    assert noise.dtype == np.float64
    for (b, t), position in np.ndenumerate(POSITIONS):
        wanted = noise_oracle(SEEDS[b], REPEATS[b], position, 64, np.float64)
        np.testing.assert_allclose(noise[b, t], wanted, rtol=2e-6, atol=2e-6)


# --- settings of jax ------------------------------------------------------------------------------

FLAGS = [
    ("jax_threefry_partitionable", False),
    ("jax_threefry_gpu_kernel_lowering", True),
    ("jax_high_dynamic_range_gumbel", True),
    ("jax_default_prng_impl", "rbg"),
    ("jax_random_seed_offset", 1),
    ("jax_enable_custom_prng", True),
    ("jax_legacy_prng_key", "error"),
    ("jax_enable_x64", True),
]


@pytest.mark.parametrize(("name", "value"), FLAGS)
def test_no_flag_changes_the_noise(name, value):
    if not hasattr(jax.config, name):
        pytest.skip(f"this jax has no {name}")
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        keys = row_keys(SEEDS, REPEATS)
        noise = jax.jit(position_noise, static_argnums=(2, 3))(keys, POSITIONS, 33, jnp.float32)
        numbers = np.asarray(uniform(7, 33))
    finally:
        jax.config.update(name, before)
    assert noise.dtype == np.float32
    for (b, t), position in np.ndenumerate(POSITIONS):
        wanted = noise_oracle(SEEDS[b], REPEATS[b], position, 33, np.float32)
        np.testing.assert_allclose(noise[b, t], wanted, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(numbers, uniform_oracle((0, 7), 33, np.float32))


def test_keys_of_another_hash_are_refused():
    cfg = tsjax.steps.DecodeConfig(tiny_config(), tsjax.methods.Autoregressive())
    for keys in (jax.random.key(0, impl="rbg")[None], jnp.zeros((1, 2), jnp.uint32)):
        with pytest.raises(ValueError, match="row_key .* tsjax.steps.row_keys"):
            init_state([[1]], [1], cfg=cfg, capacity=8, max_length=[4], row_key=keys)


# --- a text that stays ----------------------------------------------------------------------------


def test_a_sampled_text_is_the_same_on_every_jax():
    model = tsjax.load(tsjax.EMBEDDED, dtype="float32")
    tokens = tsjax.generate(model, PROMPT, seed=TEXT["seed"], **SETTINGS).tokens[0]
    digest = hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()
    assert len(tokens) == 200 and digest == TEXT["sha256"]

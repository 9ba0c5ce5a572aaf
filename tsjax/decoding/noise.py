# SPDX-License-Identifier: Apache-2.0
"""Random numbers that follow from a key and a counter, and from nothing else.

`jax.random` has several ways to make bits from one key, chosen by global settings and changed
between versions; a text that is resumed must not depend on them. So the hash, Threefry-2x32, and
what is made of its words are written down here, as jax 0.10 has them by default. The hash has no
loop, so that XLA makes the noise in one go.

Knows rows and positions. Knows no logits and no model.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tsjax.base.errors import BadValue
from tsjax.base.typing import Array, DTypeLike, Float, Integer, Key, UInt

IMPLEMENTATION = "threefry2x32"  # of the keys: two words each
ROTATIONS, PARITY = ((13, 15, 26, 6), (17, 29, 16, 24)), 0x1BD11BDA  # of Threefry-2x32


def row_keys(seeds: Iterable[int] | Array, repeats: Iterable[int] | Array) -> Key[Array, "B"]:
    """One key per row. Rows with the same seed and prompt differ by their repeat number."""
    seeds, repeats = _words(seeds), _words(repeats)
    words = jnp.stack([jnp.zeros_like(seeds), seeds], axis=1)
    return jax.random.wrap_key_data(jax.vmap(_fold_in)(words, repeats), impl=IMPLEMENTATION)


def _words(numbers: Iterable[int] | Array) -> UInt[Array, "B"]:
    """Traced ones too."""
    return jnp.asarray(numbers if isinstance(numbers, jax.Array) else list(numbers), jnp.uint32)


def check_keys(keys: Array) -> None:
    """Keys of another hash would give other noise, or none."""
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or (
        str(jax.random.key_impl(keys)) != IMPLEMENTATION
    ):
        wanted = "what tsjax.steps.row_keys returns"
        raise BadValue(f"row_key of type {keys.dtype} is not valid: {wanted}")


def position_noise(
    row_key: Key[Array, "B"], positions: Integer[Array, "B T"], vocab_size: int, dtype: DTypeLike
) -> Float[Array, "B T {vocab_size}"]:
    """Gumbel noise for row keys and absolute positions."""

    def one(key, position):
        return -jnp.log(-jnp.log(_uniform(_fold_in(key, position), vocab_size, dtype)))

    keys, positions = jax.random.key_data(row_key), positions.astype(jnp.uint32)
    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(keys, positions)


def uniform(seed: int, size: int) -> Float[Array, "{size}"]:
    """Numbers between 0 and 1 in float32."""
    return _uniform(jnp.asarray([0, seed], jnp.uint32), size, jnp.float32)


def _fold_in(key: UInt[Array, "2"], number: UInt[Array, ""]) -> UInt[Array, "2"]:
    """The key for a number below 2**32 under another key."""
    return jnp.stack(_threefry(key, jnp.zeros_like(number), number))


def _threefry(
    key: UInt[Array, "2"], first: UInt[Array, "*size"], second: UInt[Array, "*size"]
) -> tuple[UInt[Array, "*size"], UInt[Array, "*size"]]:
    """Threefry-2x32 with 20 rounds, of pairs of words: https://doi.org/10.1145/2063384.2063405."""
    words = key[0], key[1], key[0] ^ key[1] ^ np.uint32(PARITY)
    first, second = first + words[0], second + words[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            first = first + second
            left, right = np.uint32(rotation), np.uint32(32 - rotation)
            second = first ^ ((second << left) | (second >> right))
        first = first + words[(group + 1) % 3]
        second = second + words[(group + 2) % 3] + np.uint32(group + 1)
    return first, second


def _uniform(key: UInt[Array, "2"], size: int, dtype: DTypeLike) -> Float[Array, "{size}"]:
    """Numbers, at least the smallest normal one and below 1, each from two words.

    The mantissa of a float between 1 and 2 is filled with bits, and 1 is taken off.
    """
    counter = lax.iota(jnp.uint32, size)
    words = _threefry(key, jnp.zeros_like(counter), counter)
    info = jnp.finfo(dtype)
    kind = {32: jnp.uint32, 64: jnp.uint64}[info.bits]
    if info.bits == 32:
        bits = words[0] ^ words[1]
    else:
        bits = (words[0].astype(kind) << jnp.asarray(32, kind)) | words[1].astype(kind)
    one = np.ones((), dtype).view(kind)
    bits = (bits >> jnp.asarray(info.bits - info.nmant, kind)) | jnp.asarray(one, kind)
    return jnp.maximum(lax.bitcast_convert_type(bits, dtype) - 1, info.tiny)

# SPDX-License-Identifier: Apache-2.0
"""What a run learns of its drafter's mistakes: a matrix for each text, by the delta rule.

A drafter's state says what the model's next state will be; a step later the model has computed it.
The matrix maps a state to what was missing in states like it, so that a mistake is not made twice.

Knows arrays alone. Tokens never depend on it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels import product
from tsjax.base.typing import Array, Bool, DTypeLike, Float

# Of what is missing in a state, what is there when the same state comes again. Chosen on SmolLM2's
# own text: 0.1 to 0.4 are alike, 0.8 is worse where a text does not repeat itself.
LEARNED_AT_ONCE = 0.2
LEAST_SQUARE = 1e-6


def normed_state(x: Float[Array, "*rows D"], dtype: DTypeLike) -> Float[Array, "*rows D"]:
    """With a mean square of 1, as both sides of the rule are."""
    x = x.astype(dtype)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + LEAST_SQUARE)


def corrected(
    correction: Float[Array, "B D D"], states: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """States with what was missing in states like them."""
    normed = normed_state(states, correction.dtype)
    return (normed + _products(correction, normed)).astype(states.dtype)


def after_rows(
    correction: Float[Array, "B D D"],
    states: Float[Array, "B J D"],
    wanted: Float[Array, "B J D"],
    counts: Bool[Array, "B J"],
) -> Float[Array, "B D D"]:
    """The matrix after it has learned of rows one after the other: what normed states said, and
    what the model said.

    In one go: what a row misses depends on the rows before it through how alike they are, so all
    that they miss solves a triangular system.
    """
    size = states.shape[-1]
    states = jnp.where(counts[..., None], states, 0)
    said = states + _products(correction, states)
    missing = jnp.where(counts[..., None], wanted - said, 0)
    alike = jnp.einsum("bji,bki->bjk", states, states) * (LEARNED_AT_ONCE / size)
    missing = jnp.einsum("bjk,bko->bjo", _solving(alike), missing)
    missing = missing * (LEARNED_AT_ONCE / size)
    # A sum for each entry, so that the matrix is read and written once.
    for row in range(states.shape[1]):
        correction = correction + missing[:, row, :, None] * states[:, row, None, :]
    return correction


def _solving(alike: Float[Array, "B J J"]) -> Float[Array, "B J J"]:
    """The inverse of 1 + L, where L is what of `alike` lies below the diagonal.

    That is the sum of all (-L)^k, of which those from J on are zero, and so the product of all
    1 + (-L)^(2^i). LAPACK would begin threads that wait for more, and take the cores of a step.
    """
    size = alike.shape[-1]
    power = -jnp.tril(alike, -1)
    inverse = jnp.eye(size, dtype=alike.dtype) + power
    for _ in range(max(size - 1, 1).bit_length() - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def _products(
    correction: Float[Array, "B D D"], states: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """Of each text's states with its matrix."""
    if correction.shape[0] == 1:  # which the kernels know
        return product(states[0], correction[0])[None]
    return jnp.einsum("boi,bti->bto", correction, states)

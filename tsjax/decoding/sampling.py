# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: HuggingFace's processors in HuggingFace's order, and position-keyed noise.

Knows logits, the last position of every token and the values a user chose. Knows no model, no
cache and no method of decoding. All values are arrays, so that changing them never recompiles; a
processor that is off is skipped at run time.

A token is argmax(processed logits + Gumbel noise), which is a sample of their softmax. The noise of
position p is a function of the row's key and p alone, so any method that asks for the token at p
gets the same one.

Truncations never sort the vocabulary. A threshold on a monotone integer image of the logits is
found bit by bit, which is exact and needs one pass over the vocabulary per bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tsjax.config import GenerationConfig
from tsjax.decoding.noise import position_noise
from tsjax.typing import Array, Bool, DTypeLike, Float, Int, Key, Num, UInt, accumulation_dtype

NEVER_SEEN = -(2**31)
WHOLE_CONTEXT = 2**30  # as a repetition window

# Drafted tokens before each row, and their positions, NEVER_SEEN for none.
Ancestors = tuple[Int[Array, "B T ancestors"], Int[Array, "B T ancestors"]]


class SamplingValues(flax.struct.PyTreeNode):
    """The sampling part of GenerationConfig as arrays: scalars, and two masks over the vocabulary.

    Attributes:
      stop_mask: tokens that end a row; barred while fewer than min_new_tokens are out.
      suppress_mask: tokens that are never chosen.
    """

    do_sample: Bool[Array, ""]
    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]
    epsilon_cutoff: Float[Array, ""]
    eta_cutoff: Float[Array, ""]
    min_tokens_to_keep: Int[Array, ""]
    repetition_penalty: Float[Array, ""]
    repetition_window: Int[Array, ""]
    min_new_tokens: Int[Array, ""]
    stop_mask: Bool[Array, "V"]
    suppress_mask: Bool[Array, "V"]


def sampling_values(
    config: GenerationConfig, stop_ids: Sequence[int], vocab_size: int, dtype: DTypeLike
) -> SamplingValues:
    """The arrays of `config`; `stop_ids` are the resolved end tokens, `dtype` that of the model.

    NumPy's, so that no program is compiled to make them.
    """
    real = accumulation_dtype(dtype)

    def number(value, dtype: DTypeLike = np.int32) -> Any:
        return np.asarray(value, dtype)

    def mask(ids) -> Any:
        members = np.zeros((vocab_size,), bool)
        members[list(ids)] = True
        return members

    window = min(config.repetition_window or WHOLE_CONTEXT, WHOLE_CONTEXT)
    return SamplingValues(
        do_sample=number(config.do_sample, bool),
        temperature=number(config.temperature, real),
        top_k=number(config.top_k),
        top_p=number(config.top_p, real),
        min_p=number(config.min_p, real),
        epsilon_cutoff=number(config.epsilon_cutoff, real),
        eta_cutoff=number(config.eta_cutoff, real),
        min_tokens_to_keep=number(config.min_tokens_to_keep),
        repetition_penalty=number(config.repetition_penalty, real),
        repetition_window=number(window),
        min_new_tokens=number(config.min_new_tokens),
        stop_mask=mask(stop_ids),
        suppress_mask=mask(config.suppress_tokens),
    )


def first_last_seen(
    tokens: Int[Array, "B C"], length: Int[Array, "B"], vocab_size: int
) -> Int[Array, "B {vocab_size}"]:
    """The last position of each token among the first `length` ones, NEVER_SEEN for none."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(positions < length[:, None], positions, NEVER_SEEN)
    seen = jnp.full((tokens.shape[0], vocab_size), NEVER_SEEN, jnp.int32)
    rows = jnp.arange(tokens.shape[0])[:, None]
    return seen.at[rows, tokens].max(positions, mode="drop")


def step_noise(
    row_key: Key[Array, "B"],
    first: Int[Array, "B"],
    count: int,
    vocab_size: int,
    values: SamplingValues,
) -> Float[Array, "B {count} {vocab_size}"]:
    """Noise of the `count` positions from `first` on; zeros where nothing samples."""
    positions = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    dtype = values.temperature.dtype
    shape = (*positions.shape, vocab_size)
    return lax.cond(
        values.do_sample,
        lambda: position_noise(row_key, positions, vocab_size, dtype),
        lambda: jnp.zeros(shape, dtype),
    )


def process(
    logits: Float[Array, "B T V"],
    last_seen: Int[Array, "B V"],
    positions: Int[Array, "B T"],
    prompt_length: Int[Array, "B"],
    values: SamplingValues,
    ancestors: Ancestors | None = None,
) -> Float[Array, "B T V"]:
    """The processors that also act without sampling.

    Args:
      logits: of the tokens to be chosen at `positions`.
      last_seen: a token is recent if its last position is within the window before p.
      ancestors: for each of the T rows, drafted tokens that come before it and are not in
        `last_seen`.
    """

    def penalise(logits):
        oldest = positions - values.repetition_window  # [B, T]
        recent = last_seen[:, None, :] >= oldest[:, :, None]
        if ancestors is not None:
            tokens, at = ancestors
            b, t = jnp.arange(logits.shape[0]), jnp.arange(logits.shape[1])
            in_window = at >= oldest[:, :, None]
            recent = recent.at[b[:, None, None], t[:, None], tokens].max(in_window)
        penalty = values.repetition_penalty
        penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
        return jnp.where(recent, penalised, logits)

    logits = lax.cond(values.repetition_penalty != 1, penalise, _unchanged, logits)
    too_early = positions - prompt_length[:, None] < values.min_new_tokens  # [B, T]
    stop, suppress = values.stop_mask[None, None], values.suppress_mask[None, None]
    barred = (too_early[:, :, None] & stop) | suppress
    return jnp.where(barred, -jnp.inf, logits)


def warp(logits: Float[Array, "*rows V"], values: SamplingValues) -> Float[Array, "*rows V"]:
    """The processors of sampling: temperature, then the truncations; removed tokens are -inf."""
    keep = jnp.minimum(values.min_tokens_to_keep, logits.shape[-1])

    def best_tokens(logits):
        """Mask of the `min_tokens_to_keep` best tokens, which no truncation may remove."""
        one = logits >= jnp.max(logits, axis=-1, keepdims=True)
        return lax.cond(keep == 1, lambda _: one, lambda x: largest(x, keep), logits)

    def remove(logits, doomed):
        return jnp.where(doomed & ~best_tokens(logits), -jnp.inf, logits)

    def top_k(logits):
        k = jnp.maximum(values.top_k, keep)
        return jnp.where(largest(logits, jnp.minimum(k, logits.shape[-1])), logits, -jnp.inf)

    def top_p(logits):
        return remove(logits, ~nucleus(logits, values.top_p))

    def min_p(logits):
        ratio = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        return remove(logits, ratio < values.min_p)

    def epsilon_cutoff(logits):
        return remove(logits, jax.nn.softmax(logits) < values.epsilon_cutoff)

    def eta_cutoff(logits):
        log_probs = jax.nn.log_softmax(logits)
        probs = jnp.exp(log_probs)
        entropy = -jnp.sum(jnp.where(probs > 0, probs * log_probs, 0), axis=-1, keepdims=True)
        epsilon = values.eta_cutoff
        eta = jnp.minimum(epsilon, jnp.sqrt(epsilon) * jnp.exp(-entropy))
        return remove(logits, probs < eta)

    logits = logits / values.temperature
    for active, processor in (
        (values.top_k > 0, top_k),
        (values.top_p < 1, top_p),
        (values.min_p > 0, min_p),
        (values.epsilon_cutoff > 0, epsilon_cutoff),
        (values.eta_cutoff > 0, eta_cutoff),
    ):
        logits = lax.cond(active, processor, _unchanged, logits)
    return logits


def score(
    logits: Float[Array, "B T V"],
    last_seen: Int[Array, "B V"],
    depths: Int[Array, "B T"],
    length: Int[Array, "B"],
    prompt_length: Int[Array, "B"],
    noise: Float[Array, "B positions V"],
    values: SamplingValues,
    ancestors: Ancestors | None = None,
) -> Float[Array, "B T V"]:
    """What the choice of a token is the argmax of: processed logits plus noise.

    Args:
      logits: of the model; row t is about the token at position length + depths[b, t].
      last_seen, prompt_length, ancestors: see `process`.
      noise: of the positions from `length` on, at least one more than the largest depth.
    """
    with jax.named_scope("sampling"):
        positions = length[:, None] + depths
        logits = process(logits, last_seen, positions, prompt_length, values, ancestors)

        def sample(logits):
            return warp(logits, values) + jnp.take_along_axis(noise, depths[..., None], axis=1)

        return lax.cond(values.do_sample, sample, _unchanged, logits)


def best(scores: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The first index of the largest entry along the last axis.

    As jnp.argmax, but in two plain reductions: XLA does not vectorise its own on a CPU. Of NaN it
    makes the last index.
    """
    at_peak = scores == jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(at_peak, _indices(scores), scores.shape[-1] - 1), axis=-1)


def best_few(
    scores: Float[Array, "*rows V"], k: int
) -> tuple[Float[Array, "*rows {k}"], Int[Array, "*rows {k}"]]:
    """The k largest entries along the last axis and their indices, best first, equal by index.

    A few are found in as many pairs of reductions: lax.top_k sorts everything on a CPU.
    """
    if k > 32:
        values, indices = lax.top_k(scores, k)
        return values, indices
    values, indices = [], []
    for _ in range(k):
        index = best(scores)[..., None]
        values.append(jnp.take_along_axis(scores, index, axis=-1))
        indices.append(index)
        scores = jnp.where(_indices(scores) == index, -jnp.inf, scores)
    return jnp.concatenate(values, axis=-1), jnp.concatenate(indices, axis=-1)


def _indices(scores: Float[Array, "*rows V"]) -> Int[Array, "*rows V"]:
    """Of each entry its index along the last axis."""
    return lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)


@jax.jit
def largest(x: Float[Array, "*rows V"], k: int | Int[Array, ""]) -> Bool[Array, "*rows V"]:
    """Mask of the k largest entries along the last axis; entries equal to the k-th all belong."""
    keys = _sortable(x)

    def holds(threshold):
        return jnp.sum(keys >= threshold, axis=-1, keepdims=True, dtype=jnp.int32) >= k

    return keys >= _last_that_holds(holds, keys)


def nucleus(
    logits: Float[Array, "*rows V"], top_p: float | Float[Array, ""]
) -> Bool[Array, "*rows V"]:
    """Mask of the smallest set of most probable tokens whose mass reaches `top_p`.

    As HuggingFace: a token goes when the mass of all tokens up to and including it, counted from
    the least probable, is at most 1 - top_p. Equal tokens stay or go together.
    """
    keys, probs = _sortable(logits), jax.nn.softmax(logits)

    def holds(threshold):
        below = jnp.sum(jnp.where(keys < threshold, probs, 0), axis=-1, keepdims=True)
        return below <= 1 - top_p

    return keys >= _last_that_holds(holds, keys)


def _sortable(x: Float[Array, "*rows V"]) -> UInt[Array, "*rows V"]:
    """An unsigned integer image of floats with the same order."""
    unsigned = {4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    sign = jnp.asarray(1 << (8 * x.dtype.itemsize - 1), unsigned)
    positive_zero = jnp.where(x == 0, jnp.zeros_like(x), x)  # XLA would drop x + 0.0
    bits = lax.bitcast_convert_type(positive_zero, unsigned)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _last_that_holds(
    holds: Callable[[UInt[Array, "*rows 1"]], Bool[Array, "*rows 1"]], keys: UInt[Array, "*rows V"]
) -> UInt[Array, "*rows 1"]:
    """The largest threshold that `holds`: true up to some point and false after."""
    bits = 8 * keys.dtype.itemsize
    one = jnp.asarray(1, keys.dtype)

    def body(i, threshold):
        shift = jnp.asarray(bits - 1 - i, keys.dtype)
        candidate = threshold | (one << shift)
        return jnp.where(holds(candidate), candidate, threshold)

    return lax.fori_loop(0, bits, body, jnp.zeros((*keys.shape[:-1], 1), keys.dtype))


def _unchanged(x: Num[Array, "*rows V"]) -> Num[Array, "*rows V"]:
    return x

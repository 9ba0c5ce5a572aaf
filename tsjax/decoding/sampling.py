# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: HuggingFace's processors in HuggingFace's order, and position-keyed noise.

Knows logits, the last position of every token and the values a user chose. Knows no model, no
cache and no method of decoding. Values are arrays, so that changing them never recompiles; which
processors are on is static, so that those that are off are not in the program.

A token is argmax(processed logits + Gumbel noise), which is a sample of their softmax. The noise of
position p is a function of the row's key and p alone, so any method that asks for the token at p
gets the same one.

Truncations never sort the vocabulary. A threshold on a monotone integer image of the logits is
found digit by digit, which is exact. Probabilities are those of law.py: whatever runs beside a row,
the same tokens are removed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import threshold
from tsjax.base.generation_config import GenerationConfig
from tsjax.base.typing import Array, Bool, DTypeLike, Float, Int, Key, UInt, accumulation_dtype
from tsjax.decoding.law import counts, exp_minus, law_of, total
from tsjax.decoding.noise import position_noise
from tsjax.decoding.processors import (
    Ancestors,
    KnownText,
    LogitsProcessor,
    apply,
    bar_repeated_ngrams,
    penalise_counts,
    penalise_repetition,
)

WHOLE_CONTEXT = 2**30  # as a repetition window


class Repetition(NamedTuple):
    """How tokens of the last `window` ones are made less likely, or more."""

    penalty: Float[Array, ""]
    window: Int[Array, ""]


class SamplingValues(flax.struct.PyTreeNode):
    """The sampling part of GenerationConfig as arrays: scalars, and two masks over the vocabulary.

    What is off is None, and no part of a program that is compiled for these values.

    Attributes:
      do_sample: static; the processors of sampling are off without it.
      no_repeat_ngram_size: static; 0 where it is off.
      logprobs: static; how many of the most probable tokens stand beside each one; None where
        no log-probabilities are.
      processors: those of a user's own.
      stop_mask: tokens that end a row; barred while fewer than min_new_tokens are out.
      suppress_mask: tokens that are never chosen.
    """

    temperature: Float[Array, ""]
    stop_mask: Bool[Array, "V"]
    top_k: Int[Array, ""] | None = None
    top_p: Float[Array, ""] | None = None
    min_p: Float[Array, ""] | None = None
    epsilon_cutoff: Float[Array, ""] | None = None
    eta_cutoff: Float[Array, ""] | None = None
    min_tokens_to_keep: Int[Array, ""] | None = None
    repetition: Repetition | None = None
    presence_penalty: Float[Array, ""] | None = None
    frequency_penalty: Float[Array, ""] | None = None
    min_new_tokens: Int[Array, ""] | None = None
    suppress_mask: Bool[Array, "V"] | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = flax.struct.field(pytree_node=False, default=None)
    no_repeat_ngram_size: int = flax.struct.field(pytree_node=False, default=0)
    do_sample: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters how often a token was generated."""
        return self.presence_penalty is not None or self.frequency_penalty is not None

    @property
    def reads_text(self) -> bool:
        """Whether what comes before a token changes its logits."""
        of_text = self.repetition is not None or self.no_repeat_ngram_size > 0
        return of_text or self.counts_tokens or bool(self.processors)


def sampling_values(
    config: GenerationConfig,
    stop_ids: Sequence[int],
    vocab_size: int,
    dtype: DTypeLike,
    processors: Sequence[LogitsProcessor] = (),
) -> SamplingValues:
    """The arrays of `config`; `stop_ids` are the resolved end tokens, `dtype` that of the model.

    NumPy's, so that no program is compiled to make them.
    """
    real = accumulation_dtype(dtype)

    def number(value, dtype: DTypeLike) -> Any:
        return np.asarray(value, dtype)

    def mask(ids) -> Any:
        members = np.zeros((vocab_size,), bool)
        members[list(ids)] = True
        return members

    def unless(off: int, name: str, dtype: DTypeLike) -> Any:
        value = getattr(config, name)
        return None if value == off else number(value, dtype)

    penalty = unless(1, "repetition_penalty", real)
    window = number(min(config.repetition_window or WHOLE_CONTEXT, WHOLE_CONTEXT), np.int32)
    truncations: dict[str, Any] = {}
    if config.do_sample:
        truncations = dict(
            top_k=unless(0, "top_k", np.int32),
            top_p=unless(1, "top_p", real),
            min_p=unless(0, "min_p", real),
            epsilon_cutoff=unless(0, "epsilon_cutoff", real),
            eta_cutoff=unless(0, "eta_cutoff", real),
            min_tokens_to_keep=unless(1, "min_tokens_to_keep", np.int32),
        )
    return SamplingValues(
        do_sample=config.do_sample,
        temperature=number(config.temperature, real),
        **truncations,
        repetition=None if penalty is None else Repetition(penalty, window),
        presence_penalty=unless(0, "presence_penalty", real),
        frequency_penalty=unless(0, "frequency_penalty", real),
        no_repeat_ngram_size=config.no_repeat_ngram_size,
        logprobs=config.logprobs,
        # A name is no part of a program: another one would compile it anew.
        processors=tuple(one.replace(name="", version=0) for one in processors),
        min_new_tokens=unless(0, "min_new_tokens", np.int32),
        stop_mask=mask(stop_ids),
        suppress_mask=mask(config.suppress_tokens) if config.suppress_tokens else None,
    )


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
    if not values.do_sample:
        return jnp.zeros((*positions.shape, vocab_size), dtype)
    return position_noise(row_key, positions, vocab_size, dtype)


def process(
    logits: Float[Array, "B T V"],
    text: KnownText,
    positions: Int[Array, "B T"],
    values: SamplingValues,
    ancestors: Ancestors | None = None,
) -> Float[Array, "B T V"]:
    """The processors that also act without sampling.

    Args:
      logits: of the tokens to be chosen at `positions`.
      text: the known one of each batch row; what is off needs none of it.
      ancestors: for each of the T rows, drafted tokens that come before it and are not in `text`.
    """
    if values.repetition is not None:
        penalty, window = values.repetition
        logits = penalise_repetition(logits, text, positions, penalty, window, ancestors)
    if values.counts_tokens:
        penalties = values.presence_penalty, values.frequency_penalty
        logits = penalise_counts(logits, text, *penalties, ancestors)
    if values.no_repeat_ngram_size:
        logits = bar_repeated_ngrams(logits, text, values.no_repeat_ngram_size, ancestors)
    if values.min_new_tokens is not None:
        too_early = positions - text.prompt_length[:, None] < values.min_new_tokens  # [B, T]
        barred = too_early[:, :, None] & values.stop_mask[None, None]
        logits = jnp.where(barred, -jnp.inf, logits)
    if values.suppress_mask is not None:
        logits = jnp.where(values.suppress_mask[None, None], -jnp.inf, logits)
    for processor in values.processors:
        logits = apply(processor, logits, text, ancestors)
    return logits


def warp(logits: Float[Array, "*rows V"], values: SamplingValues) -> Float[Array, "*rows V"]:
    """The processors of sampling: temperature, then the truncations; removed tokens are -inf."""
    keep = values.min_tokens_to_keep
    keep = None if keep is None else jnp.minimum(keep, logits.shape[-1])

    def remove(logits, doomed):
        """Without the doomed tokens, but never without the `min_tokens_to_keep` best ones."""
        if keep is None:  # NaN is no worse than the best, so that it is seen in the end
            others = logits < jnp.max(logits, axis=-1, keepdims=True)
        else:
            others = ~largest(logits, keep)
        return jnp.where(doomed & others, -jnp.inf, logits)

    # The choice keeps the quotient from being rounded together with a sum that it goes into.
    logits = jnp.where(logits > -jnp.inf, logits / values.temperature, logits)
    if values.top_k is not None:
        k = values.top_k if keep is None else jnp.maximum(values.top_k, keep)
        logits = jnp.where(largest(logits, jnp.minimum(k, logits.shape[-1])), logits, -jnp.inf)
    if values.top_p is not None:
        logits = remove(logits, ~nucleus(logits, values.top_p))
    if values.min_p is not None:
        logits = remove(logits, law_of(logits).weights < values.min_p)
    if values.epsilon_cutoff is not None:
        found = law_of(logits)
        logits = remove(logits, found.weights < values.epsilon_cutoff * found.total)
    if values.eta_cutoff is not None:
        # e to the minus entropy is that of the mean distance from the best, by the total.
        found, epsilon = law_of(logits), values.eta_cutoff
        mean = total(found.weights * found.behind) / found.total
        eta = jnp.minimum(epsilon * found.total, jnp.sqrt(epsilon) * exp_minus(mean))
        logits = remove(logits, found.weights < eta)
    return logits


def score_choices(
    logits: Float[Array, "B T V"],
    text: KnownText,
    depths: Int[Array, "B T"],
    noise: Float[Array, "B positions V"],
    values: SamplingValues,
    ancestors: Ancestors | None = None,
) -> Float[Array, "B T V"]:
    """What the choice of a token is the argmax of: processed logits plus noise.

    Args:
      logits: of the model; row t is about the token at position text.length + depths[b, t].
      text, ancestors: see `process`.
      noise: of the positions from `text.length` on, at least one more than the largest depth.
    """
    with jax.named_scope("sampling"):
        logits = distribution(logits, text, depths, values, ancestors)
        return with_noise(logits, depths, noise, values)


def with_noise(
    logits: Float[Array, "B T V"],
    depths: Int[Array, "B T"],
    noise: Float[Array, "B positions V"],
    values: SamplingValues,
) -> Float[Array, "B T V"]:
    """Scores of logits that are processed already; see `score_choices`."""
    if not values.do_sample:
        return logits
    return logits + jnp.take_along_axis(noise, depths[..., None], axis=1)


def distribution(
    logits: Float[Array, "B T V"],
    text: KnownText,
    depths: Int[Array, "B T"],
    values: SamplingValues,
    ancestors: Ancestors | None = None,
) -> Float[Array, "B T V"]:
    """The logits whose softmax a token is drawn from, or whose largest it is."""
    positions = text.length[:, None] + depths
    logits = process(logits, text, positions, values, ancestors)
    return warp(logits, values) if values.do_sample else logits


def best(scores: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The first index of the largest entry along the last axis. Of NaN it makes the last index."""
    return best_with_score(scores)[1]


def best_with_score(
    scores: Float[Array, "*rows V"],
) -> tuple[Float[Array, "*rows"], Int[Array, "*rows"]]:
    """The largest entry along the last axis, NaN if there is one, and its index as of `best`."""

    def by_one_reduction(scores):
        values, indices = few_by_one_reduction(scores, 1)
        return values[..., 0], indices[..., 0]

    return lax.platform_dependent(scores, cpu=best_by_two_reductions, default=by_one_reduction)


def best_few(
    scores: Float[Array, "*rows V"], k: int
) -> tuple[Float[Array, "*rows {k}"], Int[Array, "*rows {k}"]]:
    """The k largest entries along the last axis and their indices, best first, equal by index."""
    if k > 32:
        values, indices = lax.top_k(scores, k)
        return values, indices
    one_by_one = functools.partial(few_one_by_one, k=k)
    at_once = functools.partial(few_by_one_reduction, k=k) if k <= 4 else one_by_one
    return lax.platform_dependent(scores, cpu=one_by_one, default=at_once)


def best_by_two_reductions(
    scores: Float[Array, "*rows V"],
) -> tuple[Float[Array, "*rows"], Int[Array, "*rows"]]:
    """As `best_with_score`: XLA vectorises plain reductions alone on a CPU."""
    peak, last = jnp.max(scores, axis=-1), scores.shape[-1] - 1  # a maximum may overlook NaN
    place = jnp.where(scores == peak[..., None], _indices(scores), last)
    place = jnp.min(jnp.where(jnp.isnan(scores), -1, place), axis=-1)
    return jnp.where(place < 0, jnp.nan, peak), jnp.where(place < 0, last, place)


def few_one_by_one(
    scores: Float[Array, "*rows V"], k: int
) -> tuple[Float[Array, "*rows {k}"], Int[Array, "*rows {k}"]]:
    """As `best_few`: lax.top_k sorts everything on a CPU."""
    values, indices = [], []
    for _ in range(k):
        index = best(scores)[..., None]
        values.append(jnp.take_along_axis(scores, index, axis=-1))
        indices.append(index)
        scores = jnp.where(_indices(scores) == index, -jnp.inf, scores)
    return jnp.concatenate(values, axis=-1), jnp.concatenate(indices, axis=-1)


def few_by_one_reduction(
    scores: Float[Array, "*rows V"], k: int
) -> tuple[Float[Array, "*rows {k}"], Int[Array, "*rows {k}"]]:
    """As `best_few`, reading the scores once: as a GPU wants it. NaN comes first."""
    last = jnp.int32(scores.shape[-1] - 1)
    absent = jnp.asarray(-jnp.inf, scores.dtype), last
    entries = (scores, _indices(scores))
    fillers = tuple(jnp.full(scores.shape, x) for x in absent)

    def merge(one, other):
        """The best k of two descending lists, flat: value, index, value, ..."""
        one, other = (list(zip(x[::2], x[1::2], strict=True)) for x in (one, other))
        found = []
        for _ in range(k):
            (x, at), (y, other_at) = one[0], other[0]
            wins = (x > y) | ((x == y) & (at < other_at)) | jnp.isnan(x)
            found += [jnp.where(wins, x, y), jnp.where(wins, at, other_at)]
            one = _select(wins, one[1:], one[:-1])
            other = _select(wins, other[:-1], other[1:])
        return tuple(found)

    operands = entries + fillers * (k - 1)
    found = lax.reduce(operands, absent * k, merge, (scores.ndim - 1,))
    values, indices = jnp.stack(found[::2], axis=-1), jnp.stack(found[1::2], axis=-1)
    return values, jnp.where(jnp.isnan(values), last, indices)


def _select(condition: Bool[Array, "..."], if_true: list[Any], if_false: list[Any]) -> list[Any]:
    """One of two lists of pairs of arrays."""
    return [
        tuple(jnp.where(condition, a, b) for a, b in zip(*pairs, strict=True))
        for pairs in zip(if_true, if_false, strict=True)
    ]


def _indices(scores: Float[Array, "*rows V"]) -> Int[Array, "*rows V"]:
    """Each entry's index along the last axis."""
    return lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)


@jax.jit
def largest(x: Float[Array, "*rows V"], k: int | Int[Array, ""]) -> Bool[Array, "*rows V"]:
    """Mask of the k largest entries along the last axis; entries equal to the k-th all belong."""
    keys = sortable(x)
    others = jnp.broadcast_to(x.shape[-1] - jnp.asarray(k), (*x.shape[:-1], 1))
    return keys >= threshold(keys, others.astype(keys.dtype))


@jax.jit
def nucleus(
    logits: Float[Array, "*rows V"], top_p: float | Float[Array, ""]
) -> Bool[Array, "*rows V"]:
    """Mask of the smallest set of most probable tokens whose mass reaches `top_p`.

    As HuggingFace: a token goes when the mass of all tokens up to and including it, counted from
    the least probable, is at most 1 - top_p. Equal tokens stay or go together. Masses are whole
    numbers of at most 2^-30 of all (2^-62 in float64).
    """
    masses, whole = counts(law_of(logits))
    # Keys are made after masses, so that they and the weights are never in memory together.
    logits, masses = lax.optimization_barrier((logits, masses))
    keys = sortable(logits)
    return keys >= threshold(keys, ((1 - top_p) * whole).astype(masses.dtype), masses)


def sortable(x: Float[Array, "*rows V"]) -> UInt[Array, "*rows V"]:
    """An unsigned integer image of floats with the same order; NaN is the largest."""
    unsigned = {4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    sign = jnp.asarray(1 << (8 * x.dtype.itemsize - 1), unsigned)
    positive_zero = jnp.where(x == 0, jnp.zeros_like(x), x)  # XLA would drop x + 0.0
    bits = lax.bitcast_convert_type(positive_zero, unsigned)
    bits = jnp.where(bits >= sign, ~bits, bits | sign)
    return jnp.where(jnp.isnan(x), ~jnp.zeros_like(bits), bits)

# SPDX-License-Identifier: Apache-2.0
"""What makes a token more or less likely by the text before it: penalties and processors.

Knows logits of rows, each with a text of its own: the known tokens, and drafted ones after them.
So what holds for the next token of a text holds for every node of a tree, and drafts stay exact.
Does not know which of it is on (sampling.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tsjax.base.checks import check, check_int
from tsjax.base.errors import BadType, BadValue
from tsjax.base.typing import Array, Bool, Float, Int

NEVER_SEEN = -(2**31)
NO_TOKEN = -1
COMPARED_AT_ONCE = 2048  # places of a text

# Drafted tokens before each row, and their positions, NEVER_SEEN for none; these come last.
Ancestors = tuple[Int[Array, "B T ancestors"], Int[Array, "B T ancestors"]]


class KnownText(NamedTuple):
    """The known text of each batch row, as processors read it.

    Attributes:
      tokens: prompt and output; from `length` on unspecified.
      last_seen: the last position of each token, NEVER_SEEN for none; None where nothing asks.
      counts: how often each token was generated; None where nothing asks.
    """

    tokens: Int[Array, "B C"]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    last_seen: Int[Array, "B V"] | None = None
    counts: Int[Array, "B V"] | None = None


def first_last_seen(
    tokens: Int[Array, "B C"], length: Int[Array, "B"], vocab_size: int
) -> Int[Array, "B {vocab_size}"]:
    """The last position of each token among the first `length` ones, NEVER_SEEN for none."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(positions < length[:, None], positions, NEVER_SEEN)
    seen = jnp.full((tokens.shape[0], vocab_size), NEVER_SEEN, jnp.int32)
    rows = jnp.arange(tokens.shape[0])[:, None]
    return seen.at[rows, tokens].max(positions, mode="drop")


def first_counts(
    tokens: Int[Array, "B C"], prompt_length: Int[Array, "B"], length: Int[Array, "B"], size: int
) -> Int[Array, "B {size}"]:
    """How often each token of a vocabulary of `size` is among those from the prompt's end on."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    generated = (positions >= prompt_length[:, None]) & (positions < length[:, None])
    rows = jnp.arange(tokens.shape[0])[:, None]
    counts = jnp.zeros((tokens.shape[0], size), jnp.int32)
    return counts.at[rows, tokens].add(generated.astype(jnp.int32), mode="drop")


def penalise_repetition(
    logits: Float[Array, "B T V"],
    text: KnownText,
    positions: Int[Array, "B T"],
    penalty: Float[Array, ""],
    window: Int[Array, ""],
    ancestors: Ancestors | None,
) -> Float[Array, "B T V"]:
    """HuggingFace's: for the token at p, of those at the `window` positions before it."""
    assert text.last_seen is not None
    oldest = positions - window  # [B, T]
    recent = text.last_seen[:, None, :] >= oldest[:, :, None]
    if ancestors is not None:
        tokens, at = ancestors
        recent = recent.at[(*_rows(logits), tokens)].max(at >= oldest[:, :, None])
    penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
    return jnp.where(recent, penalised, logits)


def penalise_counts(
    logits: Float[Array, "B T V"],
    text: KnownText,
    presence: Float[Array, ""] | None,
    frequency: Float[Array, ""] | None,
    ancestors: Ancestors | None,
) -> Float[Array, "B T V"]:
    """Those of OpenAI and vLLM: of generated tokens alone, once and for each time."""
    assert text.counts is not None
    counts = jnp.broadcast_to(text.counts[:, None, :], logits.shape)
    if ancestors is not None:
        tokens, at = ancestors
        counts = counts.at[(*_rows(logits), tokens)].add((at != NEVER_SEEN).astype(jnp.int32))
    if frequency is not None:
        # The choice between two lets no compiler fuse product and difference into one rounding,
        # which it would do in one program and not in another.
        logits = logits - jnp.where(counts > 0, frequency * counts, 0)
    if presence is not None:
        logits = logits - jnp.where(counts > 0, presence, 0)
    return logits


def bar_repeated_ngrams(
    logits: Float[Array, "B T V"], text: KnownText, size: int, ancestors: Ancestors | None
) -> Float[Array, "B T V"]:
    """HuggingFace's no_repeat_ngram_size: no `size` tokens stand together twice in a text."""
    before = size - 1
    B, T = logits.shape[:2]
    last = tokens_before(text, before, ancestors, T)
    at_once = min(COMPARED_AT_ONCE, text.tokens.shape[1])
    padded = jnp.pad(text.tokens, ((0, 0), (0, at_once + before)))

    def compare(block, logits):
        """The n-grams that begin in one block of the known text."""
        start = block * at_once
        known = start + jnp.arange(at_once, dtype=jnp.int32) + before < text.length[:, None]
        repeats = jnp.broadcast_to(known[:, None], (B, T, at_once))
        for index in range(before):
            there = lax.dynamic_slice_in_dim(padded, start + index, at_once, axis=1)
            repeats &= there[:, None] == last[:, :, index, None]
        after = lax.dynamic_slice_in_dim(padded, start + before, at_once, axis=1)
        return _bar(logits, jnp.broadcast_to(after[:, None], repeats.shape), repeats)

    blocks = (jnp.max(text.length) + at_once - 1) // at_once
    logits = lax.fori_loop(jnp.int32(0), blocks, compare, logits)
    if ancestors is None:
        return logits
    # Those that end with a drafted token: the tail has what may stand before the first of them.
    tail, firsts = _tail(text, before, ancestors, T), ancestors[0].shape[2]
    depth = jnp.sum(ancestors[1] != NEVER_SEEN, axis=2)
    same = jnp.arange(firsts) < depth[..., None]
    for index in range(before):
        there = tail[:, :, index : index + firsts]
        same &= (there == last[:, :, index, None]) & (there != NO_TOKEN)
    return _bar(logits, tail[:, :, before:], same)


def tokens_before(
    text: KnownText, count: int, ancestors: Ancestors | None, rows: int
) -> Int[Array, "B {rows} {count}"]:
    """The last `count` tokens before each of `rows` rows; NO_TOKEN before the text's begin."""
    tail = _tail(text, count, ancestors, rows)
    if ancestors is None:
        return tail
    depth = jnp.sum(ancestors[1] != NEVER_SEEN, axis=2, dtype=jnp.int32)
    index = depth[..., None] + jnp.arange(count, dtype=jnp.int32)
    return jnp.take_along_axis(tail, index, axis=2)


def _tail(
    text: KnownText, count: int, ancestors: Ancestors | None, rows: int
) -> Int[Array, "B {rows} tail"]:
    """The last `count` known tokens, then the drafted ones before each row. [B, rows, ...]"""
    at = text.length[:, None] + jnp.arange(-count, 0, dtype=jnp.int32)
    known = jnp.take_along_axis(text.tokens, jnp.maximum(at, 0), axis=1)
    known = jnp.where(at >= 0, known, NO_TOKEN)
    known = jnp.broadcast_to(known[:, None], (known.shape[0], rows, count))
    return known if ancestors is None else jnp.concatenate([known, ancestors[0]], axis=2)


def _bar(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T N"], barred: Bool[Array, "B T N"]
) -> Float[Array, "B T V"]:
    lowest = jnp.where(barred, -jnp.inf, jnp.inf).astype(logits.dtype)
    return logits.at[(*_rows(logits), tokens)].min(lowest, mode="drop")


def _rows(logits: Float[Array, "B T V"]) -> tuple[Int[Array, "B 1 1"], Int[Array, "T 1"]]:
    """Indices of batch row and row, to go before one of [B, T, N] tokens."""
    return jnp.arange(logits.shape[0])[:, None, None], jnp.arange(logits.shape[1])[:, None]


# --- processors of a user's own -----------------------------------------------------------------


class LogitsProcessor(flax.struct.PyTreeNode):
    """A function of one text and the logits for its next token, run inside the compiled step.

    It holds for every node of a draft tree, each with its own text, so drafts change no token. It
    runs after the penalties and the barred tokens, and before temperature and truncations.

        def no_first_letter_twice(logits, tokens, length): ...
        processor = tsjax.LogitsProcessor(no_first_letter_twice, name="letters", version=1)

    Attributes:
      function: pure, and traceable by JAX: (logits [V], tokens [C], length, *arrays) -> logits [V].
        The text is the first `length` of `tokens`, drafted ones included; what lies beyond is
        unspecified. The next token's position is `length`. Define it once: a new function object,
        a lambda in a loop say, is another program and compiled anew.
      name, version: of the function, for runs that are saved: one that is resumed needs the same.
        The version is a number or a text; arrays of other values want another one.
      arrays: what the function reads beside the text; other values never recompile.
    """

    function: Callable[..., Any] = flax.struct.field(pytree_node=False)
    name: str = flax.struct.field(pytree_node=False, default="")
    version: int | str = flax.struct.field(pytree_node=False, default=1)
    arrays: tuple = ()


def apply(
    processor: LogitsProcessor,
    logits: Float[Array, "B T V"],
    text: KnownText,
    ancestors: Ancestors | None,
) -> Float[Array, "B T V"]:
    """To each row with its text."""
    B, T = logits.shape[:2]
    if ancestors is None:
        drafted, depth = jnp.zeros((B, T, 0), jnp.int32), jnp.zeros((B, T), jnp.int32)
    else:
        drafted = ancestors[0]
        depth = jnp.sum(ancestors[1] != NEVER_SEEN, axis=2, dtype=jnp.int32)

    arrays = jax.tree.map(jnp.asarray, processor.arrays)

    def one(logits, drafted, depth, tokens, length):
        at = length + jnp.arange(drafted.shape[0], dtype=jnp.int32)
        tokens = tokens.at[at].set(drafted, mode="drop")
        found = processor.function(logits, tokens, length + depth, *arrays)
        return jnp.asarray(found, logits.dtype)

    of_rows = jax.vmap(one, in_axes=(0, 0, 0, None, None))
    return jax.vmap(of_rows)(logits, drafted, depth, text.tokens, text.length)


def check_processors(
    given: Any, vocab_size: int, capacity: int, dtype: Any
) -> tuple[LogitsProcessor, ...]:
    """One, several or none; ValueError or TypeError for what cannot run in a step."""
    several = given if isinstance(given, list | tuple) else () if given is None else (given,)
    wanted = "a tsjax.LogitsProcessor, a function (logits, tokens, length) -> logits, or a list"
    found = []
    for one in several:
        if not isinstance(one, LogitsProcessor):
            if not callable(one):
                raise BadType(f"logits_processor={one!r:.80} is not valid: {wanted}")
            one = LogitsProcessor(one)
        _check_processor(one, vocab_size, capacity, dtype)
        found.append(one)
    return tuple(found)


def _check_processor(one: LogitsProcessor, vocab_size: int, capacity: int, dtype: Any) -> None:
    check(isinstance(one.name, str), "name", one.name, "a text, the processor's name")
    known = isinstance(one.version, int | str) and not isinstance(one.version, bool)
    check(known, "version", one.version, "a number or a text, the processor's version")
    name = f"logits_processor {one.name or _name_of(one.function)!r}"
    try:
        hash(one.function)
    except TypeError as error:
        wanted = (
            "a function that can be hashed, as programs are kept by it (a frozen dataclass can)"
        )
        raise BadType(f"{name} is not valid: {wanted}") from error
    like = jax.ShapeDtypeStruct((vocab_size,), dtype)
    text = jax.ShapeDtypeStruct((capacity,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    rows = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in (like, *text)]
    try:
        out = jax.eval_shape(one.function, like, *text, *one.arrays)
        # As a step runs it: of many rows at once.
        many = jax.vmap(one.function, in_axes=(0, 0, 0, *[None] * len(one.arrays)))
        jax.eval_shape(many, *rows, *one.arrays)
    except Exception as error:  # of whatever kind: the function is the user's
        why = " ".join(str(error).split())[:300]
        raise BadValue(
            f"{name} is not valid: it has to take (logits [{vocab_size}], tokens, length"
            f"{', *arrays' if one.arrays else ''}) and to be traceable by JAX, under vmap; it "
            f"raised {type(error).__name__}: {why}"
        ) from error
    shape, kind = getattr(out, "shape", None), getattr(out, "dtype", None)
    floats = kind is not None and jnp.issubdtype(kind, jnp.floating)
    if shape != (vocab_size,) or not floats:
        given = f"shape {shape} and type {kind}" if shape is not None else f"{out!r:.80}"
        raise BadValue(f"{name} gave {given}: it has to give logits, {vocab_size} floats")


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", repr(function))


def named(processors: Sequence[LogitsProcessor]) -> list[list[Any]]:
    """What a saved run says of them. ValueError for one without a name."""
    for one in processors:
        if not one.name:
            raise BadValue(
                "save_to is not valid with a logits_processor without a name: a run that is "
                f"resumed needs the same; tsjax.LogitsProcessor({_name_of(one.function)}, "
                "name=..., version=1)"
            )
    return [[one.name, one.version] for one in processors]


# --- ready ones ---------------------------------------------------------------------------------

# What a processor takes.
Logits = Float[Array, "V"]
Tokens = Int[Array, "C"]
Length = Int[Array, ""]


def token_bias(biases: Mapping[int, float], vocab_size: int) -> LogitsProcessor:
    """Adds to the logits of tokens: what others call logit_bias. -inf bars a token.

    It comes after the penalties; HuggingFace's sequence_bias comes before them.

    Args:
      biases: token id -> what is added.
      vocab_size: the model's, `model.cfg.vocab_size`.
    """
    wanted = "token ids with numbers, -inf to bar one"
    check(isinstance(biases, Mapping), "token_bias", biases, wanted)
    values = np.zeros((vocab_size,), np.float32)
    for token, bias in biases.items():
        check_int(token, "a token of token_bias", 0, vocab_size - 1)
        check(
            isinstance(bias, int | float | np.number) and bias < np.inf, "token_bias", bias, wanted
        )
        values[token] = bias
    return LogitsProcessor(_add_bias, "token_bias", _digest(values), (values,))


def allowed_tokens(tokens: Sequence[int], vocab_size: int) -> LogitsProcessor:
    """Bars all tokens but these. To let a text end, name its stop tokens, too."""
    check(len(tokens) > 0, "allowed_tokens", tokens, "at least one token id")
    mask = np.zeros((vocab_size,), bool)
    for token in tokens:
        check_int(token, "a token of allowed_tokens", 0, vocab_size - 1)
        mask[token] = True
    return LogitsProcessor(_allow, "allowed_tokens", _digest(mask), (mask,))


def bad_words(words: Sequence[Sequence[int]], vocab_size: int) -> LogitsProcessor:
    """Bars the last token of each word after its others: HuggingFace's bad_words_ids, but that
    a stop token which is named is barred as well.

    Args:
      words: each a row of token ids. A word within a sentence is often another token than at its
        beginning: name both.
      vocab_size: the model's.
    """
    wanted = "at least one word, and each a row of token ids"
    rows = len(words) > 0 and all(np.ndim(word) == 1 for word in words)
    check(rows, "bad_words", words, wanted)
    longest = max(map(len, words))
    table = np.full((len(words), longest), NO_TOKEN, np.int32)
    for row, word in zip(table, words, strict=True):
        check(len(word) > 0, "bad_words", word, "words of at least one token")
        for token in word:
            check_int(token, "a token of bad_words", 0, vocab_size - 1)
        row[longest - len(word) :] = word
    return LogitsProcessor(_bar_words, "bad_words", _digest(table), (table,))


def _add_bias(logits: Logits, tokens: Tokens, length: Length, values: Logits) -> Logits:
    return logits + values.astype(logits.dtype)


def _allow(logits: Logits, tokens: Tokens, length: Length, mask: Bool[Array, "V"]) -> Logits:
    return jnp.where(mask, logits, -jnp.inf)


def _bar_words(
    logits: Logits, tokens: Tokens, length: Length, words: Int[Array, "words longest"]
) -> Logits:
    before = words.shape[1] - 1
    at = length + jnp.arange(-before, 0, dtype=jnp.int32)
    last = jnp.where(at >= 0, tokens[jnp.maximum(at, 0)], NO_TOKEN)
    wanted = words[:, :before]
    complete = jnp.all((wanted == last) | (wanted == NO_TOKEN), axis=1)
    lowest = jnp.where(complete, -jnp.inf, jnp.inf).astype(logits.dtype)
    return logits.at[words[:, before]].min(lowest)


def _digest(values: np.ndarray) -> str:
    """A version that tells other values from these."""
    return hashlib.sha256(f"{values.shape}".encode() + values.tobytes()).hexdigest()[:16]

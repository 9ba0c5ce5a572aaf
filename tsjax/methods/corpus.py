# SPDX-License-Identifier: Apache-2.0
"""Earlier texts to draft from, and the index that finds where the last tokens stood in them.

Knows rows of token ids. Does not know files, text or models. The index is made once on the host; a
lookup on the device reads a few places of it, however large the corpus is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.checks import check
from tsjax.base.typing import Array, Int
from tsjax.methods.history import leading
from tsjax.model.sharding import everywhere, mesh_of

ORDERS = (8, 4, 2)  # lengths of the matches that are looked up
WAYS = 2  # places of each, the latest ones
PLACES = len(ORDERS) * WAYS
MOST_TOKENS = 2**24  # the latest ones are kept
LEAST_TOKENS = 1024
END = -1  # between two rows: no token
MULTIPLIER = 0x9E3779B1


class CorpusIndex(flax.struct.PyTreeNode):
    """Rows of tokens one after another, and for each order a table of places.

    A table has as many buckets as there are tokens, by a hash of the last tokens of a match; in
    each lie the places of the last of them, the latest WAYS ones. Two matches may share a bucket,
    so a place has to be compared. 0, where no match can end, is no place.
    """

    tokens: Any  # [N] int32
    tables: tuple[Any, ...]  # [N, WAYS] int32


class Corpus:
    """Earlier texts that LikelyTree and Auto draft from: outputs for the same prompt, templates.

    Where the last tokens of a run stand in it, what followed there is drafted. It changes no token.
    Its size, rounded up to a power of two, is part of what a step is compiled for; beyond 2**24
    tokens the first ones are left out.

    Args:
      rows: rows of token ids, each a text of its own, such as `GenerationResult.tokens` with their
        prompts before them.
    """

    def __init__(self, rows: Iterable[Any]):
        self.rows = tuple(_row(row) for row in rows)
        check(any(map(len, self.rows)), "rows", "nothing", "one row of token ids or more")
        self.index = _index(self.rows)

    def __repr__(self) -> str:
        return f"Corpus({len(self.rows)} rows, {sum(map(len, self.rows)):,} tokens)"

    def __add__(self, other: Corpus) -> Corpus:
        return Corpus(self.rows + other.rows) if isinstance(other, Corpus) else NotImplemented

    def on(self, like: jax.Array) -> CorpusIndex:
        """The index where the array `like` lies, whole on each device of its mesh."""
        mesh = mesh_of(like)
        return jax.device_put(self.index, like.sharding if mesh is None else everywhere(mesh))

    @property
    def nbytes(self) -> int:
        """Of the index, on each device."""
        return sum(array.nbytes for array in jax.tree.leaves(self.index))

    @property
    def largest(self) -> int:
        """The largest token id."""
        return max(int(row.max(initial=0)) for row in self.rows)


def _row(row: Any) -> np.ndarray:
    found = np.asarray(row)
    is_row = found.ndim == 1 and (found.size == 0 or np.issubdtype(found.dtype, np.integer))
    check(is_row, "rows", row, "rows of token ids")
    check(bool((found >= 0).all() and (found < 2**31).all()), "rows", row, "token ids of 0 or more")
    return found.astype(np.int32)


def _index(rows: tuple[np.ndarray, ...]) -> CorpusIndex:
    """NumPy's, so that no program is compiled to make it."""
    ended = [part for row in rows for part in (np.asarray([END], np.int32), row)]
    tokens = np.concatenate(ended)[-MOST_TOKENS:]
    size = max(LEAST_TOKENS, 1 << (len(tokens) - 1).bit_length())
    tables = tuple(_table(tokens, order, size) for order in ORDERS)
    return CorpusIndex(np.pad(tokens, (0, size - len(tokens)), constant_values=END), tables)


def _table(tokens: np.ndarray, order: int, size: int) -> np.ndarray:
    table = np.zeros((size, WAYS), np.int32)
    if len(tokens) <= order:
        return table
    windows = np.lib.stride_tricks.sliding_window_view(tokens, order)
    ends = np.arange(order - 1, len(tokens))
    whole = (windows != END).all(axis=1)
    windows, ends = windows[whole], ends[whole]
    buckets = bucket_of(windows[:, ::-1].T.astype(np.uint32), size, np).astype(np.int64)
    sort = np.argsort(buckets, kind="stable")
    buckets, ends = buckets[sort], ends[sort]
    # How many of the same bucket come later.
    last = np.searchsorted(buckets, buckets, side="right") - 1
    later = last - np.arange(len(buckets))
    kept = later < WAYS
    table[buckets[kept], later[kept]] = ends[kept]
    return table


def bucket_of(recent: Any, size: int, numpy: Any = jnp) -> Any:
    """Of unsigned tokens, the newest first; `size` is a power of two."""
    number = numpy.zeros_like(recent[0])
    for token in recent:
        number = (number + token + numpy.uint32(1)) * numpy.uint32(MULTIPLIER)
    return number >> numpy.uint32(32 - (size.bit_length() - 1))


def places_in(corpus: CorpusIndex, recent: Int[Array, "B L"]) -> Int[Array, "B places"]:
    """Where the last tokens may have stood, see `history.last_tokens`; 0 for nowhere.

    A place that an order before has found too is left out.
    """
    size, found = corpus.tokens.shape[0], []
    for order, table in zip(ORDERS, corpus.tables, strict=True):
        newest = [recent[:, i].astype(jnp.uint32) for i in range(order)]
        places = table[bucket_of(newest, size).astype(jnp.int32)]  # [B, WAYS]
        for earlier in found:
            known = jnp.any(places[:, :, None] == earlier[:, None], axis=2)
            places = jnp.where(known, 0, places)
        found.append(places)
    return jnp.concatenate(found, axis=1)


def match_sizes_in(
    corpus: CorpusIndex, recent: Int[Array, "B L"], places: Int[Array, "B P"]
) -> Int[Array, "B P"]:
    """How many tokens before and at each place equal the `recent` ones."""
    wanted = jnp.where(recent < 0, END - 1, recent)[:, None]
    return leading(
        (places > 0) & (corpus.tokens[jnp.maximum(places - i, 0)] == wanted[:, :, i])
        for i in range(recent.shape[1])
    )


def what_followed_in(
    corpus: CorpusIndex, places: Int[Array, "B P"], limit: int
) -> tuple[Int[Array, "B P {limit}"], Int[Array, "B P"]]:
    """The tokens after each place, and how many of them come before the text's end."""
    steps = jnp.arange(1, limit + 1, dtype=jnp.int32)[None, None]
    at = jnp.minimum(places[..., None] + steps, corpus.tokens.shape[0] - 1)
    tokens = corpus.tokens[at]
    here = jnp.cumprod((tokens != END).astype(jnp.int32), axis=2)
    return jnp.maximum(tokens, 0), jnp.sum(here, axis=2, dtype=jnp.int32)

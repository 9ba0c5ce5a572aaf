# SPDX-License-Identifier: Apache-2.0
"""What LikelyTree drafts from: the text, earlier texts, passes of the model and its heads.

Knows the paths that each offers, and of what kind each token of them is. Does not know how often a
kind is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax.numpy as jnp

from tsjax.base.errors import BadValue
from tsjax.base.typing import Array, Float, Int
from tsjax.decoding.state import DecodeState
from tsjax.decoding.tree import SOURCES, shared
from tsjax.methods.corpus import CorpusIndex, match_sizes_in, places_in, what_followed_in
from tsjax.methods.history import NgramTable, last_tokens, longest_match, match_sizes, what_followed
from tsjax.methods.model_drafts import Candidates
from tsjax.methods.paths import Paths, of_kinds
from tsjax.methods.rates import (
    GAPS,
    HEAD_AXES,
    KINDS,
    LAYER_AXES,
    LONGEST,
    NO_DRAFT,
    PASS_AXES,
    SHARES,
    TEXT_AXES,
    WIDE_GAPS,
    between,
    kind_number,
)

LIKELY_SOURCES = (*SOURCES, "corpus")
CHILDREN = 3  # candidates of a pass
HEAD_CHILDREN = (3, 3, 3, 1)  # candidates of each head
VOTE = 4.0  # how many times more a match counts that is a token longer


def from_text(state: DecodeState, table: NgramTable, places: int, depth: int) -> list[Paths]:
    """What followed where the text stood before as it stands now: after the longest match, and at
    the latest places of the last token."""
    root, tokens, length = state.root, state.tokens, state.length
    b = jnp.arange(root.shape[0])
    longest, size = longest_match(tokens, length)
    found, count = table.places[b, root], table.counts[b, root]
    sizes = match_sizes(tokens, last_tokens(tokens, length), found)
    counts = jnp.arange(places)[None] < count[:, None]
    counts &= (found < length[:, None] - 1) & (found != longest[:, None])
    found = jnp.concatenate([longest[:, None], found], axis=1)
    sizes = jnp.concatenate([size[:, None], jnp.where(counts, sizes, 0)], axis=1)
    followed = what_followed(tokens, length, found, depth)
    lengths = jnp.where(sizes > 0, depth, 0)
    kinds = kinds_of_text(followed, lengths, sizes, state, KINDS.text)
    return [
        Paths(followed[:, :1], lengths[:, :1], "suffix", kinds[:, :1]),
        Paths(followed[:, 1:], lengths[:, 1:], "ngrams", kinds[:, 1:]),
    ]


def from_corpus(state: DecodeState, corpus: CorpusIndex | None, depth: int) -> Paths:
    """What followed where earlier texts stood as the text stands now."""
    if corpus is None:
        raise BadValue(
            "corpus=True needs params with a corpus: tsjax.generate(..., corpus=...) adds one"
        )
    recent = last_tokens(state.tokens, state.length)
    places = places_in(corpus, recent)
    sizes = match_sizes_in(corpus, recent, places)
    followed, left = what_followed_in(corpus, places, depth)
    lengths = jnp.where(sizes > 0, left, 0)
    kinds = kinds_of_text(followed, lengths, sizes, state, KINDS.corpus)
    return Paths(followed, lengths, LIKELY_SOURCES[-1], kinds)


def kinds_of_text(
    followed: Int[Array, "B R J"],
    lengths: Int[Array, "B R"],
    sizes: Int[Array, "B R"],
    state: DecodeState,
    first: int,
) -> Int[Array, "B R J"]:
    """By the longest match that goes on like this, its share among all, and the penalty.

    The first `lengths` tokens of each path count; `sizes` are those of the matches before them.
    """
    depth = followed.shape[2]
    steps = jnp.arange(depth, dtype=jnp.int32)[None, None]
    weights = jnp.where(sizes > 0, VOTE ** jnp.minimum(sizes, 12).astype(jnp.float32), 0)
    both = shared(followed, lengths)
    same = both[..., None] > steps[None]  # [B, R, R, J]
    through = jnp.sum(jnp.where(same, weights[:, None, :, None], 0), axis=2)
    longest = jnp.max(jnp.where(same, sizes[:, None, :, None], 0), axis=2) + steps
    every = jnp.broadcast_to(jnp.sum(weights, axis=1)[:, None, None], (*weights.shape, 1))
    share = through / jnp.maximum(jnp.concatenate([every, through[:, :, :-1]], axis=2), 1)
    indices = between(LONGEST, longest), between(SHARES, share), penalised(followed, state)
    kinds = kind_number(first, TEXT_AXES, *indices)
    return jnp.where(steps < lengths[..., None], kinds, NO_DRAFT)


def penalised(tokens: Int[Array, "B R J"], state: DecodeState) -> Int[Array, "B R J"]:
    """Whether a penalty acts on each token, as 0 or 1."""
    if state.sampling.repetition is None or state.last_seen is None:
        return jnp.zeros(tokens.shape, jnp.int32)
    b, window = jnp.arange(tokens.shape[0])[:, None, None], state.sampling.repetition.window
    seen = state.last_seen[b, tokens]
    return (seen >= (state.length - window)[:, None, None]).astype(jnp.int32)


def kinds_of_layer(candidates: Candidates, depth: int) -> Int[Array, "B best_of"]:
    """Of a draft of the one-layer drafter: by its depth, rank, and the gap to the best other."""
    index, gap = jnp.arange(CHILDREN)[None], gaps(candidates.scores)
    kinds = kind_number(KINDS.layer, LAYER_AXES, depth, index, between(GAPS, gap))
    return jnp.where(candidates.possible, kinds, NO_DRAFT)


def best_of_pass(depth: int) -> slice:
    """The kinds of a pass's best candidates."""
    return slice(KINDS.passes, KINDS.passes + PASS_AXES[1])


def best_of_layer(depth: int) -> slice:
    """The kinds of the one-layer drafter's best candidates at a depth."""
    depths, ranks, gaps = LAYER_AXES
    first = KINDS.layer + min(depth, depths - 1) * ranks * gaps
    return slice(first, first + gaps)


def kinds_of_pass(candidates: Candidates, depth: int) -> Int[Array, "B best_of"]:
    """By whether a candidate is the best one, and the gap to the other one, at any depth."""
    index, gap = jnp.arange(CHILDREN)[None], gaps(candidates.scores)
    kinds = kind_number(KINDS.passes, PASS_AXES, index, between(GAPS, gap))
    return jnp.where(candidates.possible, kinds, NO_DRAFT)


def gaps(scores: Float[Array, "B best_of"]) -> Float[Array, "B best_of"]:
    """How far the best score lies above each; of the best one, above the second."""
    other = jnp.concatenate([scores[:, 1:2], scores[:, 1:]], axis=1)
    return jnp.where(other > -jnp.inf, scores[:, :1] - other, jnp.inf)


def from_chain(
    found: list[Candidates], kinds_of: Callable[[Candidates, int], Int[Array, "B best_of"]]
) -> Paths:
    """The path of the best candidates, and the others each as the end of a path."""
    passes, kinds = len(found), [kinds_of(one, depth) for depth, one in enumerate(found)]
    best = jnp.stack([one.tokens[:, 0] for one in found], axis=1)
    of_best = jnp.stack([kind[:, 0] for kind in kinds], axis=1)
    tokens, all_kinds = [best], [of_best]
    for depth, rank_number in itertools.product(range(passes), range(1, CHILDREN)):
        other = found[depth].tokens[:, rank_number]
        tokens.append(best.at[:, depth].set(other))
        ends = jnp.arange(passes)[None] > depth
        path = of_best.at[:, depth].set(kinds[depth][:, rank_number])
        all_kinds.append(jnp.where(ends, NO_DRAFT, path))
    return of_kinds(jnp.stack(tokens, axis=1), jnp.stack(all_kinds, axis=1), "model")


def grid(number: int) -> list[tuple[int, ...]]:
    """The ranks along each path of the heads' candidates."""
    return list(itertools.product(*map(range, HEAD_CHILDREN[:number])))


def from_heads(ranked: list[Candidates]) -> Paths:
    """Every combination of the heads' candidates: none knows which one came before it."""
    tokens, kinds, of_depth = [], [], []
    for depth, one in enumerate(ranked):
        index, gap = jnp.arange(one.tokens.shape[1])[None], gaps(one.scores)
        kind = kind_number(KINDS.heads, HEAD_AXES, depth, index, between(WIDE_GAPS, gap))
        of_depth.append(jnp.where(one.possible, kind, NO_DRAFT))
    for path in grid(len(ranked)):
        tokens.append(jnp.stack([one.tokens[:, r] for one, r in zip(ranked, path, strict=True)], 1))
        kinds.append(jnp.stack([one[:, r] for one, r in zip(of_depth, path, strict=True)], 1))
    return of_kinds(jnp.stack(tokens, axis=1), jnp.stack(kinds, axis=1), "model")


def heads_after(chain: Paths, ranked: list[Candidates]) -> Paths:
    """What the heads offer after the first path of `chain`."""

    def joined(first: Int[Array, "B R J"], others: Int[Array, "B R2 J2"]) -> Int[Array, "B R2 J3"]:
        first = jnp.broadcast_to(first[:, :1], (*others.shape[:2], first.shape[2]))
        return jnp.concatenate([first, others], axis=2)

    heads = from_heads(ranked)
    assert chain.kinds is not None and heads.kinds is not None
    tokens, kinds = joined(chain.tokens, heads.tokens), joined(chain.kinds, heads.kinds)
    return of_kinds(tokens, kinds, "model")

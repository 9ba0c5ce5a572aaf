# SPDX-License-Identifier: Apache-2.0
"""Drafts: what might come next, as a tree of tokens.

Knows the model, its heads, the partial cache and the text so far. Does not know how a draft is
judged; nothing here can change the tokens that are returned, only how many a step finds.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.sampling import WHOLE_CONTEXT, best_few, score
from tsjax.decoding.state import DecodeState
from tsjax.decoding.tree import SOURCES, DraftTree, merge_paths
from tsjax.methods.history import enter, longest_suffix, most_frequent
from tsjax.model.cache import DraftCache, summarize_rest, write_rows
from tsjax.model.control_flow import run_if
from tsjax.model.heads import run_heads
from tsjax.model.params import Params
from tsjax.model.passes import Rows, run_rows
from tsjax.model.transformer import final_norm, unembed


def draft(
    params: Params, state: DecodeState, noise, *, cfg: DecodeConfig
) -> tuple[DecodeState, DraftTree]:
    """The tree of one step: paths from the model, from frequent n-grams and from a suffix match.

    `noise` [B, cfg.draft_levels, V] is that of the positions from state.length on. Of the state
    only unspecified slots of the draft cache change.
    """
    with jax.named_scope("draft"):
        method, J, B = cfg.method, cfg.draft_depth, state.tokens.shape[0]
        suffix, groups = _Paths.none(B, J), []
        alone = jnp.zeros((B,), bool)  # rows that draft what followed a long match, no more
        if J and method.suffix_length:
            tokens, count, matched = longest_suffix(
                state.tokens, state.length, method.suffix_length
            )
            count = jnp.where(matched >= method.suffix_match, count, 0)
            suffix = _Paths(tokens[:, None], count[:, None], "suffix")
            if cfg.suffix_alone:
                alone = (count > 0) & (matched >= cfg.suffix_alone)
        best = state.root
        if cfg.draft_levels:
            passes_run = jnp.any(state.running & ~alone)
            state, ranked = _model_tokens(params, state, noise, passes_run, cfg=cfg)
            best = ranked[0].tokens[:, 0]
            groups.append(_tree_paths(ranked, cfg))
        if state.draft.ngrams is not None:
            following, exists = most_frequent(state.draft.ngrams, best, method.num_ngrams)
            if cfg.ngrams_follow_draft:
                first = jnp.broadcast_to(best[:, None, None], (*exists.shape, 1))
                following = jnp.concatenate([first, following], axis=2)
            groups.append(_Paths(following, cfg.ngram_depth * exists, "ngrams"))
        groups = [suffix, *(group.unless(alone) for group in groups)]
        groups = [group.padded(J) for group in groups]
        tree = merge_paths(
            state.root,
            jnp.concatenate([group.tokens for group in groups], axis=1),
            jnp.concatenate([group.lengths for group in groups], axis=1),
            [SOURCES.index(g.source) for g in groups for _ in range(g.tokens.shape[1])],
            width=cfg.tree_width,
        )
        return state, tree


def remember(state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
    """Enters the n-grams that have become old enough since the last step; at first, the prompt's.

    The repetition penalty makes what was said within its window less likely, so n-grams wait until
    they have left it.
    """
    if state.draft.ngrams is None:
        return state
    delay = cfg.method.ngram_delay
    if delay is None:
        values = state.sampling
        limited = values.repetition_window < WHOLE_CONTEXT
        delay = jnp.where((values.repetition_penalty > 1) & limited, values.repetition_window, 0)
    known = jnp.where(state.running, state.length - delay, 0)
    ngrams = enter(state.draft.ngrams, state.tokens, known)
    return state.replace(draft=state.draft.replace(ngrams=ngrams))


class _Ranked(flax.struct.PyTreeNode):
    """The candidates of one depth, best first, and which of them may be drafted at all."""

    tokens: jax.Array  # [B, cfg.best_of]
    possible: jax.Array  # [B, cfg.best_of]


@dataclasses.dataclass
class _Paths:
    """Paths of one source: tokens [B, R, depth] of which the first `lengths` [B, R] count."""

    tokens: jax.Array
    lengths: jax.Array
    source: str

    @classmethod
    def none(cls, batch: int, depth: int) -> _Paths:
        tokens = jnp.zeros((batch, 0, depth), jnp.int32)
        return cls(tokens, jnp.zeros((batch, 0), jnp.int32), SOURCES[0])

    def unless(self, rows) -> _Paths:
        """Without the paths of the batch rows `rows` [B]."""
        return dataclasses.replace(self, lengths=jnp.where(rows[:, None], 0, self.lengths))

    def padded(self, depth: int) -> _Paths:
        missing = depth - self.tokens.shape[2]
        tokens = jnp.pad(self.tokens, ((0, 0), (0, 0), (0, missing)))
        return dataclasses.replace(self, tokens=tokens)


def _tree_paths(ranked: list[_Ranked], cfg: DecodeConfig) -> _Paths:
    """The leaves of the static tree with the ranked tokens of each depth filled in."""
    nodes = cfg.tree_paths or ((0,),)
    parents = {path[:-1] for path in nodes}
    leaves = [path for path in nodes if path not in parents]
    tokens, lengths = [], []
    for path in leaves:
        row = [ranked[depth].tokens[:, rank] for depth, rank in enumerate(path)]
        possible = [ranked[depth].possible[:, rank] for depth, rank in enumerate(path)]
        row += [jnp.zeros_like(row[0])] * (len(ranked) - len(path))
        tokens.append(jnp.stack(row, axis=1))
        # A path ends before its first token that truncation has removed.
        lengths.append(jnp.sum(jnp.cumprod(jnp.stack(possible, 1), 1), 1, dtype=jnp.int32))
    return _Paths(jnp.stack(tokens, axis=1), jnp.stack(lengths, axis=1), "heads")


def _model_tokens(params: Params, state: DecodeState, noise, passes_run, *, cfg: DecodeConfig):
    """Candidates for each depth that the model drafts: the state, and one _Ranked per depth.

    Where the scalar `passes_run` is false the passes are left out, and no candidate is possible.
    """
    root = state.root[:, None]
    if not cfg.draft_passes:
        heads, hidden = params.heads[: cfg.draft_levels], state.draft.hidden
        assert hidden is not None
        normed = run_heads(heads, hidden, cfg=cfg.model)
        return state, _rank(params, state, normed, root, noise, cfg=cfg)

    def run(carry, root, noise):
        return _run_passes(params, state, carry[0], root, noise, cfg=cfg)

    shape = (root.shape[0], cfg.best_of)
    none = _Ranked(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
    carry = state.draft.cache, [none] * cfg.draft_levels
    if cfg.suffix_alone:
        cache, ranked = run_if(passes_run, run, carry, root, noise)
    else:
        cache, ranked = run(carry, root, noise)
    return state.replace(draft=state.draft.replace(cache=cache)), ranked


def _run_passes(params: Params, state: DecodeState, cache, best, noise, *, cfg: DecodeConfig):
    """The draft cache with the drafts' rows behind its length, and one _Ranked per depth.

    `best` [B, 1 + depth] are the root and the best drafts behind it.
    """
    passes, ranked, alone = cfg.draft_passes, [], jnp.ones((1, 1), bool)
    heads = params.heads[: cfg.draft_levels - passes]
    rest = summarize_rest(cache) if cfg.summarizes_rest else ()
    for depth in range(passes):
        known = cache.replace(length=cache.length + depth)
        positions = state.kv.length[:, None] + depth
        rows = run_rows(
            params.model, known, best[:, -1:], positions, alone, cfg=cfg.model, rest=rest
        )
        normed = final_norm(params.model, rows.hidden, cfg=cfg.model)
        if depth < passes - 1:
            cache = _remember_draft(cache, rows, known.length, jnp.any(state.running))
        elif heads:
            behind = run_heads(heads, rows.hidden[:, 0], cfg=cfg.model)
            normed = jnp.concatenate([normed, behind], axis=1)
        ranked += _rank(params, state, normed, best, noise, cfg=cfg)
        best = jnp.concatenate([best, ranked[depth].tokens[:, :1]], axis=1)
    return cache, ranked


def _remember_draft(cache: DraftCache, rows: Rows, start, wanted) -> DraftCache:
    """Writes a draft's row at the slots `start` [B], in place.

    In a loop, as XLA would merge the write with each reader of the cache and copy it for that.
    """

    def write(cache, rows, start):
        return write_rows(cache, rows.k, rows.v, start, after=rows.hidden)

    return run_if(wanted, write, cache, rows, start)


def _rank(params: Params, state: DecodeState, normed, best, noise, *, cfg: DecodeConfig):
    """Candidates by the drafts' logits, processed as the model's own will be.

    `normed` [B, n, D] are the states for the n tokens behind `best` [B, 1 + depth], the root and
    what is drafted so far. The penalty sees these tokens, and the best ones of the n in turn.
    """
    if not cfg.method.noise_coupled:
        noise = jnp.zeros_like(noise)
    logits = unembed(params.model, normed, cfg=cfg.model)
    ranked = []
    for index in range(normed.shape[1]):
        depth = best.shape[1] - 1
        ancestors = None
        if depth:
            positions = state.length[:, None] + jnp.arange(depth, dtype=jnp.int32)
            ancestors = best[:, None, 1:], positions[:, None]
        scores = score(
            logits[:, index : index + 1],
            state.last_seen,
            jnp.full((best.shape[0], 1), depth, jnp.int32),
            state.length,
            state.prompt_length,
            noise,
            state.sampling,
            ancestors,
        )
        values, tokens = best_few(scores[:, 0], cfg.best_of)
        ranked.append(_Ranked(tokens, values > -jnp.inf))
        best = jnp.concatenate([best, tokens[:, :1]], axis=1)
    return ranked

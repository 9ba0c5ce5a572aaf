# SPDX-License-Identifier: Apache-2.0
"""TokenSwift (arXiv 2502.18890): a tree of drafts from the model and its heads, and n-grams.

Knows the model, its heads, the partial cache and the text so far. Does not know how a draft is
judged.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from tsjax.base.checks import check, check_fields, check_int, one_of
from tsjax.base.errors import BadValue
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Bool, Float
from tsjax.decoding.method import DraftPasses, Noise, Promise, Sizes
from tsjax.decoding.state import DecodeState
from tsjax.decoding.tree import DraftTree
from tsjax.methods.cost_model import Costs
from tsjax.methods.history import MATCH_LIMIT, NgramTable
from tsjax.methods.model_drafts import (
    PASS_IS_RIGHT,
    PASS_WITH_REST_IS_RIGHT,
    SHARE_AMONG,
    Candidates,
    Drafter,
    heads_are_right,
    newest,
    no_candidates,
    weights_for,
)
from tsjax.methods.ngram import FEWER, PAPER, NGram
from tsjax.methods.on_partial_cache import OnPartialCache
from tsjax.methods.partial_cache import DraftCache
from tsjax.methods.paths import Paths, as_tree, as_tuples
from tsjax.model.control_flow import run_if
from tsjax.model.params import Params

DRAFT_FROM = ("partial_cache", "verified_state")
MOST_NODES = 4096  # of a tree
Path = tuple[int, ...]  # the rank of each token of a draft among the candidates of its depth
# Of a tree that is left open, the paper's last: children of every node at each depth.
TREES = ((1,), (1, 1), (1, 1, 1, 1), (1, 2, 2, 1), (1, 3, 3, 3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSwift(NGram, OnPartialCache):
    """TokenSwift (arXiv 2502.18890): a tree of drafts from the model and its heads, and n-grams.

    `TokenSwift.paper()` has the numbers of the paper, made for a GPU. What is None is open, as for
    NGram: the tree too, which then follows the price of rows.

    Attributes:
      tree: the shape of the model's drafts. (1, 3, 3, 3) is the number of children of every node at
        each depth; ((0,), (0, 0), (0, 1), (1,)) names every node by its path of ranks: (0, 1) is
        the second best token after the best. () is no tree. A tree deeper than what the model
        drafts is cut: partial_cache drafts draft_passes + heads tokens, verified_state one for
        each head.
      draft_from: "partial_cache" runs the model on a small part of the cache and the heads on its
        result, as the paper; n-grams then begin with the best drafted token. "verified_state"
        gives the heads the verified hidden state that the step before ended with, which costs no
        pass of the model; n-grams begin with the last token.
      draft_passes: passes on the partial cache per step, each of which drafts one token deeper.
      draft_budget: slots of the partial cache per layer and kv head.
      draft_choice: which tokens are in it beside the sinks. "importance", the paper's: those whose
        keys the newest token's query asks for most. "retrieval": chunks of 8 tokens by their mean
        key (TriForce). "streaming": the newest ones (StreamingLLM). "snapkv": those that the last
        32 tokens attend to most, and these 32 (SnapKV). "all": every token, whatever the budget.
      num_sinks: first tokens of the text that always stay in it.
      draft_refresh: new tokens after which its tokens are chosen again; None is when new ones have
        displaced all but the sinks, as in the paper; with "never" they are chosen once in a run,
        and the oldest new ones then make room. The fewer, the more
        drafts are right; each choice reads all keys.
      draft_rest: passes on the partial cache also see the tokens that are not in it, summed up as
        one slot for each query head: what the last verified token saw of them. More drafts are
        right, for one more reading of the partial cache per step. Not in the paper.
      suffix_alone: where this many tokens or more match, what followed them is a row's only draft,
        and where all rows have one, the passes on the partial cache are left out; 0 for never.
      draft_weights: "model", or "int8" for passes on the partial cache, and logits of the heads,
        with a copy of the model's matrices in int8: they read half the bytes of 16-bit types, which
        the copy takes in memory beside the model. About as many drafts are right.
      noise_coupled: rank the model's draft tokens with the noise of their positions. Off, drafts
        are the most probable tokens, which sampling then chooses less often; the tokens that are
        returned are the same.
    """

    tree: tuple[int, ...] | tuple[Path, ...] | None = None
    draft_from: str = "partial_cache"
    draft_passes: int = 1
    draft_budget: int = 4096
    draft_choice: str = "importance"
    num_sinks: int = 16
    draft_refresh: int | str | None = None
    draft_rest: bool = False
    suffix_alone: int = 0
    draft_weights: str = "model"
    noise_coupled: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_fields(self, may_be_0=("num_ngrams", "suffix_length", "num_sinks", "suffix_alone"))
        object.__setattr__(self, "tree", as_tuples(self.tree))
        for name in ("tree", "draft_from"):
            chosen = getattr(self, name) != "auto"
            check(chosen, name, "auto", "left to tsjax.Auto(), which chooses")
        tree_paths(self.setting("tree"))
        check(self.draft_from in DRAFT_FROM, "draft_from", self.draft_from, one_of(DRAFT_FROM))
        check_int(self.draft_passes, "draft_passes", 1, 64)
        self.check_cache()
        check_int(self.suffix_alone, "suffix_alone", 0, MATCH_LIMIT)

    @classmethod
    def _papers(cls) -> dict[str, Any]:
        return {**PAPER, "tree": TREES[-1]}

    def _choices(self) -> dict[str, tuple[Any, ...]]:
        return {**super()._choices(), "num_ngrams": (0, *FEWER["num_ngrams"]), "tree": TREES}

    def plan(self, model: ModelConfig) -> TreePlan:
        """What these settings come to with a model's heads."""
        heads, partial = model.num_draft_heads, self.draft_from == "partial_cache"
        if not partial and not heads and self.setting("tree"):
            raise BadValue(
                "draft_from='verified_state' needs draft heads, and the model has none: load some "
                "with tsjax.load(..., heads=...), or use draft_from='partial_cache' or "
                "method='ngram', which need no heads"
            )
        reach = heads + (self.draft_passes if partial else 0)
        paths = tuple(path for path in tree_paths(self.setting("tree")) if len(path) <= reach)
        known = all(rank < model.vocab_size for path in paths for rank in path)
        below = f"ranks and children below the vocabulary size {model.vocab_size}"
        check(known, "tree", self.setting("tree"), below)
        follow = self.setting("num_ngrams") > 0 and partial
        levels = max(max(map(len, paths), default=0), int(follow))
        passes = min(self.draft_passes, levels) if partial else 0
        return TreePlan(
            paths=paths,
            levels=levels,
            best_of=1 + max((rank for path in paths for rank in path), default=0),
            passes=passes,
            ngrams_follow=follow,
            rest=passes > 0 and self.draft_rest,
            suffix_alone=self.suffix_alone if passes and self.setting("suffix_length") else 0,
        )

    def sizes(self, model: ModelConfig) -> Sizes:
        plan = self.plan(model)
        ngram_depth = self.ngram_depth + (1 if plan.ngrams_follow else 0)
        nodes = set(plan.paths) | ({(0,)} if plan.ngrams_follow else set())
        drafted = len(nodes) + self.setting("num_ngrams") * self.ngram_depth
        suffix = self.setting("suffix_length")
        never_both = 0 < plan.suffix_alone <= self.suffix_match
        return Sizes(
            width=1 + (max(drafted, suffix) if never_both else drafted + suffix),
            depth=max(plan.levels, ngram_depth, suffix),
            levels=plan.levels,
            narrower=self.setting("pass_widths"),
            positions=max(plan.levels, ngram_depth),
            with_attended=plan.rest,
        )

    def promise(self, model: ModelConfig, costs: Costs, context: float) -> Promise:
        plan, in_int8 = self.plan(model), self.wants_int8
        found = sum(itertools.accumulate(self._rates(model), lambda a, b: a * b))
        promise = self._promise_beside(found, 1 + len(plan.paths), model, costs, context)
        drafting = self.pass_seconds(costs, context, plan.passes) if plan.passes else 0.0
        seconds = promise.seconds + drafting * (1 - self._repeats if plan.suffix_alone else 1)
        if plan.passes:
            seconds += self.choice_seconds(costs, context, promise.tokens)
        heads = costs.of_heads(in_int8) if plan.levels > plan.passes else 0.0
        return promise._replace(
            seconds=seconds + heads,
            passes=plan.passes,
            positions=self.sizes(model).positions,
            drafting=(DraftPasses(plan.passes, self.slots_at(context), model, in_int8),),
        )

    def _rates(self, model: ModelConfig) -> list[float]:
        """How often the draft of each depth is right when all before it were."""
        plan = self.plan(model)
        heads = heads_are_right(model, model.num_draft_heads, self.draft_from == "partial_cache")
        best_of = [0] * (plan.passes + len(heads))  # candidates at each depth
        for path in plan.paths:
            best_of[len(path) - 1] = max(best_of[len(path) - 1], 1 + path[-1])
        among = [
            SHARE_AMONG[max(min(few, len(SHARE_AMONG)), 1) - 1] for few in best_of[plan.passes :]
        ]
        passes = [PASS_WITH_REST_IS_RIGHT if plan.rest else PASS_IS_RIGHT] * plan.passes
        found = passes + [share * head for share, head in zip(among, heads, strict=True)]
        return found[: plan.levels]

    def init(self, model: ModelConfig, batch: int, capacity: int, mesh: Any) -> Recalled:
        plan, cache, hidden = self.plan(model), None, None
        if plan.passes:
            cache = self.new_cache(model, batch, capacity, mesh, room=plan.passes - 1)
        elif plan.levels:
            hidden = jnp.zeros((batch, model.embed_dim), model.dtype)
        ngrams = super().init(model, batch, capacity, mesh)
        return Recalled(cache=cache, hidden=hidden, ngrams=ngrams)

    def read(
        self, model: ModelConfig, params: Params, memory: Recalled, state: DecodeState
    ) -> Recalled:
        return memory.replace(ngrams=self.remember(memory.ngrams, state))

    def draft(
        self, model: ModelConfig, params: Params, state: DecodeState, noise: Noise
    ) -> tuple[Recalled, DraftTree]:
        """Paths from the model, from frequent n-grams and from a suffix match.

        Of the memory only unspecified slots of the partial cache change.
        """
        with jax.named_scope("draft"):
            plan, memory, best = self.plan(model), state.memory, state.root
            suffix, matched = self.suffix(state)
            groups, alone = [], jnp.zeros(best.shape, bool)
            if plan.suffix_alone:  # rows that draft what followed a long match, no more
                alone = matched >= max(plan.suffix_alone, self.suffix_match)
            if plan.levels:
                wanted = jnp.any(state.running & ~alone)
                cache, ranked = self._candidates(model, params, state, noise, wanted)
                memory, best = memory.replace(cache=cache), ranked[0].tokens[:, 0]
                groups.append(tree_of(ranked, plan.paths))
            ngrams = self.ngrams(memory.ngrams, state, best)
            groups += [paths.after(best) for paths in ngrams] if plan.ngrams_follow else ngrams
            groups = [suffix, *(group.unless(alone) for group in groups)]
            return memory, as_tree(state.root, groups, self.sizes(model))

    def learn(self, model, params, memory, state, verdict, acceptance) -> Recalled:
        cache, hidden, most = memory.cache, memory.hidden, self.sizes(model).depth + 1
        if hidden is not None:
            hidden = newest(verdict.rows.hidden, hidden, state, acceptance)
        if cache is not None:
            cache = self.kept(model, params, cache, state, verdict, acceptance, most)
        ngrams = self.remember(memory.ngrams, state, most=most)
        return Recalled(cache=cache, hidden=hidden, ngrams=ngrams)

    def _candidates(
        self,
        model: ModelConfig,
        params: Params,
        state: DecodeState,
        noise: Noise,
        wanted: Bool[Array, ""],
    ) -> tuple[DraftCache | None, list[Candidates]]:
        """The partial cache, and for each depth that the model drafts its candidates.

        Where `wanted` is false the passes are left out, and no candidate is possible.
        """
        plan, root = self.plan(model), state.root[:, None]
        cache, hidden = state.memory.cache, state.memory.hidden
        heads, weights = params.heads[: plan.levels - plan.passes], weights_for(self, params)
        if not self.noise_coupled:
            noise = jnp.zeros_like(noise)
        drafter = Drafter(model, weights, heads, state, plan.best_of, plan.passes, plan.rest)
        if not plan.passes:
            return None, drafter.by_heads(hidden, root, noise)

        def run(carry, *inputs):
            return drafter.run(carry[0], *inputs)[:2]

        carry = cache, [no_candidates((root.shape[0], plan.best_of), noise.dtype)] * plan.levels
        if plan.suffix_alone:
            return run_if(wanted, run, carry, root, noise)
        return run(carry, root, noise)


class TreePlan(NamedTuple):
    """What TokenSwift's settings come to with a model.

    Attributes:
      paths: the nodes of the tree, cut at the depth that the model can draft.
      levels: how many tokens deep the model drafts.
      best_of: candidates of each depth that the tree names.
      passes: of the model on the partial cache, in each step.
      ngrams_follow: whether n-grams begin with the best drafted token rather than with the root.
      rest: whether passes on the partial cache see the other tokens summed up.
      suffix_alone: equal tokens from which on the suffix is a row's only draft; 0 for never.
    """

    paths: tuple[Path, ...]
    levels: int
    best_of: int
    passes: int
    ngrams_follow: bool
    rest: bool
    suffix_alone: int


class Recalled(flax.struct.PyTreeNode):
    """TokenSwift's memory; None where the settings do not need it.

    Attributes:
      cache: for passes of the model on few tokens.
      hidden: last layer's output for the last committed token; zero before there is one.
      ngrams: of prompt and output.
    """

    cache: DraftCache | None
    hidden: Float[Array, "B D"] | None
    ngrams: NgramTable | None


def tree_of(ranked: list[Candidates], nodes: tuple[Path, ...]) -> Paths:
    """The leaves of the static tree with the ranked tokens of each depth filled in."""
    nodes = nodes or ((0,),)
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
    return Paths(jnp.stack(tokens, axis=1), jnp.stack(lengths, axis=1), "model")


def tree_paths(tree: Any) -> tuple[Path, ...]:
    """The nodes of a tree, parents first, each as its path of ranks."""
    wanted = (
        "children per depth, such as (1, 3, 3, 3), or paths of ranks, such as "
        "((0,), (0, 0), (0, 1)); tsjax.Auto() chooses one"
    )
    check(isinstance(tree, tuple), "tree", tree, wanted)
    if all(map(_is_whole, tree)):
        check(min(tree, default=1) >= 1, "tree", tree, "each depth has at least one child per node")
        depths = range(1, len(tree) + 1)
        nodes = sum(math.prod(tree[:depth]) for depth in depths)
        check(nodes <= MOST_NODES, "tree", tree, f"at most {MOST_NODES} nodes")
        return tuple(path for n in depths for path in itertools.product(*map(range, tree[:n])))
    for path in tree:
        is_path = isinstance(path, tuple) and len(path) > 0
        is_path = is_path and all(_is_whole(rank) and rank >= 0 for rank in path)
        check(is_path, "tree", tree, f"{wanted}; {path!r} is neither")
    known = set(tree)
    if len(known) != len(tree):
        twice = next(path for path in tree if tree.count(path) > 1)
        check(False, "tree", tree, f"the path {twice!r} is there twice")
    for path in tree:
        parent = path[:-1]
        reached = not parent or parent in known
        missing = f"{path!r} cannot be reached, its parent {parent!r} is missing"
        check(reached, "tree", tree, missing)
    check(len(tree) <= MOST_NODES, "tree", f"{len(tree)} paths", f"at most {MOST_NODES} nodes")
    return tuple(sorted(tree, key=lambda path: (len(path), path)))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

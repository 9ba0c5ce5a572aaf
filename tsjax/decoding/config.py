# SPDX-License-Identifier: Apache-2.0
"""The methods of decoding, as frozen dataclasses, and the static sizes of a step that follow.

Knows what each method may be asked and how wide and deep its drafts are. Does not know arrays.
Every method returns the tokens of `Autoregressive`; they differ in how many a step finds. In
bfloat16 and float16 drafts may part from it at a near-tie, as wider passes round otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from tsjax.config import ModelConfig, check, check_int
from tsjax.lazy.settings import LazyPrefill

# What tree="auto" decides beside the tree.
CHOSEN_WITH_THE_TREE = (
    "draft_from",
    "draft_passes",
    "draft_budget",
    "draft_refresh",
    "draft_rest",
    "num_ngrams",
    "suffix_length",
    "suffix_match",
    "suffix_alone",
    "pass_widths",
)
MATCH_LIMIT = 16  # tokens of a suffix that are compared
DRAFT_FROM = ("partial_cache", "verified_state", "auto")
Path = tuple[int, ...]  # the rank of each token of a draft among the candidates of its depth


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """Plain decoding, one token per step: the definition every other method must reproduce."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram:
    """Drafts from the text so far alone (prompt and output): no heads, no pass of the model.

    Attributes:
      num_ngrams: the most frequent so many n-grams that begin with the last token are drafted;
        0 for none.
      ngram_size: tokens of an n-gram, its first token included.
      ngram_slots: n-grams that are kept for each first token, see `ngram.NgramTable`.
      ngram_delay: an n-gram may be drafted when its last token is so many tokens old. None is the
        repetition window while a penalty with a limited window is on, and 0 otherwise.
      suffix_length: the longest continuation that is drafted behind the longest earlier match of
        the last tokens, see `ngram.longest_suffix`; 0 for none.
      suffix_match: the fewest equal tokens that count as such a match.
      pass_widths: narrower passes to compile beside the one that holds every draft a step can
        make: a step takes the narrowest that holds its own. They pay where rows cost time, on a
        CPU, and when drafts vary in number.
    """

    num_ngrams: int = 20
    ngram_size: int = 4
    ngram_slots: int = 32
    ngram_delay: int | None = None
    suffix_length: int = 16
    suffix_match: int = 1
    pass_widths: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "pass_widths", _as_tuples(self.pass_widths))
        check(isinstance(self.pass_widths, tuple), "pass_widths", self.pass_widths, "a tuple")
        for width in self.pass_widths:
            check_int(width, "pass_widths", 1)
        check_int(self.num_ngrams, "num_ngrams", 0, 1024)
        check_int(self.ngram_size, "ngram_size", 2, 64)
        check_int(self.ngram_slots, "ngram_slots", 1, 4096)
        check(
            self.ngram_slots >= self.num_ngrams,
            "ngram_slots",
            self.ngram_slots,
            f"at least num_ngrams={self.num_ngrams}",
        )
        if self.ngram_delay is not None:
            check_int(self.ngram_delay, "ngram_delay", 0)
        check_int(self.suffix_length, "suffix_length", 0, 256)
        check_int(self.suffix_match, "suffix_match", 1, MATCH_LIMIT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSwift(NGram):
    """TokenSwift (arXiv 2502.18890): a tree of drafts from the model and its heads, and n-grams.

    Attributes:
      tree: the shape of the model's drafts. (1, 3, 3, 3) is the number of children of every node at
        each depth; ((0,), (0, 0), (0, 1), (1,)) names every node by its path of ranks: (0, 1) is
        the second best token behind the best. () is no tree. A tree deeper than what the model
        drafts is cut: partial_cache drafts draft_passes + heads tokens, verified_state one for
        each head. "auto" leaves tree, draft_from, draft_passes, draft_budget, draft_refresh,
        draft_rest, num_ngrams, suffix_length, suffix_match, suffix_alone and pass_widths to the
        cost model, which knows the chip, the model and the length of the run: a narrow tree for a
        CPU, a wide one for a GPU, and no drafts of the model where they cannot pay, from the start
        or as soon as a run shows it. Without them a CPU still looks for repetitions.
        method="tokenswift" is TokenSwift(tree="auto").
      draft_from: "partial_cache" runs the model on a small part of the cache and the heads on its
        result, as the paper; n-grams then begin with the best drafted token. "verified_state"
        gives the heads the verified hidden state that the step before ended with, which costs no
        pass of the model; n-grams begin with the last token. "auto" leaves it to the cost model.
      draft_passes: passes on the partial cache per step, each of which drafts one token deeper.
      draft_budget: slots of the partial cache per layer and kv head.
      num_sinks: first tokens of the text that always stay in it.
      draft_refresh: new tokens after which its tokens are chosen again, by their importance to the
        newest one; None is when new ones have displaced all but the sinks, as in the paper. The
        fewer, the more drafts are right; each choice reads all keys.
      draft_rest: passes on the partial cache also see the tokens that are not in it, summed up as
        one slot for each query head: what the last verified token saw of them. More drafts are
        right, for one more reading of the partial cache per step. Not in the paper.
      suffix_alone: where so many tokens or more match, what followed them is a row's only draft,
        and where all rows have one, the passes on the partial cache are left out; 0 for never.
      noise_coupled: rank the model's draft tokens with the noise of their positions. Off, drafts
        are the most probable tokens, which sampling then chooses less often; the tokens that are
        returned are the same.
    """

    tree: tuple[int, ...] | tuple[Path, ...] | Literal["auto"] = (1, 3, 3, 3)
    draft_from: str = "partial_cache"
    draft_passes: int = 1
    draft_budget: int = 4096
    num_sinks: int = 16
    draft_refresh: int | None = None
    draft_rest: bool = False
    suffix_alone: int = 0
    noise_coupled: bool = True

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "tree", _as_tuples(self.tree))
        if self.tree == "auto":
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            for name in CHOSEN_WITH_THE_TREE:
                check(
                    getattr(self, name) == defaults[name],
                    name,
                    getattr(self, name),
                    "left out beside tree='auto', which chooses it; or name a tree",
                )
        else:
            tree_paths(self.tree)
        check(self.draft_from in DRAFT_FROM, "draft_from", self.draft_from, _one_of(DRAFT_FROM))
        check_int(self.draft_passes, "draft_passes", 1, 64)
        check_int(self.num_sinks, "num_sinks", 0)
        check_int(self.draft_budget, "draft_budget", 1)
        check(
            self.draft_budget > self.num_sinks,
            "draft_budget",
            self.draft_budget,
            f"larger than num_sinks={self.num_sinks}",
        )
        check_int(self.suffix_alone, "suffix_alone", 0, MATCH_LIMIT)
        if self.draft_refresh is not None:
            check_int(self.draft_refresh, "draft_refresh", 1)
        for name in ("draft_rest", "noise_coupled"):
            check(isinstance(getattr(self, name), bool), name, getattr(self, name), "a boolean")


METHODS: dict[str, Any] = {
    "autoregressive": Autoregressive,
    "ngram": NGram,
    "tokenswift": TokenSwift,
}


def resolve_method(method: Any) -> Any:
    """A method's name or its dataclass -> the dataclass."""
    if isinstance(method, str):
        check(method in METHODS, "method", method, _one_of(METHODS))
        return TokenSwift(tree="auto") if method == "tokenswift" else METHODS[method]()
    check(
        isinstance(method, tuple(METHODS.values())),
        "method",
        method,
        f"{_one_of(METHODS)} or its dataclass",
    )
    return method


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Everything a decode step is compiled for. What changes from call to call is in the state."""

    model: ModelConfig
    method: Any = Autoregressive()  # one of METHODS
    prefill: LazyPrefill | None = None  # with its cuts named; None computes the whole prompt

    def __post_init__(self):
        method, heads = self.method, self.model.num_draft_heads
        if self.prefill is not None:
            self._check_prefill(self.prefill)
        if isinstance(method, TokenSwift):
            for name in ("tree", "draft_from"):
                if getattr(method, name) == "auto":
                    raise ValueError(
                        f"{name}='auto' is not valid here: tsjax.generate chooses by the length of "
                        "its run; tsjax.choose_method(method, model, context) does the same"
                    )
            if method.draft_from == "verified_state" and not heads and method.tree:
                raise ValueError(
                    "draft_from='verified_state' needs draft heads, and the model has none: load "
                    "some with tsjax.load(..., heads=...), or use draft_from='partial_cache' or "
                    "method='ngram', which need no heads"
                )
            check(
                all(rank < self.model.vocab_size for path in self.tree_paths for rank in path),
                "tree",
                method.tree,
                f"ranks and children below the vocabulary size {self.model.vocab_size}",
            )

    def _check_prefill(self, prefill: LazyPrefill) -> None:
        if isinstance(prefill.keep, str):
            raise ValueError(
                f"keep={prefill.keep!r} is not valid here: tsjax.generate names the cuts by the "
                "length of the prompt; LazyPrefill.resolved(model.cfg, tokens) does the same"
            )
        layers, shown = self.model.num_layers, dict(prefill.keep)
        for layer in shown:
            check(
                layer < layers,
                "keep",
                shown,
                f"a cut behind layer {layer}, but the model has {layers} layers: at most "
                f"{layers - 1}",
            )
        check(
            0 not in shown or prefill.scores == "random",
            "keep",
            shown,
            "a cut before the first layer needs scores='random', as nothing attends there",
        )
        if prefill.revive == "on_demand" and self.tree_width > 1:
            raise ValueError(
                f"revive='on_demand' is not valid with method={type(self.method).__name__}: each "
                "new token then chooses what it sees, so none can be judged ahead; use "
                "revive='background' or 'never', or method='autoregressive'"
            )

    @property
    def rows_ahead(self) -> int:
        """Slots behind the longest text that steps may write to in vain."""
        revives = self.prefill is not None and self.prefill.revive != "never"
        return max(self.draft_depth, self.prefill.revive_rows if revives and self.prefill else 0)

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers between the cuts of a lazy prefill."""
        cuts = [layer for layer, _ in self.prefill.cuts] if self.prefill else []
        ends = [*cuts, self.model.num_layers]
        return tuple(map(range, [0, *cuts], ends))

    @property
    def uses_partial_cache(self) -> bool:
        return self.draft_levels > 0 and not self._heads_alone

    @property
    def _heads_alone(self) -> bool:
        return isinstance(self.method, TokenSwift) and self.method.draft_from == "verified_state"

    @property
    def ngrams_follow_draft(self) -> bool:
        """Whether n-grams begin with the best drafted token rather than with the root."""
        return (
            isinstance(self.method, TokenSwift)
            and self.method.num_ngrams > 0
            and not self._heads_alone
        )

    @property
    def tree_paths(self) -> tuple[Path, ...]:
        """The nodes of the model's tree, cut at the depth that it can draft."""
        if not isinstance(self.method, TokenSwift):
            return ()
        heads = self.model.num_draft_heads
        reach = heads if self._heads_alone else self.method.draft_passes + heads
        return tuple(path for path in tree_paths(self.method.tree) if len(path) <= reach)

    @property
    def draft_levels(self) -> int:
        """How many tokens deep the model drafts."""
        deepest = max(map(len, self.tree_paths), default=0)
        return max(deepest, 1 if self.ngrams_follow_draft else 0)

    @property
    def best_of(self) -> int:
        """Candidates of each depth that the tree names."""
        return 1 + max((rank for path in self.tree_paths for rank in path), default=0)

    @property
    def draft_passes(self) -> int:
        """Passes of the model on the partial cache in a step."""
        return min(self.method.draft_passes, self.draft_levels) if self.uses_partial_cache else 0

    @property
    def summarizes_rest(self) -> bool:
        """Whether passes on the partial cache see the other tokens summed up."""
        return self.uses_partial_cache and self.method.draft_rest

    @property
    def suffix_alone(self) -> int:
        """Equal tokens from which on the suffix is a row's only draft; 0 for never."""
        return self.method.suffix_alone if self.draft_passes and self.method.suffix_length else 0

    @property
    def ngram_depth(self) -> int:
        if isinstance(self.method, Autoregressive) or not self.method.num_ngrams:
            return 0
        return self.method.ngram_size - (0 if self.ngrams_follow_draft else 1)

    @property
    def draft_depth(self) -> int:
        """J: drafted tokens on the longest path. A step emits at most one more."""
        if isinstance(self.method, Autoregressive):
            return 0
        return max(self.draft_levels, self.ngram_depth, self.method.suffix_length)

    @property
    def tree_width(self) -> int:
        """T: the root and every node that a step can draft."""
        if isinstance(self.method, Autoregressive):
            return 1
        nodes = set(self.tree_paths) | ({(0,)} if self.ngrams_follow_draft else set())
        others = len(nodes) + self.method.num_ngrams * (self.method.ngram_size - 1)
        suffix = self.method.suffix_length
        if self.suffix_alone and self.suffix_alone <= self.method.suffix_match:
            return 1 + max(others, suffix)  # never both
        return 1 + others + suffix

    @property
    def pass_widths(self) -> tuple[int, ...]:
        """Rows of the passes that a step can choose from, ascending; the last is tree_width."""
        narrower = () if isinstance(self.method, Autoregressive) else self.method.pass_widths
        widest = self.tree_width
        return (*sorted({width for width in narrower if width < widest}), widest)


def tree_paths(tree: Any) -> tuple[Path, ...]:
    """The nodes of a tree, parents first, each as its path of ranks."""
    wanted = (
        "children per depth, such as (1, 3, 3, 3), or paths of ranks, such as "
        "((0,), (0, 0), (0, 1)), or 'auto'"
    )
    check(isinstance(tree, tuple), "tree", tree, wanted)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in tree):
        for count in tree:
            check(count >= 1, "tree", tree, "each depth has at least one child per node")
        check(
            sum(math.prod(tree[: d + 1]) for d in range(len(tree))) <= 4096,
            "tree",
            tree,
            "at most 4096 nodes",
        )
        paths: list[Path] = []
        layer: list[Path] = [()]
        for count in tree:
            layer = [(*path, rank) for path in layer for rank in range(count)]
            paths += layer
        return tuple(paths)
    for path in tree:
        check(
            isinstance(path, tuple)
            and len(path) > 0
            and all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in path),
            "tree",
            tree,
            f"{wanted}; {path!r} is neither",
        )
    if len(set(tree)) != len(tree):
        twice = next(path for path in tree if tree.count(path) > 1)
        raise ValueError(f"tree={tree!r} is not valid: the path {twice!r} is there twice")
    for path in tree:
        if len(path) > 1 and path[:-1] not in tree:
            raise ValueError(
                f"tree={tree!r} is not valid: {path!r} cannot be reached, its parent "
                f"{path[:-1]!r} is missing"
            )
    check(len(tree) <= 4096, "tree", f"{len(tree)} paths", "at most 4096 nodes")
    return tuple(sorted(tree, key=lambda path: (len(path), path)))


def _as_tuples(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _one_of(names: Any) -> str:
    return f"one of {', '.join(map(repr, names))}"

# SPDX-License-Identifier: Apache-2.0
"""Medusa (arXiv 2401.10774): a sparse tree of drafts from parallel heads.

Knows the heads, which trees are worth most, and what a row of a pass may take. Does not know how a
draft is judged: the published typical acceptance, which changes the text, is not here.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tsjax.base.checks import check, check_fields, check_float, check_int
from tsjax.base.errors import BadValue
from tsjax.base.model_config import CHAINED, ModelConfig
from tsjax.decoding.method import Measured, Method, Noise, Promise, Sizes
from tsjax.decoding.state import DecodeState
from tsjax.decoding.tree import SOURCES, DraftTree
from tsjax.methods.cost_model import Costs
from tsjax.methods.devices import costs_for
from tsjax.methods.model_drafts import Drafter, newest
from tsjax.methods.paths import as_tree, as_tuples
from tsjax.methods.tokenswift import MOST_NODES, Path, tree_of, tree_paths
from tsjax.model.params import Params

# How often each of the five likeliest tokens of each head is right: Vicuna-7B's heads v1.3 as
# published, on chats. The 4th and the 5th are known together, and count half of that each.
VICUNA_7B = (
    (0.560, 0.112, 0.055, 0.0265, 0.0265),
    (0.316, 0.108, 0.061, 0.039, 0.039),
    (0.201, 0.087, 0.060, 0.0345, 0.0345),
    (0.147, 0.078, 0.049, 0.033, 0.033),
    (0.118, 0.069, 0.048, 0.0325, 0.0325),
)
NODES = 63  # of every published tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa(Method):
    """Medusa (arXiv 2401.10774): a sparse tree of drafts from parallel heads.

    The heads read the hidden state with which the last verification ended, so drafts cost no pass
    of the model. Each guesses its token without knowing what the others guess: which combinations
    are judged is the tree. Judged they are as every draft is, so the tokens are those of plain
    decoding; Medusa's typical acceptance, which gives others, is not implemented.

    Attributes:
      tree: a number is the best tree of so many nodes for the heads that the model has, by the
        accuracies that were published for Vicuna-7B; None, as many nodes as pay on the device,
        which `generate` measures. Paths of ranks such as ((0,), (0, 0), (1,)), as
        `tree_from_accuracy` finds them, or children per depth, such as (3, 2, 1), name a tree: see
        TokenSwift. What is deeper than the heads reach is cut.
      noise_coupled: see TokenSwift.
    """

    sources: ClassVar[tuple[str, ...]] = SOURCES

    tree: int | tuple[int, ...] | tuple[Path, ...] | None = NODES
    noise_coupled: bool = True

    def __post_init__(self):
        object.__setattr__(self, "tree", as_tuples(self.tree))
        check_fields(self)
        if isinstance(self.tree, int):
            check_int(self.tree, "tree", 1, MOST_NODES)
        elif self.tree is not None:
            check(len(tree_paths(self.tree)) > 0, "tree", self.tree, "at least one node")

    @property
    def wants_costs(self) -> bool:
        return self.tree is None

    def next(self, measured: Measured) -> Method:
        """Before a run, where the tree is open: with the number of nodes that pays."""
        if measured.current is not None or self.tree is not None:
            return measured.current or self
        costs = costs_for(measured)
        promises = (
            dataclasses.replace(self, tree=nodes).promise(measured.model, costs, measured.context)
            for nodes in range(1, NODES + 1)
        )
        best = min(promises, key=lambda promise: promise.seconds_per_token)
        return dataclasses.replace(self, tree=best.width - 1)

    def promise(self, model: ModelConfig, costs: Costs, context: float) -> Promise:
        """What a step finds, with heads as good as the published ones, and takes."""
        nodes = [path for path in self.paths(model) if len(path) <= len(VICUNA_7B)]
        known = [path for path in nodes if max(path) < len(VICUNA_7B[0])]
        tokens = 1 + sum(_value(VICUNA_7B, path) for path in known)
        width = self.sizes(model).width
        seconds = costs.of_pass(width, context) + costs.overhead + costs.of_heads(False)
        return Promise(tokens, seconds, width, positions=self.sizes(model).positions)

    def paths(self, model: ModelConfig) -> tuple[Path, ...]:
        """The nodes of the tree with a model's heads; ValueError where it has no such heads."""
        heads, wanted = model.num_draft_heads, "method='medusa' needs parallel heads"
        if not heads or model.head_kind == CHAINED:
            has = f"the {heads} of the model are TokenSwift's" if heads else "the model has none"
            remedy = (
                "load some with tsjax.load(..., heads=...), train some with "
                "tsjax.training.train_heads(..., head_kind='parallel'), or use another method"
            )
            raise BadValue(f"{wanted}, and {has}: {remedy}")
        if self.tree is None or isinstance(self.tree, int):
            nodes = NODES if self.tree is None else self.tree
            table = [row[: model.vocab_size] for row in VICUNA_7B[:heads]]
            return tree_from_accuracy(table, nodes)
        known = all(r < model.vocab_size for path in tree_paths(self.tree) for r in path)
        below = f"ranks and children below the vocabulary size {model.vocab_size}"
        check(known, "tree", self.tree, below)
        return tuple(path for path in tree_paths(self.tree) if len(path) <= heads)

    def sizes(self, model: ModelConfig) -> Sizes:
        paths = self.paths(model)
        depth = max(map(len, paths))
        return Sizes(width=1 + len(paths), depth=depth, levels=depth, positions=depth)

    def init(self, model: ModelConfig, batch: int, capacity: int, mesh: Any) -> jax.Array:
        """The last layer's output for the last committed token; zero before there is one."""
        return jnp.zeros((batch, model.embed_dim), model.dtype)

    def draft(
        self, model: ModelConfig, params: Params, state: DecodeState, noise: Noise
    ) -> tuple[jax.Array, DraftTree]:
        with jax.named_scope("draft"):
            paths, sizes = self.paths(model), self.sizes(model)
            heads, best_of = params.heads[: sizes.levels], 1 + max(map(max, paths))
            noise = noise if self.noise_coupled else jnp.zeros_like(noise)
            # The root comes after the state's token: the first head guesses what follows the root.
            hidden, root = state.memory, state.root[:, None]
            drafter = Drafter(model, params.model, heads, state, best_of)
            ranked = drafter.by_heads(hidden, root, noise)
            return state.memory, as_tree(state.root, [tree_of(ranked, paths)], sizes)

    def learn(self, model, params, memory, state, verdict, acceptance) -> jax.Array:
        return newest(verdict.rows.hidden, memory, state, acceptance)


def tree_from_accuracy(
    table: Sequence[Sequence[float]], nodes: int | None = None, *, row_cost: float | None = None
) -> tuple[Path, ...]:
    """The tree of drafts that finds most tokens: a `tree` for Medusa and for TokenSwift.

    A node is worth the chance that it and all before it on its path are right, and a tree the sum
    of its nodes. It begins with the best first token and adds the best of all next siblings and
    first children in turn. No tree of as many nodes is worth more, as a child is worth no more than
    its parent. It is taken for granted that one head is right as often whatever the others are.

    Args:
      table: of each head, how often its likeliest token is the one that comes, how often the second
        is, and so on: shares of all positions, not cumulative.
      nodes: how many, without the root. Nodes that are worth nothing are left out. None: as many as
        pay by `row_cost`.
      row_cost: what a row more in a pass takes, in steps of plain decoding. A node is added while
        it is worth more than its row takes, at the time per token of the tree before it.

    Returns:
      The nodes as paths of ranks, parents first: (0, 2) is the third best token of the second head
      after the best of the first.
    """
    table = _checked(table)
    one = "the number of nodes, or row_cost, by which it is chosen"
    check((nodes is None) != (row_cost is None), "nodes", nodes, one)
    found = _best_first(table)
    if row_cost is None:
        check_int(nodes, "nodes", 1, MOST_NODES)
        chosen = [*itertools.islice(found, nodes)]
    else:
        check_float(row_cost, "row_cost", 0.0, math.inf)
        chosen, tokens = [], 1.0
        for path in itertools.islice(found, MOST_NODES):
            value, seconds = _value(table, path), 1 + row_cost * len(chosen)
            if value * seconds <= row_cost * tokens:
                break
            chosen.append(path)
            tokens += value
    wanted = "a head that is right now and then, for rows that cost no more than that"
    check(len(chosen) > 0, "table", table, wanted)
    return tuple(sorted(chosen, key=lambda path: (len(path), path)))


def _best_first(table: Sequence[Sequence[float]]) -> Iterator[Path]:
    """All nodes that are worth something, the best first, each after its parent.

    Of equal ones the shallower comes first, then the one with the lower ranks.
    """
    heap: list[tuple[float, int, Path]] = []

    def offer(path: Path) -> None:
        heapq.heappush(heap, (-_value(table, path), len(path), path))

    def children(path: Path) -> None:
        if len(path) < len(table):
            for rank_number in range(len(table[len(path)])):
                offer((*path, rank_number))

    children(())
    while heap and heap[0][0] < 0:
        _, _, path = heapq.heappop(heap)
        yield path
        children(path)


def _value(table: Sequence[Sequence[float]], path: Path) -> float:
    return math.prod(table[depth][rank_number] for depth, rank_number in enumerate(path))


def _checked(table: Any) -> tuple[tuple[float, ...], ...]:
    rows = as_tuples(table)
    shape = "a row of shares for each head, its likeliest token first"
    is_table = isinstance(rows, tuple) and len(rows) > 0
    is_table = is_table and all(isinstance(row, tuple) and len(row) > 0 for row in rows)
    check(is_table, "table", table, shape)
    for row in rows:
        for share in row:
            check_float(share, "table", 0.0, 1.0)
    return rows

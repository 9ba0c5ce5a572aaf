# SPDX-License-Identifier: Apache-2.0
"""What a step costs and what it finds: the choice behind tree="auto" and draft_from="auto".

Knows sizes of models, methods and chips. Runs nothing. A wrong choice costs time, never tokens:
`generate` gives up a choice of tree="auto" when a run finds fewer tokens per step than it costs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from tsjax.config import ModelConfig
from tsjax.methods import Autoregressive, DecodeConfig, TokenSwift

# How often a draft is right when all before it were. Heads among three candidates and 20 n-grams:
# what TokenSwift reports (Table 3: 3.36 accepted tokens of 4 behind a pass, 1.6 of 4 from verified
# states), spread evenly over the depths. The other two are assumptions: a pass on the partial
# cache, and the share that is left when only the best candidate is drafted.
HEAD_IS_RIGHT = {"partial_cache": 0.83, "verified_state": 0.65}
PASS_IS_RIGHT = 0.9
BEST_GUESS = 0.7

MOST_PASSES = 6
CPU_BUDGET, CPU_SUFFIX = 512, 8


class Chip(NamedTuple):
    """Attributes:
    bytes_per_second, operations_per_second: of memory, and of 16-bit matrix products.
    row_costs: where rows cost time from the first on, what a pass of so many rows costs, in passes
      of one row; empty where a pass is bound by one of the two rates.
    """

    bytes_per_second: float
    operations_per_second: float
    row_costs: tuple[tuple[int, float], ...] = ()


# By what a device's kind contains, lower case. Only the proportions of a CPU matter.
CHIPS = {
    "a100": Chip(2.04e12, 312e12),
    "h100": Chip(3.35e12, 989e12),
    "h200": Chip(4.8e12, 989e12),
}
OTHER_GPU = CHIPS["a100"]
CPU = Chip(1.0, 1e3, ((1, 1.0), (2, 1.1), (4, 1.4), (8, 2.1), (16, 3.0)))


class Choice(NamedTuple):
    """Attributes:
    method: one that `DecodeConfig` takes.
    step_cost: the time of one of its steps, in plain steps.
    """

    method: Any
    step_cost: float


def chip_of(platform: str, kind: str) -> Chip:
    """The chip of a jax device's `platform` and `device_kind`."""
    if platform == "cpu":
        return CPU
    return next((chip for name, chip in CHIPS.items() if name in kind.lower()), OTHER_GPU)


def choose(method: Any, model: ModelConfig, chip: Chip, context: int, batch: int) -> Choice:
    """The fastest of what `method` may mean; see `request.choose_method`."""

    def cost(option) -> float:
        return step_cost(DecodeConfig(model=model, method=option), chip, context, batch)

    def speed(option) -> float:
        return expected_tokens(DecodeConfig(model=model, method=option)) / cost(option)

    options = _options(method, model, chip)
    best = options[0] if len(options) == 1 else max(options, key=speed)
    return Choice(best, cost(best))


def _options(method: Any, model: ModelConfig, chip: Chip) -> list[Any]:
    if not isinstance(method, TokenSwift):
        return [method]
    if method.tree == "auto":
        drafting = _narrow(method, model) if chip.row_costs else _wide(method, model)
        return [*drafting, Autoregressive()]
    if method.draft_from == "auto":
        sources = HEAD_IS_RIGHT if model.num_draft_heads else ("partial_cache",)
        return [dataclasses.replace(method, draft_from=source) for source in sources]
    return [method]


def _wide(method: TokenSwift, model: ModelConfig) -> list[Any]:
    """As the paper's, with one pass or more: rows are nearly free."""
    behind = (3,) * min(model.num_draft_heads, 3)
    options: list[Any] = []
    for n in range(1, MOST_PASSES + 1):
        tree = (1,) * n + behind
        options.append(
            dataclasses.replace(method, tree=tree, draft_from="partial_cache", draft_passes=n)
        )
    if behind:
        options.append(dataclasses.replace(method, tree=behind, draft_from="verified_state"))
    return options


def _narrow(method: TokenSwift, model: ModelConfig) -> list[Any]:
    """One path, as every row costs; a second, wider program serves steps that repeat the text."""

    def chain(depth: int, source: str, passes: int):
        return dataclasses.replace(
            method,
            tree=(1,) * depth,
            draft_from=source,
            draft_passes=passes,
            draft_budget=max(CPU_BUDGET, method.num_sinks + 1),
            num_ngrams=0,
            suffix_length=CPU_SUFFIX,
            pass_widths=(1 + depth,),
        )

    options = [chain(n, "partial_cache", n) for n in range(1, MOST_PASSES + 1)]
    if model.num_draft_heads:
        options.append(chain(model.num_draft_heads, "verified_state", 1))
    return options


def expected_tokens(decode: DecodeConfig) -> float:
    """Tokens that a step emits. Repetitions of the text are left out: they vary too much."""
    method = decode.method
    if not isinstance(method, TokenSwift):
        return 1.0
    passes = decode.draft_passes
    head = HEAD_IS_RIGHT[method.draft_from]
    if max((rank for path in decode.tree_paths for rank in path), default=0) == 0:
        head *= BEST_GUESS
    tokens = reached = 1.0
    for depth in range(decode.draft_levels):
        reached *= PASS_IS_RIGHT if depth < passes else head
        tokens += reached
    return tokens


def step_cost(decode: DecodeConfig, chip: Chip, context: int, batch: int) -> float:
    """The time of a step in plain steps."""
    model, method = decode.model, decode.method
    plain = pass_time(model, chip, 1, context, batch)
    if isinstance(method, Autoregressive):
        return 1.0
    rows = decode.pass_widths[0] if chip.row_costs else decode.tree_width
    time = pass_time(model, chip, rows, context, batch)
    passes = decode.draft_passes
    for depth in range(passes):
        slots = min(method.draft_budget, context)
        time += pass_time(model, chip, depth + 1, slots, batch)
    if decode.draft_levels > passes:  # heads run, and the unembedding once more
        time += model.vocab_size * model.embed_dim * _bytes(model) / chip.bytes_per_second
    return time / plain


def pass_time(model: ModelConfig, chip: Chip, rows: int, context: int, batch: int) -> float:
    """Seconds of one pass of so many rows over caches of `context` tokens: its bound."""
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * context
    attention = 2 * model.embed_dim * model.head_dim * (model.num_heads + model.num_kv_heads)
    per_layer = attention + 3 * model.embed_dim * model.mlp_dim
    weights = model.num_layers * per_layer + model.vocab_size * model.embed_dim
    reading = (weights + batch * kv) * _bytes(model) / chip.bytes_per_second
    if chip.row_costs:
        return reading * row_cost(chip, rows * batch)
    products = weights + model.group_size * kv  # of one row
    return max(reading, 2 * batch * rows * products / chip.operations_per_second)


def row_cost(chip: Chip, rows: int) -> float:
    """Between and beyond the known points along straight lines."""
    points = chip.row_costs
    behind = next((i for i, (n, _) in enumerate(points) if n >= rows), len(points) - 1)
    (n0, c0), (n1, c1) = points[max(behind, 1) - 1], points[max(behind, 1)]
    return c0 + (c1 - c0) * (rows - n0) / (n1 - n0)


def _bytes(model: ModelConfig) -> int:
    return {"float64": 8, "float32": 4}.get(model.dtype, 2)

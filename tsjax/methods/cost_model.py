# SPDX-License-Identifier: Apache-2.0
"""What a step of a method costs on a chip, and how many tokens it finds.

Knows sizes of models, methods and chips. Runs nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tsjax.config import ModelConfig
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.method import Autoregressive
from tsjax.methods.tokenswift import TokenSwift

# How often a draft is right when all before it were. Heads among three candidates and 20 n-grams:
# what TokenSwift reports (Table 3: 3.36 accepted tokens of 4 after a pass, 1.6 of 4 from verified
# states), spread evenly over the depths. The other two are assumptions: a pass on the partial
# cache, and the share that is left when only the best candidate is drafted. Where the accuracy of
# a model's heads is known, it stands for the paper's.
HEAD_IS_RIGHT = {"partial_cache": 0.83, "verified_state": 0.65}
PASS_IS_RIGHT = 0.8
BEST_GUESS = 0.7
# The rate on a CPU, where passes see the rest summed up, is an estimate for the embedded model,
# sampled: a text that is hard to guess.
CPU_PASS_IS_RIGHT = 0.87


class RowCosts(NamedTuple):
    """What a pass costs where rows are not free, in the time that reading a byte of weights takes.

    Attributes:
      weights, attention: (rows, cost in that of one row) at a few points.
      cache_byte: of a byte of the cache.
      overhead: of a pass beside weights and cache.
      choosing: of a step's choice of tokens from their scores.
    """

    weights: tuple[tuple[int, float], ...]
    attention: tuple[tuple[int, float], ...]
    cache_byte: float
    overhead: float
    choosing: float


class Chip(NamedTuple):
    """Attributes:
    bytes_per_second, operations_per_second: of memory, and of 16-bit matrix products.
    rows: None where a pass is bound by one of the two rates.
    """

    bytes_per_second: float
    operations_per_second: float
    rows: RowCosts | None = None


# By what a device's kind contains, lower case. Only the proportions of a CPU matter.
CHIPS = {"a100": Chip(2.04e12, 312e12), "h100": Chip(3.35e12, 989e12), "h200": Chip(4.8e12, 989e12)}
OTHER_GPU = CHIPS["a100"]
CPU = Chip(
    1.0,
    1e3,
    RowCosts(
        weights=((1, 1.0), (4, 1.15), (8, 1.4), (16, 1.8)),
        attention=((1, 1.0), (2, 1.2), (4, 1.5), (8, 2.3), (16, 3.9)),
        cache_byte=2.8,
        overhead=9e6,
        choosing=12e6,
    ),
)


def chip_of(platform: str, kind: str) -> Chip:
    """The chip of a jax device's `platform` and `device_kind`."""
    if platform == "cpu":
        return CPU
    return next((chip for name, chip in CHIPS.items() if name in kind.lower()), OTHER_GPU)


def expected_tokens(decode: DecodeConfig, chip: Chip) -> float:
    """Tokens that a step emits. Repetitions of the text are left out: they vary too much."""
    method = decode.method
    if not isinstance(method, TokenSwift):
        return 1.0
    plan = method.plan(decode.model)
    if decode.model.head_accuracy:
        heads = [min(share / BEST_GUESS, 1.0) for share in decode.model.head_accuracy]
    else:
        heads = [HEAD_IS_RIGHT[method.draft_from]] * decode.model.num_draft_heads
    if plan.best_of == 1:
        heads = [BEST_GUESS * head for head in heads]
    pass_is_right = CPU_PASS_IS_RIGHT if chip.rows else PASS_IS_RIGHT
    rates = ([pass_is_right] * plan.passes + heads)[: plan.levels]
    return 1.0 + sum(math.prod(rates[: depth + 1]) for depth in range(len(rates)))


def step_cost(decode: DecodeConfig, chip: Chip, context: int, batch: int) -> float:
    """The time of a step in plain steps."""
    model, method = decode.model, decode.method
    choosing = chip.rows.choosing / chip.bytes_per_second if chip.rows else 0.0
    plain = pass_time(model, chip, 1, context, batch) + choosing
    if isinstance(method, Autoregressive):
        return 1.0
    rows = decode.sizes.pass_widths[0] if chip.rows else decode.sizes.width
    time = pass_time(model, chip, rows, context, batch) + choosing

    def reading(slots: int) -> float:
        """One row's attention."""
        return pass_time(model, chip, 1, slots, batch) - pass_time(model, chip, 1, 0, batch)

    if not isinstance(method, TokenSwift):
        return time / plain
    plan = method.plan(model)
    if plan.passes:
        slots = min(method.draft_budget, context)
        time += plan.passes * pass_time(model, chip, 1, slots, batch)
        if method.draft_rest:
            time += reading(slots)
        if method.draft_refresh:
            # Scoring and ordering all keys takes about as long as attention of one row.
            often = min(expected_tokens(decode, chip) / method.draft_refresh, 1.0)
            time += reading(context) * often
    if plan.levels > plan.passes:  # heads run, and the unembedding once more
        time += model.vocab_size * model.embed_dim * _bytes(model) / chip.bytes_per_second
    return time / plain


def pass_time(model: ModelConfig, chip: Chip, rows: int, context: int, batch: int) -> float:
    """Seconds of one pass of N rows over caches of `context` tokens: its bound."""
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * context
    attention = 2 * model.embed_dim * model.head_dim * (model.num_heads + model.num_kv_heads)
    per_layer = attention + 3 * model.embed_dim * model.mlp_dim
    weights = model.num_layers * per_layer + model.vocab_size * model.embed_dim
    size = _bytes(model)
    if chip.rows:
        costs, count = chip.rows, rows * batch
        time = weights * size * row_cost(costs.weights, count) + costs.overhead
        cache = batch * kv * size * costs.cache_byte
        return (time + cache * row_cost(costs.attention, rows)) / chip.bytes_per_second
    reading = (weights + batch * kv) * size / chip.bytes_per_second
    products = weights + model.group_size * kv  # of one row
    return max(reading, 2 * batch * rows * products / chip.operations_per_second)


def row_cost(points: tuple[tuple[int, float], ...], rows: int) -> float:
    """Between and beyond the known points along straight lines."""
    upper = next((i for i, (n, _) in enumerate(points) if n >= rows), len(points) - 1)
    (n0, c0), (n1, c1) = points[max(upper, 1) - 1], points[max(upper, 1)]
    return c0 + (c1 - c0) * (rows - n0) / (n1 - n0)


def _bytes(model: ModelConfig) -> int:
    return {"float64": 8, "float32": 4}.get(model.dtype, 2)

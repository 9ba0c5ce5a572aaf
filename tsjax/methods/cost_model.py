# SPDX-License-Identifier: Apache-2.0
"""What the parts of a step take in seconds, and how many tokens a step is expected to find.

Knows the table of seconds, a formula that fills it for a device by its name, and the sizes of
models and methods. Runs nothing: the host measures the table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tsjax.config import ModelConfig, check
from tsjax.decoding.method import Method
from tsjax.methods.ngram import NGram
from tsjax.methods.tokenswift import TokenSwift

# How often a draft is right when all before it were. Heads among three candidates: what TokenSwift
# reports (Table 3: 3.36 accepted tokens of 4 after a pass, 1.6 of 4 from verified states), spread
# evenly over the depths; where the accuracy of a model's heads is known, it stands for that. The
# rest are assumptions: passes on the partial cache without and with the rest summed up, and the
# share that is left when fewer candidates are drafted.
HEAD_IS_RIGHT = {"partial_cache": 0.83, "verified_state": 0.65}
PASS_IS_RIGHT, PASS_WITH_REST_IS_RIGHT = 0.8, 0.87
SHARE_AMONG = (0.7, 0.88, 1.0)  # the best one, the best two, the best three
# Repetitions of the text vary most, so these are assumptions too: the share of the steps with a
# long match, how often its tokens are right, and the tokens that n-grams find in a step (the
# paper's Figure 3: 0.8 after 20,000 tokens, and more later). A run with fewer gives its drafts up.
REPEATS, REPEAT_IS_RIGHT, NGRAMS_FIND = 0.02, 0.85, 0.5


class Line(NamedTuple):
    """Seconds, and seconds for each token of context."""

    seconds: float
    per_token: float = 0.0

    def at(self, context: float) -> float:
        return self.seconds + self.per_token * context


class Costs(NamedTuple):
    """What the parts of a step take on one device, for one model and number of batch rows.

    Attributes:
      passes: (rows, Line) of passes of the model over so many rows, which end with the choice of a
        token for each; ascending. Other widths lie between and beyond them on straight lines.
      heads: seconds for the candidates of all draft heads.
      choice: of one choice of the partial cache.
      suffix: of one search for the longest suffix match.
      ngrams: seconds for entering new n-grams and looking up drafts.
      overhead: seconds for the rest of a step.
      origin: "measured" on the device, or "estimated" by a formula from the device's name.
    """

    passes: tuple[tuple[int, Line], ...]
    heads: float
    choice: Line
    suffix: Line
    ngrams: float
    overhead: float
    origin: str

    def of_pass(self, rows: int, context: float) -> float:
        """Seconds of a pass of N rows over caches of `context` tokens."""
        points = [(n, line.at(context)) for n, line in self.passes]
        upper = next((i for i, (n, _) in enumerate(points) if n >= rows), len(points) - 1)
        (n0, s0), (n1, s1) = points[max(upper, 1) - 1], points[max(upper, 1)]
        return s0 + (s1 - s0) * (rows - n0) / (n1 - n0)

    def plain(self, context: float) -> float:
        """Seconds of a step of plain decoding."""
        return self.of_pass(1, context) + self.overhead


def as_costs(value: Any) -> Costs:
    """The table from nested lists, as a file has them. ValueError for what is none."""
    wanted = "a tsjax.Costs: two passes or more, the first of one row, and seconds of 0 or more"
    try:
        passes, heads, choice, suffix, ngrams, overhead, origin = value
        costs = Costs(
            passes=tuple((rows, _line(line)) for rows, line in passes),
            heads=float(heads),
            choice=_line(choice),
            suffix=_line(suffix),
            ngrams=float(ngrams),
            overhead=float(overhead),
            origin=origin,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"costs={value!r:.80} is not valid: {wanted}") from error
    lines = (costs.choice, costs.suffix, *(line for _, line in costs.passes))
    seconds = (costs.heads, costs.ngrams, costs.overhead, *itertools.chain(*lines))
    widths = [rows for rows, _ in costs.passes]
    check(all(math.isfinite(x) and x >= 0 for x in seconds), "costs", value, wanted)
    check(all(isinstance(rows, int) for rows in widths), "costs", value, wanted)
    ascending = len(widths) > 1 and widths[0] == 1 and widths == sorted(set(widths))
    check(ascending and costs.of_pass(1, 0) > 0, "costs", value, wanted)
    check(origin in ("measured", "estimated"), "costs", origin, "'measured' or 'estimated'")
    return costs


def _line(value: Sequence[float]) -> Line:
    return Line(*map(float, value))


def expected_tokens(method: Method, model: ModelConfig) -> float:
    """Tokens that a step emits."""
    found = 0.0
    if isinstance(method, TokenSwift):
        found = sum(itertools.accumulate(_rates(method, model), lambda a, b: a * b))
    if isinstance(method, NGram):
        found += NGRAMS_FIND if method.num_ngrams else 0.0
        repeated = sum(REPEAT_IS_RIGHT**n for n in range(1, method.suffix_length + 1))
        found += REPEATS * max(repeated - found, 0.0)
    return 1.0 + found


def _rates(method: TokenSwift, model: ModelConfig) -> list[float]:
    """How often the draft of each depth is right when all before it were."""
    plan = method.plan(model)
    if model.head_accuracy:
        heads = [min(share / SHARE_AMONG[0], 1.0) for share in model.head_accuracy]
    else:
        heads = [HEAD_IS_RIGHT[method.draft_from]] * model.num_draft_heads
    among = SHARE_AMONG[min(plan.best_of, len(SHARE_AMONG)) - 1]
    passes = [PASS_WITH_REST_IS_RIGHT if plan.rest else PASS_IS_RIGHT] * plan.passes
    return (passes + [among * head for head in heads])[: plan.levels]


def step_seconds(method: Method, model: ModelConfig, costs: Costs, context: float) -> float:
    """Seconds of an average step."""
    sizes = method.sizes(model)
    usual, widest = (costs.of_pass(sizes.pass_widths[i], context) for i in (0, -1))
    repeats = REPEATS if isinstance(method, NGram) and method.suffix_length else 0.0
    seconds = (1 - repeats) * usual + repeats * widest + costs.overhead
    if isinstance(method, NGram):
        seconds += costs.suffix.at(context) if method.suffix_length else 0.0
        seconds += costs.ngrams if method.num_ngrams else 0.0
    if not isinstance(method, TokenSwift):
        return seconds
    plan, slots = method.plan(model), min(method.draft_budget, context)
    drafting = plan.passes * costs.of_pass(1, slots)
    if plan.rest:  # the partial cache is read once more
        drafting += costs.of_pass(1, slots) - costs.of_pass(1, 0)
    seconds += drafting * (1 - repeats if plan.suffix_alone else 1)
    if plan.passes and slots < context:
        wait = min(method.draft_refresh or math.inf, slots - method.num_sinks)
        often = min(expected_tokens(method, model) / max(wait, 1), 1.0)
        seconds += costs.choice.at(context) * often
    return seconds + (costs.heads if plan.levels > plan.passes else 0.0)


def seconds_per_token(method: Method, model: ModelConfig, costs: Costs, context: float) -> float:
    return step_seconds(method, model, costs, context) / expected_tokens(method, model)


class Device(NamedTuple):
    """The rates behind an estimate.

    Attributes:
      bytes_per_second, operations_per_second: of products with weights.
      cache_bytes_per_second, cache_operations_per_second: of attention.
      overhead: seconds of a step beside its pass.
    """

    bytes_per_second: float
    operations_per_second: float
    cache_bytes_per_second: float
    cache_operations_per_second: float
    overhead: float


# By what a device's kind contains, lower case.
GPUS = {
    "a100": Device(2.04e12, 312e12, 2.04e12, 312e12, 1e-4),
    "h100": Device(3.35e12, 989e12, 3.35e12, 989e12, 1e-4),
    "h200": Device(4.8e12, 989e12, 4.8e12, 989e12, 1e-4),
}
CPU = Device(1e10, 9e10, 4.4e9, 3.8e10, 2e-3)


def device_of(platform: str, kind: str) -> Device:
    """The rates of a jax device by its `platform` and `device_kind`; an A100's for others."""
    if platform == "cpu":
        return CPU
    return next((found for name, found in GPUS.items() if name in kind.lower()), GPUS["a100"])


def estimated(model: ModelConfig, device: Device, batch: int) -> Costs:
    """The table by a formula: bytes by the rate of reading, and operations by theirs."""
    size = {"float64": 8, "float32": 4}.get(model.dtype, 2)
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    attention = 2 * model.embed_dim * model.head_dim * (model.num_heads + model.num_kv_heads)
    layers = model.num_layers * (attention + 3 * model.embed_dim * model.mlp_dim)
    vocabulary = model.vocab_size * model.embed_dim

    def products(weights: float, rows: int) -> float:
        reading = weights * size / device.bytes_per_second
        return reading + 2 * batch * rows * weights / device.operations_per_second

    def line(rows: int) -> Line:
        reading = kv * size / device.cache_bytes_per_second
        operations = 2 * rows * model.group_size * kv / device.cache_operations_per_second
        return Line(products(layers + vocabulary, rows), batch * (reading + operations))

    of_heads = model.num_draft_heads * model.embed_dim**2
    return Costs(
        passes=((1, line(1)), (128, line(128))),
        heads=products(vocabulary + of_heads, 1) if model.num_draft_heads else 0.0,
        choice=Line(device.overhead, line(1).per_token),  # scores and their order: one more reading
        suffix=Line(0.1 * device.overhead, batch * 64 / device.bytes_per_second),
        ngrams=0.1 * device.overhead,
        overhead=device.overhead,
        origin="estimated",
    )

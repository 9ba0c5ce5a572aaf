# SPDX-License-Identifier: Apache-2.0
"""The least time of plain decoding by what a step reads, and what methods are expected to take.

Knows a model's shape, a device's record and the cost model. Runs nothing: that a device reaches its
data sheet, and how often drafts are right, is what the caller says.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from tsjax.base.errors import BadValue
from tsjax.base.model_config import WIDE, ModelConfig
from tsjax.decoding.held import USABLE, held_by_text, int8_copy_bytes
from tsjax.decoding.method import Method, Promise
from tsjax.methods.cost_model import Costs
from tsjax.methods.devices import Device, pass_work

PARTS = 16  # of a run, at whose middles an expected time is taken


class Span(NamedTuple):
    """A run: tokens of the prompt, new tokens of each row, rows."""

    prompt: int
    new: int
    batch: int = 1

    @property
    def mean_context(self) -> float:
        return self.prompt + self.new / 2

    @property
    def contexts(self) -> list[float]:
        return [self.prompt + self.new * (part + 0.5) / PARTS for part in range(PARTS)]


class Reads(NamedTuple):
    """Bytes of a step of plain decoding. Norms and biases, under a thousandth, are left out.

    Attributes:
      weights: of all layers and of the unembedding.
      cache: keys and values of the known tokens of all rows.
      embedding: the table of which a step looks up one row for each token; 0 where the unembedding
        is the same.
    """

    weights: float
    cache: float
    embedding: float

    @property
    def least(self) -> float:
        """What a step has to read."""
        return self.weights + self.cache

    @property
    def whole(self) -> float:
        """As if it read the table of embeddings too: all parameters and the cache."""
        return self.least + self.embedding


def reads(model: ModelConfig, context: float, batch: int = 1, in_int8: bool = False) -> Reads:
    """Of a step at `context` tokens; `in_int8` with the matrices in a byte for each weight."""
    work = pass_work(model, 1, context, batch, weight_bytes=1 if in_int8 else None)
    is_same = model.tie_embeddings and model.unembed_format == WIDE
    table = 0.0 if is_same else pass_work(model.as_wide, 1, 0)["logits"].bytes
    weights = work["products"].bytes + work["logits"].bytes
    return Reads(weights, work["attention"].bytes, table)


def has_room(
    model: ModelConfig, device: Device, context: float, batch: int = 1, *, in_int8: bool = False
) -> bool:
    """Whether weights and cache fit, `in_int8` with a copy of the matrices to draft with."""
    copy = int8_copy_bytes(model) if in_int8 else 0
    return held_by_text(model, batch, math.ceil(context)) + copy <= USABLE * device.memory


def promised(method: Method, model: ModelConfig, costs: Costs, context: float) -> Promise:
    """What a step of a method finds and takes. ValueError where that is not known."""
    promise = method.promise(model, costs, context)
    if promise is None:
        raise BadValue(
            f"what a step of {type(method).__name__} finds is not known: its `promise` is None"
        )
    return promise


def step_reads(promise: Promise, model: ModelConfig, context: float, batch: int = 1) -> Reads:
    """Bytes of the passes of a step: of its verification, and of those that draft.

    Heads, n-grams and searches count for nothing, nor do passes that a step may leave out.
    Partial caches, which are those that drafting passes read, are in the model's type.
    """
    found = reads(model, context, batch)
    for each in promise.drafting or ():
        one = reads(each.model.with_cache("same"), each.slots, batch, each.in_int8)
        found = Reads(*(x + each.number * more for x, more in zip(found, one, strict=True)))
    return found


def ideal_speedup(
    promise: Promise, model: ModelConfig, context: float, tokens: float, batch: int = 1
) -> float:
    """Of `tokens` per step over plain decoding, if reading all parameters and the cache in each
    pass were all that takes time."""
    plain = reads(model, context, batch).whole
    return tokens * plain / step_reads(promise, model, context, batch).whole


class Expected(NamedTuple):
    """Attributes:
    tokens_per_step: given, or the cost model's; a mean over the run.
    seconds: per token and row, by the cost model.
    least: per token and row, if reading were all that takes time.
    """

    tokens_per_step: float
    seconds: float
    least: float


def expected(
    method: Method,
    model: ModelConfig,
    costs: Costs,
    device: Device,
    span: Span,
    tokens: float | None = None,
) -> Expected:
    """Means over a run. `tokens` per step stand for those that the cost model assumes."""
    found = []
    for context in span.contexts:
        promise = promised(method, model, costs, context)
        emitted = promise.tokens if tokens is None else tokens
        least = step_reads(promise, model, context, span.batch).least / device.bytes_per_second
        found.append((emitted, promise.seconds / emitted, least / emitted))
    return Expected(*map(statistics.fmean, zip(*found, strict=True)))

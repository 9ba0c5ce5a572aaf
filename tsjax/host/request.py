# SPDX-License-Identifier: Apache-2.0
"""A call of `generate` in which every question has one answer.

Knows no argument: asking.py makes it of those of a call, or says what is wrong with them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tsjax.base.generation_config import GenerationConfig
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.logprobs import LogProbs
from tsjax.decoding.method import Measured, Method
from tsjax.decoding.processors import LogitsProcessor
from tsjax.files.checkpoint import Model
from tsjax.host.prefix import Prefix
from tsjax.methods.auto import is_short
from tsjax.methods.corpus import Corpus


@dataclasses.dataclass(frozen=True)
class Request:
    """What to decode.

    Attributes:
      rows: the known tokens of each row: its prompt and, for a resumed run, what was made already.
      prompt_length: how many of them are prompt.
      finish_reason: of rows that a resumed run had already ended, else None.
      single: whether one prompt was given, not a batch of one.
      method: as it was asked for; `decode` has the one that it begins with.
      measured: what the method is told of the machine.
      stop_ids: the resolved end tokens.
      capacity: cache slots per row.
      prefill_widths: tokens of each pass of the prefill, for each of its parts.
      made_widths: after a lazy prefill, tokens of each pass over what a resumed run had made, which
        else is read with the prompt.
      prompt_capacity: the most tokens of a prompt that a lazy prefill can take.
      of_rows: for each row, which of the distinct texts it begins with, where a text that several
        rows have is read once; None where each row is read by itself: on a mesh, lazily, where few
        are the same, and where one pass reads all.
      prefix_length: how many tokens at the beginning of each row are copied from the prefix. Where
        a saved run with a lazy prefill began with a prefix and nobody gives it again, so many are
        read as a whole first.
      prefix_widths: tokens of each pass of that.
      logprobs: of the tokens that a resumed run had made already; None where nobody asks.
    """

    rows: list[np.ndarray]
    prompt_length: list[int]
    finish_reason: list[str | None]
    single: bool
    config: GenerationConfig
    method: Method
    decode: DecodeConfig
    measured: Measured
    stop_ids: tuple[int, ...]
    prompt_capacity: int
    exceed_max_positions: bool
    corpus: Corpus | None
    draft_model: Model | None
    processors: tuple[LogitsProcessor, ...]
    prefix: Prefix | None
    prefix_length: int
    logprobs: list[LogProbs] | None
    capacity: int = 0
    prefill_widths: list[list[int]] = dataclasses.field(default_factory=list)
    made_widths: list[int] = dataclasses.field(default_factory=list)
    prefix_widths: list[int] = dataclasses.field(default_factory=list)
    of_rows: tuple[int, ...] | None = None

    @property
    def prompts(self) -> list[np.ndarray]:
        return [row[:n] for row, n in zip(self.rows, self.prompt_length, strict=True)]

    @property
    def max_length(self) -> list[int]:
        return [length + self.config.max_new_tokens for length in self.prompt_length]

    @property
    def may_want_int8(self) -> bool:
        """Whether a copy of the model in int8 may be made: for the method, or for one that Auto
        goes on with."""
        goes_on = self.method.chooses and not is_short(self.measured.new_tokens)
        return self.decode.method.wants_int8 or (goes_on and self.measured.int8_fits)

    @property
    def seeds(self) -> list[int]:
        seed = self.config.seed
        if not isinstance(seed, tuple):
            return [seed] * len(self.rows)
        return [one for one in seed for _ in range(self.config.num_return_sequences)]


def of_the_prefix(request: Request) -> Request:
    """What reads the first `prefix_length` tokens as a whole. They are the same in all rows."""
    known = request.prefix_length + 1  # no prefill reads the last known token
    return dataclasses.replace(
        request,
        rows=[request.rows[0][:known]],
        prompt_length=[known],
        finish_reason=[None],
        config=request.config.replace(seed=0, num_return_sequences=1, logprobs=None),
        decode=DecodeConfig(model=request.decode.model),
        prefill_widths=[request.prefix_widths],
        made_widths=[],
        prompt_capacity=0,
        prefix_length=0,
        logprobs=None,
    )


def repeat_numbers(request: Request) -> list[int]:
    """How many earlier rows have the same prompt and seed.

    Makes repeated prompts differ. A row by itself gets the tokens that it gets in any batch.
    """
    rows = [(p.tobytes(), seed) for p, seed in zip(request.prompts, request.seeds, strict=True)]
    return [rows[:index].count(row) for index, row in enumerate(rows)]

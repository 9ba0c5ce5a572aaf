# SPDX-License-Identifier: Apache-2.0
"""What a run returns: tokens, text, and what it cost.

Knows results. Does not know how a run is made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tsjax.files.tokenizer import Detokenizer


@dataclasses.dataclass(frozen=True)
class RunStats:
    """What a run cost. A step emits at least one token for each row that is still running.

    A step's last token is not drafted: it is the model's own choice after the accepted drafts
    (the "bonus token"). A drafted token may have several sources; it counts for each of them.
    """

    prompt_tokens: tuple[int, ...]  # per row
    new_tokens: tuple[int, ...]  # per row
    steps: tuple[int, ...]  # per row, without those of an earlier run that was resumed
    computed_tokens: int  # emitted by those steps, also after a stop string, all rows together
    prefill_seconds: float  # without compilation, as decode_seconds
    decode_seconds: float
    drafted: int = 0  # nodes of all draft trees
    accepted_lengths: tuple[int, ...] = (0,)  # steps that emitted 0, 1, ... drafted tokens
    accepted_by_source: dict[str, int] = dataclasses.field(default_factory=dict)
    draft_positions: int = 0  # see `alpha`
    method: Any = None  # the one that the run began with
    gave_up: bool = False  # Auto went on with plain decoding, as drafts did not pay
    # Of a lazy prefill: the share of the prompt's tokens that each stage has computed so far, the
    # layers between two cuts being a stage. () where the whole prompt is computed.
    prompt_computed: tuple[float, ...] = ()
    compile_seconds: float = 0.0  # of prefill and decoding; includes reading kept programs

    @property
    def accepted(self) -> int:
        """Drafted tokens that were emitted."""
        return sum(length * steps for length, steps in enumerate(self.accepted_lengths))

    @property
    def alpha(self) -> float:
        """The paper's acceptance rate: accepted tokens per step and per position that is drafted.

        The positions are those of the model's tree and the n-grams: 4 for three heads on the
        partial cache. Longer suffix drafts are not counted among them, so with them alpha may be
        above 1.
        """
        return self.accepted / max(sum(self.steps) * self.draft_positions, 1)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per pass of the full model, the bonus token included; 1 for plain decoding."""
        return self.computed_tokens / max(sum(self.steps), 1)

    @property
    def tokens_per_second(self) -> float:
        return self.computed_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """What `generate` returns.

    Attributes:
      tokens: the new tokens of each row, one int32 array per row, also for a single prompt. A stop
        token is included.
      finish_reason: per row, "eos", "stop_string", "length" or "interrupted".
      stats: what it cost.
      problems: why `save_to` could not be written, each reason once.
      unsaved: whether `save_to` lacks the last tokens.
    """

    tokens: list[np.ndarray]
    finish_reason: list[str]
    stats: RunStats
    problems: tuple[str, ...]
    unsaved: bool
    _prompts: list[np.ndarray]
    _single: bool
    _tokenizer: Callable[[], Any]

    @functools.cached_property
    def text(self) -> str | list[str]:
        """The new text: a string for a single prompt, else one per row. Needs a tokenizer.

        It continues the prompt's text: a space between the two belongs to it.
        """
        tokenizer, texts = self._tokenizer(), []
        for prompt, row in zip(self._prompts, self.tokens, strict=True):
            writer = Detokenizer(tokenizer, context=prompt)
            texts.append(writer.push(row) + writer.flush())
        return texts[0] if self._single else texts


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """What `stream` yields: the news of each row since the chunk before.

    Attributes:
      tokens: one int32 array per row.
      text: None for a model without a tokenizer.
      finish_reason: None while a row runs.
      sources: who drafted each of `tokens`, uint8: bit i stands for stats.method.sources[i], 0 for
        nobody.
      stats: of the run so far.
    """

    tokens: list[np.ndarray]
    text: list[str] | None
    finish_reason: list[str | None]
    sources: list[np.ndarray]
    stats: RunStats

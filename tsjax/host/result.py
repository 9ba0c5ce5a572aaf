# SPDX-License-Identifier: Apache-2.0
"""What a run returns: tokens, text, and what it cost.

Knows results. Does not know how a run is made.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tsjax.base.errors import BadValue
from tsjax.decoding.logprobs import LogProbs
from tsjax.files.tokenizer import Detokenizer
from tsjax.files.whole_files import write_text


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
    method: Any = dataclasses.field(default=None, repr=False)  # the one that the run began with
    gave_up: bool = False  # Auto went on with plain decoding, as drafts did not pay
    # Of a lazy prefill: the share of the prompt's tokens that each stage has computed so far, the
    # layers between two cuts being a stage. () where the whole prompt is computed.
    prompt_computed: tuple[float, ...] = ()
    compile_seconds: float = 0.0  # waited for; includes reading kept programs
    beside_seconds: float = 0.0  # in which others were compiled beside the run
    prefix_tokens: int = 0  # of each prompt, that a prefix had read before

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
      finish_reason: per row, "eos", "stop_string", "repetition", "length" or "interrupted".
      stats: what it cost.
      logprobs: one `LogProbs` per row, for its tokens; None where nobody asked.
      prefix: with keep_prefix, what the run has read and written; None in a copy or after pickling.
      problems: why `save_to` could not be written, each reason once.
      unsaved: whether `save_to` lacks the last tokens.
    """

    tokens: list[np.ndarray]
    finish_reason: list[str]
    stats: RunStats
    problems: tuple[str, ...]
    unsaved: bool
    _prompts: list[np.ndarray] = dataclasses.field(repr=False)
    _single: bool = dataclasses.field(repr=False)
    _tokenizer: Callable[[], Any] = dataclasses.field(repr=False)
    _answers: int = dataclasses.field(default=1, repr=False)  # rows that each prompt has
    logprobs: list[LogProbs] | None = dataclasses.field(default=None, repr=False)
    prefix: Any = dataclasses.field(default=None, repr=False)
    _facts: Callable[[], dict[str, Any]] = dataclasses.field(default=dict, repr=False)

    @property
    def prompts(self) -> list[np.ndarray]:
        """The token ids of each row's prompt."""
        return self._prompts

    def __getstate__(self) -> dict[str, Any]:
        """What can leave the process: the text and the facts, as they are told now, in place of the
        tokenizer and the model."""
        state = {**self.__dict__, "prefix": None, "_facts": functools.partial(dict, self._facts())}
        why: Exception = BadValue("a result that was pickled has its text, and no tokenizer")
        try:
            state["text"] = self.text
        except (FileNotFoundError, ValueError) as error:  # without a tokenizer
            why = error
        return {**state, "_tokenizer": functools.partial(_fail, why)}

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

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it: tokens, text, figures, and what was asked of which model."""
        stats = self.stats
        try:
            text = self.text
        except (FileNotFoundError, ValueError):  # without a tokenizer
            text = None
        told = self.logprobs
        return {
            "text": text,
            "tokens": [row.tolist() for row in self.tokens],
            "finish_reason": self.finish_reason,
            "unsaved": self.unsaved,
            **({} if told is None else {"logprobs": [*map(log_probs_to_dict, told)]}),
            "prompt": [row.tolist() for row in self._prompts[:: self._answers]],
            **self._facts(),
            "stats": {
                **dataclasses.asdict(stats),
                "tokens_per_step": stats.tokens_per_step,
                "alpha": stats.alpha,
                "tokens_per_second": stats.tokens_per_second,
            },
        }

    def save(self, path: str | os.PathLike) -> None:
        """Writes `to_dict` as a JSON file, whole or not at all."""
        write_text(path, json.dumps(self.to_dict()) + "\n")


def _fail(why: Exception) -> None:
    raise why


def no_log_probs(count: int) -> LogProbs:
    one, some, tokens = (
        np.zeros(shape, kind)
        for shape, kind in (((0,), np.float32), ((0, count), np.float32), ((0, count), np.int32))
    )
    return LogProbs(one, tokens, some, one, tokens, some)


def log_probs_to_dict(found: LogProbs) -> dict[str, Any]:
    """As JSON has it; null for what cannot be, whose logarithm is -inf (or none at all)."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(plain, value)]
        return value if np.isfinite(value) else None

    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return {name: plain(value.tolist()) for name, value in fields.items() if value is not None}


def log_probs_from_dict(saved: Mapping[str, Any], top: int, dtype: Any = np.float32) -> LogProbs:
    """What `log_probs_to_dict` was given, with the `top` best; ValueError for anything else."""

    def array(name: str) -> np.ndarray:
        kind = np.int32 if name.endswith("tokens") else dtype
        rank = 1 if name in ("raw", "processed") else 2
        count = len(saved["raw"])
        values = np.asarray(saved[name], object)
        values = np.where(values == None, -np.inf, values).astype(kind)  # noqa: E711
        if not count:
            return values.reshape((0,) if rank == 1 else (0, top))
        if values.shape != (count, top)[:rank]:
            raise BadValue(f"logprobs of the wrong shape: {name}")
        return values

    return LogProbs(**{field.name: array(field.name) for field in dataclasses.fields(LogProbs)})


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """What `stream` yields: the news of each row since the chunk before.

    Attributes:
      tokens: one int32 array per row.
      text: None for a model without a tokenizer.
      finish_reason: None while a row runs.
      logprobs: of `tokens`, one `LogProbs` per row; None where nobody asked.
      sources: who drafted each of `tokens`, uint8: bit i stands for stats.method.sources[i], 0 for
        nobody.
      stats: of the run so far.
    """

    tokens: list[np.ndarray]
    text: list[str] | None
    finish_reason: list[str | None]
    sources: list[np.ndarray]
    stats: RunStats
    logprobs: list[LogProbs] | None = None

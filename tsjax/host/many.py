# SPDX-License-Identifier: Apache-2.0
"""Many prompts in one batch that stays full: where a row ends, the next prompt begins.

Knows the rows of a run and what waits for them. Does not know where prompts come from.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tsjax.base.checks import check, check_int, check_type
from tsjax.base.errors import BadValue, TsjaxError
from tsjax.base.generation_config import GenerationConfig, given_config
from tsjax.decoding.logprobs import LogProbs
from tsjax.decoding.state import DecodeState
from tsjax.files.checkpoint import Model
from tsjax.files.tokenizer import Detokenizer
from tsjax.host.asking import batch_request, make_request, prefix_in_memory
from tsjax.host.device_programs import programs_of
from tsjax.host.interrupt import Interrupt
from tsjax.host.moving import plainly
from tsjax.host.prefix import Prefix
from tsjax.host.prompts import tokenizer_of
from tsjax.host.request import Request
from tsjax.host.rows import HostRow, HostRows
from tsjax.host.run import News, run, start_run
from tsjax.methods.corpus import Corpus

OF_EACH = ("seed", "max_new_tokens")  # settings that a prompt may have of its own
TEXTS = ("prompt", "messages", "ids")  # the ways to give one
# What a prompt of any form can raise, one that is nested too deep included.
_OF_A_PROMPT = (TsjaxError, ValueError, TypeError, MemoryError, LookupError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What `generate_many` yields for each prompt, as it ends.

    Attributes:
      index: of the prompt, from 0.
      tokens: the new ones.
      text: None for a model without a tokenizer.
      finish_reason: as in GenerationResult; "error" for a prompt that is not valid, or whose next
        token has scores that are NaN or infinite.
      prompt_tokens: how many the prompt has.
      logprobs: of `tokens`, where they were asked for.
      error: why the prompt could not be answered, or not to its end; or None.
    """

    index: int
    tokens: np.ndarray
    text: str | None
    finish_reason: str
    prompt_tokens: int = 0
    logprobs: LogProbs | None = None
    error: TsjaxError | None = None


def generate_many(
    model: Model,
    prompts: Iterable[Any],
    *,
    rows: int = 8,
    config: GenerationConfig | None = None,
    method: Any = None,
    logits_processor: Any = None,
    capacity: int | None = None,
    prefill_width: int = 512,
    exceed_max_positions: bool = False,
    corpus: Corpus | None = None,
    draft_model: Model | None = None,
    prefix: Prefix | str | os.PathLike | None = None,
    **settings: Any,
) -> Iterator[Answer]:
    """Answers each of many prompts; yields an Answer as soon as it is there.

    Each is what `generate` says to that prompt alone, with the same seed. `rows` of them run side
    by side; where one has ended, the next prompt is read and takes its place.

    Args:
      model: from `tsjax.load`.
      prompts: each a prompt as of `generate`, or a mapping: "prompt", "messages" or "ids", and
        where it has its own, "seed" and "max_new_tokens". They are taken as they are needed.
      rows: of the batch.
      capacity: cache slots per row; by default those that the longest prompt so far needs.
      prefix: as of `generate`: each prompt is read from where it differs.
      config, settings, method, corpus, draft_model, logits_processor: as of `generate`, for all.
      prefill_width, exceed_max_positions: as of `generate`.

    A prompt that is not valid, or whose row does not fit into memory, has an answer with an
    `error`; the others go on. Where `prompts` itself raises, the rows that run are answered first.
    Ctrl-C or SIGTERM raises tsjax.Interrupted; what was yielded before is whole.
    """
    check_type(model, Model, "model", "what tsjax.load returns")
    check_int(rows, "rows", 1)
    several = not isinstance(prompts, str | bytes | Mapping) and isinstance(prompts, Iterable)
    check(several, "prompts", prompts, "an iterable of prompts; one of them goes to generate")
    config = (given_config(config) or GenerationConfig()).replace(**settings)
    answers, wanted = config.num_return_sequences, "1; give a prompt several times, with seeds"
    check(answers == 1, "num_return_sequences", answers, wanted)
    one_seed = isinstance(config.seed, int)
    check(one_seed, "seed", config.seed, "one for all prompts; each may name its own")
    how: dict[str, Any] = dict(
        method=method, logits_processor=logits_processor, capacity=capacity,
        prefill_width=prefill_width, exceed_max_positions=exceed_max_positions, corpus=corpus,
        draft_model=draft_model, prefix=None if prefix is None else prefix_in_memory(prefix, model),
    )  # fmt: skip
    # What is wrong for the shortest of texts is wrong for all.
    fewest = config.replace(max_new_tokens=max(1, config.min_new_tokens))
    make_request(model, np.zeros(1, np.int32), fewest, {}, **how)
    return _Many(model, iter(prompts), rows, config, how).answers()


class _Many(HostRows):
    """The rows of a batch that take the next prompt when they have ended."""

    def __init__(self, model: Model, prompts: Iterator, rows: int, config, how: dict[str, Any]):
        self._model, self._prompts, self._config, self._how = model, prompts, config, how
        self.waits, self.failed, self._size, self._count = True, [], rows, 0
        self._batch: Request | None = None  # as large as the longest prompt so far needs
        self._taken: tuple[int, Request] | None = None  # and in no row yet
        self._broken: Exception | None = None  # what the iterable raised
        self._tokenizer = tokenizer_of(model)

    def answers(self) -> Iterator[Answer]:
        interrupt = Interrupt()
        while self._batch is None and self.waits:
            with interrupt:
                self._taken = self._take()
            yield from self._told()
            interrupt.finish(None, "raise")
        if self._batch is not None:
            super().__init__(self._model, self._batch)
            self.waits = True
            for news in run(self._model, self._batch, interrupt, watched=True, rows=self):
                yield from self._told()
                yield from self._ended(news)
                # A prompt that was being read then is not whole: no step has run on it.
                interrupt.finish(None, "raise")
                del news  # and a memory that may be begun anew
        if self._broken is not None:
            raise self._broken

    def refill(self, state: DecodeState, interrupt: Interrupt) -> tuple[DecodeState, list[int]]:
        """Takes up prompts until no row is free, or one is not valid. Each is read by itself."""
        programs, filled = programs_of(self._model), []
        for place, row in enumerate(self.rows):
            if row.reason is None:
                continue
            taken = None if interrupt.requested else self._taken or self._take()
            if taken is None or self._batch is None:
                break
            self._taken, (number, request) = None, taken
            # With a plain method's state, which has no memory to be thrown away.
            decode, capacity = plainly(self._batch.decode), self._batch.capacity
            request = dataclasses.replace(request, decode=decode, capacity=capacity)
            alone = start_run(self._model, request, interrupt)
            if state.tokens.shape[1] < capacity:
                state = programs.grown(state, capacity=capacity)
            state = programs.fill_row(state.replace(memory=()), alone, np.int32(place))
            self.made_before += row.made
            self.rows[place] = HostRow(self._model, request, number=number)
            filled.append(place)
        return state, filled

    def _take(self) -> tuple[int, Request] | None:
        """The next prompt and its number; None where it is not valid, or there is none."""
        if not self.waits:
            return None
        try:
            given = next(self._prompts)
        except StopIteration:
            self.waits = False
            return None
        except Exception as error:  # of the user's own
            self.waits, self._broken = False, error
            return None
        index, self._count = self._count, self._count + 1
        try:
            return index, self._request(given)
        except _OF_A_PROMPT as error:
            known = error if isinstance(error, TsjaxError) else BadValue(str(error))
            self.failed.append(Answer(index, np.zeros(0, np.int32), None, "error", error=known))
            return None

    def _request(self, given: Any) -> Request:
        if isinstance(given, BaseException):  # who made the prompts says why there is none
            raise given
        of_its_own: dict[str, Any] = {}
        if isinstance(given, Mapping) and "input_ids" not in given:
            unknown = [name for name in given if name not in (*OF_EACH, *TEXTS)]
            check(not unknown, "prompt", unknown, f"these fields: {', '.join((*TEXTS, *OF_EACH))}")
            ways = [name for name in TEXTS if given.get(name) is not None]
            check(len(ways) == 1, "prompt", dict(given), f"one of {', '.join(TEXTS)}")
            of_its_own = {k: given[k] for k in OF_EACH if given.get(k) is not None}
            text = given[ways[0]]
            if ways[0] == "messages":
                of_its_own["messages"], given = text, None
            else:
                given = text
        request = make_request(self._model, given, self._config, of_its_own, **self._how)
        check(request.single, "prompt", f"{len(request.rows)} rows", "one text")
        check(isinstance(request.config.seed, int), "seed", request.config.seed, "one integer")
        if self._batch is None or request.capacity > self._batch.capacity:  # larger buffers
            sizes = self._size, self._how["capacity"], self._how["prefill_width"]
            batch = batch_request(self._model, request, *sizes)
            # What the first one has chosen stays, and was checked against the model.
            self._how |= {"method": batch.decode.method, "corpus": None, "draft_model": None}
            known = self._batch or batch
            self._batch = dataclasses.replace(known, capacity=batch.capacity)
        return request

    def _told(self) -> list[Answer]:
        told, self.failed = self.failed, []
        return told

    def _ended(self, news: News) -> Iterator[Answer]:
        for place, (row, ended) in enumerate(zip(self.rows, news.newly_ended, strict=True)):
            if not ended or row.reason == "interrupted":
                continue
            tokens, told, text = news.all_tokens[place], news.all_logprobs(), None
            if self._tokenizer is not None:
                writer = Detokenizer(self._tokenizer, context=row.prompt)
                text = writer.push(tokens) + writer.flush()
            logprobs = None if told is None else told[place]
            length, reason = len(row.prompt), str(row.reason)
            yield Answer(row.number, tokens, text, reason, length, logprobs, row.error)

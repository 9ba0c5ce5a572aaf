# SPDX-License-Identifier: Apache-2.0
"""Many prompts in one batch that stays full: where a row ends, the next prompt begins.

Knows rows of a state and what waits for them. Does not know where prompts come from.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tsjax.config import GenerationConfig, check, check_int, check_type, given_config
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.logprobs import LogProbs
from tsjax.decoding.state import RUNNING, DecodeState
from tsjax.errors import BadValue, TsjaxError
from tsjax.files.checkpoint import Model
from tsjax.files.tokenizer import Detokenizer
from tsjax.host import processes
from tsjax.host.asking import make_request
from tsjax.host.chunks import SECONDS_PER_CHUNK
from tsjax.host.device_programs import programs_of
from tsjax.host.interrupt import Interrupt
from tsjax.host.moving import Moves, plainly
from tsjax.host.prompts import tokenizer_of
from tsjax.host.request import Request
from tsjax.host.run import HostRows, Seen, begin_run, begun_anew, params_for, start_run, stopped_in
from tsjax.host.sizes import check_memory
from tsjax.methods import resolve_method
from tsjax.model.sharding import mesh_of

OF_EACH = ("seed", "max_new_tokens")  # settings that a prompt may have of its own
TEXTS = ("prompt", "messages", "ids")  # the ways to give one
FEWEST_STEPS = 16
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


@dataclasses.dataclass
class _Row:
    """A prompt that is being answered."""

    index: int
    request: Request
    rows: HostRows


def generate_many(
    model: Model,
    prompts: Iterable[Any],
    *,
    rows: int = 8,
    config: GenerationConfig | None = None,
    method: Any = "autoregressive",
    logits_processor: Any = None,
    capacity: int | None = None,
    prefill_width: int = 512,
    exceed_max_positions: bool = False,
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
      method: the same for all. What it chooses by measuring, it chooses at the beginning.
      capacity: cache slots per row; by default those that the longest prompt so far needs.
      config, settings, logits_processor, prefill_width, exceed_max_positions: as of `generate`.

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
        method=resolve_method(method), logits_processor=logits_processor, capacity=capacity,
        prefill_width=prefill_width, exceed_max_positions=exceed_max_positions,
    )  # fmt: skip
    # What is wrong for the shortest of texts is wrong for all.
    fewest = config.replace(max_new_tokens=max(1, config.min_new_tokens))
    make_request(model, np.zeros(1, np.int32), fewest, {}, **how)
    return _Many(model, iter(prompts), rows, config, how).answers()


class _Many:
    """A batch whose rows are filled again."""

    def __init__(self, model: Model, prompts: Iterator, rows: int, config, how: dict[str, Any]):
        self._model, self._prompts, self._config, self._how = model, prompts, config, how
        self._mesh = mesh_of(model.params)
        self._rows: list[_Row | None] = [None] * rows
        self._count, self._spent, self._steps = 0, False, FEWEST_STEPS
        self._state: DecodeState | None = None
        # What is wanted, and what the rows go on by until its programs are there.
        self._wanted: Request | None = None
        self._decode: DecodeConfig | None = None
        self._moves = Moves(model, lambda method: params_for(model, method))
        self._failed: list[Answer] = []
        self._broken: Exception | None = None  # what the iterable raised
        self._tokenizer = tokenizer_of(model)

    def answers(self) -> Iterator[Answer]:
        interrupt = Interrupt()
        while True:
            with interrupt:
                self._fill(interrupt)
            failed, self._failed = self._failed, []
            yield from failed
            # A prompt that was being read then is not whole: no step may run on it.
            interrupt.finish(None, "raise")
            if failed:
                continue
            if not any(self._rows):
                break
            with interrupt:
                ended = self._go_on(interrupt)
            yield from ended
            interrupt.finish(None, "raise")
        if self._broken is not None:
            raise self._broken

    def _fill(self, interrupt: Interrupt) -> None:
        """Takes up prompts until no row is free, or one is not valid."""
        filled = False
        for row, running in enumerate(self._rows):
            stop = self._spent or self._failed or interrupt.requested
            if running is None and not stop:
                running = self._next()
                if running is not None:
                    self._begin(row, running, interrupt)
                    filled = True
            self._rows[row] = running
        if filled:
            self._learn_anew()

    def _next(self) -> _Row | None:
        """The next prompt that is valid; None where it is not, or there is none."""
        try:
            given = next(self._prompts)
        except StopIteration:
            self._spent = True
            return None
        except Exception as error:  # of the user's own
            self._spent, self._broken = True, error
            return None
        index, self._count = self._count, self._count + 1
        try:
            request = self._request(given)
        except _OF_A_PROMPT as error:
            known = error if isinstance(error, TsjaxError) else BadValue(str(error))
            nothing = np.zeros(0, np.int32)
            self._failed.append(Answer(index, nothing, None, "error", error=known))
            return None
        return _Row(index, request, HostRows(self._model, request))

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
        known = 0 if self._state is None else self._state.tokens.shape[1]
        if request.capacity > known:  # buffers are made, beside those that are there
            check_memory(self._wide(request), self._model)
        return request

    def _begin(self, row: int, begun: _Row, interrupt: Interrupt) -> None:
        """Reads a prompt by itself, and puts what comes of it into a row of the batch."""
        programs, request = programs_of(self._model), begun.request
        if self._wanted is None:
            self._wanted = request
        capacity = request.capacity
        if self._state is not None:
            capacity = max(capacity, self._state.tokens.shape[1])
        # Read with a plain method's state, which has no memory to be thrown away.
        plain = plainly(self._wanted.decode)
        request = dataclasses.replace(request, decode=plain, capacity=capacity)
        alone = start_run(self._model, request, interrupt)
        if self._state is None:
            self._state = begin_run(self._model, self._wide(request))
        state = self._state
        if state.tokens.shape[1] < capacity:
            state = programs.grown(state, capacity=capacity)
        self._state = programs.fill_row(state.replace(memory=()), alone, np.int32(row))

    def _wide(self, request: Request) -> Request:
        """A batch of its capacity of which no row runs."""
        count = len(self._rows)
        return dataclasses.replace(
            request,
            rows=[request.rows[0][:1]] * count,
            prompt_length=[1] * count,
            finish_reason=["stopped"] * count,
            config=request.config.replace(seed=0),
        )

    def _learn_anew(self) -> None:
        """The method's memory, of the rows as they are now; counters begin again."""
        assert self._state is not None
        self._decode = self._decode_by()
        self._state = begun_anew(self._model, self._state, self._decode)

    def _decode_by(self) -> DecodeConfig:
        """What is wanted, or plain decoding where its programs are compiled beside the run."""
        assert self._wanted is not None and self._state is not None
        decode = self._wanted.decode
        if self._wanted.method.chooses and not self._moves.is_ready(decode, self._state):
            return plainly(decode)
        return decode

    def _go_on(self, interrupt: Interrupt) -> list[Answer]:
        """A chunk of steps, at most until a row ends; the answers that are whole then."""
        if self._decode != self._decode_by():
            self._learn_anew()
        state, decode = self._state, self._decode
        assert state is not None and decode is not None
        running = sum(row is not None for row in self._rows)
        at_least = 1 if self._spent else running
        begun, before = time.perf_counter(), _most_steps(state)
        params = params_for(self._model, decode.method)
        chunk = programs_of(self._model).decode
        state = chunk(params, state, self._steps, at_least, cfg=decode.in_steps)
        state.kv.length.block_until_ready()
        interrupt.meet()
        seconds = processes.first_says(time.perf_counter() - begun)
        self._steps = _next_chunk(_most_steps(state) - before, seconds)
        seen, ended, stopped = Seen.of(state), [], np.zeros(len(self._rows), bool)
        for place, row in enumerate(self._rows):
            if row is None:
                continue
            news = row.rows.read(seen.row(place), interrupt.requested)
            broken = row.rows.broken(seen.row(place), row.index)
            if not row.rows.running or broken is not None:
                self._rows[place] = None
                stopped[place] = seen.finish[place] == RUNNING
                if news["reasons"][0] != "interrupted":
                    ended.append(self._answer(row, news, broken))
        self._state = stopped_in(state, stopped)
        return ended

    def _answer(self, row: _Row, news: dict[str, Any], error: TsjaxError | None) -> Answer:
        tokens, prompt = news["all_tokens"][0], row.request.prompts[0]
        text = None
        if self._tokenizer is not None:
            writer = Detokenizer(self._tokenizer, context=prompt)
            text = writer.push(tokens) + writer.flush()
        told = news["all_logprobs"]()
        told = None if told is None else told[0]
        reason = "error" if error is not None else str(news["reasons"][0])
        return Answer(row.index, tokens, text, reason, len(prompt), told, error)


def _most_steps(state: DecodeState) -> int:
    return int(processes.on_host(state.stats.steps).max())


def _next_chunk(steps: int, seconds: float) -> int:
    """As long as a look at the rows does not matter; a chunk ends by itself where a row does."""
    return max(FEWEST_STEPS, int(steps * SECONDS_PER_CHUNK / max(seconds, 1e-6)))

# SPDX-License-Identifier: Apache-2.0
"""generate() and stream(): the host side of decoding.

Knows text, streaming, progress, stop strings and interrupts. Does not know how a step works: it
fills a state, runs chunks of steps on the device and reads tokens and counters once per chunk.

The flow: `make_request` has checked everything a user passed, `start_run` allocates and prefills,
and `_run` is the generator over chunks of steps that both public functions consume.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tsjax.config import GenerationConfig, check_int
from tsjax.decoding.config import Autoregressive, DecodeConfig
from tsjax.decoding.noise import row_keys
from tsjax.decoding.sampling import sampling_values
from tsjax.decoding.state import EOS, LENGTH, RUNNING, STOPPED, DecodeState, DraftState, StepStats
from tsjax.decoding.step import Programs, init_state, logits, programs
from tsjax.decoding.tree import SOURCES
from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import model_fingerprint
from tsjax.files.tokenizer import Detokenizer, decode_text, special_tokens
from tsjax.host.compilation import Stopwatch, keep_programs
from tsjax.host.interrupt import Interrupt, check_on_interrupt
from tsjax.host.request import Request, check_row, make_request, repeat_numbers, tokenizer_of
from tsjax.host.saved_run import SavedRun, check_target, write_run
from tsjax.lazy.stages import is_reviving
from tsjax.model.sharding import mesh_of

SECONDS_PER_CHUNK = 0.2
STEPS_TO_JUDGE = 64  # of all rows together, before tree="auto" may give up its drafts


@dataclasses.dataclass(frozen=True)
class RunStats:
    """What a run cost. A step emits at least one token for each row that is still running.

    A step's last token is not drafted: it is the model's own choice behind the accepted drafts
    (the "bonus token"). A drafted token may have several sources; it counts for each of them.
    """

    prompt_tokens: tuple[int, ...]  # per row
    new_tokens: tuple[int, ...]  # per row
    steps: tuple[int, ...]  # per row, without those of an earlier run that was resumed
    computed_tokens: int  # emitted by those steps, also behind a stop string, all rows together
    prefill_seconds: float  # without compilation, as decode_seconds
    decode_seconds: float
    drafted: int = 0  # nodes of all draft trees
    accepted_lengths: tuple[int, ...] = (0,)  # steps that emitted 0, 1, ... drafted tokens
    accepted_by_source: dict[str, int] = dataclasses.field(default_factory=dict)
    draft_positions: int = 0  # see `alpha`
    method: Any = None  # with tree="auto" and draft_from="auto" resolved
    gave_up: bool = False  # tree="auto" went on with plain decoding, as drafts did not pay
    # Of a lazy prefill: the share of the prompt's tokens that each stage has computed so far, the
    # layers between two cuts being a stage. () where the whole prompt is computed.
    prompt_computed: tuple[float, ...] = ()
    compile_seconds: float = 0.0  # of prefill and decoding; kept programs are read in it

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
      sources: who drafted each of `tokens`, uint8: bit i stands for tsjax.SOURCES[i], 0 for nobody.
      stats: of the run so far.
    """

    tokens: list[np.ndarray]
    text: list[str] | None
    finish_reason: list[str | None]
    sources: list[np.ndarray]
    stats: RunStats


def generate(
    model: Model,
    prompt: Any = None,
    *,
    config: GenerationConfig | None = None,
    method: Any = None,
    prefill: Any = "full",
    streamer: Any = None,
    progress: bool = False,
    capacity: int | None = None,
    prefill_width: int = 512,
    exceed_max_positions: bool = False,
    save_to: str | os.PathLike | None = None,
    save_every: int = 1000,
    resume_from: str | os.PathLike | None = None,
    on_interrupt: str = "raise",
    **settings: Any,
) -> GenerationResult:
    """Generates new tokens for one prompt or a batch of prompts.

    Args:
      model: from `tsjax.load`.
      prompt: a string, a list of strings, one row of token ids, a batch of rows, or a ragged list.
      config: a GenerationConfig; `settings` (its fields: max_new_tokens, do_sample, temperature,
        top_p, seed, stop_strings, ...) override it one by one.
      method: "autoregressive", "ngram", "tokenswift" or a method's dataclass. All methods return
        the same tokens in float32 and float64; in bfloat16 and float16 drafts may part from plain
        decoding at a near-tie, see `check_run`. By default "autoregressive", or the method of the
        run that is resumed.
      prefill: "full"; "lazy" or a tsjax.LazyPrefill computes only a part of the prompt's tokens in
        its later layers, for the first token to come sooner. That changes what is said; with the
        same prefill, all methods return the same tokens, as above.
      streamer: an object with put(ids) and end(), as HuggingFace's streamers; single prompts only.
        It gets the prompt and then the tokens that this call makes.
      progress: show a progress bar with tokens/s and tokens/step on stderr.
      capacity: cache slots per row; by default the next power of two (from 32768 on the next
        multiple of it) that holds prompt and new tokens. Runs of one capacity share one compiled
        program.
      prefill_width: prompt tokens per pass of the prefill.
      exceed_max_positions: allow prompt and new tokens beyond what the model was made for.
      save_to: a file that receives prompt, settings and tokens every `save_every` tokens, when
        interrupted and at the end. A write that fails is a warning, and the result says so.
      resume_from: such a file; prompt, settings and method come from it, and the run goes on as if
        it had never stopped. Only `max_new_tokens` and `method` may be given anew.

      on_interrupt: what follows when Ctrl-C or SIGTERM has ended the run early and it is saved:
        "raise" raises tsjax.Interrupted, whose `result` is the GenerationResult, so that a loop
        over prompts ends, too; "return" returns it. Its finish_reason is "interrupted" where a
        row had not ended. A second Ctrl-C raises KeyboardInterrupt at once.

    Returns:
      A GenerationResult.

    Raises:
      Interrupted: see on_interrupt. It is a KeyboardInterrupt after Ctrl-C and a SystemExit after
        SIGTERM; a handler of your own for the signal is called before.
    """
    check_on_interrupt(on_interrupt)
    request = make_request(
        model,
        prompt,
        config,
        settings,
        method=method,
        prefill=prefill,
        capacity=capacity,
        prefill_width=prefill_width,
        exceed_max_positions=exceed_max_positions,
        resume_from=resume_from,
    )
    check_int(save_every, "save_every", 1)
    if save_to is not None and request.decode.prefill is not None:
        raise ValueError(
            f"save_to={os.fspath(save_to)!r} is not valid with a lazy prefill: what a run saw of "
            "its prompt is not saved, so it could not be resumed with the same tokens"
        )
    _check_streamer(streamer, request)
    interrupt = Interrupt()
    saving = _Saving(model, request, save_to, save_every)
    news = None
    with interrupt, _progress_bar(request, progress) as show:
        try:
            if streamer is not None:
                streamer.put(request.prompts[0])
            for news in _run(model, request, interrupt):
                if streamer is not None:
                    for token in news.tokens[0]:
                        streamer.put(np.asarray([token]))
                show(news)
                saving.save(news, last=False)
        finally:  # also when a streamer fails or a second Ctrl-C comes: what was made is kept
            if news is not None:
                saving.save(news, last=True)
    if streamer is not None:
        streamer.end()
    assert news is not None  # _run yields at least once
    result = _result(model, request, news, saving)
    interrupt.finish(result, on_interrupt)
    return result


def stream(
    model: Model,
    prompt: Any = None,
    *,
    config: GenerationConfig | None = None,
    method: Any = "autoregressive",
    prefill: Any = "full",
    capacity: int | None = None,
    prefill_width: int = 512,
    exceed_max_positions: bool = False,
    on_interrupt: str = "raise",
    **settings: Any,
) -> Iterator[StreamChunk]:
    """As `generate`, but an iterator of StreamChunk: the new tokens and text as they come.

    Arguments are checked at the call, not at the first chunk. Ctrl-C or SIGTERM during a chunk
    makes it the last one, with finish_reason "interrupted"; the following next() raises
    tsjax.Interrupted, or with on_interrupt="return" ends the stream. Between chunks signals are
    left alone.
    """
    check_on_interrupt(on_interrupt)
    request = make_request(
        model,
        prompt,
        config,
        settings,
        method=method,
        prefill=prefill,
        capacity=capacity,
        prefill_width=prefill_width,
        exceed_max_positions=exceed_max_positions,
    )
    return _stream(model, request, on_interrupt)


def _stream(model: Model, request: Request, on_interrupt: str) -> Iterator[StreamChunk]:
    interrupt, news = Interrupt(), None
    tokenizer = tokenizer_of(model)
    writers = [Detokenizer(tokenizer, context=row) for row in request.rows if tokenizer]
    for news in _run(model, request, interrupt):
        text = None
        if tokenizer:
            text = [
                writer.push(new) + (writer.flush() if ended else "")
                for writer, new, ended in zip(writers, news.tokens, news.newly_ended, strict=True)
            ]
        pairs = zip(news.reasons, news.newly_ended, strict=True)
        reasons = [reason if ended else None for reason, ended in pairs]
        yield StreamChunk(
            tokens=news.tokens,
            text=text,
            finish_reason=reasons,
            sources=news.sources,
            stats=_run_stats(request, news),
        )
    assert news is not None  # _run yields at least once
    interrupt.finish(_result(model, request, news), on_interrupt)


def forward(model: Model, tokens: Any) -> jax.Array:
    """Logits [B, T, V] of every position of tokens [B, T]; can be traced, `model` too.

    Its loops have no fixed length, so there is no reverse-mode gradient.
    """
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or tokens.size == 0 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens of shape {tokens.shape} and type {tokens.dtype} is not valid: [B, T] integers"
        )
    if any(isinstance(array, Tracer) for array in (tokens, *jax.tree.leaves(model.params))):
        return logits(model.params, tokens, cfg=model.cfg)
    check_row(np.asarray(tokens).ravel(), "tokens", model)
    return _programs(model).logits(model.params, tokens, cfg=model.cfg)


def _programs(model: Model) -> Programs:
    device = next(iter(jax.tree.leaves(model.params)[0].devices()))
    if device.platform == "gpu":
        keep_programs()
    return programs(device.platform, model.cfg.dtype)


def _check_streamer(streamer: Any, request: Request) -> None:
    if streamer is None:
        return
    if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"streamer={streamer!r:.80} is not valid: an object with put() and end()")
    if len(request.rows) > 1:
        raise ValueError(
            f"streamer takes one row, the prompt has {len(request.rows)}: use tsjax.stream"
        )


# ---------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _News:
    """One chunk as the host sees it. `all_tokens` are the rows' new tokens since the prompt."""

    tokens: list[np.ndarray]
    sources: list[np.ndarray]  # as in StreamChunk
    all_tokens: list[np.ndarray]
    reasons: list[str | None]
    newly_ended: list[bool]
    last: bool
    steps: StepStats  # of the run so far, as NumPy arrays
    computed: int  # tokens that the steps emitted, kept or not
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    gave_up: bool
    prompt_computed: tuple[float, ...]


def _run(model: Model, request: Request, interrupt: Interrupt) -> Iterator[_News]:
    """Yields one _News per chunk of steps; the last one has every finish reason filled in."""
    prefilling, decoding = Stopwatch(), Stopwatch()
    with prefilling, interrupt:
        state = start_run(model, request, interrupt)
    run_steps = _programs(model).decode
    watch = _StopStrings(model, request)
    emitted = [len(row) for row in request.rows]
    reasons = list(request.finish_reason)
    steps, decode, gave_up = 1, request.decode, False
    judged_from = _Progress(0, sum(map(len, request.rows)))
    reviving = is_reviving(state, cfg=decode)
    counted = earlier = _on_host(state.stats)
    while True:
        if not interrupt.requested and None in reasons:
            with decoding, interrupt:
                state = run_steps(model.params, state, steps, cfg=decode)
                state.kv.length.block_until_ready()
            steps = _next_chunk(steps, decoding.last)

        tokens, length, finish = map(np.asarray, (state.tokens, state.length, state.finish))
        counted = _sum_of_stats(earlier, state.stats) if gave_up else _on_host(state.stats)
        drafted_by = np.asarray(state.sources)
        new, sources, ended = [], [], []
        for row, reason in enumerate(reasons):
            fresh = np.array(tokens[row, emitted[row] : length[row]])
            if reason is None:
                cut = watch.find(row, fresh)
                if cut is not None:
                    fresh, reasons[row] = fresh[:cut], "stop_string"
                elif finish[row] in _REASONS:
                    reasons[row] = _REASONS[finish[row]]
                elif interrupt.requested:
                    reasons[row] = "interrupted"
            else:
                fresh = fresh[:0]
            ended.append(reason is None and reasons[row] is not None)
            sources.append(drafted_by[row, emitted[row] : emitted[row] + len(fresh)].copy())
            emitted[row] += len(fresh)
            new.append(fresh)
        last = None not in reasons
        yield _News(
            tokens=new,
            sources=sources,
            all_tokens=[
                tokens[row, n : emitted[row]].copy() for row, n in enumerate(request.prompt_length)
            ],
            reasons=list(reasons),
            newly_ended=ended,
            last=last,
            steps=counted,
            computed=int(length.sum()) - sum(map(len, request.rows)),
            prefill_seconds=prefilling.seconds,
            decode_seconds=decoding.seconds,
            compile_seconds=prefilling.compiling + decoding.compiling,
            gave_up=gave_up,
            prompt_computed=_prompt_computed(state),
        )
        if last:
            return
        progress = _Progress(int(np.sum(state.stats.steps)), int(length.sum()))
        reviving, was_reviving = is_reviving(state, cfg=decode), reviving
        if reviving or was_reviving:
            judged_from = progress  # steps end early then, whatever their drafts are worth
        if not gave_up and _drafts_do_not_pay(request, judged_from, progress):
            decode, gave_up, earlier = _plain(decode), True, counted
            state = _without_drafts(state)
        stopped = np.asarray([reason is not None for reason in reasons]) & (finish == RUNNING)
        if stopped.any():
            state = state.replace(finish=jnp.where(stopped, jnp.int8(STOPPED), state.finish))


def _plain(decode: DecodeConfig) -> DecodeConfig:
    return dataclasses.replace(decode, method=Autoregressive())


def _on_host(stats: StepStats) -> StepStats:
    return jax.tree.map(np.array, stats)


def _without_drafts(state: DecodeState) -> DecodeState:
    """The state as plain decoding has it, so that its program is the same; counters from 0."""
    none = jax.tree.map(jnp.zeros_like, state.stats)
    return state.replace(
        draft=DraftState(), stats=none.replace(accepted=jnp.zeros_like(none.accepted[:, :1]))
    )


def _sum_of_stats(earlier: StepStats, plain: StepStats) -> StepStats:
    """Counters of a run that went on with plain decoding, which accepts no drafts."""
    accepted = earlier.accepted.copy()
    accepted[:, :1] += np.asarray(plain.accepted)
    return earlier.replace(steps=earlier.steps + np.asarray(plain.steps), accepted=accepted)


def _prompt_computed(state: DecodeState) -> tuple[float, ...]:
    if state.prompt is None:
        return ()
    counts = np.asarray(jnp.sum(state.prompt.computed, axis=(1, 2)))
    rows, tokens = state.prompt_length.shape[0], int(np.sum(state.prompt_length))
    return tuple(float(count + rows) / tokens for count in counts)  # the last token comes anyway


class _Progress(NamedTuple):
    """Steps that were taken, and tokens that are known, of all rows."""

    steps: int
    tokens: int


def _drafts_do_not_pay(request: Request, begin: _Progress, now: _Progress) -> bool:
    taken, found = now.steps - begin.steps, now.tokens - begin.tokens
    return taken >= STEPS_TO_JUDGE and found < request.give_up_below * taken


_REASONS = {EOS: "eos", LENGTH: "length"}


def start_run(model: Model, request: Request, interrupt: Interrupt) -> DecodeState:
    """Allocates the state and prefills it."""
    cfg, config, rows = model.cfg, request.config, request.rows
    mesh = mesh_of(model.params)
    # As wide as the buffer: operations of init_state compile for a width, not for each prompt.
    tokens = np.zeros((len(rows), request.capacity), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    state = init_state(
        tokens,
        np.asarray(request.prompt_length, np.int32),
        cfg=request.decode,
        capacity=request.capacity,
        max_length=np.asarray(request.max_length, np.int32),
        length=np.asarray([len(row) for row in rows], np.int32),
        sampling=sampling_values(config, request.stop_ids, cfg.vocab_size, cfg.dtype),
        row_key=row_keys(request.seeds, repeat_numbers(request)),
        mesh=mesh,
        prompt_capacity=request.prompt_capacity,
    )
    if any(request.finish_reason):
        ended = np.asarray([reason is not None for reason in request.finish_reason])
        state = state.replace(finish=jnp.where(ended, jnp.int8(STOPPED), state.finish))
    for begun in _prefill(model, request, state):
        state = begun
        if interrupt.requested:
            break  # the rows are reported as interrupted, no step runs on this state
        state.kv.length.block_until_ready()
    return state


def _prefill(model: Model, request: Request, state: DecodeState) -> Iterator[DecodeState]:
    """Yields the state before each pass and behind the last one."""
    run, cfg = _programs(model), request.decode
    yield state
    if cfg.prefill is None:
        start = 0
        for width in request.prefill_widths[0]:
            state = run.prefill_chunk(model.params, state, start, width=width, cfg=cfg)
            start += width
            yield state
        return
    for stage, widths in enumerate(request.prefill_widths):
        for width in widths:
            state = run.fill_stage(model.params, state, stage=stage, width=width, cfg=cfg)
            yield state
        if stage < len(request.prefill_widths) - 1:
            state = run.choose_stage(model.params, state, stage=stage, cfg=cfg)
            yield state


def _next_chunk(steps: int, elapsed: float) -> int:
    """Chunks grow until one takes long enough not to matter and short enough to be interrupted."""
    wanted = int(steps * SECONDS_PER_CHUNK / max(elapsed, 1e-6))
    return max(1, min(wanted, 4 * steps))


class _StopStrings:
    """Finds the token that completes a stop string, also across token boundaries and chunks.

    As in transformers, a stop string may begin in the prompt. Special tokens are no part of the
    text, but a stop string may name one; a token that ends the row anyway is left to that.
    """

    def __init__(self, model: Model, request: Request):
        self.stops = request.config.stop_strings
        if not self.stops:
            return
        tokenizer, self.keep = model.tokenizer, max(map(len, self.stops)) - 1
        self.special = {
            index: text
            for index, text in special_tokens(tokenizer).items()
            if index not in request.stop_ids and any(text in stop for stop in self.stops)
        }
        self.writers = [Detokenizer(tokenizer, context=row) for row in request.rows]
        recent = [row[-self.keep - 64 :] for row in request.rows]
        self.tails = [self._tail(decode_text(tokenizer, ids.tolist())) for ids in recent]

    def find(self, row: int, tokens: np.ndarray) -> int | None:
        """How many of `tokens` it takes to complete a stop string, None if none does."""
        if not self.stops:
            return None
        for index, token in enumerate(tokens):
            tail, writer = self.tails[row], self.writers[row]
            text = tail + writer.push([token])
            # If the row ended here, its text would end with what is still pending.
            whole = text + writer.pending() + self.special.get(int(token), "")
            # Only a match that ends behind the tail is new.
            if any(whole.find(s, max(0, len(tail) - len(s) + 1)) >= 0 for s in self.stops):
                return index + 1
            self.tails[row] = self._tail(text)
        return None

    def _tail(self, text: str) -> str:
        return text[-self.keep :] if self.keep else ""


def _run_stats(request: Request, news: _News) -> RunStats:
    counts, by_source = news.steps, news.steps.by_source.sum(axis=0)
    decode = request.decode
    return RunStats(
        prompt_tokens=tuple(request.prompt_length),
        new_tokens=tuple(len(row) for row in news.all_tokens),
        steps=tuple(counts.steps.tolist()),
        computed_tokens=news.computed,
        prefill_seconds=news.prefill_seconds,
        decode_seconds=news.decode_seconds,
        drafted=int(counts.drafted.sum()),
        accepted_lengths=tuple(counts.accepted.sum(axis=0).tolist()),
        accepted_by_source=dict(zip(SOURCES, by_source.tolist(), strict=True)),
        draft_positions=max(decode.draft_levels, decode.ngram_depth) or decode.draft_depth,
        method=decode.method,
        gave_up=news.gave_up,
        prompt_computed=news.prompt_computed,
        compile_seconds=news.compile_seconds,
    )


def _result(
    model: Model, request: Request, news: _News, saving: _Saving | None = None
) -> GenerationResult:
    return GenerationResult(
        tokens=news.all_tokens,
        finish_reason=[str(reason) for reason in news.reasons],
        stats=_run_stats(request, news),
        problems=tuple(saving.problems) if saving else (),
        unsaved=saving.unsaved if saving else False,
        _prompts=request.prompts,
        _single=request.single,
        _tokenizer=lambda: model.tokenizer,
    )


@contextlib.contextmanager
def _progress_bar(request: Request, wanted: bool) -> Iterator[Callable[[_News], None]]:
    """Yields a function that takes each _News; a tqdm bar over the tokens of all rows if wanted."""
    if not wanted:
        yield lambda news: None
        return
    from tqdm import tqdm

    total = len(request.rows) * request.config.max_new_tokens
    made = sum(request.num_made)
    # tqdm's own rate would count the seconds of compiling.
    parts = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
    with tqdm(total=total, initial=made, bar_format=parts, dynamic_ncols=True) as bar:

        def show(news: _News) -> None:
            per_second = news.computed / max(news.decode_seconds, 1e-9)
            per_step = news.computed / max(int(news.steps.steps.sum()), 1)
            bar.set_postfix_str(f"{per_second:.1f} tok/s, {per_step:.2f} tok/step", False)
            bar.update(sum(map(len, news.tokens)))

        yield show


class _Saving:
    """Writes a run's file. A failure is a warning and no end of the run: it may pass."""

    def __init__(self, model: Model, request: Request, path: Any, every: int):
        self._model, self._request, self._path, self._every = model, request, path, every
        self._written = 0
        self.problems: list[str] = []
        self.unsaved = False
        if path is not None:
            check_target(path)
            self._fingerprint = model_fingerprint(model)

    def save(self, news: _News, *, last: bool) -> None:
        """Writes the last news, and others when enough tokens have come since the last time."""
        count = max(map(len, news.all_tokens))
        if self._path is None or not (last or count - self._written >= self._every):
            return
        self._written = count
        run = SavedRun(
            fingerprint=self._fingerprint,
            model_path=self._model.path,
            dtype=self._model.cfg.dtype,
            method=self._request.method,
            exceed_max_positions=self._request.exceed_max_positions,
            single=self._request.single,
            config=self._request.config,
            prompts=self._request.prompts,
            tokens=news.all_tokens,
            finish_reason=[None if r == "interrupted" else r for r in news.reasons],
        )
        try:
            write_run(self._path, run)
            self.unsaved = False
        except OSError as error:  # a full disk must not cost the tokens that are in memory
            self.unsaved = True
            problem = f"save_to={os.fspath(self._path)!r} was not written: {error}"
            if problem not in self.problems:
                self.problems.append(problem)
                warnings.warn(problem, stacklevel=3)

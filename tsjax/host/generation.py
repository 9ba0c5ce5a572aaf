# SPDX-License-Identifier: Apache-2.0
"""generate() and stream(): what a user calls.

Knows text, streaming, progress and interrupts. Does not know how a run goes: `make_request` has
checked everything a user passed, and `run` yields what is new after each chunk of steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tsjax.base.checks import check, check_int
from tsjax.base.errors import BadType, BadValue
from tsjax.base.generation_config import GenerationConfig
from tsjax.base.line_writer import told_as
from tsjax.base.telling import Progress, doing
from tsjax.decoding.method import Method
from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import model_fingerprint
from tsjax.files.tokenizer import Detokenizer
from tsjax.host.asking import make_request
from tsjax.host.info import facts
from tsjax.host.interrupt import Interrupt, check_on_interrupt
from tsjax.host.prefix import Prefix
from tsjax.host.progress import progress_bar
from tsjax.host.prompts import tokenizer_of
from tsjax.host.reading import kept_prefix
from tsjax.host.request import Request
from tsjax.host.result import GenerationResult, RunStats, StreamChunk
from tsjax.host.run import News, run
from tsjax.host.saving import Saving
from tsjax.methods.corpus import Corpus


def generate(
    model: Model,
    prompt: Any = None,
    *,
    config: GenerationConfig | None = None,
    method: Any = None,
    prefill: Any = None,
    streamer: Any = None,
    progress: bool | Callable[[Progress], object] = False,
    capacity: int | None = None,
    prefill_width: int | None = None,
    exceed_max_positions: bool = False,
    save_to: str | os.PathLike | None = None,
    save_every: int = 1000,
    resume_from: str | os.PathLike | None = None,
    on_interrupt: str = "raise",
    corpus: Corpus | None = None,
    draft_model: Model | None = None,
    logits_processor: Any = None,
    prefix: Prefix | str | os.PathLike | None = None,
    keep_prefix: bool = False,
    **settings: Any,
) -> GenerationResult:
    """Generates new tokens for one prompt or a batch of prompts.

    Args:
      model: from `tsjax.load`.
      prompt: a string, a list of strings, one row of token ids, a batch of rows, or a ragged list.
        In its place messages=[{"role": ..., "content": ...}, ...], a chat or several, by the
        checkpoint's template, or a tokenizer's output: generate(model, **tokenizer(text)).
      config: a GenerationConfig; `settings` (its fields: max_new_tokens, do_sample, temperature,
        top_p, seed, stop_strings, num_return_sequences, logprobs, ...) override it one by one.
      method: "autoregressive", "ngram", "tokenswift" (with settings chosen for the machine, as
        tsjax.Auto()), the name of a method of your own, or a method's dataclass. All methods return
        the same tokens in float32 and float64; in bfloat16 and float16 drafts may part from plain
        decoding at a near-tie, see `check_run`. By default the method of the run that is resumed,
        "draft_model" where there is a second model, and else "autoregressive".
      prefill: "full"; "lazy" or a tsjax.LazyPrefill computes only a part of the prompt's tokens in
        its later layers, for the first token to come sooner. That changes what is said; with the
        same prefill, all methods return the same tokens, as above. By default that of the run that
        is resumed, and else "full".
      streamer: an object with put(ids) and end(), as HuggingFace's streamers; single prompts only.
        It gets the prompt and then the tokens that this call makes.
      progress: True for lines and a bar on stderr; a function gets each `Progress`.
      capacity: cache slots per row; by default the next power of two (from 32768 on the next
        multiple of it) that holds prompt and new tokens. Runs of one capacity share one compiled
        program.
      prefill_width: prompt tokens per pass of the prefill; None for 512, on a GPU for up to 2,048
        of all rows together where memory allows.
      exceed_max_positions: allow prompt and new tokens beyond what the model was made for.
      save_to: a file that receives prompt, settings and tokens every `save_every` tokens, when
        interrupted and at the end. A write that fails is a warning, and the result says so. One run
        at a time writes a file: another one is refused.
      resume_from: such a file; prompt, settings, method and prefill come from it, and the run goes
        on as if it had never stopped. `max_new_tokens` and `method` may be given anew; what is in
        no file has to be: logits processors, a corpus, a second model.
      on_interrupt: what follows when Ctrl-C or SIGTERM has ended the run early and it is saved:
        "raise" raises tsjax.Interrupted, whose `result` is the GenerationResult, so that a loop
        over prompts ends, too; "return" returns it. Its finish_reason is "interrupted" where a
        row had not ended. A second Ctrl-C raises KeyboardInterrupt at once.
      corpus: earlier texts to draft from, for method="auto" and tsjax.LikelyTree: an output for the
        same prompt, templates. It changes no token; a run that is resumed takes it anew.
      draft_model: a second model of the same vocabulary, for method="draft_model" and
        tsjax.methods.TriForce. It changes no token; a run that is resumed takes it anew.
      logits_processor: a function (logits [V], tokens [C], length) -> logits of what comes after
        the first `length` tokens, a tsjax.LogitsProcessor, or several of them in their order. They
        run in the compiled step, for every node of a draft tree, after the penalties and before the
        temperature. A run that is resumed takes the same ones anew.
      prefix: what was read before (`tsjax.read`, `keep_prefix`), or the file that its `save` wrote:
        it is not read again, and changes no token. A lazy prefill cuts only what comes after it.
      keep_prefix: keep what this run reads and writes as `result.prefix`, for a prompt that goes on
        with it; single prompts only.

    Returns:
      A GenerationResult.

    Raises:
      Interrupted: see on_interrupt. It is a KeyboardInterrupt after Ctrl-C and a SystemExit after
        SIGTERM; a handler of your own for the signal is called before.
    """
    check_on_interrupt(on_interrupt)
    with told_as(progress):
        request = make_request(
            model, prompt, config, settings, method=method, prefill=prefill, capacity=capacity,
            prefill_width=prefill_width, exceed_max_positions=exceed_max_positions,
            resume_from=resume_from, corpus=corpus, draft_model=draft_model,
            logits_processor=logits_processor, prefix=prefix,
        )  # fmt: skip
        how = streamer, progress is True, save_to, save_every, on_interrupt, keep_prefix
        return _generated(model, request, *how)


def _generated(
    model: Model, request: Request, streamer: Any, with_bar: bool, save_to: Any, save_every: int,
    on_interrupt: str, keep_prefix: bool,
) -> GenerationResult:  # fmt: skip
    """What a run makes, while others are told of it: a streamer, a bar, a file."""
    check_int(save_every, "save_every", 1)
    _check_keep_prefix(keep_prefix, request)
    _check_streamer(streamer, request)
    interrupt, saving = Interrupt(), Saving(model, request, save_to, save_every)
    news = None
    with interrupt, saving, _Told(request, with_bar) as told:
        try:
            if streamer is not None:
                streamer.put(request.prompts[0])
            for news in run(model, request, interrupt, watched=streamer is not None):
                if streamer is not None:
                    for token in news.tokens[0]:
                        streamer.put(np.asarray([token]))
                told.tell(news)
                saving.save(news, last=False)
        except BaseException:  # a streamer fails, a second Ctrl-C comes, another process has ended
            if news is not None:  # what was made is saved
                saving.save(news, last=True, alone=True)
            raise
        assert news is not None  # `run` yields at least once
        saving.save(news, last=True)
    if streamer is not None:
        streamer.end()
    result = result_of(model, request, news, saving)
    if keep_prefix:
        prefix = kept_prefix(model, request, news, interrupt)
        result = dataclasses.replace(result, prefix=prefix)
    interrupt.finish(result, on_interrupt)
    return result


def stream(
    model: Model,
    prompt: Any = None,
    *,
    config: GenerationConfig | None = None,
    method: Any = None,
    prefill: Any = "full",
    capacity: int | None = None,
    prefill_width: int | None = None,
    exceed_max_positions: bool = False,
    on_interrupt: str = "raise",
    corpus: Corpus | None = None,
    draft_model: Model | None = None,
    logits_processor: Any = None,
    prefix: Prefix | str | os.PathLike | None = None,
    progress: bool | Callable[[Progress], object] = False,
    **settings: Any,
) -> Iterator[StreamChunk]:
    """As `generate`, but an iterator of StreamChunk: the new tokens and text as they come.

    Arguments are checked at the call, not at the first chunk. Ctrl-C or SIGTERM during a chunk
    makes it the last one, with finish_reason "interrupted"; the following next() raises
    tsjax.Interrupted, or with on_interrupt="return" ends the stream. Between chunks signals
    are not handled. `progress` tells what takes long until a chunk is there; there is no bar.
    """
    check_on_interrupt(on_interrupt)
    with told_as(progress):
        request = make_request(
            model, prompt, config, settings, method=method, prefill=prefill, capacity=capacity,
            prefill_width=prefill_width, exceed_max_positions=exceed_max_positions, corpus=corpus,
            draft_model=draft_model, logits_processor=logits_processor, prefix=prefix,
        )  # fmt: skip
    return _told_each(_stream(model, request, on_interrupt), progress)


def _told_each(chunks: Iterator[StreamChunk], progress: Any) -> Iterator[StreamChunk]:
    """What is at work is told until a chunk is there, not while its reader has it."""
    while True:
        with told_as(progress):
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield chunk


def _stream(model: Model, request: Request, on_interrupt: str) -> Iterator[StreamChunk]:
    interrupt, news, tokenizer = Interrupt(), None, tokenizer_of(model)
    writers = [Detokenizer(tokenizer, context=row) for row in request.rows if tokenizer]
    for news in run(model, request, interrupt, watched=True):
        rows = list(zip(news.tokens, news.reasons, news.newly_ended, strict=True))
        text = [
            writer.push(new) + (writer.flush() if ended else "")
            for writer, (new, _, ended) in zip(writers, rows, strict=False)  # none without text
        ]
        yield StreamChunk(
            tokens=news.tokens,
            text=text if tokenizer else None,
            finish_reason=[reason if ended else None for _, reason, ended in rows],
            sources=news.sources,
            stats=run_stats(request, news),
            logprobs=news.logprobs,
        )
    assert news is not None  # `run` yields at least once
    interrupt.finish(result_of(model, request, news), on_interrupt)


def _check_keep_prefix(keep_prefix: Any, request: Request) -> None:
    check(isinstance(keep_prefix, bool), "keep_prefix", keep_prefix, "True or False")
    if keep_prefix:
        rows = len(request.rows)
        check(rows == 1, "keep_prefix", keep_prefix, f"for one row alone; the call has {rows}")


def _check_streamer(streamer: Any, request: Request) -> None:
    if streamer is None:
        return
    if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise BadType(f"streamer={streamer!r:.80} is not valid: an object with put() and end()")
    rows = len(request.rows)
    if rows > 1:
        raise BadValue(f"streamer takes one row, the prompt has {rows}: use tsjax.stream")


class _Told(contextlib.ExitStack):
    """Tells how many tokens of all rows are made, by a bar or as a work. Begins with the first
    news: before, other works are told."""

    def __init__(self, request: Request, with_bar: bool):
        super().__init__()
        self._with_bar, self._bar, self._work = with_bar, None, None
        self._total = len(request.rows) * request.config.max_new_tokens
        # By a run that is resumed.
        self._made = sum(map(len, request.rows)) - sum(request.prompt_length)

    def tell(self, news: News) -> None:
        new = sum(map(len, news.tokens))
        if self._with_bar:
            if self._bar is None:
                self._bar = self.enter_context(self._begun_bar())
            self._bar.set_postfix_str(_figures(news), refresh=False)
            self._bar.update(new)
            return
        self._made += new
        if self._work is None:
            self._work = self.enter_context(doing("writing", self._total, "tokens"))
        self._work.done(self._made)

    def _begun_bar(self) -> Any:
        # tqdm's own rate would count the seconds of compiling.
        parts = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        return progress_bar(True, self._total, "tok", initial=self._made, bar_format=parts)


def _figures(news: News) -> str:
    """What the progress bar says."""
    per_second = news.computed / max(news.decode_seconds, 1e-9)
    per_step = news.computed / max(int(news.steps.steps.sum()), 1)
    return f"{per_second:.1f} tok/s, {per_step:.2f} tok/step"


def run_stats(request: Request, news: News) -> RunStats:
    counts, by_source = news.steps, news.steps.by_source.sum(axis=0)
    method, sizes = request.decode.method, request.decode.sizes
    return RunStats(
        prompt_tokens=tuple(request.prompt_length),
        new_tokens=tuple(len(row) for row in news.all_tokens),
        steps=tuple(counts.steps.tolist()),
        computed_tokens=news.computed,
        prefill_seconds=news.prefill_seconds,
        decode_seconds=news.decode_seconds,
        drafted=int(counts.drafted.sum()),
        accepted_lengths=tuple(counts.accepted.sum(axis=0).tolist()),
        accepted_by_source=dict(zip(method.sources, by_source.tolist(), strict=True)),
        draft_positions=sizes.positions or sizes.depth,
        method=method,
        gave_up=news.gave_up,
        prompt_computed=news.prompt_computed,
        compile_seconds=news.compile_seconds,
        beside_seconds=news.beside_seconds,
        prefix_tokens=request.prefix_length,
    )


def result_of(
    model: Model, request: Request, news: News, saving: Saving | None = None
) -> GenerationResult:
    config, processors = request.config, [[one.name, one.version] for one in request.processors]
    return GenerationResult(
        tokens=news.all_tokens,
        finish_reason=[str(reason) for reason in news.reasons],
        stats=run_stats(request, news),
        problems=tuple(saving.problems if saving else ()),
        unsaved=saving is not None and saving.unsaved,
        _prompts=request.prompts,
        _single=request.single,
        _tokenizer=lambda: model.tokenizer,
        _answers=config.num_return_sequences,
        logprobs=news.all_logprobs(),
        # Without the request, which may hold caches.
        _facts=functools.partial(facts_of, model, config, request.method, processors),
    )


def facts_of(
    model: Model, config: GenerationConfig, method: Method, processors: list[list[Any]]
) -> dict[str, Any]:
    """What made a result, so that it can be made again."""
    return {
        "config": dataclasses.asdict(config),
        "method": f"{method}",
        **({"logits_processors": processors} if processors else {}),
        "model": {
            "path": model.path,
            "dtype": model.cfg.dtype,
            "fingerprint": model_fingerprint(model),
        },
        **facts(("tsjax", "jax", "jaxlib", "numpy")),
    }

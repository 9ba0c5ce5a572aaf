# SPDX-License-Identifier: Apache-2.0
"""A call of `generate`, checked: what comes out is a Request, or an error that names the argument,
its value and a remedy.

Knows what a user may pass and what the model allows. Runs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tsjax.base.checks import check, check_int, check_type
from tsjax.base.errors import BadValue, NotEnoughMemory
from tsjax.base.generation_config import GenerationConfig, given_config, known_settings
from tsjax.base.typing import accumulation_dtype
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.logprobs import LogProbs
from tsjax.decoding.method import Measured, Method
from tsjax.decoding.processors import check_processors
from tsjax.decoding.reading import parts
from tsjax.files.checkpoint import Model
from tsjax.host import sizes
from tsjax.host.costs import measured_on
from tsjax.host.lookups import lookups_of
from tsjax.host.measuring import device_in
from tsjax.host.prefix import Prefix, check_prefix, check_prefix_is_read_alike, read_prefix
from tsjax.host.processes import check_same, check_shared
from tsjax.host.prompts import prompt_of, prompt_rows, refuse_deep, refuse_tracing, tokenizer_of
from tsjax.host.request import Request
from tsjax.host.result import no_log_probs
from tsjax.host.resuming import check_same_prefill, check_same_processors, resumed_run
from tsjax.host.saved_run import SavedRun
from tsjax.lazy.prefill import LazyPrefill
from tsjax.lazy.settings import LONGEST_PROMPT
from tsjax.methods import resolve_method
from tsjax.methods.corpus import Corpus
from tsjax.methods.devices import leaves_out_rows
from tsjax.model.sharding import mesh_of


def make_request(
    model: Any,
    prompt: Any,
    config: GenerationConfig | None,
    settings: Mapping[str, Any],
    *,
    method: Any = None,
    prefill: Any = None,
    capacity: int | None = None,
    prefill_width: int | None = None,
    exceed_max_positions: bool = False,
    resume_from: str | os.PathLike | None = None,
    corpus: Corpus | None = None,
    draft_model: Model | None = None,
    logits_processor: Any = None,
    prefix: Prefix | str | os.PathLike | None = None,
    read_first: int = 0,
    least_to_prune: int = 0,
) -> Request:
    """The arguments of `generate`, see there. With a lazy prefill the first `read_first` tokens,
    those of a prefix that a saved run began with, are read as a whole, and all where fewer than
    `least_to_prune` are new."""
    check_type(model, Model, "model", "what tsjax.load returns")
    refuse_deep(prompt)
    refuse_tracing(model, prompt)
    check_shared(model.params)
    prompt, settings = prompt_of(model, prompt, settings)
    settings, config = known_settings(settings), given_config(config)
    lazy = _resolve_prefill(prefill)
    if prefill_width is not None:
        check_int(prefill_width, "prefill_width", 1)
    run, of_run = None, ""
    if resume_from is None:
        texts = _fresh(model, prompt, config, settings)
    else:
        if config is not None or set(settings) - {"max_new_tokens"}:
            beside = "pass nothing but max_new_tokens beside it"
            raise BadValue(f"resume_from continues a run with its own settings: {beside}")
        run = resumed_run(model, resume_from, prompt, settings)
        begun = run.prompts, run.tokens, run.single, run.config, run.finish_reason, run.logprobs
        texts, of_run = Texts(*begun), f"resume_from={os.fspath(resume_from)!r}"
        method = run.method if method is None else method
        exceed_max_positions = exceed_max_positions or run.exceed_max_positions
    if method is None:
        method = "autoregressive" if draft_model is None else "draft_model"
    method, config, lengths = resolve_method(method), texts.config, [*map(len, texts.prompts)]
    _check_against_model(config, model)
    prefix = None if prefix is None else prefix_in_memory(prefix, model)
    if run is None:
        lazy, prefix, known = _reading(model, texts, lazy, prefix, read_first, least_to_prune)
    else:
        said = None if prefill is None else of_run
        lazy, prefix, known = _reading_again(model, texts, lazy, prefix, run, said)
    if lazy is not None:
        _check_lazy(lazy, texts.prompts, known)
    _check_corpus(corpus, method, model)
    _check_draft_model(draft_model, method, model)
    of_scores, most = accumulation_dtype(model.cfg.dtype), max(lengths) + config.max_new_tokens
    processors = check_processors(logits_processor, model.cfg.vocab_size, most, of_scores)
    if run is not None:
        check_same_processors(of_run, run, processors)
    given = [[row.tobytes() for row in rows] for rows in (texts.prompts, texts.made)]
    check_same("generate", *given, config, type(method).__name__, lazy, capacity, prefill_width)
    context, rows = max(lengths) + config.max_new_tokens // 2, texts.rows
    measured = measured_on(method, model, context, len(rows), config.max_new_tokens)
    second = None if draft_model is None else draft_model.cfg
    request = Request(
        rows=rows,
        prompt_length=lengths,
        finish_reason=texts.reasons,
        single=texts.single,
        config=config,
        method=method,
        decode=_decode_config(model, lazy),
        measured=measured._replace(corpus=corpus is not None, draft_model=second),
        stop_ids=_stop_ids(config, model),
        prompt_capacity=0 if lazy is None else _bucket(max(lengths)),
        exceed_max_positions=exceed_max_positions,
        corpus=corpus,
        draft_model=draft_model,
        processors=processors,
        prefix=prefix,
        prefix_length=known,
        logprobs=texts.logprobs,
    )
    return _that_fits(request, model, capacity, prefill_width)


def longer_request(
    model: Model,
    request: Request,
    made: np.ndarray,
    max_new_tokens: int,
    *,
    prefix: Prefix | None = None,
    logprobs: list[LogProbs] | None = None,
    capacity: int | None = None,
    prefill_width: int | None = None,
) -> Request:
    """One row of `made` tokens goes on, to `max_new_tokens`, as if that had been the limit before.
    `prefix` is what was read of it, and `logprobs` those of what was made."""
    rows = [np.concatenate([request.prompts[0], made])]
    context = request.prompt_length[0] + max_new_tokens // 2
    measured, was = measured_on(request.method, model, context, 1, max_new_tokens), request.measured
    known = request.prefix_length  # of which a lazy prefill keeps all
    if request.decode.prefill is None:
        known = 0 if prefix is None else prefix.shared_with(rows)
    request = dataclasses.replace(
        request,
        rows=rows,
        finish_reason=[None],
        config=request.config.replace(max_new_tokens=max_new_tokens),
        measured=measured._replace(corpus=was.corpus, draft_model=was.draft_model),
        prefix=prefix,
        prefix_length=known,
        logprobs=logprobs,
    )
    return _that_fits(request, model, capacity, prefill_width)


def batch_request(
    model: Model, request: Request, rows: int, capacity: int | None, prefill_width: int | None
) -> Request:
    """A batch with room for `rows` texts like that of the request: none is in it yet, and nobody
    knows how many will be."""
    was = request.measured
    measured = measured_on(request.method, model, was.context, rows)
    batch = dataclasses.replace(
        request,
        rows=request.rows * rows,
        prompt_length=request.prompt_length * rows,
        finish_reason=["stopped"] * rows,
        measured=measured._replace(corpus=was.corpus, draft_model=was.draft_model),
        logprobs=request.logprobs and request.logprobs * rows,
    )
    batch = _that_fits(batch, model, capacity, prefill_width)
    empty: dict[str, Any] = dict(rows=[request.rows[0][:1]] * rows, prompt_length=[1] * rows)
    empty |= dict(of_rows=None, prefill_widths=[], prefix=None, prefix_length=0)
    return dataclasses.replace(batch, capacity=max(batch.capacity, request.capacity), **empty)


def prefix_in_memory(prefix: Any, model: Model) -> Prefix:
    """What was read before, as it is or from its file, checked against the model."""
    if isinstance(prefix, str | os.PathLike):
        return read_prefix(prefix, model, sizes.capacity_bucket)
    check_prefix(prefix, model)
    return prefix


def _reading(
    model: Model, texts: Texts, lazy: LazyPrefill | None, prefix: Prefix | None, read_first: int,
    least_to_prune: int,
) -> tuple[LazyPrefill | None, Prefix | None, int]:  # fmt: skip
    """How the prompts of a run that begins are read: lazily, with the cuts named, or as a whole;
    and of what was read before so many tokens. Where a prefix leaves one token to each row, nothing
    can be pruned."""
    if prefix is not None:
        read_first = prefix.shared_with(texts.prompts)
    if lazy is None:
        return None, prefix, read_first
    new = max(map(len, texts.prompts)) - read_first
    is_short = 0 < least_to_prune and new < max(least_to_prune, lazy.last_tokens)
    if is_short or (prefix is not None and new < 2):
        return None, prefix, read_first
    return _named_cuts(lazy, model, texts.prompts, read_first), prefix, read_first


def _reading_again(
    model: Model, texts: Texts, lazy: LazyPrefill | None, prefix: Prefix | None, run: SavedRun,
    said_of: str | None,
) -> tuple[LazyPrefill | None, Prefix | None, int]:  # fmt: skip
    """The same for a run that goes on: what a lazy one took as read before, it takes again. Where
    the caller says `lazy` of the run, it has to be so."""
    known = run.prefix_length
    if said_of is not None:
        named = lazy and _named_cuts(lazy, model, texts.prompts, known)
        check_same_prefill(said_of, run, named)
    if run.prefill is None:
        known = 0 if prefix is None else prefix.shared_with(texts.rows)
    elif prefix is not None and prefix.shared_with(texts.prompts) < known:
        prefix = None
    check_prefix_is_read_alike(prefix, known, "resume_from")
    return run.prefill, prefix, known


def _bucket(tokens: int) -> int:
    return sizes.capacity_bucket(tokens, sizes.SMALLEST_PREFILL)


class Texts(NamedTuple):
    """What rows begin with: as fields of Request, but for `made`, the tokens after each prompt."""

    prompts: list[np.ndarray]
    made: list[np.ndarray]
    single: bool
    config: GenerationConfig
    reasons: list[str | None]
    logprobs: list[LogProbs] | None

    @property
    def rows(self) -> list[np.ndarray]:
        return [np.concatenate(pair) for pair in zip(self.prompts, self.made, strict=True)]


def _fresh(
    model: Model, prompt: Any, config: GenerationConfig | None, settings: Mapping[str, Any]
) -> Texts:
    if prompt is None:
        ways = "text or token ids (or messages=[...], or resume_from=FILE)"
        raise BadValue(f"prompt=None is not valid: {ways}")
    config = (config or GenerationConfig()).replace(**settings)
    prompts, single = prompt_rows(model, prompt)
    answers = config.num_return_sequences
    if isinstance(config.seed, tuple):
        wanted = f"one for each of {len(prompts)} prompts"
        check(len(config.seed) == len(prompts), "seed", config.seed, wanted)
    prompts = [row for row in prompts for _ in range(answers)]
    count = len(prompts)
    logprobs = None if config.logprobs is None else [no_log_probs(config.logprobs)] * count
    made = [np.zeros(0, np.int32)] * count
    return Texts(prompts, made, single and answers == 1, config, [None] * count, logprobs)


def _that_fits(
    request: Request, model: Model, capacity: int | None, prefill_width: int | None
) -> Request:
    """With its sizes; where memory is short, with narrow passes of a prefill, each text read by
    itself, and without an int8 copy that nobody asked for."""

    def sized(measured: Measured) -> Request:
        return _sized(request, model, measured, capacity, width)

    if prefill_width is None and request.decode.prefill is None:
        width = sizes.wide_prefill(device_in(model.params)[0], len(request.rows))
        with contextlib.suppress(BadValue):  # slots that were asked for may not hold its last pass
            found = sized(request.measured)
            if not sizes.memory_shortage(found, model):
                return found
    width = prefill_width or sizes.NARROW_PREFILL
    found = sized(request.measured)
    shortage = sizes.memory_shortage(found, model)
    if shortage and found.of_rows is not None:  # a text that is read once needs a cache for that
        found = dataclasses.replace(found, of_rows=None)
        shortage = sizes.memory_shortage(found, model)
    if shortage and not request.method.wants_int8:
        model.drop_copies()
        found = sized(request.measured._replace(int8_fits=False))
        shortage = sizes.memory_shortage(found, model)
    if shortage:
        raise NotEnoughMemory(shortage)
    return found


def _sized(
    request: Request, model: Model, measured: Measured, capacity: int | None, prefill_width: int
) -> Request:
    """With the method that is begun with, its passes and slots."""
    lazy, rows, known = request.decode.prefill, request.rows, request.prefix_length
    decode = dataclasses.replace(request.decode, method=request.method.next(measured))
    made = 0
    if lazy is not None:
        pairs = zip(map(len, rows), request.prompt_length, strict=True)
        made = max(length - prompt for length, prompt in pairs)
    longest = max(map(len, rows)) if lazy is None else max(request.prompt_length)
    first = known if lazy is not None and request.prefix is None else 0
    some = longest - known > min(prefill_width, sizes.NARROW_PREFILL)
    once = some and lazy is None and mesh_of(model.params) is None
    counts = parts(decode, longest - known)
    request = dataclasses.replace(
        request,
        decode=decode,
        measured=measured,
        prefill_widths=[sizes.widths_of(int(count), prefill_width) for count in counts],
        prefix_widths=sizes.widths_of(first, prefill_width),
        made_widths=sizes.widths_of(made, lazy.most_made_at_once(prefill_width)) if lazy else [],
        of_rows=_shared_texts(rows) if once else None,
    )
    sizes.check_positions(request)
    slots = sizes.capacity_of(request, capacity, prefill_width)
    fewer = min(request.prompt_capacity, slots)
    return dataclasses.replace(request, capacity=slots, prompt_capacity=fewer)


def _named_cuts(
    lazy: LazyPrefill, model: Model, prompts: list[np.ndarray], read_before: int
) -> LazyPrefill | None:
    """With its cuts named, for all prompts of a bucket alike, as every other setting is another
    program. None where so few tokens are new that all would go on."""
    new = [len(prompt) - read_before for prompt in prompts]
    measures = lazy.keep == "auto" and model.cfg.num_layers > 1
    if not measures:
        return lazy.resolved(model.cfg, _bucket(max(new)))
    if max(new) <= lazy.least:
        return None
    if lazy.window is None:  # a row beside a long one may be short
        lazy = dataclasses.replace(lazy, window=min(lazy.last_tokens, *new))
    return lazy.resolved(model.cfg, _bucket(max(new)), lookups_of(model).layer)


def _check_lazy(lazy: LazyPrefill, prompts: list[np.ndarray], read_before: int) -> None:
    most = f"with a lazy prefill at most {LONGEST_PROMPT} tokens"
    for index, size in enumerate(map(len, prompts)):
        check(size <= LONGEST_PROMPT, "prompt", f"row {index} of {size} tokens", most)
        wanted = f"at most the {size} tokens of the prompt in row {index}"
        for name, count in lazy.kept_anyway.items():
            check(count <= size, name, count, wanted)
        new = f"at most the {size - read_before} tokens of row {index} after the prefix"
        check(lazy.last_tokens <= size - read_before, "window", lazy.last_tokens, new)


def _shared_texts(rows: list[np.ndarray]) -> tuple[int, ...] | None:
    """For each row which of the distinct ones it is; None where too few are the same to matter."""
    places: dict[bytes, int] = {}
    of_rows = tuple(places.setdefault(row.tobytes(), len(places)) for row in rows)
    return of_rows if 2 * len(places) <= len(rows) else None


def _decode_config(model: Model, lazy: LazyPrefill | None) -> DecodeConfig:
    leaves_out = leaves_out_rows(device_in(model.params)[0], model.cfg)
    return DecodeConfig(model=model.cfg, prefill=lazy, leaves_out_rows=leaves_out)


def _resolve_prefill(prefill: Any) -> LazyPrefill | None:
    """None for the whole prompt."""
    if isinstance(prefill, LazyPrefill):
        return prefill
    if prefill is None:
        return None
    known = isinstance(prefill, str) and prefill in ("full", "lazy")
    check(known, "prefill", prefill, "'full', 'lazy' or tsjax.LazyPrefill(...)")
    return LazyPrefill() if prefill == "lazy" else None


def _check_corpus(corpus: Any, method: Method, model: Model) -> None:
    if corpus is None:
        return
    check_type(corpus, Corpus, "corpus", "a tsjax.Corpus")
    reads = f"a method that reads it, such as 'auto'; {type(method).__name__} does not"
    check(method.reads_corpus, "corpus", corpus, reads)
    fits = corpus.largest < model.cfg.vocab_size
    below = f"token ids below the vocabulary size {model.cfg.vocab_size}"
    check(fits, "corpus", f"a largest id of {corpus.largest}", below)


def _check_draft_model(second: Any, method: Method, model: Model) -> None:
    """A second model has the same vocabulary; the matrices may have unused rows at their ends."""
    if second is None:
        return
    check_type(second, Model, "draft_model", "what tsjax.load returns")
    takes = f"a method that takes one, such as 'draft_model'; {type(method).__name__} does not"
    name = second.path or "a model"
    check(method.takes_draft_model, "draft_model", name, takes)
    own, other = (one.cfg.vocab_size for one in (model, second))
    words, others = (_vocabulary(one) for one in (model, second))
    if words is None or others is None:
        same = f"{own} tokens as the model has, or both with a tokenizer"
        check(own == other, "draft_model", f"a vocabulary of {other} tokens", same)
        return
    for word in sorted(words.keys() | others.keys(), key=lambda word: (words.get(word, own), word)):
        if words.get(word) != others.get(word):
            raise BadValue(
                f"draft_model={second.path!r} is not valid: a model of the same vocabulary; "
                f"{word!r} is token {others.get(word)} there, and {words.get(word)} of the model"
            )


def _vocabulary(model: Model) -> dict[str, int] | None:
    tokenizer = tokenizer_of(model)
    return None if tokenizer is None else tokenizer.get_vocab()


def _check_against_model(config: GenerationConfig, model: Model) -> None:
    vocab = model.cfg.vocab_size
    most = f"at most the {vocab} tokens of the vocabulary"
    check((config.logprobs or 0) <= vocab, "logprobs", config.logprobs, most)
    for name in ("suppress_tokens", "eos_token_id"):
        value = getattr(config, name)
        for token in value if isinstance(value, tuple) else () if value is None else (value,):
            check(token < vocab, name, token, f"a token id below the vocabulary size {vocab}")
    barred = {*config.suppress_tokens, *(_stop_ids(config, model) if config.min_new_tokens else ())}
    given = f"{len(config.suppress_tokens)} tokens"
    wanted = "some token must be left, beside the stop tokens that min_new_tokens bars"
    check(len(barred) < vocab, "suppress_tokens", given, wanted)
    if config.stop_strings:
        try:
            _ = model.tokenizer
        except (FileNotFoundError, ValueError) as error:
            name = f"stop_strings={config.stop_strings!r}"
            raise BadValue(f"{name} needs a tokenizer: {error}") from error


def _stop_ids(config: GenerationConfig, model: Model) -> tuple[int, ...]:
    """The end tokens: those asked for, else the model's own.

    A checkpoint may name ids beyond its vocabulary; as it cannot emit them, they are dropped.
    """
    if config.eos_token_id is None:
        return tuple(token for token in model.stop_ids if token < model.cfg.vocab_size)
    ids = config.eos_token_id
    return ids if isinstance(ids, tuple) else (ids,)

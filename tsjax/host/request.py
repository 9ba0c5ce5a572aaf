# SPDX-License-Identifier: Apache-2.0
"""A call of `generate`, checked: every accepted form of prompt, settings, sizes and memory.

Knows what a user may pass and what the model allows. Runs nothing: what comes out is a Request, in
which every question has one answer, or an error that names the argument, its value and a remedy.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tsjax.config import GenerationConfig, check, check_int, refuse_unknown_settings
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.logprobs import LogProbs
from tsjax.decoding.method import Measured, Method
from tsjax.decoding.processors import LogitsProcessor, check_processors
from tsjax.decoding.reading import parts
from tsjax.decoding.start import check_lazy_mesh, memory_bytes, temporary_bytes
from tsjax.errors import BadType, BadValue, NotEnoughMemory
from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import fingerprint_of_norms, model_fingerprint
from tsjax.files.tokenizer import encode
from tsjax.host.chat import chat_prompt
from tsjax.host.costs import measured_on
from tsjax.host.info import memory_share
from tsjax.host.memory import available_bytes
from tsjax.host.prefix import Prefix, check_prefix
from tsjax.host.processes import check_same, check_shared, least, own_device
from tsjax.host.result import no_log_probs
from tsjax.host.saved_run import SavedRun, read_run
from tsjax.lazy.prefill import LazyPrefill
from tsjax.lazy.settings import LONGEST_PROMPT
from tsjax.methods import resolve_method
from tsjax.methods.corpus import Corpus
from tsjax.model.cache import cache_bytes
from tsjax.model.sharding import mesh_of
from tsjax.typing import accumulation_dtype

SMALLEST_CAPACITY = 2048
LARGEST_DOUBLING = 32768
SMALLEST_PREFILL = 16


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
      prefix_length: how many tokens at the beginning of each row are copied from the prefix.
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
    capacity: int
    prefill_widths: list[list[int]]
    made_widths: list[int]
    prompt_capacity: int
    exceed_max_positions: bool
    corpus: Corpus | None
    draft_model: Model | None
    processors: tuple[LogitsProcessor, ...]
    prefix: Prefix | None
    prefix_length: int
    of_rows: tuple[int, ...] | None
    logprobs: list[LogProbs] | None

    @property
    def prompts(self) -> list[np.ndarray]:
        return [row[:n] for row, n in zip(self.rows, self.prompt_length, strict=True)]

    @property
    def max_length(self) -> list[int]:
        return [length + self.config.max_new_tokens for length in self.prompt_length]

    @property
    def seeds(self) -> list[int]:
        seed = self.config.seed
        if not isinstance(seed, tuple):
            return [seed] * len(self.rows)
        return [one for one in seed for _ in range(self.config.num_return_sequences)]


def make_request(
    model: Any,
    prompt: Any,
    config: GenerationConfig | None,
    settings: Mapping[str, Any],
    *,
    method: Any = None,
    prefill: Any = None,
    capacity: int | None = None,
    prefill_width: int = 512,
    exceed_max_positions: bool = False,
    resume_from: str | os.PathLike | None = None,
    corpus: Corpus | None = None,
    draft_model: Model | None = None,
    logits_processor: Any = None,
    prefix: Prefix | None = None,
) -> Request:
    """The arguments of `generate`, see there."""
    if not isinstance(model, Model):
        raise BadType(f"model={model!r:.80} is not valid: what tsjax.load returns")
    _refuse_deep(prompt)
    _refuse_tracing(model, prompt)
    check_shared(model.params)
    prompt, settings = _prompt_of(model, prompt, settings)
    refuse_unknown_settings(settings)
    lazy = _resolve_prefill(prefill)
    check_int(prefill_width, "prefill_width", 1)
    if config is not None and not isinstance(config, GenerationConfig):
        wanted = "a tsjax.GenerationConfig; for a HuggingFace one use GenerationConfig.from_hf"
        raise BadType(f"config={config!r:.80} is not valid: {wanted}")
    if resume_from is None:
        if prompt is None:
            ways = "text or token ids (or messages=[...], or resume_from=FILE)"
            raise BadValue(f"prompt=None is not valid: {ways}")
        config = (config or GenerationConfig()).replace(**settings)
        prompts, single = prompt_rows(model, prompt)
        answers = config.num_return_sequences
        _check_seeds(config, len(prompts))
        prompts = [row for row in prompts for _ in range(answers)]
        single = single and answers == 1
        made = [np.zeros(0, np.int32)] * len(prompts)
        reasons: list[str | None] = [None] * len(prompts)
        logprobs = None if config.logprobs is None else [no_log_probs(config.logprobs)] * len(made)
    else:
        if config is not None or set(settings) - {"max_new_tokens"}:
            beside = "pass nothing but max_new_tokens beside it"
            raise BadValue(f"resume_from continues a run with its own settings: {beside}")
        run = _resumed_run(model, resume_from, prompt, settings)
        prompts, made, single = run.prompts, run.tokens, run.single
        config, reasons, logprobs = run.config, run.finish_reason, run.logprobs
        method = run.method if method is None else method
        exceed_max_positions = exceed_max_positions or run.exceed_max_positions
    if method is None:
        method = "autoregressive" if draft_model is None else "draft_model"
    method = resolve_method(method)
    _check_against_model(config, model)
    prompt_capacity = _capacity_bucket(max(map(len, prompts)), SMALLEST_PREFILL)
    # For all prompts of a bucket alike, as every other setting is another program.
    lazy = lazy and lazy.resolved(model.cfg, prompt_capacity)
    if resume_from is not None:
        if prefill is not None:
            _check_same_prefill(f"resume_from={os.fspath(resume_from)!r}", run, lazy)
        lazy = run.prefill
    if lazy is not None:
        check_lazy_mesh(mesh_of(model.params))
        _check_prompts(lazy, prompts)
        if prefix is not None:
            raise BadValue("prefix is not valid with a lazy prefill: leave one of them out")
    context = max(map(len, prompts)) + config.max_new_tokens // 2
    _check_corpus(corpus, method, model)
    _check_draft_model(draft_model, method, model)
    of_scores = accumulation_dtype(model.cfg.dtype)
    most = max(map(len, prompts)) + config.max_new_tokens
    processors = check_processors(logits_processor, model.cfg.vocab_size, most, of_scores)
    if resume_from is not None:
        check_same_processors(f"resume_from={os.fspath(resume_from)!r}", run, processors)
    given = [[row.tobytes() for row in rows] for rows in (prompts, made)]
    sizes = type(method).__name__, lazy, capacity, prefill_width
    check_same("generate", *given, config, *sizes)
    new_tokens = None if corpus is not None else config.max_new_tokens
    measured = measured_on(method, model, context, len(prompts), new_tokens)
    second = None if draft_model is None else draft_model.cfg
    measured = measured._replace(corpus=corpus is not None, draft_model=second)

    if prefix is not None:
        check_prefix(prefix, model)
    rows = [np.concatenate(pair) for pair in zip(prompts, made, strict=True)]
    longest = max(map(len, rows if lazy is None else prompts))
    made_longest = max(map(len, made))
    known = 0 if prefix is None else prefix.shared_with(rows)
    whole = lazy is None and mesh_of(model.params) is None

    def request_by(measured: Measured) -> Request:
        decode = DecodeConfig(model=model.cfg, method=method.next(measured), prefill=lazy)
        request = Request(
            rows=rows,
            prompt_length=[len(row) for row in prompts],
            finish_reason=reasons,
            single=single,
            config=config,
            method=method,
            decode=decode,
            measured=measured,
            stop_ids=_stop_ids(config, model),
            capacity=0,
            prefill_widths=[
                _widths(int(count) - known, prefill_width) for count in parts(decode, longest)
            ],
            made_widths=[]
            if lazy is None
            else _widths(made_longest, lazy.most_made_at_once(prefill_width)),
            prompt_capacity=0 if lazy is None else prompt_capacity,
            exceed_max_positions=exceed_max_positions,
            corpus=corpus,
            draft_model=draft_model,
            processors=processors,
            prefix=prefix,
            prefix_length=known,
            of_rows=_shared_texts(rows) if longest - known > prefill_width and whole else None,
            logprobs=logprobs,
        )
        _check_positions(request)
        slots = _capacity(request, capacity, prefill_width)
        tokens = min(request.prompt_capacity, slots)
        return dataclasses.replace(request, capacity=slots, prompt_capacity=tokens)

    request = request_by(measured)
    shortage = _memory_shortage(request, model)
    if shortage and request.of_rows is not None:  # a text that is read once needs a cache for that
        request = dataclasses.replace(request, of_rows=None)
        shortage = _memory_shortage(request, model)
    if shortage and not method.wants_int8:  # by itself: without a copy that nobody asked for
        model.drop_copies()
        request = request_by(measured._replace(int8_fits=False))
        shortage = _memory_shortage(request, model)
    if shortage:
        raise NotEnoughMemory(shortage)
    return request


def check_memory(request: Request, model: Model) -> None:
    shortage = _memory_shortage(request, model)
    if shortage:
        raise NotEnoughMemory(shortage)


def _prompt_of(
    model: Model, prompt: Any, settings: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """The prompt, also where it came as a chat or as a tokenizer's output, and the rest."""
    names = ("messages", "input_ids", "attention_mask", "token_type_ids")
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    settings = {name: value for name, value in settings.items() if name not in names}
    for name, value in given.items():
        _refuse_tracing(model, value)
        if name in ("messages", "input_ids") and prompt is not None:
            raise BadValue(f"{name} is not valid beside a prompt: give the text once")
    if "messages" in given:
        if "input_ids" in given:
            raise BadValue("messages is not valid beside input_ids: give the text once")
        return chat_prompt(model, given["messages"]), settings
    if "input_ids" in given:
        mask = given.get("attention_mask")
        return {"input_ids": given["input_ids"], "attention_mask": mask}, settings
    if "attention_mask" in given:
        raise BadValue("attention_mask is not valid without input_ids")
    return prompt, settings


def _refuse_deep(prompt: Any) -> None:
    """Lists in lists that nothing could walk through, nor print."""

    def is_deep(value: Any, left: int) -> bool:
        if not isinstance(value, list | tuple):
            return False
        return not left or any(is_deep(part, left - 1) for part in value)

    if is_deep(prompt, 3):
        raise BadValue("a prompt of lists within lists is not valid: token ids, or a list of rows")


def _refuse_tracing(model: Model, prompt: Any) -> None:
    """Inside jit even a constant is traced, and the host could not read a single token."""
    given = {"model": model.params, "prompt": prompt, "call": jax.device_put(0)}
    for name, arrays in given.items():
        if any(isinstance(array, Tracer) for array in jax.tree.leaves(arrays)):
            raise BadType(
                f"a traced {name} is not valid: generate and stream are loops on the host; inside "
                "jit, vmap or grad use tsjax.init_state, tsjax.prefill and tsjax.decode, as in "
                "examples/inside_jit.py"
            )


def _shared_texts(rows: list[np.ndarray]) -> tuple[int, ...] | None:
    """For each row which of the distinct ones it is; None where too few are the same to matter."""
    places: dict[bytes, int] = {}
    of_rows = tuple(places.setdefault(row.tobytes(), len(places)) for row in rows)
    return of_rows if 2 * len(places) <= len(rows) else None


def _resolve_prefill(prefill: Any) -> LazyPrefill | None:
    """None for the whole prompt."""
    if isinstance(prefill, LazyPrefill):
        return prefill
    if prefill is None:
        return None
    known = isinstance(prefill, str) and prefill in ("full", "lazy")
    check(known, "prefill", prefill, "'full', 'lazy' or tsjax.LazyPrefill(...)")
    return LazyPrefill() if prefill == "lazy" else None


def _check_prompts(lazy: LazyPrefill, prompts: list[np.ndarray]) -> None:
    most = f"with a lazy prefill at most {LONGEST_PROMPT} tokens"
    for index, size in enumerate(map(len, prompts)):
        check(size <= LONGEST_PROMPT, "prompt", f"row {index} of {size} tokens", most)
        wanted = f"at most the {size} tokens of the prompt in row {index}"
        for name in ("window", "sinks", "recent"):
            check(getattr(lazy, name) <= size, name, getattr(lazy, name), wanted)


def prompt_rows(model: Model, prompt: Any) -> tuple[list[np.ndarray], bool]:
    """Any accepted form of prompt -> rows of ids, and whether it was a single one."""
    if isinstance(prompt, str):
        return [encode_text(model, prompt, "prompt")], True
    if isinstance(prompt, Mapping) and "input_ids" in prompt:  # a HuggingFace tokenizer's output
        prompt = _without_padding(prompt)
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(p, str) for p in prompt):
        return [encode_text(model, text, f"prompt[{i}]") for i, text in enumerate(prompt)], False
    if _is_chat(prompt):
        raise BadValue(
            f"prompt={prompt!r:.80} is not valid: pass a chat as messages=[...], or its token ids"
        )
    rank = _rank(prompt)
    if rank not in (1, 2):
        wanted = "a string, a list of strings, a row of token ids or a list of rows"
        raise BadValue(f"prompt={prompt!r:.80} is not valid: {wanted}")
    if rank == 1:
        return [check_row(prompt, "prompt", model)], True
    rows = list(prompt if isinstance(prompt, list | tuple) else np.asarray(prompt))
    check(len(rows) > 0, "prompt", prompt, "at least one row")
    return [check_row(row, f"prompt[{i}]", model) for i, row in enumerate(rows)], False


def _is_chat(prompt: Any) -> bool:
    """Whether it is a message with role and content, a chat or a list of chats."""
    while isinstance(prompt, list | tuple) and prompt:
        prompt = prompt[0]
    return isinstance(prompt, Mapping) and ("role" in prompt or "messages" in prompt)


def prompt_row(model: Model, prompt: Any) -> np.ndarray:
    """The ids of a single prompt, in any of its forms."""
    rows, single = prompt_rows(model, prompt)
    check(single, "prompt", f"{len(rows)} rows", "one prompt, a string or a row of token ids")
    return rows[0]


def _rank(value: Any) -> int:
    """Dimensions of an array or of nested lists, ragged ones too."""
    if isinstance(value, list | tuple):
        return 1 + max(map(_rank, value), default=0)
    return np.ndim(value)


def _without_padding(encoding: Mapping) -> Any:
    """The ids of a tokenizer's output; what its attention mask leaves out is padding."""
    ids, mask = encoding["input_ids"], encoding.get("attention_mask")
    if mask is None:
        return ids
    alone = _rank(ids) == 1
    pairs = [(ids, mask)] if alone else list(zip(ids, mask, strict=False))
    pairs = [(np.asarray(row), np.asarray(seen)) for row, seen in pairs]
    same = _rank(mask) == _rank(ids) and len(ids) == len(mask)
    same = same and all(row.shape == seen.shape for row, seen in pairs)
    check(same, "attention_mask", mask, "of the shape of input_ids, 0 where a token is padding")
    rows = [row[seen != 0] for row, seen in pairs]
    return rows[0] if alone else rows


def tokenizer_of(model: Model) -> Any:
    """The tokenizer for text beside the tokens; None if the model has none.

    None as well, with a warning, for one that is damaged: token ids need no tokenizer.
    """
    if model.path is None:
        return None
    try:
        return model.tokenizer
    except FileNotFoundError:
        return None
    except ValueError as error:
        warnings.warn(f"tokens come without text: {error}", stacklevel=2)
        return None


def encode_text(model: Model, text: str, name: str) -> np.ndarray:
    check(bool(text), name, text, "not empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadValue(f"{name} is not valid text: {error}") from error
    return check_row(encode(model.tokenizer, text), name, model)


def _check_corpus(corpus: Any, method: Method, model: Model) -> None:
    if corpus is None:
        return
    if not isinstance(corpus, Corpus):
        raise BadType(f"corpus={corpus!r:.80} is not valid: a tsjax.Corpus")
    reads = f"a method that reads it, such as 'auto'; {type(method).__name__} does not"
    check(method.reads_corpus, "corpus", corpus, reads)
    fits = corpus.largest < model.cfg.vocab_size
    below = f"token ids below the vocabulary size {model.cfg.vocab_size}"
    check(fits, "corpus", f"a largest id of {corpus.largest}", below)


def _check_draft_model(second: Any, method: Method, model: Model) -> None:
    """A second model has the same vocabulary; the matrices may have unused rows at their ends."""
    if second is None:
        return
    if not isinstance(second, Model):
        raise BadType(f"draft_model={second!r:.80} is not valid: what tsjax.load returns")
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


def check_row(row: Any, name: str, model: Model) -> np.ndarray:
    if np.size(row) == 0:
        raise BadValue(f"{name}={row!r} is not valid: at least one token (a BOS token, say)")
    row = np.asarray(row)
    if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
        given = f"{name} of shape {row.shape} and type {row.dtype}"
        raise BadValue(f"{given} is not valid: a row of integer token ids")
    vocab = model.cfg.vocab_size
    outside = row[(row < 0) | (row >= vocab)]
    if outside.size:
        raise BadValue(f"{name} holds token id {outside[0]}: ids are from 0 to {vocab - 1}")
    return row.astype(np.int32)


def _check_seeds(config: GenerationConfig, prompts: int) -> None:
    if isinstance(config.seed, tuple):
        wanted = f"one for each of {prompts} prompts"
        check(len(config.seed) == prompts, "seed", config.seed, wanted)


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


def _resumed_run(model: Model, path, prompt: Any, settings: Mapping[str, Any]) -> SavedRun:
    """The saved run, with a new number of tokens if one is asked for."""
    name = f"resume_from={os.fspath(path)!r}"
    run = read_run(path)
    check_same_model(name, run, model, stacklevel=5)
    prompts = [check_row(row, f"a prompt in {name}", model) for row in run.prompts]
    made = [check_row(row, f"a row in {name}", model) if len(row) else row for row in run.tokens]
    if prompt is not None:
        answers = run.config.num_return_sequences
        given = [row for row in prompt_rows(model, prompt)[0] for _ in range(answers)]
        if len(given) != len(prompts) or not all(map(np.array_equal, given, prompts)):
            raise BadValue(f"prompt is not the one saved in {name}: leave it out")
    config = run.config.replace(**settings)
    longest, most = max(map(len, made)), config.max_new_tokens
    wanted = f"at least the {longest} tokens that {name} holds"
    check(most >= longest, "max_new_tokens", most, wanted)
    # A row that had reached the length goes on where more tokens are asked for now.
    reasons: list[str | None] = ["length" if len(row) == most else None for row in made]
    for row, reason in enumerate(run.finish_reason):
        reasons[row] = reasons[row] if reason in (None, "length") else reason
    rows = {"prompts": prompts, "tokens": made, "finish_reason": reasons}
    return dataclasses.replace(run, config=config, **rows)


def check_same_model(name: str, run: SavedRun, model: Model, *, stacklevel: int) -> None:
    """Other weights would go on with other tokens, without a word."""
    if run.is_old:
        trouble = "is of an older tsjax: of the model only settings and norms were compared"
        warnings.warn(f"{name} {trouble}", stacklevel=stacklevel)
        same = run.fingerprint == fingerprint_of_norms(model)
    elif run.dtype != model.cfg.dtype:
        then, now = f"dtype={run.dtype!r}", repr(model.cfg.dtype)
        raise BadValue(f"{name} was saved with {then}, the model has {now}: load it with {then}")
    else:
        same = run.fingerprint == model_fingerprint(model)
    if not same:
        other = "another model or dtype" if run.is_old else "another model"
        known = f", which was loaded from {run.model_path!r}" if run.model_path else ""
        raise BadValue(f"{name} was saved with {other}: load that of the run{known}")


def _check_same_prefill(name: str, run: SavedRun, given: LazyPrefill | None) -> None:
    """Another one would go on with other tokens. Of two lazy ones, fields that differ are shown."""
    if given == run.prefill:
        return
    fields = [field.name for field in dataclasses.fields(LazyPrefill)]
    if given is not None and run.prefill is not None:
        fields = [name for name in fields if getattr(given, name) != getattr(run.prefill, name)]

    def shown(lazy: LazyPrefill | None) -> str:
        if lazy is None:
            return "'full'"
        return f"LazyPrefill({', '.join(f'{name}={getattr(lazy, name)!r}' for name in fields)})"

    raise BadValue(
        f"prefill={shown(given)} is not valid: {name} was saved with prefill={shown(run.prefill)}; "
        "leave it out"
    )


def check_same_processors(name: str, run: SavedRun, given: Sequence[LogitsProcessor]) -> None:
    """A function is in no file: the caller gives it again."""
    wanted, found = run.processors, [[one.name, one.version] for one in given]
    if wanted != found:

        def listed(processors) -> str:
            return (
                ", ".join(f"{name} (version {version})" for name, version in processors) or "none"
            )

        raise BadValue(
            f"{name} was saved with these logits processors: "
            f"{listed(wanted)}; given: {listed(found)}; pass the same as logits_processor"
        )


def repeat_numbers(request: Request) -> list[int]:
    """How many earlier rows have the same prompt and seed.

    Makes repeated prompts differ. A row by itself gets the tokens that it gets in any batch.
    """
    rows = [(p.tobytes(), seed) for p, seed in zip(request.prompts, request.seeds, strict=True)]
    return [rows[:index].count(row) for index, row in enumerate(rows)]


def _check_positions(request: Request) -> None:
    prompt, limit = max(request.prompt_length), request.decode.model.max_positions
    if max(request.max_length) <= limit or request.exceed_max_positions:
        return
    remedy = "or pass exceed_max_positions=True (--exceed-max-positions); quality will suffer"
    if prompt >= limit:
        raise BadValue(
            f"prompt of {prompt} tokens is not valid: the model has {limit} positions, the new "
            f"tokens included; shorten it, {remedy}"
        )
    raise BadValue(
        f"max_new_tokens={request.config.max_new_tokens} is not valid: with a prompt of {prompt} "
        f"tokens it goes beyond the model's {limit} positions; at most {limit - prompt}, {remedy}"
    )


def _capacity(request: Request, wanted: int | None, prefill_width: int) -> int:
    """The slots a user asked for, if they suffice, or the bucket that holds the run."""
    # A step writes the rows of its longest path, of which the last ones may be in vain.
    decode = request.decode
    read = [request.prefix_length + sum(widths) for widths in request.prefill_widths]
    read.append(max(request.prompt_length) - 1 + sum(request.made_widths))
    needed = max(max(request.max_length) + decode.rows_ahead, *read)
    if wanted is None:
        return _capacity_bucket(needed)
    check_int(wanted, "capacity", 1)
    depth, ahead = decode.sizes.depth, decode.rows_ahead
    enough = (
        f"at least {needed} slots for this prompt, "
        f"max_new_tokens={request.config.max_new_tokens}, prefill_width={prefill_width} and "
        f"{depth} drafted tokens in a step" + (f" or revive_rows={ahead}" if ahead > depth else "")
    )
    check(wanted >= needed, "capacity", wanted, enough)
    return wanted


def _widths(count: int, width: int) -> list[int]:
    """Passes that cover `count` tokens: full ones, then a power of two, for few programs."""
    full, rest = divmod(count, width)
    if rest == 0:
        return [width] * full
    last = max(SMALLEST_PREFILL, 1 << (rest - 1).bit_length())
    return [width] * full + [min(last, width)]


def _capacity_bucket(needed: int, smallest: int = SMALLEST_CAPACITY) -> int:
    if needed > LARGEST_DOUBLING:
        return -(-needed // LARGEST_DOUBLING) * LARGEST_DOUBLING
    return max(smallest, 1 << (needed - 1).bit_length())


def _memory_shortage(request: Request, model: Model) -> str | None:
    """Why a run cannot fit, before a byte of it is allocated; None where it can."""
    mesh, decode, second = mesh_of(model.params), request.decode, request.draft_model
    rows, slots = len(request.rows), request.capacity
    passes = [*request.prefill_widths, request.made_widths]
    widest = max((width for part in passes for width in part), default=1)
    vocab, told = decode.model.vocab_size, request.config.logprobs
    counted = request.config.presence_penalty != 0 or request.config.frequency_penalty != 0
    sizes = {
        "log-probabilities": 0 if told is None else rows * slots * (8 + 16 * told),
        "the cache of texts that are read once": 0
        if request.of_rows is None
        else cache_bytes(decode.model, max(request.of_rows) + 1, slots, mesh),
        "counts of tokens": 4 * rows * vocab if counted else 0,
        "the text of each node": 4 * rows * slots * decode.sizes.width if request.processors else 0,
        "the cache": cache_bytes(decode.model, rows, slots, mesh),
        "what method and prefill remember": memory_bytes(
            decode, rows, slots, request.prompt_capacity
        ),
        "weights in int8": model.bytes_for(decode.method),
        "the corpus": 0 if request.corpus is None else request.corpus.nbytes,
        "a copy of the second model": 0 if second is None else second.bytes_beside(model),
        "temporary arrays, an estimate": temporary_bytes(decode, rows, slots, widest, mesh),
    }
    device = own_device(model.params)
    if device.platform == "cpu" and mesh is not None:  # simulated devices share one memory
        sizes = {name: size * mesh.size for name, size in sizes.items()}
    needed, available = sum(sizes.values()), available_bytes(device)
    if available is not None:
        available = int(least(available))
    if available is None or needed <= available:
        return None
    parts_of_it = ", ".join(f"{size:,} for {name}" for name, size in sizes.items() if size)
    remedies = "; ".join(_remedies(request, device, mesh))
    return (
        f"not enough memory: capacity={slots} slots for {rows} rows take {needed:,} bytes per "
        f"device, {available:,} are free: {parts_of_it}; {remedies}"
    )


def _remedies(request: Request, device: Any, mesh: Any) -> list[str]:
    """What would make a run smaller, or leave it more memory."""
    decode = request.decode
    shorter = "lower max_new_tokens, shorten or split the batch"
    if jnp.dtype(decode.model.dtype).itemsize > 2:
        shorter += ", or load the model as bfloat16"
    found = [shorter]
    if decode.sizes.width > 1:
        found.append("method='autoregressive' remembers and scores less")
    if mesh is not None:
        one, each = (cache_bytes(decode.model, len(request.rows), 1024, on) for on in (None, mesh))
        copies = mesh.size * each // one
        if copies > 1:
            found.append(
                f"the {mesh.size} devices hold {copies} copies of the cache: more of them along "
                "an axis 'slots' of their mesh split it, see tsjax info --mesh"
            )
    share = memory_share() if device.platform == "gpu" else None
    if share is not None and share < 0.9:
        found.append(
            f"jax takes {share:.0%} of a GPU's memory: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 "
            "before it starts to give it more"
        )
    return found

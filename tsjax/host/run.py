# SPDX-License-Identifier: Apache-2.0
"""A run: the state is filled, and chunks of steps run until every row has ended.

Knows the device's programs and clocks. Does not know how a step works, nor which method goes on; a
row ends by its own rules, and may have another text then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.telling import doing
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.logprobs import LogProbs
from tsjax.decoding.method import PLAINLY, Method
from tsjax.decoding.reading import UNREAD, reading_config
from tsjax.decoding.sampling import sampling_values
from tsjax.decoding.start import init_stats
from tsjax.decoding.state import DecodeState, StepStats
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.beside import BESIDE
from tsjax.host.compilation import Stopwatch
from tsjax.host.costs import Measuring
from tsjax.host.device_programs import programs_of
from tsjax.host.interrupt import Interrupt
from tsjax.host.judge import USUAL, Judge
from tsjax.host.moving import Moves, first_memory_config, plainly
from tsjax.host.request import Request, of_the_prefix, repeat_numbers
from tsjax.host.rows import HostRows
from tsjax.methods.corpus import CorpusIndex
from tsjax.model.cache import KVCache
from tsjax.model.params import Params
from tsjax.model.sharding import mesh_of
from tsjax.model.transformer import ModelWeights

FIRST_CHUNK = 16  # steps, of a method that goes on with a run
SECONDS_PER_CHUNK, SECONDS_ON_GPU = 0.2, 1.0


@dataclasses.dataclass(frozen=True)
class News:
    """One chunk as the host sees it. `all_tokens` are the rows' new tokens since the prompt."""

    tokens: list[np.ndarray]
    sources: list[np.ndarray]  # as in StreamChunk
    all_tokens: list[np.ndarray]
    reasons: list[str | None]
    newly_ended: list[bool]
    logprobs: list[LogProbs] | None  # of `tokens`
    all_logprobs: Callable[[], list[LogProbs] | None]  # of `all_tokens`, put together when asked
    state: DecodeState  # which the next chunk uses up
    steps: StepStats  # of the run so far, as NumPy arrays
    computed: int  # tokens that the steps emitted, kept or not
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    beside_seconds: float
    gave_up: bool
    prompt_computed: tuple[float, ...]

    @property
    def last(self) -> bool:
        return None not in self.reasons


def run(
    model: Model,
    request: Request,
    interrupt: Interrupt,
    begun: DecodeState | None = None,
    program: Callable[..., DecodeState] | None = None,
    watched: bool = False,
    rows: HostRows | None = None,
) -> Iterator[News]:
    """Yields the News of each chunk of steps; the last one has every finish reason filled in.

    A state that has `begun` already, as `start_run` fills it, is used up. `program` runs the chunks
    in place of `decode`, for measurements. The interrupt is entered until there are news. What a
    reader watches has them several times a second. `rows` may give a row another text when it has
    ended, and may have something to tell between two chunks: then the news have no steps.
    """
    rows = rows or HostRows(model, request)
    going = _run(model, request, interrupt, begun, program, watched, rows)
    while True:
        with interrupt:
            news = next(going, None)
        if news is None:
            return
        yield news
        del news  # with a memory that may be begun anew


def _run(
    model: Model, request: Request, interrupt: Interrupt, begun: DecodeState | None,
    program: Callable[..., DecodeState] | None, watched: bool, rows: HostRows,
) -> Iterator[News]:  # fmt: skip
    chunk_of_steps = program or programs_of(model).decode
    prefilling, decoding, steps, beside = Stopwatch(), Stopwatch(), 1, BESIDE.seconds
    with prefilling:
        # First: rounding takes memory as well.
        corpus, draft_model = request.corpus, request.draft_model
        with doing("indexing the corpus"):
            index = None if corpus is None else corpus.on(jax.tree.leaves(model.params)[0])
        second = None if draft_model is None else draft_model.weights_beside(model)
        params_of = functools.partial(params_for, model, corpus=index, second=second)
        moves = Moves(model, params_of)
        decode, lesson, counted = request.decode, None, 0
        earlier: StepStats | None = None  # the counters until they began again last
        if begun is not None:
            state = kept_on_device(model, begun)
        elif request.method.chooses:
            decode, state, earlier = _begun_where_ready(model, request, interrupt, moves)
        else:
            state = start_run(model, request, interrupt)
        params = params_of(decode.method)
    judge = Judge(model, request, state, decode == request.decode)
    wants = request.method.wants_costs and request.measured.costs is None
    measuring = Measuring(model, wants, len(request.rows), request.measured.context)
    wanted = seconds_per_chunk(processes.own_device(model.params).platform, request, watched)
    while True:
        stepped = bool(rows.running) and not (rows.failed or interrupt.requested)
        if stepped:
            with decoding:
                at_least = rows.running if rows.waits else 1
                state = chunk_of_steps(params, state, steps, at_least, cfg=decode.in_steps)
                state.kv.length.block_until_ready()
                interrupt.meet()
            seconds, before = processes.first_says(decoding.last), counted
            counted = int(processes.on_host(state.stats.steps).max())
            steps = _next_chunk(counted - before, seconds / wanted)
        interrupted = interrupt.requested
        read = rows.read(state, interrupted)
        counts = _on_host(state.stats) if earlier is None else _sum(earlier, state.stats)
        yield News(
            **read,
            state=state,
            steps=counts,
            prefill_seconds=prefilling.seconds,
            decode_seconds=decoding.seconds,
            compile_seconds=prefilling.compiling + decoding.compiling,
            beside_seconds=BESIDE.seconds - beside,
            gave_up=judge.has_begun and decode != request.decode and decode.method == PLAINLY,
            prompt_computed=_prompt_computed(state),
        )
        if interrupted or not (rows.running or rows.waits):
            return
        rows.check()
        other = decode
        if stepped:
            if not BESIDE.is_working:  # which would disturb it
                judge.costs = measuring.go_on(decoding.seconds) or judge.costs
            moving = 0.0 if judge.has_begun else moves.seconds(request.decode, state)
            took = rows.tokens_left, seconds, decoding.compiling, moving
            other = dataclasses.replace(decode, method=judge.next(decode.method, state, *took))
            with decoding:  # reading programs
                if other != decode and not moves.is_ready(other, state):
                    other = decode
        if other != decode:
            judge.moved(decode.method)
        memory, shape = state.memory, state.tokens.shape
        with prefilling:
            state, filled = rows.refill(rows.stop(state), interrupt)
        if other == decode and not filled:
            continue
        learned = decode.method.lesson(memory)
        lesson = lesson if learned is None else learned
        del memory
        larger = request.method.chooses and state.tokens.shape != shape
        if larger and other != plainly(other) and not moves.is_ready(other, state):
            other = plainly(other)  # as at the beginning: programs are for a capacity
            costs, filled = judge.costs, [*range(len(rows.rows))]
            judge = Judge(model, request, state, begun=False)
            judge.costs = costs
        if other != decode:
            steps, params = FIRST_CHUNK, params_of(other.method)
        earlier, counted, decode = counts, 0, other
        with decoding:
            state = begun_anew(model, state, decode, lesson)
        if filled:
            judge.refilled(state, filled, rows.prompt_length)


def _begun_where_ready(
    model: Model, request: Request, interrupt: Interrupt, moves: Moves
) -> tuple[DecodeConfig, DecodeState, StepStats | None]:
    """By the method that is wanted, where its programs are in memory, or on disk and worth reading,
    and it is known from earlier what a plain step takes; else plainly, with counters of the wanted
    one that are 0. The prompt is read by the programs of plain decoding."""
    decode = plainly(request.decode)
    state = start_run(model, dataclasses.replace(request, decode=decode), interrupt)
    wanted = request.decode
    known = wanted != decode and not _is_unknown(request, moves)
    if known:
        more = moves.seconds(wanted, state) - moves.seconds(decode, state)  # to read
        if more > 0 and _pays_at_once(request, more):
            moves.is_ready(wanted, state)
    if not known or not moves.is_there(wanted, state):
        none = jax.tree.map(np.zeros_like, init_stats(wanted, len(request.rows)))
        return decode, state, none
    return wanted, begun_anew(model, state, wanted), None


def _is_unknown(request: Request, moves: Moves) -> bool:
    """Whether plain steps have to say first what they take."""
    known = request.measured.costs is not None or request.measured.plain is not None
    return moves.are_beside and request.method.wants_costs and not known


ENOUGH_STEPS = 2**30  # for a method to know what a plain one takes


def _pays_at_once(request: Request, moving: float) -> bool:
    """Whether drafts promise more in a usual answer than reading their programs takes."""
    wanted, left = request.decode.method, min(request.config.max_new_tokens, USUAL)
    begun = request.measured._replace(
        current=PLAINLY, first=wanted, moving=moving, tokens_left=float(left), steps=ENOUGH_STEPS
    )
    return request.method.next(begun) == wanted


def params_for(
    model: Model,
    method: Method,
    corpus: CorpusIndex | None = None,
    second: ModelWeights | None = None,
) -> Params:
    """The arrays that a method's steps take, with corpus and second model where it takes them."""
    params = model.params_for(method)
    return params.replace(
        corpus=corpus if method.reads_corpus else None,
        draft_model=second if method.takes_draft_model else None,
    )


def start_run(model: Model, request: Request, interrupt: Interrupt) -> DecodeState:
    """Allocates the state and prefills it. A prompt that several rows have is read once."""
    alone = request if request.of_rows is None else _each_text_once(request)
    texts, longest = len(alone.rows), max(map(len, alone.rows)) - request.prefix_length
    what = "reading the prompt" if texts == 1 else f"reading {texts} prompts"
    with doing(what, longest, "tokens") as work:
        state = begin_run(model, alone)
        if request.prefix_length:
            cache = _cache_of_prefix(model, alone, interrupt)
            state = programs_of(model).adopt(state, cache, np.int32(request.prefix_length))
        for begun, count in _read(model, alone, state):
            state = begun
            interrupt.meet()
            if interrupt.requested:
                break  # the rows are reported as interrupted, no step runs on this state
            state.kv.length.block_until_ready()
            work.done(min(count, longest))
    if request.of_rows is None:
        return state
    of_rows = np.asarray(request.of_rows, np.int32)
    return programs_of(model).spread(begin_run(model, request), state.kv, of_rows)


def _cache_of_prefix(model: Model, request: Request, interrupt: Interrupt) -> KVCache:
    if request.prefix is not None:
        return request.prefix.cache
    return start_run(model, of_the_prefix(request), interrupt).kv


def _each_text_once(request: Request) -> Request:
    """What is read: of rows with the same text the first. Only what a prefill sees matters here."""
    assert request.of_rows is not None
    first = [request.of_rows.index(place) for place in range(max(request.of_rows) + 1)]

    def some(values):
        return [values[index] for index in first]

    return dataclasses.replace(
        request,
        rows=some(request.rows),
        prompt_length=some(request.prompt_length),
        finish_reason=some(request.finish_reason),
        config=request.config.replace(seed=0, num_return_sequences=1, logprobs=None),
        decode=reading_config(request.decode),
        of_rows=None,
    )


def begin_run(model: Model, request: Request) -> DecodeState:
    cfg, rows, mesh = model.cfg, request.rows, mesh_of(model.params)
    # As wide as the buffer: the program is compiled for a width, not for each prompt.
    tokens = np.zeros((len(rows), request.capacity), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    state = programs_of(model).begin(
        tokens=tokens,
        prompt_length=np.asarray(request.prompt_length, np.int32),
        length=np.asarray([len(row) for row in rows], np.int32),
        max_length=np.asarray(request.max_length, np.int32),
        seeds=np.asarray(request.seeds, np.uint32),
        repeats=np.asarray(repeat_numbers(request), np.uint32),
        ended=np.asarray([reason is not None for reason in request.finish_reason]),
        sampling=sampling_values(
            request.config, request.stop_ids, cfg.vocab_size, cfg.dtype, request.processors
        ),
        cfg=request.decode,
        prompt_capacity=request.prompt_capacity,
        mesh=mesh,
    )
    return kept_on_device(model, state)


def begun_anew(
    model: Model, state: DecodeState, decode: DecodeConfig, lesson: Any = None
) -> DecodeState:
    """The state as another method begins with it: its memory knows no more than the `lesson` of
    one before, if there is any; counters are 0."""
    batch, capacity = state.tokens.shape
    # A copy, as the memory that takes it up is donated to its first steps.
    lesson, mesh = jax.tree.map(jnp.copy, lesson), mesh_of(model.params)
    # On a mesh it is taught in the program: devices of other processes are out of reach elsewhere.
    given = first_memory_config(decode, mesh)
    memory, stats = programs_of(model).first_memory(
        None if mesh is None else lesson, cfg=given, batch=batch, capacity=capacity, mesh=mesh
    )
    if given != decode:
        memory = decode.method.priced(decode.model, memory)
    if mesh is None and lesson is not None:
        memory = decode.method.taught(memory, lesson)
    return kept_on_device(model, state.replace(memory=memory, stats=stats))


def kept_on_device(model: Model, state: DecodeState) -> DecodeState:
    """On the model's device for good: programs are compiled anew for arrays that are not. What lies
    on a mesh is placed already."""
    if mesh_of(model.params) is not None:
        return state
    return jax.device_put(state, jax.tree.leaves(model.params)[0].sharding)


def _read(model: Model, request: Request, state: DecodeState) -> Iterator[tuple[DecodeState, int]]:
    """Yields the state before each pass of the prefill and after the last one, and how many tokens
    of each row this part of it has read."""
    compiled, cfg = programs_of(model), reading_config(request.decode)
    yield state, 0
    aside = {name: getattr(state, name) for name in UNREAD}
    state = state.replace(**dict.fromkeys(UNREAD))
    for part, widths in enumerate(request.prefill_widths):
        start = request.prefix_length
        for width in widths:
            state = compiled.read_part(model.params, state, start, part=part, width=width, cfg=cfg)
            start += width
            yield state.replace(**aside), start - request.prefix_length
        if part < len(request.prefill_widths) - 1:
            state = compiled.finish_part(model.params, state, part=part, cfg=cfg)
            yield state.replace(**aside), 0
    start, cfg = 0, dataclasses.replace(request.decode, method=PLAINLY)
    for width in request.made_widths:
        state = compiled.read_made(model.params, state, start, width=width, cfg=cfg)
        start += width
        yield state.replace(**aside), start


def _on_host(stats: StepStats) -> StepStats:
    return jax.tree.map(np.array, processes.on_host(stats))


def _sum(earlier: StepStats, later: StepStats) -> StepStats:
    """Counters of a run whose method has changed: to one of the same sources, or a plain one."""
    later = _on_host(later)
    few, many = sorted((earlier.accepted, later.accepted), key=lambda counts: counts.shape[1])
    same = earlier.by_source.shape == later.by_source.shape
    return earlier.replace(
        steps=earlier.steps + later.steps,
        drafted=earlier.drafted + later.drafted,
        accepted=many + np.pad(few, ((0, 0), (0, many.shape[1] - few.shape[1]))),
        by_source=earlier.by_source + (later.by_source if same else 0),
    )


def _prompt_computed(state: DecodeState) -> tuple[float, ...]:
    if state.prompt is None:
        return ()
    counts = processes.on_host(state.prompt.computed).sum(axis=(1, 2))
    new = processes.on_host(state.prompt_length) - processes.on_host(state.prompt.prefix)
    # The last token comes anyway.
    return tuple(float(count + len(new)) / int(new.sum()) for count in counts)


def _next_chunk(steps: int, share: float) -> int:
    """Chunks grow until one takes long enough not to matter and short enough to be interrupted;
    `share` is what the last one took of that time."""
    wanted = int(steps / max(share, 1e-6))
    return max(1, min(wanted, 4 * steps))


def seconds_per_chunk(platform: str, request: Request, watched: bool) -> float:
    """How long a chunk takes, after which the host looks at what there is. A GPU then waits some
    milliseconds for the next one, which is 1 or 2% of the short time.

    The long one has to do nobody harm: a stream speaks at a chunk's end, so one that is `watched`
    has the short time. So has one that the host cuts, by a stop string or by a loop: what it
    computes beyond is thrown away. A Ctrl-C, and a change of the method, wait up to a second.
    """
    cut_by_host = request.config.stop_strings or request.config.repetition_detection is not None
    return SECONDS_PER_CHUNK if watched or cut_by_host or platform != "gpu" else SECONDS_ON_GPU

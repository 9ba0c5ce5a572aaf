# SPDX-License-Identifier: Apache-2.0
"""Reading a text ahead of the runs that begin with it.

Knows a run's state. What comes out is a Prefix.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from tsjax.base.checks import check, check_type
from tsjax.base.telling import doing
from tsjax.decoding.reading import UNREAD, reading_config
from tsjax.decoding.state import DecodeState
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.asking import make_request, prefix_in_memory
from tsjax.host.device_programs import programs_of
from tsjax.host.interrupt import Interrupt
from tsjax.host.prefix import Prefix
from tsjax.host.request import Request
from tsjax.host.run import News, start_run
from tsjax.host.sizes import widths_of
from tsjax.model.cache import KVCache


def read(
    model: Model,
    prompt: Any = None,
    *,
    prefill_width: int | None = None,
    capacity: int | None = None,
    exceed_max_positions: bool = False,
    prefix: Prefix | str | os.PathLike | None = None,
    messages: Any = None,
) -> Prefix:
    """Reads a text, for `generate(..., prefix=...)`: later prompts that begin with it are read from
    where they differ. It changes no token. `prefix.save(FILE)` keeps it for other processes.

    Args:
      model, prompt, prefill_width, exceed_max_positions, messages: as of `generate`; one prompt.
      capacity: cache slots to keep; by default as many as a run of one token has.
      prefix: what was read before, or its file. Without a prompt this is what comes back, in
        memory: several runs then load the file once.
    """
    if prompt is None and messages is None and prefix is not None:
        check_type(model, Model, "model", "what tsjax.load returns")
        return prefix_in_memory(prefix, model)
    request = make_request(
        model,
        prompt,
        None,
        {"max_new_tokens": 1, **({} if messages is None else {"messages": messages})},
        prefill_width=prefill_width,
        capacity=capacity,
        exceed_max_positions=exceed_max_positions,
        prefix=prefix,
    )
    rows = len(request.rows)
    check(rows == 1, "prompt", f"{rows} rows", "one prompt: each prefix is read by itself")
    interrupt = Interrupt()
    state = start_run(model, request, interrupt)
    interrupt.finish(None, "raise")
    return _prefix_of(model, request, request.rows[0], state, len(request.rows[0]) - 1)


def kept_prefix(
    model: Model, request: Request, news: News, interrupt: Interrupt | None
) -> Prefix | None:
    """What a run has read and written, of its only row; it uses the state up. Where it was
    interrupted while it read, what was there before.

    What a lazy prefill left out is computed; on a signal, and without an `interrupt`, the prefix
    ends before the first token that some layer lacks.
    """
    if len(request.rows) != 1:
        return None
    known, state = np.concatenate([request.prompts[0], news.all_tokens[0]]), news.state
    length = min(int(processes.on_host(state.kv.length)[0]), len(known))
    # A prefill that was interrupted names its goal as the length.
    if len(known) == len(request.rows[0]):
        return request.prefix or _prefix_of(model, request, known, state, 0)
    if request.decode.prefill is not None:
        if interrupt is not None:
            with interrupt:
                state = _completed(model, request, state, interrupt)
        length = min([length, *_lacking(state)[:1]])
        state = _in_order(model, request, state)
    return _prefix_of(model, request, known, state, length)


def _lacking(state: DecodeState) -> list[int]:
    """The tokens of the only prompt that some layer lacks, by position."""
    done, n, length = processes.on_host((state.prompt.done, state.prompt_length, state.kv.length))
    stages = len(state.prompt.chosen)
    return np.flatnonzero(done[0, : min(n[0], length[0])] < stages).tolist()


def _completed(
    model: Model, request: Request, state: DecodeState, interrupt: Interrupt
) -> DecodeState:
    """With what its prompt's later layers lack, as far as no signal comes."""
    cfg, count = reading_config(request.decode), len(_lacking(state))
    # A pass may write as many rows as it is wide behind those that there are.
    room = state.kv.capacity - int(processes.on_host(state.kv.length)[0])
    widest = max((width for part in request.prefill_widths for width in part), default=1)
    aside = {name: getattr(state, name) for name in UNREAD}
    state = state.replace(**dict.fromkeys(UNREAD))
    with doing("reading what was left out of the prompt", count, "tokens") as work:
        done = 0
        for width in widths_of(count, min(widest, 1 << (room.bit_length() - 1))):
            interrupt.meet()
            if interrupt.requested:
                break
            state = programs_of(model).complete(model.params, state, width=width, cfg=cfg)
            state.kv.length.block_until_ready()
            done += width
            work.done(min(done, count))
    return state.replace(**aside)


def _in_order(model: Model, request: Request, state: DecodeState) -> DecodeState:
    """With the rows of all layers in the order of the text. One layer at a time, for memory."""
    compiled, cfg = programs_of(model), reading_config(request.decode)
    bare, parts = state.replace(**dict.fromkeys(UNREAD)), state.kv.parts
    k, v = list(state.kv.k), list(state.kv.v)
    for layer, slots in compiled.slots_of_layers(bare, cfg=cfg).items():
        for buffers in k, v:
            before = buffers[layer]
            placed = jax.tree.map(lambda x: x.sharding, before)
            after = jax.device_put(compiled.in_slots(before, slots, parts=parts), placed)
            buffers[layer] = after
            jax.tree.map(lambda x: x.delete(), before)
    return state.replace(kv=state.kv.replace(k=tuple(k), v=tuple(v), absent=None))


def _prefix_of(
    model: Model, request: Request, tokens: np.ndarray, state: DecodeState, length: int
) -> Prefix:
    kv, before = state.kv, request.prefix
    cache = KVCache(k=kv.k, v=kv.v, length=kv.length, parts=kv.parts)
    jax.block_until_ready(cache.length)
    inherited = before is not None and before.is_approximate and request.prefix_length > 0
    lazily = request.decode.prefill is not None
    return Prefix(
        tokens=tokens, length=length, cache=cache, _model=model, is_approximate=inherited or lazily
    )

# SPDX-License-Identifier: Apache-2.0
"""Reading a text ahead of the runs that begin with it.

Knows a run's state. What comes out is a Prefix.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from tsjax.config import check, check_type
from tsjax.decoding.state import DecodeState
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.asking import make_request, prefix_in_memory
from tsjax.host.interrupt import Interrupt
from tsjax.host.prefix import Prefix
from tsjax.host.request import Request
from tsjax.host.run import News, start_run
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
    return _prefix_of(model, request.rows[0], state, len(request.rows[0]) - 1)


def kept_prefix(model: Model, request: Request, news: News) -> Prefix | None:
    """What a run has read and written, of its only row; None after a lazy prefill."""
    if request.decode.prefill is not None or len(request.rows) != 1:
        return None
    known = np.concatenate([request.prompts[0], news.all_tokens[0]])
    in_cache = int(processes.on_host(news.state.kv.length)[0])
    # A prefill that was interrupted names its goal as the length.
    begun = len(known) > len(request.rows[0])
    return _prefix_of(model, known, news.state, min(in_cache, len(known)) if begun else 0)


def _prefix_of(model: Model, tokens: np.ndarray, state: DecodeState, length: int) -> Prefix:
    kv = state.kv
    cache = KVCache(k=kv.k, v=kv.v, length=kv.length, parts=kv.parts)
    jax.block_until_ready(cache.length)
    return Prefix(tokens=tokens, length=length, cache=cache, _model=model)

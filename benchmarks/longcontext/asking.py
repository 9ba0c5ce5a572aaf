# SPDX-License-Identifier: Apache-2.0
"""Asks a model in one of the ways of rivals.py: many prompts at once, or one with its times.

Knows prompts and answers. Does not know what is right to say.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import tsjax
from benchmarks.longcontext.rivals import Rival

SLOTS = 64  # of which the cache has a multiple
BATCH = 10  # prompts that are read together


class Reply(NamedTuple):
    """An answer and what it took; what compresses the prompt is a part of the seconds."""

    tokens: list[int]
    text: str  # "" for a model without a tokenizer
    first_token_seconds: float
    seconds: float
    read: int  # tokens of the prompt, once it is compressed
    computed: tuple[float, ...]  # see tsjax.host.result.RunStats.prompt_computed


def ask(model: tsjax.Model, rival: Rival, prompt: np.ndarray, **settings: Any) -> Reply:
    began = time.perf_counter()
    if rival.compress is not None:
        prompt = rival.compress(model, prompt)
    before = time.perf_counter() - began
    tokens, pieces, seconds, computed = [], [], [], ()
    for chunk in tsjax.stream(model, prompt.tolist(), prefill=rival.prefill, **settings):
        tokens += chunk.tokens[0].tolist()
        pieces.append(chunk.text[0] if chunk.text else "")
        # The first chunk is one step.
        seconds.append(before + chunk.stats.prefill_seconds + chunk.stats.decode_seconds)
        computed = chunk.stats.prompt_computed
    return Reply(tokens, "".join(pieces), seconds[0], seconds[-1], len(prompt), computed)


def ask_compiled(model: tsjax.Model, rival: Rival, prompt: np.ndarray, **settings: Any) -> Reply:
    """As `ask`, but once again if anything was compiled meanwhile."""
    with compilations() as events:
        reply = ask(model, rival, prompt, **settings)
    return ask(model, rival, prompt, **settings) if events else reply


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects an event for each program that XLA compiles inside the block."""
    events = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        if event.endswith("/backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def capacity_of(longest: int, new: int) -> int:
    """Cache slots for prompts and answers: few, as empty ones take time on a CPU."""
    passes = 1 << (longest - 1).bit_length()  # at most what the prefill's passes cover
    needed = max(longest + new + tsjax.LazyPrefill().revive_rows, passes)
    return -(-needed // SLOTS) * SLOTS


class Answers(NamedTuple):
    tokens: list[list[int]]
    computed: list[float]  # the mean share of the prompt that each stage computed


def answers(
    model: tsjax.Model, rival: Rival, prompts: Sequence[np.ndarray], new: int, room: int = 0
) -> Answers:
    """`new` tokens after each prompt, BATCH prompts at once.

    Args:
      room: for so many new tokens the cache has room, for calls to share their programs.
    """
    said, computed = [], []
    for begin in range(0, len(prompts), BATCH):
        batch = prompts[begin : begin + BATCH]
        if rival.compress is not None:
            batch = [rival.compress(model, prompt) for prompt in batch]
        result = tsjax.generate(
            model,
            [row.tolist() for row in batch],
            max_new_tokens=new,
            prefill=rival.prefill,
            capacity=capacity_of(max(map(len, batch)), max(new, room)),
        )
        said += result.tokens
        computed.append(result.stats.prompt_computed)
    return Answers(said, np.mean(computed, axis=0).tolist() if computed[0] else [])

# SPDX-License-Identifier: Apache-2.0
"""Asks a model in one of the ways of rivals.py, and takes the times.

Knows prompts and answers. Does not know what is right to say.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import tsjax
from experiments.longcontext.rivals import Rival

TOLD = 200  # of the first token's likeliest ones
COMPARED = 20  # of the full prefill's, one by one; all others as one


class Reply(NamedTuple):
    """An answer and what it took; what compresses the prompt is a part of the seconds."""

    tokens: list[int]
    text: str  # "" for a model without a tokenizer
    first_token_seconds: float
    seconds: float
    read: int  # tokens of the prompt, once it is compressed
    computed: tuple[float, ...]  # see tsjax.host.result.RunStats.prompt_computed
    likely: dict[int, float]  # log-probabilities of the first token's likeliest


def ask(model: tsjax.Model, rival: Rival, prompt: np.ndarray, **settings: Any) -> Reply:
    began = time.perf_counter()
    if rival.compress is not None:
        prompt = rival.compress(model, prompt)
    before = time.perf_counter() - began
    tokens, pieces, seconds, computed, likely = [], [], [], (), {}
    for chunk in tsjax.stream(model, prompt.tolist(), prefill=rival.prefill, **settings):
        tokens += chunk.tokens[0].tolist()
        pieces.append(chunk.text[0] if chunk.text else "")
        # The first chunk is one step.
        seconds.append(before + chunk.stats.prefill_seconds + chunk.stats.decode_seconds)
        computed = chunk.stats.prompt_computed
        if chunk.logprobs and not likely:
            told = chunk.logprobs[0]
            likely = dict(zip(told.top_tokens[0].tolist(), told.top[0].tolist(), strict=True))
    text = "".join(pieces)
    return Reply(tokens, text, seconds[0], seconds[-1], len(prompt), computed, likely)


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


def divergence(full: dict[int, float], other: dict[int, float]) -> float:
    """From the full prefill's distribution of the first token, in nats: over its COMPARED
    likeliest tokens, and all others as one. A token that is not among the other's TOLD has at most
    the probability of the last of them, and is counted with it."""
    ids = sorted(full, key=lambda token: -full[token])[:COMPARED]
    least = min(other.values())
    p = np.exp([full[token] for token in ids])
    q = np.exp([other.get(token, least) for token in ids])
    p, q = (np.append(one, max(1e-9, 1 - one.sum())) for one in (p, q))
    return max(0.0, float(np.sum(p * np.log(p / q))))

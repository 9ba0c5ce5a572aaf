# SPDX-License-Identifier: Apache-2.0
"""Runs of several methods after one prompt, and what they took beside each other.

Knows requests, states and how to sum up rounds. Does not know which runs are wanted, and prints
nothing. All runs start from copies of one state that has read the prompt, and go as runs of
`generate` go, so that `Auto` judges between chunks of steps. No compiling is counted.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.generation_config import GenerationConfig
from tsjax.decoding.method import Method
from tsjax.files.checkpoint import Model
from tsjax.host.asking import make_request
from tsjax.host.compilation import Stopwatch
from tsjax.host.generation import run_stats
from tsjax.host.interrupt import Interrupt
from tsjax.host.memory import forget_peak, peak_memory
from tsjax.host.request import Request
from tsjax.host.run import News, begun_anew, run, start_run
from tsjax.measure.timing import ratios, summary

SETTINGS: dict[str, dict[str, Any]] = {
    "sampled": dict(
        do_sample=True, temperature=1.0, min_p=0.1, repetition_penalty=1.2, repetition_window=1024
    ),
    "greedy": {},
    "chat": dict(do_sample=True, temperature=0.7, min_p=0.05),  # as answers are often drawn
}
USUAL_SETTINGS = "sampled", "greedy"
PLAIN = "plain"  # what the others are held against
EVERY = 1024  # output positions that make one figure
PEERS = ("torch", "torch lookup")


class Runs:
    """Runs after one prompt with one setting.

    Attributes:
      requests: by the methods' names.
      prefill_seconds: of reading the prompt, without compiling.
      compile_seconds: of all runs so far, by name.
    """

    def __init__(
        self,
        model: Model,
        prompt: np.ndarray,
        settings: Mapping[str, Any],
        methods: Mapping[str, Method],
        new_tokens: Mapping[str, int],
        programs: Mapping[str, Callable] | None = None,
        exceed_max_positions: bool = False,
        draft_model: Model | None = None,
    ):
        """`new_tokens` of each method; `programs` that run its steps in place of the usual one; a
        second model for methods that take one."""
        self.model, self._programs = model, dict(programs or {})
        requests = {
            name: requested(
                model, prompt, settings, method, new_tokens[name], exceed_max_positions, draft_model
            )
            for name, method in methods.items()
        }
        capacity = max(request.capacity for request in requests.values())
        self.requests = {
            name: dataclasses.replace(request, capacity=capacity)
            for name, request in requests.items()
        }
        interrupt, watch, plain = Interrupt(), Stopwatch(), self.requests[PLAIN]
        with interrupt:
            # A pass of each width, as what a device does at the first start of a program is not all
            # compiling: a GPU loads it, and makes its graph.
            widths = [[*dict.fromkeys(part)] for part in plain.prefill_widths]
            few = dataclasses.replace(plain, prefill_widths=widths)
            jax.block_until_ready(start_run(model, few, interrupt))
            with watch:
                self._read = jax.block_until_ready(start_run(model, plain, interrupt))
        interrupt.finish(None, "raise")
        self.prefill_seconds = watch.seconds
        self.compile_seconds = dict.fromkeys(methods, 0.0)

    def run(self, name: str) -> dict[str, Any]:
        """A signal ends it with tsjax.Interrupted, whose result is what there was until then."""
        *_, last = self.chunks(name)
        return last

    def chunks(self, name: str) -> Iterator[dict[str, Any]]:
        """As `run`, what there is after each chunk of steps; others may run in between."""
        request, interrupt = self.requests[name], Interrupt()
        forget_peak()
        copied = jax.tree.map(jnp.copy, self._read)
        state = begun_anew(self.model, copied, request.decode)
        # What was read has the longest run's.
        state = state.replace(max_length=jnp.asarray(request.max_length, jnp.int32))
        made = [(0, 0, 0.0)]  # after each chunk: tokens, steps, seconds
        program, found, compiling = self._programs.get(name), {}, 0.0
        for news in run(self.model, request, interrupt, jax.block_until_ready(state), program):
            steps = int(news.steps.steps.sum())
            made.append((len(news.all_tokens[0]), steps, news.decode_seconds))
            found, compiling = _figures(request, news, made), news.compile_seconds
            if not news.last:
                yield found
        self.compile_seconds[name] += compiling
        interrupt.finish({"method": name, **found} if found else None, "raise")
        yield found

    def begins_with(self, name: str) -> dict[str, Any]:
        """The settings of the method that drafts first, but for its table of costs and the shape of
        a second model."""
        method: Any = self.requests[name].decode.method
        found = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
        shape = {"model": None} if "model" in found else {}
        return {"method": type(method).__name__, **found, "costs": None, **shape}


def requested(
    model: Model,
    prompt: np.ndarray,
    settings: Mapping[str, Any],
    method: Method,
    new: int,
    exceed_max_positions: bool = False,
    draft_model: Model | None = None,
) -> Request:
    """Stop tokens end nothing: every run has as many tokens."""
    asked = GenerationConfig().replace(**settings, eos_token_id=(), max_new_tokens=new)
    return make_request(
        model,
        prompt,
        asked,
        {},
        method=method,
        exceed_max_positions=exceed_max_positions,
        draft_model=draft_model if method.takes_draft_model else None,
    )


def _figures(request: Request, news: News, made: list[tuple[int, int, float]]) -> dict[str, Any]:
    """What a run took, or its part before a signal; empty where no token was made."""
    tokens, steps, seconds = made[-1]
    if not tokens:
        return {}
    return {
        "ms_per_token": 1e3 * seconds / tokens,
        "tokens_per_step": tokens / max(steps, 1),
        "tokens": news.all_tokens[0],
        "gave_up": news.gave_up,
        "made": made,
        "stats": run_stats(request, news),
        "peak_memory": peak_memory(),
    }


def compared(runs: Runs, found: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each method's rounds against those of plain decoding and of torch."""
    found = {name: results for name, results in found.items() if results}
    times = {name: [one["ms_per_token"] for one in results] for name, results in found.items()}
    rows = []
    for name, results in found.items():
        row: dict[str, Any] = {"method": name, "ms_per_token": summary(times[name])}
        for peer in (PLAIN, PEERS[0]):
            if peer in times and peer != name:
                row[f"speedup_over_{peer}"] = ratios(times[peer], times[name])
        row["tokens_per_step"] = statistics.median(one["tokens_per_step"] for one in results)
        if name in runs.requests:
            if PLAIN in found:
                plain = found[PLAIN][0]["tokens"]
                places = [parted_at(one["tokens"], plain) for one in results]
                row["same_tokens"] = all(place is None for place in places)
                row["parted_at"] = next((place for place in places if place is not None), None)
            row["gave_up"] = sum(one["gave_up"] for one in results)  # of the rounds
            row["options"] = runs.begins_with(name)
        rows.append(row)
    return rows


def parted_at(tokens: np.ndarray, plain: np.ndarray) -> int | None:
    """The first of the new tokens that is not plain decoding's; None where all are."""
    both = min(len(tokens), len(plain))
    different = np.flatnonzero(np.asarray(tokens[:both]) != np.asarray(plain[:both]))
    return int(different[0]) if len(different) else None


def times_by_position(runs: Sequence[Sequence[tuple[int, int, float]]]) -> dict[str, list]:
    """Between every EVERY tokens, the median of the runs; a chunk's steps count as even."""
    end = runs[0][-1][0]
    marks = np.asarray([*range(0, end, EVERY), end])
    steps, seconds = [], []
    for made in runs:
        tokens, steps_then, seconds_then = zip(*made, strict=True)
        steps.append(np.diff(np.interp(marks, tokens, steps_then)))
        seconds.append(np.diff(np.interp(marks, tokens, seconds_then)))
    count = np.diff(marks)
    return {
        "position": marks[1:].tolist(),
        "ms_per_token": (1e3 * np.median(seconds, axis=0) / count).tolist(),
        "tokens_per_step": (count / np.median(steps, axis=0)).tolist(),
    }

# SPDX-License-Identifier: Apache-2.0
"""Where a model looks things up: after which layer the last token of a prompt points at what it
asks for. Measured once for a checkpoint on a few prompts, in seconds, and kept in a file.

Knows prompts with a question at their end, and the folder of what was measured. Cuts nothing.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np

from tsjax.base.errors import BadValue
from tsjax.base.telling import doing
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.reading import prefill
from tsjax.decoding.start import init_state
from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import model_fingerprint
from tsjax.files.tokenizer import encode
from tsjax.host import processes
from tsjax.host.measured_files import keep_measured, kept_measured
from tsjax.lazy.looking import last_attention

# Half of each kind: enough for layers to differ, and read in seconds.
ASKING_PROMPTS, ASKING_TOKENS = 8, 256
# A cut comes after the first layer that finds, among the fifth of the tokens that get most of its
# attention, this part of what the best layer finds there.
BEST_SHARE, NEARLY = 0.2, 0.9
LOOKUPS_FORM = 1  # of the file; grows when other things are measured

BOX_COLOURS = (
    "amber", "black", "blue", "golden", "green", "grey", "orange", "pink", "purple", "red",
    "silver", "white", "yellow",
)  # fmt: skip
LISTED_THINGS = (
    "anchor", "basket", "bridge", "candle", "castle", "drum", "engine", "garden", "hammer",
    "kettle", "ladder", "lantern", "mirror", "pencil", "saddle", "statue", "temple", "ticket",
    "tunnel", "window",
)  # fmt: skip
TOLD_PROSE = (
    "The road went down to the river and along its bank.",
    "Nobody had seen so much rain since the spring.",
    "They talked for an hour about the price of corn.",
    "A boat came in late, with a lamp at its mast.",
    "In the evening the children ran back to the house.",
    "He read the letter twice and put it away.",
    "The market was full, and the inn was fuller.",
    "She would not say what she thought of the plan.",
)


class Asking(NamedTuple):
    """A prompt that ends where an answer begins, and where the tokens of the answer are in it."""

    tokens: np.ndarray
    answer: np.ndarray


class Lookups(NamedTuple):
    """Of what a prompt's last token asks for, the share that is among the BEST_SHARE of the tokens
    that it attends to most; of each layer, the mean over prompts."""

    found: tuple[float, ...]

    @property
    def layer(self) -> int:
        """After which one, counted from 1, a cut loses least of it: the first that is as good as
        any. The last layer is left out, as no cut comes after it."""
        before = self.found[:-1]
        return 1 + next(i for i, part in enumerate(before) if part >= NEARLY * max(before))


def lookups_of(model: Model) -> Lookups:
    """Known from before, in this process or another one, or measured now."""
    weights = id(model.params)
    if weights not in _FOUND:
        _FOUND[weights] = _kept_or_measured(model)
        weakref.finalize(model.params, _FOUND.pop, weights, None)
    return _FOUND[weights]


_FOUND: dict[int, Lookups] = {}  # by the identity of weights, as long as they are there


def _kept_or_measured(model: Model) -> Lookups:
    _tokenizer_of(model)  # before any compute
    key = json.dumps({"lookups": LOOKUPS_FORM, "model": model_fingerprint(model)}, sort_keys=True)
    kept = None if processes.are_several() else kept_measured(key)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if kept is not None:
            return Lookups(tuple(map(float, kept["found"])))
    with doing("measuring"):
        found = measure_lookups(model)
    if not processes.are_several():
        keep_measured(key, {"found": found.found})
    return found


def _tokenizer_of(model: Model) -> Any:
    try:
        return model.tokenizer
    except ValueError as error:
        wanted = f"named cuts, or keep='paper', as nothing can be asked: {error}"
        raise BadValue(f"keep='auto' is not valid: {wanted}") from error


def measure_lookups(model: Model) -> Lookups:
    asking = [asking_prompt(_tokenizer_of(model), index) for index in range(ASKING_PROMPTS)]
    longest = max(len(one.tokens) for one in asking)
    width = 1 << (longest - 2).bit_length()
    cfg, lengths = DecodeConfig(model=model.cfg), np.asarray([len(one.tokens) for one in asking])
    tokens = np.stack([np.pad(one.tokens, (0, longest - len(one.tokens))) for one in asking])
    state = init_state(tokens, lengths, cfg=cfg, capacity=width + 1, max_length=lengths + 1)
    state = _prefill(model.params, state, width=width, cfg=cfg)
    weights = processes.on_host(_last_attention(model.params, state, cfg=cfg))  # [L, B, C]
    rows = [_among_best(weights[:, i], one) for i, one in enumerate(asking)]
    return Lookups(tuple(np.mean(rows, axis=0).round(4).tolist()))


_prefill = jax.jit(prefill, static_argnames=("width", "cfg"), donate_argnums=1)
_last_attention = jax.jit(last_attention, static_argnames=("cfg",))


def _among_best(weights: np.ndarray, one: Asking) -> np.ndarray:
    """[L]: which part of the answer's tokens is among the best of weights [L, C]."""
    weights = weights[:, : len(one.tokens) - 1]
    ranks = np.argsort(np.argsort(-weights, axis=1, kind="stable"), axis=1)[:, one.answer]
    return (ranks < np.ceil(BEST_SHARE * len(one.tokens))).mean(axis=1)


def asking_prompt(tokenizer: Any, index: int) -> Asking:
    """The first half of the prompts are lists of numbers, of which one is asked for. In the others
    something is told by the way, and asked for in other words."""
    rng = np.random.default_rng(index)
    colour, thing = str(rng.choice(BOX_COLOURS)), str(rng.choice(LISTED_THINGS))
    if index < ASKING_PROMPTS // 2:
        number = int(rng.integers(10_000, 100_000))
        told = f"The secret number of the {colour} {thing} is {number}."
        question = f"What is the secret number of the {colour} {thing}?"
        begun, answer = f"The secret number of the {colour} {thing} is ", str(number)
        lines, separator = _list_without(rng, colour, thing), "\n"
    else:
        told = f"It was said that Mr. Birkett kept his {thing} in a {colour} box."
        question = f"What colour was the box in which Mr. Birkett's {thing} was kept?"
        begun, answer = "The box was", f" {colour}"
        lines, separator = [str(line) for line in rng.choice(TOLD_PROSE, size=64)], " "
    return _put_together(tokenizer, rng, (told, question, begun, answer), lines, separator)


def _list_without(rng: np.random.Generator, colour: str, thing: str) -> list[str]:
    pairs = [(c, t) for c in BOX_COLOURS for t in LISTED_THINGS if (c, t) != (colour, thing)]
    numbers = rng.integers(10_000, 100_000, size=64)
    chosen = [pairs[i] for i in rng.choice(len(pairs), size=64, replace=False)]
    return [
        f"The secret number of the {c} {t} is {number}."
        for (c, t), number in zip(chosen, numbers, strict=True)
    ]


def _put_together(tokenizer, rng, parts: tuple[str, ...], lines: list[str], separator: str):
    """Lines before and after what is told, and the question: about ASKING_TOKENS tokens."""
    told, question, begun, answer = parts

    def ids(text: str) -> np.ndarray:
        return encode(tokenizer, text, add_special_tokens=False)

    end = ids(f"{separator}\nQuestion: {question}\nAnswer: {begun}")
    line_ids = [ids(line + separator) for line in lines]
    ends, room = np.cumsum([len(one) for one in line_ids]), ASKING_TOKENS - len(end) - 16
    count = int(np.searchsorted(ends, room))
    place = int(rng.integers(1, max(2, count)))
    before = np.concatenate(line_ids[:place])
    head, tail = told.split(answer, 1)
    own = [ids(head), ids(answer), ids(tail + separator)]
    start = len(before) + len(own[0])
    tokens = np.concatenate([before, *own, *line_ids[place:count], end])
    return Asking(tokens.astype(np.int32), np.arange(start, start + len(own[1])))

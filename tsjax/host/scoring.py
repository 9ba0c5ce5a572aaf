# SPDX-License-Identifier: Apache-2.0
"""What a model says of texts that are given: logits, and how probable it finds their tokens.

Knows every form of prompt. Does not know decoding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tsjax.base.checks import check, check_int, check_type
from tsjax.base.errors import BadValue, Failed
from tsjax.base.telling import doing
from tsjax.decoding.logprobs import LogProbs, text_log_probs
from tsjax.files.checkpoint import Model
from tsjax.files.tokenizer import encode
from tsjax.host import processes
from tsjax.host.device_programs import programs_of
from tsjax.host.prompts import check_row, prompt_rows
from tsjax.model.logits import logits

WIDTH = 512  # tokens of a pass


@dataclasses.dataclass(frozen=True)
class Scored:
    """What `score` returns, one entry for each row.

    Attributes:
      tokens: those of the continuation.
      logprobs: `raw` of each of them after all that come before; `top_tokens` and `top` of the most
        probable ones. By the model alone: nothing is processed.
    """

    tokens: list[np.ndarray]
    logprobs: list[LogProbs]

    @property
    def totals(self) -> np.ndarray:
        """The log-probability of each whole continuation."""
        return np.asarray([np.sum(one.raw, dtype=np.float64) for one in self.logprobs])


def score(model: Model, prompt: Any, continuation: Any, *, logprobs: int = 0) -> Scored:
    """The log-probability of each token of a text after a prompt.

    Args:
      model: from `tsjax.load`.
      prompt: as of `generate`: a text, token ids, or several.
      continuation: as many, texts or token ids. A text becomes token ids by itself, without special
        tokens; a space at its beginning belongs to it.
      logprobs: tell so many of the most probable tokens beside each.

    Raises:
      RuntimeError: the model's logits are NaN or infinite; the message names the continuation.
    """
    check_type(model, Model, "model", "what tsjax.load returns")
    processes.check_shared(model.params)
    check_int(logprobs, "logprobs", 0, model.cfg.vocab_size)
    prompts, single = prompt_rows(model, prompt)
    given = [continuation] if single else continuation
    several = isinstance(given, list | tuple | np.ndarray) and len(given) == len(prompts)
    check(several, "continuation", continuation, f"one for each of {len(prompts)} prompts")
    ends = [_ids(model, one, f"continuation[{i}]") for i, one in enumerate(given)]
    rows = [np.concatenate(pair) for pair in zip(prompts, ends, strict=True)]
    for index, row in enumerate(rows):
        most = f"at most the model's {model.cfg.max_positions} positions with its prompt"
        check(len(row) <= model.cfg.max_positions, f"continuation[{index}]", len(row), most)
    processes.check_same("score", [row.tobytes() for row in rows], logprobs)
    told, count = [], 0
    with doing("scoring", sum(map(len, rows)), "tokens") as work:
        for row, end in zip(rows, ends, strict=True):
            told.append(_of_row(model, row, end, logprobs))
            work.done(count := count + len(row))
    for index, one in enumerate(told):
        if np.isnan(one.raw).any():
            raise Failed(
                f"the model's logits are NaN or infinite in continuation[{index}] or its prompt: "
                f"see to the weights, or try another type than {model.cfg.dtype}"
            )
    return Scored(ends, told)


def forward(model: Model, tokens: Any, *, remat: bool = False) -> jax.Array:
    """Logits [B, T, V] of every position of tokens [B, T]; can be traced, `model` too, and has
    gradients.

    With `remat` a gradient keeps only what goes into each layer, and computes the rest again.
    """

    def compiled(params, tokens, cfg):
        return programs_of(model).logits(params, tokens, cfg=cfg)

    return _told_of(model, tokens, remat, compiled, logits)


def log_probs(model: Model, tokens: Any, *, remat: bool = False) -> jax.Array:
    """The log-probability [B, T] of each of tokens [B, T] after those before it, by the softmax of
    the logits; the first's is 0. Can be traced, `model` too, and has gradients.

    What `score` tells, for texts of one length. The logits of a whole text are never there at once;
    with `remat` not for a gradient either, which then keeps only what goes into each layer.
    """

    def pure(params, tokens, **how):
        return text_log_probs(params, tokens, count=0, **how).raw

    def compiled(params, tokens, cfg):
        return programs_of(model).log_probs(params, tokens, cfg=cfg, count=0, width=WIDTH).raw

    return _told_of(model, tokens, remat, compiled, pure)


def _told_of(model: Model, tokens: Any, remat: bool, compiled: Any, pure: Any) -> jax.Array:
    """By the compiled function, or where something is traced by the pure one."""
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or tokens.size == 0 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        given = f"tokens of shape {tokens.shape} and type {tokens.dtype}"
        raise BadValue(f"{given} is not valid: [B, T] integers")
    check(isinstance(remat, bool), "remat", remat, "True or False")
    if any(isinstance(array, Tracer) for array in (tokens, *jax.tree.leaves(model.params))):
        return pure(model.params, tokens, cfg=model.cfg, remat=remat)
    check_row(np.asarray(tokens).ravel(), "tokens", model)
    return compiled(model.params, tokens, cfg=model.cfg)


def _of_row(model: Model, row: np.ndarray, end: np.ndarray, count: int) -> LogProbs:
    """One row at a time, as wide as a power of two: few programs for texts of all lengths."""
    size = max(16, 1 << (len(row) - 1).bit_length())
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(row)] = row
    width = min(WIDTH, size)
    found = programs_of(model).log_probs(
        model.params, padded, cfg=model.cfg, count=count, width=width
    )
    found = processes.on_host(found)
    return jax.tree.map(lambda x: x[0, len(row) - len(end) : len(row)], found)


def _ids(model: Model, text: Any, name: str) -> np.ndarray:
    if isinstance(text, str):
        check(bool(text), name, text, "not empty")
        text = encode(model.tokenizer, text, add_special_tokens=False)
    return check_row(text, name, model)

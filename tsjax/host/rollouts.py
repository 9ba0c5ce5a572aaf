# SPDX-License-Identifier: Apache-2.0
"""Sampled answers as padded arrays: what a learner takes.

Knows `generate` and its results. Does not know rewards.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.checks import check, check_int
from tsjax.base.errors import BadType
from tsjax.base.generation_config import GENERATION_NAMES, GenerationConfig, given_config
from tsjax.files.checkpoint import Model
from tsjax.host.generation import generate
from tsjax.host.prompts import prompt_of, prompt_rows
from tsjax.host.result import GenerationResult
from tsjax.methods.corpus import Corpus

FINISH_REASONS = ("eos", "stop_string", "repetition", "length", "interrupted")
ROUNDED_TO = 64  # arrays are as wide as a multiple of it: few programs for prompts of many lengths


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens", "mask", "raw", "processed", "prompt_length", "length", "finish_reason",
    ],
    meta_fields=[],
    drop_fields=["result"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Rollout:
    """What `rollout` returns: arrays of B rows, the answers to each prompt side by side.

    A pytree of its arrays, without `result`.

    Attributes:
      tokens: [B, T] int32: a prompt, what was sampled after it, a stop token included, and zeros.
      mask: [B, T], which of them were sampled.
      raw: [B, T], of each sampled token its log-probability by the softmax of the model's logits;
        else 0. What `tsjax.log_probs(model, tokens)` says in the same places.
      processed: [B, T], the same by the distribution it was drawn from, after penalties,
        temperature and truncations.
      prompt_length: [B] int32.
      length: [B] int32, of prompt and answer.
      finish_reason: [B] int32, which of FINISH_REASONS.
      result: the GenerationResult, with `text` and `stats`; None inside jit.
    """

    tokens: Any
    mask: Any
    raw: Any
    processed: Any
    prompt_length: Any
    length: Any
    finish_reason: Any
    result: GenerationResult | None = None

    def corpus(self) -> Corpus:
        """Its texts, to draft from when the same prompts are answered again."""
        tokens, lengths = np.asarray(self.tokens), np.asarray(self.length)
        return Corpus([row[:length] for row, length in zip(tokens, lengths, strict=True)])


def rollout(
    model: Model,
    prompts: Any = None,
    *,
    group: int = 8,
    seed: Any = 0,
    width: int | None = None,
    config: GenerationConfig | None = None,
    **arguments: Any,
) -> Rollout:
    """Samples `group` answers to each prompt, as arrays that a learner takes.

    Args:
      model: from `tsjax.load`; `model.with_params(params)` for each new set of weights.
      prompts: as of `generate`: one or several; or messages=[...] in their place.
      group: answers to each prompt; rows b * group to (b + 1) * group - 1 are of prompt b.
      seed: an integer or a jax key. A row depends on it, on its prompt and on its number among the
        answers to that prompt, and on nothing else in the batch.
      width: T; by default what the longest prompt and max_new_tokens need, rounded up to 64.
      config, arguments: those of `generate`. Log-probabilities are told in any case, and without a
        config it samples, but for do_sample=False.
    """
    check_int(group, "group", 1)
    for name in ("num_return_sequences", "n"):
        if name in arguments:
            raise BadType(f"unknown argument {name!r}: write group")
    settings = {name: arguments.pop(name) for name in GENERATION_NAMES if name in arguments}
    config = (given_config(config) or GenerationConfig(do_sample=True)).replace(**settings)
    check(config.do_sample or group == 1, "group", group, "1, as greedy answers are all the same")
    config = config.replace(
        seed=seed_of(seed), num_return_sequences=group, logprobs=config.logprobs or 0
    )
    if width is not None:
        check_int(width, "width", 1)
        rows, _ = prompt_rows(model, prompt_of(model, prompts, arguments)[0])
        least = max(map(len, rows)) + config.max_new_tokens
        wanted = f"at least {least}, for the longest prompt and max_new_tokens"
        check(width >= least, "width", width, wanted)
    result = generate(model, prompts, config=config, **arguments)
    least = max(map(len, result.prompts)) + config.max_new_tokens
    return _padded(result, width or -(-least // ROUNDED_TO) * ROUNDED_TO)


def seed_of(seed: Any) -> Any:
    """One seed; a key of the older kind, two words, is none for each row."""
    if isinstance(seed, jax.Array) and seed.shape == (2,) and seed.dtype == jnp.uint32:
        seed = jax.random.wrap_key_data(seed)
    alone = np.ndim(seed) == 0
    check(
        alone, "seed", seed if not hasattr(seed, "shape") else seed.shape, "an integer or one key"
    )
    return seed


def _padded(result: GenerationResult, width: int) -> Rollout:
    told = result.logprobs
    assert told is not None  # always asked for
    rows, kind = len(result.tokens), told[0].raw.dtype
    tokens, mask = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
    raw, processed = (np.zeros((rows, width), kind) for _ in range(2))
    for row, (prompt, new) in enumerate(zip(result.prompts, result.tokens, strict=True)):
        begin, end = len(prompt), len(prompt) + len(new)
        tokens[row, :begin], tokens[row, begin:end], mask[row, begin:end] = prompt, new, True
        raw[row, begin:end], processed[row, begin:end] = told[row].raw, told[row].processed
    before = np.asarray([*map(len, result.prompts)], np.int32)
    reasons = np.asarray([FINISH_REASONS.index(one) for one in result.finish_reason], np.int32)
    arrays = tokens, mask, raw, processed, before, before + mask.sum(axis=1), reasons
    return Rollout(*map(jnp.asarray, arrays), result=result)

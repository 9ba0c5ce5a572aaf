# SPDX-License-Identifier: Apache-2.0
"""Every accepted form of prompt, as rows of token ids.

Knows texts, ids, chats and what tokenizers give. An error names the argument, its value and what
would be right.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from tsjax.base.checks import check
from tsjax.base.errors import BadType, BadValue
from tsjax.files.checkpoint import Model
from tsjax.files.tokenizer import encode
from tsjax.host.chat import chat_prompt


def prompt_of(
    model: Model, prompt: Any, settings: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """The prompt, also where it came as a chat or as a tokenizer's output, and the rest."""
    names = ("messages", "input_ids", "attention_mask", "token_type_ids")
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    settings = {name: value for name, value in settings.items() if name not in names}
    for name, value in given.items():
        refuse_tracing(model, value)
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


def refuse_deep(prompt: Any) -> None:
    """Lists in lists that nothing could walk through, nor print."""

    def is_deep(value: Any, left: int) -> bool:
        if not isinstance(value, list | tuple):
            return False
        return not left or any(is_deep(part, left - 1) for part in value)

    if is_deep(prompt, 3):
        raise BadValue("a prompt of lists within lists is not valid: token ids, or a list of rows")


def refuse_tracing(model: Model, prompt: Any) -> None:
    """Inside jit even a constant is traced, and the host could not read a single token."""
    given = {"model": model.params, "prompt": prompt, "call": jax.device_put(0)}
    for name, arrays in given.items():
        if any(isinstance(array, Tracer) for array in jax.tree.leaves(arrays)):
            raise BadType(
                f"a traced {name} is not valid: generate and stream are loops on the host; inside "
                "jit, vmap or grad use tsjax.steps.init_state, tsjax.steps.prefill and "
                "tsjax.steps.decode, as in examples/inside_jit.py"
            )


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

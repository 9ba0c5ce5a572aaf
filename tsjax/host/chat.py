# SPDX-License-Identifier: Apache-2.0
"""Chats: messages become token ids by the checkpoint's own template.

Knows what a chat is, and HuggingFace's templates, which run in jinja2's sandbox. Does not know how
an answer is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.files.checkpoint import Model
from tsjax.files.tokenizer import encode

ROLE, ASSISTANT = "role", "assistant"
LONGEST_CHAT = 2**25  # characters of a chat; a template may write any number of them


def chat_prompt(model: Model, messages: Any, **options: Any) -> Any:
    """The token ids of one chat [{"role": ..., "content": ...}, ...], or rows of those of several.

    The template is asked to begin an answer. Where the last message is the assistant's, that one
    is continued instead. `options` go to the template (tools=..., enable_thinking=False, ...).
    """
    name = "messages"
    if isinstance(messages, Mapping) and "messages" in messages:
        messages = messages["messages"]
    wanted = 'a list of messages, {"role": "user", "content": "..."}, or a list of such lists'
    check(isinstance(messages, list | tuple) and len(messages) > 0, name, messages, wanted)
    messages = list(messages)
    if not isinstance(messages[0], Mapping):
        return [_one(model, chat, f"{name}[{i}]", options) for i, chat in enumerate(messages)]
    return _one(model, messages, name, options)


def _one(model: Model, chat: Any, name: str, options: Mapping[str, Any]) -> np.ndarray:
    tokenizer = model.tokenizer
    check_chat(chat, name)
    where = f"the tokenizer of {tokenizer.name_or_path!r}"
    if getattr(tokenizer, "chat_template", None) is None and "chat_template" not in options:
        raise BadValue(
            f"{name} is not valid with this model: {where} has no chat template; pass a prompt, or "
            "a checkpoint for chats"
        )
    continues = chat[-1][ROLE] == ASSISTANT
    how = {"add_generation_prompt": not continues, "continue_final_message": continues, **options}
    try:
        text = tokenizer.apply_chat_template(list(map(dict, chat)), tokenize=False, **how)
        if len(text) > LONGEST_CHAT:
            raise BadValue(f"it writes {len(text)} characters, more than {LONGEST_CHAT}")
    except Exception as error:  # whatever a template raises, it is about these messages
        why = " ".join(str(error).split())[:300]
        raise BadValue(f"{name} is not valid for the chat template of {where}: {why}") from error
    # The template has written the special tokens.
    return encode(tokenizer, text, add_special_tokens=False)


def check_chat(chat: Any, name: str) -> None:
    """The form of messages; what roles may follow each other is the template's to say."""
    check(isinstance(chat, list | tuple) and len(chat) > 0, name, chat, "at least one message")
    for index, message in enumerate(chat):
        here, wanted = f"{name}[{index}]", 'a message, {"role": "user", "content": "..."}'
        check(isinstance(message, Mapping) and ROLE in message, here, message, wanted)
        role = message[ROLE]
        check(isinstance(role, str) and bool(role), f"{here}['role']", role, "'user', say")
        says = "content" in message or "tool_calls" in message
        check(says, here, message, wanted + ", or tool_calls in place of content")
        content = message.get("content")
        good = content is None or isinstance(content, str) or _parts(content)
        wanted = 'a text, or a list of parts such as {"type": "text", "text": "..."}'
        check(good, f"{here}['content']", content, wanted)


def _parts(content: Any) -> bool:
    return isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content)

# SPDX-License-Identifier: Apache-2.0
"""Lines of OpenAI's batch files: what a line asks for, and its answer in the same form.

Knows their fields of chat completions and completions. Does not know files or models.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tsjax.base.checks import check
from tsjax.base.errors import NotSupported
from tsjax.host.many import Answer

OPENAI_CHAT, OPENAI_TEXT = "/v1/chat/completions", "/v1/completions"
# What says nothing about the tokens of an answer.
_LEFT_OUT = ("model", "user", "metadata", "store", "service_tier", "stream_options", "echo")
# What is taken as it is, under our names.
_OF_EACH = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "seed": "seed",
}  # fmt: skip
_SETTINGS = {
    "temperature": "temperature", "top_p": "top_p", "stop": "stop_strings",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    # Of servers that speak the form.
    "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
}  # fmt: skip
# What changes an answer and does not exist here, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "logit_bias": ({},), "tools": ([],),
    "functions": ([],), "response_format": ({"type": "text"},), "suffix": ("",),
    "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
}  # fmt: skip
_REASONS = {"eos": "stop", "stop_string": "stop", "repetition": "stop"}


def is_batch_line(entry: Any) -> bool:
    return isinstance(entry, Mapping) and "body" in entry and "custom_id" in entry


def asked_by(entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `generate_many` takes as a prompt, and the settings that the line has of its own."""
    body = entry["body"]
    check(isinstance(body, Mapping), "body", body, "an object")
    url = entry.get("url", OPENAI_CHAT if "messages" in body else OPENAI_TEXT)
    check(url in (OPENAI_CHAT, OPENAI_TEXT), "url", url, f"{OPENAI_CHAT} or {OPENAI_TEXT}")
    given = {name: value for name, value in body.items() if value is not None}
    refused = [
        f"{name}={value!r:.40}" for name, value in given.items()
        if name in _NEUTRAL and value not in _NEUTRAL[name]
    ]  # fmt: skip
    known = {"messages", "prompt", "logprobs", "top_logprobs", *_LEFT_OUT, *_OF_EACH, *_SETTINGS}
    refused += [name for name in given if name not in known | _NEUTRAL.keys()]
    if refused:
        raise NotSupported(
            f"the body asks for {', '.join(refused)}, which tsjax batch does not have"
        )
    field = "messages" if url == OPENAI_CHAT else "prompt"
    check(field in given, "body", dict(body), f"one with {field}, as {url} has it")
    text = given[field]
    text = [*map(_in_one_text, text)] if field == "messages" and isinstance(text, list) else text
    way = "ids" if field == "prompt" and not isinstance(text, str) else field
    prompt = {way: text, **{_OF_EACH[k]: v for k, v in given.items() if k in _OF_EACH}}
    settings = {_SETTINGS[name]: value for name, value in given.items() if name in _SETTINGS}
    if {"temperature", "top_p", "top_k", "min_p"} & settings.keys():
        settings["do_sample"] = True
    if given.get("logprobs"):
        count = given.get("top_logprobs", 0) if url == OPENAI_CHAT else given["logprobs"]
        settings["logprobs"] = count
    return prompt, settings


def _in_one_text(message: Any) -> Any:
    """A message whose content is a list of parts, as one text; templates of texts know no parts."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list):
        return message
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    whole = all(isinstance(text, str) for text in texts)
    check(whole, "messages", parts, "contents of text alone: a string, or parts of type text")
    return {**message, "content": "".join(map(str, texts))}


def answer_to(entry: Mapping[str, Any], answer: Answer, tokenizer: Any) -> dict[str, Any]:
    """The fields of an answered line."""
    name = entry["custom_id"]
    if answer.error is not None:
        error = {"code": type(answer.error).__name__, "message": str(answer.error)}
        return {"custom_id": name, "response": None, "error": error}
    is_chat = (
        entry.get("url", OPENAI_CHAT if "messages" in entry["body"] else OPENAI_TEXT) == OPENAI_CHAT
    )
    told = None if answer.logprobs is None else _told(answer, tokenizer, is_chat)
    said = {"message": {"role": "assistant", "content": answer.text}}
    choice = {
        "index": 0, **(said if is_chat else {"text": answer.text}), "logprobs": told,
        "finish_reason": _REASONS.get(answer.finish_reason, answer.finish_reason),
    }  # fmt: skip
    read, made = answer.prompt_tokens, len(answer.tokens)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": entry["body"].get("model"),
        "choices": [choice],
        "usage": {
            "prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made,
        },
    }  # fmt: skip
    response = {"status_code": 200, "request_id": body["id"], "body": body}
    return {"custom_id": name, "response": response, "error": None}


def _told(answer: Answer, tokenizer: Any, is_chat: bool) -> dict[str, Any]:
    found = answer.logprobs
    assert found is not None

    def word(token: Any) -> str:
        return "" if tokenizer is None else tokenizer.decode([int(token)])

    def finite(value: Any) -> float:
        return float(np.maximum(value, -9999.0))  # as they write what cannot be

    tokens = [word(token) for token in answer.tokens]
    chosen = [finite(value) for value in found.raw]
    best = [
        [(word(token), finite(value)) for token, value in zip(*pair, strict=True) if token >= 0]
        for pair in zip(found.top_tokens, found.top, strict=True)
    ]
    if not is_chat:
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": [*map(dict, best)]}
    content = [
        {
            "token": token, "logprob": value, "bytes": [*token.encode()],
            "top_logprobs": [
                {"token": one, "logprob": its, "bytes": [*one.encode()]} for one, its in some
            ],
        }
        for token, value, some in zip(tokens, chosen, best, strict=True)
    ]  # fmt: skip
    return {"content": content}

# SPDX-License-Identifier: Apache-2.0
"""A chat written out by a checkpoint's template: a program in jinja2 that nobody here has read.

What a template can do and see is what transformers 5 lets it: jinja2's immutable sandbox, loop
controls, `raise_exception`, `strftime_now`, `tojson` and the tag `generation`. It is given plain
data only, so that no object's methods are within its reach. Does not know tokens.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import numpy as np

from tsjax.base.errors import BadType, BadValue

# Stands after the message that is continued, to find its end in the written chat. A template sees
# it, so it is the one that transformers uses.
_END = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field of a message


def render_chat(
    template: str, chat: Any, tools: Any = None, documents: Any = None,
    continue_final_message: bool | str = False, **variables: Any,
) -> str:  # fmt: skip
    """The text of one chat.

    Args:
      tools: JSON schemas, or functions, whose schemas transformers then makes.
      continue_final_message: leaves the last message open: its content, or the field of this name.
      variables: further names that the template knows.
    """
    messages, final = _messages(chat), None
    if continue_final_message:
        whole = isinstance(continue_final_message, str)
        final = _leave_open(messages, continue_final_message if whole else "content", template)
    text = _compiled(template).render(
        messages=messages,
        tools=None if tools is None else _plain([_schema(tool) for tool in tools]),
        documents=_plain(documents),
        **_plain(variables),
    )
    return text if final is None else _up_to_the_end(text, final)


def _messages(chat: Any) -> list[dict[str, Any]]:
    """Without fields that are None, and with a message's reasoning under the names in use."""
    found = []
    for message in _plain(chat):
        if not isinstance(message, dict):
            raise BadType(f"a message is a dict, not {message!r:.80}")
        message = {name: value for name, value in message.items() if value is not None}
        reasoning = next((message[name] for name in _REASONING if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        found.append(message)
    return found


def _schema(tool: Any) -> Any:
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        from transformers.utils.chat_template_utils import get_json_schema

        return get_json_schema(tool)
    if not isinstance(tool, dict):
        raise BadType(f"a tool is a JSON schema or a function with types, not {tool!r:.80}")
    return tool


def _leave_open(messages: list[dict[str, Any]], field: str, template: str) -> str:
    """Marks the end of the last message; returns what stands before the mark."""
    last = messages[-1] if messages else {}
    if field not in last:
        raise BadValue(f"the last message has no {field!r} to continue")
    content = last[field]
    # Reasoning stands under several names, and a template reads any of them.
    names = [name for name in _REASONING if last.get(name) == content]
    names = names if field in _REASONING else [field]
    if not any(name in template for name in names):
        raise BadValue(f"the template does not read {field!r}, which is to be continued")
    if isinstance(content, list | tuple):
        part = next((part for part in reversed(content) if "text" in part), None)
        if part is None:
            raise BadValue("the last message has no text to continue")
        content = part["text"]
        part["text"] = content + _END
    else:
        last.update({name: content + _END for name in names})
    return content


def _up_to_the_end(text: str, final: str) -> str:
    mark = _END.strip()
    if final.strip() not in text or mark not in text:
        raise BadValue("the template leaves out the last message, or a part, so none can go on")
    at = text.rindex(mark)
    # Where the template has cut the space after the mark, it would cut that of the message too.
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def _plain(value: Any) -> Any:
    """The same of JSON's types; another object becomes a text that names its type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # of a class of its own, that has methods of its own
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic's
        return _plain(dump())
    return f"<{type(value).__name__}>"


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace
    )
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """jinja2's own escapes what has a meaning in HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(jinja2.ext.Extension):
    """{% generation %}: what the model says. Training looks at it; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body)
        return call.set_lineno(line)

    def _said(self, caller: Any) -> str:
        return caller()


class _Dict:
    """`dict` to be called, without what a type has beside."""

    def __call__(self, *parts: Any, **named: Any) -> dict[Any, Any]:
        return dict(*parts, **named)

    def fromkeys(self, keys: Sequence[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's, without names that Python itself uses."""

    def __init__(*parts: Any, **named: Any):  # `self` may be a name in it
        self, *others = parts
        names = dict(*others, **named)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template's namespace may not have {name!r}")

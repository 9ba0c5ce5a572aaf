# SPDX-License-Identifier: Apache-2.0
"""A conversation: each answer begins where the one before has ended.

Knows messages and what of them the model has read. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tsjax.config import check, check_int
from tsjax.files.checkpoint import Model
from tsjax.files.tokenizer import Detokenizer
from tsjax.host.chat import chat_prompt
from tsjax.host.generation import result_of
from tsjax.host.interrupt import Interrupt
from tsjax.host.prefix import Prefix
from tsjax.host.reading import kept_prefix
from tsjax.host.request import make_request
from tsjax.host.result import GenerationResult
from tsjax.host.run import run


class Conversation:
    """Messages to and from a model. What was read once is not read again.

        conversation = tsjax.Conversation(model, system="Be brief.")
        for piece in conversation.say("Who wrote Emma?"):
            print(piece, end="", flush=True)

    Attributes:
      messages: so far, as a chat template takes them.
      result: of the last answer; None before there is one.
      prefix: what the model has read so far.
    """

    def __init__(
        self, model: Model, *, system: str | None = None, template: dict | None = None, **arguments
    ):
        """`arguments` are those of `generate`, but for the prompt; `template` is for the chat
        template, {"enable_thinking": False} say."""
        check_int(arguments.get("num_return_sequences", 1), "num_return_sequences", 1, 1)
        self.model, self._template, self._arguments = model, template or {}, arguments
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.result: GenerationResult | None = None
        self.prefix: Prefix | None = None
        self.forget()

    def check(self) -> None:
        """ValueError where the model cannot chat."""
        chat_prompt(
            self.model, [*self.messages, {"role": "user", "content": "."}], **self._template
        )

    def forget(self) -> None:
        """Begins anew, with the system's message."""
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
        self.prefix = None

    def say(self, text: str) -> Iterator[str]:
        """Yields the answer piece by piece, and then keeps it.

        Ctrl-C ends the answer: what was said of it is kept, and tsjax.Interrupted is raised.
        """
        check(isinstance(text, str) and bool(text), "text", text, "a text that is not empty")
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = chat_prompt(self.model, asked, **self._template)
        how = dict(self._arguments)
        config = how.pop("config", None)
        names = ("method", "prefill", "capacity", "prefill_width", "exceed_max_positions")
        names += ("corpus", "draft_model", "logits_processor")
        given = {name: how.pop(name) for name in names if name in how}
        request = make_request(self.model, prompt, config, how, prefix=self.prefix, **given)
        return self._answer(asked, request)

    def _answer(self, asked: list[dict[str, Any]], request: Any) -> Iterator[str]:
        interrupt, said, news = Interrupt(), [], None
        writer = Detokenizer(self.model.tokenizer, context=request.rows[0])
        try:
            for news in run(self.model, request, interrupt):
                piece = writer.push(news.tokens[0])
                said.append(piece + (writer.flush() if news.last else ""))
                if said[-1]:
                    yield said[-1]
        finally:  # also where the caller leaves: what was said is part of the conversation
            if news is not None:
                self.messages = [*asked, {"role": "assistant", "content": "".join(said).strip()}]
                self.prefix = kept_prefix(self.model, request, news)
                self.result = result_of(self.model, request, news)
        interrupt.finish(self.result, "raise")

    @property
    def tokens_read_anew(self) -> int:
        """Of the last prompt, those that were not there from before."""
        if self.result is None:
            return 0
        return int(np.sum(self.result.stats.prompt_tokens)) - self.result.stats.prefix_tokens

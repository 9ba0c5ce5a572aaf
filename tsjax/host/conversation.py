# SPDX-License-Identifier: Apache-2.0
"""A conversation: each answer begins where the one before has ended.

Knows messages and what of them the model has read. Prints nothing.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from tsjax.base.checks import check, refuse_unknown
from tsjax.base.errors import BadValue
from tsjax.base.generation_config import GENERATION_NAMES, GenerationConfig
from tsjax.files.checkpoint import Model
from tsjax.files.tokenizer import Detokenizer
from tsjax.host.asking import longer_request, make_request, prefix_in_memory
from tsjax.host.chat import chat_prompt
from tsjax.host.generation import result_of
from tsjax.host.interrupt import Interrupt
from tsjax.host.prefix import Prefix
from tsjax.host.reading import kept_prefix
from tsjax.host.request import Request
from tsjax.host.result import GenerationResult
from tsjax.host.run import News, run

ANSWER_TOKENS = 1024
# New tokens of a turn that a lazy prefill prunes, at least. The first choice of the default brings
# so many back, and a pass over fewer takes about as long as reading the weights, pruned or not.
LEAST_TO_PRUNE = 64
OF_A_RUN = (
    "method", "prefill", "capacity", "prefill_width", "exceed_max_positions", "corpus",
    "draft_model", "logits_processor",
)  # fmt: skip


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
        self, model: Model, *, system: str | None = None, template: dict | None = None,
        prefix: Prefix | str | os.PathLike | None = None, **arguments
    ):  # fmt: skip
        """`arguments` are those of `generate` that choose tokens: method, config, settings and so
        on. Where nobody says max_new_tokens, an answer has as many as there are positions left, at
        most 1,024. A lazy prefill prunes turns of 64 new tokens and more. `template` is for the
        chat template, {"enable_thinking": False} say. `prefix` is what was read before, or its
        file: of the same system message, or `conversation.prefix` of one with the same
        beginning."""
        self.model, self._template = model, template or {}
        self._how = {name: arguments.pop(name) for name in OF_A_RUN if name in arguments}
        self._config = arguments.pop("config", None)
        refuse_unknown(list(arguments), (*OF_A_RUN, "config", *GENERATION_NAMES), "argument")
        self._settings = arguments
        config = (self._config or GenerationConfig()).replace(**arguments)
        answers = config.num_return_sequences
        check(answers == 1, "num_return_sequences", answers, "1: a conversation goes one way")
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.result: GenerationResult | None = None
        self._before = None if prefix is None else prefix_in_memory(prefix, model)
        self.prefix = self._before
        self._cut: Request | None = None  # of an answer that can go on
        self._limit = 0  # tokens that `say` allowed it, as `more` does each time
        self._answering: Callable[[], Generator[str] | None] = lambda: None

    def check(self) -> None:
        """ValueError where the model cannot chat."""
        chat_prompt(
            self.model, [*self.messages, {"role": "user", "content": "."}], **self._template
        )

    def forget(self) -> None:
        """Begins anew, with the system's message."""
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
        self.prefix, self._cut = self._before, None

    def say(self, text: str) -> Generator[str]:
        """Yields the answer piece by piece, and then keeps it.

        Ctrl-C ends the answer: what was said of it is kept, and tsjax.Interrupted is raised.
        """
        check(isinstance(text, str) and bool(text), "text", text, "a text that is not empty")
        self._end_answer()
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = chat_prompt(self.model, asked, **self._template)
        settings = {**self._longest_answer(len(prompt)), **self._settings}
        request = make_request(
            self.model, prompt, self._config, settings, prefix=self.prefix,
            least_to_prune=LEAST_TO_PRUNE, **self._how,
        )  # fmt: skip
        self._limit = request.config.max_new_tokens
        return self._begin(asked, request)

    def more(self) -> Generator[str]:
        """Goes on with the last answer where max_new_tokens or Ctrl-C has cut it, from its exact
        tokens: it becomes what a larger limit would have made. Yields what is new, as `say` does,
        of as many tokens as `say` may yield."""
        self._end_answer()
        if self._cut is None or self.result is None:
            raise BadValue("there is no answer to go on with: the last one was not cut short")
        made, how = self.result.tokens[0], self._how
        most = min(self._limit, self._left(self.tokens_in_context))
        request = longer_request(
            self.model, self._cut, made, len(made) + most, prefix=self.prefix,
            logprobs=self.result.logprobs, capacity=how.get("capacity"),
            prefill_width=how.get("prefill_width"),
        )  # fmt: skip
        return self._begin(self.messages[:-1], request)

    @property
    def can_go_on(self) -> bool:
        """Whether the last answer was cut short, and `more` goes on with it."""
        room = self.tokens_in_context < self.model.cfg.max_positions
        return self._cut is not None and (room or bool(self._how.get("exceed_max_positions")))

    def _begin(self, asked: list[dict[str, Any]], request: Request) -> Generator[str]:
        answer = self._answer(asked, request)
        # Weakly: one that the caller leaves ends there.
        self._answering = weakref.ref(answer)
        return answer

    def _end_answer(self) -> None:
        """One that nobody has heard to its end."""
        before = self._answering()
        if before is not None:
            before.close()

    def _longest_answer(self, prompt: int) -> dict[str, int]:
        """By the positions that are left, where nobody said how long it may be."""
        if self._config is not None or "max_new_tokens" in self._settings:
            return {}
        return {"max_new_tokens": min(ANSWER_TOKENS, self._left(prompt))}

    def _left(self, tokens: int) -> int:
        """How many tokens may follow so many."""
        if self._how.get("exceed_max_positions"):
            return 2**31 - 1 - tokens
        most = self.model.cfg.max_positions
        remedy = f"fewer than the model's {most} positions; begin anew: forget(), or /new"
        check(tokens < most, "messages", f"a conversation of {tokens} tokens", remedy)
        return most - tokens

    def _answer(self, asked: list[dict[str, Any]], request: Request) -> Generator[str]:
        interrupt, news = Interrupt(), None
        writer = Detokenizer(self.model.tokenizer, context=request.rows[0])
        try:
            for news in run(self.model, request, interrupt, watched=True):
                piece = writer.push(news.tokens[0]) + (writer.flush() if news.last else "")
                if piece:
                    yield piece
        except GeneratorExit:  # the caller leaves
            self._keep(asked, request, news)
            raise
        except BaseException:  # within a chunk, which has used up what the model has read
            self._keep(asked, request, news, lost=True)
            raise
        self._keep(asked, request, news, interrupt)
        interrupt.finish(self.result, "raise")

    def _keep(
        self, asked: list[dict[str, Any]], request: Request, news: News | None,
        interrupt: Interrupt | None = None, lost: bool = False,
    ) -> None:  # fmt: skip
        """What was said is part of the conversation, whatever ended it."""
        if news is None:
            return
        news = dataclasses.replace(news, reasons=[why or "interrupted" for why in news.reasons])
        self.result = result_of(self.model, request, news)
        self.messages = [*asked, {"role": "assistant", "content": str(self.result.text).strip()}]
        before = request.prefix
        self.prefix = before if lost else kept_prefix(self.model, request, news, interrupt)
        # Without what was read before, which is in the new prefix.
        request = dataclasses.replace(request, prefix=None)
        self._cut = request if news.reasons[0] in ("length", "interrupted") else None

    @property
    def tokens_in_context(self) -> int:
        """Of the last prompt and its answer."""
        if self.result is None:
            return 0
        return sum(self.result.stats.prompt_tokens) + sum(self.result.stats.new_tokens)

    @property
    def tokens_read_anew(self) -> int:
        """How many tokens of the last prompt were not there from before."""
        if self.result is None:
            return 0
        return int(np.sum(self.result.stats.prompt_tokens)) - self.result.stats.prefix_tokens

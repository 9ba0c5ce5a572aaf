# SPDX-License-Identifier: Apache-2.0
"""`tsjax chat`: a conversation in a terminal.

Knows what a user types, and what is told of it on stderr; stdout has the answers alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import tsjax
from tsjax.base.generation_config import SAMPLING_NAMES
from tsjax.base.input_files import parsing, read_text
from tsjax.base.model_config import DTYPES
from tsjax.commands import arguments as cli
from tsjax.commands.chat_sampling import check_for_chat, sampling_in_words, settings_for_chat
from tsjax.files.whole_files import check_place, write_text
from tsjax.host.chat import check_chat
from tsjax.host.prefix import open_prefix
from tsjax.methods import METHODS

COMMANDS = {
    "/more": "goes on with an answer that was cut short",
    "/new": "begins anew",
    "/system TEXT": "begins anew with this system message",
    "/save FILE": "writes the messages as JSON",
    "/load FILE": "goes on with messages that /save wrote",
    "/stats": "tells of the last answer and of the conversation",
    "/help": "lists these",
    "/quit": "ends",
}
ABOUT_CHAT = """Ctrl-C ends an answer, as 1,024 tokens do where --max-new-tokens does not say it.
Answers are sampled: as generation_config.json of the checkpoint says, else with
temperature 0.7 and top_p 0.95. Flags override, and --no-do-sample is greedy.
Without --seed each conversation has a seed of its own, which /stats tells.

commands:
"""


def add_chat(commands: Any) -> None:
    text = "talk with a checkpoint in a terminal"
    about = "A conversation by the checkpoint's own chat template; answers are streamed."
    parser = cli.command(commands, "chat", _chat, text, about, ABOUT_CHAT + commands_in_words())
    cli.add(parser, "model", cli.MODEL_HELP)
    cli.add(parser, "--system TEXT", "the system's message")
    text = "what tsjax read wrote of the same --system: it is not read again"
    cli.add(parser, "--prefix FILE", text)
    cli.add(parser, "--dtype", "the checkpoint's own by default", choices=DTYPES)
    cli.add_held(parser)
    cli.add_attached(parser)
    text = "how to decode; the text is the same"
    cli.add(parser, "--method", text, choices=sorted(METHODS), default="auto")
    text = "fields of the method"
    cli.add(parser, "--method-options NAME=VALUE", text, nargs="+", default=[])
    cli.add_exceeding(parser)
    cli.add_compilation_cache(parser)
    cli.add_settings(parser, elsewhere=("max_new_tokens", "seed", *SAMPLING_NAMES))


def commands_in_words() -> str:
    lines = [f"  {usage:14}{text}" for usage, text in COMMANDS.items()]
    return "\n".join([*lines, '  //...         sends a message that begins with "/"'])


def _chat(args: argparse.Namespace) -> int:
    given, method = cli.settings_of(args), cli.named_method(args.method, args.method_options)
    check_for_chat(given)
    if args.prefix is not None:
        open_prefix(args.prefix)
    model = cli.load_model(args)
    settings = settings_for_chat(model.path, given)
    how = {"method": method, "exceed_max_positions": args.exceed_max_positions, **settings}
    if args.prefix is not None:
        how["prefix"] = tsjax.read(model, prefix=args.prefix)
    sampling = sampling_in_words(settings)
    chat = _Chat(model, how, sampling)
    chat.begin(_of_system(args.system))
    name, most = os.path.basename(os.path.normpath(args.model)), model.cfg.max_positions
    cli.tell_unless_quiet(args, f"[{name}: {most} positions; {sampling}; /help lists commands]")
    shows = sys.stdin.isatty()
    if shows:
        _edit_lines()
    while True:
        try:
            said = input("> " if shows else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            cli.tell("")
            return 0
        if said.strip() in ("/quit", "/exit"):
            return 0
        try:
            chat.take(said)
        except (tsjax.TsjaxError, OSError, RuntimeError) as error:  # too long, no file, no memory
            cli.tell(f"tsjax: {' '.join(str(error).split())}")


def _edit_lines() -> None:
    """Line editing, a history of this session, and a paste of several lines as one message."""
    with contextlib.suppress(ImportError):  # Windows has none
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


def _of_system(text: str | None) -> list[dict[str, Any]]:
    return [] if text is None else [{"role": "system", "content": text}]


class _Chat:
    """One conversation after another. Each /command is a method."""

    def __init__(self, model: Any, how: Mapping[str, Any], sampling: str):
        self._model, self._how, self._sampling = model, how, sampling

    def begin(self, messages: Sequence[dict[str, Any]]) -> None:
        """Anew, with these. An error leaves what there was."""
        # Another answer to the same question, unless a seed was asked for.
        how = {"seed": secrets.randbits(32), **self._how}
        conversation = tsjax.Conversation(self._model, **how)
        conversation.messages += messages
        conversation.check()
        self._conversation, self._seed = conversation, how["seed"]
        self._tokens = self._steps = 0
        self._seconds = 0.0

    def take(self, said: str) -> None:
        """A message, or a command, which is one line."""
        if not said.strip():
            return
        word, _, rest = said.strip().partition(" ")
        if not word.startswith("/") or "\n" in said.strip():
            return self._answer(self._conversation.say(said))
        if word.startswith("//"):
            return self._answer(self._conversation.say(said.strip()[1:]))
        for usage in COMMANDS:
            name, _, argument = usage.partition(" ")
            if name == word:
                if bool(argument) != bool(rest.strip()):
                    return cli.tell(f"tsjax: write {usage}")
                return getattr(self, name[1:])(rest.strip())
        cli.tell(f'tsjax: there is no {word}: see /help; "/{word}" sends a message with "{word}"')

    def more(self, _: str) -> None:
        self._answer(self._conversation.more())

    def new(self, _: str) -> None:
        self._conversation.forget()
        self.begin(self._conversation.messages)
        cli.tell("[begun anew]")

    def system(self, text: str) -> None:
        self.begin(_of_system(text))
        cli.tell("[begun anew, with this system message]")

    def save(self, file: str) -> None:
        check_place(file, "/save")
        messages = self._conversation.messages
        write_text(file, json.dumps(messages, indent=2, ensure_ascii=False) + "\n")
        cli.tell(f"[{len(messages)} messages written to {file}]")

    def load(self, file: str) -> None:
        text = read_text(file)
        with parsing(file, " holds no messages"):
            messages = json.loads(text)
            check_chat(messages, "messages")
        self.begin(messages)
        cli.tell(f"[{len(messages)} messages from {file}]")

    def help(self, _: str) -> None:
        cli.tell(commands_in_words())

    def stats(self, _: str) -> None:
        result, most = self._conversation.result, self._model.cfg.max_positions
        if result is not None:
            told, count = result.stats, len(result.tokens[0])
            cli.tell(
                f"[last answer: {count} tokens, {told.tokens_per_second:.1f} tokens/s, "
                f"{told.tokens_per_step:.2f} tokens/step, {result.finish_reason[0]}]"
            )
            if told.drafted:
                by = [f"{source} {count}" for source, count in told.accepted_by_source.items()]
                cli.tell(f"[drafts: {told.accepted} of {told.drafted} accepted; {', '.join(by)}]")
        speed = self._tokens / self._seconds if self._seconds else 0.0
        cli.tell(
            f"[conversation: {self._tokens} tokens, {speed:.1f} tokens/s, "
            f"{self._tokens / max(self._steps, 1):.2f} tokens/step, "
            f"{self._conversation.tokens_in_context} of {most} positions used; "
            f"{self._sampling}, seed {self._seed}]"
        )

    def _answer(self, answer: Generator[str]) -> None:
        before = self._conversation.result
        try:
            with contextlib.closing(answer) as pieces:
                for piece in pieces:
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:  # SIGTERM ends the process
            if self._conversation.result is before:
                cli.tell("[ended before its first token]")
        finally:
            print(flush=True)
            if self._conversation.result is not before:
                self._count(self._conversation.result)

    def _count(self, result: Any) -> None:
        self._tokens += result.stats.computed_tokens
        self._steps += sum(result.stats.steps)
        self._seconds += result.stats.decode_seconds
        count, why = len(result.tokens[0]), result.finish_reason[0]
        if self._conversation.can_go_on:
            ended = "ended after " if why == "interrupted" else ""
            cli.tell(f"[{ended}{count} tokens; /more goes on]")
        elif why == "length":
            most = self._model.cfg.max_positions
            cli.tell(
                f"[{count} tokens, and the model's {most} positions are full; /new begins anew]"
            )

# SPDX-License-Identifier: Apache-2.0
"""`tsjax chat`: a conversation in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

import tsjax
from tsjax.commands import arguments as cli
from tsjax.config import DTYPES
from tsjax.methods import METHODS

CHAT_HELP = "/new begins anew, /quit ends; Ctrl-C ends an answer"


def add_chat(commands: Any) -> None:
    text = "talk with a checkpoint in a terminal"
    about = (
        "A conversation by the checkpoint's own chat template: answers are streamed, and what was "
        f"read once is not read again. {CHAT_HELP}."
    )
    parser = cli.command(commands, "chat", _chat, text, about)
    cli.add(parser, "model", cli.MODEL_HELP)
    cli.add(parser, "--system TEXT", "the system's message")
    cli.add(parser, "--dtype", "the checkpoint's own by default", choices=DTYPES)
    text = "how to decode; the text is the same"
    cli.add(parser, "--method", text, choices=sorted(METHODS), default="autoregressive")
    text = "fields of the method"
    cli.add(parser, "--method-options NAME=VALUE", text, nargs="+", default=[])
    cli.add_switch(
        parser, "--exceed-max-positions", "allow more tokens than the model was made for"
    )
    cli.add_cache(parser)
    cli.add_settings(parser)


def _chat(args: argparse.Namespace) -> int:
    settings, method = cli.settings_of(args), cli.named_method(args.method, args.method_options)
    tsjax.GenerationConfig().replace(**settings)
    model = tsjax.load(args.model, dtype=args.dtype)
    how = {"method": cli.with_options(method, args.method_options), **settings}
    how["exceed_max_positions"] = args.exceed_max_positions
    conversation = tsjax.Conversation(model, system=args.system, **how)
    conversation.check()
    shows = sys.stdin.isatty()
    if shows:
        cli.tell(f"[{CHAT_HELP}]")
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
        if said.strip() == "/new":
            conversation.forget()
        elif said.strip():
            _answer(conversation, said)


def _answer(conversation: Any, said: str) -> None:
    try:
        with contextlib.closing(conversation.say(said)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:  # SIGTERM ends the process
        print(" [ended]", end="")
    except tsjax.TsjaxError as error:  # the conversation is too long for the model, say
        cli.tell(f"tsjax: {' '.join(str(error).split())}")
        return
    print(flush=True)

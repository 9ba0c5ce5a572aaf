# SPDX-License-Identifier: Apache-2.0
"""The command line: `tsjax generate`, `check`, `train-heads`, `demo`, `bench` and so on.

Knows the commands, and how an error is told: one line on stderr and exit code 2, as for a run that
could not be saved; an interrupted run prints what it has and exits with 130.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
from collections.abc import Sequence

import tsjax
from tsjax.base.generation_config import GENERATION_NAMES
from tsjax.base.habits import HABITS
from tsjax.base.line_writer import told_on_stderr
from tsjax.base.telling import doing
from tsjax.commands.parser import Parser, tell
from tsjax.commands.renamed import in_new_words

# Command -> its one line in --help. Its module, and jax with it, is loaded when it is asked for.
KNOWN_COMMANDS = {
    "generate": "continue a text with a HuggingFace or tsjax checkpoint",
    "batch": "answer a file of prompts, side by side",
    "read": "read a text once, for prompts that begin with it",
    "chat": "talk with a checkpoint in a terminal",
    "check": "compare a saved run's tokens with plain decoding",
    "train-heads": "train draft heads for a checkpoint",
    "train-drafter": "train a one-layer drafter for a checkpoint",
    "demo": "a first look, with nothing downloaded",
    "bench": "measure methods, lengths and sampling of a checkpoint side by side",
    "roofline": "the least time of a run by memory, and what each method is expected to take",
    "fits": "what each device of a mesh would hold of a model and its texts",
    "info": "the machine, and what of tsjax is used on it",
}


# Those whose first word is a checkpoint.
WITH_MODEL = ("generate", "batch", "read", "chat", "train-heads", "train-drafter", "bench", "fits")


def main(argv: Sequence[str] | None = None) -> int:
    argv = in_new_words(_model_first(sys.argv[1:] if argv is None else list(argv)))
    # To read the flags takes jax, which is worth a line.
    with contextlib.nullcontext() if "--quiet" in argv else told_on_stderr():
        return _done(argv)


def _model_first(argv: list[str]) -> list[str]:
    """With what llama.cpp calls -m where the checkpoint stands here."""
    if argv[:1] and argv[0] in WITH_MODEL and "-m" in argv[:-1]:
        place = argv.index("-m")
        return [argv[0], argv[place + 1], *argv[1:place], *argv[place + 2 :]]
    return argv


def _done(argv: list[str]) -> int:
    with doing("starting"):
        args, unknown = parser_for(argv).parse_known_args(argv)
        args.argv = argv
        from tsjax.commands.arguments import keep_programs_as_asked

    if unknown:
        args.parser.error(_unknown_arguments(args, unknown))
    if getattr(args, "prompt_text", None) is not None:
        if args.prompt is not None:
            args.parser.error("give the prompt once: as an argument, or with -p")
        args.prompt = args.prompt_text
    try:
        if "compilation_cache" in args:
            keep_programs_as_asked(args)
        return args.run(args)
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except _expected_errors() as error:
        tell(f"tsjax: error: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        return 130


def _expected_errors() -> tuple[type[Exception], ...]:
    """What a wrong argument, a damaged file, a missing package or too little memory raise."""
    from jax.errors import JaxRuntimeError

    usual = ValueError, TypeError, OSError, ImportError, MemoryError, NotImplementedError
    return *usual, JaxRuntimeError


def _unknown_arguments(args: argparse.Namespace, unknown: Sequence[str]) -> str:
    """What to write instead of a flag that other programs have."""
    from tsjax.commands.arguments import flag_of

    for word in unknown if args.parser.prog.endswith((" generate", " batch")) else ():
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("-") and name in HABITS:
            names = rf"\b({'|'.join(GENERATION_NAMES)})\b"
            hint = re.sub(names, lambda found: flag_of(found.group()), HABITS[name])
            return f"unknown argument {word.partition('=')[0]}: {hint}"
    return f"unrecognized arguments: {' '.join(unknown)}"


def parser_for(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Knows the flags of the command that is named, and of the others what they are for."""
    parser = Parser(
        prog="tsjax", description="Long text generation in JAX. tsjax COMMAND --help tells more."
    )
    parser.add_argument("--version", action="version", version=f"tsjax {tsjax.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, text in KNOWN_COMMANDS.items():
        if name == asked:
            word = name.replace("-", "_")
            getattr(importlib.import_module(f"tsjax.commands.{word}"), f"add_{word}")(commands)
        else:
            commands.add_parser(name, help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())

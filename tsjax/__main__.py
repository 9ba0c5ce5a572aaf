# SPDX-License-Identifier: Apache-2.0
"""The command line: `tsjax generate`, `check`, `train-heads`, `demo`, `bench` and so on.

Knows the commands, and how an error is told: one line on stderr and exit code 2, as for a run that
could not be saved; an interrupted run prints what it has and exits with 130.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

import jax

import tsjax
from tsjax.commands.arguments import Parser, flag_of, keep_programs_as_asked, tell
from tsjax.commands.chat import add_chat
from tsjax.commands.check import add_check
from tsjax.commands.generate import add_generate
from tsjax.commands.measuring import add_bench, add_demo, add_info, add_roofline
from tsjax.commands.train_heads import add_train_heads
from tsjax.config import GENERATION_NAMES, HABITS

OF_MODELS = add_generate, add_chat, add_check
OF_MACHINES = add_demo, add_bench, add_roofline, add_info
# What a wrong argument, a damaged file, a missing package or too little memory raise.
EXPECTED_ERRORS = ValueError, TypeError, OSError, ImportError, MemoryError, NotImplementedError
EXPECTED_ERRORS += (jax.errors.JaxRuntimeError,)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args, unknown = _parser().parse_known_args(argv)
    args.argv = argv
    if unknown:
        args.parser.error(_unknown_arguments(args, unknown))
    try:
        if "compilation_cache" in args:
            keep_programs_as_asked(args)
        return args.run(args)
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except EXPECTED_ERRORS as error:
        tell(f"tsjax: error: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        return 130


def _unknown_arguments(args: argparse.Namespace, unknown: Sequence[str]) -> str:
    """What to write instead of a flag that other programs have."""
    for word in unknown if args.parser.prog.endswith(" generate") else ():
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("-") and name in HABITS:
            names = rf"\b({'|'.join(GENERATION_NAMES)})\b"
            hint = re.sub(names, lambda found: flag_of(found.group()), HABITS[name])
            return f"unknown argument {word.partition('=')[0]}: {hint}"
    return f"unrecognized arguments: {' '.join(unknown)}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tsjax", description="Long text generation in JAX. tsjax COMMAND --help tells more."
    )
    parser.add_argument("--version", action="version", version=f"tsjax {tsjax.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (*OF_MODELS, add_train_heads, *OF_MACHINES):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())

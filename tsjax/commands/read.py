# SPDX-License-Identifier: Apache-2.0
"""`tsjax read`: a text is read once, and what the model computed of it goes into a file."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import tsjax
from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.base.model_config import DTYPES
from tsjax.commands import arguments as cli
from tsjax.files.whole_files import check_place
from tsjax.host.prefix import open_prefix

READ_EXAMPLES = """examples:
  tsjax read ./story-model --prompt-file book.txt --save-to book.prefix
  tsjax generate ./story-model --prompt-file book-and-question.txt --prefix book.prefix
  tsjax read ./chat-model --system "A long text." --save-to rules.prefix
  tsjax chat ./chat-model --system "A long text." --prefix rules.prefix
"""


def add_read(commands: Any) -> None:
    text = "read a text once, for prompts that begin with it"
    about = (
        "Reads a text and writes a file for --prefix of generate and chat, which begin where it "
        "ends, or where a prompt parts from it. No token changes. The file is for this model, its "
        "numbers held as here."
    )
    parser = cli.command(commands, "read", _read, text, about, READ_EXAMPLES)
    cli.add(parser, "model", cli.MODEL_HELP)
    cli.add_prompt(parser, "the text to read")
    cli.add(parser, "--chat MESSAGE", "a message, by the chat template; - reads stdin")
    cli.add(parser, "--system TEXT", "the system's message, before --chat or alone")
    cli.add(parser, "--save-to FILE", "what is written", required=True)
    cli.add(parser, "--prefix FILE", cli.PREFIX_HELP)
    cli.add(parser, "--dtype", "the checkpoint's own by default", choices=DTYPES)
    cli.add_held(parser)
    cli.add_attached(parser, ("adapter",))
    cli.add(parser, "--prefill-width N", "tokens in a pass", type=int)
    cli.add_mesh(parser)
    cli.add_exceeding(parser)
    cli.add_compilation_cache(parser)


def _read(args: argparse.Namespace) -> int:
    given = cli.given_of(args, ("prompt", "prompt_file", "ids"))
    is_chat = args.chat is not None or args.system is not None
    if len(given) + is_chat != 1:
        ways = "as an argument (- reads stdin), with --prompt-file, --ids, or --chat and --system"
        raise BadValue(f"give the text once: {ways}")
    prompt = cli.prompt_of_flags(args)
    more: dict[str, Any] = {"messages": cli.messages_of_flags(args)} if is_chat else {}
    check_place(args.save_to, "--save-to")
    if args.prefix is not None:
        open_prefix(args.prefix)
    alone = "left out: one process writes the file"
    check(not args.distributed, "--distributed", True, alone)
    mesh = cli.mesh_of_sizes(args.mesh)
    model = cli.load_model(args, mesh)
    more |= cli.given_of(args, ("prefix", "prefill_width"))
    begun = time.perf_counter()
    read = tsjax.read(model, prompt, exceed_max_positions=args.exceed_max_positions, **more)
    seconds = time.perf_counter() - begun
    read.save(args.save_to)
    size = os.path.getsize(args.save_to) / 1e6
    figures = f"[{len(read.tokens):,} tokens in {seconds:.1f} s; {args.save_to}: {size:,.1f} MB]"
    cli.tell_unless_quiet(args, figures)
    return 0

# SPDX-License-Identifier: Apache-2.0
"""`tsjax demo`: two methods side by side, with nothing downloaded."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import tsjax
from tsjax.commands import arguments as cli
from tsjax.commands.side_by_side import PROMPT, STYLES, TOKENS, run_demo


def add_demo(commands: Any) -> None:
    text = "a first look, with nothing downloaded"
    about = (
        "Decodes a text with plain decoding and with TokenSwift side by side, by the small model "
        "that comes with tsjax: greedily, with sampling, and with sampling after the greedy text, "
        "which repeats itself. Compares tokens and times. Exit code 1 if the tokens differ."
    )
    parser = cli.command(commands, "demo", _demo, text, about)
    cli.add(parser, "--tokens N", "tokens of each text", default=TOKENS)
    cli.add(parser, "--seed N", cli.help_of(tsjax.GenerationConfig)["seed"], default=0)
    cli.add(parser, "--prompt", "the text to continue", default=PROMPT)
    cli.add(parser, "--model PATH", "another checkpoint", default=tsjax.EMBEDDED)
    which = parser.add_mutually_exclusive_group()
    for name in STYLES:
        only = dict(dest="settings", action="store_const", const=(name,), default=tuple(STYLES))
        cli.add(which, f"--{name}", f"only the {name} text", **only)
    cli.add_switch(parser, "--plain", "no colours and no redrawing, as without a terminal")
    text = "fields of TokenSwift, as in tsjax generate"
    cli.add(parser, "--method-options NAME=VALUE", text, nargs="+", default=[])
    cli.add_compilation_cache(parser)


def _demo(args: argparse.Namespace) -> int:
    method = cli.named_method("tokenswift", args.method_options)
    given = cli.given_of(args, ("prompt", "tokens", "seed", "settings", "plain"))
    return run_demo(args.model, method=method, out=sys.stdout, **given)

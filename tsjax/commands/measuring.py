# SPDX-License-Identifier: Apache-2.0
"""`tsjax demo`, `roofline` and `info`: what a machine does, and what it could do."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

import tsjax
from tsjax.commands import arguments as cli
from tsjax.config import DTYPES, check_int
from tsjax.demo import PROMPT, STYLES, TOKENS, run_demo
from tsjax.errors import BadValue
from tsjax.files.presets import model_preset_names
from tsjax.host import layout
from tsjax.host.info import info, info_lines
from tsjax.host.roofline_table import DEVICES, config_of, roofline_of
from tsjax.host.roofline_table import show as show_roofline

ROOFLINE_EXAMPLES = """examples:
  tsjax roofline llama3.1-8b --device a100 --prompt 4096 --new 100000
  tsjax roofline qwen2.5-7b --device h100 --acceptance 0.84 --json
  tsjax roofline ./story-model --device cpu --new 2000 --acceptance bench.json
"""


def add_demo(commands: Any) -> None:
    text = "a first look, with nothing downloaded"
    about = (
        "Decodes a text with plain decoding and with TokenSwift side by side, by the small model "
        "that comes with tsjax: greedily, with sampling, and with sampling after the greedy text, "
        "which repeats itself. Compares tokens and times. Exit code 1 if the tokens differ."
    )
    parser = cli.command(commands, "demo", _demo, text, about)
    cli.add(parser, "--tokens N", "tokens of each text", default=TOKENS)
    cli.add(parser, "--seed N", cli.SETTING_HELP["seed"], default=0)
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
    method = cli.with_options(
        cli.named_method("tokenswift", args.method_options), args.method_options
    )
    given = cli.given_of(args, ("prompt", "tokens", "seed", "settings", "plain"))
    return run_demo(args.model, method=method, out=sys.stdout, **given)


def add_roofline(commands: Any) -> None:
    text = "the least time of a run by memory, and what each method is expected to take"
    about = (
        "Says what a step of plain decoding reads, how long that takes at least on a device, and "
        "what the cost model expects of each method. No weights are read. Each figure says whether "
        "it is a bound, an estimate or an assumption."
    )
    parser = cli.command(commands, "roofline", _roofline, text, about, ROOFLINE_EXAMPLES)
    cli.add(parser, "model", cli.MODEL_HELP + "; or a preset, " + ", ".join(model_preset_names()))
    text = "by its data sheet; cpu measures the memory of this machine (default: the machine's own)"
    cli.add(parser, "--device", text, choices=DEVICES)
    cli.add(parser, "--prompt N", "tokens of the prompt", default=4096)
    cli.add(parser, "--new N", "new tokens of each row", default=100_000)
    cli.add(parser, "--batch N", "rows", default=1)
    cli.add(parser, "--dtype", "of weights and cache; the model's own by default", choices=DTYPES)
    cli.add_held(parser)
    text = "draft heads; by default those of the checkpoint, and the paper's 3 for a preset"
    cli.add(parser, "--heads N", text, type=int)
    text = (
        "how often drafts are right, in place of what is assumed: a share of the drafted positions "
        "as the paper's alpha, for methods that draft from the model; NAME=SHARE for one method; "
        "or a file that tsjax bench wrote"
    )
    cli.add(parser, "--acceptance SHARE", text, nargs="+", default=[])
    cli.add_switch(parser, "--json", "print one JSON document")


def _roofline(args: argparse.Namespace) -> int:
    names = ("prompt", "new", "device", "batch", "dtype", "heads", "acceptance")
    given = {**cli.held_of(args), **cli.given_of(args, names)}
    show_roofline(roofline_of(args.model, **given), args.json)
    return 0


def add_info(commands: Any) -> None:
    text = "the machine, and what of tsjax is used on it"
    about = (
        "Says which versions, devices and implementations of operations are used here, whether a "
        "C++ compiler was found, and what is kept in the cache folder."
    )
    parser = cli.command(commands, "info", _info, text, about)
    cli.add_switch(parser, "--json", "print one JSON document")
    text = "instead, what each device of such a mesh would hold; needs no devices"
    cli.add(parser, "--mesh DATA,MODEL[,SLOTS]", text)
    text = "with --mesh, a checkpoint or the name of a preset"
    cli.add(parser, "--model NAME", text, default=tsjax.EMBEDDED)
    cli.add_held(parser)
    cli.add(parser, "--context N", "with --mesh, tokens of each text", default=131_072)
    cli.add(parser, "--rows N", "with --mesh, texts side by side", default=1)


def _info(args: argparse.Namespace) -> int:
    if args.mesh is not None:
        check_int(args.context, "--context", 1)
        check_int(args.rows, "--rows", 1)
        sizes = layout.sizes_of(args.mesh)
        model = config_of(args.model, **cli.held_of(args))
        found = layout.layout(args.model, model, sizes, args.context, args.rows)
        as_json = {**dataclasses.asdict(found), "parts": [one._asdict() for one in found.parts]}
        print(json.dumps(as_json) if args.json else "\n".join(layout.layout_lines(found)))
        return 0
    alone = ("model", "weights", "cache", "context", "rows")
    given = [name for name in alone if getattr(args, name) != args.parser.get_default(name)]
    if given:
        raise BadValue(f"{cli.flag_of(given[0])} is not valid without --mesh DATA,MODEL[,SLOTS]")
    known = info()
    print(json.dumps(dataclasses.asdict(known)) if args.json else "\n".join(info_lines(known)))
    return 0

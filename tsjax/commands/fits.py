# SPDX-License-Identifier: Apache-2.0
"""`tsjax fits`: what each device of a mesh would hold of a model and its texts, and if it can."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from tsjax.base.checks import check_int
from tsjax.commands import arguments as cli
from tsjax.files.presets import model_preset_names
from tsjax.measure.layout import fit_line, fit_of, layout, layout_lines, room_of, sizes_of
from tsjax.measure.roofline_table import DEVICES, config_of

FITS_EXAMPLES = """examples:
  tsjax fits llama3.1-8b 1,1 --context 100000 --device a100-40gb
  tsjax fits llama3.1-70b 1,8,2 --context 1M --cache int8 --device h100
  tsjax fits ./llama-3.1-8b 4,1 --rows 64 --context 8192 --weights int8 --json
"""


def add_fits(commands: Any) -> None:
    text = "what each device of a mesh would hold of a model and its texts"
    about = (
        "Says what each device would hold, weights and cache, and whether nine tenths of its "
        "memory have room for that; if not, what would fit. Needs no weights, and with --device "
        "no devices. A run rounds the tokens of its cache up, unless it is given capacity=."
    )
    parser = cli.command(commands, "fits", _fits, text, about, FITS_EXAMPLES)
    cli.add(parser, "model", cli.MODEL_HELP + "; or a preset, " + ", ".join(model_preset_names()))
    text = "DATA,MODEL[,SLOTS], devices: parts of a batch, of the model, of a cache; 1,1 is one"
    cli.add(parser, "mesh", text, metavar="MESH")
    cli.add_count(parser, "--context", "tokens of each text", 131_072)
    cli.add(parser, "--rows N", "texts side by side", default=1)
    cli.add_held(parser)
    text = "a card, by its data sheet; by default what this machine has free"
    cli.add(parser, "--device", text, choices=DEVICES)
    cli.add_switch(parser, "--json", "print one JSON document")


def _fits(args: argparse.Namespace) -> int:
    check_int(args.context, "--context", 1)
    check_int(args.rows, "--rows", 1)
    sizes = sizes_of(args.mesh, "MESH")
    model = config_of(args.model, **cli.held_of(args))
    found = layout(args.model, model, sizes, args.context, args.rows)
    fit = fit_of(found, model, room_of(args.device))
    if args.json:
        parts = [one._asdict() for one in found.parts]
        print(json.dumps({**dataclasses.asdict(found), "parts": parts, "fit": fit._asdict()}))
    else:
        print("\n".join([*layout_lines(found), fit_line(fit)]))
    return 0

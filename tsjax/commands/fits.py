# SPDX-License-Identifier: Apache-2.0
"""`tsjax fits`: what each device of a mesh would hold of a model and its texts."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from tsjax.base.checks import check_int
from tsjax.commands import arguments as cli
from tsjax.files.presets import model_preset_names
from tsjax.measure.layout import layout, layout_lines, sizes_of
from tsjax.measure.roofline_table import config_of

FITS_EXAMPLES = """examples:
  tsjax fits llama3.1-8b 1,1 --context 100000
  tsjax fits llama3.1-70b 1,8,2 --context 1048576 --cache int8
  tsjax fits ./llama-3.1-8b 4,1 --rows 64 --context 8192 --weights int8 --json
"""


def add_fits(commands: Any) -> None:
    text = "what each device of a mesh would hold of a model and its texts"
    about = "Says what each device would hold, weights and cache. Needs no devices and no weights."
    parser = cli.command(commands, "fits", _fits, text, about, FITS_EXAMPLES)
    cli.add(parser, "model", cli.MODEL_HELP + "; or a preset, " + ", ".join(model_preset_names()))
    text = "DATA,MODEL[,SLOTS], devices: parts of a batch, of the model, of a cache; 1,1 is one"
    cli.add(parser, "mesh", text, metavar="MESH")
    cli.add(parser, "--context N", "tokens of each text", default=131_072)
    cli.add(parser, "--rows N", "texts side by side", default=1)
    cli.add_held(parser)
    cli.add_switch(parser, "--json", "print one JSON document")


def _fits(args: argparse.Namespace) -> int:
    check_int(args.context, "--context", 1)
    check_int(args.rows, "--rows", 1)
    sizes = sizes_of(args.mesh, "MESH")
    model = config_of(args.model, **cli.held_of(args))
    found = layout(args.model, model, sizes, args.context, args.rows)
    as_json = {**dataclasses.asdict(found), "parts": [one._asdict() for one in found.parts]}
    print(json.dumps(as_json) if args.json else "\n".join(layout_lines(found)))
    return 0

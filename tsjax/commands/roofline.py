# SPDX-License-Identifier: Apache-2.0
"""`tsjax roofline`: the least time of a run, and what each method is expected to take."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tsjax.base.model_config import DTYPES
from tsjax.commands import arguments as cli
from tsjax.files.presets import model_preset_names
from tsjax.measure.roofline_table import DEVICES, document, roofline_lines, roofline_of

ROOFLINE_EXAMPLES = """examples:
  tsjax roofline llama3.1-8b --device a100 --prompt 4096 --new 100000
  tsjax roofline qwen2.5-7b --device h100 --acceptance 0.84 --json
  tsjax roofline ./story-model --device cpu --new 2000 --acceptance bench.json
"""


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
    cli.add_count(parser, "--prompt", "tokens of the prompt", 4096)
    cli.add_count(parser, "--new", "new tokens of each row", 100_000)
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
    found = roofline_of(args.model, **given)
    print(json.dumps(document(found)) if args.json else "\n".join(roofline_lines(found)))
    return 0

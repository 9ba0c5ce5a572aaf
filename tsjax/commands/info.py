# SPDX-License-Identifier: Apache-2.0
"""`tsjax info`: the machine, and what of tsjax is used on it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from tsjax.commands import arguments as cli
from tsjax.host.info import info, info_lines


def add_info(commands: Any) -> None:
    text = "the machine, and what of tsjax is used on it"
    about = (
        "Says which versions, devices and implementations of operations are used here, whether a "
        "C++ compiler was found, and what is kept in the cache folder."
    )
    parser = cli.command(commands, "info", _info, text, about)
    cli.add_switch(parser, "--json", "print one JSON document")


def _info(args: argparse.Namespace) -> int:
    known = info()
    print(json.dumps(dataclasses.asdict(known)) if args.json else "\n".join(info_lines(known)))
    return 0

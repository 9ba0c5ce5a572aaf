# SPDX-License-Identifier: Apache-2.0
"""`tsjax check`: a saved run's tokens against plain decoding."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

import tsjax
from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.base.model_config import DTYPES
from tsjax.commands import arguments as cli
from tsjax.host.prompts import tokenizer_of
from tsjax.host.saved_run import read_run

LEADS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # counted by tsjax check


def add_check(commands: Any) -> None:
    text = "compare a saved run's tokens with plain decoding"
    about = (
        "Judges each new token of a run after the run's own text, by plain decoding's passes of "
        "one row: which tokens plain decoding would not have chosen, and how near a tie the others "
        "were. In float32 and float64 there are none, whatever the method; in bfloat16 and float16 "
        "drafts may part from plain decoding at a near-tie. Exit code 1 if there are any."
    )
    parser = cli.command(commands, "check", _check, text, about)
    cli.add(parser, "saved", "a file that --save-to wrote", metavar="RUN")
    cli.add(parser, "--model PATH", "the model, if it is not where it was")
    cli.add(parser, "--dtype", "the run's, which is the default", choices=DTYPES)
    cli.add_attached(parser, ("adapter",))
    cli.add_switch(parser, "--progress", "progress bar on stderr")
    cli.add_switch(parser, "--json", "print one JSON document")
    cli.add_compilation_cache(parser)


def _check(args: argparse.Namespace) -> int:
    saved = read_run(args.saved, "run")
    path, dtype = args.model or saved.model_path, saved.dtype or args.dtype
    if path is None:
        raise BadValue(f"run={args.saved!r} does not say where its model is: give --model PATH")
    check(args.dtype in (None, dtype), "--dtype", args.dtype, f"the run's, {dtype}")
    how = {"weights": saved.weights, "cache": saved.cache, "adapter": args.adapter}
    model = tsjax.load(path, dtype=dtype, **how)
    found = tsjax.check_run(model, args.saved, progress=args.progress)
    below = {f"{lead:g}": found.num_below(lead) for lead in LEADS}
    nearest, names = found.nearest(cli.MOST_SHOWN), ("row", "index", "lead")
    if args.json:
        document = {
            "run": args.saved,
            "model": path,
            "dtype": found.dtype,
            "rows": len(found.leads),
            "tokens": found.num_tokens,
            "departures": [dataclasses.asdict(d) for d in found.departures],
            "departures_per_1000": found.departures_per_1000,
            "leads_below": below,
            "nearest": [dict(zip(names, entry, strict=True)) for entry in nearest],
        }
        print(json.dumps(_finite(document)))
        return 1 if found.departures else 0

    tokenizer = tokenizer_of(model)

    def shown(token: int) -> str:
        return f"{token} {tokenizer.decode([token])!r}" if tokenizer is not None else str(token)

    print(f"{found.num_tokens} tokens in {len(found.leads)} rows, {found.dtype}")
    per_1000 = f"{found.departures_per_1000:.2f} per 1,000"
    print(f"not plain decoding's choice: {len(found.departures)} ({per_1000})")
    for d in found.departures[: cli.MOST_SHOWN]:
        choice = f"{shown(d.choice)}, which leads it by {d.behind:.3g}"
        print(f"  row {d.row}, token {d.index}: {shown(d.token)}, not {choice}")
    if len(found.departures) > cli.MOST_SHOWN:
        print(f"  and {len(found.departures) - cli.MOST_SHOWN} more")
    print("plain decoding's choice leads the next best by less than")
    print("  " + ", ".join(f"{lead}: {count} tokens" for lead, count in below.items()))
    print("the nearest")
    for row, index, lead in nearest:
        print(f"  row {row}, token {index}: by {lead:.3g}")
    return 1 if found.departures else 0


def _finite(value: Any) -> Any:
    """The same with None for infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

# SPDX-License-Identifier: Apache-2.0
"""Score and time of pruned prompts on a real model, prompt by prompt, all methods in turn.

    python -m experiments.longcontext --model FILE --books FOLDER --out FOLDER

Half of the books and modules are for development: for each family of methods and each target, the
best mean score of a few candidates (rivals.py) wins there. The other half is reported: prompt by
prompt, one at a time, all methods answer in turn, and what is scored is what was timed. Tasks that
the model does not master without pruning are left out of both, and named. `--small` names another
model of the same vocabulary, which chooses a prompt's tokens for this one.

Everything goes on from what is in the folder already: a run may be ended at any time (--minutes
ends it), and more --samples may be asked for later.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tsjax
from benchmarks import report
from experiments.longcontext.rivals import FAMILIES, TARGETS, Asked
from experiments.longcontext.selection import Document, develop, measure_dense
from experiments.longcontext.tasks import HALVES, TASKS, Sources
from experiments.longcontext.turns import measure
from tools.facts import sha256_of
from tsjax.base.model_config import WEIGHTS

STEPS = {"dense": measure_dense, "develop": develop, "measure": measure}
LISTS = ("dense", "candidates", "rows")
ASKED = ("seed", "targets", "develop_length", "develop_samples", "dense_samples", "least_dense")


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    name = f"longcontext-{Path(args.model).stem}"
    how = {} if args.weights is None else {"weights": args.weights}
    model = tsjax.load(args.model, **how)
    asked = Asked(model, args.small and tsjax.load(args.small, **how))
    sources = {half: Sources(model, args.books, args.code, half) for half in HALVES}
    document = begun(args.out, name, args)
    save = functools.partial(report.save, document, args.out, name)
    for step in args.parts:
        STEPS[step](asked, sources, document, args, save)
    if any(row["scores"] for row in document["rows"]):
        from experiments.longcontext import plots  # needs matplotlib

        plots.draw(document, args.out / f"{name}.png")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = report.parser_of("experiments.longcontext", __doc__)
    parser.add_argument("--model", required=True, help="a checkpoint for chats")
    parser.add_argument("--small", help="a smaller one that chooses tokens for it")
    parser.add_argument("--weights", choices=WEIGHTS, help="as of tsjax.load")
    parser.add_argument("--books", type=Path, required=True, help="folder of *.txt, for prose")
    parser.add_argument(
        "--code", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of *.py"
    )
    parser.add_argument(
        "--samples", nargs="+", default=["4096:4", "8192:4", "16384:1"], metavar="LENGTH:SAMPLES",
        help="prompts of each reported task, by their length",
    )  # fmt: skip
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--targets", type=float, nargs="+", default=list(TARGETS))
    parser.add_argument("--develop-length", type=int, default=1024)
    parser.add_argument("--develop-samples", type=int, default=4)
    parser.add_argument("--dense-samples", type=int, default=3, help="that say what is left out")
    parser.add_argument(
        "--least-dense", type=float, default=0.5, help="tasks with a lower score are left out"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=STEPS, default=list(STEPS))
    report.add_budget(parser)
    parser.set_defaults(minutes=600)
    args = parser.parse_args(argv)
    if args.out is None:
        parser.error("--out is missing: the folder of the results and plots")
    pairs = (pair.split(":") for pair in args.samples)
    args.samples = {int(length): int(count) for length, count in pairs}
    args.budget = report.Budget(args.minutes)
    return args


def begun(out: Path, name: str, args: argparse.Namespace) -> Document:
    """The document that is in the folder, if it was asked the same of the same model, or a new
    one."""
    file, empty = out / f"{name}.json", {part: [] for part in LISTS}
    wanted: dict[str, Any] = {key: getattr(args, key) for key in ASKED}
    for key in ("model", "small"):
        path = getattr(args, key) and Path(getattr(args, key))
        wanted[key] = path and path.stem
        wanted[f"{key}_sha256"] = sha256_of(path) if path and path.is_file() else None
    wanted |= {
        "weights": args.weights,
        "books": sorted(one.name for one in args.books.glob("*.txt")),
    }
    if not file.exists():
        return {**report.facts(), **wanted, **empty}
    document = json.loads(file.read_text())
    other = [key for key, value in wanted.items() if document.get(key) != value]
    if not other:
        return {**empty, **document, **report.facts()}  # of the command that makes it whole
    raise SystemExit(f"{file} has another {other[0]}: remove it, or give another --out")


if __name__ == "__main__":
    main(sys.argv[1:])

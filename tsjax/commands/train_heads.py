# SPDX-License-Identifier: Apache-2.0
"""`tsjax train-heads`: draft heads for a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import tsjax
from tsjax.base.model_config import DTYPES, HEAD_KINDS
from tsjax.base.training_config import HeadTraining
from tsjax.commands import arguments as cli
from tsjax.files.presets import training_preset, training_preset_names
from tsjax.host import processes
from tsjax.training.corpus import TOKEN_DTYPES
from tsjax.training.run import SETTING_NAMES as TRAINING_NAMES
from tsjax.training.run import head_settings

TRAINING_EXAMPLES = """examples:
  tsjax train-heads ./llama-3.1-8b --data books/ --save-to heads --preset llama3.1-8b
  tsjax train-heads ./llama-3.1-8b --data books/ --save-to heads --preset llama3.1-8b --resume
  tsjax train-heads ./llama-3.1-8b --data ids.bin --data-dtype uint32 --save-to heads --mesh 4,1
  tsjax train-heads ./story-model --data a.txt b.txt --whole-books --sequence-length 512 \\
      --batch-size 16 --micro-batch 8 --held-out 0.1 --save-to heads
  tsjax generate ./llama-3.1-8b-with-heads "Once" --method tokenswift
"""


def add_train_heads(commands: Any) -> None:
    text = "train draft heads for a checkpoint"
    about = (
        "Trains draft heads on texts, TokenSwift's or Medusa's; the model stays as it is. The "
        "defaults are the papers' recipes. Figures go to stderr, the last line is JSON."
    )
    parser = cli.command(commands, "train-heads", _train_heads, text, about, TRAINING_EXAMPLES)
    text = "text files, folders of them, .npy or .bin files of token ids"
    cli.add(parser, "--data PATH", text, nargs="+", required=True)
    text = "receives checkpoints, metrics and the heads; tsjax.load(model, heads=DIR) takes it"
    add_training(parser, text, save_every=50)
    text = "evaluate at the end on this share of the texts, or on these files"
    cli.add(parser, "--held-out FRACTION|PATH", text, nargs="+")
    cli.add_switch(parser, "--whole-books", "use all sequences of a text, not the first one")
    cli.add(parser, "--data-dtype", "type of the ids in .bin files", choices=TOKEN_DTYPES)
    text = "the paper's settings for a model, which other flags override: "
    text += ", ".join(training_preset_names())
    cli.add(parser, "--preset NAME", text, choices=training_preset_names())
    group = parser.add_argument_group("how to train")
    kinds = dict(choices=HEAD_KINDS, metavar=None)
    cli.add_fields(group, tsjax.training.HeadTraining, TRAINING_NAMES, head_kind=kinds)


def add_training(parser: Any, receives: str, save_every: int) -> None:
    """The flags of every training: its folder, and how the model is loaded."""
    cli.add(parser, "model", cli.MODEL_HELP)
    cli.add(parser, "--save-to DIR", receives, required=True)
    cli.add_switch(parser, "--resume", "go on with the run in that folder")
    cli.add(parser, "--save-every STEPS", "steps between checkpoints", default=save_every)
    cli.add_switch(parser, "--cache-hidden", "keep what the model computes in host memory")
    cli.add(parser, "--dtype", "the checkpoint's own by default", choices=DTYPES)
    cli.add_held(parser)
    cli.add_attached(parser, ("adapter",))
    cli.add_mesh(parser)
    cli.add_compilation_cache(parser)


def run_training(
    args: argparse.Namespace, train: Callable[..., Any], names: Sequence[str], **options: Any
) -> Any:
    """With the flags of these names, beside those of every training."""
    return train(
        progress=processes.is_first() and not args.quiet,
        on_interrupt="return",
        **options,
        **cli.given_of(args, (*names, "save_to", "save_every", "resume", "cache_hidden")),
    )


def end_training(args: argparse.Namespace, trained: Any, told: dict[str, Any]) -> int:
    """The last line, and what is to be done where it was interrupted."""
    document = {
        "save_to": args.save_to,
        "finish_reason": trained.finish_reason,
        "steps": len(trained.history),
        **told,
    }
    print(json.dumps(document))
    # Before the first step there is nothing to go on with.
    go_on = "[go on with the same command and --resume]" if trained.history else ""
    return cli.exit_code(args, trained, trained.finish_reason == "interrupted", go_on)


def _train_heads(args: argparse.Namespace) -> int:
    settings = None if args.preset is None else training_preset(args.preset)
    # Refuses a wrong value before the model is read.
    head_settings(settings, cli.given_of(args, TRAINING_NAMES))
    held_out: Any = args.held_out
    if held_out is not None and len(held_out) == 1 and not os.path.exists(held_out[0]):
        with contextlib.suppress(ValueError):  # the library says that there is no such file
            held_out = float(held_out[0])
    with cli.joined(args):
        return _trained(args, settings, held_out)


def _trained(args: argparse.Namespace, settings: HeadTraining | None, held_out: Any) -> int:
    model = cli.load_model(args, cli.mesh_of_sizes(args.mesh))
    train = functools.partial(tsjax.training.train_heads, model)
    names = ("data", "whole_books", "data_dtype", *TRAINING_NAMES)
    trained = run_training(args, train, names, settings=settings, held_out=held_out)
    if trained.skipped:
        count, first = len(trained.skipped), trained.skipped[0]
        cli.tell_unless_quiet(args, f"[{count} texts are shorter than a sequence, such as {first}]")
    for record in trained.evaluation:
        who = f"head {record['head']}" if record["head"] else "model "
        guess = f"{record['skip_bigram'][0]:.1%} by the best guess from counts"
        said = f"{record['top1']:.1%} right, {guess}; loss {record['loss']:.3f}"
        cli.tell_unless_quiet(args, f"[{who}: {said}]")
    last = trained.history[-1] if trained.history else {}
    told = {"head_losses": last.get("head_losses"), "top1": last.get("top1")}
    return end_training(args, trained, told)

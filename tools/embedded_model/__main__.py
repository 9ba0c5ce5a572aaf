# SPDX-License-Identifier: Apache-2.0
"""The commands: stories, tokenizer, train, heads, export, drafter."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import tsjax

from . import drafter, folder, stories, texts, training

ABOUT = """\
Train the small English model of this repository, from the root of a checkout:

  python -m tools.embedded_model stories --model FILE --texts TEXTS
  python -m tools.embedded_model tokenizer --texts TEXTS --work WORK
  python -m tools.embedded_model train --work WORK --out OUT --minutes 120
  python -m tools.embedded_model heads --work WORK --out OUT
  python -m tools.embedded_model export --work WORK --out OUT
  python -m tools.embedded_model drafter --work WORK --out OUT

FILE is a chat model that writes stories into TEXTS, a folder of UTF-8 text files with blank lines
between paragraphs; any such folder will do. WORK receives the tokenizer, the token ids and
checkpoints, OUT the model in HuggingFace's format with its card, and with draft heads as soon as
there are some. What a GPU has trained can be exported on another machine (`--no-export`). The
drafter is the embedded model's: it learns from what that model writes.
"""

# Where a device differs from the defaults of Settings, which are for a CPU.
ON_GPU = {
    "length": 1024,
    "batch": 32_768,
    "micro": 16_384,
    "dtype": "bfloat16",
    "chunk": 20,
    "dropout": 0.1,
}

# Of train_heads. The paper's learning rate is for models with 16 times as many dimensions.
HEADS = {
    "steps": 200,
    "learning_rate": 0.03,
    "batch_size": 16,
    "micro_batch": 4,
    "sequence_length": 512,
    "warmup_steps": 20,
}

SHAPE = ("embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(argv)
    try:
        run = {
            "stories": make_stories, "tokenizer": make_tokenizer, "train": train, "heads": heads,
            "export": export, "drafter": make_drafter,
        }  # fmt: skip
        run[args.command](args, argv)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m tools.embedded_model",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)

    zero = commands.add_parser("stories", help="let a real model write the texts")
    zero.add_argument("--model", type=Path, required=True, help="a chat model's file")
    zero.add_argument("--texts", type=Path, required=True, help="folder that receives them")
    zero.add_argument("--tokens", type=int, default=20_000_000, help="to keep, as the model counts")
    zero.add_argument("--rows", type=int, default=512, help="stories written side by side")
    zero.add_argument("--seed", type=int, default=0)

    one = commands.add_parser("tokenizer", help="train the tokenizer and encode the texts")
    one.add_argument("--texts", type=Path, required=True, help="folder of *.txt")
    one.add_argument("--work", type=Path, required=True)
    one.add_argument("--vocab-size", type=int, default=training.SMALL.vocab_size)

    two = commands.add_parser("train", help="train, then export")
    two.add_argument("--work", type=Path, required=True)
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    two.add_argument("--stop-at", type=int, help="end at this update and export nothing")
    two.add_argument("--no-export", action="store_true", help="export on another machine")
    for field in dataclasses.fields(training.Settings):
        kind = {"minutes": float, "steps": int}.get(field.name) or type(field.default)
        gpu = f"; on a GPU {ON_GPU[field.name]}" if field.name in ON_GPU else ""
        default = "" if field.default is None else f"default {field.default}{gpu}"
        two.add_argument(f"--{field.name.replace('_', '-')}", type=kind, help=default)
    for name in SHAPE:
        default = getattr(training.SMALL, name)
        two.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}"
        )

    four = commands.add_parser("heads", help="train draft heads on the same texts, then export")
    four.add_argument("--work", type=Path, required=True)
    four.add_argument("--out", type=Path, required=True)
    four.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    four.add_argument("--no-export", action="store_true", help="export on another machine")
    for name, default in HEADS.items():
        flag = f"--{name.replace('_', '-')}"
        four.add_argument(flag, type=type(default), default=default, help=f"default {default}")

    three = commands.add_parser("export", help="write the model folder from the best checkpoint")
    three.add_argument("--work", type=Path, required=True)
    three.add_argument("--out", type=Path, required=True)

    five = commands.add_parser("drafter", help="train a one-layer drafter for the embedded model")
    five.add_argument("--work", type=Path, required=True, help="receives text and checkpoints")
    five.add_argument("--out", type=Path, required=True, help="receives the drafter")
    five.add_argument("--minutes", type=float, default=10, help="default 10")
    five.add_argument("--tokens", type=int, default=400_000, help="of text, at most")
    return top


def make_stories(args: argparse.Namespace, argv: list[str]) -> None:
    measured = {"command": command(argv), **folder.measured_with()}
    stories.write_stories(args.model, args.texts, args.tokens, args.rows, args.seed, measured)


def make_tokenizer(args: argparse.Namespace, argv: list[str]) -> None:
    books = texts.read_books(args.texts)
    bpe = texts.train_tokenizer([book.train for book in books], args.vocab_size)
    texts.save_tokenizer(bpe, args.work / folder.TOKENIZER, training.SMALL.max_positions)
    train = texts.Stream.of(bpe, [book.train for book in books])
    held_out = texts.Stream.of(bpe, [book.held_out for book in books])
    train.save(args.work / folder.TRAIN)
    held_out.save(args.work / folder.HELD_OUT)
    about = {
        "command": command(argv),
        "books": [
            {"name": book.name, "characters": book.size, "sha256": book.sha256} for book in books
        ],
        "vocab_size": bpe.get_vocab_size(),
        "stop_id": bpe.token_to_id(texts.EOS),
        "train_tokens": len(train.tokens),
        "held_out_tokens": len(held_out.tokens),
        "held_out_bytes": sum(len(book.held_out.encode()) for book in books),
        "held_out_part": texts.HELD_OUT,
    }
    if (args.texts / stories.RECORD).exists():
        about["stories"] = json.loads((args.texts / stories.RECORD).read_text("utf-8"))
    (args.work / folder.TEXTS).write_text(json.dumps(about, indent=1) + "\n")
    print(
        f"{len(books)} texts, {len(train.tokens):,} tokens to train on, {len(held_out.tokens):,} "
        f"held out, {about['held_out_bytes'] / len(held_out.tokens):.2f} bytes per token"
    )


def make_trainer(work: Path, cfg: dict, settings: training.Settings) -> training.Trainer:
    train = texts.Stream.load(work / folder.TRAIN)
    held_out = texts.Stream.load(work / folder.HELD_OUT)
    about = json.loads((work / folder.TEXTS).read_text("utf-8"))
    shape = dataclasses.replace(training.SMALL, vocab_size=about["vocab_size"], **cfg)
    folder.check_room(shape, work)

    def save(weights) -> None:
        folder.save_best(weights, shape, about["stop_id"], work)

    return training.Trainer(shape, settings, train, held_out, work, on_best=save)


def train(args: argparse.Namespace, argv: list[str]) -> None:
    folder.check_target(args.out)
    given = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(training.Settings)
        if getattr(args, field.name) is not None
    }
    if jax.default_backend() == "gpu":
        given = {**ON_GPU, **given}
    shape = {name: getattr(args, name) for name in SHAPE}
    trainer = make_trainer(args.work, shape, training.Settings(**given))
    if args.resume:
        trainer.restore()
    else:
        folder.start_afresh(args.work)
        run = folder.describe_run(command(argv), trainer)
        (args.work / folder.RUN).write_text(json.dumps(run, indent=1) + "\n")
    trainer.run(stop_at=args.stop_at)
    if args.stop_at is None and not args.no_export:
        print(folder.export(args.work, args.out, trainer))


def heads(args: argparse.Namespace, argv: list[str]) -> None:
    folder.check_target(args.out)
    folder.check_trained(args.work)
    held_out = args.work / "held_out.npy"
    np.save(held_out, texts.Stream.load(args.work / folder.HELD_OUT).tokens)
    trained = tsjax.training.train_heads(
        tsjax.load(args.work / folder.BEST),
        texts.Stream.load(args.work / folder.TRAIN).tokens,
        held_out=[held_out],
        whole_books=True,
        save_to=args.work / folder.HEADS,
        resume=args.resume,
        progress=True,
        on_interrupt="return",
        num_heads=folder.NUM_HEADS,
        **{name: getattr(args, name) for name in HEADS},
    )
    if trained.finish_reason != "steps":
        raise ValueError("interrupted; --resume goes on")
    shown = {"command": command(argv), **folder.measured_with()}
    (args.work / folder.HEADS_RUN).write_text(json.dumps(shown, indent=1) + "\n")
    if not args.no_export:
        export(args, argv)


def export(args: argparse.Namespace, argv: list[str]) -> None:
    folder.check_target(args.out)
    run = json.loads((args.work / folder.RUN).read_text("utf-8"))
    shape = {name: run["shape"][name] for name in SHAPE}
    trainer = make_trainer(args.work, shape, training.Settings(**run["settings"]))
    print(folder.export(args.work, args.out, trainer))


def make_drafter(args: argparse.Namespace, argv: list[str]) -> None:
    measured = folder.measured_with()
    shown = {"command": command(argv), **measured, **measured["versions"]}
    print(drafter.make_drafter(args.work, args.out, args.minutes, args.tokens, shown))


def command(argv: list[str]) -> str:
    """What was typed, with names in place of paths."""
    shown = list(argv)
    for index, word in enumerate(argv[:-1]):
        if word in ("--model", "--texts", "--work", "--out"):
            shown[index + 1] = word[2:].upper()
    shown = [word for word in shown if word != "--resume"]
    return shlex.join(["python", "-m", "tools.embedded_model", *shown])


if __name__ == "__main__":
    sys.exit(main())

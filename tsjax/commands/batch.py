# SPDX-License-Identifier: Apache-2.0
"""`tsjax batch`: each line of a file is answered in another file; the batch stays full."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import tsjax
from tsjax.base.checks import check_int
from tsjax.base.model_config import DTYPES
from tsjax.base.telling import doing
from tsjax.commands import arguments as cli
from tsjax.files.presets import preset
from tsjax.files.whole_files import check_place
from tsjax.host.prefix import check_prefix_is_read_alike, open_prefix
from tsjax.host.progress import progress_bar
from tsjax.host.prompt_files import Answering, read_lines

ABOUT_BATCH = """Answers each line of a file, several side by side. Answers are written as they
come, one a line, with the number of the prompt's line. What is there already is not
answered again: after a kill the same command goes on. Exit code 1 if lines could not be
answered; the next run tries those again."""
BATCH_EXAMPLES = """lines of the file, the last one of an OpenAI batch, answered in its form:
  "Once upon a time"
  {"prompt": "Once upon a time", "seed": 3, "max_new_tokens": 500, "id": "a"}
  {"messages": [{"role": "user", "content": "Who wrote Emma?"}]}
  {"ids": [9, 4, 7]}
  {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"}}

examples:
  tsjax batch ./llama-3.1-8b prompts.jsonl --out answers.jsonl --rows 16 --dtype bfloat16
  tsjax batch ./llama-3.1-8b prompts.jsonl --out answers.jsonl --max-new-tokens 1000 \\
      --do-sample --temperature 0.8 --seed 7 --weights int8 --progress
  tsjax batch ./story-model prompts.jsonl --out answers.jsonl --rows 4 --method ngram
"""


def add_batch(commands: Any) -> None:
    text = "answer a file of prompts, side by side"
    parser = cli.command(commands, "batch", _batch, text, ABOUT_BATCH, BATCH_EXAMPLES)
    cli.add(parser, "model", cli.MODEL_HELP)
    cli.add(parser, "prompts", "the file of prompts", metavar="PROMPTS_FILE")
    cli.add(parser, "--out FILE", "where the answers go", required=True)
    cli.add(parser, "--rows N", "answers that are made side by side", default=8)
    cli.add(parser, "--prefix FILE", cli.PREFIX_HELP)
    cli.add(parser, "--dtype", "the checkpoint's own by default", choices=DTYPES)
    cli.add_held(parser)
    cli.add_method(parser, "auto")
    cli.add(parser, "--corpus FILE", "earlier texts to draft from, with auto", nargs="+")
    cli.add(parser, "--draft-model PATH", "a smaller model that drafts, as in tsjax generate")
    cli.add_attached(parser)
    cli.add_preset(parser, "sampling")
    cli.add_mesh(parser, distributed=False)
    cli.add_switch(parser, "--progress", "progress bar")
    cli.add_switch(parser, "--json", "print one JSON document at the end")
    cli.add_exceeding(parser)
    cli.add_compilation_cache(parser)
    cli.add_settings(parser, logprobs="{}")


def _batch(args: argparse.Namespace) -> int:
    # Refuses what is wrong before the model is read.
    check_int(args.rows, "--rows", 1)
    config = tsjax.GenerationConfig() if args.preset is None else preset(args.preset).config
    config = config.replace(**cli.settings_of(args))
    usual = "auto" if args.draft_model is None else "draft_model"
    method = cli.named_method(args.method or usual, args.method_options)
    if args.prefix is not None:
        open_prefix(args.prefix)
    read_lines(args.prompts)
    check_place(args.out, "--out")
    model = cli.load_model(args, cli.mesh_of_sizes(args.mesh))
    more: dict[str, Any] = {"rows": args.rows, "exceed_max_positions": args.exceed_max_positions}
    if args.corpus is not None:
        more["corpus"] = tsjax.read_corpus(model, *args.corpus)
    if args.draft_model is not None:
        more["draft_model"] = tsjax.load(args.draft_model, dtype=args.dtype, weights=args.weights)
    if args.prefix is not None:
        more["prefix"] = prefix = tsjax.read(model, prefix=args.prefix)
        check_prefix_is_read_alike(prefix, prefix.length, "--out")
    answering = Answering(model, args.prompts, args.out, config, method=method, **more)
    with (
        doing("answering", answering.waiting, "prompts") as work,
        progress_bar(args.progress and not args.quiet, answering.waiting, "answers") as bar,
    ):
        try:
            for count, _ in enumerate(answering, 1):
                work.done(count)
                bar.update(1)
        except (tsjax.Interrupted, KeyboardInterrupt):
            cli.tell("[go on with the same command]")
            return 130
    done = answering.done
    if args.json:
        print(json.dumps(dataclasses.asdict(done)))
    figures = (
        f"[{done.lines} prompts, {done.before} answered before, {done.tokens} tokens now, "
        f"{len(done.failed)} failed]"
    )
    cli.tell_unless_quiet(args, figures)
    if done.failed:
        shown = ", ".join(map(str, done.failed[: cli.MOST_SHOWN]))
        unseen = len(done.failed) - cli.MOST_SHOWN
        shown += f" and {unseen} more" if unseen > 0 else ""
        cli.tell(f"tsjax: error: these lines could not be answered: {shown}; why is in {args.out}")
    return 1 if done.failed else 0

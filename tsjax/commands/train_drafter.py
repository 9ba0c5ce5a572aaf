# SPDX-License-Identifier: Apache-2.0
"""`tsjax train-drafter`: a one-layer drafter for a checkpoint, from the checkpoint's own text."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import tsjax
from tsjax.base.generation_config import GENERATION_NAMES
from tsjax.base.training_config import DrafterTraining
from tsjax.commands import arguments as cli
from tsjax.commands.train_heads import add_training, end_training, run_training
from tsjax.training.drafter_run import DRAFTER_SETTINGS, OWN_TOKENS
from tsjax.training.drafter_steps import shape_for

OF_TRAINING = [name for name in DRAFTER_SETTINGS if name != "temperature"]  # which is of the text
OF_TEXT = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window")
DRAFTER_EXAMPLES = """examples:
  tsjax train-drafter model.gguf --save-to drafter --minutes 60
  tsjax train-drafter model.gguf --save-to drafter --minutes 60 --resume
  tsjax train-drafter ./qwen --save-to drafter --minutes 10 --temperature 1 --min-p 0.1 \\
      --repetition-penalty 1.2 --repetition-window 1024 --prompts mine.txt
  tsjax generate model.gguf "Once" --drafter drafter --method auto
"""


def add_train_drafter(commands: Any) -> None:
    text = "train a one-layer drafter for a checkpoint"
    about = (
        "The model writes text of its own, and a drafter of one layer learns from it to say what "
        "the model will; the model stays as it is. Figures go to stderr, the last line is JSON."
    )
    parser = cli.command(commands, "train-drafter", _train_drafter, text, about, DRAFTER_EXAMPLES)
    text = "receives the text, checkpoints, metrics and the drafter; --drafter DIR takes it"
    add_training(parser, text, save_every=100)
    cli.add(parser, "--minutes N", "in all, writing text included", type=float)
    cli.add(parser, "--data DIR", "text that was written before, in place of writing some")
    cli.add(parser, "--prompts FILE", "what the model is asked: one prompt a line, or JSON")
    cli.add(parser, "--tokens N", "of text to write, at most", default=OWN_TOKENS)
    cli.add(parser, "--words N", "tokens that the drafter can say, the most frequent", type=int)
    cli.add(parser, "--mlp-dim N", "of its feed-forward part", type=int)
    cli.add(parser, "--evaluate-every STEPS", "steps between evaluations", default=200)
    group = parser.add_argument_group("how the text is drawn, as the drafter is to be used")
    text = cli.help_of(tsjax.GenerationConfig)["temperature"] + " (default: 0.7)"
    changed = dict(temperature=dict(help=text), repetition_window=dict(type=int))
    cli.add_fields(group, tsjax.GenerationConfig, OF_TEXT, **changed)
    cli.add_switch(group, "--greedy", "the most probable tokens, in place of sampling")
    group = parser.add_argument_group("how to train")
    steps = dict(help="steps of the optimiser, in place of --minutes (default: 0)")
    cli.add_fields(group, DrafterTraining, OF_TRAINING, steps=steps)


def _train_drafter(args: argparse.Namespace) -> int:
    drawn = cli.given_of(args, [name for name in GENERATION_NAMES if name in OF_TEXT])
    if args.greedy:
        sampling = tsjax.GenerationConfig(**drawn)
    else:
        sampling = tsjax.GenerationConfig(do_sample=True, **{"temperature": 0.7, **drawn})
    with cli.joined(args):
        return _trained(args, sampling)


def _trained(args: argparse.Namespace, sampling: tsjax.GenerationConfig) -> int:
    model = cli.load_model(args, cli.mesh_of_sizes(args.mesh))
    shape = dataclasses.replace(shape_for(model.cfg), **cli.given_of(args, ("words", "mlp_dim")))
    train = functools.partial(tsjax.training.train_drafter, model)
    names = ("minutes", "data", "prompts", "tokens", "evaluate_every", *OF_TRAINING)
    trained = run_training(args, train, names, sampling=sampling, shape=shape)
    for name, found in (("all", trained.evaluation), *trained.evaluation.get("by", {}).items()):
        if "tokens_per_step" in found:
            right = ", ".join(f"{share:.0%}" for share in found["right"])
            said = f"{found['tokens_per_step']:.2f} tokens a step, drafts right {right}"
            cli.tell_unless_quiet(args, f"[{name}: {said}; {found['chains']} chains]")
    if "speedup" in trained.evaluation:
        gain = f"{trained.evaluation['speedup']:.2f}x plain decoding"
        cli.tell_unless_quiet(
            args, f"[expected on this machine: {gain}, before it learns in a run]"
        )
    last = trained.history[-1] if trained.history else {}
    told = {"loss": last.get("loss")}
    told |= {name: trained.evaluation.get(name) for name in ("tokens_per_step", "right", "speedup")}
    return end_training(args, trained, told)

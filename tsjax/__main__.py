# SPDX-License-Identifier: Apache-2.0
"""The command line: `tsjax generate`, `check`, `train-heads`, `demo`, `bench` and so on.

Knows arguments and how to print. Does nothing that the library does not offer. A wrong argument is
one line on stderr and exit code 2, as is a run that could not be saved; an interrupted run prints
what it has and exits with 130.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import tsjax
from tsjax.config import (
    DTYPES,
    GENERATION_NAMES,
    HABITS,
    HEAD_KINDS,
    check,
    check_int,
    refuse_unknown,
)
from tsjax.demo import PROMPT, STYLES, TOKENS, run_demo
from tsjax.errors import BadValue
from tsjax.files.presets import (
    model_preset_names,
    preset,
    preset_names,
    training_preset,
    training_preset_names,
)
from tsjax.files.tokenizer import Detokenizer
from tsjax.files.whole_files import check_place
from tsjax.host import layout, processes
from tsjax.host.bench import answer
from tsjax.host.bench_question import DEFAULT, LENGTHS, NEW_TOKENS, ROUNDS, WARM_UP, Question
from tsjax.host.compilation import enable_compilation_cache, keep_programs, programs_folder
from tsjax.host.info import info, info_lines
from tsjax.host.paired_runs import PLAIN, SETTINGS
from tsjax.host.peers import PEER_TOKENS
from tsjax.host.progress import progress_bar
from tsjax.host.prompt_files import Answering
from tsjax.host.request import tokenizer_of
from tsjax.host.roofline_table import DEVICES, config_of, roofline_of
from tsjax.host.roofline_table import show as show_roofline
from tsjax.host.saved_run import read_run
from tsjax.input_files import read_text
from tsjax.methods import METHODS, resolve_method
from tsjax.training.corpus import TOKEN_DTYPES
from tsjax.training.run import SETTING_NAMES as TRAINING_NAMES

SETTING_HELP = {
    "max_new_tokens": "tokens to generate",
    "min_new_tokens": "bar the stop tokens before this many",
    "do_sample": "sample instead of taking the most probable token",
    "temperature": "divide the logits by this",
    "top_k": "keep the k best tokens; 0 is off (HuggingFace's default is 50)",
    "top_p": "keep the smallest set of tokens with this mass; 1 is off",
    "min_p": "keep tokens with at least this share of the best one's probability; 0 is off",
    "epsilon_cutoff": "keep tokens with at least this probability; 0 is off",
    "eta_cutoff": "as epsilon, but adapted to the entropy; 0 is off",
    "min_tokens_to_keep": "never truncate to fewer tokens",
    "repetition_penalty": "above 1 makes recent tokens less likely; 1 is off",
    "repetition_window": "how many tokens count as recent; all by default",
    "suppress_tokens": "ids that are never chosen",
    "eos_token_id": "ids that end the text; the model's own by default, none with -1",
    "stop_strings": "strings that end the text",
    "presence_penalty": "taken off the logits of tokens that were generated before; 0 is off",
    "frequency_penalty": "the same for each time a token was generated; 0 is off",
    "no_repeat_ngram_size": "so many tokens never stand together twice; 0 is off",
    "num_return_sequences": "answers to each prompt; they differ when sampling",
    "logprobs": "with --json, log-probabilities of the tokens and of so many best ones",
    "repetition_detection": "end a text that says the same MIN to MAX tokens TIMES times in a row",
    "seed": "the same seed gives the same tokens, whatever the method (in bfloat16 and float16 but "
    "for near-ties)",
}
TRAINING_HELP = {
    "num_heads": "heads to train; head i guesses the token i + 1 further",
    "sequence_length": "tokens of each sequence",
    "steps": "steps of the optimiser",
    "batch_size": "sequences per step",
    "micro_batch": "sequences per pass, on each part of the mesh's data axis",
    "learning_rate": "the highest, after the warm-up",
    "warmup_steps": "steps until it is reached",
    "weight_decay": "AdamW's, for the heads' matrices",
    "beta1": "AdamW's",
    "beta2": "AdamW's",
    "max_grad_norm": "clip gradients to this norm; 0 is off",
    "init_scale": "standard deviation of the first weights",
    "chunk_tokens": "positions whose logits exist at a time",
    "seed": "of the first weights and of the order of the sequences",
    "head_kind": "TokenSwift's heads, or Medusa's with the model's vocabulary matrix or with their "
    "own; Medusa's have other defaults (tsjax.HeadTraining.of_kind)",
    "loss_decay": "what a head's loss counts, for 1 of the head before it",
}
LEADS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # counted by tsjax check
MOST_SHOWN = 5

# What a wrong argument, a damaged file, a missing package or too little memory raise.
EXPECTED_ERRORS = ValueError, TypeError, OSError, ImportError, MemoryError, NotImplementedError
EXPECTED_ERRORS += (jax.errors.JaxRuntimeError,)
EXAMPLES = """examples:
  tsjax generate ./llama-3.1-8b "Once upon a time" --dtype bfloat16 --max-new-tokens 1000
  tsjax generate ./story-model --prompt-file start.txt --do-sample --min-p 0.1 \\
      --repetition-penalty 1.2 --repetition-window 1024 --seed 7
  tsjax generate ./story-model "Once" --max-new-tokens 100000 --save-to run.json --progress
  tsjax generate ./story-model --resume-from run.json
  tsjax generate ./llama-3.1-8b --prompt-file start.txt --preset llama3.1-8b --max-new-tokens 20000
  tsjax generate ./story-model "Once" --method ngram --method-options suffix_length=32
"""

MODEL_HELP = "checkpoint folder, or organisation/name on the hub"
BENCH_EXAMPLES = """examples:
  tsjax bench ./story-model --lengths 1024 8192 --new-tokens 2000 --plot times.png
  tsjax bench ./story-model --text book.txt --methods plain auto --settings sampled
  tsjax bench llama3.1-8b --methods plain tokenswift --lengths 65536 \\
      --simulate-acceptance bench.json
"""
ROOFLINE_EXAMPLES = """examples:
  tsjax roofline llama3.1-8b --device a100 --prompt 4096 --new 100000
  tsjax roofline qwen2.5-7b --device h100 --acceptance 0.84 --json
  tsjax roofline ./story-model --device cpu --new 2000 --acceptance bench.json
"""

TRAINING_EXAMPLES = """examples:
  tsjax train-heads ./llama-3.1-8b --data books/ --save-to heads --preset llama3.1-8b
  tsjax train-heads ./llama-3.1-8b --data books/ --save-to heads --preset llama3.1-8b --resume
  tsjax train-heads ./llama-3.1-8b --data ids.bin --data-dtype uint32 --save-to heads --mesh 4,1
  tsjax train-heads ./story-model --data a.txt b.txt --whole-books --sequence-length 512 \\
      --batch-size 16 --micro-batch 8 --held-out 0.1 --save-to heads
  tsjax generate ./llama-3.1-8b-with-heads "Once" --method tokenswift
"""


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args, unknown = _parser().parse_known_args(argv)
    args.argv = argv
    if unknown:
        args.parser.error(_unknown_arguments(args, unknown))
    try:
        if "compilation_cache" in args:
            _keep_programs(args)
        return args.run(args)
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except EXPECTED_ERRORS as error:
        _note(f"tsjax: error: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        return 130


def _note(line: str) -> None:
    print(line, file=sys.stderr)


def _note_once(line: str) -> None:
    """Where several processes run together, the first one says it."""
    if processes.is_first():
        _note(line)


def _unknown_arguments(args: argparse.Namespace, unknown: Sequence[str]) -> str:
    """What to write instead of a flag that other programs have."""
    for word in unknown if args.run is _generate else ():
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("-") and name in HABITS:
            names = rf"\b({'|'.join(GENERATION_NAMES)})\b"
            hint = re.sub(names, lambda found: _flag_of(found.group()), HABITS[name])
            return f"unknown argument {word.partition('=')[0]}: {hint}"
    return f"unrecognized arguments: {' '.join(unknown)}"


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the whole usage; no abbreviated names."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tsjax", description="Long text generation in JAX. tsjax COMMAND --help tells more."
    )
    parser.add_argument("--version", action="version", version=f"tsjax {tsjax.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_chat(commands)
    _add_check(commands)
    _add_train_heads(commands)
    _add_demo(commands)
    _add_bench(commands)
    _add_roofline(commands)
    _add_info(commands)
    return parser


def _add(parser: Any, flag: str, text: str, **options: Any) -> None:
    """Adds "--name" or "--name METAVAR". A default is shown and says of which type a value is."""
    name, _, metavar = flag.partition(" ")
    default = options.get("default")
    if metavar:
        options["metavar"] = metavar
    if isinstance(default, int | float):
        options["type"] = type(default)
    if isinstance(default, int | float | str):
        text += f" (default: {default})"
    parser.add_argument(name, help=text, **options)


def _add_switch(parser: Any, flag: str, text: str) -> None:
    parser.add_argument(flag, action="store_true", help=text)


def _command(commands: Any, name: str, run: Any, text: str, about: str, examples: str = "") -> Any:
    raw = argparse.RawDescriptionHelpFormatter if examples else argparse.HelpFormatter
    parser = commands.add_parser(
        name, help=text, description=about, epilog=examples, formatter_class=raw
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def _add_generate(commands: Any) -> None:
    text = "continue a text with a HuggingFace or tsjax checkpoint"
    about = "Continues a text and prints it as it comes. Figures go to stderr."
    parser = _command(commands, "generate", _generate, text, about, EXAMPLES)
    _add(parser, "model", MODEL_HELP)
    _add(parser, "prompt", "the text to continue; - reads stdin", nargs="?")
    _add(parser, "--prompt-file FILE", "read the prompt from a file")
    _add(parser, "--ids ID,ID,...", "the prompt as token ids")
    _add(parser, "--dtype", "the checkpoint's own by default", choices=DTYPES)
    text = (
        "how to decode; every method returns the same tokens in float32 and float64, in bfloat16 "
        "and float16 drafts may part from plain decoding at a near-tie, see tsjax check (default: "
        "auto, or that of the run which is resumed)"
    )
    _add(parser, "--method", text, choices=sorted(METHODS))
    text = "fields of the method, such as tree=(1,3,3) draft_from=verified_state"
    for name, method in METHODS.items():
        text += f"; {name}: {', '.join(_fields(method))}" if _fields(method) else ""
    _add(parser, "--method-options NAME=VALUE", text, nargs="+", default=[])
    text = "earlier texts to draft from, with auto: files that --save-to wrote, or texts"
    _add(parser, "--corpus FILE", text, nargs="+")
    text = "a smaller model of the same vocabulary that drafts, by draft_model or triforce"
    _add(parser, "--draft-model PATH", text)
    text = (
        "lazy: compute a part of the prompt only, for the first token to come sooner; this changes "
        "the text; by default full, or that of the run that is resumed"
    )
    _add(parser, "--prefill", text, choices=("full", "lazy"))
    text = "fields of the lazy prefill, 'keep={10:0.7,20:0.49}' or keep=auto speedup=2, say: "
    text += ", ".join(_fields(tsjax.LazyPrefill))
    _add(parser, "--prefill-options NAME=VALUE", text, nargs="+", default=[])
    text = "sampling and TokenSwift settings of the paper for a model, which other flags override: "
    text += ", ".join(preset_names())
    _add(parser, "--preset NAME", text, choices=preset_names())
    text = "a message to answer, by the checkpoint's chat template; - reads stdin"
    _add(parser, "--chat MESSAGE", text)
    _add(parser, "--system TEXT", "with --chat, the system's message before it")
    text = (
        "answer each line of a file, JSON with prompt, messages or ids, and where it has its own "
        "seed, max_new_tokens and id; the batch stays full"
    )
    _add(parser, "--prompts FILE.jsonl", text)
    text = "with --prompts, where the answers go; what is there already is not answered again"
    _add(parser, "--out FILE.jsonl", text)
    _add(parser, "--rows N", "with --prompts, answers that are made side by side", type=int)
    _add_mesh(parser)
    _add_switch(parser, "--progress", "progress bar instead of text")
    _add_switch(parser, "--json", "print one JSON document at the end")
    _add_switch(parser, "--exceed-max-positions", "allow more tokens than the model was made for")
    _add(parser, "--save-to FILE", "save the run here, to resume it")
    _add(parser, "--save-every TOKENS", "tokens between two writes of that file", default=1000)
    _add(parser, "--resume-from FILE", "go on with a run saved there")
    _add_cache(parser)
    _add_settings(parser)


def _add_chat(commands: Any) -> None:
    text = "talk with a checkpoint in a terminal"
    about = (
        "A conversation by the checkpoint's own chat template: answers are streamed, and what was "
        f"read once is not read again. {CHAT_HELP}."
    )
    parser = _command(commands, "chat", _chat, text, about)
    _add(parser, "model", MODEL_HELP)
    _add(parser, "--system TEXT", "the system's message")
    _add(parser, "--dtype", "the checkpoint's own by default", choices=DTYPES)
    text = "how to decode; the text is the same"
    _add(parser, "--method", text, choices=sorted(METHODS), default="autoregressive")
    text = "fields of the method"
    _add(parser, "--method-options NAME=VALUE", text, nargs="+", default=[])
    _add_switch(parser, "--exceed-max-positions", "allow more tokens than the model was made for")
    _add_cache(parser)
    _add_settings(parser)


def _add_check(commands: Any) -> None:
    text = "compare a saved run's tokens with plain decoding"
    about = (
        "Judges each new token of a run after the run's own text, by plain decoding's passes of "
        "one row: which tokens plain decoding would not have chosen, and how near a tie the others "
        "were. In float32 and float64 there are none, whatever the method; in bfloat16 and float16 "
        "drafts may part from plain decoding at a near-tie. Exit code 1 if there are any."
    )
    parser = _command(commands, "check", _check, text, about)
    _add(parser, "saved", "a file that --save-to wrote", metavar="RUN")
    _add(parser, "--model PATH", "the model, if it is not where it was")
    _add(parser, "--dtype", "the run's, which is the default", choices=DTYPES)
    _add_switch(parser, "--progress", "progress bar on stderr")
    _add_switch(parser, "--json", "print one JSON document")
    _add_cache(parser)


def _add_demo(commands: Any) -> None:
    text = "a first look, with nothing downloaded"
    about = (
        "Decodes a text with plain decoding and with TokenSwift side by side, by the small model "
        "that comes with tsjax: greedily, with sampling, and with sampling after the greedy text, "
        "which repeats itself. Compares tokens and times. Exit code 1 if the tokens differ."
    )
    parser = _command(commands, "demo", _demo, text, about)
    _add(parser, "--tokens N", "tokens of each text", default=TOKENS)
    _add(parser, "--seed N", SETTING_HELP["seed"], default=0)
    _add(parser, "--prompt", "the text to continue", default=PROMPT)
    _add(parser, "--model PATH", "another checkpoint", default=tsjax.EMBEDDED)
    which = parser.add_mutually_exclusive_group()
    for name in STYLES:
        only = dict(dest="settings", action="store_const", const=(name,), default=tuple(STYLES))
        _add(which, f"--{name}", f"only the {name} text", **only)
    _add_switch(parser, "--plain", "no colours and no redrawing, as without a terminal")
    text = "fields of TokenSwift, as in tsjax generate"
    _add(parser, "--method-options NAME=VALUE", text, nargs="+", default=[])
    _add_cache(parser)


def _add_bench(commands: Any) -> None:
    text = "measure methods, lengths and sampling of a checkpoint side by side"
    about = (
        "Measures each method after prompts of each length, greedily and sampled, in rounds that "
        "take turns; compiling is apart. A line for each cell goes to stdout and one JSON document "
        "after them, the time left to stderr. All tokens are compared with plain decoding's: exit "
        "code 1 if they differ in float32 or float64. After Ctrl-C the document has what there is."
    )
    parser = _command(commands, "bench", _bench, text, about, BENCH_EXAMPLES)
    _add(parser, "model", MODEL_HELP + "; with --simulate-acceptance a preset")
    text = (
        f"{PLAIN}, which the others are held against, {', '.join(METHODS)}; tokenswift is the "
        f"paper's settings (default: {' '.join(DEFAULT)})"
    )
    _add(parser, "--methods NAME", text, nargs="+")
    text = f"tokens of the prompts (default: {' '.join(map(str, LENGTHS))})"
    flags = dict(type=int, nargs="+", metavar="N", help=text)
    parser.add_argument("--lengths", "--contexts", **flags)
    _add(parser, "--new-tokens N", "tokens of each run", default=NEW_TOKENS)
    _add(parser, "--rounds N", "that count", default=ROUNDS)
    text = "rounds before these, which do not count; long runs need none"
    _add(parser, "--warm-up N", text, default=WARM_UP)
    _add(parser, "--settings NAME", f"{' and '.join(SETTINGS)} by default", nargs="+")
    _add(parser, "--dtype", "the checkpoint's own by default", choices=DTYPES)
    text = "prompts are its beginning; by default the model writes a text"
    _add(parser, "--text FILE", text)
    _add(parser, "--draft-model PATH", "a smaller checkpoint, for draft_model and triforce")
    _add_mesh(parser)
    _add_switch(parser, "--exceed-max-positions", "allow more tokens than the model was made for")
    _add_switch(parser, "--no-peers", "leave out transformers, with and without prompt lookup")
    text = "new tokens of transformers' runs at most, as they take long"
    _add(parser, "--peer-tokens N", text, default=PEER_TOKENS)
    _add(parser, "--plot FILE", "draw times by length and, in long runs, by output position")
    text = (
        "take accepted lengths from here, as if drafts were so often right: a JSON list of one for "
        "each step, or a file that tsjax bench wrote; weights are random ones of a preset's shape"
    )
    _add(parser, "--simulate-acceptance TRACE", text)
    _add_cache(parser)


def _add_roofline(commands: Any) -> None:
    text = "the least time of a run by memory, and what each method is expected to take"
    about = (
        "Says what a step of plain decoding reads, how long that takes at least on a device, and "
        "what the cost model expects of each method. No weights are read. Each figure says whether "
        "it is a bound, an estimate or an assumption."
    )
    parser = _command(commands, "roofline", _roofline, text, about, ROOFLINE_EXAMPLES)
    _add(parser, "model", MODEL_HELP + "; or a preset, " + ", ".join(model_preset_names()))
    text = "by its data sheet; cpu measures the memory of this machine (default: the machine's own)"
    _add(parser, "--device", text, choices=DEVICES)
    _add(parser, "--prompt N", "tokens of the prompt", default=4096)
    _add(parser, "--new N", "new tokens of each row", default=100_000)
    _add(parser, "--batch N", "rows", default=1)
    _add(parser, "--dtype", "of weights and cache; the model's own by default", choices=DTYPES)
    text = "draft heads; by default those of the checkpoint, and the paper's 3 for a preset"
    _add(parser, "--heads N", text, type=int)
    text = (
        "how often drafts are right, in place of what is assumed: a share of the drafted positions "
        "as the paper's alpha, for methods that draft from the model; NAME=SHARE for one method; "
        "or a file that tsjax bench wrote"
    )
    _add(parser, "--acceptance SHARE", text, nargs="+", default=[])
    _add_switch(parser, "--json", "print one JSON document")


def _add_info(commands: Any) -> None:
    text = "the machine, and what of tsjax is used on it"
    about = (
        "Says which versions, devices and implementations of operations are used here, whether a "
        "C++ compiler was found, and what is kept in the cache folder."
    )
    parser = _command(commands, "info", _info, text, about)
    _add_switch(parser, "--json", "print one JSON document")
    text = "instead, what each device of such a mesh would hold; needs no devices"
    _add(parser, "--mesh DATA,MODEL[,SLOTS]", text)
    text = "with --mesh, a checkpoint or the name of a preset"
    _add(parser, "--model NAME", text, default=tsjax.EMBEDDED)
    _add(parser, "--context N", "with --mesh, tokens of each text", default=131_072)
    _add(parser, "--rows N", "with --mesh, texts side by side", default=1)


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--mesh DATA,MODEL[,SLOTS]", "devices: parts of a batch, of the model, of a cache")
    text = (
        "one of several processes, each with devices of its own: srun, mpirun or "
        "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say which"
    )
    _add_switch(parser, "--distributed", text)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    where, name = parser.add_mutually_exclusive_group(), "compilation_cache"
    default = programs_folder() or "nowhere, as TSJAX_CACHE is empty"
    text = f"keep compiled programs here (default: {default})"
    _add(where, "--compilation-cache DIR", text)
    text = "keep no compiled programs and read none"
    _add(where, "--no-compilation-cache", text, dest=name, action="store_const", const=False)


def _keep_programs(args: argparse.Namespace) -> None:
    if args.compilation_cache is None:
        try:
            keep_programs()
        except OSError as error:
            _note(f"[compiled programs are not kept: {error}]")
    elif args.compilation_cache is False:
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        enable_compilation_cache(args.compilation_cache)


def _add_train_heads(commands: Any) -> None:
    text = "train draft heads for a checkpoint"
    about = (
        "Trains draft heads on texts, TokenSwift's or Medusa's; the model stays as it is. The "
        "defaults are the papers' recipes. Figures go to stderr, the last line is JSON."
    )
    parser = _command(commands, "train-heads", _train_heads, text, about, TRAINING_EXAMPLES)
    _add(parser, "model", MODEL_HELP)
    text = "text files, folders of them, .npy or .bin files of token ids"
    _add(parser, "--data PATH", text, nargs="+", required=True)
    text = "receives checkpoints, metrics and the heads; tsjax.load(model, heads=DIR) takes it"
    _add(parser, "--save-to DIR", text, required=True)
    _add_switch(parser, "--resume", "go on with the run in that folder")
    _add(parser, "--save-every STEPS", "steps between checkpoints", default=50)
    text = "evaluate at the end on this share of the texts, or on these files"
    _add(parser, "--held-out FRACTION|PATH", text, nargs="+")
    _add_switch(parser, "--whole-books", "use all sequences of a text, not the first one")
    _add(parser, "--data-dtype", "type of the ids in .bin files", choices=TOKEN_DTYPES)
    _add_switch(parser, "--cache-hidden", "keep the model's hidden states in host memory")
    _add(parser, "--dtype", "the checkpoint's own by default", choices=DTYPES)
    _add_mesh(parser)
    text = "the paper's settings for a model, which other flags override: "
    text += ", ".join(training_preset_names())
    _add(parser, "--preset NAME", text, choices=training_preset_names())
    _add_cache(parser)
    group = parser.add_argument_group("how to train")
    for field in dataclasses.fields(tsjax.HeadTraining):
        flag, text = _flag_of(field.name), f"{TRAINING_HELP[field.name]} (default: {field.default})"
        choices = HEAD_KINDS if field.name == "head_kind" else None
        metavar = None if choices else "N"
        group.add_argument(
            flag, type=type(field.default), choices=choices, metavar=metavar, help=text
        )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of GenerationConfig."""
    group = parser.add_argument_group("what to generate")
    for field in dataclasses.fields(tsjax.GenerationConfig):
        flag, text = _flag_of(field.name), SETTING_HELP[field.name]
        if field.name == "do_sample":
            group.add_argument(flag, action="store_true", default=None, help=text)
        elif field.name in ("suppress_tokens", "eos_token_id"):
            _add(group, f"{flag} ID", text, type=int, nargs="+")
        elif field.name == "stop_strings":
            _add(group, f"{flag} TEXT", text, nargs="+")
        elif field.name == "repetition_detection":
            group.add_argument(flag, type=int, nargs=3, metavar=("MIN", "MAX", "TIMES"), help=text)
        else:
            kind = float if isinstance(field.default, float) else int
            default = "" if field.default is None else f" (default: {field.default})"
            _add(group, f"{flag} N", text + default, type=kind)


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    given = _given(args, GENERATION_NAMES)
    if given.get("eos_token_id") == [-1]:
        given["eos_token_id"] = ()
    return given


def _prompt(args: argparse.Namespace) -> Any:
    """None for a chat."""
    given = _given(args, ("prompt", "prompt_file", "ids", "chat", "prompts", "resume_from"))
    if len(given) != 1:
        ways = "as an argument (- reads stdin), with --prompt-file, --ids, --chat, --prompts or "
        raise BadValue(f"give the prompt once: {ways}--resume-from")
    for flag, needs in (("system", "chat"), ("out", "prompts"), ("rows", "prompts")):
        if getattr(args, flag) is not None and getattr(args, needs) is None:
            raise BadValue(f"--{flag} is not valid without --{needs}")
    if args.chat is not None or args.prompts is not None:
        return None
    if args.ids is not None:
        try:
            return [int(part) for part in args.ids.split(",")]
        except ValueError:
            raise BadValue(f"--ids {args.ids!r} is not valid: integers with commas") from None
    if args.prompt_file is not None:
        return read_text(args.prompt_file)
    return sys.stdin.read() if args.prompt == "-" else args.prompt


def _fields(method: type) -> list[str]:
    return [field.name for field in dataclasses.fields(method)]


def _method(args: argparse.Namespace) -> Any:
    """The preset's method, or the one that is named, with the options applied; for neither Auto,
    or None: for that of a run that is resumed without a corpus, and where a second model drafts."""
    if args.method is None and args.preset is None and not args.method_options:
        resumes = args.resume_from is not None and args.corpus is None
        return None if resumes or args.draft_model is not None else resolve_method("auto")
    method = named_method(args.method or "autoregressive", args.method_options)
    if args.preset is not None and args.method in (None, "tokenswift"):
        method = preset(args.preset).method
    return _with_options(method, args.method_options)


def named_method(name: str, options: Sequence[str]) -> Any:
    """What a name stands for; beside options the method itself, also where Auto would choose."""
    return METHODS[name]() if options else resolve_method(name)


def _prefill(args: argparse.Namespace) -> Any:
    if args.prefill == "lazy":
        return _with_options(tsjax.LazyPrefill(), args.prefill_options, "--prefill-options")
    if args.prefill_options:
        options = " ".join(args.prefill_options)
        raise BadValue(f"--prefill-options {options} is not valid without --prefill lazy")
    return args.prefill


def _with_options(method: Any, options: Sequence[str], flag: str = "--method-options") -> Any:
    """A dataclass with the fields that NAME=VALUE options change."""
    changes = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise BadValue(f"{flag} {option!r} is not valid: NAME=VALUE")
        try:
            changes[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            changes[name] = value  # a plain word
    name, known = type(method).__name__, _fields(type(method))
    if changes and not known:
        wanted = f"{name} has none; choose another --method"
        raise BadValue(f"--method-options {options} is not valid: {wanted}")
    refuse_unknown(list(changes), known, f"option of {name}")
    return dataclasses.replace(method, **changes)


class _Printer:
    """A streamer that prints text as soon as it is final; ids where there is no tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.writer, self.prompt_seen = tokenizer, None, False

    def put(self, ids: Any) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            if self.tokenizer is not None:
                self.writer = Detokenizer(self.tokenizer, context=ids)
        elif self.writer is not None:
            print(self.writer.push(ids), end="", flush=True)
        else:
            print(*ids, end=" ", flush=True)

    def end(self) -> None:
        print(self.writer.flush() if self.writer is not None else "", flush=True)


def _messages(args: argparse.Namespace) -> list[dict[str, str]] | None:
    if args.chat is None:
        return None
    said = sys.stdin.read() if args.chat == "-" else args.chat
    before = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*before, {"role": "user", "content": said}]


def _generate(args: argparse.Namespace) -> int:
    if args.prompts is not None:
        return _generate_many(args)
    prompt, settings = _prompt(args), _settings(args)
    if settings.get("logprobs") is not None and not args.json:
        raise BadValue("--logprobs is not valid without --json: the text has no place for them")
    messages = _messages(args)
    method, prefill = _method(args), _prefill(args)
    config = None if args.preset is None else preset(args.preset).config
    # Refuses a wrong value before the model is read.
    (config or tsjax.GenerationConfig()).replace(**settings)
    if args.save_to is not None:
        check_place(args.save_to, "--save-to")
    with _joined(args):
        return _generated(args, prompt, messages, settings, config, method, prefill)


@contextlib.contextmanager
def _joined(args: argparse.Namespace) -> Iterator[None]:
    """With the other processes, if there are any: the first one prints."""
    if not args.distributed:
        yield
        return
    check(args.mesh is not None, "--distributed", True, "--mesh DATA,MODEL[,SLOTS] beside it")
    processes.meet_others()
    with contextlib.ExitStack() as silent:
        if not processes.is_first():
            nowhere = silent.enter_context(open(os.devnull, "w"))
            silent.enter_context(contextlib.redirect_stdout(nowhere))
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # jax has both for that
            if isinstance(error, tsjax.TsjaxError):
                raise
            # The others are gone, and so is what jax would wait for at the end of this one.
            why = " ".join(str(error).split())[:200]
            where = getattr(args, "save_to", None)
            saved = "" if where is None else f"; what there is lies in {where}"
            _note(f"tsjax: error: another process has ended, or failed: {why}{saved}")
            sys.stdout.flush()
            os._exit(1)


def _generated(
    args: argparse.Namespace, prompt: Any, messages: Any, settings: dict[str, Any],
    config: Any, method: Any, prefill: Any,
) -> int:  # fmt: skip
    model = tsjax.load(args.model, dtype=args.dtype, mesh=_mesh(args.mesh))
    # A text needs it; ids are printed as they are without one.
    has_text = isinstance(prompt, str) or messages is not None
    tokenizer = model.tokenizer if has_text else tokenizer_of(model)
    names = ("exceed_max_positions", "save_to", "save_every", "resume_from")
    corpus = None if args.corpus is None else tsjax.read_corpus(model, *args.corpus)
    second = None
    if args.draft_model is not None:
        second = tsjax.load(args.draft_model, dtype=args.dtype)
    several = settings.get("num_return_sequences", 1) > 1
    if args.resume_from is not None:
        several = len(read_run(args.resume_from).prompts) > 1
    quiet = args.json or args.progress or several
    if messages is not None:
        settings["messages"] = messages
    result = tsjax.generate(
        model,
        prompt,
        config=config,
        method=method,
        prefill=prefill,
        streamer=None if quiet else _Printer(tokenizer),
        on_interrupt="return",
        corpus=corpus,
        draft_model=second,
        progress=args.progress and processes.is_first(),
        **_given(args, names),
        **settings,
    )
    stats = result.stats
    if args.json:
        print(json.dumps(result.to_dict()))
    elif several:
        for number, said in enumerate(result.text if tokenizer is not None else result.tokens, 1):
            print(f"--- {number}\n{said}")
    elif args.progress:
        print(result.text if tokenizer is not None else result.tokens)
    _note_once(
        f"[{sum(stats.new_tokens)} tokens, {stats.tokens_per_second:.1f} tokens/s, "
        f"{stats.tokens_per_step:.2f} tokens/step, prefill {stats.prefill_seconds:.2f} s, "
        f"compiling {stats.compile_seconds:.1f} s, {', '.join(result.finish_reason)}]"
    )
    go_on = f"[go on with --resume-from {args.save_to}]" if args.save_to is not None else ""
    return _exit_code(args, result, "interrupted" in result.finish_reason, go_on)


def _generate_many(args: argparse.Namespace) -> int:
    _prompt(args)
    if args.out is None:
        raise BadValue("--prompts needs --out FILE.jsonl, where the answers go")
    refused = ("save_to", "resume_from", "corpus", "draft_model")
    for name in refused:
        if getattr(args, name) is not None:
            raise BadValue(f"{_flag_of(name)} is not valid with --prompts: --out is resumed")
    check(args.prefill != "lazy", "--prefill", args.prefill, "full, with --prompts")
    left_out = "left out with --prompts: one process writes the answers"
    check(not args.distributed, "--distributed", True, left_out)
    config = tsjax.GenerationConfig() if args.preset is None else preset(args.preset).config
    config = config.replace(**_settings(args))
    method = named_method(args.method or "autoregressive", args.method_options)
    method = _with_options(method, args.method_options)
    check_place(args.out, "--out")
    model = tsjax.load(args.model, dtype=args.dtype, mesh=_mesh(args.mesh))
    rows = _given(args, ("rows",))
    more = {"method": method, "exceed_max_positions": args.exceed_max_positions, **rows}
    answering = Answering(model, args.prompts, args.out, config, **more)
    with progress_bar(args.progress, answering.waiting, "answers") as bar:
        try:
            for _ in answering:
                bar.update(1)
        except (tsjax.Interrupted, KeyboardInterrupt):
            _note("[go on with the same command]")
            return 130
    done = answering.done
    if args.json:
        print(json.dumps(dataclasses.asdict(done)))
    _note(
        f"[{done.lines} prompts, {done.before} answered before, {done.tokens} tokens now, "
        f"{len(done.failed)} failed]"
    )
    if done.failed:
        shown = ", ".join(map(str, done.failed[:MOST_SHOWN]))
        _note(f"tsjax: error: these lines could not be answered: {shown}; why is in {args.out}")
    return 1 if done.failed else 0


CHAT_HELP = "/new begins anew, /quit ends; Ctrl-C ends an answer"


def _chat(args: argparse.Namespace) -> int:
    settings, method = _settings(args), named_method(args.method, args.method_options)
    tsjax.GenerationConfig().replace(**settings)
    model = tsjax.load(args.model, dtype=args.dtype)
    how = {"method": _with_options(method, args.method_options), **settings}
    how["exceed_max_positions"] = args.exceed_max_positions
    conversation = tsjax.Conversation(model, system=args.system, **how)
    conversation.check()
    shows = sys.stdin.isatty()
    if shows:
        _note(f"[{CHAT_HELP}]")
    while True:
        try:
            said = input("> " if shows else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            _note("")
            return 0
        if said.strip() in ("/quit", "/exit"):
            return 0
        if said.strip() == "/new":
            conversation.forget()
        elif said.strip():
            _answer(conversation, said)


def _answer(conversation: Any, said: str) -> None:
    try:
        with contextlib.closing(conversation.say(said)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:  # SIGTERM ends the process
        print(" [ended]", end="")
    except tsjax.TsjaxError as error:  # the conversation is too long for the model, say
        _note(f"tsjax: {' '.join(str(error).split())}")
        return
    print(flush=True)


def _exit_code(args: argparse.Namespace, made: Any, interrupted: bool, go_on: str) -> int:
    """Says what could not be written, and how to go on with an interrupted run."""
    for problem in made.problems:
        _note(f"tsjax: {problem}")
    if made.unsaved:
        _note(f"tsjax: error: {args.save_to!r} lacks the end of this run")
        return 2
    if interrupted and go_on:
        _note_once(go_on)
    return 130 if interrupted else 0


def _check(args: argparse.Namespace) -> int:
    saved = read_run(args.saved, "run")
    path, dtype = args.model or saved.model_path, saved.dtype or args.dtype
    if path is None:
        raise BadValue(f"run={args.saved!r} does not say where its model is: give --model PATH")
    check(args.dtype in (None, dtype), "--dtype", args.dtype, f"the run's, {dtype}")
    model = tsjax.load(path, dtype=dtype)
    found = tsjax.check_run(model, args.saved, progress=args.progress)
    below = {f"{lead:g}": found.num_below(lead) for lead in LEADS}
    nearest, names = found.nearest(MOST_SHOWN), ("row", "index", "lead")
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
    for d in found.departures[:MOST_SHOWN]:
        choice = f"{shown(d.choice)}, which leads it by {d.behind:.3g}"
        print(f"  row {d.row}, token {d.index}: {shown(d.token)}, not {choice}")
    if len(found.departures) > MOST_SHOWN:
        print(f"  and {len(found.departures) - MOST_SHOWN} more")
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


def _train_heads(args: argparse.Namespace) -> int:
    if args.preset is None:
        settings = tsjax.HeadTraining.of_kind(args.head_kind or tsjax.HeadTraining.head_kind)
    else:
        settings = training_preset(args.preset)
    # Refuses a wrong value before the model is read.
    settings = dataclasses.replace(settings, **_given(args, TRAINING_NAMES))
    held_out: Any = args.held_out
    if held_out is not None and len(held_out) == 1 and not os.path.exists(held_out[0]):
        with contextlib.suppress(ValueError):  # the library says that there is no such file
            held_out = float(held_out[0])
    with _joined(args):
        return _trained(args, settings, held_out)


def _trained(args: argparse.Namespace, settings: tsjax.HeadTraining, held_out: Any) -> int:
    model = tsjax.load(args.model, dtype=args.dtype, mesh=_mesh(args.mesh))
    names = ("data", "whole_books", "data_dtype", "cache_hidden", "save_to", "save_every", "resume")
    trained = tsjax.train_heads(
        model,
        settings=settings,
        held_out=held_out,
        progress=processes.is_first(),
        on_interrupt="return",
        **_given(args, names),
    )
    if trained.skipped:
        count, first = len(trained.skipped), trained.skipped[0]
        _note_once(f"[{count} texts are shorter than a sequence, such as {first}]")
    for record in trained.evaluation:
        who = f"head {record['head']}" if record["head"] else "model "
        guess = f"{record['skip_bigram'][0]:.1%} by the best guess from counts"
        _note_once(f"[{who}: {record['top1']:.1%} right, {guess}; loss {record['loss']:.3f}]")
    last = trained.history[-1] if trained.history else {}
    document = {
        "save_to": args.save_to,
        "finish_reason": trained.finish_reason,
        "steps": len(trained.history),
        "head_losses": last.get("head_losses"),
        "top1": last.get("top1"),
    }
    print(json.dumps(document))
    # Before the first step there is nothing to go on with.
    go_on = "[go on with the same command and --resume]" if trained.history else ""
    return _exit_code(args, trained, trained.finish_reason == "interrupted", go_on)


def _mesh(sizes: str | None) -> jax.sharding.Mesh | None:
    if sizes is None:
        return None
    found = layout.sizes_of(sizes)
    count = math.prod(found.values())
    most = jax.device_count()
    check(count <= most, "--mesh", sizes, f"sizes whose product is at most {most} devices")
    return jax.make_mesh(tuple(found.values()), tuple(found), devices=jax.devices()[:count])


def _demo(args: argparse.Namespace) -> int:
    method = _with_options(named_method("tokenswift", args.method_options), args.method_options)
    given = _given(args, ("prompt", "tokens", "seed", "settings", "plain"))
    return run_demo(args.model, method=method, out=sys.stdout, **given)


def _bench(args: argparse.Namespace) -> int:
    names = ("model", "new_tokens", "rounds", "dtype", "text", "plot", "exceed_max_positions")
    names += ("draft_model", "warm_up", "peer_tokens")
    lists: Any = {
        name: tuple(x) for name, x in _given(args, ("methods", "lengths", "settings")).items()
    }
    question = Question(
        peers=not args.no_peers, simulate=args.simulate_acceptance, **_given(args, names), **lists
    )
    with _joined(args):
        return answer(question, shlex.join(["tsjax", *args.argv]), _mesh(args.mesh))


def _roofline(args: argparse.Namespace) -> int:
    names = ("prompt", "new", "device", "batch", "dtype", "heads", "acceptance")
    show_roofline(roofline_of(args.model, **_given(args, names)), args.json)
    return 0


def _info(args: argparse.Namespace) -> int:
    if args.mesh is not None:
        check_int(args.context, "--context", 1)
        check_int(args.rows, "--rows", 1)
        sizes = layout.sizes_of(args.mesh)
        found = layout.layout(args.model, config_of(args.model), sizes, args.context, args.rows)
        as_json = {**dataclasses.asdict(found), "parts": [one._asdict() for one in found.parts]}
        print(json.dumps(as_json) if args.json else "\n".join(layout.layout_lines(found)))
        return 0
    alone = ("model", "context", "rows")
    given = [name for name in alone if getattr(args, name) != args.parser.get_default(name)]
    if given:
        raise BadValue(f"{_flag_of(given[0])} is not valid without --mesh DATA,MODEL[,SLOTS]")
    known = info()
    print(json.dumps(dataclasses.asdict(known)) if args.json else "\n".join(info_lines(known)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

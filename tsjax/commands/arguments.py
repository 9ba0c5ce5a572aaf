# SPDX-License-Identifier: Apache-2.0
"""What commands share: how arguments are named, read and refused, and what is said on stderr.

Knows the library's settings as flags. Does not know any command.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import inspect
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import tsjax
from tsjax.base.checks import check, refuse_unknown
from tsjax.base.errors import BadValue
from tsjax.base.generation_config import GENERATION_NAMES
from tsjax.base.input_files import read_text
from tsjax.base.model_config import CACHES, WEIGHTS
from tsjax.base.telling import listening
from tsjax.commands.parser import tell
from tsjax.files.presets import preset_names
from tsjax.host import processes
from tsjax.host.compilation import enable_compilation_cache, keep_programs, programs_folder
from tsjax.measure import layout
from tsjax.methods import METHODS, resolve_method

MODEL_HELP = "checkpoint folder, or organisation/name on the hub"
# What comes with a model from other places.
ATTACHED = {
    "heads": "draft heads of the model, TokenSwift's or Medusa's: a folder, file or hub id; tsjax "
    "train-heads makes some",
    "drafter": "a folder with a one-layer drafter of the model: tsjax train-drafter makes one",
    "adapter": "a folder or hub id with a low-rank adapter of PEFT, added to the model's matrices",
}
PREFIX_HELP = "a file that tsjax read wrote: what the prompt begins with of it is not read again"
MOST_SHOWN = 5


def tell_once(line: str) -> None:
    """Where several processes run together, the first one says it."""
    if processes.is_first():
        tell(line)


def tell_unless_quiet(args: argparse.Namespace, line: str) -> None:
    """Figures and the like, which are no errors."""
    if not args.quiet:
        tell_once(line)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def add(parser: Any, flag: str, text: str, **options: Any) -> None:
    """Adds "--name" or "--name METAVAR". A default is shown and says of which type a value is."""
    name, _, metavar = flag.partition(" ")
    default = options.get("default")
    if metavar:
        options["metavar"] = metavar
    if isinstance(default, int | float):
        options.setdefault("type", type(default))
    if isinstance(default, int | float | str):
        text += f" (default: {default})"
    parser.add_argument(name, help=text, **options)


def count_of_tokens(text: str) -> int:
    """An integer, or one of 1,024 (K) or 1,024 x 1,024 (M) tokens, as lengths are named."""
    unit = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    try:
        return unit * int(text if unit == 1 else text[:-1])
    except ValueError:
        wanted = f"{text!r} is not valid: a count of tokens, such as 32768, 32K or 1M"
        raise argparse.ArgumentTypeError(wanted) from None


def add_count(parser: Any, flag: str, text: str, default: int) -> None:
    text += ", also as 32K or 1M"
    add(parser, f"{flag} N", text, default=default, type=count_of_tokens)


def add_switch(parser: Any, flag: str, text: str) -> None:
    parser.add_argument(flag, action="store_true", help=text)


def command(commands: Any, name: str, run: Any, text: str, about: str, examples: str = "") -> Any:
    raw = argparse.RawDescriptionHelpFormatter if examples else argparse.HelpFormatter
    parser = commands.add_parser(
        name, help=text, description=about, epilog=examples, formatter_class=raw
    )
    parser.set_defaults(run=run, parser=parser)
    add_switch(parser, "--quiet", "nothing on stderr but errors: neither what is done nor figures")
    return parser


def add_mesh(parser: argparse.ArgumentParser, distributed: bool = True) -> None:
    add(parser, "--mesh DATA,MODEL[,SLOTS]", "devices: parts of a batch, of the model, of a cache")
    text = (
        "one of several processes, each with devices of its own: srun, mpirun or "
        "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say which"
    )
    if distributed:
        add_switch(parser, "--distributed", text)


def add_method(parser: argparse.ArgumentParser, default: str) -> None:
    text = (
        "how to decode, autoregressive being plain decoding; every method returns the same tokens "
        "in float32 and float64, in bfloat16 and float16 drafts may part from plain decoding at a "
        f"near-tie, see tsjax check (default: {default})"
    )
    add(parser, "--method", text, choices=sorted(METHODS))
    text = "fields of the method, such as tree=(1,3,3) draft_from=verified_state"
    for name, method in METHODS.items():
        text += f"; {name}: {', '.join(fields_of(method))}" if fields_of(method) else ""
    add(parser, "--method-options NAME=VALUE", text, nargs="+", default=[])


def add_preset(parser: argparse.ArgumentParser, settings: str) -> None:
    text = f"{settings} settings of the paper for a model, which other flags override: "
    text += ", ".join(preset_names())
    add(parser, "--preset NAME", text, choices=preset_names())


def add_exceeding(parser: argparse.ArgumentParser) -> None:
    add_switch(parser, "--exceed-max-positions", "allow more tokens than the model was made for")


def add_held(parser: argparse.ArgumentParser) -> None:
    """How the numbers of a model are held; `held_of` hands them on."""
    text = "matrices in few bits: rounded, or as a GGUF file stores them (default: float)"
    add(parser, "--weights", text, choices=WEIGHTS)
    text = "keys and values of the text in eight bits, which rounds them (default: same)"
    add(parser, "--cache", text, choices=CACHES)


def held_of(args: argparse.Namespace) -> dict[str, Any]:
    return given_of(args, ("weights", "cache"))


def add_attached(parser: argparse.ArgumentParser, names: Sequence[str] = tuple(ATTACHED)) -> None:
    for name in names:
        add(parser, f"--{name} {'DIR' if name == 'drafter' else 'PATH'}", ATTACHED[name])


def load_model(args: argparse.Namespace, mesh: Any = None) -> tsjax.Model:
    """The model of the command's flags, with its numbers held and with what is attached as these
    say."""
    attached = [name for name in ATTACHED if name in args]
    more = {**held_of(args), **given_of(args, attached)}
    return tsjax.load(args.model, dtype=args.dtype, mesh=mesh, **more)


def add_prompt(parser: argparse.ArgumentParser, text: str) -> None:
    add(parser, "prompt", f"{text}; - reads stdin", nargs="?")
    add(parser, "-p TEXT", "the prompt, as llama.cpp has it", dest="prompt_text")
    add(parser, "--prompt-file FILE", "read the prompt from a file")
    add(parser, "--ids ID,ID,...", "the prompt as token ids")


def prompt_of_flags(args: argparse.Namespace) -> Any:
    """None where there is no such flag."""
    if args.ids is not None:
        try:
            return [int(part) for part in args.ids.split(",")]
        except ValueError:
            raise BadValue(f"--ids {args.ids!r} is not valid: integers with commas") from None
    if args.prompt_file is not None:
        return read_text(args.prompt_file)
    return sys.stdin.read() if args.prompt == "-" else args.prompt


def messages_of_flags(args: argparse.Namespace) -> list[dict[str, str]]:
    """Those of --system and --chat."""
    before = [] if args.system is None else [{"role": "system", "content": args.system}]
    if args.chat is None:
        return before
    said = sys.stdin.read() if args.chat == "-" else args.chat
    return [*before, {"role": "user", "content": said}]


def add_compilation_cache(parser: argparse.ArgumentParser) -> None:
    where, name = parser.add_mutually_exclusive_group(), "compilation_cache"
    default = programs_folder() or "nowhere, as TSJAX_CACHE is empty"
    text = f"keep compiled programs here (default: {default})"
    add(where, "--compilation-cache DIR", text)
    text = "keep no compiled programs and read none"
    add(where, "--no-compilation-cache", text, dest=name, action="store_const", const=False)


def keep_programs_as_asked(args: argparse.Namespace) -> None:
    if args.compilation_cache is None:
        try:
            keep_programs()
        except OSError as error:
            tell(f"[compiled programs are not kept: {error}]")
    elif args.compilation_cache is False:
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        enable_compilation_cache(args.compilation_cache)


def help_of(settings: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each field; python -OO has no docstrings."""
    told = inspect.cleandoc(settings.__doc__ or "").partition("Attributes:")[2]
    found: dict[str, str] = collections.defaultdict(str)
    for item in re.split(r"\n  (?=\w)", told)[1:]:
        names, _, text = item.partition(": ")
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()).removesuffix("."))
    return found


def add_fields(group: Any, settings: type, names: Sequence[str], **changed: dict) -> None:
    """Flags for some fields of a dataclass; `changed` has what is not as with the others."""
    told = help_of(settings)
    for field in dataclasses.fields(settings):
        if field.name in names:
            text = f"{told[field.name]} (default: {field.default})"
            options = dict(type=type(field.default), metavar="N", help=text)
            group.add_argument(flag_of(field.name), **{**options, **changed.get(field.name, {})})


def add_settings(
    parser: argparse.ArgumentParser, elsewhere: Sequence[str] = (), **words: str
) -> None:
    """Those whose default the command says `elsewhere` are shown without one."""
    group = parser.add_argument_group("what to generate")
    words = {"logprobs": "with --json, {}", "eos_token_id": "{}, none with -1", **words}
    told = help_of(tsjax.GenerationConfig)
    for field in dataclasses.fields(tsjax.GenerationConfig):
        flag, text = flag_of(field.name), words.get(field.name, "{}").format(told[field.name])
        if field.name == "do_sample":
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        elif field.name in ("suppress_tokens", "eos_token_id"):
            add(group, f"{flag} ID", text, type=int, nargs="+")
        elif field.name == "stop_strings":
            add(group, f"{flag} TEXT", text, nargs="+")
        elif field.name == "repetition_detection":
            group.add_argument(flag, type=int, nargs=3, metavar=("MIN", "MAX", "TIMES"), help=text)
        else:
            kind = float if isinstance(field.default, float) else int
            is_told = field.default is not None and field.name not in elsewhere
            default = f" (default: {field.default})" if is_told else ""
            names = ("-n", flag) if field.name == "max_new_tokens" else (flag,)
            group.add_argument(*names, metavar="N", help=text + default, type=kind)


def given_of(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    given = given_of(args, GENERATION_NAMES)
    if given.get("eos_token_id") == [-1]:
        given["eos_token_id"] = ()
    return given


def fields_of(method: type) -> list[str]:
    return [field.name for field in dataclasses.fields(method)]


def named_method(name: str, options: Sequence[str]) -> Any:
    """What a name stands for; beside options the method itself, also where Auto would choose."""
    return with_options(METHODS[name](), options) if options else resolve_method(name)


def with_options(method: Any, options: Sequence[str], flag: str = "--method-options") -> Any:
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
    name, known = type(method).__name__, fields_of(type(method))
    if changes and not known:
        raise BadValue(f"{flag} {options} is not valid: {name} has none; choose another method")
    refuse_unknown(list(changes), known, f"option of {name}")
    return dataclasses.replace(method, **changes)


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator[None]:
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
            silent.enter_context(listening(None))
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # jax has both for that
            if isinstance(error, tsjax.TsjaxError):
                raise
            # The others are gone, and so is what jax would wait for at the end of this one.
            why = " ".join(str(error).split())[:200]
            where = getattr(args, "save_to", None)
            saved = "" if where is None else f"; what there is lies in {where}"
            tell(f"tsjax: error: another process has ended, or failed: {why}{saved}")
            sys.stdout.flush()
            os._exit(1)


def mesh_of_sizes(sizes: str | None) -> jax.sharding.Mesh | None:
    if sizes is None:
        return None
    found = layout.sizes_of(sizes)
    count = math.prod(found.values())
    most = jax.device_count()
    check(count <= most, "--mesh", sizes, f"sizes whose product is at most {most} devices")
    return jax.make_mesh(tuple(found.values()), tuple(found), devices=jax.devices()[:count])


def exit_code(args: argparse.Namespace, made: Any, interrupted: bool, go_on: str) -> int:
    """Says what could not be written, and how to go on with an interrupted run."""
    for problem in made.problems:
        tell(f"tsjax: {problem}")
    if made.unsaved:
        tell(f"tsjax: error: {args.save_to!r} lacks the end of this run")
        return 2
    if interrupted and go_on:
        tell_once(go_on)
    return 130 if interrupted else 0

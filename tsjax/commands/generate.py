# SPDX-License-Identifier: Apache-2.0
"""`tsjax generate`: one prompt.

Knows which flags go together. A wrong value is refused before the model is read.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import tsjax
from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.base.model_config import DTYPES
from tsjax.base.telling import seconds_of_process
from tsjax.commands import arguments as cli
from tsjax.commands.chat_sampling import check_for_chat, sampling_in_words, settings_for_chat
from tsjax.files.presets import preset
from tsjax.files.tokenizer import Detokenizer
from tsjax.files.whole_files import check_place
from tsjax.host import processes
from tsjax.host.prefix import open_prefix
from tsjax.host.prompts import tokenizer_of
from tsjax.host.saved_run import read_run
from tsjax.methods import resolve_method

EXAMPLES = """examples:
  tsjax generate ./llama-3.1-8b "Once upon a time" --dtype bfloat16 --max-new-tokens 1000
  tsjax generate ./story-model --prompt-file start.txt --do-sample --min-p 0.1 \\
      --repetition-penalty 1.2 --repetition-window 1024 --seed 7
  tsjax generate ./story-model "Once" --max-new-tokens 100000 --save-to run.json --progress
  tsjax generate ./story-model --resume-from run.json
  tsjax generate ./llama-3.1-8b --prompt-file start.txt --preset llama3.1-8b --max-new-tokens 20000
  tsjax read ./story-model --prompt-file book.txt --save-to book.prefix
  tsjax generate ./story-model --prompt-file book-and-question.txt --prefix book.prefix
  tsjax generate ./story-model "Once" --method ngram --method-options suffix_length=32
"""


def add_generate(commands: Any) -> None:
    text = "continue a text with a HuggingFace or tsjax checkpoint"
    about = "Continues a text and prints it as it comes. Figures go to stderr."
    parser = cli.command(commands, "generate", _generate, text, about, EXAMPLES)
    cli.add(parser, "model", cli.MODEL_HELP)
    cli.add_prompt(parser, "the text to continue")
    cli.add(parser, "--prefix FILE", cli.PREFIX_HELP)
    cli.add(parser, "--dtype", "the checkpoint's own by default", choices=DTYPES)
    cli.add_held(parser)
    cli.add_method(parser, "auto, or that of the run which is resumed")
    text = "earlier texts to draft from, with auto: files that --save-to wrote, or texts"
    cli.add(parser, "--corpus FILE", text, nargs="+")
    text = "a smaller model of the same vocabulary that drafts, by draft_model or triforce"
    cli.add(parser, "--draft-model PATH", text)
    cli.add_attached(parser)
    text = (
        "lazy: compute a part of the prompt only, for the first token to come sooner; this changes "
        "the text; by default full, or that of the run that is resumed"
    )
    cli.add(parser, "--prefill", text, choices=("full", "lazy"))
    text = "fields of the lazy prefill, 'keep={10:0.7,20:0.49}' or speedup=2, say: "
    text += ", ".join(cli.fields_of(tsjax.LazyPrefill))
    cli.add(parser, "--prefill-options NAME=VALUE", text, nargs="+", default=[])
    cli.add_preset(parser, "sampling and TokenSwift")
    text = "a message to answer, by the checkpoint's chat template, sampled as tsjax chat does; "
    text += "- reads stdin"
    cli.add(parser, "--chat MESSAGE", text)
    cli.add(parser, "--system TEXT", "with --chat, the system's message before it")
    cli.add_mesh(parser)
    cli.add_switch(parser, "--progress", "progress bar instead of text")
    cli.add_switch(parser, "--json", "print one JSON document at the end")
    cli.add_exceeding(parser)
    cli.add(parser, "--save-to FILE", "save the run here, to resume it")
    cli.add(parser, "--save-every TOKENS", "tokens between two writes of that file", default=1000)
    cli.add(parser, "--resume-from FILE", "go on with a run saved there")
    cli.add_compilation_cache(parser)
    cli.add_settings(parser)


def _prompt(args: argparse.Namespace) -> Any:
    """None for a chat."""
    given = cli.given_of(args, ("prompt", "prompt_file", "ids", "chat", "resume_from"))
    if len(given) != 1:
        ways = "as an argument (- reads stdin), with --prompt-file, --ids, --chat or --resume-from"
        raise BadValue(f"give the prompt once: {ways}")
    if args.system is not None and args.chat is None:
        raise BadValue("--system is not valid without --chat")
    return None if args.chat is not None else cli.prompt_of_flags(args)


def _method(args: argparse.Namespace) -> Any:
    """The preset's method, or the one that is named, with the options applied; for neither Auto,
    or None: for that of a run that is resumed without a corpus, and where a second model drafts."""
    if args.method is None and args.preset is None and not args.method_options:
        resumes = args.resume_from is not None and args.corpus is None
        return None if resumes or args.draft_model is not None else resolve_method("auto")
    if args.preset is not None and args.method in (None, "tokenswift"):
        return cli.with_options(preset(args.preset).method, args.method_options)
    resumes = args.method is None and args.resume_from is not None
    wanted = "--method beside them, as a saved run keeps the options of its own"
    check(not resumes, "--method-options", " ".join(args.method_options), wanted)
    usual = "auto" if args.draft_model is None else "draft_model"
    return cli.named_method(args.method or usual, args.method_options)


def _prefill(args: argparse.Namespace) -> Any:
    if args.prefill == "lazy":
        return cli.with_options(tsjax.LazyPrefill(), args.prefill_options, "--prefill-options")
    if args.prefill_options:
        options = " ".join(args.prefill_options)
        raise BadValue(f"--prefill-options {options} is not valid without --prefill lazy")
    return args.prefill


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


def _samples_as_a_chat(args: argparse.Namespace) -> bool:
    """As the checkpoint says; a preset and a run that is resumed say it themselves."""
    return args.chat is not None and args.preset is None and args.resume_from is None


def _generate(args: argparse.Namespace) -> int:
    prompt, settings = _prompt(args), cli.settings_of(args)
    if settings.get("logprobs") is not None and not args.json:
        raise BadValue("--logprobs is not valid without --json: the text has no place for them")
    messages = None if args.chat is None else cli.messages_of_flags(args)
    method, prefill = _method(args), _prefill(args)
    config = None if args.preset is None else preset(args.preset).config
    # Refuses a wrong value before the model is read.
    if _samples_as_a_chat(args):
        check_for_chat(settings)
    else:
        (config or tsjax.GenerationConfig()).replace(**settings)
    if args.prefix is not None:
        open_prefix(args.prefix)
    if args.save_to is not None:
        check_place(args.save_to, "--save-to")
    with cli.joined(args):
        return _generated(args, prompt, messages, settings, config, method, prefill)


def _generated(
    args: argparse.Namespace, prompt: Any, messages: Any, settings: dict[str, Any],
    config: Any, method: Any, prefill: Any,
) -> int:  # fmt: skip
    model = cli.load_model(args, cli.mesh_of_sizes(args.mesh))
    # A text needs it; ids are printed as they are without one.
    has_text = isinstance(prompt, str) or messages is not None
    tokenizer = model.tokenizer if has_text else tokenizer_of(model)
    names = ("exceed_max_positions", "save_to", "save_every", "resume_from", "prefix")
    corpus = None if args.corpus is None else tsjax.read_corpus(model, *args.corpus)
    second = None
    if args.draft_model is not None:
        second = tsjax.load(args.draft_model, dtype=args.dtype, weights=args.weights)
    several = settings.get("num_return_sequences", 1) > 1
    if args.resume_from is not None:
        several = len(read_run(args.resume_from).prompts) > 1
    quiet = args.json or args.progress or several
    if _samples_as_a_chat(args):
        settings = settings_for_chat(model.path, settings)
        cli.tell_unless_quiet(args, f"[{sampling_in_words(settings)}]")
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
        progress=args.progress and not args.quiet and processes.is_first(),
        **cli.given_of(args, names),
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
    count = sum(stats.new_tokens)
    beside = f" (and {stats.beside_seconds:.1f} s beside the run)" if stats.beside_seconds else ""
    figures = (
        f"[{count:,} tokens, {stats.tokens_per_second:.1f} tokens/s, "
        f"{count / seconds_of_process():.1f} since the command began, "
        f"{stats.tokens_per_step:.2f} tokens/step, waited {stats.compile_seconds:.1f} s for "
        f"compiling{beside}, {', '.join(result.finish_reason)}]"
    )
    cli.tell_unless_quiet(args, figures)
    go_on = f"[go on with --resume-from {args.save_to}]" if args.save_to is not None else ""
    return cli.exit_code(args, result, "interrupted" in result.finish_reason, go_on)

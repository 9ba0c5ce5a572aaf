# SPDX-License-Identifier: Apache-2.0
"""`tsjax bench`: methods, lengths or prompts, and sampling of a checkpoint side by side."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from tsjax.base.checks import check, one_of
from tsjax.base.model_config import DTYPES
from tsjax.commands import arguments as cli
from tsjax.measure.bench import answer
from tsjax.measure.bench_question import DEFAULT, LENGTHS, NEW_TOKENS, ROUNDS, WARM_UP, Question
from tsjax.measure.paired_runs import PLAIN, SETTINGS, USUAL_SETTINGS
from tsjax.measure.peers import PEER_TOKENS
from tsjax.methods import METHODS

BENCH_EXAMPLES = """examples:
  tsjax bench ./story-model --lengths 1024 8192 --new-tokens 2000 --plot times.png
  tsjax bench ./story-model --text book.txt --methods plain auto --settings sampled
  tsjax bench ./chat-model --prompts questions.txt --chat --out answers.json \\
      --methods plain auto likely_tree:width=6,places=8
  tsjax bench llama3.1-8b --methods plain tokenswift --lengths 65536 \\
      --simulate-acceptance bench.json
"""


def add_bench(commands: Any) -> None:
    text = "measure methods, lengths and sampling of a checkpoint side by side"
    about = (
        "Measures each method after prompts of each length, or of a file, greedily and sampled, in "
        "rounds that take turns; compiling is apart. A line for each row goes to stdout and one "
        "JSON document after them, or into a file; the time left to stderr. All tokens are "
        "compared with plain decoding's: exit code 1 if they differ in float32 or float64. After "
        "Ctrl-C the document has what there is; a file has the whole cells."
    )
    parser = cli.command(commands, "bench", _bench, text, about, BENCH_EXAMPLES)
    cli.add(parser, "model", cli.MODEL_HELP + "; with --simulate-acceptance a preset")
    text = (
        f"{PLAIN}, which the others are held against, {', '.join(METHODS)}, each also with fields "
        "as in likely_tree:width=6,pass_widths=(1,2), else with those that suit the device "
        f"(default: {' '.join(DEFAULT)})"
    )
    cli.add(parser, "--methods NAME[:FIELD=VALUE,...]", text, nargs="+", default=DEFAULT)
    text = f"tokens of the prompts, also as 32K or 1M (default: {' '.join(map(str, LENGTHS))})"
    flags = dict(type=cli.count_of_tokens, nargs="+", metavar="N", help=text)
    parser.add_argument("--lengths", "--contexts", **flags)
    cli.add_count(parser, "--new-tokens", "tokens of each run", NEW_TOKENS)
    cli.add(parser, "--rounds N", "that count", default=ROUNDS)
    text = "rounds before these, which do not count; long runs need none"
    cli.add(parser, "--warm-up N", text, default=WARM_UP)
    text = f"of {', '.join(SETTINGS)} (default: {' '.join(USUAL_SETTINGS)})"
    cli.add(parser, "--settings NAME", text, nargs="+")
    cli.add(parser, "--dtype", "the checkpoint's own by default", choices=DTYPES)
    cli.add_held(parser)
    cli.add_attached(parser)
    text = "prompts are its beginning; by default the model writes a text"
    cli.add(parser, "--text FILE", text)
    text = (
        "in place of lengths: a text a line, or .jsonl as tsjax batch takes it, of which only the "
        "texts count; after each all runs make as many tokens as plain decoding's answer has, "
        "--new-tokens at most"
    )
    cli.add(parser, "--prompts FILE", text)
    cli.add_switch(parser, "--chat", "each text of --prompts is a message, in the chat template")
    text = "write the document here after each cell; the same command then goes on where it was"
    cli.add(parser, "--out FILE.json", text)
    cli.add(parser, "--draft-model PATH", "a smaller checkpoint, for draft_model and triforce")
    cli.add_mesh(parser)
    cli.add_switch(
        parser, "--exceed-max-positions", "allow more tokens than the model was made for"
    )
    cli.add_switch(parser, "--no-peers", "leave out transformers, with and without prompt lookup")
    text = "new tokens of transformers' runs at most, as they take long"
    cli.add_count(parser, "--peer-tokens", text, PEER_TOKENS)
    cli.add(parser, "--plot FILE", "draw times by length and, in long runs, by output position")
    text = (
        "take accepted lengths from here, as if drafts were so often right: a JSON list of one for "
        "each step, or a file that tsjax bench wrote; weights are random ones of a preset's shape"
    )
    cli.add(parser, "--simulate-acceptance TRACE", text)
    cli.add_compilation_cache(parser)


def _bench(args: argparse.Namespace) -> int:
    names = ("model", "new_tokens", "rounds", "dtype", "text", "plot", "exceed_max_positions")
    names += ("draft_model", "warm_up", "peer_tokens", "prompts", "chat", "out", *cli.ATTACHED)
    lists: Any = {} if args.prompts is None else {"lengths": ()}
    lists |= {name: tuple(x) for name, x in cli.given_of(args, ("lengths", "settings")).items()}
    left_out = "left out with --distributed: one process writes the file"
    check(args.out is None or not args.distributed, "--out", args.out, left_out)
    question = Question(
        methods=_methods_of(args.methods),
        peers=not args.no_peers,
        quiet=args.quiet,
        simulate=args.simulate_acceptance,
        **cli.held_of(args),
        **cli.given_of(args, names),
        **lists,
    )
    with cli.joined(args):
        return answer(question, shlex.join(["tsjax", *args.argv]), cli.mesh_of_sizes(args.mesh))


def _methods_of(rows: Sequence[str]) -> dict[str, Any]:
    """Methods by what was typed of each: NAME, or NAME:FIELD=VALUE,FIELD=VALUE."""
    check(len(set(rows)) == len(rows), "--methods", " ".join(rows), "one or more, each once")
    known, found = {PLAIN: METHODS["autoregressive"], **METHODS}, {}
    for row in rows:
        name, colon, fields = row.partition(":")
        check(name in known, "--methods", name, one_of(known))
        found[row] = cli.with_options(known[name](), _parted(fields) if colon else [], "--methods")
    return found


def _parted(fields: str) -> list[str]:
    """By the commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in fields:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts

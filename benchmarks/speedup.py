# SPDX-License-Identifier: Apache-2.0
"""Whether drafts pay: each method against plain decoding and torch `generate`, by context.

Every context is the beginning of a text. It is read once for each setting; each run starts from a
copy of what was read and goes as runs of `tsjax.generate` go, so that tsjax.Auto() judges between
chunks of steps. All methods run in this process, in turn, round by round; the table has the median
of the ratios of the rounds. The tokens of every method are compared with those of plain decoding.
The bound of a plain step is one read of weights and cache, at the speed of torch's sum over a
buffer of that size in the same round.

    python -m benchmarks speedup --text corpus/dracula.txt --random --long 32768 \\
        --out benchmarks/results/cpu

With --sweep, four passes on partial caches that are chosen in several ways run instead.

    python -m benchmarks speedup --text corpus/dracula.txt --sweep --contexts 8192 --threads 0
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tsjax
from benchmarks import report
from benchmarks.cpu import seconds_to_read
from pallas_kernels import native
from tsjax.files.tokenizer import encode
from tsjax.host.costs import costs_of
from tsjax.host.paired_runs import SETTINGS, Runs, compared, random_tokens, times_by_position
from tsjax.host.peers import PEER_TOKENS, Peer, PeerRuns
from tsjax.host.plots import plot
from tsjax.host.timing import interleaved, ratios, summary
from tsjax.methods.auto import options
from tsjax.methods.devices import plain_bytes

RANDOM = "random"  # what the rows say after a prompt of random tokens
LONG_PROMPT = 16  # tokens
METHODS = ("plain", "paper", "auto", "text", "passes", "ngrams")
METHODS_ON_RANDOM = ("plain", "auto")
# On a CPU these take ten to twenty times as long as plain decoding: fewer tokens tell as much.
SLOW, SLOW_TOKENS = ("paper", "ngrams"), 128


def beginning(model, file: Path, count: int) -> np.ndarray:
    """The first `count` tokens of a text."""
    ids = encode(model.tokenizer, file.read_text("utf-8")[: 16 * count])
    if len(ids) < count:
        raise SystemExit(f"--text {file.name}: a text of {len(ids)} tokens, not of {count}")
    return np.asarray(ids[:count], np.int32)


def tokens_of(name: str, new: int) -> int:
    """What a run of a method says."""
    return min(new, SLOW_TOKENS) if name in SLOW else new


def methods_of(model, context: float) -> dict[str, Any]:
    """What is compared: all but "auto" are fixed settings."""
    costs = costs_of(model.params, model.cfg, 1, context)
    text = next(options(model.cfg, costs, context))
    passes = [
        option
        for option in options(model.cfg, costs, context, passes=True)
        if option.draft_passes == 4
    ]
    return {
        "plain": tsjax.methods.Autoregressive(),
        "paper": tsjax.TokenSwift.paper(),
        "auto": tsjax.Auto(),
        "text": text,
        "passes": min(
            passes, key=lambda one: one.promise(model.cfg, costs, context).seconds_per_token
        ),
        "ngrams": tsjax.NGram(),
    }


def sweep() -> dict[str, Any]:
    """What the partial cache holds: when it is chosen again, and whether passes see the rest."""
    methods: dict[str, Any] = {"plain": tsjax.methods.Autoregressive()}
    for rule, every in {"the paper's rule": None, "every 8 tokens": 8, "every step": 1}.items():
        for rest in (False, True):
            methods[f"{rule}, rest" if rest else rule] = tsjax.TokenSwift(
                tree=(1,) * 4, draft_passes=4, draft_budget=512, draft_refresh=every,
                draft_rest=rest, num_ngrams=0, suffix_length=0,
            )  # fmt: skip
    return methods


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("speedup", __doc__)
    parser.add_argument("--model", help="a checkpoint; the embedded model by default")
    parser.add_argument(
        "--text", type=Path, required=True, help="a file; prompts are its beginning"
    )
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 8192, 32768])
    parser.add_argument("--tokens", type=int, default=512, help="new tokens of a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--random", action="store_true", help="prompts of random tokens as well")
    parser.add_argument("--long", type=int, default=0, help="new tokens after a short prompt")
    parser.add_argument("--long-rounds", type=int, default=1)
    parser.add_argument("--methods", nargs="+", help="of those that are compared; all by default")
    parser.add_argument("--name", default="speedup", help="of the result's file")
    parser.add_argument("--sweep", action="store_true", help="choices of the partial cache instead")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of torch; 0 leaves out torch and the bound"
    )
    args = parser.parse_args(argv)
    if unknown := set(args.methods or METHODS) - set(METHODS):
        parser.error(f"--methods {min(unknown)}: of {', '.join(METHODS)}")
    if args.methods and "plain" not in args.methods:
        parser.error("--methods: plain is what the others are held against")
    if args.threads and importlib.util.find_spec("torch") is None:
        parser.error(
            f"--threads {args.threads}: there is no torch (pip install '.[parity]'); "
            "--threads 0 does without"
        )

    model = tsjax.load(args.model or tsjax.EMBEDDED, dtype="float32")
    status = native.status(try_now=True)
    text = {"name": args.text.name, "sha256": hashlib.sha256(args.text.read_bytes()).hexdigest()}
    document: dict[str, Any] = {
        # What Auto and LikelyTree choose by.
        "costs": costs_of(model.params, model.cfg, 1, max(args.contexts)),
        "dtype": "float32", "native": {"state": status.state, "reason": status.reason},
        "settings": SETTINGS, "text": text, "new_tokens": args.tokens,
        "torch_tokens": min(args.tokens, PEER_TOKENS), "rounds": args.rounds,
        "slow": {name: tokens_of(name, args.tokens) for name in SLOW},
        "complete": False, "rows": [], "left_out": [],
    }  # fmt: skip
    name = "partial_cache" if args.sweep else args.name
    for context in args.contexts:
        prompts = {args.text.name: beginning(model, args.text, context)}
        if args.random and not args.sweep:
            prompts[RANDOM] = random_tokens(model, context)
        for of_text, prompt in prompts.items():
            for row in rows_of(model, of_text, prompt, args, document["left_out"]):
                document["rows"].append(row)
                show(row)
        report.save({**report.facts(), **document}, args.out, name)
    if args.long and not args.sweep:
        document["long"] = long_run(model, args)
    report.write(document | {"complete": True}, args.out, name)
    if args.out and not args.sweep:
        rows = [row for row in document["rows"] if row["text"] != RANDOM]
        long = document.get("long", {"rows": ()})
        title = f"{args.long:,} new tokens, {long.get('setting')}"
        plot(args.out / f"{name}.png", rows, long["rows"], title)


def runs_of(model, prompt: np.ndarray, setting: str, methods: dict[str, Any], new: int) -> Runs:
    tokens = {name: tokens_of(name, new) for name in methods}
    return Runs(model, prompt, SETTINGS[setting], methods, tokens)


def rows_of(model, text: str, prompt: np.ndarray, args: Any, left_out: list):
    """Yields the rows of one prompt."""
    context, new = len(prompt), args.tokens
    methods = sweep() if args.sweep else methods_of(model, context + new // 2)
    if text == RANDOM:
        methods = {name: methods[name] for name in METHODS_ON_RANDOM}
    elif args.methods:
        methods = {name: methods[name] for name in args.methods}
    read = int(plain_bytes(model.cfg, context + new // 2))
    with_torch = args.threads > 0
    theirs = None
    if with_torch and text != RANDOM:
        peer = Peer(model.path, "float32", args.threads)
        theirs = PeerRuns(peer, prompt, min(new, PEER_TOKENS))
    for setting in args.settings:
        ours = runs_of(model, prompt, setting, methods, new)
        calls: dict[str, Any] = {name: functools.partial(ours.run, name) for name in methods}
        if theirs:

            def leave_out(name: str, error: Exception, setting: str = setting) -> None:
                why = report.first_line(error)
                left_out.append({"method": name, "setting": setting, "error": why})

            calls |= theirs.calls(SETTINGS[setting], leave_out)
        if with_torch:
            calls["bound"] = functools.partial(seconds_to_read, read)
        found = interleaved(calls, args.rounds).results
        bound = [1e3 * seconds for seconds in found.pop("bound", ())]
        for row in with_best(ours, found):
            if row["method"] == "plain" and bound:
                row["read_bytes"] = read
                row["bound_ms"] = summary(bound)
                row["bound"] = ratios(bound, [one["ms_per_token"] for one in found["plain"]])
            yield {"text": text, "context": context, "setting": setting, **row}


def with_best(ours: Runs, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Auto also against the best of the fixed settings."""
    rows = compared(ours, found)
    times = {row["method"]: row["ms_per_token"]["median"] for row in rows}
    best = min((name for name in ours.requests if name != "auto"), key=times.__getitem__)
    for row in rows:
        if row["method"] == "auto":
            each = [[one["ms_per_token"] for one in found[name]] for name in (best, "auto")]
            row |= {"best_fixed": best, "speedup_over_best_fixed": ratios(*each)}
    return rows


def long_run(model, args: Any) -> dict[str, Any]:
    """Many new tokens after a short prompt, whole and by output position."""
    prompt, setting = beginning(model, args.text, LONG_PROMPT), "sampled"
    methods = methods_of(model, LONG_PROMPT + args.long // 2)
    methods = {name: methods[name] for name in ("plain", "auto")}
    ours = runs_of(model, prompt, setting, methods, args.long)
    calls = {name: functools.partial(ours.run, name) for name in methods}
    # Without a round that does not count: programs compile in it, which is no part of the seconds.
    found = interleaved(calls, args.long_rounds, warmup=0).results
    rows = []
    for row in with_best(ours, found):
        runs = found[row["method"]]
        row["seconds"] = summary([one["made"][-1][2] for one in runs])
        row["by_position"] = times_by_position([one["made"] for one in runs])
        rows.append(row)
        show({"context": f"+{args.long}", "setting": setting, **row})
    return {
        "new_tokens": args.long, "prompt_tokens": LONG_PROMPT, "setting": setting,
        "rounds": args.long_rounds, "rows": rows,
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    ratios = "".join(
        f"  {row[key]['median']:5.2f}x {key[13:]}" for key in row if key.startswith("speedup_over")
    )
    random = ", random" if row.get("text") == RANDOM else ""
    bound = f"  {row['bound']['median']:.0%} of the bound" if "bound" in row else ""
    same = "" if row.get("same_tokens", True) else "  OTHER TOKENS"
    print(
        f"{row['context']:>6} {row['setting'] + random:16} {row['method']:20}"
        f"{row['ms_per_token']['median']:8.2f} ms/token{ratios}"
        f"  {row['tokens_per_step']:.2f} tokens/step{bound}{same}",
        flush=True,
    )

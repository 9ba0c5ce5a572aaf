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

import copy
import dataclasses
import functools
import hashlib
import importlib.util
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from benchmarks import report
from benchmarks.cpu import seconds_to_read
from pallas_kernels import native
from tsjax.decoding.start import with_method
from tsjax.files.tokenizer import encode
from tsjax.host.costs import costs_of
from tsjax.host.interrupt import Interrupt
from tsjax.host.request import make_request
from tsjax.host.run import run, start_run
from tsjax.host.timing import interleaved, ratios, summary
from tsjax.methods.auto import options, seconds_per_token
from tsjax.methods.cost_model import plain_bytes

SETTINGS: dict[str, dict[str, Any]] = {
    "sampled": dict(
        do_sample=True, temperature=1.0, min_p=0.1, repetition_penalty=1.2, repetition_window=1024
    ),
    "greedy": {},
}
RANDOM = "random"  # what the rows say after a prompt of random tokens
LOOKUP = 10  # tokens that torch looks up in the text
EVERY = 1024  # output positions of a long run that make one figure
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


def random_tokens(model, count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(model.cfg.vocab_size, size=count, dtype=np.int32)


def tokens_of(name: str, new: int) -> int:
    """What a run of a method says."""
    return min(new, SLOW_TOKENS) if name in SLOW else new


class Ours:
    """Runs after one prompt with one setting, all from one state that has read the prompt."""

    def __init__(self, model, prompt: np.ndarray, new: int, setting: str, methods: dict[str, Any]):
        self.model, self.new = model, new
        settings = {**SETTINGS[setting], "eos_token_id": ()}
        requests = {
            name: make_request(
                model, prompt, None, {**settings, "max_new_tokens": tokens_of(name, new)},
                method=method,
            )
            for name, method in methods.items()
        }  # fmt: skip
        capacity = max(request.capacity for request in requests.values())
        self.requests = {
            name: dataclasses.replace(request, capacity=capacity)
            for name, request in requests.items()
        }
        self.read = start_run(model, self.requests["plain"], Interrupt())

    def run(self, name: str) -> dict[str, Any]:
        request, interrupt = self.requests[name], Interrupt()
        state = with_method(jax.tree.map(jnp.copy, self.read), request.decode)
        state = state.replace(max_length=jnp.asarray(request.max_length, jnp.int32))
        made = [(0, 0, 0.0)]  # after each chunk: tokens, steps, seconds
        for news in run(self.model, request, interrupt, jax.block_until_ready(state)):
            steps = int(news.steps.steps.sum())
            made.append((len(news.all_tokens[0]), steps, news.decode_seconds))
        interrupt.finish(None, "raise")
        tokens, steps, seconds = made[-1]
        return {
            "ms_per_token": 1e3 * seconds / tokens,
            "tokens_per_step": tokens / steps,
            "tokens": news.all_tokens[0],
            "gave_up": news.gave_up,
            "made": made,
        }

    def begins_with(self, name: str) -> dict[str, Any]:
        """The settings of the method that drafts first, but for its table of costs."""
        method: Any = self.requests[name].decode.method
        found = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
        return {"method": type(method).__name__, **found, "costs": None}


TORCH_TOKENS = 64  # of its runs, which take long


class Theirs:
    """torch's generate, from a copy of its own cache of the same context."""

    def __init__(self, folder: str, prompt: np.ndarray, new: int, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self.torch, self.new = torch, min(new, TORCH_TOKENS)
        self.model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype="float32").eval()
        self.prompt = torch.tensor(prompt)[None].long()
        with torch.no_grad():
            cache = None
            for part in self.prompt[:, :-1].split(512, dim=1):
                cache = self.model(part, past_key_values=cache, use_cache=True).past_key_values
        self.cache = cache

    def run(self, setting: str, new: int | None = None, **how) -> dict[str, Any]:
        new = self.new if new is None else new
        times: list[float] = []
        counts: list[int] = []

        class Clock:
            def put(self, value):
                times.append(time.perf_counter())
                counts.append(value.numel())

            def end(self):
                pass

        settings = {name: x for name, x in SETTINGS[setting].items() if "window" not in name}
        with self.torch.no_grad():
            self.model.generate(
                self.prompt,
                attention_mask=self.torch.ones_like(self.prompt),
                past_key_values=copy.deepcopy(self.cache),
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
                streamer=Clock(),
                **{"do_sample": False, **settings, **how},
            )
        # The first put is the prompt, the second what the first step found.
        made = sum(counts[2:])
        return {
            "ms_per_token": 1e3 * (times[-1] - times[1]) / made,
            "tokens_per_step": made / len(counts[2:]),
        }

    def calls(self, setting: str, left_out: list[dict[str, Any]]) -> dict[str, Any]:
        """What torch does with a setting; `left_out` is told what it cannot do."""
        lookup = functools.partial(self.run, setting, prompt_lookup_num_tokens=LOOKUP)
        calls = {"torch": functools.partial(self.run, setting)}
        try:
            lookup(new=min(self.new, 2 * LOOKUP))
        except Exception as error:
            what = {"method": "torch lookup", "setting": setting}
            left_out.append({**what, "error": report.first_line(error)})
            return calls
        return {**calls, "torch lookup": lookup}


def methods_of(model, context: float) -> dict[str, Any]:
    """What is compared: all but "auto" are fixed settings."""
    costs = costs_of(model.params, model.cfg, 1)
    text, *others = options(model.cfg, costs)
    passes = [option for option in others if option.draft_passes == 4]
    return {
        "plain": tsjax.Autoregressive(),
        "paper": tsjax.TokenSwift(),
        "auto": tsjax.Auto(),
        "text": text,
        "passes": min(passes, key=lambda one: seconds_per_token(one, model.cfg, costs, context)),
        "ngrams": tsjax.NGram(),
    }


def sweep() -> dict[str, Any]:
    """What the partial cache holds: when it is chosen again, and whether passes see the rest."""
    methods: dict[str, Any] = {"plain": tsjax.Autoregressive()}
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
        "costs": costs_of(model.params, model.cfg, 1),  # what Auto and LikelyTree choose by
        "dtype": "float32", "native": {"state": status.state, "reason": status.reason},
        "settings": SETTINGS, "text": text, "new_tokens": args.tokens,
        "torch_tokens": min(args.tokens, TORCH_TOKENS), "rounds": args.rounds,
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
        plot(document, args.out / f"{name}.png")


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
    theirs = (
        Theirs(model.path, prompt, new, args.threads) if with_torch and text != RANDOM else None
    )
    for setting in args.settings:
        ours = Ours(model, prompt, new, setting, methods)
        calls: dict[str, Any] = {name: functools.partial(ours.run, name) for name in methods}
        if theirs:
            calls |= theirs.calls(setting, left_out)
        if with_torch:
            calls["bound"] = functools.partial(seconds_to_read, read)
        found = interleaved(calls, args.rounds).results
        bound = [1e3 * seconds for seconds in found.pop("bound", ())]
        for row in compared(ours, found):
            if row["method"] == "plain" and bound:
                row["read_bytes"] = read
                row["bound_ms"] = summary(bound)
                row["bound"] = ratios(bound, [one["ms_per_token"] for one in found["plain"]])
            yield {"text": text, "context": context, "setting": setting, **row}


def compared(ours: Ours, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each method's rounds against those of plain decoding and of torch."""
    times = {name: [one["ms_per_token"] for one in runs] for name, runs in found.items()}
    fixed = [name for name in ours.requests if name != "auto"]
    best = min(fixed, key=lambda name: statistics.median(times[name]))
    rows = []
    for name, runs in found.items():
        row: dict[str, Any] = {"method": name, "ms_per_token": summary(times[name])}
        for peer in ("plain", "torch"):
            if peer in times and peer != name:
                row[f"speedup_over_{peer}"] = ratios(times[peer], times[name])
        if name == "auto":
            row |= {"best_fixed": best, "speedup_over_best_fixed": ratios(times[best], times[name])}
        row["tokens_per_step"] = statistics.median(one["tokens_per_step"] for one in runs)
        if name in ours.requests:
            plain = found["plain"][0]["tokens"]
            row["same_tokens"] = all(
                np.array_equal(one["tokens"], plain[: len(one["tokens"])]) for one in runs
            )
            row["gave_up"] = sum(one["gave_up"] for one in runs)  # of the rounds
            row["options"] = ours.begins_with(name)
        rows.append(row)
    return rows


def long_run(model, args: Any) -> dict[str, Any]:
    """Many new tokens after a short prompt, whole and by output position."""
    prompt, setting = beginning(model, args.text, LONG_PROMPT), "sampled"
    methods = methods_of(model, LONG_PROMPT + args.long // 2)
    methods = {name: methods[name] for name in ("plain", "auto")}
    ours = Ours(model, prompt, args.long, setting, methods)
    calls = {name: functools.partial(ours.run, name) for name in methods}
    # Without a round that does not count: programs compile in it, which is no part of the seconds.
    found = interleaved(calls, args.long_rounds, warmup=0).results
    rows = []
    for row in compared(ours, found):
        runs = found[row["method"]]
        row["seconds"] = summary([one["made"][-1][2] for one in runs])
        row["by_position"] = by_position([one["made"] for one in runs])
        rows.append(row)
        show({"context": f"+{args.long}", "setting": setting, **row})
    return {
        "new_tokens": args.long, "prompt_tokens": LONG_PROMPT, "setting": setting,
        "rounds": args.long_rounds, "rows": rows,
    }  # fmt: skip


def by_position(runs: Sequence[Sequence[tuple[int, int, float]]]) -> dict[str, list]:
    """Between every EVERY tokens, the median of the runs; a chunk's steps count as even."""
    end = runs[0][-1][0]
    marks = np.asarray([*range(0, end, EVERY), end])
    steps, seconds = [], []
    for made in runs:
        tokens, steps_then, seconds_then = zip(*made, strict=True)
        steps.append(np.diff(np.interp(marks, tokens, steps_then)))
        seconds.append(np.diff(np.interp(marks, tokens, seconds_then)))
    count = np.diff(marks)
    return {
        "position": marks[1:].tolist(),
        "ms_per_token": (1e3 * np.median(seconds, axis=0) / count).tolist(),
        "tokens_per_step": (count / np.median(steps, axis=0)).tolist(),
    }


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


def plot(document: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if row["text"] != RANDOM]
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    long = document.get("long")
    panels = len(settings) + bool(long)
    figure, grid = pyplot.subplots(1, panels, figsize=(5 * panels, 4), squeeze=False)
    for axes, setting in zip(grid[0], settings, strict=False):
        for method in dict.fromkeys(row["method"] for row in rows):
            found = [r for r in rows if (r["setting"], r["method"]) == (setting, method)]
            times = [row["ms_per_token"]["median"] for row in found]
            axes.plot([row["context"] for row in found], times, "o-", label=method)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_title(setting)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("ms per token")
        axes.legend()
    if long:
        plot_positions(grid[0][-1], long)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def plot_positions(axes: Any, long: dict[str, Any]) -> None:
    """Milliseconds per token on the left, tokens per step on the right."""
    right = axes.twinx()
    for number, row in enumerate(long["rows"]):
        found, colour = row["by_position"], f"C{number}"
        axes.plot(found["position"], found["ms_per_token"], color=colour, label=row["method"])
        right.plot(found["position"], found["tokens_per_step"], ":", color=colour)
    axes.set_title(f"{long['new_tokens']:,} new tokens, {long['setting']}")
    axes.set_xlabel("output position, tokens")
    axes.set_ylabel("ms per token (lines)")
    axes.set_ylim(bottom=0)
    right.set_ylabel("tokens per step (dots)")
    right.set_ylim(bottom=0)
    axes.legend()

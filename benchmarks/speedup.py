# SPDX-License-Identifier: Apache-2.0
"""TokenSwift against plain decoding and torch `generate`, by context, sampled and greedy.

Every context is the beginning of a book. Its cache is computed once; each run starts from a copy
of it, takes a few steps that do not count and then makes its tokens. All methods run in this
process, in turn, round by round; the table has the median of the ratios of the rounds. The tokens
of every method are compared with those of plain decoding.

    python -m benchmarks speedup --books corpus --out benchmarks/results/cpu

With --sweep, four passes on partial caches that are chosen in several ways are run beside it.

    python -m benchmarks speedup --books corpus --sweep --contexts 8192 --threads 0
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from benchmarks import report
from tsjax.decoding.programs import programs
from tsjax.files.tokenizer import encode
from tsjax.host.timing import interleaved, ratios, summary

SETTINGS: dict[str, dict[str, Any]] = {
    "sampled": dict(
        do_sample=True, temperature=1.0, min_p=0.1, repetition_penalty=1.2, repetition_window=1024
    ),
    "greedy": {},
}
WARM_STEPS = 8


def book_tokens(model, folder: Path, count: int) -> np.ndarray:
    """The first `count` tokens of the first book that has as many."""
    for file in sorted(folder.glob("*.txt")):
        ids = encode(model.tokenizer, file.read_text("utf-8")[: 8 * count])
        if len(ids) >= count:
            return np.asarray(ids[:count], np.int32)
    raise SystemExit(f"--books {folder}: no text of {count} tokens")


class Ours:
    """Runs of one context, all from one cache."""

    def __init__(self, model, prompt: np.ndarray, new: int):
        self.model, self.prompt = model, prompt
        self.total = len(prompt) + new
        self.capacity = max(1024, 1 << (self.total + 64).bit_length())
        self.programs = programs("cpu", model.cfg.dtype)
        state, cfg = self.state(tsjax.Autoregressive(), {}), tsjax.DecodeConfig(model=model.cfg)
        for start in range(0, len(prompt) - 1, 512):
            state = self.programs.read_part(model.params, state, start, part=0, width=512, cfg=cfg)
        self.kv = state.kv

    def state(self, method, settings):
        model, config = self.model, tsjax.GenerationConfig(**settings)
        return tsjax.init_state(
            self.prompt[None],
            np.asarray([len(self.prompt)], np.int32),
            cfg=tsjax.DecodeConfig(model=model.cfg, method=method),
            capacity=self.capacity,
            max_length=[self.total],
            sampling=tsjax.sampling_values(config, (), model.cfg.vocab_size, model.cfg.dtype),
        )

    def run(self, method, settings) -> dict[str, Any]:
        cfg, params = tsjax.DecodeConfig(self.model.cfg, method), self.model.params_for(method)
        state = self.state(method, settings).replace(kv=jax.tree.map(jnp.copy, self.kv))
        state = self.programs.decode(params, state, WARM_STEPS, cfg=cfg)
        first, steps = int(state.length[0]), int(state.stats.steps[0])
        begin = time.perf_counter()
        state = self.programs.decode(params, state, self.total, cfg=cfg)
        state.kv.length.block_until_ready()
        seconds = time.perf_counter() - begin
        made = int(state.length[0]) - first
        if not made:
            raise SystemExit("--tokens is too small: the warm-up made all of them")
        return {
            "ms_per_token": 1e3 * seconds / made,
            "tokens_per_step": made / (int(state.stats.steps[0]) - steps),
            "tokens": np.asarray(state.tokens)[0, len(self.prompt) : self.total],
        }


class Theirs:
    """torch's generate, from a copy of its own cache of the same context."""

    def __init__(self, folder: str, prompt: np.ndarray, new: int, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self.torch, self.new = torch, new
        self.model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype="float32").eval()
        self.prompt = torch.tensor(prompt)[None].long()
        with torch.no_grad():
            cache = None
            for part in self.prompt[:, :-1].split(512, dim=1):
                cache = self.model(part, past_key_values=cache, use_cache=True).past_key_values
        self.cache = cache

    def run(self, settings) -> dict[str, Any]:
        times: list[float] = []

        class Clock:
            def put(self, value):
                times.append(time.perf_counter())

            def end(self):
                pass

        settings = {name: value for name, value in settings.items() if "window" not in name}
        with self.torch.no_grad():
            self.model.generate(
                self.prompt,
                past_key_values=copy.deepcopy(self.cache),
                max_new_tokens=self.new,
                min_new_tokens=self.new,
                pad_token_id=0,
                streamer=Clock(),
                **{"do_sample": False, **settings},
            )
        # The first put is the prompt, the second the first token.
        return {"ms_per_token": 1e3 * (times[-1] - times[1]) / (len(times) - 2)}


def sweep() -> dict[str, Any]:
    """What the partial cache holds: when it is chosen again, and whether passes see the rest."""
    methods: dict[str, Any] = {}
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
    parser.add_argument("--books", type=Path, required=True, help="folder of texts")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 16384, 32768])
    parser.add_argument("--tokens", type=int, default=192, help="new tokens of a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--sweep", action="store_true", help="choices of the partial cache too")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch; 0 leaves it out")
    args = parser.parse_args(argv)

    model = tsjax.load(args.model or tsjax.EMBEDDED, dtype="float32")
    document: dict[str, Any] = {"dtype": "float32", "settings": SETTINGS, "rows": []}
    for context in args.contexts:
        prompt = book_tokens(model, args.books, context)
        ours = Ours(model, prompt, args.tokens)
        theirs = Theirs(model.path, prompt, args.tokens, args.threads) if args.threads else None
        choice = tsjax.choose_method("tokenswift", model, context + args.tokens // 2)
        methods = {"plain": tsjax.Autoregressive(), "tokenswift": choice.method}
        if args.sweep:
            methods |= sweep()
        for setting in args.settings:
            calls = {
                name: functools.partial(ours.run, method, SETTINGS[setting])
                for name, method in methods.items()
            }
            if theirs:
                calls["torch"] = functools.partial(theirs.run, SETTINGS[setting])
            rows = interleaved(calls, args.rounds).results
            for name, runs in rows.items():
                document["rows"].append(
                    summarise(context, setting, name, methods.get(name), runs, rows)
                )
                show(document["rows"][-1])
    report.write(document, args.out, "partial_cache" if args.sweep else "speedup")
    if args.out and not args.sweep:
        plot(document["rows"], args.out / "speedup.png")


def summarise(context, setting, name, method, runs, rows) -> dict[str, Any]:
    times = {peer: [run["ms_per_token"] for run in runs] for peer, runs in rows.items()}
    row = {
        "context": context, "setting": setting, "method": name,
        "ms_per_token": summary(times[name]),
    }  # fmt: skip
    for peer in ("plain", "torch"):
        if peer in rows and peer != name:
            row[f"speedup_over_{peer}"] = ratios(times[peer], times[name])
    if method is not None:
        row["options"] = dataclasses.asdict(method)
        row["tokens_per_step"] = runs[0]["tokens_per_step"]
        plain = rows["plain"][0]["tokens"]
        row["same_tokens"] = all(np.array_equal(run["tokens"], plain) for run in runs)
    return row


def show(row: dict[str, Any]) -> None:
    ratios = "".join(
        f"  {row[key]['median']:5.2f}x {key[13:]}" for key in row if key.startswith("speedup_over")
    )
    tokens = f"  {row['tokens_per_step']:.2f} tokens/step" if "tokens_per_step" in row else ""
    same = "" if row.get("same_tokens", True) else "  OTHER TOKENS"
    print(
        f"{row['context']:6} {row['setting']:8} {row['method']:12}"
        f"{row['ms_per_token']['median']:8.2f} ms/token{ratios}{tokens}{same}",
        flush=True,
    )


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for setting in SETTINGS:
        found = [r for r in rows if (r["setting"], r["method"]) == (setting, "tokenswift")]
        contexts = [row["context"] for row in found]
        axes.plot(contexts, [r["speedup_over_plain"]["median"] for r in found], "o-", label=setting)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("tokens/s of TokenSwift over plain decoding")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)

# SPDX-License-Identifier: Apache-2.0
"""What drafts gain on a real model: each method against plain decoding, by kind of prompt.

Prompts are those of prompts.json, put into the model's chat template: six kinds, of each one half
to choose settings on (`--half develop`) and one to report (`--half report`). After each prompt all
methods run in turn, round by round, from copies of what was read, until plain decoding's answer
ends; tokens are compared with its. The file is written after each prompt: a run that was ended goes
on where it was.

    python -m benchmarks real_models --model smollm2-135m.gguf --out benchmarks/results/cpu

The same file's summary by kind, from all prompts that it has: `--show`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tsjax
from benchmarks import report
from benchmarks.cpu import seconds_to_read
from benchmarks.text_figures import figures
from tools.facts import sha256_of
from tsjax.base.input_files import read_json
from tsjax.base.model_config import WEIGHTS
from tsjax.host.chat import chat_prompt
from tsjax.host.costs import costs_of
from tsjax.measure.paired_runs import PLAIN, Runs, compared
from tsjax.measure.paired_runs import SETTINGS as OF_RUNS
from tsjax.measure.peers import LOOKUP, PEER_TOKENS, Peer, PeerRuns
from tsjax.measure.timing import ratios, summary
from tsjax.methods.cost_model import Costs
from tsjax.methods.devices import plain_bytes

PROMPTS = report.ROOT / "benchmarks" / "prompts.json"
HALVES = "develop", "report"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": OF_RUNS["greedy"],
    "chat": dict(do_sample=True, temperature=0.7, min_p=0.05),
    "paper": OF_RUNS["sampled"],
}
# Of the paper's widths a CPU takes five to ten plain steps for each: fewer tokens tell as much.
SLOW, SLOW_TOKENS = ("paper",), 32
FEWEST_TOKENS = 8  # of a run, where an answer is shorter
LLAMA_CONTEXT, STEP_TAKES = 4096, 1e-3  # tokens; seconds at least


class LlamaCpp:
    """The same GGUF file in llama.cpp, greedily, its numbers as the file has them."""

    def __init__(self, path: Path, threads: int):
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        make = functools.partial(
            llama_cpp.Llama, str(path), n_ctx=LLAMA_CONTEXT, n_threads=threads,
            n_threads_batch=threads, verbose=False,
        )  # fmt: skip
        drafts = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP)
        self._models = {"llama.cpp": make(), "llama.cpp lookup": make(draft_model=drafts)}

    def run(self, name: str, prompt: list[int], new: int) -> dict[str, Any]:
        times = []
        for _ in self._models[name].generate(prompt, temp=0.0, repeat_penalty=1.0):
            times.append(time.perf_counter())
            if len(times) == new:
                break
        gaps = np.diff(times)
        steps = max(1, int((gaps > STEP_TAKES).sum()))  # what a step has found comes at once
        return {"ms_per_token": 1e3 * float(gaps.mean()), "tokens_per_step": len(gaps) / steps}

    def calls(self, prompt: list[int], new: int) -> dict[str, Any]:
        return {name: functools.partial(self.run, name, prompt, new) for name in self._models}


def methods_of(model: tsjax.Model, second: tsjax.Model | None, costs: Costs) -> dict[str, Any]:
    """What is compared. All but "auto" are fixed settings, prices of rows the machine's."""
    text = functools.partial(tsjax.LikelyTree, costs=costs, places=8)
    found: dict[str, Any] = {
        PLAIN: tsjax.methods.Autoregressive(),
        "auto": tsjax.Auto(),
        "narrow tree": text(width=6, pass_widths=(1, 2, 3, 4)),
        "wide tree": text(width=16, pass_widths=(1, 2, 4, 8)),
        "int8 passes": text(
            width=6, pass_widths=(1, 2, 3, 4), draft_passes=2, draft_weights="int8"
        ),
        "ngrams": tsjax.NGram(),
        "paper": tsjax.TokenSwift.paper(),
        "magicdec": tsjax.methods.MagicDec(),
    }
    if second is not None:
        found |= {"second model": tsjax.DraftModel(), "triforce": tsjax.methods.TriForce()}
    every = functools.partial(tsjax.LikelyTree, pass_widths=(), costs=free_rows(costs))
    found["16 rows, text"] = every(width=16, places=8)
    if model.cfg.num_draft_heads:
        found["16 rows, heads"] = every(width=16, places=0, heads=True)
    if model.cfg.drafter is not None:
        narrow = functools.partial(text, width=6, pass_widths=(1, 2, 3, 4), drafter=4)
        found |= {
            "drafter": narrow(places=0), "drafter and text": narrow(),
            "drafter and text, not learning": narrow(adapt=False),
        }  # fmt: skip
        for rows in (5, 8, 16):
            tree = functools.partial(every, width=rows, places=0, drafter=4)
            found[f"{rows} rows, drafter"] = tree()
            found[f"{rows} rows, drafter not learning"] = tree(adapt=False)
    return found


def free_rows(costs: Costs) -> Costs:
    """Prices by which every row of a tree is judged: none takes time, nor do drafts."""
    row = costs.passes[0][1]
    return costs._replace(passes=((1, row), (2, row)), one_layer=0.0, heads=0.0)


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("real_models", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a folder")
    parser.add_argument("--second", type=Path, help="a smaller model that drafts")
    parser.add_argument("--drafter", type=Path, help="a one-layer drafter for it")
    parser.add_argument("--heads", type=Path, help="draft heads for it")
    parser.add_argument(
        "--name", help="of the result's file; by default the model's and its type's"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--weights", default="float", choices=WEIGHTS)
    parser.add_argument("--half", choices=HALVES, default="report")
    kinds = [*read_json(PROMPTS)["kinds"]]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["greedy", "chat"])
    parser.add_argument("--methods", nargs="+", help="of those that are compared; all by default")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of a run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of peers; 0 leaves them out")
    parser.add_argument("--minutes", type=float, default=600, help="no prompt begins after these")
    parser.add_argument("--show", action="store_true", help="only what the file has")
    args = parser.parse_args(argv)
    if args.threads and importlib.util.find_spec("torch") is None:
        parser.error("--threads: there is no torch; --threads 0 does without")
    name = args.name or f"real-{args.model.stem}-{args.dtype}"
    if args.show:
        show(read_json(args.out / f"{name}.json")["cells"])
        return
    how: dict[str, Any] = {"drafter": args.drafter, "heads": args.heads}
    model = tsjax.load(args.model, dtype=args.dtype, weights=args.weights, **how)
    second = None if args.second is None else tsjax.load(args.second, dtype=args.dtype)
    costs = costs_of(model.params, model.cfg, 1, args.tokens)
    methods = methods_of(model, second, costs)
    if unknown := set(args.methods or methods) - set(methods):
        parser.error(f"--methods {min(unknown)}: of {', '.join(methods)}")
    chosen = {one: methods[one] for one in methods if one in {PLAIN, *(args.methods or methods)}}
    asked = {
        "model": described(args.model), "second": args.second and described(args.second),
        "dtype": args.dtype, "settings": SETTINGS,
        "prompts_sha256": hashlib.sha256(PROMPTS.read_bytes()).hexdigest(),
        **({} if args.weights == "float" else {"weights": args.weights}),
    }  # fmt: skip
    document = report.series(args.out, name, asked, "cells")
    document["costs"] = costs
    known = {cell_key(cell) for cell in document["cells"]}
    peer, llama = None, None
    if args.threads:
        peer = Peer(str(args.model.resolve()), args.dtype, args.threads)
        if args.model.suffix == ".gguf" and importlib.util.find_spec("llama_cpp"):
            llama = LlamaCpp(args.model, args.threads)
    budget = report.Budget(args.minutes)
    for kind, number, prompt in prompts_of(args.half, args.kinds):
        for setting in args.settings:
            where = {
                "half": args.half, "kind": kind, "prompt": number, "setting": setting,
                "new_tokens": args.tokens,
            }  # fmt: skip
            if cell_key(where) in known:
                continue
            if budget.is_used_up:
                print("the time is over; the same command goes on")
                show(document["cells"])
                return
            cell = measured(model, second, chosen, prompt, where, args.rounds, peer, llama)
            document["cells"].append(cell)
            report.save(document, args.out, name)
            print(line_of(cell), flush=True)
    show(document["cells"])


def described(path: Path) -> dict[str, str]:
    if path.is_dir():
        return {"name": path.name}
    return {"name": path.name, "sha256": sha256_of(path)}


def cell_key(cell: dict[str, Any]) -> tuple:
    return tuple(cell[name] for name in ("half", "kind", "prompt", "setting", "new_tokens"))


def prompts_of(half: str, kinds: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """One prompt of each kind after the other: a run that is ended early has some of all."""
    every = read_json(PROMPTS)["kinds"]
    count = len(every[kinds[0]]) // 2
    first = 0 if half == HALVES[0] else count
    for number in range(first, first + count):
        for kind in kinds:
            yield kind, number, every[kind][number]


def measured(
    model: tsjax.Model, second: tsjax.Model | None, methods: dict[str, Any], prompt: str,
    where: dict[str, Any], rounds: int, peer: Peer | None, llama: LlamaCpp | None,
) -> dict[str, Any]:  # fmt: skip
    settings = SETTINGS[where["setting"]]
    ids = np.asarray(chat_prompt(model, [{"role": "user", "content": prompt}]))
    new = answer_tokens(model, ids, settings, where["new_tokens"])
    tokens = {name: min(new, SLOW_TOKENS) if name in SLOW else new for name in methods}
    ours = Runs(model, ids, settings, methods, tokens, draft_model=second)
    calls: dict[str, Any] = {name: functools.partial(ours.run, name) for name in methods}
    left_out: list[dict[str, str]] = []
    if peer is not None:
        theirs = PeerRuns(peer, ids, min(new, PEER_TOKENS))
        calls |= theirs.calls(
            settings, lambda name, why: left_out.append({"method": name, "error": str(why)[:200]})
        )
    if llama is not None and where["setting"] == "greedy":
        calls |= llama.calls(ids.tolist(), min(new, PEER_TOKENS))
    read = int(plain_bytes(model.cfg, len(ids) + new // 2))
    calls["bound"] = functools.partial(seconds_to_read, read)
    found = report.interleaved(calls, rounds, keep_errors=True)
    left_out += [
        {"method": name, "error": report.first_line(error)} for name, error in found.failed.items()
    ]
    results = dict(found.results)
    bound = [1e3 * seconds for seconds in results.pop("bound", ())]
    rows = compared(ours, results)
    for row in rows:
        row.pop("options", None)
        times = [one["ms_per_token"] for one in results[row["method"]]]
        if bound:  # torch reads it
            row["share_of_bound"] = ratios(bound, times)
        stats = results[row["method"]][-1].get("stats")
        if stats is not None and row["method"] != PLAIN:
            row["accepted"] = {
                "lengths": list(stats.accepted_lengths),
                "by_source": stats.accepted_by_source,
            }
    return {
        **where, "answer_tokens": new, "prompt_tokens": len(ids), "read_bytes": read,
        "bound_ms": summary(bound) if bound else None,
        "text": figures(results[PLAIN][0]["tokens"].tolist()),
        "rows": rows, "left_out": left_out,
    }  # fmt: skip


def answer_tokens(model: tsjax.Model, ids: np.ndarray, settings: dict[str, Any], most: int) -> int:
    """How long plain decoding's answer is, its stop token among them; at most `most`."""
    methods = {PLAIN: tsjax.methods.Autoregressive()}
    said = Runs(model, ids, settings, methods, {PLAIN: most}).run(PLAIN)["tokens"]
    ends = np.flatnonzero(np.isin(said, model.stop_ids))
    return max(FEWEST_TOKENS, int(ends[0]) + 1) if len(ends) else most


def line_of(cell: dict[str, Any]) -> str:
    plain = next(row for row in cell["rows"] if row["method"] == PLAIN)
    said = "".join(
        f"  {row['method']} {row['speedup_over_plain']['median']:.2f}x"
        + ("" if row.get("same_tokens", True) else " OTHER TOKENS")
        for row in cell["rows"]
        if "speedup_over_plain" in row
    )
    where = f"{cell['kind']} {cell['prompt']} {cell['setting']}"
    return f"{where:24} plain {plain['ms_per_token']['median']:.1f} ms{said}"


def by_kind(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each kind and setting with medians over its prompts, the least and the most."""
    places = dict.fromkeys((cell["half"], cell["setting"], cell["kind"]) for cell in cells)
    table = []
    for place in places:
        some = [c for c in cells if (c["half"], c["setting"], c["kind"]) == place]
        row: dict[str, Any] = dict(zip(("half", "setting", "kind"), place, strict=True))
        row |= {"prompts": len(some), "methods": {}}
        for name in dict.fromkeys(one["method"] for cell in some for one in cell["rows"]):
            rows = [one for cell in some for one in cell["rows"] if one["method"] == name]
            times = [one["ms_per_token"]["median"] for one in rows]
            gains = [one["speedup_over_plain"]["median"] for one in rows if name != PLAIN]
            row["methods"][name] = {
                "ms_per_token": statistics.median(times),
                "tokens_per_step": statistics.median(one["tokens_per_step"] for one in rows),
                **({"over_plain": summary(gains)} if gains else {}),
            }
        row["distinct_4"] = statistics.median(cell["text"]["distinct_4"] for cell in some)
        table.append(row)
    return table


def show(cells: list[dict[str, Any]]) -> None:
    for row in by_kind(cells):
        print(f"{row['half']}, {row['kind']}, {row['setting']}: {row['prompts']} prompts, "
              f"Distinct-4 {row['distinct_4']:.2f}")  # fmt: skip
        for name, one in row["methods"].items():
            gain = one.get("over_plain")
            over = "" if gain is None else (
                f"{gain['median']:6.2f}x ({gain['min']:.2f} to {gain['max']:.2f})"
            )  # fmt: skip
            print(f"  {name:14}{one['ms_per_token']:8.2f} ms/token"
                  f"{one['tokens_per_step']:7.2f} tokens/step {over}")  # fmt: skip
    print(json.dumps({"cells": len(cells)}))

# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of lazy prefills against the full one, and what follows from them.

A model reads random prompts: that of a checkpoint, or with random weights one of a published shape
or of Llama-3.1's proportions, scaled down. All schedules run in this process, in turn, round by
round. The table has the median of the ratios of the rounds, and the ratio that counting operations
predicts. The time to the first token is that of the whole prefill and of one step.

    python -m benchmarks ttft --model llama3.1-8b --dtype bfloat16 --out benchmarks/results/h200

Then whole generations of --new tokens, by what becomes of the tokens that were left out: by the
model, and by random weights of its shape. Of a random prompt the trained one asks for nearly all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tsjax
from benchmarks import report
from tsjax.lazy.settings import prompt_flops
from tsjax.measure.timing import ratios, summary
from tsjax.model.params import random_params

# After which share of the layers a cut is made, and the share of the prompt that goes on.
SCHEDULES: dict[str, dict[float, float]] = {
    "paper": {0.3: 0.7, 0.6: 0.49, 0.9: 0.343},
    "halves": {0.25: 0.5, 0.5: 0.25, 0.75: 0.125},
    "early": {0.125: 0.5, 0.25: 0.25, 0.5: 0.1},
    "one cut": {0.375: 0.02},
    "steep": {0.25: 0.8, 0.375: 0.03},
}
AUTO = 2.0  # times fewer operations
AUTO_NAME = f"auto {AUTO}"
NAMES = (*SCHEDULES, AUTO_NAME)
ALL_ROWS = 512  # computed with each new token, until all are
# What becomes of the tokens that were left out, as whole generations show it.
REVIVALS: dict[str, dict[str, Any]] = {
    "in batches": {},
    "paper's rule": dict(revive="on_demand"),
    "paper's rule, every 8": dict(revive="on_demand", choose_every=8),
    "never": dict(revive="never"),
    "everything": dict(revive="background", revive_rows=ALL_ROWS),
}


def scaled_model(layers: int, embed: int, dtype: str):
    """Llama-3.1's proportions: 4 query heads per kv head, an mlp 3.5 times as wide."""
    cfg = tsjax.ModelConfig(
        vocab_size=4096, embed_dim=embed, num_layers=layers, num_heads=embed // 64,
        num_kv_heads=max(1, embed // 256), head_dim=64, mlp_dim=embed * 7 // 2,
        max_positions=1 << 20, norm_eps=1e-5, dtype=dtype,
    )  # fmt: skip
    return with_random_weights(cfg)


def with_random_weights(cfg: tsjax.ModelConfig) -> tsjax.Model:
    return tsjax.Model(random_params(cfg), cfg=cfg)


def schedule(name: str, layers: int) -> dict[int, float]:
    """One of SCHEDULES for a model of `layers` layers, without cuts after its last layer."""
    keep = {max(1, round(at * layers)): share for at, share in SCHEDULES[name].items()}
    return {layer: share for layer, share in keep.items() if layer < layers}


def prefill_of(name: str, tokens: int, cfg) -> tsjax.LazyPrefill:
    """That of one of NAMES for a prompt of so many tokens."""
    if name == AUTO_NAME:
        # As a model that looks things up a little before its middle, earlier than any known one.
        looks_up = max(1, 7 * cfg.num_layers // 16)
        return tsjax.LazyPrefill(keep="auto", speedup=AUTO).resolved(cfg, tokens, looks_up)
    return tsjax.LazyPrefill(keep=schedule(name, cfg.num_layers))


def prompt_of(tokens: int, cfg) -> np.ndarray:
    return np.random.default_rng(tokens).integers(0, cfg.vocab_size, tokens)


def first_token(model, prompt, prefill) -> float:
    """Seconds to the first token."""
    stats = tsjax.generate(model, prompt, max_new_tokens=1, prefill=prefill).stats
    return stats.prefill_seconds + stats.decode_seconds


def generations(model, prompt, lazy, names, new: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of whole generations, and the share of the prompt that each stage computed, by those
    of REVIVALS that are named."""
    prefills: dict[str, Any] = {"full": "full"}
    prefills |= {name: dataclasses.replace(lazy, **REVIVALS[name]) for name in names}

    def computed(prefill):
        result = tsjax.generate(model, prompt, max_new_tokens=new, prefill=prefill)
        return result.stats.prompt_computed

    calls = {name: functools.partial(computed, prefill) for name, prefill in prefills.items()}
    found = report.interleaved(calls, rounds)
    return {
        name: {
            "choose_every": getattr(prefills[name], "tokens_between_choices", None),
            "generation_seconds": summary(seconds),
            "computed": found.results[name][-1],
            "speedup": ratios(found.seconds["full"], seconds),
        }
        for name, seconds in found.seconds.items()
    }


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("ttft", __doc__)
    parser.add_argument(
        "--model", help="a preset such as llama3.1-8b, or a folder, instead of the next two"
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--embed", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument(
        "--schedules", nargs="+", default=list(NAMES), choices=NAMES,
        help="whose first tokens are timed",
    )  # fmt: skip
    parser.add_argument("--new", type=int, default=128, help="tokens of a whole generation")
    parser.add_argument(
        "--generate", nargs="*", default=["paper", "halves"], choices=NAMES,
        help="schedules of whole generations",
    )  # fmt: skip
    parser.add_argument(
        "--revived", nargs="+", default=list(REVIVALS), choices=REVIVALS,
        help="what becomes of the tokens that were left out, in whole generations",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)

    is_trained = args.model and Path(args.model).is_dir()
    if is_trained:
        model = tsjax.load(args.model, dtype=args.dtype)
    elif args.model:
        model = with_random_weights(
            dataclasses.replace(tsjax.model_preset(args.model), dtype=args.dtype)
        )
    else:
        model = scaled_model(args.layers, args.embed, args.dtype)
    models = {"trained" if is_trained else "random": model}
    if is_trained:
        models["random"] = with_random_weights(model.cfg)
    document: dict[str, Any] = {"model": model.cfg.to_dict(), "rows": [], "generations": []}
    for tokens in args.prompts:
        prompt = prompt_of(tokens, model.cfg)
        lazy = {name: prefill_of(name, tokens, model.cfg) for name in args.schedules}
        calls = {
            name: functools.partial(first_token, model, prompt, prefill)
            for name, prefill in {"full": "full", **lazy}.items()
        }
        seconds = report.interleaved(calls, args.rounds).results
        whole = prompt_flops(model.cfg, tokens)
        for name, times in seconds.items():
            row: dict[str, Any] = {"prompt_tokens": tokens, "schedule": name}
            row["first_token_seconds"] = summary(times)
            if name != "full":
                row["keep"] = dict(lazy[name].keep)
                row["speedup"] = ratios(seconds["full"], times)
                row["predicted"] = whole / prompt_flops(model.cfg, tokens, lazy[name].keep)
                row["of_predicted"] = row["speedup"]["median"] / row["predicted"]
            document["rows"].append(row)
            show(row)
        report.save({**report.facts(), **document}, args.out, "ttft")
    for tokens, name in itertools.product(args.prompts, args.generate):
        prompt = prompt_of(tokens, model.cfg)
        lazy = prefill_of(name, tokens, model.cfg)
        for weights, model in models.items():
            runs = generations(model, prompt, lazy, args.revived, args.new, args.rounds)
            case = {"prompt_tokens": tokens, "new_tokens": args.new, "schedule": name}
            document["generations"].append({**case, "weights": weights, "runs": runs})
            for revived, run in runs.items():
                shares = " ".join(f"{share:.0%}" for share in run["computed"])
                print(
                    f"{tokens:6} {name:8}{weights:8} {args.new} tokens, revived {revived:22}"
                    f"{run['generation_seconds']['median']:8.2f} s"
                    f"  {run['speedup']['median']:.2f}x  computed {shares}",
                    flush=True,
                )
            report.save({**report.facts(), **document}, args.out, "ttft")
    report.write(document, args.out, "ttft")


def show(row: dict[str, Any]) -> None:
    text = f"{row['prompt_tokens']:6} {row['schedule']:10}"
    text += f"{row['first_token_seconds']['median']:8.2f} s to the first token"
    if "speedup" in row:
        text += f"  {row['speedup']['median']:.2f}x of the full prefill, {row['predicted']:.2f}x"
        text += f" predicted ({row['of_predicted']:.0%})"
    print(text, flush=True)

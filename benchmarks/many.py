# SPDX-License-Identifier: Apache-2.0
"""Prompts through a batch that stays full, against fixed batches of the same width.

Lengths of answers are drawn log-uniformly between a least and eight times that. A fixed batch is as
long as its longest answer. Both make the same tokens, which is compared; rounds take turns, after
one that compiles.

    python -m benchmarks many --out benchmarks/results/cpu
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import tsjax
from benchmarks import report
from tsjax.host.timing import ratios, summary

SAMPLED = dict(do_sample=True, min_p=0.1, eos_token_id=())
BEGINNINGS = ("The sea", "My dear sister", "In the evening", "He said that", "Once upon a time")


def main(argv: Sequence[str]) -> int | None:
    parser = report.parser_of("many", __doc__)
    parser.add_argument("--model", default=tsjax.EMBEDDED)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--least", type=int, default=64, help="new tokens; the most are 8 times it")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    model = tsjax.load(args.model)
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(args.least), np.log(8 * args.least), args.prompts))
    prompts = [
        {"prompt": BEGINNINGS[i % len(BEGINNINGS)], "seed": i, "max_new_tokens": int(length)}
        for i, length in enumerate(lengths)
    ]
    times: dict[str, list[float]] = {"full": [], "fixed": []}
    for turn in range(args.rounds + 1):
        for name, run in (("full", kept_full), ("fixed", in_fixed_batches)):
            begun = time.perf_counter()
            texts = run(model, prompts, args.rows)
            if turn:
                times[name].append(time.perf_counter() - begun)
            if name == "full":
                wanted = texts
            elif texts != wanted:
                raise SystemExit("the texts are not the same")
    tokens = sum(prompt["max_new_tokens"] for prompt in prompts)
    gain = ratios(times["fixed"], times["full"])
    document: dict[str, Any] = {
        "model": "small-english" if args.model == tsjax.EMBEDDED else args.model,
        "prompts": args.prompts, "rows": args.rows, "rounds": args.rounds,
        "new_tokens": {"least": args.least, "most": 8 * args.least, "all": tokens},
        "seconds": {name: summary(found) for name, found in times.items()},
        "tokens_per_second": {
            name: tokens / statistics.median(found) for name, found in times.items()
        },
        "speedup": gain, "same_tokens": True,
    }  # fmt: skip
    for name, rate in document["tokens_per_second"].items():
        print(f"{name:8}{rate:10,.0f} tokens/s")
    print(f"{gain['median']:.2f}x")
    report.write(document, args.out, "many")
    return None


def kept_full(model: tsjax.Model, prompts: list[dict], rows: int) -> list[list[int]]:
    answers = tsjax.generate_many(model, prompts, rows=rows, **SAMPLED)
    found = {answer.index: answer.tokens.tolist() for answer in answers}
    return [found[index] for index in range(len(prompts))]


def in_fixed_batches(model: tsjax.Model, prompts: list[dict], rows: int) -> list[list[int]]:
    found = []
    for begin in range(0, len(prompts), rows):
        some = prompts[begin : begin + rows]
        result = tsjax.generate(
            model,
            [prompt["prompt"] for prompt in some],
            seed=[prompt["seed"] for prompt in some],
            max_new_tokens=max(prompt["max_new_tokens"] for prompt in some),
            **SAMPLED,
        )
        for prompt, row in zip(some, result.tokens, strict=True):
            found.append(row[: prompt["max_new_tokens"]].tolist())
    return found

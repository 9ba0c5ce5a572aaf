# SPDX-License-Identifier: Apache-2.0
"""How many drafts are right with the model's own weights and with int8 ones, for each way to draft.

One prompt from each text file of a folder, greedy and sampled at temperature 1 with min-p 0.1, no
n-grams, no suffix. Every run has to return the tokens of plain decoding.

    python -m benchmarks draft_weights --books corpus --out benchmarks/results/cpu
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import tsjax
from benchmarks import report
from benchmarks.tokens_per_step import book_prompts

SETTINGS = {"greedy": {}, "sampled": dict(do_sample=True, temperature=1.0, min_p=0.1)}


def methods(budget: int) -> dict[str, tsjax.TokenSwift]:
    settings = dict(draft_budget=budget, num_sinks=4, num_ngrams=0, suffix_length=0)
    return {
        "one pass": tsjax.TokenSwift(tree=(1,), **settings),
        "one pass and heads": tsjax.TokenSwift(tree=(1, 3, 3, 3), **settings),
        "four passes": tsjax.TokenSwift(tree=(1, 1, 1, 1), draft_passes=4, **settings),
        "four passes that see the rest": tsjax.TokenSwift(
            tree=(1, 1, 1, 1), draft_passes=4, draft_rest=True, **settings
        ),
        "heads on the verified state": tsjax.TokenSwift(
            tree=(3, 3, 3), draft_from="verified_state", **settings
        ),
    }


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("draft_weights", __doc__)
    parser.add_argument("--model", default=tsjax.EMBEDDED, help="a checkpoint with a tokenizer")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--books", type=Path, required=True, help="folder of .txt files")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--skip", type=int, default=20_000, help="characters skipped in each book")
    parser.add_argument("--budget", type=int, default=64, help="slots of the partial cache")
    args = parser.parse_args(argv)

    model = tsjax.load(args.model, dtype=args.dtype)
    prompts = book_prompts(model, args.books, args.prompt_tokens, args.skip)

    def generate(method, values):
        return tsjax.generate(
            model, prompts, method=method, max_new_tokens=args.new_tokens, eos_token_id=(),
            exceed_max_positions=True, **values,
        )  # fmt: skip

    plain = {name: generate("autoregressive", values) for name, values in SETTINGS.items()}
    rows = {}
    for name, method in methods(args.budget).items():
        cells = {}
        for setting, values in SETTINGS.items():
            cells[setting] = {}
            for weights in ("model", "int8"):
                found = generate(dataclasses.replace(method, draft_weights=weights), values)
                if not all(map(np.array_equal, found.tokens, plain[setting].tokens)):
                    raise SystemExit(f"{name}, {setting}, {weights}: other tokens than plainly")
                cells[setting][weights] = {
                    "tokens_per_step": found.stats.tokens_per_step,
                    "accepted_lengths": found.stats.accepted_lengths,
                }
        rows[name] = cells
        texts = (
            f"{setting} {cells[setting]['model']['tokens_per_step']:.3f} -> "
            f"{cells[setting]['int8']['tokens_per_step']:.3f}"
            for setting in SETTINGS
        )
        print(f"{name:32}" + ", ".join(texts), flush=True)
    document = {
        "model": args.model, "dtype": args.dtype, "prompts": len(prompts),
        "prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens, "budget": args.budget,
        "rows": rows,
    }  # fmt: skip
    report.write(document, args.out, "draft_weights")

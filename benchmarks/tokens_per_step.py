# SPDX-License-Identifier: Apache-2.0
"""Tokens per step of every drafter on a real model: one prompt from each text file of a folder.

Greedy, and sampled at temperature 1 with min-p 0.1, with and without noise-coupled drafts. Every
run has to return the tokens of plain decoding. The model needs no heads: on the partial cache its
own passes draft.

    python -m benchmarks tokens_per_step --model stories260K_hf --books corpus
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import tsjax
from benchmarks import report
from tsjax.files.tokenizer import encode


def book_prompts(model, folder: Path, tokens: int, skip: int) -> list[list[int]]:
    """The beginnings of all text files of a folder, without their first `skip` characters."""
    prompts = []
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8")[skip:][: 20 * tokens]
        prompts.append(encode(model.tokenizer, text)[:tokens])
    if not prompts:
        raise SystemExit(f"no .txt files in {folder}")
    return prompts


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("tokens_per_step", __doc__)
    parser.add_argument("--model", required=True, help="a checkpoint with a tokenizer")
    parser.add_argument("--books", type=Path, required=True, help="folder of .txt files")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--skip", type=int, default=20_000, help="characters skipped in each book")
    parser.add_argument("--budget", type=int, default=64, help="slots of the partial cache")
    args = parser.parse_args(argv)

    model = tsjax.load(args.model)
    prompts = book_prompts(model, args.books, args.prompt_tokens, args.skip)

    off = dict(num_ngrams=0, suffix_length=0)
    cache = dict(draft_budget=args.budget, num_sinks=4)
    four = dict(tree=(1, 3, 3, 3), draft_passes=4, **cache)
    methods = {
        "plain decoding": tsjax.methods.Autoregressive(),
        "n-grams": tsjax.NGram(suffix_length=0),
        "n-grams, entered at once": tsjax.NGram(suffix_length=0, ngram_delay=0),
        "suffix": tsjax.NGram(num_ngrams=0),
        "n-grams + suffix": tsjax.NGram(),
        "model (1 pass)": tsjax.TokenSwift(tree=(3,), **cache, **off),
        "model (1 pass) + n-grams": tsjax.TokenSwift(tree=(3,), suffix_length=0, **cache),
        "model (1 pass) + n-grams + suffix": tsjax.TokenSwift(tree=(3,), **cache),
        "model (4 passes)": tsjax.TokenSwift(**four, **off),
        "model (4 passes that see the rest)": tsjax.TokenSwift(**four, draft_rest=True, **off),
        "model (4 passes) + n-grams": tsjax.TokenSwift(**four, suffix_length=0),
        "model (4 passes) + n-grams + suffix": tsjax.TokenSwift(**four),
    }
    sampled = dict(do_sample=True, temperature=1.0, min_p=0.1)
    settings = {
        "greedy": ({}, True),
        "sampled": (sampled, True),
        "sampled, not coupled": (sampled, False),
        "sampled, penalty 1.2 in 64": (
            dict(**sampled, repetition_penalty=1.2, repetition_window=64),
            True,
        ),
    }
    expected, rows = {}, {}
    print(f"{'tokens per step':38}" + "".join(f"{name:>28}" for name in settings))
    for name, method in methods.items():
        cells = {}
        for setting, (values, coupled) in settings.items():
            asked = method
            if not coupled:
                if not hasattr(method, "noise_coupled"):
                    continue  # drafts without a model know no noise
                asked = dataclasses.replace(method, noise_coupled=False)
            result = tsjax.generate(
                model,
                prompts,
                method=asked,
                max_new_tokens=args.new_tokens,
                eos_token_id=(),
                exceed_max_positions=True,
                **values,
            )
            same = expected.setdefault(str(values), result.tokens)
            if not all(map(np.array_equal, same, result.tokens)):
                raise SystemExit(f"{name}, {setting}: other tokens than plain decoding")
            stats = result.stats
            cells[setting] = {
                "tokens_per_step": stats.tokens_per_step,
                "drafted_per_step": stats.drafted / sum(stats.steps),
                "accepted_by_source": stats.accepted_by_source,
                "accepted_lengths": stats.accepted_lengths, "alpha": stats.alpha,
            }  # fmt: skip
        rows[name] = cells
        texts = [f"{cells[s]['tokens_per_step']:.2f}" if s in cells else "" for s in settings]
        print(f"{name:38}" + "".join(f"{text:>28}" for text in texts))
    document = {
        "prompts": len(prompts), "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens, "budget": args.budget, "rows": rows,
    }  # fmt: skip
    report.write(document, args.out, "tokens_per_step")

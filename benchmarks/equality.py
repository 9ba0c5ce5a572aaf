# SPDX-License-Identifier: Apache-2.0
"""Every method beside plain decoding, a million tokens: how many are others.

In rounds: a batch of random prompts of many lengths, a seed, and one of three settings (greedy,
sampled, sampled with a penalty). Plain decoding writes it, then each method does. A row that parts
is kept with its place and both tokens. The document is written after every round, and a run that
was ended goes on where it was when the command is given again.

    python -m benchmarks equality --out benchmarks/results/cpu
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import tsjax
from benchmarks import report
from benchmarks.exactness import SETTINGS

NARROW: Any = dict(num_ngrams=2, suffix_length=6)  # a CPU takes long for the default's 97 rows
METHODS: dict[str, Any] = {
    "ngram": tsjax.NGram(**NARROW),
    "tokenswift": tsjax.TokenSwift(**NARROW, tree=(1, 2, 1, 1), draft_budget=256),
    "tokenswift, four passes": tsjax.TokenSwift(
        **NARROW, tree=(1, 1, 1, 1), draft_passes=4, draft_budget=256
    ),
}
LONGEST_PROMPT = 64


def one_round(model: tsjax.Model, index: int, batch: int, length: int) -> dict[str, Any]:
    """What the methods wrote, against plain decoding."""
    rng = np.random.default_rng(index)
    sizes = rng.integers(1, LONGEST_PROMPT + 1, batch)
    prompts = [rng.integers(0, model.cfg.vocab_size, size) for size in sizes]
    setting = list(SETTINGS)[index % len(SETTINGS)]
    asked = SETTINGS[setting] | dict(
        max_new_tokens=length, seed=index, eos_token_id=(), exceed_max_positions=True
    )
    plain = tsjax.generate(model, prompts, method="autoregressive", **asked).tokens
    parted, accepted = [], {}
    for name, method in METHODS.items():
        result = tsjax.generate(model, prompts, method=method, **asked)
        accepted[name] = result.stats.tokens_per_step
        for row, (ours, theirs) in enumerate(zip(result.tokens, plain, strict=True)):
            (places,) = np.nonzero(ours != theirs)
            if places.size:
                place = int(places[0])
                parted.append({
                    "round": index, "setting": setting, "row": row, "method": name, "after": place,
                    "plain": int(theirs[place]), "token": int(ours[place]),
                })  # fmt: skip
    return {"parted": parted, "tokens_per_step": accepted}


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("equality", __doc__)
    parser.add_argument("--model", default="embedded", help="a checkpoint's folder")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of each method")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="new tokens of a row")
    args = parser.parse_args(argv)
    path = tsjax.EMBEDDED if args.model == "embedded" else args.model
    model = tsjax.load(path, dtype=args.dtype)
    name = f"equality-{args.dtype}"
    asked = {key: getattr(args, key) for key in ("model", "dtype", "batch", "length")}
    document = {
        "asked": asked, "methods": list(METHODS), "rounds": 0, "tokens": 0, "parted": [],
        "tokens_per_step": {method: [] for method in METHODS},
    }  # fmt: skip
    file = args.out and args.out / f"{name}.json"
    if file and file.exists():
        before = json.loads(file.read_text())
        if before["asked"] != asked:
            raise SystemExit(f"{file} is of another run, {before['asked']}: move it away")
        document = {key: before[key] for key in document}
    while document["tokens"] < args.tokens:
        found = one_round(model, document["rounds"], args.batch, args.length)
        document["rounds"] += 1
        document["tokens"] += args.batch * args.length
        document["parted"] += found["parted"]
        for method, value in found["tokens_per_step"].items():
            document["tokens_per_step"][method].append(value)
        report.save({**report.facts(), **document}, args.out, name)
        print(
            f"{document['tokens']:,} tokens of each method, {len(document['parted'])} rows parted",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    report.write(document, args.out, name)

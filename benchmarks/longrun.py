# SPDX-License-Identifier: Apache-2.0
"""Long runs by output position: acceptance, time per token and gain of each method, and the text.

All methods of one setting go on side by side, always the one that has said least, so that each part
of the text is timed within minutes on all of them. Their tokens are compared with plain decoding's.
What a text is like (Distinct-n, repeated spans, self-BLEU, see text_figures.py) is shown once for
each setting, as all methods say the same. Settings are with and without a penalty on the tokens of
the last 1,024 positions.

The document is written again after every mark, and a setting with its group of methods that is
there in whole is not run again: so a long series can be run in parts, one group after another.
Each says on which machine it ran.

    python -m benchmarks longrun --methods plain auto ngram --out benchmarks/results/cpu
    python -m benchmarks longrun --methods plain magicdec triforce --out benchmarks/results/cpu
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tsjax
from benchmarks import report, text_figures
from tsjax.decoding.method import Autoregressive, Method
from tsjax.host.paired_runs import PLAIN, Runs, parted_at, times_by_position
from tsjax.host.prompts import encode_text
from tsjax.methods import METHODS

PENALTY = dict(repetition_penalty=1.2, repetition_window=1024)
SAMPLED = dict(do_sample=True, temperature=1.0, min_p=0.1)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalty": PENALTY,
    "sampled": SAMPLED,
    "sampled, penalty": {**SAMPLED, **PENALTY},
}
NEW_TOKENS, MARKS = 102_400, 5
PROMPT = "Once upon a time"
# As compared in the TokenSwift paper, and as here.
VARIANTS: dict[str, Method] = {
    "tokenswift": tsjax.TokenSwift.paper(),
    "snapkv": tsjax.methods.MagicDec(draft_choice="snapkv"),
    "triforce, chosen again": tsjax.methods.TriForce(draft_refresh=None),
}


def method_of(name: str) -> Method:
    if name == PLAIN:
        return Autoregressive()
    return VARIANTS[name] if name in VARIANTS else METHODS[name]()


def main(argv: Sequence[str]) -> int | None:
    parser = report.parser_of("longrun", __doc__)
    known = [PLAIN, *METHODS, *VARIANTS]
    parser.add_argument("--model", default=tsjax.EMBEDDED)
    parser.add_argument("--methods", nargs="+", choices=known, default=[PLAIN, "auto"])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if PLAIN not in args.methods:
        parser.error(f"--methods {' '.join(args.methods)}: {PLAIN} among them, for the ratios")
    if args.tokens < MARKS:
        parser.error(f"--tokens {args.tokens}: at least {MARKS}")
    model = tsjax.load(args.model)
    prompt = encode_text(model, PROMPT, "prompt")
    asked = {
        "model": Path(args.model).name, "dtype": model.cfg.dtype, "tokens": args.tokens,
        "seed": args.seed, "prompt": PROMPT, "settings": SETTINGS,
    }  # fmt: skip
    document = report.series(args.out, "longrun", asked, "groups")
    for setting in args.settings:
        group = [setting, *args.methods]
        if any(one["group"] == group and one["complete"] for one in document["groups"]):
            print(f"there already: {', '.join(group)}", file=sys.stderr)
            continue
        settings = {**SETTINGS[setting], "seed": args.seed}
        methods = {name: method_of(name) for name in args.methods}
        new = dict.fromkeys(methods, args.tokens)
        runs = Runs(model, prompt, settings, methods, new, exceed_max_positions=True)
        earlier = [one for one in document["groups"] if one["group"] != group]
        for found in side_by_side(runs, args.tokens):
            entry = {"group": group, "facts": report.facts(), **found}
            report.save({**document, "groups": [*earlier, entry]}, args.out, "longrun")
        document["groups"] = [*earlier, entry]
        show(entry)
    report.write(document, args.out, "longrun")
    return None if all(same(one) for one in document["groups"]) else 1


def side_by_side(runs: Runs, tokens: int):
    """Yields what there is each time all methods have passed a mark, at last the whole."""
    going = {name: runs.chunks(name) for name in runs.requests}
    latest: dict[str, dict[str, Any]] = {name: {} for name in going}
    marks = [tokens * (mark + 1) // MARKS for mark in range(MARKS)]
    passed = 0
    while passed < len(marks):
        said = {name: len(one.get("tokens", ())) for name, one in latest.items()}
        name = min(said, key=said.__getitem__)
        if said[name] >= marks[passed]:
            passed += 1
            yield told(runs, latest, marks[:passed], passed == len(marks))
            continue
        latest[name] = next(going[name])


def told(
    runs: Runs, latest: Mapping[str, dict[str, Any]], marks: Sequence[int], complete: bool
) -> dict[str, Any]:
    text = latest[PLAIN]["tokens"]
    ids = np.asarray(text, np.int32)
    seconds = {name: at_marks(one["made"], marks, 2) for name, one in latest.items()}
    steps = {name: at_marks(one["made"], marks, 1) for name, one in latest.items()}
    rows = {}
    for name, one in latest.items():
        place = parted_at(one["tokens"], text)
        rows[name] = {
            "ms_per_token": [1e3 * s / m for s, m in zip(seconds[name], marks, strict=True)],
            "tokens_per_step": [m / s for s, m in zip(steps[name], marks, strict=True)],
            "speedup": [a / b for a, b in zip(seconds[PLAIN], seconds[name], strict=True)],
            "by_position": times_by_position([one["made"]]),
            "accepted_lengths": list(one["stats"].accepted_lengths),
            "accepted_by_source": one["stats"].accepted_by_source,
            "alpha": one["stats"].alpha,
            "draft_positions": one["stats"].draft_positions,
            "gave_up": one["gave_up"],
            "same_tokens": place is None,
            "parted_at": place,
            "options": runs.begins_with(name),
        }
        if place is not None:
            others = one["tokens"].tolist()
            rows[name]["text"] = [text_figures.figures(others[:mark]) for mark in marks]
    return {
        "complete": complete,
        "marks": list(marks),
        "text": [text_figures.figures(text[:mark].tolist()) for mark in marks],
        "sha256": hashlib.sha256(ids[: marks[-1]].tobytes()).hexdigest(),
        "methods": rows,
    }


def at_marks(made: Sequence[tuple[int, int, float]], marks: Sequence[int], index: int):
    """Steps (1) or seconds (2) until each mark; a chunk's count as even."""
    return np.interp(marks, [one[0] for one in made], [one[index] for one in made]).tolist()


def same(entry: Mapping[str, Any]) -> bool:
    return all(row["same_tokens"] for row in entry["methods"].values())


def show(entry: Mapping[str, Any]) -> None:
    setting, *_ = entry["group"]
    for mark, text in zip(entry["marks"], entry["text"], strict=True):
        print(f"{setting:18}{mark:8,} " + "  ".join(f"{k} {v:.3f}" for k, v in text.items()))
    for name, row in entry["methods"].items():
        gains = "  ".join(f"{gain:.2f}x" for gain in row["speedup"])
        other = "" if row["same_tokens"] else f"  OTHER TOKENS after {row['parted_at']}"
        print(
            f"{setting:18}{name:24}{row['ms_per_token'][-1]:7.2f} ms/token  {gains}  "
            f"{row['tokens_per_step'][-1]:.2f} tokens/step{other}",
            flush=True,
        )

# SPDX-License-Identifier: Apache-2.0
"""TokenSwift's tables and figures again, at a sixteenth of their lengths, on the embedded model.

Each case is one prompt, one way of sampling and a few methods, which go on side by side with plain
decoding, see longrun.py. The document is written again after every case, and a case that is there
is not run again. Medusa's cases want heads of its kind (train-heads --head-kind parallel).

    python -m benchmarks papers --text BOOK --medusa-heads HEADS --out benchmarks/results/cpu
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import tsjax
from benchmarks import report
from benchmarks.longrun import PENALTY, side_by_side
from benchmarks.published_rule import decode_as_published
from tsjax.decoding.method import Autoregressive, Method
from tsjax.host.paired_runs import PLAIN, Runs
from tsjax.host.prompts import encode_text

SCALE = 16  # the papers' lengths over these
PREFILLS = (128, 256, 512)  # 2,048, 4,096 and 8,192 there
NEW_TOKENS = 6_400  # 100K there, so that the five marks are 20K to 100K
SHORT = NEW_TOKENS // 5  # where a step takes long
DRAWN = dict(do_sample=True, temperature=1.0)
MIN_P, TOP_P, ETA = dict(min_p=0.1), dict(top_p=0.9), dict(eta_cutoff=2e-4)
TRUNCATIONS = {"top-p": TOP_P, "eta": ETA, "min-p": MIN_P}
WINDOWS = (20, 50, 128, 256, 512, 2048)
PUBLISHED_RULE = "published rule"


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of each method after one prompt.

    Attributes:
      name: unique.
      prompt: its tokens.
      settings: of sampling.
      methods: beside plain decoding.
      medusa: with Medusa's heads in place of the model's own.
    """

    name: str
    prompt: int
    settings: Mapping[str, Any]
    methods: Mapping[str, Method]
    new: int = NEW_TOKENS
    medusa: bool = False


def swift(prompt: int, **more: Any) -> tsjax.TokenSwift:
    """The paper's, whose draft cache is as large as the prompt."""
    return tsjax.TokenSwift(draft_budget=prompt, **more)


def cases() -> Iterator[Case]:
    """The most telling ones first. Those without methods tell what a text is like."""
    base = {**DRAWN, **MIN_P, **PENALTY}
    usual = PREFILLS[1]
    for prompt in (usual, PREFILLS[0], PREFILLS[2]):
        rivals = {
            "auto": tsjax.Auto(),
            "tokenswift": swift(prompt),
            "triforce": tsjax.TriForce(draft_budget=prompt),
            "triforce, chosen again": tsjax.TriForce(draft_budget=prompt, draft_refresh=None),
        }
        yield Case(f"prefill {prompt}", prompt, base, rivals)
        medusa = {"medusa": tsjax.Medusa(tree=(3, 3, 3))}
        yield Case(f"medusa, prefill {prompt}", prompt, base, medusa, medusa=True)
    for name in ("top-p", "eta"):
        settings = {**DRAWN, **TRUNCATIONS[name], **PENALTY}
        yield Case(name, usual, settings, {"tokenswift": swift(usual)})
    for name, truncation in TRUNCATIONS.items():
        uncoupled = swift(usual, noise_coupled=False)  # the published program's drafts
        methods = {"same drafts": uncoupled, PUBLISHED_RULE: uncoupled}
        settings = {**DRAWN, **truncation, **PENALTY}
        yield Case(f"rule, {name}", usual, settings, methods, new=SHORT)
    caches = {
        "full": swift(usual, num_ngrams=0, draft_choice="all"),
        "partial": swift(usual, num_ngrams=0, draft_refresh="never"),
        "dynamic": swift(usual, num_ngrams=0),
        "tree 3,3,3,3": swift(usual, num_ngrams=0, tree=(3, 3, 3, 3)),
    }
    yield Case("caches and trees", usual, base, caches)
    for name, truncation in TRUNCATIONS.items():
        methods = {"tokenswift": swift(usual)}
        yield Case(f"{name}, no penalty", usual, {**DRAWN, **truncation}, methods)
    for theta in (1.1, 1.3, 1.4, 1.5):
        yield Case(f"theta {theta}", usual, {**base, "repetition_penalty": theta}, {})
    for temperature in (0.4, 0.6, 0.8, 1.2):
        settings = {**DRAWN, **TOP_P, **PENALTY, "temperature": temperature}
        yield Case(f"temperature {temperature}", usual, settings, {"tokenswift": swift(usual)})
    for window in WINDOWS:
        settings = {**base, "repetition_window": window}
        yield Case(f"window {window}", usual, settings, {"tokenswift": swift(usual)})
    ngrams = {f"k = {count}": swift(usual, num_ngrams=count) for count in (1, 5, 10, 30)}
    yield Case("n-grams", usual, base, ngrams)
    for prompt in (128, 192, 320, 384, 448, 512):
        methods = {"dynamic": swift(prompt, num_ngrams=0)}
        yield Case(f"prefill {prompt}, no n-grams", prompt, base, methods)
    wide = {"tree 1,9,9,9": swift(usual, num_ngrams=0, tree=(1, 9, 9, 9))}
    yield Case("the widest tree", usual, base, wide, new=SHORT)


def main(argv: Sequence[str]) -> int | None:
    parser = report.parser_of("papers", __doc__)
    parser.add_argument("--model", default=tsjax.EMBEDDED)
    parser.add_argument("--text", type=Path, required=True, help="a book whose begin is the prompt")
    parser.add_argument("--medusa-heads", help="parallel heads; without them no case of Medusa")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in cases()])
    parser.add_argument("--new", type=int, default=NEW_TOKENS, help="tokens, for a quick try")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    model = tsjax.load(args.model)
    prompt = encode_text(model, args.text.read_text("utf-8"), "--text")
    longest = max(case.prompt for case in cases())
    if len(prompt) < longest:
        parser.error(f"--text {args.text}: {len(prompt)} tokens; at least {longest}")
    asked = {
        "model": Path(args.model).name, "text": args.text.name, "new_tokens": args.new,
        "seed": args.seed, "scale": SCALE,
    }  # fmt: skip
    document = report.series(args.out, "papers", asked, "cases")
    for case in cases():
        known = any(one["case"] == case.name for one in document["cases"])
        left_out = args.cases and case.name not in args.cases
        if known or left_out or (case.medusa and not args.medusa_heads):
            continue
        chosen = tsjax.load(args.model, heads=args.medusa_heads) if case.medusa else model
        entry = measured(case, chosen, prompt[: case.prompt], min(case.new, args.new), args.seed)
        document["cases"].append(entry)
        report.save(document, args.out, "papers")
        show(entry)
    report.write(document, args.out, "papers")
    return None if all(map(same, document["cases"])) else 1


def measured(case: Case, model: Any, prompt: Any, new: int, seed: int) -> dict[str, Any]:
    methods: dict[str, Method] = {PLAIN: Autoregressive(), **case.methods}
    tokens = dict.fromkeys(methods, new)
    programs = {PUBLISHED_RULE: _published} if PUBLISHED_RULE in methods else None
    runs = Runs(model, prompt, {**case.settings, "seed": seed}, methods, tokens, programs, True)
    *_, found = side_by_side(runs, new)
    settings = dict(case.settings)
    return {"case": case.name, "prompt": case.prompt, "settings": settings, **found}


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def _published(params, state, num_steps, *, cfg):
    return decode_as_published(params, state, num_steps, cfg=cfg)


def same(entry: Mapping[str, Any]) -> bool:
    rows = entry["methods"].items()
    return all(row["same_tokens"] for name, row in rows if name != PUBLISHED_RULE)


def show(entry: Mapping[str, Any]) -> None:
    for name, row in entry["methods"].items():
        other = "" if row["same_tokens"] else "  OTHER TOKENS"
        print(
            f"{entry['case']:28}{name:24}{row['ms_per_token'][-1]:7.2f} ms/token "
            f"{row['speedup'][-1]:6.2f}x  alpha {row['alpha']:.3f}{other}",
            file=sys.stderr,
            flush=True,
        )

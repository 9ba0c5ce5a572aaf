# SPDX-License-Identifier: Apache-2.0
"""TokenSwift's tables again on a real model, at the lengths that a CPU allows.

Each case is one way of sampling and a few methods, which go on side by side with plain decoding
after the same prompt: always the one that has said least, so that each part of the text is timed
within minutes on all of them. The end of a text is barred. The document is written again after
every case, and a case that is there is not run again.

    python -m benchmarks papers --model FILE --heads HEADS --out benchmarks/results/cpu

HEADS are three heads of TokenSwift's kind, made by `tsjax train-heads`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tsjax
from benchmarks import report, text_figures
from benchmarks.published_rule import decode_as_published
from benchmarks.real_models import PROMPTS, described
from tsjax.base.input_files import read_json
from tsjax.decoding.method import Autoregressive, Method
from tsjax.host.chat import chat_prompt
from tsjax.measure.paired_runs import PLAIN, Runs, parted_at, times_by_position

BUDGET = 256  # slots of the draft cache: 4,096 in the paper
NEW_TOKENS = 1_280  # 100K in the paper, so that the five marks are 20K to 100K
MARKS = 5
SHORT = NEW_TOKENS // MARKS  # where a step takes long
PENALTY = dict(repetition_penalty=1.2, repetition_window=1024)
DRAWN = dict(do_sample=True, temperature=1.0)
MIN_P, TOP_P, ETA = dict(min_p=0.1), dict(top_p=0.9), dict(eta_cutoff=2e-4)
TRUNCATIONS = {"top-p": TOP_P, "eta": ETA, "min-p": MIN_P}
USUAL = "min-p"
PUBLISHED_RULE = "published rule"


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of each method with one way of sampling.

    Attributes:
      name: unique.
      methods: beside plain decoding.
    """

    name: str
    settings: Mapping[str, Any]
    methods: Mapping[str, Method]
    new: int = NEW_TOKENS


def swift(**more: Any) -> tsjax.TokenSwift:
    return tsjax.TokenSwift.paper(draft_budget=BUDGET, **more)


def cases() -> Iterator[Case]:
    """The most telling ones first. Those without methods tell what a text is like."""
    base = {**DRAWN, **MIN_P, **PENALTY}
    rivals = {
        "auto": tsjax.Auto(),
        "tokenswift": swift(),
        "triforce": tsjax.methods.TriForce(draft_budget=BUDGET),
        "triforce, chosen again": tsjax.methods.TriForce(draft_budget=BUDGET, draft_refresh=None),
    }
    yield Case(USUAL, base, rivals)
    caches = {
        "full": swift(num_ngrams=0, draft_choice="all"),
        "partial": swift(num_ngrams=0, draft_refresh="never"),
        "dynamic": swift(num_ngrams=0),
        "tree 3,3,3,3": swift(num_ngrams=0, tree=(3, 3, 3, 3)),
    }
    yield Case("caches and trees", base, caches)
    for name in ("top-p", "eta"):
        settings = {**DRAWN, **TRUNCATIONS[name], **PENALTY}
        yield Case(name, settings, {"tokenswift": swift()})
    uncoupled = swift(noise_coupled=False)  # the published program's drafts
    methods = {"same drafts": uncoupled, PUBLISHED_RULE: uncoupled}
    yield Case("rule, top-p", {**DRAWN, **TOP_P, **PENALTY}, methods, new=SHORT)
    for name, truncation in TRUNCATIONS.items():
        yield Case(f"{name}, no penalty", {**DRAWN, **truncation}, {})
    for theta in (1.1, 1.3, 1.4, 1.5):
        yield Case(f"theta {theta}", {**base, "repetition_penalty": theta}, {})


def main(argv: Sequence[str]) -> int | None:
    parser = report.parser_of("papers", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a folder")
    parser.add_argument("--heads", type=Path, required=True, help="what train-heads has saved")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in cases()])
    parser.add_argument("--new", type=int, default=NEW_TOKENS, help="tokens, for a quick try")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    model = tsjax.load(args.model, heads=args.heads)
    said = read_json(PROMPTS)["kinds"]["story"][-1]
    prompt = np.asarray(chat_prompt(model, [{"role": "user", "content": said}]))
    trained = read_json(args.heads / "summary.json")
    rows = [one for one in trained["evaluation"] if one["head"]]
    heads = {
        "top1": [one["top1"] for one in rows],
        "counts": [max(one["skip_bigram"][0], one["unigram"][0]) for one in rows],
        **{name: trained["settings"][name] for name in ("batch_size", "sequence_length")},
        "steps": trained["steps"],
    }  # fmt: skip
    asked = {
        "model": described(args.model), "dtype": model.cfg.dtype, "heads": heads, "prompt": said,
        "prompt_tokens": len(prompt), "new_tokens": args.new, "seed": args.seed,
    }  # fmt: skip
    document = report.series(args.out, "papers", asked, "cases")
    for case in cases():
        known = any(one["case"] == case.name for one in document["cases"])
        if known or (args.cases and case.name not in args.cases):
            continue
        entry = measured(case, model, prompt, min(case.new, args.new), args.seed)
        document["cases"].append(entry)
        report.save(document, args.out, "papers")
        show(entry)
    report.write(document, args.out, "papers")
    return None if all(map(same, document["cases"])) else 1


def measured(case: Case, model: Any, prompt: Any, new: int, seed: int) -> dict[str, Any]:
    methods: dict[str, Method] = {PLAIN: Autoregressive(), **case.methods}
    tokens = dict.fromkeys(methods, new)
    programs = {PUBLISHED_RULE: _published} if PUBLISHED_RULE in methods else None
    barred = {"seed": seed, "suppress_tokens": tuple(model.stop_ids)}
    runs = Runs(model, prompt, {**case.settings, **barred}, methods, tokens, programs)
    found = told(runs, side_by_side(runs), [new * (mark + 1) // MARKS for mark in range(MARKS)])
    return {"case": case.name, "settings": dict(case.settings), **found}


def side_by_side(runs: Runs) -> dict[str, dict[str, Any]]:
    """What each method has said and took in the end; the one that has said least goes on."""
    going = {name: runs.chunks(name) for name in runs.requests}
    latest: dict[str, dict[str, Any]] = {name: {} for name in going}
    waiting = set(going)
    while waiting:
        name = min(waiting, key=lambda one: len(latest[one].get("tokens", ())))
        found = next(going[name], None)
        if found is None:
            waiting.remove(name)
        else:
            latest[name] = found
    return latest


def told(runs: Runs, latest: Mapping[str, dict[str, Any]], marks: Sequence[int]) -> dict[str, Any]:
    """The figures of all methods until each mark."""
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
        "marks": list(marks),
        "text": [text_figures.figures(text[:mark].tolist()) for mark in marks],
        "sha256": hashlib.sha256(ids[: marks[-1]].tobytes()).hexdigest(),
        "methods": rows,
    }


def at_marks(made: Sequence[tuple[int, int, float]], marks: Sequence[int], index: int):
    """Steps (1) or seconds (2) until each mark; a chunk's count as even."""
    return np.interp(marks, [one[0] for one in made], [one[index] for one in made]).tolist()


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def _published(params, state, num_steps, at_least, *, cfg):
    del at_least  # one row alone
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

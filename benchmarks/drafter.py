# SPDX-License-Identifier: Apache-2.0
"""How far drafts of a trained one-layer drafter come, by kind of prompt and place in the output.

The model answers the reporting half of prompts.json; along the answers the drafter drafts four
tokens in a row, and steps go from what was right to the token after it, as in a run, but it learns
nothing on the way. Then whole runs go past the end of a text, learning and not. What a chain of
drafts takes is measured as for the table of costs; no run is timed: `real_models --drafter` does
that.

    python -m benchmarks drafter --model smollm2-135m.gguf --drafter drafter --texts texts \\
        --out benchmarks/results/cpu

Texts stay in the folder: what was ended goes on, and another drafter is asked about the same.
`--answers 0 --long 0` measures what a chain takes, and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tsjax
from benchmarks import report
from benchmarks.real_models import PROMPTS, described, free_rows
from tsjax.base.input_files import read_json
from tsjax.host.chat import chat_prompt
from tsjax.host.costs import costs_of
from tsjax.host.measuring import measure
from tsjax.measure.paired_runs import PLAIN, Runs, times_by_position
from tsjax.measure.timing import ratios, summary
from tsjax.training.drafter_evaluation import evaluated
from tsjax.training.drafter_run import TEXT
from tsjax.training.own_text import Questions, read_own_text, write_own_text
from tsjax.training.saved import SUMMARY
from tsjax.training.tapped_texts import TappedTexts

LONG_KINDS = "story", "code"  # what long runs begin with
STEP_TOKENS, DRAFTS = 1024, 4
PRICED_CONTEXT, TABLES = 512, 5


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("drafter", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a folder")
    parser.add_argument("--drafter", type=Path, required=True, help="of train-drafter")
    parser.add_argument("--texts", type=Path, required=True, help="folder that receives texts")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--answers", type=int, default=36_000, help="tokens of answers; 0: none")
    parser.add_argument("--long", type=int, default=8000, help="tokens of a long run; 0: none")
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args(argv)
    model = tsjax.load(args.model, dtype=args.dtype, drafter=args.drafter)
    assert model.cfg.drafter is not None
    document: dict[str, Any] = {
        "model": described(args.model), "dtype": args.dtype, "temperature": args.temperature,
        "shape": dataclasses.asdict(dataclasses.replace(model.cfg.drafter, accuracy=())),
        "training": training_of(args.drafter), "price": priced(model),
    }  # fmt: skip
    sampling = tsjax.GenerationConfig(do_sample=True, temperature=args.temperature)
    if args.answers:
        document["answers"] = measured(model, args.texts, args.answers, sampling)
        show(document["answers"])
    if args.long:
        document["along"] = along(model, args.long, sampling)
    what = "drafter" if args.answers or args.long else "drafter-price"
    report.write(document, args.out, f"{what}-{args.model.stem}-{args.dtype}")


def priced(model: tsjax.Model) -> dict[str, Any]:
    """A chain of drafts beside a plain step, by several tables of costs."""
    tables = [measure(model.params, model.cfg, 1, 2 * PRICED_CONTEXT) for _ in range(TABLES)]
    chains = [DRAFTS * table.one_layer for table in tables]
    plain = [table.plain(PRICED_CONTEXT) for table in tables]
    found = {
        "context": PRICED_CONTEXT,
        "chain_ms": summary([1e3 * seconds for seconds in chains]),
        "plain_ms": summary([1e3 * seconds for seconds in plain]),
        "in_plain_steps": ratios(chains, plain),
    }
    print(f"a chain of {DRAFTS}: {found}", flush=True)
    return found


def training_of(drafter: Path) -> dict[str, Any]:
    """What the training said of itself at its end."""
    summary = read_json(drafter / SUMMARY)
    last, texts = summary["last"], read_own_text(os.fspath(drafter / TEXT))
    return {
        "text_tokens": sum(len(text.ids) - text.prompt for text in texts),
        "settings": summary["settings"], "steps": summary["steps"], "seconds": last["elapsed"],
        "held_out": summary["evaluation"],
    }  # fmt: skip


def measured(
    model: tsjax.Model, folder: Path, tokens: int, sampling: tsjax.GenerationConfig
) -> dict[str, Any]:
    every = read_json(PROMPTS)["kinds"]
    half = {kind: prompts[len(prompts) // 2 :] for kind, prompts in every.items()}
    texts = write_own_text(
        model, str(folder), Questions(half, {}), sampling=sampling, tokens=tokens
    )
    settings = tsjax.training.DrafterTraining(temperature=sampling.temperature)
    tapped = TappedTexts(model, model.cfg, texts, STEP_TOKENS, settings.seed)
    assert model.params.drafter is not None
    found = evaluated(model.params.drafter, tapped, settings)
    written = sum(len(text.ids) - text.prompt for text in texts)
    return {"texts": len(texts), "tokens": written, **found}


def along(model: tsjax.Model, new: int, sampling: tsjax.GenerationConfig) -> list[dict[str, Any]]:
    """Whole runs past the end of a text, all rows judged: tokens of a step by place."""
    free = free_rows(costs_of(model.params, model.cfg, 1, new))
    tree = functools.partial(
        tsjax.LikelyTree, width=DRAFTS + 1, pass_widths=(), places=0, drafter=DRAFTS, costs=free
    )
    methods: dict[str, Any] = {"learning": tree(), "not learning": tree(adapt=False)}
    methods[PLAIN] = tsjax.methods.Autoregressive()
    how = {"do_sample": True, "temperature": sampling.temperature}
    rows = []
    for kind in LONG_KINDS:
        prompt = read_json(PROMPTS)["kinds"][kind][-1]
        ids = np.asarray(chat_prompt(model, [{"role": "user", "content": prompt}]))
        most = min(new, model.cfg.max_positions - len(ids))
        runs = Runs(model, ids, how, methods, dict.fromkeys(methods, most))
        found = {name: runs.run(name) for name in methods}
        for name, one in found.items():
            same = one["tokens"].tolist() == found[PLAIN]["tokens"].tolist()
            places = times_by_position([one["made"]])
            del places["ms_per_token"]  # with free rows it is no time that a user would see
            rows.append({"text": kind, "method": name, "same_tokens": same, **places})
            print(rows[-1], flush=True)
    return rows


def show(found: dict[str, Any]) -> None:
    print(f"{found['texts']} answers, {found['tokens']:,} tokens")
    for place, one in [("all", found), *found["by"].items()]:
        right = " ".join(f"{share:.2f}" for share in one["right"])
        print(f"  {place:12}{one['tokens_per_step']:6.2f} tokens a step of {one['chains']:6,}, "
              f"drafts right {right}", flush=True)  # fmt: skip

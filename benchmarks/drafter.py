# SPDX-License-Identifier: Apache-2.0
"""How far drafts of a trained one-layer drafter come, by kind of prompt and place in the output.

The model answers the reporting half of prompts.json, and writes long texts past their ends. Along
both the drafter drafts four tokens in a row, and steps go from what was right to the token after
it, as in a run. No step is timed: `real_models --drafter` does that.

    python -m benchmarks drafter --model smollm2-135m.gguf --drafter drafter --texts texts \\
        --out benchmarks/results/cpu

Texts stay in the folder: what was ended goes on, and another drafter is asked about the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tsjax
from benchmarks import report
from benchmarks.real_models import PROMPTS, described
from tsjax.input_files import read_json
from tsjax.training.drafter_evaluation import evaluated
from tsjax.training.own_text import Questions, write_own_text
from tsjax.training.saved import SUMMARY
from tsjax.training.tapped_texts import TappedTexts

LONG_KINDS = "story", "code", "reasoning"  # what long texts begin with
STEP_TOKENS = 1024


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("drafter", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a folder")
    parser.add_argument("--drafter", type=Path, required=True, help="of train-drafter")
    parser.add_argument("--texts", type=Path, required=True, help="folder that receives texts")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--answers", type=int, default=36_000, help="tokens of answers")
    parser.add_argument("--long", type=int, default=48_000, help="tokens of long texts; 0: none")
    parser.add_argument("--longest", type=int, default=8000, help="tokens of a long text")
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args(argv)
    model = tsjax.load(args.model, dtype=args.dtype, drafter=args.drafter)
    assert model.cfg.drafter is not None
    document: dict[str, Any] = {
        "model": described(args.model), "dtype": args.dtype, "temperature": args.temperature,
        "shape": dataclasses.asdict(dataclasses.replace(model.cfg.drafter, accuracy=())),
        "training": training_of(args.drafter),
    }  # fmt: skip
    answers, lengths = tsjax.GenerationConfig(do_sample=True, temperature=args.temperature), ()
    document["answers"] = measured(model, args.texts / "answers", args.answers, answers, lengths)
    if args.long:
        endless = dataclasses.replace(answers, eos_token_id=())
        lengths = (args.longest,)
        document["long"] = measured(model, args.texts / "long", args.long, endless, lengths)
    for name in ("answers", "long"):
        if name in document:
            show(name, document[name])
    report.write(document, args.out, f"drafter-{args.model.stem}-{args.dtype}")


def training_of(drafter: Path) -> dict[str, Any]:
    """What the training said of itself at its end."""
    summary = read_json(drafter / SUMMARY)
    last = summary["last"]
    return {
        "settings": summary["settings"], "steps": summary["steps"], "seconds": last["elapsed"],
        "held_out": summary["evaluation"],
    }  # fmt: skip


def measured(
    model: tsjax.Model, folder: Path, tokens: int, sampling: tsjax.GenerationConfig,
    lengths: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    every = read_json(PROMPTS)["kinds"]
    kinds = LONG_KINDS if lengths else tuple(every)
    asked = Questions({kind: every[kind][len(every[kind]) // 2 :] for kind in kinds}, {})
    texts = write_own_text(
        model, str(folder), asked, sampling=sampling, tokens=tokens, lengths=lengths
    )
    settings = tsjax.DrafterTraining(temperature=sampling.temperature)
    tapped = TappedTexts(model, model.cfg, texts, STEP_TOKENS, settings.seed)
    assert model.params.drafter is not None
    found = evaluated(model.params.drafter, tapped, settings)
    written = sum(len(text.ids) - text.prompt for text in texts)
    return {"texts": len(texts), "tokens": written, **found}


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['texts']} texts, {found['tokens']:,} tokens")
    for place, one in [("all", found), *found["by"].items()]:
        right = " ".join(f"{share:.2f}" for share in one["right"])
        print(f"  {place:12}{one['tokens_per_step']:6.2f} tokens a step of {one['chains']:6,}, "
              f"drafts right {right}")  # fmt: skip

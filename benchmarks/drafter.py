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
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from benchmarks import report
from benchmarks.real_models import PROMPTS, described
from tsjax.decoding.programs import compiler_options
from tsjax.decoding.sampling import step_noise
from tsjax.host.chat import chat_prompt
from tsjax.host.costs import costs_of
from tsjax.host.paired_runs import PLAIN, Runs, times_by_position
from tsjax.host.timing import interleaved, ratios, summary
from tsjax.input_files import read_json
from tsjax.methods.likely_sources import CHILDREN
from tsjax.methods.one_layer import draft_chain
from tsjax.training.drafter_evaluation import evaluated
from tsjax.training.drafter_run import TEXT
from tsjax.training.own_text import Questions, read_own_text, write_own_text
from tsjax.training.saved import SUMMARY
from tsjax.training.tapped_texts import TappedTexts

LONG_KINDS = "story", "code"  # what long runs begin with
STEP_TOKENS, DRAFTS, CONTEXT = 1024, 4, 512


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("drafter", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a folder")
    parser.add_argument("--drafter", type=Path, required=True, help="of train-drafter")
    parser.add_argument("--texts", type=Path, required=True, help="folder that receives texts")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    text = "tokens of answers; 0 times drafts instead"
    parser.add_argument("--answers", type=int, default=36_000, help=text)
    parser.add_argument("--long", type=int, default=8000, help="tokens of a long run; 0: none")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--rounds", type=int, default=50, help="of the timing")
    args = parser.parse_args(argv)
    model = tsjax.load(args.model, dtype=args.dtype, drafter=args.drafter)
    assert model.cfg.drafter is not None
    document: dict[str, Any] = {
        "model": described(args.model), "dtype": args.dtype, "temperature": args.temperature,
        "shape": dataclasses.asdict(dataclasses.replace(model.cfg.drafter, accuracy=())),
        "training": training_of(args.drafter),
    }  # fmt: skip
    sampling = tsjax.GenerationConfig(do_sample=True, temperature=args.temperature)
    if not args.answers:
        document["cost"] = chain_cost(model, args.rounds)
        report.write(document, args.out, f"drafter-cost-{args.model.stem}-{args.dtype}")
        return
    document["answers"] = measured(model, args.texts, args.answers, sampling)
    show(document["answers"])
    if args.long:
        document["along"] = along(model, args.long, sampling)
    report.write(document, args.out, f"drafter-{args.model.stem}-{args.dtype}")


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
    settings = tsjax.DrafterTraining(temperature=sampling.temperature)
    tapped = TappedTexts(model, model.cfg, texts, STEP_TOKENS, settings.seed)
    assert model.params.drafter is not None
    found = evaluated(model.params.drafter, tapped, settings)
    written = sum(len(text.ids) - text.prompt for text in texts)
    return {"texts": len(texts), "tokens": written, **found}


def along(model: tsjax.Model, new: int, sampling: tsjax.GenerationConfig) -> list[dict[str, Any]]:
    """Whole runs past the end of a text, all rows judged: tokens of a step by place."""
    free = costs_of(model.params, model.cfg, 1, CONTEXT)
    row = free.passes[0][1]
    free = free._replace(passes=((1, row), (2, row)), one_layer=0.0)
    tree = functools.partial(
        tsjax.LikelyTree, width=DRAFTS + 1, pass_widths=(), places=0, drafter=DRAFTS, costs=free
    )
    methods = {"learning": tree(), "not learning": tree(adapt=False), PLAIN: tsjax.Autoregressive()}
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


def chain_cost(model: tsjax.Model, rounds: int) -> dict[str, Any]:
    """Milliseconds of a greedy plain step and of four drafts in a row, two fresh tokens that they
    read first included, after some hundred tokens."""
    costs = costs_of(model.params, model.cfg, 1, CONTEXT)
    method = tsjax.LikelyTree(places=0, drafter=DRAFTS, costs=costs)
    prompt = np.asarray([np.resize(model.tokenizer("A long story. ")["input_ids"], CONTEXT)])
    states = {}
    for name, one in {"plain step": tsjax.Autoregressive(), "chain": method}.items():
        cfg = tsjax.DecodeConfig(model.cfg, one)
        state = tsjax.init_state(
            prompt, [CONTEXT], cfg=cfg, capacity=2 * CONTEXT, max_length=[2 * CONTEXT],
        )  # fmt: skip
        state = tsjax.prefill(model.params, state, width=64, cfg=cfg)
        states[name] = cfg, tsjax.decode_step(model.params, state, cfg=cfg)

    def chain(params, state):
        noise = step_noise(
            state.row_key, state.length, DRAFTS, model.cfg.vocab_size, state.sampling
        )
        memory = state.memory.layer.replace(fresh=state.memory.layer.fresh + 1)
        always = lambda depth, ranked: jnp.bool_(True)  # noqa: E731
        _, ranked, _ = draft_chain(
            model.cfg, params, state, memory, noise, DRAFTS, CHILDREN, always
        )
        return [one.tokens for one in ranked]

    def step(params, state):
        new = tsjax.decode_step(params, state, cfg=states["plain step"][0])
        return new.length, new.tokens

    options = compiler_options(jax.default_backend(), model.cfg.dtype)
    calls = {
        name: functools.partial(
            jax.jit(call, compiler_options=options), model.params, states[name][1]
        )
        for name, call in {"plain step": step, "chain": chain}.items()
    }
    seconds = interleaved(calls, rounds).seconds
    ms = {name: summary([1e3 * one for one in found]) for name, found in seconds.items()}
    return {"ms": ms, "ratio": ratios(seconds["chain"], seconds["plain step"])}


def show(found: dict[str, Any]) -> None:
    print(f"{found['texts']} answers, {found['tokens']:,} tokens")
    for place, one in [("all", found), *found["by"].items()]:
        right = " ".join(f"{share:.2f}" for share in one["right"])
        print(f"  {place:12}{one['tokens_per_step']:6.2f} tokens a step of {one['chains']:6,}, "
              f"drafts right {right}", flush=True)  # fmt: skip

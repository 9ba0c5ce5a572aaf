# SPDX-License-Identifier: Apache-2.0
"""A real model on a lent machine, in minutes: equality, time by context, a very long text.

Cases run in this order, each written to the file when it is done; none begins after `--minutes`:

1. five methods write 2,000 sampled tokens and are compared with plain decoding;
2. plain decoding, Auto, the paper's settings and transformers after prompts of several lengths;
3. 100,000 tokens after a short prompt, plain and Auto, by output position; where the model was
   trained for fewer positions, with YaRN, as Qwen2.5's card says.

A file that came in pieces is joined first, in the order of their names:

    python -m benchmarks real_long --model pieces/* --out benchmarks/results/h200 --minutes 8

What is run on a CPU to see that it works: `--contexts 256 --equal 64 --long 512`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tsjax
from benchmarks import report
from benchmarks.real_models import PROMPTS, SETTINGS
from benchmarks.text_figures import figures
from tools.facts import sha256_of
from tsjax.base.input_files import read_json
from tsjax.base.model_config import RopeConfig
from tsjax.files.tokenizer import encode
from tsjax.host.chat import chat_prompt
from tsjax.host.costs import costs_of
from tsjax.measure.paired_runs import PLAIN, Runs, compared, parted_at, times_by_position
from tsjax.measure.peers import PEER_TOKENS, Peer, PeerRuns

YARN_FACTOR = 4.0  # by the card of Qwen2.5, from 32K to 128K
EQUAL: dict[str, Any] = {
    "auto": tsjax.Auto(),
    "tree of the text": tsjax.LikelyTree(width=8, pass_widths=(1, 2, 4)),
    "int8 passes": tsjax.LikelyTree(width=8, draft_passes=2, draft_weights="int8"),
    "paper": tsjax.TokenSwift.paper(),
    "magicdec": tsjax.methods.MagicDec(),
}
TIMED: dict[str, Any] = {
    PLAIN: tsjax.methods.Autoregressive(), "auto": tsjax.Auto(),
    "tree of the text": EQUAL["tree of the text"], "paper": tsjax.TokenSwift.paper(),
}  # fmt: skip


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("real_long", __doc__)
    parser.add_argument(
        "--model", type=Path, nargs="+", required=True, help="a GGUF file, or pieces"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--equal", type=int, default=2000, help="tokens that are compared")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192, 30_000])
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of a timed run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=100_000, help="tokens of the long text")
    parser.add_argument("--name", help="of the result's file, after 'real-long-'")
    report.add_budget(parser)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = joined(args.model, Path(folder))
        name = f"real-long-{args.name or args.model[0].stem}"
        run(path, name, args)


def joined(pieces: Sequence[Path], folder: Path) -> Path:
    if len(pieces) == 1:
        return pieces[0]
    whole = folder / "joined.gguf"
    with open(whole, "wb") as out:
        for piece in sorted(pieces):
            with open(piece, "rb") as part:
                shutil.copyfileobj(part, out)
    return whole


def run(path: Path, name: str, args: Any) -> None:
    budget = report.Budget(args.minutes)
    model = tsjax.load(path, dtype=args.dtype)
    document: dict[str, Any] = {
        **report.facts(),
        "model": {
            "name": f"{name.removeprefix('real-long-')}.gguf", "sha256": sha256_of(path),
            "parameters": model.num_params,
        },
        "dtype": args.dtype, "cases": [], "left_out": [],
    }  # fmt: skip
    cases: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("equality", functools.partial(equality, model, args.equal))
    ]
    for context in args.contexts:
        if context + args.tokens <= model.cfg.max_positions:
            timed = functools.partial(by_context, model, path, context, args, document["left_out"])
            cases.append((f"context {context}", timed))
    if args.long:
        cases.append(("long", functools.partial(long_text, model, args.long)))
    for case, call in cases:
        if budget.is_used_up:
            document["left_out"].append({"case": case, "error": "the time was over"})
            continue
        try:
            document["cases"].append({"case": case, **call()})
        except Exception as error:  # the others are worth their minutes
            document["left_out"].append({"case": case, "error": report.first_line(error)})
        report.save(document, args.out, name)
        print(case, document["cases"][-1:], document["left_out"][-1:], f"{budget.used:.0f} s")
    document["costs"] = costs_of(model.params, model.cfg, 1, max(args.contexts))
    report.write(document, args.out, name)


def story(model: tsjax.Model) -> np.ndarray:
    prompt = read_json(PROMPTS)["kinds"]["story"][-1]
    return np.asarray(chat_prompt(model, [{"role": "user", "content": prompt}]))


def equality(model: tsjax.Model, new: int) -> dict[str, Any]:
    """Where the first token that differs is, if any does."""
    how = dict(max_new_tokens=new, eos_token_id=(), seed=1, **SETTINGS["paper"])
    plain = tsjax.generate(model, story(model), **how).tokens[0]
    found = {}
    for name, method in EQUAL.items():
        result = tsjax.generate(model, story(model), method=method, **how)
        found[name] = {
            "parted_at": parted_at(result.tokens[0], plain),
            "tokens_per_step": result.stats.tokens_per_step,
        }
    return {"new_tokens": new, "text": figures(plain.tolist()), "methods": found}


def by_context(
    model: tsjax.Model, path: Path, context: int, args: Any, left_out: list
) -> dict[str, Any]:
    """After the beginning of this project's documentation."""
    pages = "\n\n".join(
        page.read_text("utf-8") for page in sorted((report.ROOT / "docs").glob("*.md"))
    )
    ids = np.asarray(encode(model.tokenizer, pages)[:context], np.int32)
    new = dict.fromkeys(TIMED, args.tokens)
    ours = Runs(model, ids, SETTINGS["paper"], TIMED, new)
    calls: dict[str, Any] = {name: functools.partial(ours.run, name) for name in TIMED}
    try:
        theirs = PeerRuns(Peer(str(path.resolve()), args.dtype), ids, min(args.tokens, PEER_TOKENS))
        calls["torch"] = functools.partial(theirs.run, SETTINGS["paper"])
    except Exception as error:  # there may be no torch, or no accelerate
        left_out.append({"case": f"torch at {context}", "error": report.first_line(error)})
    found = report.interleaved(calls, args.rounds, keep_errors=True)
    for name, error in found.failed.items():
        left_out.append({"case": f"{name} at {context}", "error": report.first_line(error)})
    rows = compared(ours, found.results)
    for row in rows:
        row.pop("options", None)
    return {"context": len(ids), "new_tokens": args.tokens, "rows": rows}


def for_long_texts(model: tsjax.Model, length: int) -> tsjax.Model:
    """With YaRN, where the model was trained for fewer positions."""
    if length <= model.cfg.max_positions:
        return model
    trained = model.cfg.max_positions
    rope = RopeConfig(
        kind="yarn", theta=model.cfg.rope.theta, factor=YARN_FACTOR,
        original_max_positions=trained, attention_factor=0.1 * math.log(YARN_FACTOR) + 1,
    )  # fmt: skip
    longest = int(trained * YARN_FACTOR)
    return model.replace(cfg=dataclasses.replace(model.cfg, rope=rope, max_positions=longest))


def long_text(model: tsjax.Model, new: int) -> dict[str, Any]:
    prompt = story(model)
    stretched = for_long_texts(model, len(prompt) + new)
    methods = {name: TIMED[name] for name in (PLAIN, "auto")}
    runs = Runs(stretched, prompt, SETTINGS["paper"], methods, dict.fromkeys(methods, new))
    found = {name: [runs.run(name)] for name in methods}
    rows = []
    for row in compared(runs, found):
        row.pop("options", None)
        (one,) = found[row["method"]]
        row["seconds"], row["by_position"] = one["made"][-1][2], times_by_position([one["made"]])
        rows.append(row)
    return {
        "new_tokens": new, "rope": dataclasses.asdict(stretched.cfg.rope),
        "text": figures(found[PLAIN][0]["tokens"].tolist()), "rows": rows,
    }  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""What pruned prompts cost on text: perplexity of what follows, and lines of code to complete.

    python -m benchmarks longcontext_texts --model MODEL --books FOLDER --out OUT

Perplexity: the model reads --prompt tokens of a text with each method, and is then told the next
--suffix tokens one by one; their mean loss has no noise of a task in it. Lines of code: a prompt
ends with a line of a file of --code (by default Python's own library), the model writes the next
one greedily, and what counts is how similar the two are (0 to 1).
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from benchmarks import report
from benchmarks.longcontext.longbench import edit_similarity
from benchmarks.longcontext.rivals import Rival, rivals
from benchmarks.longcontext.verdict import interval
from tools.embedded_model.texts import read_books
from tsjax.decoding.reading import prefill
from tsjax.decoding.start import init_state
from tsjax.decoding.state import Verdict
from tsjax.decoding.step import commit
from tsjax.decoding.verification import accept
from tsjax.files.tokenizer import encode
from tsjax.host.prompts import tokenizer_of
from tsjax.lazy.revival import run_root
from tsjax.lazy.stages import note_committed
from tsjax.model.passes import run_rows
from tsjax.model.transformer import final_norm, unembed

WIDTH = 512  # prompt tokens of a pass


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnums=1)
def _told(params, state, tokens, *, cfg):
    """A step of plain decoding that is told its token [B]: the state, and the token's loss [B]."""
    plan = cfg.prefill and cfg.prefill.plan(cfg.model)
    if plan:
        state, rows = run_root(plan, params, state)
    else:
        root, position = state.root[:, None], state.kv.length[:, None]
        itself = jnp.ones((1, 1), bool)
        rows = run_rows(params.model, state.kv, root, position, itself, cfg=cfg.model)
    logits = unembed(
        params.model, final_norm(params.model, rows.hidden, cfg=cfg.model), cfg=cfg.model
    )
    logits = logits[:, 0].astype(jnp.float32)
    said = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    _, tree = cfg.method.draft(cfg.model, params, state, None)
    verdict = Verdict(target=tokens[:, None], rows=rows)
    after = commit(state, tree, verdict, accept(tree, verdict.target))
    if plan:
        after = after.replace(prompt=note_committed(plan, state, 0, after=after.kv.length))
    return after, jax.nn.logsumexp(logits, axis=-1) - said


_prefill = jax.jit(prefill, static_argnames=("width", "cfg"), donate_argnums=1)


def suffix_losses(model: tsjax.Model, prompts, suffixes, lazy: tsjax.LazyPrefill | None):
    """Minus the log-probability of each token of suffixes [B, T] after prompts [B, P]: [B, T]."""
    prompts, suffixes = np.asarray(prompts, np.int32), np.asarray(suffixes, np.int32)
    (rows, count), more = prompts.shape, suffixes.shape[1]
    lazy = lazy and lazy.resolved(model.cfg, count)
    cfg = tsjax.DecodeConfig(model=model.cfg, prefill=lazy)
    capacity = -(-count // WIDTH) * WIDTH + more + 1 + cfg.rows_ahead
    state = init_state(
        prompts,
        np.full(rows, count),
        cfg=cfg,
        capacity=capacity,
        max_length=[count + more + 1] * rows,
    )
    state = _prefill(model.params, state, width=WIDTH, cfg=cfg)
    losses = []
    for tokens in suffixes.T:
        state, loss = _told(model.params, state, tokens, cfg=cfg)
        losses.append(np.asarray(loss))
    return np.stack(losses, axis=1)


def code_lines(folder: Path, samples: int, seed: int) -> list[tuple[str, str]]:
    """(the text of a file up to the end of a line, the next line), of files drawn at random."""
    files = sorted(folder.glob("*.py"))
    if not files:
        raise ValueError(f"--code {folder} is not valid: it holds no *.py file")
    rng, found = np.random.default_rng(seed), []
    for index in rng.permutation(len(files)):
        lines = files[index].read_text(errors="replace").splitlines()
        wanted = [i for i in range(len(lines) // 2, len(lines)) if len(lines[i].strip()) > 8]
        if wanted:
            at = int(rng.choice(wanted))
            found.append(("\n".join(lines[:at]) + "\n", lines[at]))
        if len(found) == samples:
            break
    return found


def complete(model: tsjax.Model, rival: Rival, text: str, prompt_tokens: int) -> str:
    ids = np.asarray(encode(model.tokenizer, text[-16 * prompt_tokens :]))[-prompt_tokens:]
    if rival.compress is not None:
        ids = rival.compress(model, ids)
    result = tsjax.generate(
        model, ids, max_new_tokens=32, stop_strings=["\n"], prefill=rival.prefill
    )
    return str(result.text)


def windows(model: tsjax.Model, folder: Path, samples: int, length: int, seed: int) -> np.ndarray:
    """[samples, length] tokens from the ends of books, which the embedded model has not seen."""
    ends = [np.asarray(encode(model.tokenizer, book.held_out)) for book in read_books(folder)]
    longest = max(map(len, ends))
    if longest < length:
        raise ValueError(
            f"--prompt and --suffix of {length} tokens are not valid: the longest end of a text in "
            f"--books {folder} has {longest}"
        )
    ends = [ids for ids in ends if len(ids) >= length]
    rng, found = np.random.default_rng(seed), []
    for _ in range(samples):
        ids = ends[int(rng.integers(len(ends)))]
        start = int(rng.integers(len(ids) - length + 1))
        found.append(ids[start : start + length])
    return np.stack(found)


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("longcontext_texts", __doc__)
    parser.add_argument("--model", default=tsjax.EMBEDDED)
    parser.add_argument("--books", type=Path, help="a folder of *.txt, of which the last 2%% count")
    parser.add_argument("--code", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--suffix", type=int, default=256, help="tokens")
    parser.add_argument("--samples", type=int, default=32, help="texts")
    parser.add_argument("--lines", type=int, default=0, help="lines of code")
    parser.add_argument("--methods", nargs="+", help="some of those of longbench")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.books is None and not args.lines:
        parser.error("nothing to do: give --books, or --lines of code to complete")
    for folder in (args.books, args.code):
        if folder is not None and not folder.is_dir():
            parser.error(f"{folder} is not a folder")

    model = tsjax.load(args.model, dtype="float32")
    if tokenizer_of(model) is None:
        parser.error(f"--model {args.model} has no tokenizer")
    methods = rivals(model.cfg)
    for name in args.methods or ():
        if name not in methods:
            parser.error(f"--methods {name} is not one of {', '.join(methods)}")
    document: dict[str, Any] = {"model": model.cfg.to_dict(), "perplexity": [], "code": []}
    settings = ("prompt", "suffix", "samples", "lines")
    document |= {name: getattr(args, name) for name in settings}
    full = None  # loss of each text
    for name in dict.fromkeys(["full", *(args.methods or methods)]):
        rival = methods[name]
        if args.books is not None and rival.compress is None:
            length = args.prompt + args.suffix
            texts = windows(model, args.books, args.samples, length, args.seed)
            lazy = None if rival.prefill == "full" else rival.prefill
            losses = suffix_losses(model, texts[:, : args.prompt], texts[:, args.prompt :], lazy)
            losses = losses.mean(axis=1)
            full = losses if full is None else full
            # The texts differ more than the methods do: what a method adds is shown text by text.
            added, half = interval(losses - full)
            row = {"method": name, "loss": float(losses.mean()), "added": added, "interval": half}
            document["perplexity"].append(row | {"perplexity": float(np.exp(losses.mean()))})
            print(f"{name:24} loss {row['loss']:.4f}, added {added:.4f} +- {half:.4f}", flush=True)
        if args.lines:
            lines = code_lines(args.code, args.lines, args.seed)
            scores = [
                edit_similarity(complete(model, rival, text, args.prompt), line)
                for text, line in lines
            ]
            mean, half = interval(scores)
            document["code"].append({"method": name, "score": mean, "interval": half})
            print(f"{name:24} lines of code {100 * mean:.1f} +- {100 * half:.1f}", flush=True)
        report.save({**report.facts(), **document}, args.out, NAME)
    report.write(document, args.out, NAME)


NAME = "longcontext_texts"

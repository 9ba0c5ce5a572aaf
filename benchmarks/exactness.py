# SPDX-License-Identifier: Apache-2.0
"""What keeps the tokens the same, and where it ends: verification rules, and bfloat16's near-ties.

Without --model: what a verification rule does to the law of the text, where it is known exactly.

The "model" draws every token independently: its best token has probability 0.29. Drafts propose
that token first, and a tree of 27 leaves with 20 n-grams repeats it in 47 rows. The benchmark
counts how often each rule emits it.

* per row: one sample for every row and depth, the longest match is kept (TokenSwift's released
  code and Algorithm 1 of the paper), simulated in NumPy;
* per node: one decision for each node of the trie, by tsjax.generate, the product itself.

With --model: where n-gram drafts part from plain decoding in bfloat16, whose passes over several
rows round otherwise than those over one; and, for each of the drafted tokens, whether plain
decoding would have chosen it after the same text (tsjax.check_run). With the CPU kernels in C++ and
without them (TSJAX_NATIVE=0) these are two results.

    python -m benchmarks exactness --out benchmarks/results/cpu
    python -m benchmarks exactness --model embedded PATH --out benchmarks/results/cpu
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from benchmarks import report
from pallas_kernels import native
from tsjax.measure.timing import summary

LAW = np.asarray([0.29, 0.15, 0.12, 0.10, 0.08, 0.07, 0.06, 0.05, 0.04, 0.04])
TREE = (1, 3, 3, 3)
NGRAMS = 20


def model_of_law():
    """A model that ignores its input: every token has the probability LAW."""
    size = len(LAW)
    cfg = tsjax.ModelConfig(
        vocab_size=size, embed_dim=size, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2,
        mlp_dim=1, max_positions=1_000_000, norm_eps=1e-9,
    )  # fmt: skip
    params = tsjax.steps.init_params(cfg)
    weights = jax.tree.map(jnp.zeros_like, params.model)
    # A one-hot state of norm 1 leaves the final norm with the entry sqrt(size).
    table = np.tile(np.log(LAW)[:, None] / np.sqrt(size), (1, size))
    weights = weights.replace(
        embed=jnp.eye(size), final_norm=jnp.ones(size), unembed=jnp.asarray(table, jnp.float32)
    )
    return tsjax.Model(params.replace(model=weights), cfg=cfg)


def per_row(steps: int, rng) -> tuple[np.ndarray, float, float]:
    """The published rule: how often each token is emitted, accepted drafts per step, and how often
    the first token of a step is the best one, which all rows share."""
    leaves = list(itertools.product(*map(range, TREE)))
    counts, accepted, first = np.zeros(len(LAW)), 0, 0
    for _ in range(steps):
        grams = [(0, *rng.choice(len(LAW), 3, p=LAW)) for _ in range(NGRAMS)]
        rows = np.asarray(leaves + grams)
        samples = rng.choice(len(LAW), (len(rows), rows.shape[1] + 1), p=LAW)
        matched = np.cumprod(rows == samples[:, :-1], axis=1).sum(axis=1)
        longest = rng.choice(np.flatnonzero(matched == matched.max()))
        emitted = samples[longest, : matched[longest] + 1]
        counts += np.bincount(emitted, minlength=len(LAW))
        accepted += matched[longest]
        first += emitted[0] == 0
    return counts, accepted / steps, first / steps


PROMPTS = ("Once upon a time", "The old house stood on the hill, and", "She said that she would")
SETTINGS = {
    "greedy": {},
    "sampled": dict(do_sample=True, min_p=0.1),
    "sampled, penalty 1.2 in 64": dict(
        do_sample=True, min_p=0.1, repetition_penalty=1.2, repetition_window=64
    ),
}
METHODS = ("ngram", "tokenswift")
LEADS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


def near_ties(names: list[str], dtype: str, tokens: int) -> dict:
    """Runs with drafts beside the same runs without: where they part, and what parted them."""

    def checked(model, prompt, method, asked):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/run.json"
            result = tsjax.generate(model, prompt, method=method, save_to=path, **asked)
            return result.tokens[0], tsjax.check_run(model, path)

    rows, plain_departures = [], 0
    for name in names:
        model = tsjax.load(tsjax.EMBEDDED if name == "embedded" else name, dtype=dtype)
        for (setting, values), prompt in itertools.product(SETTINGS.items(), PROMPTS):
            asked = dict(
                max_new_tokens=tokens, eos_token_id=(), exceed_max_positions=True, **values
            )
            plain, found = checked(model, prompt, "autoregressive", asked)
            plain_departures += len(found.departures)
            for method in METHODS:
                emitted, found = checked(model, prompt, method, asked)
                other = np.flatnonzero(emitted != plain)
                behind = [d.behind for d in found.departures if np.isfinite(d.behind)]
                row = {
                    "model": name, "setting": setting, "prompt": prompt, "method": method,
                    "tokens": found.num_tokens,
                    "parted_after": int(other[0]) if other.size else None,
                    "departures": len(found.departures),
                    "truncated": len(found.departures) - len(behind),
                    "largest_behind": max(behind, default=0.0),
                    "leads_below": {f"{lead:g}": found.num_below(lead) for lead in LEADS},
                }  # fmt: skip
                rows.append(row)
                print(*row.values(), flush=True)
    total, departures = (sum(row[key] for row in rows) for key in ("tokens", "departures"))
    parted = [row["parted_after"] for row in rows if row["parted_after"] is not None]
    return {
        "dtype": dtype, "runs": len(rows), "tokens_per_run": tokens, "parted": len(parted),
        "parted_after": summary(parted) if parted else None, "tokens": total,
        "departures": departures, "departures_per_1000": 1000 * departures / total,
        "plain_departures": plain_departures, "rows": rows,
    }  # fmt: skip


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("exactness", __doc__)
    parser.add_argument("--tokens", type=int, help="default: 50,000, with --model 384 in a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", nargs="+", metavar="PATH", help="'embedded' is one, too")
    parser.add_argument("--dtype", default="bfloat16", help="with --model (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.model:
        found = near_ties(args.model, args.dtype, args.tokens or 384)
        by = "kernels" if native.status(try_now=True).state == "ready" else "xla"
        report.write(found, args.out, f"near_ties-{by}")
    else:
        verification_rules(args)


def verification_rules(args: argparse.Namespace) -> None:
    args.tokens = args.tokens or 50_000
    model = model_of_law()
    method = tsjax.TokenSwift(
        tree=TREE, draft_passes=4, draft_budget=64, num_sinks=4, noise_coupled=False,
        num_ngrams=NGRAMS,
    )  # fmt: skip
    settings = dict(max_new_tokens=args.tokens, do_sample=True, seed=args.seed)
    ours = tsjax.generate(model, [0], method=method, **settings)
    plain = tsjax.generate(model, [0], **settings)
    counts, accepted, first = per_row(args.tokens // 3, np.random.default_rng(args.seed))

    def row(counts, accepted):
        share = counts / counts.sum()
        return {
            "tokens": int(counts.sum()),
            "best_token": float(share[0]),
            "total_variation": float(abs(share - LAW).sum() / 2),
            "entropy": float(-(share[share > 0] * np.log(share[share > 0])).sum()),
            "accepted_per_step": float(accepted),
        }

    stats = ours.stats
    rows = {
        "law": row(LAW, 0.0) | {"tokens": 0},
        "plain decoding": row(np.bincount(plain.tokens[0], minlength=len(LAW)), 0.0),
        "tsjax, one decision per node": row(
            np.bincount(ours.tokens[0], minlength=len(LAW)), stats.accepted / sum(stats.steps)
        ),
        "published, one sample per row": row(counts, accepted),
    }
    same = np.array_equal(ours.tokens[0], plain.tokens[0])
    print(f"{'':32}{'best token':>12}{'TV':>8}{'entropy':>9}{'accepted/step':>15}")
    for name, r in rows.items():
        print(
            f"{name:32}{r['best_token']:12.3f}{r['total_variation']:8.3f}{r['entropy']:9.2f}"
            f"{r['accepted_per_step']:15.2f}"
        )
    print(f"tsjax and plain decoding return the same {args.tokens} tokens: {same}")
    if not same:
        raise SystemExit(1)
    shared = int(np.prod(TREE)) + NGRAMS
    print(
        f"published rule: the best token, shared by {shared} rows, is the first of {first:.2%} of "
        f"the steps; it should be in {LAW[0]:.0%}"
    )
    report.write(
        {"law": LAW.tolist(), "rows": rows, "published_first_of_step": first, "same": same},
        args.out,
        "exactness",
    )

# SPDX-License-Identifier: Apache-2.0
"""What a verification rule does to the law of the text, where that law is known exactly.

The "model" draws every token independently: its best token has probability 0.29. Drafts propose
that token first, and a tree of 27 leaves with 20 n-grams repeats it in 47 rows. Counted is how
often each rule emits it.

* per row: one sample for every row and depth, the longest match is kept (TokenSwift's released
  code and Algorithm 1 of the paper), simulated in NumPy;
* per node: one decision for each node of the trie, by tsjax.generate, the product itself.

    python benchmarks/exactness.py --out benchmarks/results/cpu
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import report

LAW = np.asarray([0.29, 0.15, 0.12, 0.10, 0.08, 0.07, 0.06, 0.05, 0.04, 0.04])
TREE = (1, 3, 3, 3)
NGRAMS = 20


def model_of_law():
    """A model that ignores its input: every token has the probability LAW."""
    import jax
    import jax.numpy as jnp

    import tsjax

    size = len(LAW)
    cfg = tsjax.ModelConfig(
        vocab_size=size,
        embed_dim=size,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        mlp_dim=1,
        max_positions=1_000_000,
        norm_eps=1e-9,
    )
    params = tsjax.init_params(cfg)
    weights = jax.tree.map(jnp.zeros_like, params.model)
    # A one-hot state of norm 1 leaves the final norm with the entry sqrt(size).
    table = np.tile(np.log(LAW) / np.sqrt(size), (size, 1))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    report.add_out(parser)
    args = parser.parse_args()

    import tsjax

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


if __name__ == "__main__":
    main()

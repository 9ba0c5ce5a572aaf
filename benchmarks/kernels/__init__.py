# SPDX-License-Identifier: Apache-2.0
"""The attention kernels on a GPU: time per call, and bytes per second against a plain copy.

It times decode_attention (tree_attention for one row), tree_attention for T rows and cache_scores,
in bfloat16 with head_dim 128 and batch 1, over a cache that is full. The same run times "triton",
"xla", `jax.nn.dot_product_attention` (xla, cudnn) and torch's `scaled_dot_product_attention` and
FlexAttention. A case that fails is a row with its error.

    python -m benchmarks kernels --out benchmarks/results/h200
    python -m benchmarks kernels --tune --out benchmarks/results/h200

The first needs torch for torch's rows only. The second times block sizes for every key of the
kernels' `specs.py` and writes `pallas_kernels/tuned/<device>.json`, and the same file into --out.

How a time comes about. One program calls an operation some hundred times in a loop. The output of
an attention is the query of the next call, so that no call can be moved, merged or left out and
nothing else runs between two of them; the scores' query gets a tiny multiple of an output, too
small to change it. Several caches take turns where one would stay in the L2 cache. A call of the
program takes 20 ms or more; implementations take turns round by round. GB/s counts the bytes that
have to be read once: keys and values of all slots, keys alone for scores. "softmax" reads them
twice, so half of the bandwidth is all that it can reach.

What favours the peers: the cache they are given is laid out as they like it, the fresh rows are
already its last T slots, the mask is made beforehand, torch runs as a CUDA graph, and XLA may move
what does not change out of the loop. FlexAttention compiles for seconds, so it runs at one S only.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import report
from benchmarks.kernels.cases import HEAD_DIM, OPS


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("kernels", __doc__)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--tune", action="store_true", help="find block sizes instead")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    report.add_budget(parser)
    args = parser.parse_args(argv)

    # Not above: torch's process reads this package, too.
    from benchmarks.kernels.measuring import measure
    from benchmarks.kernels.programs import GPU, QUICK
    from benchmarks.kernels.tuning import tune

    is_gpu, budget = report.on_gpu(parser, args.quick), report.Budget(args.minutes)
    document = report.begun(is_gpu, dtype="bfloat16", head_dim=HEAD_DIM)
    effort = QUICK if args.quick else GPU
    run = tune if args.tune else measure
    run(args, is_gpu, effort, budget, document)
    document |= {"complete": not document["left_out"], "seconds": budget.used}
    report.write(document, args.out, "tune" if args.tune else "kernels")
    report.leave()

# SPDX-License-Identifier: Apache-2.0
"""Cost follows length, not capacity: the same step at 1,024 tokens in a small and in a large cache.

Both states run in turn in one process. Also prints the temporary memory of the compiled chunk of
steps as a share of the large cache.

    python benchmarks/bench_capacity.py --out benchmarks/results/cpu
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--small", type=int, default=2048)
    parser.add_argument("--large", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=32, help="steps per timing")
    parser.add_argument("--rounds", type=int, default=15)
    report.add_out(parser)
    args = parser.parse_args()

    import jax

    import tsjax
    from tsjax.decoding.programs import programs
    from tsjax.model.cache import cache_bytes

    model = tsjax.ModelConfig(
        vocab_size=32000,
        embed_dim=288,
        num_layers=6,
        num_heads=6,
        num_kv_heads=6,
        head_dim=48,
        mlp_dim=768,
        max_positions=args.large,
        norm_eps=1e-5,
    )
    cfg = tsjax.DecodeConfig(model)
    params = tsjax.init_params(model)
    run = programs(jax.default_backend(), model.dtype)
    prompt = np.random.default_rng(0).integers(3, 32000, (1, args.length)).astype(np.int32)

    def start(capacity: int):
        state = tsjax.init_state(
            prompt, [args.length], cfg=cfg, capacity=capacity, max_length=[capacity]
        )
        return run.read_part(params, state, 0, part=0, width=args.length, cfg=cfg)

    states = {capacity: start(capacity) for capacity in (args.small, args.large)}
    lowered = run.decode.lower(params, states[args.large], args.steps, cfg=cfg)
    memory = lowered.compile().memory_analysis()
    times: dict[int, list[float]] = {capacity: [] for capacity in states}
    for index in range(args.rounds + 1):
        for capacity in states:
            begin = time.perf_counter()
            states[capacity] = run.decode(params, states[capacity], args.steps, cfg=cfg)
            states[capacity].kv.length.block_until_ready()
            if index > 0:  # the first one compiles
                times[capacity].append(1e3 * (time.perf_counter() - begin) / args.steps)
    ratio = [b / a for a, b in zip(times[args.small], times[args.large], strict=True)]
    cache = cache_bytes(model, 1, args.large)
    document = {
        "length": args.length,
        "ms_per_step": {str(capacity): report.summary(row) for capacity, row in times.items()},
        "ratio": report.summary(ratio),
        "temp_bytes": memory.temp_size_in_bytes,
        "cache_bytes": cache,
        "temp_share": memory.temp_size_in_bytes / cache,
    }
    for capacity, row in document["ms_per_step"].items():
        print(f"capacity {capacity:>7}: {row['median']:.2f} ms per step at length {args.length}")
    print(f"ratio {document['ratio']['median']:.3f}")
    print(f"temporary memory {document['temp_share']:.2%} of the cache")
    report.write(document, args.out, "capacity")


if __name__ == "__main__":
    main()

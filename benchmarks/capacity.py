# SPDX-License-Identifier: Apache-2.0
"""Cost follows length, not capacity: the same step at 1,024 tokens in a small and in a large cache.

Also prints the temporary memory of the compiled chunk of steps as a share of the large cache.

    python -m benchmarks capacity --out benchmarks/results/cpu
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

import tsjax
from benchmarks import report
from tsjax.decoding.programs import programs
from tsjax.host.timing import interleaved, ratios, summary
from tsjax.model.cache import cache_bytes


def story_model(max_positions: int, num_draft_heads: int = 0) -> tsjax.ModelConfig:
    """The shape of a story model of 15M parameters."""
    return tsjax.ModelConfig(
        vocab_size=32000, embed_dim=288, num_layers=6, num_heads=6, num_kv_heads=6, head_dim=48,
        mlp_dim=768, max_positions=max_positions, norm_eps=1e-5, num_draft_heads=num_draft_heads,
    )  # fmt: skip


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("capacity", __doc__)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--small", type=int, default=2048)
    parser.add_argument("--large", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=32, help="steps per timing")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)

    model = story_model(args.large)
    cfg = tsjax.steps.DecodeConfig(model)
    params = tsjax.steps.init_params(model)
    run = programs(jax.default_backend(), model.dtype)
    prompt = np.random.default_rng(0).integers(3, 32000, (1, args.length)).astype(np.int32)

    def start(capacity: int):
        state = tsjax.steps.init_state(
            prompt, [args.length], cfg=cfg, capacity=capacity, max_length=[capacity]
        )
        return run.read_part(params, state, 0, part=0, width=args.length, cfg=cfg)

    states = {capacity: start(capacity) for capacity in (args.small, args.large)}
    lowered = run.decode.lower(params, states[args.large], args.steps, cfg=cfg)
    memory = lowered.compile().memory_analysis()

    def steps(capacity: int) -> None:
        states[capacity] = run.decode(params, states[capacity], args.steps, cfg=cfg)
        states[capacity].kv.length.block_until_ready()

    calls = {capacity: functools.partial(steps, capacity) for capacity in states}
    seconds = interleaved(calls, args.rounds).seconds
    cache = cache_bytes(model, 1, args.large)
    document = {
        "length": args.length,
        "ms_per_step": {
            str(capacity): summary([1e3 * value / args.steps for value in row])
            for capacity, row in seconds.items()
        },
        "ratio": ratios(seconds[args.large], seconds[args.small]),
        "temp_bytes": memory.temp_size_in_bytes,
        "cache_bytes": cache,
        "temp_share": memory.temp_size_in_bytes / cache,
    }
    for capacity, row in document["ms_per_step"].items():
        print(f"capacity {capacity:>7}: {row['median']:.2f} ms per step at length {args.length}")
    print(f"ratio {document['ratio']['median']:.3f}")
    print(f"temporary memory {document['temp_share']:.2%} of the cache")
    report.write(document, args.out, "capacity")

# SPDX-License-Identifier: Apache-2.0
"""What several rows cost on a CPU, and whether the table that Auto chooses by knows it.

Products of rows with weights that are read from memory, by the rows' and the weights' types; passes
of whole models, all layers in one program, at several contexts; and the table's seconds for each of
these passes. Round by round, all rows in turn.

    python -m benchmarks rows --out benchmarks/results/cpu
    python -m benchmarks rows --model FILE --contexts 128 7000 --out benchmarks/results/cpu
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from benchmarks import report
from pallas_kernels import native, product
from tsjax.decoding.noise import position_noise, row_keys
from tsjax.decoding.programs import compiler_options
from tsjax.decoding.sampling import best
from tsjax.host.measuring import DEEPEST, measure
from tsjax.measure.timing import ratios, summary
from tsjax.model.cache import init_cache
from tsjax.model.params import random_params
from tsjax.model.passes import run_layers
from tsjax.model.transformer import final_norm, unembed

ROWS = (1, 2, 4, 8, 16, 32)
OUTPUTS, INPUTS, WEIGHTS = 3072, 576, 40  # of a product, and so many of them one after the other
KINDS = {  # types of the rows and of the weights
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8, bfloat16 rows": ("bfloat16", "int8"),
    "int8, float32 rows": ("float32", "int8"),
}
SHAPES = {  # megabytes, and what they are made of
    "50 MB": dict(embed_dim=384, num_layers=8, mlp_dim=1024, vocab_size=16_000, dtype="bfloat16"),
    "500 MB": dict(
        embed_dim=1024, num_layers=16, mlp_dim=2816, vocab_size=49_152, dtype="bfloat16"
    ),
}


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("rows", __doc__)
    parser.add_argument("--model", help="a checkpoint; two models of random weights by default")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2000])
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args(argv)
    status = native.status(try_now=True)
    document: dict[str, Any] = {
        "native": {"state": status.state, "reason": status.reason},
        "instructions": instructions(),
        "rounds": args.rounds,
    }
    if args.model:
        model = tsjax.load(args.model, dtype=args.dtype)
        models = {os.path.basename(args.model): (model.params, model.cfg)}
        name = f"rows-{os.path.basename(args.model).split('.gguf')[0]}-{args.dtype}"
    else:
        document["products"] = [of_products(kind, args.rounds) for kind in KINDS]
        configs = {label: config_of(shape) for label, shape in SHAPES.items()}
        models = {label: (random_params(cfg), cfg) for label, cfg in configs.items()}
        name = "rows"
    document["passes"] = [
        row
        for label, (params, cfg) in models.items()
        for row in of_model(label, params, cfg, args.contexts, args.rounds)
    ]
    report.write(document, args.out, name)


def instructions() -> list[str]:
    """Those of the processor that the kernels can use."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "asimd")
    try:
        flags = open("/proc/cpuinfo").read().split()
    except OSError:
        return []
    return [flag for flag in wanted if flag in flags]


def config_of(shape: dict[str, Any]) -> tsjax.ModelConfig:
    heads = shape["embed_dim"] // 64
    return tsjax.ModelConfig(
        **shape, num_heads=heads, num_kv_heads=heads // 2, head_dim=64, max_positions=32_768,
        norm_eps=1e-5,
    )  # fmt: skip


def timed(calls: dict[int, Callable[[], Any]], rounds: int) -> dict[int, list[float]]:
    """Seconds of each call in each round."""

    def seconds(call: Callable[[], Any]) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - begun

    every = {rows: functools.partial(seconds, call) for rows, call in calls.items()}
    return report.interleaved(every, rounds).results


def of_products(kind: str, rounds: int) -> dict[str, Any]:
    of_rows, of_weights = KINDS[kind]
    rng, scales = np.random.default_rng(0), None
    shape = (OUTPUTS, INPUTS)
    if of_weights == "int8":
        weights = [jnp.asarray(rng.integers(-127, 128, shape), "int8") for _ in range(WEIGHTS)]
        scales = jnp.full(OUTPUTS, 1e-3, jnp.float32)
    else:
        weights = [jnp.asarray(rng.standard_normal(shape), of_weights) for _ in range(WEIGHTS)]

    @jax.jit
    def all_of_them(rows, weights):
        for one in weights:
            sums = product(rows, one, scales=scales)
            rows = rows + 1e-6 * sums[:, :INPUTS].astype(rows.dtype)
        return rows

    calls: dict[int, Callable[[], Any]] = {
        rows: functools.partial(all_of_them, jnp.ones((rows, INPUTS), of_rows), weights)
        for rows in ROWS
    }
    found = timed(calls, rounds)
    nbytes = sum(one.nbytes for one in weights)
    print(kind, *(f"{rows}: {ratios(found[rows], found[1])['median']:.2f}" for rows in ROWS))
    return {
        "kind": kind, "bytes": nbytes, "ms": 1e3 * summary(found[1])["median"],
        "bytes_per_second": nbytes / summary(found[1])["median"],
        "over_one_row": {rows: ratios(found[rows], found[1]) for rows in ROWS},
    }  # fmt: skip


def of_model(label: str, params, cfg, contexts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    begun, table = time.perf_counter(), []
    tables = [measure(params, cfg, 1, 2 * max(contexts))]
    to_measure = time.perf_counter() - begun
    for context in contexts:  # a table before and after each, as the machine's speed drifts
        found = timed(whole_passes(params, cfg, context), rounds)
        tables.append(measure(params, cfg, 1, 2 * max(contexts)))
        row: dict[str, Any] = {
            "model": label, "dtype": cfg.dtype, "context": context,
            "seconds_to_measure": to_measure,
            "bytes": sum(x.nbytes for x in jax.tree.leaves(params.model)), "rows": {},
        }  # fmt: skip
        for rows in ROWS:
            ms = 1e3 * summary(found[rows])["median"]
            said = 1e3 * statistics.mean(one.of_pass(rows, context) for one in tables[-2:])
            over = ratios(found[rows], found[1])
            row["rows"][rows] = {"ms": ms, "table_ms": said, "off": said / ms - 1, "over_one": over}
        print(label, context, *(
            f"{rows}: {one['over_one']['median']:.2f} ({one['off']:+.0%})"
            for rows, one in row["rows"].items()
        ))  # fmt: skip
        table.append(row)
    return table


def whole_passes(params, cfg, context: int) -> dict[int, Callable[[], Any]]:
    """All layers in one program, and the sampled token of each row, as a step has them."""
    options = compiler_options(jax.default_backend(), cfg.dtype)
    cache = init_cache(cfg, 1, context + ROWS[-1], None)
    cache = cache.replace(length=jnp.full((1,), context, jnp.int32))

    @functools.partial(jax.jit, compiler_options=options)
    def run(hidden, weights, cache):
        rows = hidden.shape[1]
        positions = cache.length[:, None] + jnp.arange(rows, dtype=jnp.int32)
        causal = jnp.tril(jnp.ones((rows, rows), bool))
        layers = range(cfg.num_layers)
        hidden = run_layers(weights, cache, hidden, positions, causal, layers, cfg=cfg).hidden
        logits = unembed(weights, final_norm(weights, hidden, cfg=cfg), cfg=cfg)
        deep = positions[:, : min(rows, DEEPEST)]
        keys = row_keys(jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.uint32))
        noise = position_noise(keys, deep, cfg.vocab_size, logits.dtype)
        return best(logits + noise[:, jnp.arange(rows) % deep.shape[1]])

    return {
        rows: functools.partial(
            run, jnp.ones((1, rows, cfg.embed_dim), cfg.dtype), params.model, cache
        )
        for rows in ROWS
    }

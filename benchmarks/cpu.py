# SPDX-License-Identifier: Apache-2.0
"""What a CPU reaches: plain decoding, prefill, passes of several rows, and int8 weights.

Each peer is a process of its own with the same random weights and prompts: tsjax with its kernels
in C++, tsjax in plain XLA, HuggingFace torch `generate`, and llama.cpp and CTranslate2 where
`llama-cpp-python` with `gguf` and `ctranslate2` are installed; all in float32, the caches too. They
are asked in turn, round by round; ratios are taken round by round. The bound is the bytes of the
weights and of the rows of the cache in use, at the bandwidth at which torch sums one buffer of that
size in the same round.

    python -m benchmarks cpu --out benchmarks/results/cpu
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks.cpu_peers import PEERS, Peer, installed_peers, serve
from tsjax.measure.timing import ratios

SHAPES = {
    "15M": dict(hidden_size=288, intermediate_size=768, num_hidden_layers=6, heads=6),
    "125M": dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, heads=12),
}
VOCABULARY = 32_000
ROWS = (1, 4, 8, 16)


def save_model(shape: str, folder: str) -> None:
    import torch
    import transformers

    sizes = dict(SHAPES[shape])
    heads = sizes.pop("heads")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **sizes, vocab_size=VOCABULARY, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=32_768, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


# --- the measurements -------------------------------------------------------------------------


def seconds_to_read(count: int) -> float:
    """The best of a few sums of one buffer."""
    import torch

    data, seconds = torch.ones(count // 4), []
    for _ in range(5):
        begin = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def decode_row(peers: dict[str, Peer], shape: str, context: int, new: int, rounds: int, cfg: Any):
    from tsjax.model.cache import cache_bytes

    read = cfg["weights"] + cache_bytes(cfg["model"], 1, context + new // 2)
    calls = {"bound": functools.partial(seconds_to_read, read)}
    calls |= {name: functools.partial(peer.ask, context, new) for name, peer in peers.items()}
    found = report.interleaved(calls, rounds, warmup=0).results
    bounds = found.pop("bound")

    def each(name: str, part: str) -> list[float]:
        return [answer[part] for answer in found[name]]

    def median(name: str, part: str) -> float:
        return statistics.median(each(name, part))

    def over(other: str, part: str) -> float:
        return ratios(each(other, part), each("native", part))["median"]

    tokens = {name: answers[0]["tokens"] for name, answers in found.items()}
    others = [name for name in peers if name != "native"]
    return {
        "shape": shape, "context": context, "new": new, "read_bytes": read,
        "ms": {name: [1e3 * seconds for seconds in each(name, "token")] for name in peers},
        "median_ms": {name: 1e3 * median(name, "token") for name in peers},
        "bound_ms": 1e3 * statistics.median(bounds),
        "read_bytes_per_second": read / statistics.median(bounds),
        "share_of_bound": ratios(bounds, each("native", "token"))["median"],
        "over": {name: over(name, "token") for name in others},
        "prefill_seconds": {name: median(name, "prefill") for name in peers},
        "prefill_over": {name: over(name, "prefill") for name in others},
        "first_tokens_over": {name: over(name, "first_tokens") for name in others},
        "equal_tokens": {
            name: sum(a == b for a, b in zip(tokens[name], tokens["native"], strict=True))
            for name in others
        },
    }  # fmt: skip


def pass_rows(model: Any, context: int, rounds: int) -> dict[str, Any]:
    """What a whole pass of several rows takes, against a pass of one; in this process."""
    import jax
    import jax.numpy as jnp

    from tsjax.model.cache import init_cache
    from tsjax.model.passes import run_rows
    from tsjax.model.transformer import final_norm, unembed

    cfg, weights = model.cfg, model.params.model
    cache = init_cache(cfg, 1, context + max(ROWS))
    cache = cache.replace(length=jnp.full((1,), context, jnp.int32))

    @jax.jit
    def run(weights, cache, tokens):
        positions = context + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        rows = run_rows(weights, cache, tokens, positions, mask, cfg=cfg)
        return unembed(weights, final_norm(weights, rows.hidden, cfg=cfg), cfg=cfg)

    def call(tokens) -> None:
        jax.block_until_ready(run(weights, cache, tokens))

    calls = {rows: functools.partial(call, jnp.ones((1, rows), jnp.int32)) for rows in ROWS}
    seconds = report.interleaved(calls, rounds).seconds
    return {
        "context": context,
        "ms": {str(rows): 1e3 * statistics.median(seconds[rows]) for rows in ROWS},
        "over_one_row": {str(rows): ratios(seconds[rows], seconds[1])["median"] for rows in ROWS},
    }


def int8_product(rounds: int) -> dict[str, Any]:
    """One row with 32,000 outputs of 768: float32 weights against int8 ones."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import product

    key = jax.random.key(0)
    row = jax.random.normal(key, (1, 1, 768))
    wide = jax.random.normal(key, (VOCABULARY, 768))
    narrow = jax.random.randint(key, wide.shape, -127, 128, jnp.int8)
    scales = jnp.ones((VOCABULARY,))
    calls = {
        "float32": jax.jit(lambda: product(row, wide)),
        "int8": jax.jit(lambda: product(row, narrow, scales=scales)),
    }
    seconds = report.interleaved(calls, 10 * rounds).seconds
    return {
        "ms": {name: 1e3 * statistics.median(values) for name, values in seconds.items()},
        "over": ratios(seconds["float32"], seconds["int8"])["median"],
    }


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("cpu", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=(16, 100, 4096, 8192))
    parser.add_argument("--prefill", nargs="*", type=int, default=(16_384,), help="prompts, 15M")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=installed_peers())
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=2, metavar=("PEER", "FOLDER"), help="for its own use")
    args = parser.parse_args(argv)
    if args.serve:
        return serve(*args.serve, VOCABULARY)

    import jax

    import tsjax
    from pallas_kernels import native

    status = native.status(try_now=True)
    document = {
        "native": status._asdict() | {"path": None, "compiler": None}, "complete": False,
        "rows": [], "passes": {}, "int8_product": int8_product(args.rounds),
    }  # fmt: skip
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            save_model(shape, folder)
            model = tsjax.load(folder)
            weights = sum(array.nbytes for array in jax.tree.leaves(model.params))
            document["passes"][shape] = pass_rows(model, max(args.contexts), 5 * args.rounds)
            peers = {name: Peer(name, folder) for name in args.peers}
            prefills = [(length, 2) for length in args.prefill if shape == "15M"]
            for context, new in [*((n, args.new) for n in args.contexts), *prefills]:
                cfg = {"weights": weights, "model": model.cfg}
                rounds = args.rounds if new > 2 else 2
                row = decode_row(peers, shape, context, new, rounds, cfg)
                print(
                    f"{shape} {context:6}: " + ", ".join(
                        f"{name} {row['median_ms'][name]:.2f} ms" for name in peers
                    ) + f"; {row['share_of_bound']:.0%} of the bound", flush=True, file=sys.stderr,
                )  # fmt: skip
                document["rows"].append(row)
                report.save({**report.facts(), **document}, args.out, "cpu")
            for peer in peers.values():
                peer.end()
    report.write(document | {"complete": True}, args.out, "cpu")

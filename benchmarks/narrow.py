# SPDX-License-Identifier: Apache-2.0
"""What narrow weights cost and are worth: plain decoding, passes of several rows, held-out text.

Round by round each way to hold the weights takes its turn, and where it is given llama-bench of
llama.cpp on the same file and threads. Of texts: the perplexity of each, and how often the most
likely token is that of the float32 model.

    python -m benchmarks narrow --model FILE --llama-bench PATH --out benchmarks/results/cpu
    python -m benchmarks narrow --model FILE --weights stored --contexts 4000 16000 --int8-cache
"""

from __future__ import annotations

import functools
import gc
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from benchmarks import report
from tsjax.base.input_files import read_text
from tsjax.decoding.noise import position_noise, row_keys
from tsjax.decoding.programs import compiler_options
from tsjax.decoding.sampling import best
from tsjax.host.info import cores
from tsjax.host.measuring import DEEPEST
from tsjax.measure.timing import ratios, summary
from tsjax.model.cache import init_cache
from tsjax.model.passes import run_layers
from tsjax.model.transformer import final_norm, unembed

WEIGHTS = ("float", "int8", "int4", "stored")
ROWS = (1, 2, 4, 8, 16)
PEER, INT8_CACHE = "llama.cpp", ", int8 cache"  # what it is called, and what a way is with one
WINDOW = 512  # tokens that a text is read in at a time; the first is not counted


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("narrow", __doc__)
    parser.add_argument("--model", required=True, help="a GGUF file, or a HuggingFace folder")
    parser.add_argument("--weights", nargs="+", default=WEIGHTS, choices=WEIGHTS)
    parser.add_argument("--int8-cache", action="store_true", help="each way with one as well")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 4000])
    parser.add_argument("--steps", type=int, default=64, help="tokens of a run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--texts", nargs="*", default=[], help="files of held-out text")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text, its first ones")
    parser.add_argument("--llama-bench", help="the program of llama.cpp, to measure beside")
    args = parser.parse_args(argv)
    model = os.path.basename(args.model).split(".gguf")[0]
    name = model + ("-cache" if args.int8_cache else "")
    document: dict[str, Any] = {
        "model": model, "dtype": args.dtype, "steps": args.steps, "rounds": args.rounds,
        "instructions": instructions(),
    }  # fmt: skip
    if args.texts:
        document["quality"] = of_texts(args)
        name += "-quality"
    if args.rounds:
        models = {w: tsjax.load(args.model, dtype=args.dtype, weights=w) for w in args.weights}
        if args.int8_cache:
            for way, one in [*models.items()]:
                models[way + INT8_CACHE] = one.replace(cfg=one.cfg.with_cache("int8"))
        document["bytes"] = {w: bytes_read(model) for w, model in models.items()}
        document["decoding"] = [of_context(models, context, args) for context in args.contexts]
    report.write(document, args.out, f"narrow-{name}")


def instructions() -> list[str]:
    """Those of the processor that the kernels can use."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "asimd")
    try:
        flags = open("/proc/cpuinfo").read().split()
    except OSError:
        return []
    return [flag for flag in wanted if flag in flags]


def bytes_read(model: tsjax.Model) -> int:
    """By a step: all but the embedding, which it looks a row up in, unless it unembeds."""
    weights = model.params.model
    unread = weights.embed.nbytes if weights.unembed is not None else 0
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) - unread


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


def of_context(models: dict[str, tsjax.Model], context: int, args: Any) -> dict[str, Any]:
    first = next(iter(models.values()))
    ids = np.random.default_rng(0).integers(0, first.cfg.vocab_size, context).tolist()
    texts = {name: tsjax.read(model, ids[:-1]) for name, model in models.items()}

    def plain(name: str, model: tsjax.Model) -> float:
        """Seconds of a token."""
        found = tsjax.generate(
            model, ids, prefix=texts[name], method="autoregressive", max_new_tokens=args.steps,
            eos_token_id=(),
        )  # fmt: skip
        return found.stats.decode_seconds / found.stats.computed_tokens

    def peer() -> float:
        command = [
            args.llama_bench, "-m", args.model, "-t", str(cores()), "-p", "0", "-n",
            str(args.steps), "-d", str(context), "-r", "1", "-o", "json",
        ]  # fmt: skip
        said = subprocess.run(command, check=True, capture_output=True, text=True)
        (found,) = json.loads(said.stdout)
        document["peer"] = {"commit": found["build_commit"], "type": found["model_type"]}
        return 1 / found["avg_ts"]

    document: dict[str, Any] = {"context": context}
    calls: dict[Any, Any] = {
        name: functools.partial(plain, name, model) for name, model in models.items()
    }
    if args.llama_bench:
        calls[PEER] = peer
    plains = report.interleaved(calls, args.rounds).results
    passes = {
        (name, count): call
        for name, model in models.items()
        for count, call in whole_passes(model.params, model.cfg, context).items()
    }
    found = report.interleaved(passes, args.rounds).seconds
    document["ways"] = {
        name: {
            "ms": 1e3 * statistics.median(times),
            "rounds_ms": [1e3 * one for one in times],
            "speed_over_float": ratios(plains["float"], times) if "float" in plains else None,
            "speed_over_peer": ratios(plains[PEER], times) if PEER in plains else None,
            "rows_ms": {n: 1e3 * summary(found[name, n])["median"] for n in ROWS}
            if name in models
            else None,
        }
        for name, times in plains.items()
    }
    for name, one in document["ways"].items():
        by_rows = one["rows_ms"] and {n: round(ms, 2) for n, ms in one["rows_ms"].items()}
        print(context, name, f"{one['ms']:.2f} ms", by_rows, flush=True)
    return document


# --- how good it is ------------------------------------------------------------------------------


def of_texts(args: Any) -> list[dict[str, Any]]:
    """By text and way: nats of a token, perplexity, and agreement with the float32 model."""
    ways = {"float32": dict(dtype="float32")}
    ways |= {name: dict(dtype=args.dtype, weights=name) for name in args.weights}
    if args.int8_cache:
        with_it = {way + INT8_CACHE: {**how, "cache": "int8"} for way, how in ways.items()}
        ways |= {way: how for way, how in with_it.items() if "float32" not in way}
    best: dict[str, np.ndarray] = {}
    found: list[dict[str, Any]] = []
    for way, how in ways.items():
        model = tsjax.load(args.model, **how)
        for file in args.texts:
            ids = np.asarray(model.tokenizer.encode(read_text(file))[: args.tokens])
            losses, chosen = judged(model, ids[: len(ids) // WINDOW * WINDOW])
            best.setdefault(file, chosen)
            found.append(
                {
                    "way": way,
                    "text": os.path.basename(file),
                    "tokens": int(losses.size),
                    "nats": float(losses.mean()),
                    "perplexity": float(np.exp(losses.mean())),
                    "agreement": float((chosen == best[file]).mean()),
                }
            )
            print(*found[-1].values(), flush=True)
        del model
        gc.collect()
    return found


def judged(model: tsjax.Model, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each token but the first of a window what it costs, and the most likely token there."""

    @jax.jit
    def of_window(logits, ids):
        logits = logits[0, :-1].astype(jnp.float32)
        own = jnp.take_along_axis(logits, ids[1:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(logits, axis=1) - own, jnp.argmax(logits, axis=1)

    windows = ids.reshape(-1, WINDOW)
    parts = [of_window(tsjax.forward(model, one[None]), jnp.asarray(one)) for one in windows]
    losses, chosen = (
        np.concatenate([np.asarray(x) for x in some]) for some in zip(*parts, strict=True)
    )
    return losses, chosen

# SPDX-License-Identifier: Apache-2.0
"""Plain decoding against HuggingFace torch `generate`: same weights, same prompt, same tokens.

Both run in this process, in turn, round by round, so that a machine whose speed drifts cannot
favour one of them; the ratio is taken round by round. Two situations:

    short    a prompt of 16 tokens and 200 new ones: whole call, everything included
    long     a prompt of 8192 tokens: time per token after the first one, and time to the first

Beside them stands the bound: the bytes of all weights and of the filled cache, read once per token
at the bandwidth that a plain sum over 400 MB reaches in the same process.

The model has random weights in the shape of a 15M-parameter story model. Needs torch.

    python -m benchmarks decode --out benchmarks/results/cpu
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import torch
import transformers

import tsjax
from benchmarks import report
from tsjax.host.timing import interleaved, ratios, summary
from tsjax.model.cache import cache_bytes

SHAPE = dict(
    vocab_size=32000, hidden_size=288, intermediate_size=768, num_hidden_layers=6,
    num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=16384,
    tie_word_embeddings=True,
)  # fmt: skip


class Run(NamedTuple):
    tokens: list[int]
    first: float  # seconds to the first token
    per_token: float  # seconds after the first one


class Clock:
    """A streamer that notes when each token arrives; the first put is the prompt."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def read_bandwidth() -> float:
    """Bytes per second of summing a large array, the best of ten."""
    data = torch.ones(100_000_000)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - begin)
    return data.nbytes / min(seconds)


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("decode", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--short", type=int, default=200, help="new tokens of the short case")
    parser.add_argument("--context", type=int, default=8192, help="prompt of the long case")
    parser.add_argument("--long", type=int, default=64, help="new tokens of the long case")
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, eos_token_id=None, bos_token_id=None)
    theirs = transformers.LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = tsjax.load(folder)
    rng = np.random.default_rng(0)

    def run_theirs(prompt, new):
        clock = Clock()
        begin = time.perf_counter()
        with torch.no_grad():
            out = theirs.generate(
                torch.tensor(prompt)[None],
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
            )
        end = time.perf_counter()
        tokens, first = out[0, len(prompt) :].tolist(), clock.times[1]
        return Run(tokens, first - begin, (end - first) / (new - 1))

    def run_ours(prompt, new):
        result = tsjax.generate(ours, prompt, max_new_tokens=new)
        per_token = result.stats.decode_seconds / new
        first = result.stats.prefill_seconds + per_token
        return Run(result.tokens[0].tolist(), first, per_token)

    cases = {
        "short": (rng.integers(3, SHAPE["vocab_size"], 16).astype(np.int32), args.short),
        "long": (rng.integers(3, SHAPE["vocab_size"], args.context).astype(np.int32), args.long),
    }
    bandwidth = read_bandwidth()
    weights = sum(array.nbytes for array in jax.tree.leaves(ours.params))
    document = {
        "shape": SHAPE,
        "dtype": "float32",
        "torch_threads": args.threads,
        "read_bytes_per_second": bandwidth,
        "cases": {},
    }
    for name, (prompt, new) in cases.items():
        calls = {
            "torch": functools.partial(run_theirs, prompt, new),
            "tsjax": functools.partial(run_ours, prompt, new),
        }
        seconds, found, _ = interleaved(calls, args.rounds)
        pairs = zip(*(rows[0].tokens for rows in found.values()), strict=True)
        if name == "short":
            times = {peer: [1e3 * value / new for value in row] for peer, row in seconds.items()}
        else:
            times = {peer: [1e3 * run.per_token for run in runs] for peer, runs in found.items()}
        first = {peer: summary([run.first for run in runs]) for peer, runs in found.items()}
        cache = cache_bytes(ours.cfg, 1, len(prompt) + new // 2)
        bound = 1e3 * (weights + cache) / bandwidth
        ours_ms = summary(times["tsjax"])
        document["cases"][name] = {
            "prompt_tokens": len(prompt),
            "new_tokens": new,
            "equal_tokens": sum(ours == theirs for ours, theirs in pairs),
            "torch_ms_per_token": summary(times["torch"]),
            "tsjax_ms_per_token": ours_ms,
            "bound_ms_per_token": bound,
            "share_of_bound": bound / ours_ms["median"],
            "speedup": ratios(times["torch"], times["tsjax"]),
            "torch_seconds_to_first_token": first["torch"],
            "tsjax_seconds_to_first_token": first["tsjax"],
        }
    print("case      prompt   new  torch ms/tok  tsjax ms/tok  speed-up  share of bound")
    for name, row in document["cases"].items():
        print(
            f"{name:8}{row['prompt_tokens']:8}{row['new_tokens']:6}"
            f"{row['torch_ms_per_token']['median']:14.2f}{row['tsjax_ms_per_token']['median']:14.2f}"
            f"{row['speedup']['median']:9.2f}x{row['share_of_bound']:15.0%}"
        )
    report.write(document, args.out, "decode")

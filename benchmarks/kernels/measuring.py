# SPDX-License-Identifier: Apache-2.0
"""The attention kernels on a GPU: time per call, and bytes per second against a plain copy.

Measured are decode_attention (tree_attention for one row), tree_attention for T rows and
cache_scores, in bfloat16 with head_dim 128 and batch 1, over a cache that is full. Beside "triton"
and "xla" stand, in the same run, `jax.nn.dot_product_attention` (xla, cudnn) and torch's
`scaled_dot_product_attention` and FlexAttention. What fails is a row with its error.

    python benchmarks/bench_kernels.py --out benchmarks/results/h200
    python benchmarks/bench_kernels.py --tune --out benchmarks/results/h200

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

import argparse
import dataclasses
import functools
import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import report

OPS = ("decode_attention", "tree_attention", "cache_scores dot", "cache_scores softmax")
HEADS = {"GQA": (8, 4), "MHA": (32, 1)}  # kv heads, query heads for each of them
HEAD_DIM = 128
ROWS = (1, 8, 16, 32, 64, 128)
SLOTS = (106_496, 131_072, 32_768, 4096)  # the most important first
FLEX_SLOTS = 106_496
L2_BYTES = 60e6  # an H200's
TORCH = ("torch sdpa", "torch flex")
PEERS = ("jax.nn xla", "jax.nn cudnn", *TORCH)
LEAST_GAIN = 0.02  # block sizes are kept if they are so much faster than the rule's
TURN_CALLS = 16  # the least calls in one turn of a program's loop: the loop itself costs a little
TINY = 1e-30
PATIENCE = 120.0  # seconds for all programs of one case


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one shape."""

    op: str
    heads: str
    S: int
    T: int = 1

    @property
    def K(self) -> int:
        return HEADS[self.heads][0]

    @property
    def G(self) -> int:
        return HEADS[self.heads][1]

    @property
    def is_attention(self) -> bool:
        return self.op.endswith("attention")

    @property
    def read_bytes(self) -> int:
        """What has to be read once, in bfloat16."""
        return (2 if self.is_attention else 1) * self.K * self.S * HEAD_DIM * 2

    def fields(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "K": self.K, "G": self.G}


def cases(ops=OPS, slots=SLOTS, rows=ROWS, heads=tuple(HEADS)) -> list[Case]:
    """The most important first: long caches before short ones, GQA before MHA."""
    found = []
    for long in (True, False):
        for name in heads:
            for S in slots:
                if (S >= 32_768) != long:
                    continue
                for op in ops:
                    for T in rows:
                        if (T > 1) == (op == "tree_attention"):
                            found.append(Case(op, name, S, T))
    return found


def implementations(case: Case, is_gpu: bool) -> list[str]:
    if not case.is_attention:
        return ["triton", "xla"] if is_gpu else ["xla"]
    if not is_gpu:
        return ["xla", "jax.nn xla"]
    peers = [peer for peer in PEERS if peer != "torch flex" or case.S == FLEX_SLOTS]
    return ["triton", "xla", *peers]


def copies_needed(nbytes: int, is_gpu: bool) -> int:
    """Caches that take turns, together four times the L2 cache; one where one is as large."""
    return max(1, math.ceil(4 * L2_BYTES / nbytes)) if is_gpu else 2


def rounds_of_caches(copies: int, name: str, is_gpu: bool) -> int:
    """How often the caches take turns within one turn of the loop.

    "xla" is a loop itself, compiles longer, and does not notice the cost of another.
    """
    return 1 if name == "xla" or not is_gpu else math.ceil(TURN_CALLS / copies)


def repeats_needed(nbytes: int, bandwidth: float, seconds: float) -> int:
    """Calls that take `seconds` at the bandwidth of a copy."""
    return max(1, min(512, math.ceil(seconds * bandwidth / nbytes)))


# Programs


def chained(call: Callable, repeats: int, unrolled: int) -> Callable:
    """A program that calls an operation times * repeats * unrolled times on each of its caches.

    `call(q, cache, *rest)` returns the next call's query and an output. The inner loop has a fixed
    count: a GPU runs it without asking the host after each turn.
    """
    import jax
    from jax import lax

    def run(times, q, caches, rest):
        def turn(_, carry):
            q, out = carry
            for cache in caches * unrolled:
                q, out = call(q, cache, *rest)
            return q, out

        def turns(_, carry):
            return lax.fori_loop(0, repeats, turn, carry)

        _, out = jax.eval_shape(call, q, caches[0], *rest)
        nothing = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), out)
        q, out = lax.fori_loop(0, times, turns, (q, nothing))
        return q if out is None else out

    return jax.jit(run)


def output_is_query(attention: Callable) -> Callable:
    """For `chained`: nothing else runs between two calls."""
    return lambda *arguments: (attention(*arguments), None)


def output_hardly_counts(scores: Callable) -> Callable:
    """For `chained`: the query stays as it is, but none can tell before the scores are there."""
    from jax import lax

    def call(q, cache, length):
        out = lax.optimization_barrier(scores(q, cache, length))
        first = out[(slice(0, 1),) * out.ndim].ravel()[0]
        return q + (TINY * first).astype(q.dtype), out

    return call


def operation(case: Case, name: str) -> Callable:
    """`call` of `chained` for an implementation in JAX."""
    import jax

    from pallas_kernels import cache_scores, decode_attention, tree_attention

    if case.op.startswith("cache_scores"):
        mode = case.op.split()[1]

        def scores(q, cache, length):
            return cache_scores(q, cache, length, mode, implementation=name)

        return output_hardly_counts(scores)

    if name.startswith("jax.nn"):

        def peer(q, cache, *mask):
            mask = mask[0] if mask else None
            return jax.nn.dot_product_attention(
                q, *cache, mask=mask, implementation=name.split()[1]
            )

        return output_is_query(peer)

    ours = decode_attention if case.op == "decode_attention" else tree_attention

    def attention(q, cache, *rest):
        return ours(q, *cache, *rest, implementation=name)

    return output_is_query(attention)


class Inputs:
    """Random arguments for the JAX implementations of one (heads, S), made when asked for."""

    def __init__(self, case: Case, is_gpu: bool):
        self.heads, self.S, self.K, self.N = case.heads, case.S, case.K, case.K * case.G
        keys_alone = case.K * case.S * HEAD_DIM * 2
        self.pairs = copies_needed(2 * keys_alone, is_gpu)
        self.singles = copies_needed(keys_alone, is_gpu)

    def fits(self, case: Case) -> bool:
        return (self.heads, self.S) == (case.heads, case.S)

    def shapes(self, case: Case, name: str):
        """(q, caches, rest) of `chained` as shapes."""
        import jax
        import jax.numpy as jnp

        def of(*shape, dtype="bfloat16"):
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

        T, K, N, S, H = case.T, self.K, self.N, self.S, HEAD_DIM
        length = of(1, dtype="int32")
        if not case.is_attention:
            return of(1, N, H), (of(1, K, S, H),) * self.singles, (length,)
        if name.startswith("jax.nn"):
            caches = ((of(1, S, K, H),) * 2,) * self.pairs
            return of(1, T, N, H), caches, () if T == 1 else (of(1, 1, T, S, dtype="bool"),)
        caches = ((of(1, K, S, H),) * 2,) * self.pairs
        if case.op == "decode_attention":
            return of(1, N, H), caches, (length, of(1, K, H), of(1, K, H))
        fresh = of(1, T, K, H)
        return of(1, T, N, H), caches, (length, fresh, fresh, of(T, T, dtype="bool"))

    @functools.cached_property
    def _own(self):
        return self._random((1, self.K, self.S, HEAD_DIM), 0)

    @functools.cached_property
    def _peers(self):
        return self._random((1, self.S, self.K, HEAD_DIM), 1)

    def _random(self, shape, seed: int):
        keys = iterate_keys(seed)
        return [(normal(next(keys), shape), normal(next(keys), shape)) for _ in range(self.pairs)]

    def arrays(self, case: Case, name: str):
        import jax.numpy as jnp

        q, caches, rest = self.shapes(case, name)
        keys = iterate_keys(2)
        q = normal(next(keys), q.shape)
        if not case.is_attention:
            flat = [array for pair in self._own for array in pair]
            return q, tuple(flat[: len(caches)]), (jnp.asarray([self.S], jnp.int32),)
        tree = tree_mask(case.T)
        if name.startswith("jax.nn"):
            mask = jnp.ones((1, 1, case.T, self.S), bool).at[..., self.S - case.T :].set(tree)
            return q, tuple(self._peers), (mask,) if rest else ()
        fresh = normal(next(keys), rest[1].shape), normal(next(keys), rest[2].shape)
        rest = (jnp.asarray([self.S], jnp.int32), *fresh)
        if case.op == "tree_attention":
            rest = (*rest, jnp.asarray(tree))
        return q, tuple(self._own), rest


def iterate_keys(seed: int):
    import jax

    index = 0
    while True:
        yield jax.random.fold_in(jax.random.key(seed), index)
        index += 1


def normal(key, shape):
    import jax
    import jax.numpy as jnp

    return jax.random.normal(key, shape, jnp.bfloat16)


def tree_mask(T: int):
    """[T, T]: rows see themselves and about every other one before them."""
    import numpy as np

    return np.tril(np.random.default_rng(0).random((T, T)) < 0.5) | np.eye(T, dtype=bool)


# Timing


class JaxRunner:
    """A compiled program of `chained` and its arguments."""

    def __init__(self, program, arguments, calls: int):
        self._program, self._arguments, self._calls = program, arguments, calls
        self.times = 1

    def warm(self, seconds: float):
        """Chooses how often it runs so that a round takes `seconds`; returns an output."""
        import numpy as np

        out = self._run()
        if not np.isfinite(np.asarray(out).astype(np.float32)).all():
            raise FloatingPointError("the output is not finite")
        self.times = max(1, math.ceil(seconds / (self.round() * self._calls)))
        return out

    def round(self) -> float:
        """Seconds per call."""
        begin = time.perf_counter()
        self._run()
        return (time.perf_counter() - begin) / (self.times * self._calls)

    def _run(self):
        import jax
        import jax.numpy as jnp

        times = jnp.asarray(self.times, jnp.int32)
        return jax.block_until_ready(self._program(times, *self._arguments))


def interleaved(runners: dict[str, Any], rounds: int, seconds: float, most: float, failed: dict):
    """Seconds per call of each runner, {name: [...]}; one that raises moves to `failed`.

    A runner that has used `most` seconds and has three rounds gets no more.
    """
    times: dict[str, list[float]] = {}
    outputs: dict[str, Any] = {}
    spent = dict.fromkeys(runners, 0.0)
    for name, runner in runners.items():
        try:
            outputs[name] = runner.warm(seconds)
            times[name] = []
        except Exception as error:
            failed[name] = report.first_line(error)
    for _ in range(rounds):
        for name in list(times):
            if spent[name] > most and len(times[name]) >= 3:
                continue
            begin = time.perf_counter()
            try:
                times[name].append(runners[name].round())
            except Exception as error:
                failed[name] = report.first_line(error)
                del times[name]
                continue
            spent[name] += time.perf_counter() - begin
    return times, outputs


def relative_difference(ours, theirs) -> float:
    """The largest difference, over the largest value."""
    import numpy as np

    ours, theirs = (np.asarray(array).astype(np.float32) for array in (ours, theirs))
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


# Each of torch's peers runs in a process of its own: libraries and failures stay apart.


class TorchError(RuntimeError):
    pass


class Torch:
    """Asks a process of `torch_worker`; what it cannot do, and its silence, are TorchErrors."""

    STARTS = 10

    def __init__(self):
        self._process = None
        self._starts = 0

    def send(self, **message) -> None:
        if self._process is None:
            if self._starts == self.STARTS:
                raise TorchError(f"its process ended {self.STARTS} times")
            self._starts += 1
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--torch-worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # select sees a line only while it is in the pipe
            )
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self.close()
            raise TorchError("its process has ended") from error

    def receive(self, timeout: float) -> dict:
        if self._process is None:
            raise TorchError("its process has ended")
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.1, timeout))
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.close()
            raise TorchError("its process has ended" if ready else "no answer in time")
        answer = json.loads(line)
        if "error" in answer:
            raise TorchError(answer["error"])
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class TorchRunner:
    """A case that torch's process holds."""

    def __init__(self, torch: Torch, name: str):
        self._torch, self._name = torch, name
        self.details: dict = {}

    def warm(self, seconds: float):
        self._torch.send(do="start", name=self._name, seconds=seconds)
        self.details = self._torch.receive(60)

    def round(self) -> float:
        self._torch.send(do="round", name=self._name)
        return self._torch.receive(60)["seconds"]


def torch_worker() -> None:
    """Answers one line of JSON for each line: prepare, start and time a case, or forget all."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints, prints beside the answers
    cases: dict[str, TorchCase] = {}
    for line in sys.stdin:
        message = json.loads(line)
        do, name, broken = message["do"], message.get("name"), False
        try:
            if do == "prepare":
                cases[name] = TorchCase(name, **message["shape"])
                answer = {}
            elif do == "start":
                answer = cases[name].start(message["seconds"])
            elif do == "round":
                answer = {"seconds": cases[name].round()}
            else:
                import torch

                cases.clear()
                torch.cuda.empty_cache()
                answer = {}
        except Exception as error:
            answer = {"error": report.first_line(error)}
            broken = is_broken()
        print(json.dumps(answer), file=answers, flush=True)
        if broken:
            return


def is_broken() -> bool:
    """Whether an error has left torch's GPU unusable, so that only a new process helps."""
    try:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


class TorchCase:
    """One attention in torch, in a CUDA graph of many calls where that is possible."""

    def __init__(self, name: str, *, S: int, T: int, K: int, G: int, copies: int):
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch has no GPU here")
        self._torch = torch
        options = dict(dtype=torch.bfloat16, device="cuda")
        q = torch.randn(1, K * G, T, HEAD_DIM, **options)
        self._caches = [
            [torch.randn(1, K, S, HEAD_DIM, **options) for _ in "kv"] for _ in range(copies)
        ]
        tree = torch.as_tensor(tree_mask(T), device="cuda")
        if name == "torch flex":
            call = self._flex(q, tree, S, T, G)
        else:
            call = self._sdpa(q, tree, S, T, G)
        self._call = call
        with torch.inference_mode():
            for k, v in self._caches[:2]:
                out = call(k, v)
        torch.cuda.synchronize()
        if not bool(torch.isfinite(out).all()):
            raise FloatingPointError("the output is not finite")

    def _sdpa(self, q, tree, S, T, G):
        torch, mask = self._torch, None
        if T > 1:
            mask = torch.zeros(1, 1, T, S, dtype=q.dtype, device="cuda")
            mask[..., S - T :].masked_fill_(~tree, float("-inf"))
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda k, v: attention(q, k, v, attn_mask=mask, enable_gqa=G > 1)

    def _flex(self, q, tree, S, T, G):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch, mask, first = self._torch, None, S - T
        for name in ("recompile_limit", "accumulated_recompile_limit"):
            if hasattr(torch._dynamo.config, name):
                setattr(torch._dynamo.config, name, 256)
        if T > 1:

            def sees(b, h, row, slot):
                return (slot < first) | tree[row, (slot - first).clamp(min=0)]

            mask = create_block_mask(sees, None, None, T, S, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return lambda k, v: compiled(q, k, v, block_mask=mask, enable_gqa=G > 1)

    def _calls(self, turns: int):
        with self._torch.inference_mode():
            for _ in range(turns):
                for k, v in self._caches:
                    self._call(k, v)

    def _timed(self, function, *arguments) -> float:
        cuda = self._torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        function(*arguments)
        end.record()
        cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def start(self, seconds: float) -> dict:
        torch = self._torch
        self._calls(1)
        estimate = self._timed(self._calls, 2) / 2
        self._turns = max(1, min(math.ceil(seconds / estimate), 4000 // len(self._caches)))
        self._run, timing = functools.partial(self._calls, self._turns), "events"
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._calls(self._turns)
            graph.replay()
            torch.cuda.synchronize()
            self._run, timing = graph.replay, "graph"
        except Exception as error:
            timing += f"; no graph: {report.first_line(error)}"
            torch.cuda.synchronize()
        return {"timing": timing}

    def round(self) -> float:
        return self._timed(self._run) / (self._turns * len(self._caches))


# One case


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long is measured."""

    rounds: int
    program: float  # seconds of one turn of a program's outer loop, at the bandwidth of a copy
    round: float  # seconds of one round of one implementation
    most: float  # seconds after which a slow implementation gets no more rounds
    workers: int  # compilations at a time
    tried: int  # candidates of --tune for each key


GPU = Effort(rounds=9, program=4e-3, round=20e-3, most=1.0, workers=6, tried=20)
QUICK = Effort(rounds=2, program=1e-4, round=1e-3, most=0.5, workers=2, tried=2)


def run_case(case: Case, names, inputs: Inputs, torch: dict, bandwidth, effort, budget):
    """The rows of one case, one for each implementation; `torch` has a Torch for each peer."""
    import jax
    import jax.numpy as jnp

    failed: dict[str, str] = {}
    waiting = []
    for name in [name for name in names if name in TORCH]:
        try:
            shape = dict(S=case.S, T=case.T, K=case.K, G=case.G, copies=inputs.pairs)
            torch[name].send(do="prepare", name=name, shape=shape)
            waiting.append(name)
        except Exception as error:
            failed[name] = report.first_line(error)

    in_jax = [name for name in names if name not in TORCH]
    copies = inputs.pairs if case.is_attention else inputs.singles
    unrolled = {name: rounds_of_caches(copies, name, bool(torch)) for name in in_jax}
    calls = {name: copies * unrolled[name] for name in in_jax}  # in one turn of the loop
    repeats = {
        name: repeats_needed(calls[name] * case.read_bytes, bandwidth, effort.program)
        for name in in_jax
    }

    def compiled(name):
        shapes = inputs.shapes(case, name)
        times = jax.ShapeDtypeStruct((), jnp.int32)
        program = chained(operation(case, name), repeats[name], unrolled[name])
        return program.lower(times, *shapes).compile()

    tasks = {name: functools.partial(compiled, name) for name in in_jax}
    runners: dict[str, Any] = {}
    for name, program in report.attempt_all(tasks, effort.workers, PATIENCE).items():
        try:
            if isinstance(program, BaseException):
                raise program
            arrays = inputs.arrays(case, name)
            runners[name] = JaxRunner(program, arrays, repeats[name] * calls[name])
        except Exception as error:
            failed[name] = report.first_line(error)
    for name in waiting:
        try:
            torch[name].receive(min(90, budget.left + 20))
            runners[name] = TorchRunner(torch[name], name)
        except Exception as error:
            failed[name] = report.first_line(error)

    times, outputs = interleaved(runners, effort.rounds, effort.round, effort.most, failed)
    rows = []
    for name in names:
        row = {**case.fields(), "implementation": name}
        if name in failed:
            rows.append({**row, "error": failed[name]})
            continue
        median = statistics.median(times[name])
        row |= {
            "us": {"median": 1e6 * median, "min": 1e6 * min(times[name])},
            "rounds": len(times[name]),
            "read_bytes": case.read_bytes,
            "gb_per_s": case.read_bytes / median / 1e9,
            "share_of_copy": case.read_bytes / median / bandwidth,
        }
        if isinstance(runners[name], TorchRunner):
            row |= runners[name].details
        rows.append(row)
    if "triton" in times and "xla" in times:
        difference = relative_difference(outputs["triton"], outputs["xla"])
        rows[names.index("triton")]["difference_to_xla"] = difference
    for name in waiting:
        try:
            torch[name].send(do="forget")
            torch[name].receive(60)
        except Exception as error:
            print(f"{name}: {report.first_line(error)}", file=sys.stderr)
            torch[name].close()
    return rows


def print_row(row: dict) -> None:
    shape = f"{row['op']:21}{row['heads']:4}{row['S']:8}{row['T']:5}  {row['implementation']:13}"
    if "error" in row:
        print(f"{shape}  {row['error'][:100]}", flush=True)
        return
    print(
        f"{shape}{row['us']['median']:11.1f}{row['us']['min']:11.1f}"
        f"{row['gb_per_s']:9.0f}{row['share_of_copy']:8.1%}",
        flush=True,
    )


def bars(rows: list[dict]) -> list[dict]:
    """What docs ask of the kernels at S >= 32K; "softmax" cannot be held to one reading."""
    good = {}
    for row in rows:
        if row["implementation"] == "triton" and "error" not in row and row["S"] >= 32_768:
            good[row["op"], row["heads"], row["S"], row["T"]] = row
    found = []
    for (op, heads, S, T), row in good.items():
        if op != "cache_scores softmax" and T * row["G"] <= 64:
            value = row["share_of_copy"]
            what = f"{op} {heads} S={S} T={T}: share of the copy's bandwidth"
            found.append({"what": what, "value": value, "bar": 0.85, "met": value >= 0.85})
    for (op, heads, S, T), row in good.items():
        one = good.get(("decode_attention", heads, S, 1))
        if op == "tree_attention" and T == 64 and one:
            value = row["us"]["median"] / one["us"]["median"]
            what = f"{heads} S={S}: time of T=64 over time of T=1"
            found.append({"what": what, "value": value, "bar": 1.3, "met": value <= 1.3})
    return found


def measure(args, is_gpu: bool, effort: Effort, budget, document: dict) -> None:
    if args.quick:
        todo = cases(args.ops, (1024,), (1, 8), ("GQA",))
    else:
        todo = cases(args.ops)
    document |= {"rows": [], "left_out": []}
    if not is_gpu:
        document["not_on_a_cpu"] = ["triton", "jax.nn cudnn", *TORCH]
    print(
        f"{'operation':21}{'heads':4}{'S':>7}{'T':>5}  {'':13}{'us':>11}{'least us':>11}"
        f"{'GB/s':>9}{'share':>8}"
    )
    torch, inputs = ({name: Torch() for name in TORCH} if is_gpu else {}), None
    for case in todo:
        names = implementations(case, is_gpu)
        if budget.is_used_up:
            document["left_out"].append(case.fields())
            continue
        if inputs is None or not inputs.fits(case):
            inputs = None  # frees the arrays before the next ones are made
            inputs = Inputs(case, is_gpu)
        try:
            rows = run_case(
                case, names, inputs, torch, document["copy_bytes_per_second"], effort, budget
            )
        except Exception as error:
            line = report.first_line(error)
            rows = [{**case.fields(), "implementation": name, "error": line} for name in names]
        for row in rows:
            print_row(row)
        document["rows"] += rows
        document["bars"] = bars(document["rows"])
        report.save(document, args.out, "kernels")
    for process in torch.values():
        process.close()
    for bar in document.get("bars", []):
        verdict = "met" if bar["met"] else "MISSED"
        print(f"{verdict:7}{bar['value']:7.3f} against {bar['bar']}: {bar['what']}")
    for case in document["left_out"]:
        print(f"left out: {case}")


# Block sizes


def tree_candidates(default, rows: int, slots: int) -> list:
    """Block sizes to try for a tile of `rows` and a cache of `slots`, the default first."""
    from pallas_kernels.tree_attention.triton import MOST_PARTS
    from pallas_kernels.triton import padded

    def blocks(**changes):
        new = default._replace(**changes)
        most = max(default.parts, min(MOST_PARTS, -(-slots // new.slots)))
        return new._replace(parts=max(1, min(new.parts, most)))

    def cut(size: int):
        """Other rows, as many programs as before."""
        before, after = -(-rows // default.rows), -(-rows // size)
        return blocks(rows=size, parts=max(1, default.parts * before // after))

    other_warps, other_stages = 12 - default.warps, 5 - default.stages
    tried = [
        default,
        blocks(slots=32),
        blocks(slots=64),
        blocks(slots=128),
        blocks(parts=max(1, default.parts // 2)),
        blocks(parts=2 * default.parts),
        blocks(warps=other_warps),
        blocks(stages=other_stages),
        blocks(slots=128, stages=other_stages),
        blocks(slots=128, warps=other_warps),
        blocks(slots=32, warps=other_warps),
    ]
    if default.rows > 16:
        tried.append(cut(default.rows // 2))
    if default.rows < min(padded(rows), 128):
        tried.append(cut(2 * default.rows))
    return list(dict.fromkeys(tried))


def scores_candidates(default, slots: int) -> list:
    """Block sizes to try for a cache of `slots`, the default first."""

    def blocks(**changes):
        new = default._replace(**changes)
        return new._replace(parts=max(1, min(new.parts, 128, -(-slots // new.slots))))

    other_warps = 12 - default.warps
    tried = [
        default,
        blocks(slots=32),
        blocks(slots=64),
        blocks(slots=128),
        blocks(slots=256, warps=8),
        blocks(parts=max(1, default.parts // 2)),
        blocks(parts=2 * default.parts),
        blocks(warps=other_warps),
        blocks(stages=5 - default.stages),
        blocks(slots=128, warps=other_warps),
        blocks(slots=32, stages=3),
    ]
    return list(dict.fromkeys(tried))


def combined(default, ratios: dict):
    """The default with every field from the fastest candidate that changed it for the better.

    `ratios` are times over the default's, {candidate: ratio}.
    """
    best = default
    for field in default._fields:
        value = getattr(default, field)
        better = [b for b in ratios if getattr(b, field) != value and ratios[b] < 1 - LEAST_GAIN]
        if better:
            value = getattr(min(better, key=ratios.get), field)
        best = best._replace(**{field: value})
    return best


def unique_keys(specs: dict) -> dict:
    """{key: spec}, the first spec of each key."""
    found: dict = {}
    for spec in specs.values():
        found.setdefault(spec.key(), spec)
    return found


@dataclasses.dataclass(frozen=True)
class TuneCase:
    """One key of one operation. cache_scores has one entry for both of its modes."""

    op: str
    key: str
    spec: Any

    @property
    def modes(self) -> tuple[str, ...]:
        return ("dot", "softmax") if self.op == "cache_scores" else ("",)

    @property
    def read_bytes(self) -> int:
        import jax.numpy as jnp

        spec, arrays = self.spec, 1 if self.op == "cache_scores" else 2
        return arrays * spec.B * spec.K * spec.S * spec.H * jnp.dtype(spec.dtype).itemsize

    def default(self):
        spec = self.spec
        if self.op == "cache_scores":
            from pallas_kernels.cache_scores.triton import default_blocks

            return default_blocks(spec.B, spec.K * spec.G, spec.K, spec.S, spec.H, spec.dtype)
        from pallas_kernels.tree_attention.triton import default_blocks

        return default_blocks(spec.B, spec.T, spec.K * spec.G, spec.K, spec.S, spec.H, spec.dtype)

    def candidates(self) -> list:
        if self.op == "cache_scores":
            return scores_candidates(self.default(), self.spec.S)
        return tree_candidates(self.default(), self.spec.T * self.spec.G, self.spec.S)

    def operation(self, blocks, mode: str, interpret: bool):
        """`call` of `chained`."""
        options = dict(blocks=blocks, interpret=interpret)
        if self.op == "cache_scores":
            from pallas_kernels.cache_scores import triton as scores

            def call(q, cache, length):
                return scores.cache_scores(q, cache, length, mode=mode, **options)

            return output_hardly_counts(call)
        from pallas_kernels.tree_attention import triton as attention

        def call(q, cache, *rest):
            return attention.tree_attention(q, *cache, *rest, **options)[0]

        return output_is_query(call)

    def arguments(self, is_gpu: bool):
        """(q, caches, rest) of `chained`."""
        if self.op == "cache_scores":
            from pallas_kernels.cache_scores.specs import inputs
        else:
            from pallas_kernels.tree_attention.specs import inputs
        caches = []
        for seed in range(copies_needed(self.read_bytes, is_gpu) if is_gpu else 1):
            arrays = inputs(self.spec, length=self.spec.S, seed=seed)
            if self.op == "cache_scores":
                q, cache, *rest = arrays.values()
            else:
                q, k, v, *rest = arrays.values()
                cache = (k, v)
            caches.append(cache)
        return q, tuple(caches), tuple(rest)


def tune_cases(quick: bool) -> list[TuneCase]:
    """Every key, those of Llama-3.1-8B first."""
    from pallas_kernels.cache_scores import specs as scores
    from pallas_kernels.tree_attention import specs as tree

    tables = {"tree_attention": tree.SPECS, "cache_scores": scores.SPECS}
    if quick:
        tables = {
            "tree_attention": {"quick": tree.Spec(4, K=1, G=2, H=16, S=64)},
            "cache_scores": {"quick": scores.Spec(K=1, G=2, H=16, S=64)},
        }
    found = [
        (name, TuneCase(op, key, spec))
        for op, specs in tables.items()
        for key, spec in unique_keys(specs).items()
        for name in [next(n for n, s in specs.items() if s is spec)]
    ]
    found.sort(key=lambda pair: not pair[0].startswith("llama3.1-8b"))
    return [case for _, case in found]


def tune_one(case: TuneCase, bandwidth: float, effort: Effort, is_gpu: bool) -> dict:
    """Times the candidates of one key, then the best of them against the default once more."""
    import jax
    import jax.numpy as jnp

    q, caches, rest = case.arguments(is_gpu)
    unrolled = rounds_of_caches(len(caches), "triton", is_gpu)
    calls = unrolled * len(caches)
    repeats = repeats_needed(calls * case.read_bytes, bandwidth, effort.program)
    default, failed = case.default(), {}

    def compiled(blocks, mode):
        call = case.operation(blocks, mode, interpret=not is_gpu)
        times = jax.ShapeDtypeStruct((), jnp.int32)
        return chained(call, repeats, unrolled).lower(times, q, caches, rest).compile()

    def runners_for(candidates) -> dict:
        tasks = {(b, m): functools.partial(compiled, b, m) for b in candidates for m in case.modes}
        found = {}
        programs = report.attempt_all(tasks, 2 * effort.workers, PATIENCE)
        for (blocks, mode), program in programs.items():
            if isinstance(program, BaseException):
                failed[blocks, mode] = report.first_line(program)
            else:
                found[blocks, mode] = JaxRunner(program, (q, caches, rest), repeats * calls)
        return found

    def ratios_of(runners: dict, rounds: int) -> tuple[dict, dict]:
        """Time over the default's, over both modes the geometric mean; and all times."""
        times, outputs = interleaved(runners, rounds, effort.round / 2, effort.most, failed)
        for (blocks, mode), out in outputs.items():
            if (difference := relative_difference(out, outputs.get((default, mode), out))) > 0.05:
                failed[blocks, mode] = f"differs from the default's output by {difference:.2g}"
                times.pop((blocks, mode), None)
        medians = {pair: statistics.median(values) for pair, values in times.items()}
        found = {}
        for blocks in dict.fromkeys(blocks for blocks, _ in medians):
            pairs = [(medians.get((blocks, m)), medians.get((default, m))) for m in case.modes]
            if all(mine and base for mine, base in pairs):
                shares = [mine / base for mine, base in pairs]
                found[blocks] = math.prod(shares) ** (1 / len(shares))
        return found, medians

    candidates = case.candidates()[: effort.tried]
    runners = runners_for(candidates)
    if not any(blocks == default for blocks, _ in runners):
        raise RuntimeError(f"the default {default} does not compile: {next(iter(failed.values()))}")
    ratios, medians = ratios_of(runners, max(2, effort.rounds // 2))
    mixed = combined(default, ratios)
    if mixed not in candidates:
        runners |= runners_for([mixed])
        ratios |= ratios_of({p: r for p, r in runners.items() if p[0] in (default, mixed)}, 3)[0]
    if default not in ratios:
        raise RuntimeError(f"the default {default} does not run: {next(iter(failed.values()))}")
    finalists = (default, *sorted(ratios, key=ratios.get)[:2])
    last, times = ratios_of({p: r for p, r in runners.items() if p[0] in finalists}, effort.rounds)
    best = min(last, key=last.get)
    return {
        "op": case.op,
        "key": case.key,
        "default": default._asdict(),
        "best": best._asdict(),
        "ratio": last[best],
        "default_us": {m or case.op: 1e6 * times[default, m] for m in case.modes},
        "best_us": {m or case.op: 1e6 * times[best, m] for m in case.modes},
        "share_of_copy": case.read_bytes / times[best, case.modes[0]] / bandwidth,
        "kept": last[best] <= 1 - LEAST_GAIN,
        "tried": [{**b._asdict(), "ratio": r} for b, r in ratios.items()],
        "failed": [{**b._asdict(), "mode": m, "error": e} for (b, m), e in failed.items()],
    }


def tune(args, is_gpu: bool, effort: Effort, budget, document: dict) -> None:
    import jax

    from pallas_kernels import device

    device.tuned = lambda op, shape: None  # the default is the rule, not an earlier table
    name = device.file_name(jax.devices()[0].device_kind)
    table: dict[str, dict] = {"tree_attention": {}, "cache_scores": {}}
    document |= {"file": name, "rows": [], "left_out": []}
    for case in tune_cases(args.quick):
        if budget.is_used_up:
            document["left_out"].append({"op": case.op, "key": case.key})
            print(f"left out: {case.op} {case.key}")
            continue
        try:
            row = tune_one(case, document["copy_bytes_per_second"], effort, is_gpu)
        except Exception as error:
            row = {"op": case.op, "key": case.key, "error": report.first_line(error)}
        document["rows"].append(row)
        print(f"{case.op}: {case.key}", flush=True)
        if "error" in row:
            print(f"    {row['error']}", flush=True)
        else:
            for label in ("default", "best"):
                blocks = " ".join(f"{field}={value}" for field, value in row[label].items())
                us = " / ".join(f"{value:.1f}" for value in row[f"{label}_us"].values())
                print(f"    {label:8}{us:>16} us  {blocks}")
            print(
                f"    ratio {row['ratio']:.3f}, {row['share_of_copy']:.1%} of a copy, "
                f"{len(row['tried'])} tried, {len(row['failed'])} failed",
                flush=True,
            )
            if row["kept"]:
                table[case.op][case.key] = row["best"]
        report.save(document, args.out, "tune")
        write_table(table, name, args.out, is_gpu)
    write_table(table, name, args.out, is_gpu)


def write_table(table: dict, name: str, out: Path | None, is_gpu: bool) -> None:
    """Into the package where it was measured on a GPU, and into --out: only that may come back."""
    text = json.dumps(table, indent=1, sort_keys=True) + "\n"
    folders = [report.ROOT / "pallas_kernels" / "tuned"] if is_gpu else []
    for folder in folders + ([out] if out is not None else []):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--tune", action="store_true", help="find block sizes instead")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--torch-worker", action="store_true", help=argparse.SUPPRESS)
    report.add_budget(parser)
    report.add_out(parser)
    args = parser.parse_args()
    if args.torch_worker:
        return torch_worker()

    import jax

    is_gpu = jax.default_backend() == "gpu"
    if not is_gpu and not args.quick:
        parser.error("this needs a GPU; --quick runs tiny shapes on a CPU")
    budget = report.Budget(args.minutes)
    bandwidth = report.copy_bandwidth(2**31 if is_gpu else 2**25)
    nominal = report.nominal_bandwidth(jax.devices()[0].device_kind)
    print(f"{jax.devices()[0].device_kind}: a copy moves {bandwidth / 1e9:.0f} GB/s")
    document = {
        **report.facts(),
        "dtype": "bfloat16",
        "head_dim": HEAD_DIM,
        "copy_bytes_per_second": bandwidth,
        "nominal_bytes_per_second": nominal,
        "complete": False,
    }
    effort = QUICK if args.quick else GPU
    run = tune if args.tune else measure
    run(args, is_gpu, effort, budget, document)
    document |= {"complete": not document["left_out"], "seconds": budget.used}
    report.write(document, args.out, "tune" if args.tune else "kernels")
    report.leave()


if __name__ == "__main__":
    main()

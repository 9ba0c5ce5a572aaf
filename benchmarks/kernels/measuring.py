# SPDX-License-Identifier: Apache-2.0
"""Times the kernels beside their peers, case by case.

Knows how each implementation wants its arguments. A case that fails is a row with its error.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report
from benchmarks.kernels import programs
from benchmarks.kernels.cases import HEAD_DIM, Case, cases, tree_mask
from benchmarks.kernels.peers import TORCH, Torch, TorchRunner
from pallas_kernels import cache_scores, decode_attention, tree_attention

PEERS = ("jax.nn xla", "jax.nn cudnn", *TORCH)
FLEX_SLOTS = 106_496


def implementations(case: Case, is_gpu: bool) -> list[str]:
    if not case.is_attention:
        return ["triton", "xla"] if is_gpu else ["xla"]
    if not is_gpu:
        return ["xla", "jax.nn xla"]
    peers = [peer for peer in PEERS if peer != "torch flex" or case.S == FLEX_SLOTS]
    return ["triton", "xla", *peers]


def operation(case: Case, name: str) -> Callable:
    """`call` of `chained` for an implementation in JAX."""
    if case.op.startswith("cache_scores"):
        mode = case.op.split()[1]

        def scores(q, cache, length):
            return cache_scores(q, cache, length, mode, implementation=name)

        return programs.output_hardly_counts(scores)

    if name.startswith("jax.nn"):

        def peer(q, cache, *mask):
            mask = mask[0] if mask else None
            return jax.nn.dot_product_attention(
                q, *cache, mask=mask, implementation=name.split()[1]
            )

        return programs.output_is_query(peer)

    ours = decode_attention if case.op == "decode_attention" else tree_attention

    def attention(q, cache, *rest):
        return ours(q, *cache, *rest, implementation=name)

    return programs.output_is_query(attention)


class Inputs:
    """Random arguments for the JAX implementations of one (heads, S), made when asked for."""

    def __init__(self, case: Case, is_gpu: bool):
        self.heads, self.S, self.K, self.N = case.heads, case.S, case.K, case.K * case.G
        keys_alone = case.K * case.S * HEAD_DIM * 2
        self.pairs = programs.copies_needed(2 * keys_alone, is_gpu)
        self.singles = programs.copies_needed(keys_alone, is_gpu)

    def fits(self, case: Case) -> bool:
        return (self.heads, self.S) == (case.heads, case.S)

    def shapes(self, case: Case, name: str):
        """(q, caches, rest) of `chained` as shapes."""

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
    index = 0
    while True:
        yield jax.random.fold_in(jax.random.key(seed), index)
        index += 1


def normal(key, shape):
    return jax.random.normal(key, shape, jnp.bfloat16)


def run_case(case: Case, names, inputs: Inputs, torch: dict, bandwidth, effort, budget):
    """The rows of one case, one for each implementation; `torch` has a Torch for each peer."""
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
    unrolled = {name: programs.rounds_of_caches(copies, name, bool(torch)) for name in in_jax}
    calls = {name: copies * unrolled[name] for name in in_jax}  # in one turn of the loop
    repeats = {
        name: programs.repeats_needed(calls[name] * case.read_bytes, bandwidth, effort.program)
        for name in in_jax
    }

    def compile_one(name):
        shapes = inputs.shapes(case, name)
        return programs.compiled(operation(case, name), shapes, repeats[name], unrolled[name])

    tasks = {name: functools.partial(compile_one, name) for name in in_jax}
    runners: dict[str, Any] = {}
    for name, program in report.attempt_all(tasks, effort.workers, programs.PATIENCE).items():
        try:
            if isinstance(program, BaseException):
                raise program
            arrays = inputs.arrays(case, name)
            runners[name] = programs.JaxRunner(program, arrays, repeats[name] * calls[name])
        except Exception as error:
            failed[name] = report.first_line(error)
    for name in waiting:
        try:
            torch[name].receive(min(90, budget.left + 20))
            runners[name] = TorchRunner(torch[name], name)
        except Exception as error:
            failed[name] = report.first_line(error)

    times, outputs = programs.time_runners(runners, effort, effort.rounds, effort.round, failed)
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
        difference = programs.relative_difference(outputs["triton"], outputs["xla"])
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


def measure(args, is_gpu: bool, effort: programs.Effort, budget, document: dict) -> None:
    if args.quick:
        todo = cases(args.ops, (1024,), (1, 8), ("GQA",))
    else:
        todo = cases(args.ops)
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
    report.show_bars(document)
    for case in document["left_out"]:
        print(f"left out: {case}")

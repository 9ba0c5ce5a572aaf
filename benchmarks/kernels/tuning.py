# SPDX-License-Identifier: Apache-2.0
"""Times block sizes for every key of the kernels' `specs.py`, and writes the table of the best.

Knows which block sizes are worth a try. Of the best one and the rule's, the table has the rule's if
the best is not clearly faster: a line serves other capacities too, where nothing nearer is.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report
from benchmarks.kernels import programs
from pallas_kernels import device
from pallas_kernels.cache_scores import specs as scores_specs
from pallas_kernels.cache_scores import triton as scores
from pallas_kernels.tree_attention import specs as tree_specs
from pallas_kernels.tree_attention import triton as attention
from pallas_kernels.triton import padded

LEAST_GAIN = 0.02  # block sizes are kept if they save this share of the rule's time


def tree_candidates(default, rows: int, slots: int) -> list:
    """Block sizes to try for a tile of `rows` and a cache of `slots`, the default first."""

    def blocks(**changes):
        new = default._replace(**changes)
        most = max(default.parts, min(attention.MOST_PARTS, -(-slots // new.slots)))
        return new._replace(parts=max(1, min(new.parts, most)))

    def cut(size: int):
        """Other rows, as many of them as before."""
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
        blocks(stages=4),
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
        spec, arrays = self.spec, 1 if self.op == "cache_scores" else 2
        return arrays * spec.B * spec.K * spec.S * spec.H * jnp.dtype(spec.dtype).itemsize

    def default(self):
        spec = self.spec
        if self.op == "cache_scores":
            rule, rows = scores.default_blocks, ()
        else:
            rule, rows = attention.default_blocks, (spec.T,)
        return rule(
            device.gpu(), spec.B, *rows, spec.K * spec.G, spec.K, spec.S, spec.H, spec.dtype
        )

    def candidates(self) -> list:
        if self.op == "cache_scores":
            return scores_candidates(self.default(), self.spec.S)
        return tree_candidates(self.default(), self.spec.T * self.spec.G, self.spec.S)

    def operation(self, blocks, mode: str, interpret: bool):
        """`call` of `chained`."""
        options = dict(blocks=blocks, interpret=interpret)
        if self.op == "cache_scores":

            def call(q, cache, length):
                return scores.cache_scores(q, cache, length, mode=mode, **options)

            return programs.output_hardly_counts(call)

        def call(q, cache, *rest):
            return attention.tree_attention(q, *cache, *rest, **options)[0]

        return programs.output_is_query(call)

    def arguments(self, is_gpu: bool):
        """(q, caches, rest) of `chained`."""
        specs = scores_specs if self.op == "cache_scores" else tree_specs
        caches = []
        for seed in range(programs.copies_needed(self.read_bytes, is_gpu) if is_gpu else 1):
            arrays = specs.inputs(self.spec, length=self.spec.S, seed=seed)
            if self.op == "cache_scores":
                q, cache, *rest = arrays.values()
            else:
                q, k, v, *rest = arrays.values()
                cache = (k, v)
            caches.append(cache)
        return q, tuple(caches), tuple(rest)


def tune_cases(quick: bool) -> list[TuneCase]:
    """Every key, those of Llama-3.1-8B first."""
    tables = {"tree_attention": tree_specs.SPECS, "cache_scores": scores_specs.SPECS}
    if quick:
        tables = {
            "tree_attention": {"quick": tree_specs.Spec(4, K=1, G=2, H=16, S=64)},
            "cache_scores": {"quick": scores_specs.Spec(K=1, G=2, H=16, S=64)},
        }
    found = [
        (name, TuneCase(op, key, spec))
        for op, specs in tables.items()
        for key, spec in unique_keys(specs).items()
        for name in [next(n for n, s in specs.items() if s is spec)]
    ]
    found.sort(key=lambda pair: not pair[0].startswith("llama3.1-8b"))
    return [case for _, case in found]


def tune_one(case: TuneCase, bandwidth: float, effort: programs.Effort, is_gpu: bool) -> dict:
    """Times the candidates of one key, then the best of them against the default once more."""
    q, caches, rest = case.arguments(is_gpu)
    unrolled = programs.rounds_of_caches(len(caches), "triton", is_gpu)
    calls = unrolled * len(caches)
    repeats = programs.repeats_needed(calls * case.read_bytes, bandwidth, effort.program)
    default, failed = case.default(), {}

    def program(blocks, mode):
        call = case.operation(blocks, mode, interpret=not is_gpu)
        return programs.compiled(call, (q, caches, rest), repeats, unrolled)

    def runners_for(candidates) -> dict:
        tasks = {(b, m): functools.partial(program, b, m) for b in candidates for m in case.modes}
        found = {}
        made = report.attempt_all(tasks, 2 * effort.workers, programs.PATIENCE)
        for pair, one in made.items():
            if isinstance(one, BaseException):
                failed[pair] = report.first_line(one)
            else:
                found[pair] = programs.JaxRunner(one, (q, caches, rest), repeats * calls)
        return found

    def ratios_of(runners: dict, rounds: int) -> tuple[dict, dict]:
        """Time over the default's, over both modes the geometric mean; and all times."""
        times, outputs = programs.time_runners(runners, effort, rounds, effort.round / 2, failed)
        for (blocks, mode), out in outputs.items():
            difference = programs.relative_difference(out, outputs.get((default, mode), out))
            if difference > 0.05:
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
        "op": case.op, "key": case.key, "default": default._asdict(), "best": best._asdict(),
        "ratio": last[best],
        "default_us": {m or case.op: 1e6 * times[default, m] for m in case.modes},
        "best_us": {m or case.op: 1e6 * times[best, m] for m in case.modes},
        "share_of_copy": case.read_bytes / times[best, case.modes[0]] / bandwidth,
        "kept": last[best] <= 1 - LEAST_GAIN,
        "tried": [{**b._asdict(), "ratio": r} for b, r in ratios.items()],
        "failed": [{**b._asdict(), "mode": m, "error": e} for (b, m), e in failed.items()],
    }  # fmt: skip


def tune(args, is_gpu: bool, effort: programs.Effort, budget, document: dict) -> None:
    device.tuned = lambda chip, op, shape: None  # the default is the rule, not an earlier table
    name = device.file_name(jax.devices()[0].device_kind)
    table: dict[str, dict] = {"tree_attention": {}, "cache_scores": {}}
    document["file"] = name
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
            table[case.op][case.key] = row["best" if row["kept"] else "default"]
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

# SPDX-License-Identifier: Apache-2.0
"""Products of few rows on a GPU: time per call, and bytes per second against a plain copy.

    python -m benchmarks products --out benchmarks/results/h200

For the shapes of the kernel's `specs.py` and 1, 8 and 16 rows, in one interleaved run: "triton",
"xla" (cuBLAS, or XLA's own kernels), and "xla, few rows", which pads to 8. int8 weights are those
of drafts; XLA writes them out as bfloat16 first, or not, as it likes. How a time comes about is
told in `python -m benchmarks kernels --help`: weights of several products take turns where one
would stay in the L2 cache. A case that fails is a row with its error.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence

from benchmarks import report
from benchmarks.kernels import programs
from pallas_kernels import native, product
from pallas_kernels.product.specs import SPECS, Spec, inputs

ROWS = (1, 8, 16)


def implementations(rows: int, is_gpu: bool) -> list[str]:
    if not is_gpu:
        return [*(["native"] if native.status(try_now=True).state == "ready" else []), "xla"]
    return ["triton", "xla", *(["xla, few rows"] if rows < 8 else [])]


def run_case(name: str, spec: Spec, is_gpu: bool, bandwidth: float, effort) -> list[dict]:
    """A row for each implementation."""
    names = implementations(spec.rows, is_gpu)
    failed: dict[str, str] = {}
    copies = programs.copies_needed(spec.read_bytes, is_gpu)
    unrolled = programs.rounds_of_caches(copies, "", is_gpu)
    calls = copies * unrolled
    repeats = programs.repeats_needed(calls * spec.read_bytes, bandwidth, effort.program)
    several = [inputs(spec, seed=seed) for seed in range(copies)]
    rows = several[0]["rows"]
    matrices = tuple({k: v for k, v in arrays.items() if k != "rows"} for arrays in several)

    def compile_one(implementation: str):
        def run(rows, matrix):
            scales = matrix.get("scales")
            return product(rows, matrix["weights"], scales=scales, implementation=implementation)

        call = programs.output_hardly_counts(lambda rows, matrix, _: run(rows, matrix))
        return programs.compiled(call, (rows, matrices, (rows,)), repeats, unrolled)

    tasks = {one: functools.partial(compile_one, one) for one in names}
    runners = {}
    for one, program in report.attempt_all(tasks, effort.workers, programs.PATIENCE).items():
        if isinstance(program, BaseException):
            failed[one] = report.first_line(program)
        else:
            arguments = rows, matrices, (rows,)
            runners[one] = programs.JaxRunner(program, arguments, repeats * calls)
    times, outputs = programs.time_runners(runners, effort, effort.rounds, effort.round, failed)
    found = []
    for one in names:
        row = {"product": name, **spec._asdict(), "implementation": one}
        if one in failed:
            found.append({**row, "error": failed[one]})
            continue
        median = statistics.median(times[one])
        row |= {
            "us": {"median": 1e6 * median, "min": 1e6 * min(times[one])},
            "rounds": len(times[one]),
            "read_bytes": spec.read_bytes,
            "gb_per_s": spec.read_bytes / median / 1e9,
            "share_of_copy": spec.read_bytes / median / bandwidth,
        }
        if one != "xla" and "xla" in outputs:
            row["difference_to_xla"] = programs.relative_difference(outputs[one], outputs["xla"])
        found.append(row)
    return found


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("products", __doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    report.add_budget(parser)
    args = parser.parse_args(argv)
    is_gpu, budget = report.on_gpu(parser, args.quick), report.Budget(args.minutes)
    document = report.begun(is_gpu)
    effort = programs.QUICK if args.quick else programs.GPU
    shapes = {name: spec for name, spec in SPECS.items() if spec.rows == 1}
    if args.quick:
        shapes = {"quick": Spec(48, 64), "quick int8": Spec(48, 64, weights="int8")}
    for name, spec in shapes.items():
        for rows in ROWS:
            if budget.is_used_up:
                document["left_out"].append({"product": name, "rows": rows})
                continue
            bandwidth = document["copy_bytes_per_second"]
            found = run_case(name, spec._replace(rows=rows), is_gpu, bandwidth, effort)
            for row in found:
                shape = f"{name:26}{rows:4} rows  {row['implementation']:14}"
                if "error" in row:
                    print(f"{shape}  {row['error'][:100]}", flush=True)
                else:
                    print(
                        f"{shape}{row['us']['median']:9.1f} us{row['gb_per_s']:8.0f} GB/s"
                        f"{row['share_of_copy']:8.1%}",
                        flush=True,
                    )
            document["rows"] += found
            report.save(document, args.out, "products")
    document |= {"complete": not document["left_out"], "seconds": budget.used}
    report.write(document, args.out, "products")
    report.leave()

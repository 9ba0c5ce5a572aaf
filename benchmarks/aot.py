# SPDX-License-Identifier: Apache-2.0
"""What the GPU's compiler makes of each kernel and of whole decode steps, on a machine without one.

    JAX_PLATFORMS=cpu python -m benchmarks aot --out benchmarks/results/aot
    JAX_PLATFORMS=cpu python -m benchmarks aot --only narrow --name narrow --out ...
    JAX_PLATFORMS=cpu python -m benchmarks aot --only ranks lazily 16K --name lazy --out ...

Needs the CUDA plugin (see tools/aot.py). The document also says what a call has to do: bytes read
once, operations, and the time that both take at least on a chip of the nominal speed.
Nothing is run on a GPU. One process per case, `--jobs` at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks import report
from tools import aot

# Bytes and bfloat16 operations per second, from the makers' data sheets.
CHIPS = {"a100": (2.039e12, 312e12), "h100": (3.35e12, 989e12), "h200": (4.8e12, 989e12)}


BYTES = {"bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}  # of a number


def work(case: str, shapes: dict) -> dict:
    """What one call has to read and compute; of a cache when it is full."""
    if case.startswith("narrow_product"):
        (_, T, inputs), outputs = shapes["rows"][0], 16 * shapes["values"][0][0]
        read = sum(math.prod(shape) * BYTES[dtype] for shape, dtype in shapes.values())
        return _work(read, 2 * T * inputs * outputs, case)
    (B, K, S, H), dtype = shapes["k_cache"]
    row = H + 1 if dtype == "int8" else H * (4 if dtype == "float32" else 2)
    if case.startswith("tree_attention"):
        _, T, N, _ = shapes["q"][0]
        cache, operations = 2 * B * K * S * row, 4 * B * T * N * S * H
    else:
        N, passes = shapes["q_last"][0][1], 2 if " softmax " in case else 1
        cache, operations = passes * B * K * S * row, 2 * passes * B * N * S * H
        if passes == 1:
            operations = 2 * B * K * S * H  # the group's queries are added first
    return _work(cache, operations, case)


def _work(read: int, operations: int, case: str) -> dict:
    bounds = {
        chip: 1e6 * max(read / bandwidth, operations / peak)
        for chip, (bandwidth, peak) in CHIPS.items()
        if "float32" not in case
    }
    return {"read_bytes": read, "operations": operations, "bound_us": bounds}


def main(argv: Sequence[str]) -> None:
    parser = report.parser_of("aot", __doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="cases with one of these in the name"
    )
    parser.add_argument("--name", default="aot", help="of the result (default: %(default)s)")
    options = parser.parse_args(argv)

    kernels = {name: shapes for name, (_, shapes) in aot.kernel_cases().items()}
    wanted = [(case, target) for case in kernels for target in ("a100", "h100")]
    wanted += [(case, "a100") for case in aot.STEPS]
    wanted += [(case, "a100") for case in aot.TRAINING]
    wanted = [
        (case, target) for case, target in wanted if any(part in case for part in options.only)
    ]
    cases: dict[str, dict] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for (case, target), found in zip(
            wanted, pool.map(lambda pair: aot.compile_case(*pair), wanted), strict=True
        ):
            entry = cases.setdefault(case, work(case, kernels[case]) if case in kernels else {})
            entry[target] = {k: v for k, v in found.items() if k not in ("case", "target")}
            for kernel in found["kernels"]:
                print(
                    f"{case:38} {target} {kernel['name'].removeprefix('tsjax_'):26} "
                    f"{kernel['registers']:4} registers {kernel['spilled_bytes']:5} spilled "
                    f"{kernel['shared_bytes'] or 0:7} B shared",
                    flush=True,
                )
            if case in aot.STEPS:
                print(f"{case:38} {target} temp {found['temp_bytes'] / 1e6:,.0f} MB", flush=True)
    document = {"cases": cases, "chips": CHIPS}
    if set(aot.TRAINING) <= set(cases):
        document["train_heads_bytes"] = {
            "a100": aot.training_bytes([cases[case]["a100"] for case in aot.TRAINING])
        }
        print(f"train_heads: {document['train_heads_bytes']['a100'] / 1e9:.1f} GB")
    report.write(document, options.out, options.name)

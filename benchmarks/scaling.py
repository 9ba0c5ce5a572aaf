# SPDX-License-Identifier: Apache-2.0
"""What fits on several devices, and what they send: compiles for GPUs, writes docs/devices.md.

    JAX_PLATFORMS=cpu python -m benchmarks scaling --compile --out benchmarks/results/aot
    python -m benchmarks scaling             writes the tables of the page
    python -m benchmarks scaling --check     exits with 1 if that would change it

The first needs the CUDA plugin (see tools/aot.py) and keeps what it has found before. Nothing is
run on a GPU. The tables are counted by `tsjax.measure.layout`, and read from the compiled programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import report
from benchmarks.table_parts import head, line, read, write
from tools import aot
from tsjax.decoding.held import USABLE
from tsjax.files.presets import model_preset
from tsjax.measure.layout import layout
from tsjax.methods.devices import GPUS

MODELS = ("qwen2.5-14b", "qwen2.5-32b", "llama3.1-70b")
MESHES = {  # model, slots; by tokens
    131_072: ((1, 1), (2, 1), (4, 1), (8, 1)),
    1_048_576: ((4, 1), (8, 1), (8, 4)),
}
CHIPS = {"a100": "A100, 80 GB", "h100": "H100, 80 GB", "h200": "H200, 141 GB"}


def fits() -> str:
    """Bytes of each device, and the least time of a step where they have room."""
    titles = "model", "tokens", "model x slots", "GB of weights, cache"
    lines = head(*titles, *CHIPS.values())
    for name in MODELS:
        cfg = model_preset(name)
        for context, meshes in MESHES.items():
            for model, slots in meshes:
                found = layout(name, cfg, {"data": 1, "model": model, "slots": slots}, context)
                *weights, cache = found.parts
                room = [found.each <= USABLE * GPUS[chip].memory for chip in CHIPS]
                if not any(room):
                    continue
                (table,) = (one.each for one in weights if one.name == "vocabulary")
                nbytes = found.each - (0 if cfg.tie_embeddings else table / 2)
                cells = (
                    f"{1e3 * nbytes / GPUS[chip].bytes_per_second:.1f}" if has else "no room"
                    for chip, has in zip(CHIPS, room, strict=True)
                )
                held = sum(one.each for one in weights)
                parts = f"{held / 1e9:.1f}, {cache.each / 1e9:.1f}"
                lines.append(line(name, f"{context:,}", f"{model} x {slots}", parts, *cells))
    return "\n".join(lines)


def compiled() -> str:
    """What the compiler says of steps on A100s: of plain decoding, then of TokenSwift."""
    titles = "GB of each device", "collectives", "MB sent"
    lines = head("model", "tokens", "model x slots", *titles)
    pairs: dict[tuple, list[dict]] = {}
    for case, found in read("scaling", "aot")["cases"].items():
        step = aot.SCALING[case]
        pairs.setdefault((step.model, step.capacity, *step.mesh[1:]), []).append(found)
    for (name, tokens, model, slots), pair in pairs.items():
        columns = (
            [f"{memory(found) / 1e9:.1f}" for found in pair],
            [f"{found['sent']['step_count']}" for found in pair],
            [f"{found['sent']['step'] / 1e6:.1f}" for found in pair],
        )
        cells = map(", ".join, columns)
        lines.append(line(name, f"{tokens:,}", f"{model} x {slots}", *cells))
    return "\n".join(lines)


def memory(found: dict) -> int:
    """Bytes of a device while the program runs."""
    used = sum(found[f"{part}_bytes"] for part in ("argument", "temp", "output"))
    return used - found["alias_bytes"]


def largest(found: dict) -> int:
    """Bytes of the largest collective of a usual step."""
    return max(one["bytes"] for one in found["sent"]["each"] if one["inside"] == ["loop"])


def compile_all(out, only: str) -> None:
    asked = {"target": "a100"}
    document = report.series(out, "scaling", asked, "cases")
    document["cases"] = dict(document["cases"])
    for case in aot.SCALING:
        if only in case and case not in document["cases"]:
            found = aot.compile_case(case, "a100")
            kept = [key for key in found if key not in ("case", "target", "kernels", "program")]
            document["cases"][case] = {key: found[key] for key in kept}
            print(f"{case}: {memory(found) / 1e9:.1f} GB, {found['seconds']} s", flush=True)
            report.save(document, out, "scaling")
    order = [case for case in aot.SCALING if case in document["cases"]]
    document["cases"] = {case: document["cases"][case] for case in order}
    report.write(document, out, "scaling")


def main(argv: Sequence[str]) -> int | None:
    parser = report.parser_of("scaling", __doc__)
    parser.add_argument("--compile", action="store_true", help="the programs of the second table")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    if options.compile:
        compile_all(options.out, options.only)
        return None
    sections = {("docs/devices.md", "fits"): fits, ("docs/devices.md", "compiled"): compiled}
    return write(sections, options.check)

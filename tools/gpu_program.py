# SPDX-License-Identifier: Apache-2.0
"""What a program compiled for a GPU makes the host and the chip do, read from XLA's dump.

Knows the text of XLA's thunk sequence and of its optimised HLO. Compiles and runs nothing. Kernels
inside of CUDA graphs are started by the chip, all others by the host, one by one; at a condition or
a loop outside of a graph the host waits for the chip.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

KERNELS = ("kCustomKernel", "kKernel", "kCopy", "kGemm", "kCublasLtMatmul", "kCustomCall")


class Kernel(NamedTuple):
    """One start of a kernel or a copy, as written: the body of a loop counts once.

    Attributes:
      loops: how many loops it lies in.
      blocks: of its grid; 0 where the dump does not say.
    """

    name: str
    in_graph: bool
    loops: int
    blocks: int


class Program(NamedTuple):
    """Attributes:
    kernels: in the order of the program.
    graphs: CUDA graphs.
    host_conditions, host_loops: those outside of graphs, the outermost loop included.
    loops: in the order of the program, how many loops each lies in, itself included, and the
      kernels that lie in no loop within it.
    """

    kernels: tuple[Kernel, ...]
    graphs: int
    host_conditions: int
    host_loops: int
    loops: tuple[tuple[int, int], ...]


def read_dump(dump: Path) -> tuple[Program, str]:
    """The largest program in a dump (`--xla_dump_to`), and its HLO."""
    files = dump.glob("*thunk_sequence_after_thunk_passes.txt")
    thunks = max(files, key=lambda file: file.stat().st_size)
    module = thunks.name.split(".thunk_sequence")[0]
    (hlo,) = (
        file for file in dump.glob(f"{module}*after_optimizations.txt") if "buffer" not in file.name
    )
    return read_thunks(thunks.read_text()), hlo.read_text()


def read_thunks(text: str) -> Program:
    kernels, graphs, conditions, host_loops = [], 0, 0, 0
    loops: list[tuple[int, int]] = []
    around: list[tuple[int, str, int]] = []  # indent, kind and loop of what a line lies in
    for line in text.splitlines():
        found = re.match(r"( *)\d+: (k\w+)\s*(?:\[.*?\])?\s*(.*)", line)
        if not found:
            continue
        indent, kind, rest = len(found[1]), found[2], found[3]
        while around and around[-1][0] >= indent:
            around.pop()
        in_graph = any(outer == "kCommandBuffer" for _, outer, _ in around)
        enclosing = [loop for _, outer, loop in around if outer == "kWhile"]
        if kind in ("kCommandBuffer", "kConditional", "kWhile"):
            graphs += kind == "kCommandBuffer"
            conditions += kind == "kConditional" and not in_graph
            host_loops += kind == "kWhile" and not in_graph
            around.append((indent, kind, len(loops)))
            if kind == "kWhile":
                loops.append((len(enclosing) + 1, 0))
        elif kind in KERNELS:
            grid = re.search(r"grid: \[(\d+), (\d+), (\d+)\]", rest)
            blocks = int(grid[1]) * int(grid[2]) * int(grid[3]) if grid else 0
            name = rest.split(" grid")[0].strip() or kind
            kernels.append(Kernel(name, in_graph, len(enclosing), blocks))
            for loop in enclosing[-1:]:
                loops[loop] = loops[loop][0], loops[loop][1] + 1
    return Program(tuple(kernels), graphs, conditions, host_loops, tuple(loops))


def figures(program: Program, hlo: str, weights: Iterable[tuple[int, int]], cores: int) -> dict:
    """What the tests hold: `weights` are the shapes of the matrices, `cores` of the chip.

    "open_loops" are those whose number of turns is not known when they are compiled. Of "loops" see
    Program.
    "small_products" are those of each step, with fewer blocks than the chip has cores; what lies in
    a further loop (old slots that a lazy prefill left out, read anew) is none of them.
    """
    bodies = _computations(hlo)
    fusions = _fusions(hlo)
    named = {name.replace(".", "_") for name, body in fusions if any(_products(bodies[body]))}
    products = [
        one
        for one in program.kernels
        if "gemm" in one.name or "tsjax_narrow_product" in one.name or one.name in named
    ]
    shapes = {shape for a, b in weights for shape in (f"{a},{b}", f"{b},{a}")}
    outside = _without_fusions(hlo)
    written = re.findall(r"= f32\[(\d+,\d+)\]", outside)
    # Of 16 bits are the weights themselves, by other names; what else makes such an array copies.
    copied = re.findall(r"= b?f16\[(\d+,\d+)\]\S* (?!parameter|bitcast|get-tuple)", outside)
    return {
        "graphs": program.graphs,
        "host_conditions": program.host_conditions,
        "host_loops": program.host_loops,
        "open_loops": len(re.findall(r" while\((?!.*known_trip_count)", hlo)),
        "graph_kernels": sum(kernel.in_graph for kernel in program.kernels),
        "loose_kernels": sum(not kernel.in_graph for kernel in program.kernels),
        "loops": [list(loop) for loop in program.loops],
        "products": len(products),
        "small_products": sum(
            kernel.loops < 2 and 0 < kernel.blocks < cores for kernel in products
        ),
        "float32_weights": sum(shape in shapes for shape in written),
        "copied_weights": sum(shape in shapes for shape in copied),
    }


def work(hlo: str) -> dict:
    """What the products and the attention of a program read and compute, and its kernels.

    The body of a loop counts once. Of a product the larger array is the weights; attention reads
    its caches whole, as it does when they are full.
    """
    bodies = _computations(hlo)
    found = dict.fromkeys(("weights", "products", "cache", "attention", "kernels"), 0)
    fused = {body for _, body in _fusions(hlo)}
    for name, lines in bodies.items():
        if name in fused:
            continue
        for text in lines.values():
            called = re.search(r" fusion\(.*calls=%([\w.-]+)", text)
            ours = 'custom_call_target="__gpu$xla.gpu.triton"' in text
            found["kernels"] += bool(called or ours)
            if ours and "/tsjax_tree_attention/" in text:
                _, (_, queries), (kind, cache), *_ = _arrays(text.split("constraints={")[1])
                (_, T, N, H), (B, K, S, _) = queries, cache
                found["cache"] += 2 * B * K * S * H * WIDTHS[kind]
                found["attention"] += 4 * B * T * N * H * S
            if ours and "/tsjax_narrow_product/" in text:
                result, given = text.split("constraints={")
                (_, (_, rows, outputs)), *_ = _arrays(result)
                (_, (_, inputs)), *matrix = _arrays(given)
                found["weights"] += sum(WIDTHS[kind] * math.prod(shape) for kind, shape in matrix)
                found["products"] += 2 * rows * outputs * inputs
            inside = bodies[called[1]] if called else {}
            for read, operations in [*_products(lines, [text]), *_products(inside)]:
                found["weights"] += read
                found["products"] += operations
    return found


WIDTHS = {"s8": 1, "u8": 1, "pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
WIDTHS |= {"f64": 8, "s64": 8, "u64": 8}  # bytes of a number


COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def sent(hlo: str) -> dict:
    """What the devices of a mesh send each other, by the HLO: the kinds of collectives, each with
    the bytes that one makes on a device, the loops and conditions that it lies in, and how many
    there are.

    "step" is the sum of those in the loop of steps alone; what lies in a further loop or behind a
    condition (a draft cache that is chosen anew) is no part of a usual step.
    """
    inside: dict[str, list[str]] = {}  # computation -> the loops and conditions around it
    bodies: dict[str, list[str]] = {}
    for block in _blocks(hlo):
        bodies[_name(block)] = block.splitlines()
    entry = next(block for block in _blocks(hlo) if block.startswith("ENTRY "))
    waiting = [(_name(entry), [])]
    each: Counter[tuple[str, int, tuple[str, ...]]] = Counter()
    while waiting:
        name, around = waiting.pop()
        if name in inside or name not in bodies:
            continue
        inside[name] = around
        for line in bodies[name]:
            kind = "loop" if " while(" in line else "condition" if " conditional(" in line else ""
            called = re.findall(r"(?:body|condition|to_apply|calls)=%?([\w.-]+)", line)
            for some in re.findall(r"(?:branch|called)_computations={([^}]*)}", line):
                called += [one.strip().lstrip("%") for one in some.split(",")]
            called += re.findall(r"(?:true|false)_computation=%?([\w.-]+)", line)
            waiting += [(one, [*around, kind] if kind else around) for one in called]
            found = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(", line)
            if found:
                arrays = _arrays(found[1])
                if found[3] and found[2] != "all-reduce":
                    arrays = arrays[len(arrays) // 2 :]  # operands and results
                size = sum(WIDTHS[one] * math.prod(shape) for one, shape in arrays)
                each[found[2], size, tuple(around)] += 1
    step = {kind: count for kind, count in each.items() if kind[2] == ("loop",)}
    return {
        "each": [
            {"name": name, "bytes": size, "inside": list(around), "count": count}
            for (name, size, around), count in sorted(each.items())
        ],
        "step": sum(size * count for (_, size, _), count in step.items()),
        "step_count": sum(step.values()),
    }


def _computations(hlo: str) -> dict[str, dict[str, str]]:
    """The instructions of each computation, by their names."""
    return {
        _name(block): dict(re.findall(r"^ *(?:ROOT )?(%[\w.-]+) = (.*)", block, re.MULTILINE))
        for block in _blocks(hlo)
    }


def _fusions(hlo: str) -> list[tuple[str, str]]:
    """The name of each fusion, and of the computation that it is."""
    return re.findall(r"%([\w.-]+) = .* fusion\(.*calls=%([\w.-]+)", hlo)


def _products(body: dict[str, str], among: Iterable[str] | None = None):
    """Of each product in a computation, or `among` some of its instructions, the bytes of the
    larger operand, and its operations. Those of one row are sums of products."""
    for text in body.values() if among is None else among:
        if operands := re.search(r" dot\((%[\w.-]+), (%[\w.-]+)\)", text):
            given = [_read(body, name) for name in operands.groups()]
            (_, result), *arrays = (_arrays(part)[0] for part in (text, *given))
            (summed,) = re.findall(r"lhs_contracting_dims={([\d,]+)}", text)
            terms = math.prod(arrays[0][1][axis] for axis in _numbers(summed))
            larger = max(WIDTHS[kind] * math.prod(shape) for kind, shape in arrays)
            yield larger, 2 * math.prod(result) * terms
        summed = re.search(r" reduce\((%[\w.-]+), .*op_name=\"[^\"]*/dot_general\"", text)
        if summed and " multiply(" in body[summed[1]]:
            (_, terms), *_ = _arrays(body[summed[1]])
            given = [_arrays(line)[0] for line in body.values() if " parameter(" in line]
            sizes = [WIDTHS[kind] * math.prod(shape) for kind, shape in given]
            yield max(sizes), 2 * math.prod(terms)


def _read(body: dict[str, str], name: str) -> str:
    """What an operand is read from, by another type perhaps."""
    text = body[name]
    while converted := re.search(r" convert\((%[\w.-]+)\)", text):
        text = body[converted[1]]
    return text


def _arrays(text: str) -> list[tuple[str, list[int]]]:
    """Type and shape of each array that is named, in order."""
    return [(kind, _numbers(shape)) for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", text)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _blocks(hlo: str) -> list[str]:
    return re.split(r"\n(?=%|ENTRY)", hlo)


def _without_fusions(hlo: str) -> str:
    """The HLO without the bodies of fusions, whose arrays never reach memory."""
    fused = {body for _, body in _fusions(hlo)}
    blocks = (block for block in _blocks(hlo) if _name(block) not in fused)
    return "\n".join(blocks)


def _name(block: str) -> str:
    """Of a computation."""
    return block.removeprefix("ENTRY ").split(" ")[0].lstrip("%")

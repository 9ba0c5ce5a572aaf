# SPDX-License-Identifier: Apache-2.0
"""What each form of opcode means, for vectors of threads.

`prepare` turns an instruction into a function of a machine and a mask of its threads (None: all).
Two tables: PURE forms, which `arithmetic` has, compute registers from registers; EFFECTS also touch
memory, other lanes or the machine. Branches, returns and barriers are `machine`'s. A form that is
in no table is an error. Matrix products add in float32.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from experiments.ptx.arithmetic import PURE, Pure, bits, decode, encode, width
from experiments.ptx.memory import SHARED_BASE, Fault, Uninitialised
from experiments.ptx.parse import Address, Instruction, Kernel, Operand

Step = Callable  # of a machine and a mask


class UnknownInstruction(ValueError):
    """A form, or operands, that no table has."""


class Divergence(Fault):
    """An instruction that threads must run together, and do not."""


# --- operands --------------------------------------------------------------------------------


class Operands:
    """Where an instruction reads and writes."""

    def __init__(self, kernel: Kernel, instruction: Instruction):
        self.kernel, self.instruction = kernel, instruction

    def wrong(self, reason: str) -> UnknownInstruction:
        one = self.instruction
        return UnknownInstruction(f"line {one.line}: {reason}: {one.text}")

    def take(self, count: int) -> tuple[Operand, ...]:
        if len(self.instruction.operands) != count:
            raise self.wrong(f"{count} operands expected")
        return self.instruction.operands

    def size(self, name: Operand) -> int:
        if not isinstance(name, str) or name not in self.kernel.registers:
            raise self.wrong(f"{name!r} is no register")
        return width(self.kernel.registers[name])

    def target(self, name: Operand, kind: str, *, wider: bool = False) -> Callable:
        """A function that writes a register: of a machine, bits and a mask. `_` drops them."""
        if name == "_":
            return lambda machine, value, mask: None
        size, wanted = self.size(name), width(kind)
        if size != wanted and not (wider and size > wanted > 0):
            raise self.wrong(f"{name} is no register of type {kind}")
        signed, own = kind[0] == "s", bits(self.kernel.registers[name])

        def write(machine, value, mask):
            if size != wanted:
                value = value.view(f"i{wanted}").astype(f"i{size}") if signed else value
                value = value.astype(own)
            machine.write(name, value, mask)

        return write

    def source(self, operand: Operand, kind: str, *, wider: bool = False) -> Callable:
        """A function that reads bits, of a machine."""
        if isinstance(operand, int):
            mask = (1 << 8 * width(kind)) - 1
            value = np.array([operand & mask if kind != "pred" else bool(operand)], bits(kind))
            return lambda machine: value
        if isinstance(operand, str) and operand in SPECIAL and width(kind) == 4:
            return lambda machine: machine.special[operand]
        if isinstance(operand, str) and operand in self.kernel.shared:
            base = np.array([SHARED_BASE], bits(kind))
            return lambda machine: base
        size = self.size(operand)
        if size != width(kind) and not (wider and size > width(kind)):
            raise self.wrong(f"{operand} is no register of type {kind}")

        def read(machine):
            value = machine.registers.get(operand)
            if value is None:
                raise Uninitialised(f"register {operand}")
            return value

        return read

    def address(self, operand: Operand) -> Callable:
        """[threads] bytes, as a function of a machine."""
        if not isinstance(operand, Address):
            raise self.wrong(f"{operand!r} is no address")
        kind = "b32" if self.kernel.registers.get(operand.base, "")[1:] == "32" else "b64"
        base, offset = self.source(operand.base, kind), operand.offset
        return lambda machine: machine.full(base(machine)).astype(np.int64) + offset


SPECIAL = tuple(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz")


def prepare(kernel: Kernel, instruction: Instruction) -> Step:
    operands = Operands(kernel, instruction)
    step = _step(operands)
    if instruction.guard is None:
        return step
    guard, negated = operands.source(instruction.guard, "pred"), instruction.negated

    def guarded(machine, mask):
        chosen = machine.chosen(guard(machine) ^ negated, mask)
        if chosen is None or chosen.any():
            step(machine, chosen)

    return guarded


def _step(operands: Operands) -> Step:
    opcode = operands.instruction.opcode
    make, parts = _find(opcode)
    if make is None:
        raise operands.wrong("unknown instruction")
    return make(operands, *parts)


@functools.cache
def _find(opcode: str) -> tuple[Callable | None, tuple[str, ...]]:
    """What makes a step of its operands and of the parts of its name."""
    for form, make in PURE:
        if found := re.fullmatch(form, opcode):
            return functools.partial(_pure, make(*found.groups())), ()
    for form, make in EFFECTS:
        if found := re.fullmatch(form, opcode):
            return make, found.groups()
    return None, ()


def _pure(pure: Pure, operands: Operands) -> Step:
    target, *sources = operands.take(1 + len(pure.sources))
    wider = operands.instruction.opcode.startswith("cvt")
    write = operands.target(target, pure.target, wider=wider)
    encoded, function = encode(pure.target), pure.function
    reads = [
        (operands.source(source, kind, wider=wider), decode(kind))
        for source, kind in zip(sources, pure.sources, strict=True)
    ]

    def step(machine, mask):
        values = [decoded(read(machine)) for read, decoded in reads]
        write(machine, encoded(function(*values)), mask)

    return step


# --- forms with effects ----------------------------------------------------------------------


def _move(operands: Operands, kind: str) -> Step:
    """Also packs several registers into one, or unpacks it, lowest part first."""
    target, source = operands.take(2)
    if isinstance(target, tuple):
        return _unpack(operands, target, operands.source(source, kind), kind)
    write = operands.target(target, kind)
    if isinstance(source, tuple):
        read = _packed(operands, source, kind)
    else:
        read = operands.source(source, kind)
    return lambda machine, mask: write(machine, read(machine), mask)


def _unpack(operands: Operands, targets: tuple, read: Callable, kind: str) -> Step:
    part = f"b{8 * width(kind) // len(targets)}"
    writes = [operands.target(target, part) for target in targets]

    def step(machine, mask):
        parts = np.ascontiguousarray(machine.full(read(machine))).view(bits(part))
        for place, write in enumerate(writes):
            write(machine, parts[place :: len(writes)], mask)

    return step


def _packed(operands: Operands, sources: tuple, kind: str) -> Callable:
    part = f"b{8 * width(kind) // len(sources)}"
    reads = [operands.source(source, part) for source in sources]
    return lambda machine: machine.stack(reads).view(bits(kind))[:, 0]


def _vector(operand: Operand, count: str | None) -> tuple:
    found = operand if isinstance(operand, tuple) else (operand,)
    return found if len(found) == int(count or 1) else ()


def _load_param(operands: Operands) -> Step:
    target, source = operands.take(2)
    if not isinstance(source, Address) or source.base not in operands.kernel.params:
        raise operands.wrong("no parameter")
    number, write = operands.kernel.params.index(source.base), operands.target(target, "b64")

    def step(machine, mask):
        write(machine, np.array([machine.memory.pointer(number)], np.uint64), mask)

    return step


def _load(operands: Operands, space: str, count: str | None, kind: str) -> Step:
    targets, source = operands.take(2)
    writes = [operands.target(one, kind, wider=True) for one in _vector(targets, count)]
    address = operands.address(source)
    if not writes:
        raise operands.wrong("another number of registers")

    def step(machine, mask):
        lanes = machine.lanes(mask)
        memory = machine.memory if space == "global" else machine.shared
        values = memory.load(address(machine)[lanes.lane], width(kind), len(writes), lanes)
        for place, write in enumerate(writes):
            write(machine, machine.spread(values[:, place], lanes), mask)

    return step


def _store(operands: Operands, space: str, count: str | None, kind: str) -> Step:
    target, sources = operands.take(2)
    reads = [operands.source(one, kind, wider=True) for one in _vector(sources, count)]
    address = operands.address(target)
    if not reads:
        raise operands.wrong("another number of registers")

    def step(machine, mask):
        lanes = machine.lanes(mask)
        memory = machine.memory if space == "global" else machine.shared
        values = machine.stack(reads)[lanes.lane].astype(bits(kind), copy=False)
        memory.store(address(machine)[lanes.lane], values, lanes)

    return step


def _copy(operands: Operands, cache: str) -> Step:
    """cp.async; with a fourth operand of 0 the copy is all zeros, and nothing is read."""
    target, source, size, *given = operands.instruction.operands
    if len(given) > 1 or size not in ((16,) if cache == "cg" else (4, 8, 16)):
        raise operands.wrong("another size")
    to, origin = operands.address(target), operands.address(source)
    given_size = operands.source(given[0], "b32") if given else None

    def step(machine, mask):
        lanes = machine.lanes(mask)
        values = np.zeros((len(lanes.lane), size // 4), np.uint32)
        read = np.full(len(lanes.lane), size)
        if given_size is not None:
            read = machine.full(given_size(machine))[lanes.lane]
        if not np.isin(read, (0, size)).all():
            raise Fault("a copy of a part, which is not simulated")
        some = machine.among(lanes, read == size)
        values[read == size] = machine.memory.load(
            origin(machine)[some.lane], 4, size // 4, some
        )  # fmt: skip
        machine.begin_copy(to(machine)[lanes.lane], values, lanes)

    return step


def _commit(operands: Operands) -> Step:
    operands.take(0)
    return lambda machine, mask: machine.commit(machine.lanes(mask))


def _wait(operands: Operands) -> Step:
    (count,) = operands.take(1)
    return lambda machine, mask: machine.wait(machine.lanes(mask), count)


def _whole_warps(machine, mask):
    """Which warps run: all of their lanes."""
    if mask is None:
        return np.ones(machine.count // 32, bool)
    by_warp = mask.reshape(-1, 32)
    if (by_warp.any(axis=1) != by_warp.all(axis=1)).any():
        raise Divergence("not all lanes of the warp take part")
    return by_warp.all(axis=1)


def _warp_barrier(operands: Operands) -> Step:
    if operands.take(1) != (-1,):
        raise operands.wrong("only whole warps are simulated")
    return lambda machine, mask: machine.shared.warp_barrier(_whole_warps(machine, mask))


def _shuffle(operands: Operands, mode: str) -> Step:
    target, source, other, clamp, members = operands.take(5)
    if (clamp, members) != (31, -1):
        raise operands.wrong("only whole warps are simulated")
    write, read = operands.target(target, "b32"), operands.source(source, "b32")
    by = operands.source(other, "b32")

    def step(machine, mask):
        _whole_warps(machine, mask)
        by_lane = machine.full(by(machine)).reshape(-1, 32).astype(np.int64)
        lane = np.arange(32) ^ by_lane if mode == "bfly" else by_lane
        values = machine.full(read(machine)).reshape(-1, 32)
        write(machine, np.take_along_axis(values, lane & 31, axis=1).reshape(-1), mask)

    return step


def _load_matrix(operands: Operands, count: str, transposed: str | None) -> Step:
    """Lane 8 m + r has the address of row r of matrix m, 8 numbers of 16 bits."""
    targets, source = operands.take(2)
    writes = [operands.target(one, "b32") for one in _vector(targets, count)]
    address = operands.address(source)
    if not writes:
        raise operands.wrong("another number of registers")

    def step(machine, mask):
        warps = _whole_warps(machine, mask)
        givers = np.repeat(warps, 32) & (np.arange(machine.count) % 32 < 8 * len(writes))
        lanes = machine.lanes(givers)
        rows = machine.shared.load(address(machine)[lanes.lane], 2, 8, lanes)
        matrices = rows.reshape(-1, len(writes), 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        pairs = np.ascontiguousarray(matrices).view(np.uint32)  # [warps, matrices, 8, 4]
        for place, write in enumerate(writes):
            out = np.zeros((machine.count // 32, 32), np.uint32)
            out[warps] = pairs[:, place].reshape(-1, 32)
            write(machine, out.reshape(-1), mask)

    return step


def _fragment(rows: int, columns: int, place: Callable):
    """[rows, columns] -> where a warp holds the entry: lane * entries of a lane + its number."""
    each = rows * columns // 32
    found = np.empty((rows, columns), np.int64)
    for lane, number in np.ndindex(32, each):
        found[place(lane // 4, lane % 4, number)] = lane * each + number
    return found


# Of m16n8k16: group and member of a lane, number of its entry -> row and column.
LEFT = _fragment(
    16, 16, lambda g, m, i: (g + 8 * (i // 2 % 2), 2 * m + i % 2 + 8 * (i // 4))
)  # fmt: skip
RIGHT = _fragment(16, 8, lambda g, m, i: (2 * m + i % 2 + 8 * (i // 2), g))
SUMS = _fragment(16, 8, lambda g, m, i: (g + 8 * (i // 2), 2 * m + i % 2))
SUMS_BACK = np.argsort(SUMS.reshape(-1))


def _multiply(operands: Operands, kind: str) -> Step:
    *vectors, before = operands.take(4)
    targets, left, right = (
        _vector(part, count) for part, count in zip(vectors, "442", strict=True)
    )
    writes = [operands.target(one, "f32") for one in targets]
    lefts, rights = ([operands.source(one, "b32") for one in part] for part in (left, right))
    befores = [operands.source(one, "f32") for one in _vector(before, "4")]
    if [len(part) for part in (writes, lefts, rights, befores)] != [4, 4, 2, 4]:
        raise operands.wrong("another number of registers")
    decoded = decode(kind)

    def matrix(machine, reads, place):
        halves = decoded(machine.stack(reads).view(np.uint16))
        return halves.reshape(machine.count // 32, -1)[:, place]

    def step(machine, mask):
        _whole_warps(machine, mask)
        sums = machine.stack(befores).view(np.float32).reshape(-1, 128)[:, SUMS]
        sums = sums + matrix(machine, lefts, LEFT) @ matrix(machine, rights, RIGHT)
        out = sums.reshape(-1, 128)[:, SUMS_BACK].reshape(-1, 4).view(np.uint32)
        for place, write in enumerate(writes):
            write(machine, np.ascontiguousarray(out[:, place]), mask)

    return step


HINTS = r"(?:\.(?:ca|cg|cs|nc|wb|L[12]::\w+))*"
EFFECTS = [
    (r"mov\.(pred|[bus](?:16|32|64)|f32)", _move),
    (r"ld\.param\.[bu]64", _load_param),
    (rf"ld\.(global|shared){HINTS}(?:\.v([24]))?\.([bus](?:8|16|32|64)|f32)", _load),
    (rf"st\.(global|shared){HINTS}(?:\.v([24]))?\.([bus](?:8|16|32|64)|f32)", _store),
    (r"cp\.async\.(ca|cg)\.shared\.global(?:\.L2::\w+)?", _copy),
    (r"cp\.async\.commit_group", _commit),
    (r"cp\.async\.wait_group", _wait),
    (r"bar\.warp\.sync", _warp_barrier),
    (r"shfl\.sync\.(bfly|idx)\.b32", _shuffle),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", _load_matrix),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32", _multiply),
]

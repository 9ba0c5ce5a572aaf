# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel for a whole grid, in NumPy: many blocks at a time, one entry for each thread.

Each thread has its own place in the program; those at the earliest place run next, so they meet
again after a branch. A part of the program ends at a branch or a barrier. All that is not in order
ends the run with a `Fault` that names the instruction, the block and the thread. Speed, caches, the
banks of shared memory and what of a warp runs at a time are not simulated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.ptx.memory import Array, Fault, Global, Lanes, Shared
from experiments.ptx.operations import Divergence, Operands, Step, prepare
from experiments.ptx.parse import Instruction, Kernel, parse

MOST_THREADS = 8192  # that run at a time
MOST_TURNS = 100_000  # parts of a program that the threads of a run may take
BRANCHES = ("bra", "bra.uni", "ret", "bar.sync")


class Endless(Fault):
    """A loop that does not end."""


class Part(NamedTuple):
    """Instructions without a branch, and the one that ends them, if any does."""

    steps: tuple[tuple[Instruction, Step], ...]
    last: Instruction | None


class Copies(NamedTuple):
    """One cp.async: its lanes, where it writes, and the number of its group in each thread."""

    lanes: Lanes
    granules: np.ndarray
    group: np.ndarray


def execute(
    text: str,
    grid: tuple[int, int, int],
    shared_bytes: int,
    inputs: Sequence[np.ndarray | Array],
    outputs: Sequence[tuple[tuple[int, ...], type]],
) -> list[Array]:
    """What the kernel of a PTX module leaves in its outputs.

    Args:
      shared_bytes: size of the shared memory that the launch gives each block.
      inputs: of the first parameters; of an `Array`, entries that are not written must not be read.
      outputs: shapes and types of the others.
    """
    kernel = parse(text)
    if len(kernel.params) != len(inputs) + len(outputs):
        raise ValueError(f"{kernel.name} has {len(kernel.params)} parameters")
    given = [one if isinstance(one, Array) else Array(np.asarray(one)) for one in inputs]
    memory, program = Global(given, outputs), Program(kernel)
    blocks = int(np.prod(grid))
    some = max(1, MOST_THREADS // kernel.threads)
    for first in range(0, blocks, some):
        numbers = np.arange(first, min(first + some, blocks))
        Machine(program, memory, numbers, grid, shared_bytes).run()
    return memory.outputs()


class Program:
    """The parts of a kernel, in order; a label begins one."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        starts = {0, *kernel.labels.values()}
        starts |= {at + 1 for at, one in enumerate(kernel.code) if one.opcode in BRANCHES}
        starts = sorted(starts - {len(kernel.code)})
        self.parts = [
            self._part(kernel.code[start:end])
            for start, end in zip(starts, [*starts[1:], len(kernel.code)], strict=True)
        ]
        self.targets = {
            label: starts.index(at) if at < len(kernel.code) else len(starts)
            for label, at in kernel.labels.items()
        }
        self.granule = min([4, *map(_shared_width, kernel.code)])

    def _part(self, code: Sequence[Instruction]) -> Part:
        last = code[-1] if code[-1].opcode in BRANCHES else None
        if last and last.opcode == "bar.sync" and (last.operands != (0,) or last.guard):
            raise Operands(self.kernel, last).wrong("only barriers of all threads")
        plain = code if last is None else code[:-1]
        return Part(tuple((one, prepare(self.kernel, one)) for one in plain), last)


def _shared_width(instruction: Instruction) -> int:
    """Bytes of one word of an access to shared memory."""
    found = re.fullmatch(r"(?:ld|st)\.shared\S*\.[bsuf](\d+)", instruction.opcode)
    return int(found[1]) // 8 if found else 4


class Machine:
    """Some blocks of a grid, while they run.

    Attributes:
      registers: those that were written, the bits of each thread; all ones where a thread did not
        write.
      place: the part of the program where each thread stands; `end` after its return.
      waiting: at a barrier.
    """

    def __init__(self, program: Program, memory: Global, blocks, grid, shared_bytes: int):
        kernel = program.kernel
        self.program, self.memory, self.blocks, self.grid = program, memory, blocks, grid
        self.threads = kernel.threads
        self.count = len(blocks) * kernel.threads
        self.shared = Shared(len(blocks), shared_bytes, program.granule)
        self.registers: dict[str, np.ndarray] = {}
        self.end = len(program.parts)
        self.place, self.waiting = np.zeros(self.count, int), np.zeros(self.count, bool)
        lane = np.arange(self.count)
        row, thread = lane // self.threads, lane % self.threads
        self.all = Lanes(lane, row, blocks[row], thread, thread // 32)
        self.special = self._special_registers()
        self.groups, self.copies = np.zeros(self.count, int), []

    def _special_registers(self) -> dict[str, np.ndarray]:
        places = np.unravel_index(self.all.block, self.grid[::-1])
        zero = np.zeros(self.count, np.uint32)
        found = {"%tid.x": self.all.thread, "%ntid.x": zero + self.threads}
        found |= {f"%tid.{axis}": zero for axis in "yz"}
        found |= {f"%ntid.{axis}": zero + 1 for axis in "yz"}
        for axis, size, place in zip("xyz", self.grid, places[::-1], strict=True):
            found |= {f"%ctaid.{axis}": place, f"%nctaid.{axis}": zero + size}
        return {name: values.astype(np.uint32) for name, values in found.items()}

    # --- what instructions use ---

    def full(self, value):
        """One entry for each thread, of a value that may be one constant."""
        return value if len(value) == self.count else np.repeat(value, self.count)

    def stack(self, reads):
        """[threads, registers]"""
        return np.stack([self.full(read(self)) for read in reads], axis=1)

    def write(self, name: str, value, mask) -> None:
        value = self.full(value)
        if mask is not None:
            before = self.registers.get(name)
            if before is None:
                before = ~np.zeros_like(value) if value.dtype != bool else np.zeros_like(value)
            value = np.where(mask, value, before)
        self.registers[name] = value

    def chosen(self, guard, mask):
        """Threads of the mask whose predicate is true; None for all of the machine."""
        both = self.full(guard) if mask is None else guard & mask
        return None if both.all() else both

    def lanes(self, mask) -> Lanes:
        return self.all if mask is None else self.among(self.all, mask)

    @staticmethod
    def among(lanes: Lanes, chosen) -> Lanes:
        return Lanes(*(part[chosen] for part in lanes))

    def spread(self, values, lanes: Lanes):
        """Of each thread what its lane has; 0 where it has none."""
        out = np.zeros(self.count, values.dtype)
        out[lanes.lane] = values
        return out

    def begin_copy(self, address, values, lanes: Lanes) -> None:
        granules = self.shared.begin_copy(address, values, lanes)
        self.copies.append(Copies(lanes, granules, self.groups[lanes.lane]))

    def commit(self, lanes: Lanes) -> None:
        self.groups[lanes.lane] += 1

    def wait(self, lanes: Lanes, most: int) -> None:
        """Until of each thread's groups no more than `most` are on their way."""
        waits = np.zeros(self.count, bool)
        waits[lanes.lane] = True
        left = []
        for copies in self.copies:
            lane = copies.lanes.lane
            done = waits[lane] & (copies.group < self.groups[lane] - most)
            self.shared.end_copy(copies.granules[done], self.among(copies.lanes, done))
            if not done.all():
                rest = self.among(copies.lanes, ~done)
                left.append(Copies(rest, copies.granules[~done], copies.group[~done]))
        self.copies = left

    # --- the order of things ---

    def run(self) -> None:
        with np.errstate(all="ignore"):
            for _ in range(MOST_TURNS):
                turn = np.where(self.waiting, self.end, self.place)
                now = turn.min()
                if now == self.end:
                    return
                self._run_part(self.program.parts[now], int(now), turn == now)
        raise Endless(f"{self.program.kernel.name}: more than {MOST_TURNS} turns")

    def _run_part(self, part: Part, now: int, active) -> None:
        mask = None if active.all() else active
        instruction = part.last
        try:
            for one, step in part.steps:
                instruction = one
                step(self, mask)
            instruction = part.last
            self._finish(part.last, now, active)
        except Fault as fault:
            raise self._located(fault, instruction) from None

    def _finish(self, last: Instruction | None, now: int, active) -> None:
        self.place[active] = now + 1
        if last is None:
            return
        chosen = active
        if last.guard:
            operands = Operands(self.program.kernel, last)
            chosen = active & (operands.source(last.guard, "pred")(self) ^ last.negated)
        if last.opcode == "bar.sync":
            self.waiting |= active
        else:
            self.place[chosen] = self.end if last.opcode == "ret" else self._target(last)
        self._open_barriers()

    def _target(self, branch: Instruction) -> int:
        operands = Operands(self.program.kernel, branch)
        (label,) = operands.take(1)
        if label not in self.program.targets:
            raise operands.wrong("no label")
        return self.program.targets[label]

    def _open_barriers(self) -> None:
        """Of the blocks whose threads all wait, or have returned."""
        if not self.waiting.any():
            return
        shape = len(self.blocks), self.threads
        waiting, place = self.waiting.reshape(shape), self.place.reshape(shape)
        ready = waiting.any(axis=1) & (waiting | (place == self.end)).all(axis=1)
        if not ready.any():
            return
        least = np.where(waiting, place, self.end).min(axis=1)
        apart = waiting & (place != least[:, None]) & ready[:, None]
        if apart.any():
            raise Divergence("threads of a block wait at different barriers", np.argmax(apart))
        waiting[ready] = False
        self.shared.barrier(ready)

    def _located(self, fault: Fault, instruction: Instruction | None) -> Fault:
        block = self.blocks[fault.lane // self.threads]
        place = [int(axis) for axis in np.unravel_index(block, self.grid[::-1])][::-1]
        thread = fault.lane % self.threads
        where = f"line {instruction.line}: {instruction.text}" if instruction else "at the end"
        return type(fault)(
            f"{self.program.kernel.name}, {where}; block {place}, thread {thread}: {fault}"
        )

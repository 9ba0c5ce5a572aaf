# SPDX-License-Identifier: Apache-2.0
"""Global and shared memory that know what a kernel may touch, and in which order.

Each array has a range of addresses of its own, a terabyte from the next, so that a wrong offset
never ends in another array. Of shared memory each granule (the width of the narrowest access)
knows which warp read or wrote it since the last barrier. Knows no instructions.

A race is two accesses to one granule by different warps, not both reads, without a barrier between
them. Lanes of one warp count as ordered, but for what one of them copied asynchronously. Several
warps that write the same bits are no race: Triton has all warps with one part of a result store it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

REGION_BITS = 40
SHARED_BASE = 1 << 20
NOBODY, SEVERAL = -1, -2
COPIED = 1 << 12  # and the number of the thread whose copy it was


class Fault(Exception):
    """What a kernel must not do; `lane` is the first that did it."""

    def __init__(self, message: str, lane: int = 0):
        super().__init__(message)
        self.lane = lane


class OutOfBounds(Fault):
    """An access that is not inside one array, or a write to an input."""


class Misaligned(Fault):
    """An address that is no multiple of the access' size."""


class Uninitialised(Fault):
    """A read of what nothing wrote."""


class Race(Fault):
    """Two accesses without an order."""


class Array(NamedTuple):
    """An array in global memory; `written` tells which entries have a value, None that all do."""

    values: np.ndarray
    written: np.ndarray | None = None


class Lanes(NamedTuple):
    """The threads that run together, [n] each: their number in the machine, their block there and
    in the grid, thread and warp in the block."""

    lane: np.ndarray
    row: np.ndarray
    block: np.ndarray
    thread: np.ndarray
    warp: np.ndarray


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8)


class Global:
    """Inputs, then outputs, whose bytes are all ones (NaN) until they are written."""

    def __init__(self, inputs: Sequence[Array], outputs: Sequence[tuple[tuple[int, ...], type]]):
        blank = [Array(np.empty(*output), np.zeros(output[0], bool)) for output in outputs]
        self.arrays, self.inputs = [*inputs, *blank], len(inputs)
        self.sizes = np.array([array.values.nbytes for array in self.arrays])
        room = -(-self.sizes // 16) * 16
        self.starts = np.cumsum(room) - room
        self.data = np.full(room.sum(), 0xFF, np.uint8)
        self.known = np.zeros(room.sum(), np.uint8)  # all ones: has a value
        self.writer = np.full(room.sum(), NOBODY, np.int32)  # block
        for number, array in enumerate(self.arrays):
            part = slice(self.starts[number], self.starts[number] + self.sizes[number])
            known = np.ones(array.values.shape, bool) if array.written is None else array.written
            known = np.repeat(known.reshape(-1), array.values.itemsize)
            self.known[part] = np.where(known, 0xFF, 0)
            self.data[part] = np.where(known, _bytes(array.values), 0xFF)

    def pointer(self, number: int) -> int:
        return (number + 1) << REGION_BITS

    def outputs(self) -> list[Array]:
        found = []
        for number in range(self.inputs, len(self.arrays)):
            values, start = self.arrays[number].values, self.starts[number]
            part = slice(start, start + self.sizes[number])
            out = self.data[part].view(values.dtype).reshape(values.shape)
            written = self.known[part].reshape(*values.shape, values.itemsize).all(axis=-1)
            found.append(Array(out.copy(), written))
        return found

    def _place(self, address, size: int, lanes: Lanes, writes: bool):
        """Where each access begins in `data`."""
        address = address.astype(np.int64)
        number = (address >> REGION_BITS) - 1
        exists = (number >= 0) & (number < len(self.arrays))
        number = np.where(exists, number, 0)
        offset = address & ((1 << REGION_BITS) - 1)
        inside = exists & (offset + size <= self.sizes[number])
        if not inside.all():
            bad = np.argmin(inside)
            place = f"at {offset[bad]} of argument {number[bad]}, which has"
            place = f"{place} {self.sizes[number[bad]]}" if exists[bad] else "in no array"
            raise OutOfBounds(
                f"{size} bytes {place} (address {int(address[bad]):#x})", lanes.lane[bad]
            )
        _check_aligned(address, size, lanes)
        if writes and (number < self.inputs).any():
            bad = np.argmax(number < self.inputs)
            raise OutOfBounds(f"writes to input {number[bad]}", lanes.lane[bad])
        return self.starts[number] + offset

    def load(self, address, width: int, count: int, lanes: Lanes):
        """[n, count] unsigned numbers of `width` bytes."""
        place = self._place(address, width * count, lanes, writes=False)
        at = (place // width)[:, None] + np.arange(count)
        known = self.known.view(f"u{width}")[at] == np.iinfo(f"u{width}").max
        _raise(Uninitialised, "reads what was never written", ~known, lanes)
        writer = self.writer[place]
        foreign = (writer != NOBODY) & (writer != lanes.block)
        _raise(Race, "reads what another block wrote", foreign[:, None], lanes)
        return self.data.view(f"u{width}")[at]

    def store(self, address, values, lanes: Lanes) -> None:
        """As `load`; a word is written by one block, and with one value."""
        width, count = values.itemsize, values.shape[1]
        place = self._place(address, width * count, lanes, writes=True)
        at, data = (place // width)[:, None] + np.arange(count), self.data.view(f"u{width}")
        bytes_at = place[:, None] + np.arange(width * count)
        writer = self.writer[bytes_at]
        foreign = (writer != NOBODY) & (writer != lanes.block[:, None])
        _raise(Race, "writes what another block wrote", foreign, lanes)
        known = self.known.view(f"u{width}")[at] != 0
        _raise(Race, "writes a second value", known & (data[at] != values), lanes)
        data[at] = values
        _raise(Race, "two lanes write different values", data[at] != values, lanes)
        self.writer[bytes_at] = block = lanes.block[:, None]
        _raise(Race, "two blocks write it", self.writer[bytes_at] != block, lanes)
        self.known[bytes_at] = 0xFF


class Shared:
    """The shared memory of some blocks, `size` bytes each."""

    def __init__(self, blocks: int, size: int, granule: int):
        self.size, self.granule = size, granule
        self.stride = max(16, -(-size // 16) * 16)
        granules = blocks * self.stride // granule
        self.data = np.zeros(blocks * self.stride, np.uint8)
        self.known = np.zeros(granules, bool)
        self.pending = np.zeros(granules, np.int64)  # asynchronous copies to it
        self.reader = np.full(granules, NOBODY, np.int16)  # warp, since the last barrier
        self.writer = np.full(granules, NOBODY, np.int16)

    def barrier(self, blocks) -> None:
        """All threads of these blocks [blocks] have met."""
        for last in (self.reader, self.writer):
            last.reshape(len(blocks), -1)[blocks] = NOBODY

    def warp_barrier(self, warps) -> None:
        """Lanes of these warps [blocks * warps] see what others of their warp copied."""
        writer = self.writer.reshape(-1, self.stride // self.granule)
        row, granule = np.nonzero(writer >= COPIED)
        warp = (writer[row, granule] - COPIED) // 32
        met = warps.reshape(len(writer), -1)[row, warp]
        writer[row[met], granule[met]] = warp[met]

    def _place(self, address, size: int, lanes: Lanes):
        """Where each access begins in `data`, and its granules [n, size / granule]."""
        offset = address.astype(np.int64) - SHARED_BASE
        inside = (offset >= 0) & (offset + size <= self.size)
        if not inside.all():
            bad = np.argmin(inside)
            raise OutOfBounds(
                f"{size} bytes at {offset[bad]} of shared memory, which has {self.size}",
                lanes.lane[bad],
            )
        _check_aligned(offset, size, lanes)
        place = lanes.row * self.stride + offset
        return place, (place // self.granule)[:, None] + np.arange(size // self.granule)

    def _check_order(self, last, granules, lanes: Lanes, access: str, unless=False) -> None:
        found = last[granules]
        own = (found == lanes.warp[:, None]) | (found == COPIED + lanes.thread[:, None])
        foreign = (found != NOBODY) & ~own & np.logical_not(unless)
        _raise(Race, f"shared memory: {access} by another warp", foreign, lanes)

    def _check_arrived(self, granules, lanes: Lanes) -> None:
        pending = self.pending[granules] != 0
        _raise(Race, "shared memory: an asynchronous copy to it was not waited for", pending, lanes)

    @staticmethod
    def _note(last, granules, who) -> None:
        """`last` becomes `who`, [n], or SEVERAL if there was another."""
        who = np.broadcast_to(who[:, None], granules.shape)
        before = last[granules]
        last[granules] = who
        several = (before != NOBODY) & (before != who) | (last[granules] != who)
        last[granules[several]] = SEVERAL

    def load(self, address, width: int, count: int, lanes: Lanes):
        """[n, count] unsigned numbers of `width` bytes."""
        place, granules = self._place(address, width * count, lanes)
        self._check_arrived(granules, lanes)
        _raise(Uninitialised, "shared memory: nothing written", ~self.known[granules], lanes)
        self._check_order(self.writer, granules, lanes, "reads what was written")
        self._note(self.reader, granules, lanes.warp)
        return self.data.view(f"u{width}")[(place // width)[:, None] + np.arange(count)]

    def store(self, address, values, lanes: Lanes) -> None:
        _, granules = self._place(address, values.itemsize * values.shape[1], lanes)
        self._check_arrived(granules, lanes)
        self._check_order(self.reader, granules, lanes, "writes what was read")
        same = self._write(granules, values, lanes)
        self._check_order(self.writer, granules, lanes, "writes what was written", unless=same)
        self._note(self.writer, granules, lanes.warp)

    def begin_copy(self, address, values, lanes: Lanes):
        """Issues an asynchronous copy; returns the granules, for `end_copy`."""
        _, granules = self._place(address, values.itemsize * values.shape[1], lanes)
        self._check_arrived(granules, lanes)
        self._check_order(self.reader, granules, lanes, "copies to what was read")
        self._check_order(self.writer, granules, lanes, "copies to what was written")
        self._write(granules, values, lanes)
        np.add.at(self.pending, granules.reshape(-1), 1)
        return granules

    def end_copy(self, granules, lanes: Lanes) -> None:
        """The thread that issued it has waited: the writes are its own, as of now."""
        np.subtract.at(self.pending, granules.reshape(-1), 1)
        self._note(self.writer, granules, COPIED + lanes.thread)

    def _write(self, granules, values, lanes: Lanes):
        """Returns which granules had these bytes before."""
        data = self.data.view(f"u{self.granule}")
        values = np.ascontiguousarray(values).view(data.dtype)
        same = self.known[granules] & (data[granules] == values)
        data[granules], self.known[granules] = values, True
        _raise(Race, "two lanes write different values", data[granules] != values, lanes)
        return same


def _check_aligned(address, size: int, lanes: Lanes) -> None:
    odd = address % size != 0
    if odd.any():
        bad = np.argmax(odd)
        raise Misaligned(f"{size} bytes at {int(address[bad]):#x}", lanes.lane[bad])


def _raise(kind: type[Fault], message: str, bad, lanes: Lanes) -> None:
    if bad.any():
        raise kind(message, lanes.lane[np.argmax(bad.any(axis=1))])

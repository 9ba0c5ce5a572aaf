# SPDX-License-Identifier: Apache-2.0
"""The GPU that a program is traced for, and the block sizes measured on it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import math
from importlib import resources
from typing import NamedTuple

import jax

SAME_MULTIPROCESSORS = {"nvidia_h200.json": "nvidia_h100_80gb_hbm3.json"}


class Gpu(NamedTuple):
    """Attributes:
    kind: as jax names it; None where it is not known.
    cores: multiprocessors.
    capability: such as 8.0 of an A100, 9.0 of Hopper.
    """

    kind: str | None = None
    cores: int = 108  # an A100
    capability: float = 8.0

    @property
    def is_hopper(self) -> bool:
        """Which alone has these matrix units, with 227 KiB of shared memory."""
        return int(self.capability) == 9


_assumed: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("assumed", default=None)


@contextlib.contextmanager
def assumed(chip: Gpu):
    """A context to trace in for a GPU that is not there."""
    token = _assumed.set(chip)
    try:
        yield
    finally:
        _assumed.reset(token)


def gpu() -> Gpu:
    """The one that is assumed, or the one at hand; without either an A100 of which nothing was
    measured."""
    if (chip := _assumed.get()) is not None:
        return chip
    if jax.default_backend() != "gpu":
        return Gpu()
    device = jax.devices()[0]
    found = Gpu(device.device_kind, getattr(device, "core_count", None) or Gpu().cores)
    with contextlib.suppress(ValueError):  # not a number where CUDA is not
        found = found._replace(capability=float(str(getattr(device, "compute_capability", ""))))
    return found


def even_parts(programs: int, places: int, most: int) -> int:
    """How many parts to cut each of `programs` pieces of work into, to keep `places` busy.

    Of one to four rounds, takes the fewest that leave less than a twentieth of the places idle.
    """
    best, best_share = 1, 0.0
    for rounds in range(1, 5):
        parts = max(1, min(most, rounds * places // programs))
        taken = -(-parts * programs // places)
        share = parts * programs / (taken * places)
        if share >= 0.95:
            return parts
        if share > best_share:
            best, best_share = parts, share
    return best


def tuned(chip: Gpu, op: str, shape: str) -> dict | None:
    """What `python -m benchmarks kernels --tune` measured on a GPU for a shape, if it did: of the
    capacities that were measured the nearest."""
    lines = table(chip.kind).get(op, {}) if chip.kind else {}
    wanted, slots = _without_slots(shape)
    distance = {}
    for line in lines:
        found, measured = _without_slots(line)
        if found == wanted:
            distance[line] = abs(math.log2(measured / slots))
    return lines[min(distance, key=distance.__getitem__)] if distance else None


def _without_slots(shape: str) -> tuple[list[str], int]:
    """The other words of a line's name, and its slots."""
    words = shape.split()
    (slots,) = (word for word in words if word.startswith("slots="))
    return [word for word in words if word != slots], int(slots.removeprefix("slots="))


def file_name(device_kind: str) -> str:
    """The file in `tuned/` for a GPU, such as nvidia_h200.json."""
    return "_".join(device_kind.lower().replace("-", " ").split()) + ".json"


@functools.cache
def table(device_kind: str) -> dict:
    """All that was measured on a GPU, or else on one with the same multiprocessors: by operation
    and shape."""
    file = table_file(device_kind)
    return json.loads(file.read_text()) if file else {}


def table_file(device_kind: str):
    """Where `table` finds it; None where there is none."""
    folder, own = resources.files("pallas_kernels") / "tuned", file_name(device_kind)
    names = (own, SAME_MULTIPROCESSORS.get(own, own))
    return next((folder / name for name in names if (folder / name).is_file()), None)

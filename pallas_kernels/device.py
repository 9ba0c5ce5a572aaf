# SPDX-License-Identifier: Apache-2.0
"""The GPU that a program is traced for, and the block sizes measured on it."""

from __future__ import annotations

import functools
import json
from importlib import resources

import jax

DEFAULT_CORES = 108  # an A100, where no GPU is at hand: ahead-of-time compilation
SAME_MULTIPROCESSORS = {"nvidia_h200.json": "nvidia_h100_80gb_hbm3.json"}


def gpu() -> tuple[str | None, int]:
    """Name and number of multiprocessors of the GPU at hand; None and a default without one."""
    if jax.default_backend() != "gpu":
        return None, DEFAULT_CORES
    device = jax.devices()[0]
    return device.device_kind, getattr(device, "core_count", None) or DEFAULT_CORES


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


def tuned(op: str, shape: str) -> dict | None:
    """What `python -m benchmarks kernels --tune` measured for this shape on this GPU, if it did."""
    name, _ = gpu()
    return table(name).get(op, {}).get(shape) if name else None


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

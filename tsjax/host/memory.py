# SPDX-License-Identifier: Apache-2.0
"""Free memory, and the most that was in use. Knows Linux's counters and those of jax's devices."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from pathlib import Path
from typing import Any

import jax

PROCESS = Path("/proc/self")
SCOPES = {
    "run": "of the process during a run, all of it: weights, both states, Python",
    "process": "of the process since it began, as the counter could not be reset",
    "device": "of the device since the process began, as its counter cannot be reset",
}


def forget_peak() -> bool:
    """Begins to count anew on a CPU; whether the system lets us."""
    with contextlib.suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")
        return True
    return False


def peak_memory() -> tuple[int, str]:
    """Bytes, and which of SCOPES they are."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"]), "device"
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", (PROCESS / "status").read_text(), re.MULTILINE)
        if found and forget_peak():
            return 1024 * int(found[1]), "run"
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "process"


def available_bytes(device: Any) -> int | None:
    """Free memory of a device, None where nothing reports it."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform != "cpu" or not os.path.exists("/proc/meminfo"):
        return None
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = map(_of_container, ("max", "current"))
    return free if limit is None or used is None else min(free, limit - used)


def main_memory() -> int | None:
    """Bytes of the machine, or those that a container allows; None where nothing says it."""
    limit = _of_container("max")
    sizes = [] if limit is None else [limit]
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(sizes, default=None)


def _of_container(name: str) -> int | None:
    """None outside of one, and for a limit that is none."""
    with contextlib.suppress(ValueError, OSError):
        return int(Path(f"/sys/fs/cgroup/memory.{name}").read_text())
    return None

# SPDX-License-Identifier: Apache-2.0
"""The most memory that was in use. Knows Linux's counters and those of jax's devices."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path

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
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"]), "device"
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", (PROCESS / "status").read_text(), re.MULTILINE)
        if found and forget_peak():
            return 1024 * int(found[1]), "run"
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "process"

# SPDX-License-Identifier: Apache-2.0
"""What ptxas and the PTX of a dump say about each of this project's kernels."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

# 16 bytes at a time, to registers or to shared memory.
WIDE_LOADS = r"ld\.global\S*\.(v4\.[bf]32|v2\.b64)|cp\.async\.c[ag]\S* .*, (0x10|16)"


def kernels(dump: Path) -> list[dict]:
    shared: dict[str, int] = {}
    for file in dump.glob("*thunk_sequence.txt"):
        lines = re.findall(r"\] (\S+) grid: .*shared_memory: (\d+) bytes", file.read_text())
        shared.update((name, int(size)) for name, size in lines)
    found = []
    for file in sorted(dump.glob("*.ptx")):
        text = file.read_text()
        for name in re.findall(r"\.visible \.entry (\w*tsjax_\w+)", text):
            (arch,) = re.findall(r"\.target (\w+)", text)
            ptxas = [find_ptxas(), "-v", f"-arch={arch}", str(file), "-o", str(dump / "cubin")]
            done = subprocess.run(ptxas, capture_output=True, text=True, check=True)
            report = done.stdout + done.stderr
            instructions = [line.strip() for line in text.splitlines()]

            def count(pattern: str, instructions=instructions) -> int:
                return sum(bool(re.search(pattern, line)) for line in instructions)

            found.append(
                {
                    "name": name[name.index("tsjax_") :],
                    "arch": arch,
                    "registers": max(map(int, re.findall(r"Used (\d+) registers", report))),
                    "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
                    "shared_bytes": shared.get(name),
                    "mma": count(r"mma\.sync"),
                    "wgmma": count(r"wgmma\.mma_async"),
                    "wide_loads": count(WIDE_LOADS),
                    "narrow_loads": count(r"ld\.global|cp\.async\.c[ag]"),
                }
            )
            found[-1]["narrow_loads"] -= found[-1]["wide_loads"]
    return found


def find_ptxas() -> str:
    found = shutil.which("ptxas")
    packaged = sorted(Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/*/bin/ptxas"))
    if not found and not packaged:
        raise FileNotFoundError("ptxas: install a CUDA toolkit, or nvidia-cuda-nvcc-cu12 by pip")
    return found or str(packaged[0])

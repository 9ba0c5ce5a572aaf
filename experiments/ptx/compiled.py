# SPDX-License-Identifier: Apache-2.0
"""The PTX of one Pallas kernel, compiled for a GPU that is not there, and how it is launched.

Needs the CUDA plugin (see tools/aot.py). Knows what XLA's dump looks like; runs nothing.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax

from tools import gpu_targets

LAUNCH = re.compile(r"\] (tsjax_\w+) grid: \[(\d+), (\d+), (\d+)\].*shared_memory: (\d+) bytes")
# From jax 0.11 on, PTX is dumped only for emitters that are named.
EMITTERS = {} if metadata.version("jax").startswith("0.10.") else {"xla_dump_emitter_re": ".*"}


class Compiled(NamedTuple):
    """Attributes:
    text: of the PTX module.
    shared_bytes: of each block.
    """

    text: str
    grid: tuple[int, int, int]
    shared_bytes: int


def compile_kernel(function: Callable, arrays: Sequence, target: str = "a100") -> Compiled:
    """`function` of these arrays, or of their shapes, is one call of a kernel and nothing else."""
    shapes = map(gpu_targets.shapes_on(target), arrays)
    with jax.disable_jit(False):
        lowered = gpu_targets.lowered(target, jax.jit(function), *shapes)
        with tempfile.TemporaryDirectory() as folder:
            lowered.compile(compiler_options={"xla_dump_to": folder, **EMITTERS})
            return read_dump(Path(folder))


def read_dump(folder: Path) -> Compiled:
    (thunks,) = folder.glob("*thunk_sequence.txt")
    ((_, *grid, shared),) = LAUNCH.findall(thunks.read_text())
    (text,) = (text for file in folder.glob("*.ptx") if "tsjax_" in (text := file.read_text()))
    return Compiled(text, tuple(map(int, grid)), int(shared))

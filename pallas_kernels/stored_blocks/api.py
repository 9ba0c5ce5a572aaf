# SPDX-License-Identifier: Apache-2.0
"""The types of blocks, and what makes numbers of them or takes them apart. Knows no device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pallas_kernels.narrow_product.matrix import FORMATS
from pallas_kernels.stored_blocks import native


class BlockType(NamedTuple):
    """How a type is stored: its number in files, and the numbers and bytes of a block."""

    code: int
    numbers: int
    nbytes: int


BLOCK_TYPES = {
    "Q4_0": BlockType(2, 32, 18),
    "Q4_1": BlockType(3, 32, 20),
    "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24),
    "Q8_0": BlockType(8, 32, 34),
    "Q2_K": BlockType(10, 256, 84),
    "Q3_K": BlockType(11, 256, 110),
    "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176),
    "Q6_K": BlockType(14, 256, 210),
}


def widened(blocks: np.ndarray, name: str) -> np.ndarray:
    """The numbers [R, n] in float32 of blocks [R, bytes] of a type.

    They have the bits of the format's definition in float32, as the gguf package has them.
    NotImplementedError where there are no kernels in C++.
    """
    kind = _checked(blocks, name)
    return native.widened(np.ascontiguousarray(blocks), kind.code, kind.nbytes, kind.numbers)


def taken_apart(blocks: np.ndarray, name: str) -> dict[str, np.ndarray]:
    """What `narrow_product.matrix.packed` takes of such blocks: integers [R, n], and of groups
    scales and what else the type has. They make the same numbers."""
    kind, format = _checked(blocks, name), FORMATS[name]
    count, n = len(blocks), blocks.shape[1] // kind.nbytes
    levels = (count, n), (count, n * kind.numbers // format.group)
    found = {
        "values": np.empty((count, n * kind.numbers), np.uint8),
        "scales": np.empty(levels[0], np.float16),
        "steps": np.empty(levels[1], np.int8) if format.two_levels else None,
        "least": np.empty(levels[0], np.float16) if format.with_least else None,
        "least_steps": np.empty(levels[1], np.int8)
        if format.two_levels and format.with_least
        else None,
    }
    native.take_apart(np.ascontiguousarray(blocks), kind.code, kind.nbytes, [*found.values()])
    return {part: array for part, array in found.items() if array is not None}


def _checked(blocks: np.ndarray, name: str) -> BlockType:
    kind = BLOCK_TYPES[name]
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] % kind.nbytes:
        wanted = f"[R, n * {kind.nbytes}] of uint8"
        raise ValueError(
            f"blocks of shape {blocks.shape} and {blocks.dtype} is not valid: {wanted}"
        )
    return kind

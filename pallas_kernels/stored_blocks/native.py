# SPDX-License-Identifier: Apache-2.0
"""Blocks in C++: a call of the library that is no part of a program."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from pallas_kernels import native

_BLOCKS = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)


def widened(blocks: np.ndarray, code: int, nbytes: int, numbers: int) -> np.ndarray:
    """As `api.widened`; other threads of Python go on meanwhile."""
    found = np.empty((len(blocks), blocks.shape[1] // nbytes * numbers), np.float32)
    _call("tsjax_widen", blocks, code, nbytes, [found])
    return found


def take_apart(
    blocks: np.ndarray, code: int, nbytes: int, arrays: Sequence[np.ndarray | None]
) -> None:
    """Fills the arrays, as `api.taken_apart` has them; None where the type has none."""
    _call("tsjax_take_apart", blocks, code, nbytes, arrays)


def _call(
    name: str, blocks: np.ndarray, code: int, nbytes: int, arrays: Sequence[np.ndarray | None]
) -> None:
    library = native.on_host()
    if library is None:
        raise NotImplementedError("there are no kernels in C++")
    function = library.function(name, _BLOCKS + (ctypes.c_void_p,) * len(arrays))
    places = [None if array is None else array.ctypes.data for array in arrays]
    if not function(code, blocks.ctypes.data, blocks.size // nbytes, *places):
        raise NotImplementedError(f"blocks of type {code}")

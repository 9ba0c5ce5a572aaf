# SPDX-License-Identifier: Apache-2.0
"""Blocks in C++: a call of the library that is no part of a program."""

from __future__ import annotations

import ctypes

import numpy as np

from pallas_kernels import native

_ARGUMENTS = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


def widened(blocks: np.ndarray, code: int, nbytes: int, numbers: int) -> np.ndarray:
    """As `api.widened`; other threads of Python go on meanwhile."""
    library = native.on_host()
    if library is None:
        raise NotImplementedError("there are no kernels in C++")
    found = np.empty((len(blocks), blocks.shape[1] // nbytes * numbers), np.float32)
    widen = library.function("tsjax_widen", _ARGUMENTS)
    if not widen(code, blocks.ctypes.data, blocks.size // nbytes, found.ctypes.data):
        raise NotImplementedError(f"blocks of type {code}")
    return found

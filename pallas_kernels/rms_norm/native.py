# SPDX-License-Identifier: Apache-2.0
"""Norms in C++ for CPUs, whose sums have one order for any number of rows."""

from __future__ import annotations

import functools

import jax
import numpy as np

from pallas_kernels import native
from pallas_kernels.rms_norm import reference
from pallas_kernels.rms_norm.split import on_each_device


def rms_norm(rows, weight, *, eps: float):
    """As `api.rms_norm`."""
    native.check_supported(rows.dtype)
    if rows.ndim == 1:
        return rms_norm(rows[None], weight, eps=eps)[0]
    return _kernel(rows.ndim - 1, eps, native.library())(rows, weight)


def add_rms_norm(rows, update, weight, *, eps: float):
    """As `api.add_rms_norm`."""
    sums = rows + update.astype(rows.dtype)
    return sums, rms_norm(sums, weight, eps=eps)


@functools.cache
def _kernel(lead: int, eps: float, library: native.Library):
    """For rows with so many axes before the last."""
    kernel = functools.partial(_rms_norm, eps=eps, library=library)
    definition = functools.partial(reference.rms_norm, eps=eps)
    return on_each_device(kernel, definition, lead=lead, adds=False)


def _rms_norm(rows, weight, *, eps, library):
    result = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    call = jax.ffi.ffi_call(library.target("tsjax_rms_norm"), result)
    return call(rows, weight.astype(rows.dtype), eps=np.float32(eps))

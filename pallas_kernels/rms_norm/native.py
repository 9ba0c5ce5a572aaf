# SPDX-License-Identifier: Apache-2.0
"""Norms in C++ for CPUs, whose sums have one order for any number of rows."""

from __future__ import annotations

import functools

import jax
import numpy as np

from pallas_kernels import native
from pallas_kernels.rms_norm import reference
from pallas_kernels.rms_norm.split import on_each_device


def rms_norm(rows, weight, live=None, *, eps: float):
    """As `api.rms_norm`."""
    native.check_supported(rows.dtype)
    if rows.ndim == 1:
        return rms_norm(rows[None], weight, eps=eps)[0]
    given = () if live is None else (live,)
    return _kernel(rows.ndim - 1, False, bool(given), eps, native.library())(rows, weight, *given)


def add_rms_norm(rows, update, weight, live=None, *, eps: float):
    """As `api.add_rms_norm`."""
    native.check_supported(rows.dtype)
    if rows.ndim == 1:
        return tuple(x[0] for x in add_rms_norm(rows[None], update[None], weight, eps=eps))
    given = () if live is None else (live,)
    kernel = _kernel(rows.ndim - 1, True, bool(given), eps, native.library())
    return kernel(rows, update, weight, *given)


@functools.cache
def _kernel(lead: int, adds: bool, with_live: bool, eps: float, library: native.Library):
    """For rows with so many axes before the last."""
    kernel = functools.partial(_run, adds=adds, eps=eps, library=library)
    of = reference.add_rms_norm if adds else reference.rms_norm
    definition = functools.partial(of, eps=eps)
    return on_each_device(kernel, definition, lead=lead, adds=adds, with_live=with_live)


def _run(rows, *others, adds, eps, library):
    result = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    name, results = ("tsjax_add_rms_norm", (result,) * 2) if adds else ("tsjax_rms_norm", result)
    (*update, weight), live = others[: 1 + adds], others[1 + adds :]
    call = jax.ffi.ffi_call(library.target(name), results)
    out = call(
        rows, *update, weight.astype(rows.dtype), *(live or native.all_rows()), eps=np.float32(eps)
    )
    return tuple(out) if adds else out

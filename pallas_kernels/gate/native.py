# SPDX-License-Identifier: Apache-2.0
"""The gate in C++ for CPUs, which leaves out the rows that nobody wants."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.dispatch import on_each_device


def gated(opened, live=None, *, dtype):
    """As `api.gated`, for rows [B, T, F, 2]."""
    dtype = jnp.dtype(dtype)
    native.check_supported(dtype)
    if opened.ndim != 4:
        raise NotImplementedError(f"rows of shape {opened.shape[:-2]}: [B, T]")
    given = () if live is None else (live,)
    return _kernel(bool(given), dtype, native.library())(opened, *given)


@functools.cache
def _kernel(with_live: bool, dtype, library: native.Library):
    kernel = functools.partial(_gated, dtype=dtype, library=library)
    live = ", b" if with_live else ""
    # A feed-forward layer is split by its numbers as attention is by its heads.
    split = on_each_device(f"b t k p{live} -> b t k", group=1, leader="b t k p")
    return jax.jit(split(kernel))


def _gated(opened, *live, dtype, library):
    result = jax.ShapeDtypeStruct(opened.shape[:3], dtype)
    call = jax.ffi.ffi_call(library.target("tsjax_gated"), result)
    return call(opened, *(live or native.all_rows()))

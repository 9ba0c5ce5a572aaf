# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values in C++ for CPUs: one call in place of half a dozen of XLA's loops."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.dispatch import on_each_device


def rotary_heads(fresh, cos, sin, live=None, *, dtype):
    """As `api.rotary_heads`."""
    dtype = jnp.dtype(dtype)
    native.check_supported(dtype)
    given = () if live is None else (live,)
    kernel = _kernel(fresh.shape[3] - 2, bool(given), dtype, native.library())
    return kernel(fresh, cos, sin, *given)


@functools.cache
def _kernel(group: int, with_live: bool, dtype, library: native.Library):
    kernel = functools.partial(_heads, dtype=dtype, library=library)
    live = ", b" if with_live else ""
    rule = f"b t k p h, b t c, b t c{live} -> b t (k g) h, b t k h, b t k h"
    return jax.jit(on_each_device(rule, group=group, leader="b t k p h")(kernel))


def _heads(fresh, cos, sin, *live, dtype, library):
    B, T, K, P, H = fresh.shape
    queries, keys = (jax.ShapeDtypeStruct((B, T, heads, H), dtype) for heads in (K * (P - 2), K))
    call = jax.ffi.ffi_call(library.target("tsjax_rotary_heads"), (queries, keys, keys))
    return tuple(call(fresh, cos, sin, *(live or native.all_rows())))

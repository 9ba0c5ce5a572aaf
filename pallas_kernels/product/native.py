# SPDX-License-Identifier: Apache-2.0
"""Products in C++ for CPUs: each weight is read once, each sum has one order for any rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.product.split import on_each_device


def product(rows, weights, scales=None, live=None):
    """As `api.product`."""
    native.check_supported(rows.dtype)
    if rows.ndim == 1:
        return product(rows[None], weights, scales)[0]
    given = tuple(array for array in (scales, live) if array is not None)
    kernel = _kernel(rows.ndim - 1, scales is not None, live is not None, native.library())
    return kernel(rows, weights, *given)


@functools.cache
def _kernel(lead: int, with_scales: bool, with_live: bool, library: native.Library):
    """For rows with so many axes before the last."""
    kernel = functools.partial(_product, with_scales=with_scales, library=library)
    return on_each_device(kernel, lead=lead, with_scales=with_scales, with_live=with_live)


def _product(rows, weights, *given, with_scales, library):
    scales, live = given[:with_scales], given[with_scales:]
    result = jax.ShapeDtypeStruct((*rows.shape[:-1], weights.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call(library.target("tsjax_product"), result)
    return call(
        rows, weights, *(scales or (jnp.zeros((0,), jnp.float32),)), *(live or native.all_rows())
    )

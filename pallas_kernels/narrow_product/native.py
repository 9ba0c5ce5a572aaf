# SPDX-License-Identifier: Apache-2.0
"""Products with narrow weights in C++ for CPUs: each is read once, and wide in registers only."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.narrow_product.matrix import PANEL, NarrowMatrix
from pallas_kernels.narrow_product.split import Layout, on_each_device


def narrow_product(rows, matrix: NarrowMatrix, live=None):
    """As `api.narrow_product`."""
    native.check_supported(rows.dtype)
    if rows.ndim == 1:
        return narrow_product(rows[None], matrix)[0]
    layout = Layout.of(matrix)
    kernel = _kernel(rows.ndim - 1, layout, live is not None, native.library())
    sums = kernel(rows, *layout.arrays_of(matrix), *(() if live is None else (live,)))
    return sums[..., : math.prod(matrix.outputs)]


@functools.cache
def _kernel(lead: int, layout: Layout, with_live: bool, library: native.Library):
    """For rows with so many axes before the last. Gives all outputs of the panels."""
    kernel = functools.partial(_narrow_product, layout=layout, library=library)
    return on_each_device(kernel, lead=lead, layout=layout, with_live=with_live)


def _narrow_product(rows, *given, layout: Layout, library):
    count = len(layout.names)
    arrays, live = dict(zip(layout.names, given[:count], strict=True)), given[count:]
    outputs = arrays["values"].shape[0] * PANEL
    result = jax.ShapeDtypeStruct((*rows.shape[:-1], outputs), jnp.float32)
    absent = jnp.zeros((0,), jnp.int8)
    names = ("values", "scales", "steps", "least", "least_steps")
    call = jax.ffi.ffi_call(library.target("tsjax_narrow_product"), result)
    return call(
        rows, *(arrays.get(name, absent) for name in names), *(live or native.all_rows()),
        bits=np.int64(layout.format.bits),
        group=np.int64(layout.format.group),
        zero=np.int64(layout.format.zero),
    )  # fmt: skip

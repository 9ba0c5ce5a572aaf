# SPDX-License-Identifier: Apache-2.0
"""Norms in C++ for CPUs, whose sums have one order for any number of rows."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import native
from pallas_kernels.rms_norm import reference


def rms_norm(rows, weight, *, eps: float):
    """As `api.rms_norm`."""
    native.check_supported(rows.dtype)
    if rows.ndim == 1:
        return rms_norm(rows[None], weight, eps=eps)[0]
    return _on_each_device(rows.ndim - 1, eps, native.library())(rows, weight)


@functools.cache
def _on_each_device(lead: int, eps: float, library: native.Library):
    kernel = functools.partial(_rms_norm, eps=eps, library=library)
    split = custom_partitioning(lambda rows, weight: kernel(rows, weight))

    def partition(mesh, arg_shapes, result_shape):
        spec = (*arg_shapes[0].sharding.spec, *(None,) * lead)[:lead]
        rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (spec, ()))
        return mesh, kernel, rows, (rows, whole)

    axes = " ".join(f"r{axis}" for axis in range(lead))
    split.def_partition(
        partition, sharding_rule=f"{axes} d, d -> {axes} d", need_replication_factors=("d",)
    )
    function = custom_vmap(lambda rows, weight: split(rows, weight))

    @function.def_vmap
    def rule(size, batched, rows, weight):
        if batched[1]:
            axes = tuple(0 if is_batched else None for is_batched in batched)
            norm = functools.partial(reference.rms_norm, eps=eps)
            return jax.vmap(norm, in_axes=axes)(rows, weight), True
        return function(rows.reshape(-1, *rows.shape[2:]), weight).reshape(rows.shape), True

    return jax.jit(function)


def _rms_norm(rows, weight, *, eps, library):
    result = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    call = jax.ffi.ffi_call(library.target("tsjax_rms_norm"), result)
    return call(rows, weight.astype(rows.dtype), eps=np.float32(eps))

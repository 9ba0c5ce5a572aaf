# SPDX-License-Identifier: Apache-2.0
"""What XLA and jax.vmap need to know of a kernel for norms: how it is split and batched."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.dispatch import MARKED, mark_of


def on_each_device(kernel: Callable, definition: Callable, *, lead: int, adds: bool) -> Callable:
    """`kernel(rows, weight)`; with `adds`, `kernel(rows, update, weight)`, which gives two arrays.

    Rows with `lead` axes before the last are split by these; the last is whole on every device.
    `definition` serves several weights under jax.vmap.
    """
    marked = mark_of(kernel)
    split = custom_partitioning(marked.kernel)
    count = 2 if adds else 1

    def partition(mesh, arg_shapes, result_shape):
        spec = (*arg_shapes[1].sharding.spec, *(None,) * lead)[:lead]
        rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (spec, ()))
        given = (rows,) * count
        return mesh, marked.kernel, given if adds else rows, (whole, *given, whole)

    axes = " ".join(f"r{axis}" for axis in range(lead))
    given = ", ".join([f"{axes} d"] * count)
    split.def_partition(
        partition, sharding_rule=f"{MARKED}{given}, d -> {given}", need_replication_factors=("d",)
    )
    function = custom_vmap(lambda *arrays: split(marked.mark(), *arrays))

    @function.def_vmap
    def rule(size, batched, *arrays):
        if batched[-1]:
            axes = [0 if is_batched else None for is_batched in batched]
            out = jax.vmap(definition, in_axes=axes)(*arrays)
        else:
            whole = [
                array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
                for array, is_batched in zip(arrays[:-1], batched, strict=False)
            ]
            flat = (array.reshape(-1, *array.shape[2:]) for array in whole)
            out = function(*flat, arrays[-1])
            out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return jax.jit(function)

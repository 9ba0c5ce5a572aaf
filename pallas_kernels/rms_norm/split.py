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


def on_each_device(
    kernel: Callable, definition: Callable, *, lead: int, adds: bool, with_live: bool = False
) -> Callable:
    """`kernel(rows, weight[, live])`; with `adds`, `kernel(rows, update, weight[, live])`, which
    gives two arrays.

    Rows with `lead` axes before the last are split by these; the last is whole on every device.
    `definition` serves several weights under jax.vmap.
    """
    marked = mark_of(kernel)
    split = custom_partitioning(marked.kernel)
    count = 2 if adds else 1

    def partition(mesh, arg_shapes, result_shape):
        spec = (*arg_shapes[1].sharding.spec, *(None,) * lead)[:lead]
        rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (spec, ()))
        given, live = (rows,) * count, (NamedSharding(mesh, PartitionSpec(spec[0])),) * with_live
        return mesh, marked.kernel, given if adds else rows, (whole, *given, whole, *live)

    axes = " ".join(f"r{axis}" for axis in range(lead))
    given = ", ".join([f"{axes} d"] * count)
    dimensions = f"{MARKED}{given}, d{', r0' * with_live} -> {given}"
    split.def_partition(partition, sharding_rule=dimensions, need_replication_factors=("d",))
    function = custom_vmap(lambda *arrays: split(marked.mark(), *arrays))

    @function.def_vmap
    def rule(size, batched, *arrays):
        if batched[count]:
            axes = [0 if is_batched else None for is_batched in batched[: count + 1]]
            out = jax.vmap(definition, in_axes=axes)(*arrays[: count + 1])
        else:

            def flat(arrays, batched):
                for array, is_batched in zip(arrays, batched, strict=True):
                    whole = array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
                    yield whole.reshape(-1, *whole.shape[2:])

            rows, live = slice(count), slice(count + 1, None)
            out = function(
                *flat(arrays[rows], batched[rows]),
                arrays[count],
                *flat(arrays[live], batched[live]),
            )
            out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return jax.jit(function)

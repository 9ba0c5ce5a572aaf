# SPDX-License-Identifier: Apache-2.0
"""What XLA and jax.vmap need to know of a kernel for products: how it is split and batched."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.dispatch import MARKED, mark_of
from pallas_kernels.product import xla


def on_each_device(kernel: Callable, *, lead: int, with_scales: bool, with_live: bool) -> Callable:
    """`kernel(rows, weights[, scales][, live])` for rows with `lead` axes before the last.

    Weights split by outputs give sums split alike; those split by inputs give parts of sums.
    """
    marked = mark_of(kernel)
    split = custom_partitioning(marked.kernel)

    def partition(mesh, arg_shapes, result_shape):
        _, rows, weights, *_ = (array.sharding.spec for array in arg_shapes)
        outputs, inputs = (*weights, None, None)[:2]
        taken = {*axes_of(outputs), *axes_of(inputs)}
        # Where rows lie by an axis that splits the weights, they come together.
        rows = [None if taken & {*axes_of(axes)} else axes for axes in rows]
        rows = (*rows, *(None,) * (lead + 1 - len(rows)))

        def on_device(mark, *arrays):
            sums = kernel(*arrays)
            return sums if inputs is None else lax.psum(sums, inputs)

        def sharding(*spec):
            return NamedSharding(mesh, PartitionSpec(*spec))

        scales = [sharding(outputs)] * with_scales
        live = [sharding(rows[0])] * with_live
        given = sharding(*rows[:lead], inputs), sharding(outputs, inputs)
        wanted = (sharding(), *given, *scales, *live)
        return mesh, on_device, sharding(*rows[:lead], outputs), wanted

    axes = " ".join(f"r{axis}" for axis in range(lead))
    others = ", o" * with_scales + ", r0" * with_live
    split.def_partition(
        partition,
        sharding_rule=f"{MARKED}{axes} i, o i{others} -> {axes} o",
        reduction_factors=("i",),
    )
    folded = fold_batches(lambda *arrays: split(marked.mark(), *arrays), xla.product, with_live)
    return jax.jit(folded)


def axes_of(names) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def fold_batches(kernel: Callable, of_batched: Callable, with_live: bool) -> Callable:
    """`kernel` with a rule for jax.vmap: batches of rows are more rows, batches of weights are
    those of another product, which computes all rows."""
    function = custom_vmap(lambda *arrays: kernel(*arrays))

    @function.def_vmap
    def rule(size, batched, rows, *others):
        weights, live = (others[:-1], others[-1:]) if with_live else (others, ())
        if any(batched[1 : 1 + len(weights)]):
            axes = [0 if is_batched else None for is_batched in batched[: 1 + len(weights)]]
            return jax.vmap(of_batched, in_axes=axes)(rows, *weights), True
        if with_live:
            rows, *live = (
                array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
                for array, is_batched in zip((rows, *live), (batched[0], batched[-1]), strict=True)
            )
            live = [live[0].reshape(-1)]
        flat = rows.reshape(-1, *rows.shape[2:]) if rows.ndim > 2 else rows
        sums = function(flat, *weights, *live)
        return sums.reshape(*rows.shape[:-1], sums.shape[-1]), True

    return function

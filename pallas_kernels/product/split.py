# SPDX-License-Identifier: Apache-2.0
"""What XLA and jax.vmap need to know of a kernel for products: how it is split and batched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.dispatch import MARKED, mark_of
from pallas_kernels.product import xla


def on_each_device(kernel: Callable, *, lead: int, with_scales: bool, with_live: bool) -> Callable:
    """`kernel(rows, weights[, scales][, live])` for rows with `lead` axes before the last."""
    axes = " ".join(f"r{axis}" for axis in range(lead))
    others = ", o" * with_scales + ", r0" * with_live
    rule = f"{MARKED}{axes} i, o i{others} -> {axes} o"
    how = dict(sharding_rule=rule, reduction_factors=("i",))
    arrays = (2, 1) if with_scales else (2,)
    return split_product(kernel, xla.product, how, lead=lead, arrays=arrays, with_live=with_live)


def split_product(
    kernel: Callable,
    of_batched: Callable,
    how: Mapping[str, Any],
    *,
    lead: int,
    arrays: Sequence[int],
    with_live: bool,
    unit: int = 1,
) -> Callable:
    """`kernel(rows, *arrays of the weights[, live])`, on each device with what lies there.

    Weights split by outputs give sums split alike; those split by inputs give parts of sums.

    Args:
      of_batched: computes what jax.vmap makes of it where there are batches of weights.
      how: for XLA, the rule of its axes.
      lead: axes of rows before the last.
      arrays: of each array of the weights whether it has outputs, 1, or outputs and inputs, 2.
      unit: inputs that stay on one device.
    """
    marked = mark_of(kernel)
    split = custom_partitioning(marked.kernel)

    def partition(mesh, arg_shapes, result_shape):
        _, rows, weights, *_ = (array.sharding.spec for array in arg_shapes)
        outputs, inputs = (*weights, None, None)[:2]
        parts = math.prod(mesh.shape[axis] for axis in _axes_of(inputs))
        if arg_shapes[1].shape[-1] % (unit * parts):
            inputs = None
        taken = {*_axes_of(outputs), *_axes_of(inputs)}
        # Where rows lie by an axis that splits the weights, they come together.
        rows = [None if taken & {*_axes_of(axes)} else axes for axes in rows]
        rows = (*rows, *(None,) * (lead + 1 - len(rows)))

        def on_device(mark, *arrays):
            sums = kernel(*arrays)
            return sums if inputs is None else lax.psum(sums, inputs)

        def sharding(*spec):
            return NamedSharding(mesh, PartitionSpec(*spec))

        of_weights = [sharding(*(outputs, inputs)[:axes]) for axes in arrays]
        live = [sharding(rows[0])] * with_live
        wanted = (sharding(), sharding(*rows[:lead], inputs), *of_weights, *live)
        return mesh, on_device, sharding(*rows[:lead], outputs), wanted

    split.def_partition(partition, **how)
    return jax.jit(
        _fold_batches(lambda *arrays: split(marked.mark(), *arrays), of_batched, with_live)
    )


def _axes_of(names) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _fold_batches(kernel: Callable, of_batched: Callable, with_live: bool) -> Callable:
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

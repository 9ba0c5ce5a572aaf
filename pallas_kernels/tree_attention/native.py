# SPDX-License-Identifier: Apache-2.0
"""Attention in C++ for CPUs: each cache byte is read once, each row sums in one order.

The order is told in native.cc. Because of it the bits of a row do not depend on which rows run
beside it, nor on whether what it sees is cached or fresh.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.dispatch import on_each_device
from pallas_kernels.narrow_rows import NarrowRows


def tree_attention(
    q, k_cache, v_cache, length, k_new, v_new, tree_mask,
    mean=None, log_total=None, slot_ranks=None, row_ranks=None, live=None,
):  # fmt: skip
    """Arguments as in `api.tree_attention`, those of `rest` and of `ranks` one by one; returns both
    results."""
    B, T, N, H = q.shape
    if isinstance(k_cache, NarrowRows):
        raise NotImplementedError("narrow rows")
    native.check_supported(q.dtype, head_dim=H)
    mask = jnp.broadcast_to(tree_mask, (B, T, T))
    rest = () if mean is None else (mean, log_total)
    ranks = () if slot_ranks is None else (slot_ranks, row_ranks)
    some = () if live is None else (live,)
    given = bool(rest), bool(ranks), bool(some)
    attention = _on_each_device(N // k_cache.shape[1], *given, native.library())
    return attention(q, k_cache, v_cache, length, k_new, v_new, mask, *rest, *ranks, *some)


@functools.cache
def _on_each_device(
    group: int, with_rest: bool, with_ranks: bool, with_live: bool, library: native.Library
):
    rest = ", b (k g) h, b (k g)" if with_rest else ""
    ranks = ", b s, b t" if with_ranks else ""
    live = ", b" if with_live else ""
    split = on_each_device(
        f"b t (k g) h, b k s h, b k s h, b, b t k h, b t k h, b t u{rest}{ranks}{live} "
        "-> b t (k g) h, b t (k g)",
        group=group,
    )
    attention = functools.partial(
        _attention, with_rest=with_rest, with_ranks=with_ranks, library=library
    )
    return jax.jit(split(attention))


def _attention(
    q, k_cache, v_cache, length, k_new, v_new, mask, *others, with_rest, with_ranks, library
):
    rest, others = others[: 2 * with_rest], others[2 * with_rest :]
    ranks, live = others[: 2 * with_ranks], others[2 * with_ranks :]
    no_rest = jnp.zeros((0,), q.dtype), jnp.zeros((0,), jnp.float32)
    no_ranks = jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.int32)
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
    )
    call = jax.ffi.ffi_call(library.target("tsjax_tree_attention"), results)
    return tuple(
        call(
            q, k_cache, v_cache, length.astype(jnp.int32), k_new, v_new, mask,
            *(rest or no_rest), *(ranks or no_ranks), *(live or native.all_rows()),
        )
    )  # fmt: skip

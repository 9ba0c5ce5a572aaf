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
from pallas_kernels.narrow_rows import numbers_and_exponents


def tree_attention(
    q, k_cache, v_cache, length, k_new, v_new, tree_mask,
    mean=None, log_total=None, slot_ranks=None, row_ranks=None, live=None,
):  # fmt: skip
    """Arguments as in `api.tree_attention`, those of `rest` and of `ranks` one by one; returns both
    results."""
    B, T, N, H = q.shape
    native.check_supported(q.dtype, head_dim=H)
    mask = jnp.broadcast_to(tree_mask, (B, T, T))
    rest = () if mean is None else (mean, log_total)
    ranks = () if slot_ranks is None else (slot_ranks, row_ranks)
    k_cache, k_exponents = numbers_and_exponents(k_cache)
    v_cache, v_exponents = numbers_and_exponents(v_cache)
    exponents = (*k_exponents, *v_exponents)
    if len(exponents) == 1:
        raise NotImplementedError("of keys and values only one are narrow")
    some = () if live is None else (live,)
    given = bool(rest), bool(ranks), bool(exponents), bool(some)
    attention = _on_each_device(N // k_cache.shape[1], *given, native.library())
    others = (*rest, *ranks, *exponents, *some)
    return attention(q, k_cache, v_cache, length, k_new, v_new, mask, *others)


@functools.cache
def _on_each_device(
    group: int, with_rest: bool, with_ranks: bool, is_narrow: bool, with_live: bool,
    library: native.Library,
):  # fmt: skip
    rest = ", b (k g) h, b (k g)" if with_rest else ""
    ranks = ", b s, b t" if with_ranks else ""
    exponents = ", b k s, b k s" if is_narrow else ""
    live = ", b" if with_live else ""
    split = on_each_device(
        f"b t (k g) h, b k s h, b k s h, b, b t k h, b t k h, b t u{rest}{ranks}"
        f"{exponents}{live} -> b t (k g) h, b t (k g)",
        group=group,
    )
    attention = functools.partial(
        _attention, with_rest=with_rest, with_ranks=with_ranks, is_narrow=is_narrow, library=library
    )
    return jax.jit(split(attention))


def _attention(
    q, k_cache, v_cache, length, k_new, v_new, mask, *others, with_rest, with_ranks, is_narrow,
    library,
):  # fmt: skip
    rest, others = others[: 2 * with_rest], others[2 * with_rest :]
    ranks, others = others[: 2 * with_ranks], others[2 * with_ranks :]
    exponents, live = others[: 2 * is_narrow], others[2 * is_narrow :]
    no_rest = jnp.zeros((0,), q.dtype), jnp.zeros((0,), jnp.float32)
    no_ranks = jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.int32)
    no_exponents = jnp.zeros((0,), jnp.int8), jnp.zeros((0,), jnp.int8)
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
    )
    call = jax.ffi.ffi_call(library.target("tsjax_tree_attention"), results)
    return tuple(
        call(
            q, k_cache, v_cache, length.astype(jnp.int32), k_new, v_new, mask,
            *(rest or no_rest), *(ranks or no_ranks), *(exponents or no_exponents),
            *(live or native.all_rows()),
        )
    )  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Scores in C++ for CPUs: each key is read once for all query heads that share it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.dispatch import on_each_device
from pallas_kernels.narrow_rows import numbers_and_exponents


def cache_scores(q_last, k_cache, length, log_totals=None, *, mode: str = "dot"):
    """As `api.cache_scores`, but "softmax" is summed over each kv head's queries only."""
    _, N, H = q_last.shape
    native.check_supported(q_last.dtype, head_dim=H)
    given = () if log_totals is None else (log_totals,)
    k_cache, exponents = numbers_and_exponents(k_cache)
    having = bool(given), bool(exponents)
    scores = _on_each_device(N // k_cache.shape[1], mode, *having, native.library())
    return scores(q_last, k_cache, length, *given, *exponents)


@functools.cache
def _on_each_device(
    group: int, mode: str, with_totals: bool, is_narrow: bool, library: native.Library
):
    totals = ", b (k g)" if with_totals else ""
    exponents = ", b k s" if is_narrow else ""
    split = on_each_device(f"b (k g) h, b k s h, b{totals}{exponents} -> b k s", group=group)
    settings = dict(mode=mode, with_totals=with_totals, library=library)
    return jax.jit(split(functools.partial(_cache_scores, **settings)))


def _cache_scores(q_last, k_cache, length, *others, mode, with_totals, library):
    given, exponents = others[:with_totals], others[with_totals:]
    (log_totals,) = given or (jnp.zeros((0,), jnp.float32),)
    (exponents,) = exponents or (jnp.zeros((0,), jnp.int8),)
    result = jax.ShapeDtypeStruct(k_cache.shape[:3], jnp.float32)
    call = jax.ffi.ffi_call(library.target("tsjax_cache_scores"), result)
    return call(
        q_last, k_cache, length.astype(jnp.int32), log_totals, exponents, softmax=mode == "softmax"
    )

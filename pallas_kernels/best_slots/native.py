# SPDX-License-Identifier: Apache-2.0
"""The best slots in C++ for CPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.dispatch import on_each_device


def best_slots(scores, length, *, count: int, first: int = 0):
    """As `api.best_slots`."""
    if scores.dtype != jnp.float32:
        raise NotImplementedError(f"scores of type {scores.dtype}: only float32")
    return _on_each_device(count, first, native.library())(scores, length)


@functools.cache
def _on_each_device(count: int, first: int, library: native.Library):
    split = on_each_device("b k s, b -> b k c", group=1, leader="b k s")
    return jax.jit(split(functools.partial(_run, count=count, first=first, library=library)))


def _run(scores, length, *, count, first, library):
    result = jax.ShapeDtypeStruct((*scores.shape[:2], count), jnp.int32)
    call = jax.ffi.ffi_call(library.target("tsjax_best_slots"), result)
    return call(scores, length.astype(jnp.int32), first=np.int32(min(first, scores.shape[2])))

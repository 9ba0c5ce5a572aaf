# SPDX-License-Identifier: Apache-2.0
"""Thresholds in C++ for CPUs: three passes over a row in place of one for each bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.dispatch import on_each_device


def threshold(keys, most, masses=None):
    """As `api.threshold`."""
    if keys.dtype != jnp.uint32:
        raise NotImplementedError(f"keys of type {keys.dtype}: only uint32")
    lead = keys.shape[:-1]
    given = (keys, most) if masses is None else (keys, most, masses)
    if keys.ndim != 3:  # the rule that splits rows knows two axes of them
        given = tuple(array.reshape(-1, 1, array.shape[-1]) for array in given)
    return _on_each_device(masses is not None, native.library())(*given).reshape(*lead, 1)


@functools.cache
def _on_each_device(with_masses: bool, library: native.Library):
    masses = ", b k v" if with_masses else ""
    split = on_each_device(f"b k v, b k o{masses} -> b k o", group=1, leader="b k v")
    return jax.jit(split(functools.partial(_run, library=library)))


def _run(keys, most, *masses, library):
    result = jax.ShapeDtypeStruct(most.shape, jnp.uint32)
    call = jax.ffi.ffi_call(library.target("tsjax_threshold"), result)
    return call(keys, *(masses or (jnp.zeros((0,), jnp.uint32),)), most)

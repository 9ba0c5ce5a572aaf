# SPDX-License-Identifier: Apache-2.0
"""What the public functions refuse, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.narrow_rows import NarrowRows

FLOATS = ("bfloat16", "float16", "float32", "float64")


def check_arrays(
    arrays: Mapping[str, Any],
    wanted: Mapping[str, str | Sequence[str]],
    *,
    floats: Sequence[str],
    integers: Sequence[str] = (),
    bools: Sequence[str] = (),
) -> None:
    """Refuses arrays whose shapes do not fit together, or whose types are not supported.

    `wanted` names the dimensions of each array, such as "B K S H", or several such choices; a
    letter stands for the same size everywhere, and N is a multiple of K.
    """
    got = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())
    choices = {name: [dims] if isinstance(dims, str) else dims for name, dims in wanted.items()}
    rule = ", ".join(
        f"{name} " + " or ".join(f"[{', '.join(dims.split())}]" for dims in choices[name])
        for name in wanted
    )
    sizes: dict[str, int] = {}
    wrong = []
    for name, array in arrays.items():
        for dims in choices[name]:
            letters = dims.split()
            pairs = list(zip(letters, array.shape, strict=False))
            if len(letters) == len(array.shape) and all(sizes.get(d, n) == n for d, n in pairs):
                sizes.update(pairs)
                break
        else:
            wrong.append(name)
    if wrong:
        raise ValueError(f"shapes do not fit together ({', '.join(wrong)}): {rule}; got {got}")
    if not sizes["K"] or sizes["N"] % sizes["K"]:
        trouble = "N is not a multiple of K"
        raise ValueError(f"shapes do not fit together ({trouble}): {rule}; got {got}")
    if empty := [letter for letter, size in sizes.items() if not size]:
        raise ValueError(f"shapes do not fit together ({empty[0]} is 0): {rule}; got {got}")

    types = ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
    first = arrays[floats[0]].dtype
    if first not in FLOATS:
        raise ValueError(f"{floats[0]} of type {first} is not valid: one of {', '.join(FLOATS)}")
    for name in floats:
        array: Any = arrays[name]
        if isinstance(array, NarrowRows):
            _check_narrow(name, array)
        elif array.dtype != first:
            raise ValueError(
                f"{name} of type {array.dtype} is not valid: {', '.join(floats)} share one "
                f"type; got {types}"
            )
    for names, kind, word in ((integers, jnp.integer, "integers"), (bools, jnp.bool, "bool")):
        for name in names:
            if not jnp.issubdtype(arrays[name].dtype, kind):
                raise ValueError(f"{name} of type {arrays[name].dtype} is not valid: {word}")


def _check_narrow(name: str, rows: NarrowRows) -> None:
    """Refuses what is not int8 with one exponent for each row."""
    numbers, exponents = rows
    wanted = (*numbers.shape[:-1], 1)
    if exponents.shape != wanted or {numbers.dtype, exponents.dtype} != {jnp.dtype(jnp.int8)}:
        raise ValueError(
            f"{name} of narrow rows, {numbers.dtype} {numbers.shape} with exponents "
            f"{exponents.dtype} {exponents.shape}, is not valid: int8, exponents {wanted}"
        )


def check_live(live: jax.Array | None, rows: jax.Array) -> None:
    """Refuses what does not say of rows [B, T, ...] how many of each batch row are wanted."""
    if live is None:
        return
    wanted = rows.shape[:1]
    if rows.ndim < 3 or live.shape != wanted or live.dtype != jnp.int32:
        raise ValueError(
            f"live of shape {live.shape} and type {live.dtype} is not valid: {wanted} of int32, "
            f"for rows [B, T, ...]; got rows {rows.shape}"
        )


def check_length(length, capacity: int) -> None:
    """Refuses lengths outside 0 .. capacity where they are known, not in a traced program."""
    if isinstance(length, Tracer):
        return
    values = np.asarray(length)
    if values.min() < 0 or values.max() > capacity:
        raise ValueError(
            f"length={values.tolist()} is not valid: from 0 to the {capacity} slots of the cache"
        )

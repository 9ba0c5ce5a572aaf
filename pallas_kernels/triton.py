# SPDX-License-Identifier: Apache-2.0
"""The one place that knows Pallas' Triton backend: loads, stores, products, launches.

One source serves A100, H100 and H200. The backend is deprecated since jax 0.11 and works up to
0.12 at least; the way out is `jax_triton` with the same kernels written in Triton's own language
(docs/kernels.md), and only this file and the bodies of the kernels would change.

Every load and every store of a kernel goes through `load` and `store`, which demand a mask. So no
access can leave its array, however ragged its blocks are. Interpretation would not show such a
fault, as it clamps and pads. A test reads the masks back from the lowered program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as backend

LEAST_DOT = 16  # the least size of each side of a matrix product
LARGEST_HEAD = 128
DTYPES = ("bfloat16", "float16", "float32")
MASKED = -1e30  # a score: finite, so that exp2(MASKED - peak) is exactly 0 and no inf - inf arises

OPERATIONS = ("tree_attention", "cache_scores", "rms_norm", "rotary_heads", "narrow_product")
SWITCH = "TSJAX_NO_TRITON"


def switched_off(operation: str) -> bool:
    """Whether the environment wants no kernel of this operation: `all`, or names."""
    named = os.environ.get(SWITCH, "").replace(",", " ").split()
    if not set(named) <= {"all", *OPERATIONS}:
        raise ValueError(
            f"{SWITCH}={os.environ[SWITCH]!r} is not valid: all, or some of {', '.join(OPERATIONS)}"
        )
    return "all" in named or operation in named


def check_dtype(operation: str, dtype) -> None:
    """Raises NotImplementedError for types that no kernel serves, and for all if the operation's
    are switched off."""
    if switched_off(operation):
        raise NotImplementedError(f"switched off by {SWITCH}")
    if dtype not in DTYPES:
        raise NotImplementedError(f"type {dtype}: only {', '.join(DTYPES)}")


def check_supported(operation: str, dtype, head_dim: int) -> None:
    """As `check_dtype`, for the heads of attention, whose rows may be int8: loads of 8 bytes."""
    check_dtype(operation, dtype)
    if head_dim > LARGEST_HEAD or head_dim % 8:
        raise NotImplementedError(
            f"head_dim {head_dim}: a multiple of 8, for loads of 16 bytes, up to {LARGEST_HEAD}"
        )


def padded(size: int) -> int:
    """The block that holds `size` entries: blocks have powers of two, of at least 16."""
    return max(LEAST_DOT, 1 << (size - 1).bit_length())


def steps(size: int, start: Any = 0):
    """start, start + 1, ... as a vector; int32 whatever the default integer type is."""
    return start + lax.iota(jnp.int32, size)


def quotient(x, size: int):
    """x // size for non-negative integers, in the type of x."""
    return lax.div(x, jnp.asarray(size, x.dtype))


def remainder(x, size: int):
    """x % size for non-negative integers, in the type of x."""
    return lax.rem(x, jnp.asarray(size, x.dtype))


def load(ref, index: Sequence, inside, other: Any = 0):
    """ref[index] where `inside`, `other` elsewhere; what lies outside is not touched.

    All vectors of `index`, and `inside`, have the rank of the result.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(part) for part in index))
    mask = jnp.broadcast_to(inside, shape)
    other = jnp.asarray(other, ref.dtype)
    return backend.load(ref.at[tuple(index)], mask=mask, other=other)


def store(ref, index: Sequence, value, inside) -> None:
    """ref[index] = value where `inside`; what lies outside is not touched."""
    mask = jnp.broadcast_to(inside, value.shape)
    backend.store(ref.at[tuple(index)], value, mask=mask)


def dot(a, b, *, transpose_b: bool = False):
    """a [m, n] @ b [n, o] in float32: 16-bit types on the matrix units, float32 without rounding
    to TF32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return backend.dot(a, b, trans_b=transpose_b, precision=exact)


def scaled(products, scales):
    """Products [m, n], each column times its scale [n]; as they are where there are no scales."""
    return products if scales is None else products * scales[None, :]


def launch(
    kernel: Callable,
    *arrays,
    grid: tuple[int, ...],
    outputs: Sequence[tuple[tuple[int, ...], jnp.dtype]],
    warps: int,
    stages: int,
    name: str,
    interpret: bool,
):
    """Runs `kernel` on whole arrays, once per point of `grid`; its first axis runs fastest.

    `name` is found in the lowered program, so a test can tell that a kernel was used.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs],
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(outputs),
        compiler_params=backend.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*arrays)

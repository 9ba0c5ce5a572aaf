# SPDX-License-Identifier: Apache-2.0
"""Types of arrays: Float[Array, "B T N H"] in a signature has floats and four dimensions.

The letters are those of the functions' documentation: B batch rows, T fresh rows, S slots of the
cache, N query heads, K kv heads, H head dimension. A letter stands for one size in a signature.

The names are jaxtyping's where a program has imported it, as the tests do, which check each call.
Else they are stand-ins that say nothing: jaxtyping is neither needed nor loaded.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike as DTypeLike

if TYPE_CHECKING:
    from jax import Array as Array
else:
    Array = jax.Array | np.ndarray  # functions of JAX take both

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
    from jaxtyping import Integer as Integer
    from jaxtyping import Key as Key
    from jaxtyping import Num as Num
    from jaxtyping import Shaped as Shaped
    from jaxtyping import UInt as UInt
else:

    class _Unchecked:
        """Any array, whatever its shape."""

        def __class_getitem__(cls, item):
            return Array

    Bool = Float = Int = Integer = Key = Num = Shaped = UInt = _Unchecked


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """float32 for the 16-bit types, the type itself otherwise."""
    dtype = jnp.dtype(dtype)
    return dtype if dtype.itemsize > 4 else jnp.dtype(jnp.float32)

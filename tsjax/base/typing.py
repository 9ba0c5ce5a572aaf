# SPDX-License-Identifier: Apache-2.0
"""The types of array code: Float[Array, "B T V"] are floats with three dimensions.

One alphabet of dimensions, everywhere. In a signature a letter stands for one size; a lower-case
word is a size that only this function knows, and {name} the value of an argument.

    B  batch rows                          L  layers
    T  rows of one pass, tree nodes        D  embedding
    S  slots of the whole cache            N  query heads
    M  slots of the draft cache            K  kv heads
    C  capacity of the token buffer        G  query heads of a kv head, N / K
    P  tokens of the longest prompt        H  dimension of a head
    R  paths of a draft                    F  feed-forward
    J  drafted tokens of the longest path  V  vocabulary

Shapes are checked in the tests, which load jaxtyping. Without it the names are stand-ins, see
`pallas_kernels.typing`.
"""

from pallas_kernels.typing import (
    Array,
    Bool,
    DTypeLike,
    Float,
    Int,
    Integer,
    Key,
    Num,
    Shaped,
    UInt,
)
from pallas_kernels.typing import accumulation_dtype as accumulation_dtype

__all__ = ["Array", "Bool", "DTypeLike", "Float", "Int", "Integer", "Key", "Num", "Shaped", "UInt"]

# SPDX-License-Identifier: Apache-2.0
"""Numbers in registers, and the forms of opcode that compute registers from registers.

Results round to nearest even. `fma` and the "approx" and "full" forms are computed in a wider type
and rounded: within the chip's own error, but not its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Pure(NamedTuple):
    """`function` of numbers of the types `sources`, which gives one of type `target`."""

    sources: tuple[str, ...]
    target: str
    function: Callable


# --- numbers ---------------------------------------------------------------------------------


def width(kind: str) -> int:
    """Bytes of a type; of a predicate 0."""
    return 0 if kind == "pred" else int(kind.lstrip("bfsu")) // 8


def bits(kind: str):
    """The type in which a register holds its bits."""
    return np.dtype(bool if kind == "pred" else f"u{width(kind)}")


def decode(kind: str) -> Callable:
    """From bits, of a register at least as wide, to numbers."""
    if kind == "bf16":
        return lambda x: (x.astype(np.uint32) << 16).view(np.float32)
    if kind == "pred" or kind[0] in "bu":
        return lambda x: x.astype(bits(kind), copy=False)
    if kind == "f16":
        return lambda x: x.view(np.float16).astype(np.float32)
    number = np.dtype(f"{kind[0].replace('s', 'i')}{width(kind)}")
    return lambda x: x.astype(bits(kind), copy=False).view(number)


def encode(kind: str) -> Callable:
    if kind == "bf16":
        return to_bfloat16
    number = np.dtype(
        bits(kind) if kind == "pred" or kind[0] in "bu"
        else f"{kind[0].replace('s', 'i')}{width(kind)}"
    )  # fmt: skip
    return lambda x: x.astype(number, copy=False).view(bits(kind))


def to_bfloat16(x):
    """The upper half of float32, rounded to nearest even."""
    word = x.astype(np.float32, copy=False).view(np.uint32)
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


# --- pure forms ------------------------------------------------------------------------------

FLOAT = dict(add=np.add, sub=np.subtract, mul=np.multiply, min=np.fmin, max=np.fmax)
WHOLE = dict(add=np.add, sub=np.subtract, min=np.minimum, max=np.maximum)
LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
COMPARE = dict(
    eq=np.equal, ne=np.not_equal, lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal
)
APPROX = dict(ex2=np.exp2, rsqrt=lambda x: 1 / np.sqrt(x))


def _wide(function: Callable) -> Callable:
    """In float64."""
    return lambda *x: function(*(part.astype(np.float64) for part in x))


def _high(size: int) -> Callable:
    return lambda a, b: (a.astype(np.int64) * b.astype(np.int64)) >> size


def _multiply_wide(sign: str, size: int) -> Pure:
    kind, number = f"{sign}{size}", f"{'i' if sign == 's' else 'u'}{size // 4}"
    return Pure((kind, kind), f"{sign}{2 * size}", lambda a, b: a.astype(number) * b.astype(number))


def _shift(size: int, left: bool) -> Callable:
    """By more than there are bits: nothing is left but the sign."""

    def shift(x, by):
        if left:
            return np.where(by < size, x << (by % size).astype(x.dtype), 0)
        rest = x >> np.minimum(by, size - 1).astype(x.dtype)
        return rest if x.dtype.kind == "i" else np.where(by < size, rest, 0)

    return shift


def _bit_field(x, start, length):
    start, length = (part.astype(np.int64) & 0xFF for part in (start, length))
    mask = (np.int64(1) << np.minimum(length, 32)) - 1
    field = (x.astype(np.int64) >> np.minimum(start, 63)) & mask
    sign = (x.dtype.kind == "i") & (field > mask >> 1)
    return np.where(sign, field | ~mask, field).astype(x.dtype)


def _permute(a, b, selector):
    """Bytes of b:a; the upper bit of a choice asks for the byte's sign."""
    pair = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(1, np.uint32)
    for place in range(4):
        choice = (selector.astype(np.uint64) >> np.uint64(4 * place)) & np.uint64(15)
        byte = (pair >> (np.uint64(8) * (choice & np.uint64(7)))) & np.uint64(255)
        byte = np.where(choice & np.uint64(8), np.where(byte & np.uint64(128), 255, 0), byte)
        out = out | (byte.astype(np.uint32) << np.uint32(8 * place))
    return out


def _look_up(a, b, c, table):
    out = np.zeros(1, np.uint32)
    for row in range(8):
        parts = (x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1)))
        chosen = np.bitwise_and.reduce(np.broadcast_arrays(*parts))
        out = out | np.where((table >> np.uint32(row)) & 1, chosen, 0).astype(np.uint32)
    return out


def _pack_halves(kind: str) -> Callable:
    def pack(upper, lower):
        upper, lower = (encode(kind)(x).astype(np.uint32) for x in (upper, lower))
        return (upper << 16) | lower

    return pack


INT = r"([us](?:16|32|64))"
PURE = [
    (r"(add|sub|mul|min|max)\.(?:rn\.)?(f32|f16|bf16)", lambda op, t: Pure((t, t), t, FLOAT[op])),
    (rf"(add|sub|min|max)\.{INT}", lambda op, t: Pure((t, t), t, WHOLE[op])),
    (rf"mul\.lo\.{INT}", lambda t: Pure((t, t), t, np.multiply)),
    (r"mul\.hi\.([us])(16|32)", lambda s, n: Pure((s + n,) * 2, s + n, _high(int(n)))),
    (r"mul\.wide\.([us])(16|32)", lambda s, n: _multiply_wide(s, int(n))),
    (rf"mad\.lo\.{INT}", lambda t: Pure((t, t, t), t, lambda a, b, c: a * b + c)),
    (r"fma\.rn\.(f32|f16|bf16)", lambda t: Pure((t, t, t), t, _wide(lambda a, b, c: a * b + c))),
    (r"(and|or|xor)\.(pred|b16|b32|b64)", lambda op, t: Pure((t, t), t, LOGIC[op])),
    (r"not\.(pred|b16|b32|b64)", lambda t: Pure((t,), t, np.invert)),
    (r"neg\.(s16|s32|s64|f32)", lambda t: Pure((t,), t, np.negative)),
    (r"shl\.b(16|32|64)", lambda n: Pure(("b" + n, "b32"), "b" + n, _shift(int(n), True))),
    (r"shr\.([bus])(16|32|64)", lambda s, n: Pure((s + n, "b32"), s + n, _shift(int(n), False))),
    (r"bfe\.([us]32)", lambda t: Pure((t, "b32", "b32"), t, _bit_field)),
    (r"prmt\.b32", lambda: Pure(("b32",) * 3, "b32", _permute)),
    (r"lop3\.b32", lambda: Pure(("b32",) * 4, "b32", _look_up)),
    (
        r"selp\.([bus](?:16|32|64)|f32)",
        lambda t: Pure((t, t, "pred"), t, lambda a, b, p: np.where(p, a, b)),
    ),
    (
        r"setp\.(eq|ne|lt|le|gt|ge)\.([bus](?:16|32|64))",
        lambda op, t: Pure((t, t), "pred", COMPARE[op]),
    ),
    (r"setp\.(eq|lt|le|gt|ge)\.(f32)", lambda op, t: Pure((t, t), "pred", COMPARE[op])),
    (r"(ex2|rsqrt)\.approx\.f32", lambda op: Pure(("f32",), "f32", _wide(APPROX[op]))),
    (r"div\.full\.f32", lambda: Pure(("f32", "f32"), "f32", np.divide)),
    (r"cvta\.to\.global\.u64", lambda: Pure(("u64",), "u64", lambda x: x)),
    (r"cvt\.([us](?:8|16|32|64))\.([us](?:8|16|32|64))", lambda to, t: Pure((t,), to, lambda x: x)),
    (r"cvt\.rn\.(f32|f16)\.([us](?:8|16|32))", lambda to, t: Pure((t,), to, lambda x: x)),
    (r"cvt\.(f32)\.(bf16|f16)", lambda to, t: Pure((t,), to, lambda x: x)),
    (r"cvt\.rn\.(bf16|f16)\.f32", lambda to: Pure(("f32",), to, lambda x: x)),
    (r"cvt\.rn\.(bf16|f16)x2\.f32", lambda t: Pure(("f32", "f32"), "b32", _pack_halves(t))),
]

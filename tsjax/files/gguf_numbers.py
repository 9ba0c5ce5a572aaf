# SPDX-License-Identifier: Apache-2.0
"""The numbers of a GGUF file's tensors: read by rows, and widened or taken apart.

A kernel in C++ does that, or the gguf package where there is none or it does not know a type.
Knows types of numbers, and blocks of them. Does not know what is in a file's header.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.stored_blocks.api import BLOCK_TYPES, taken_apart, widened
from tsjax.base.errors import NotInstalled, NotSupported
from tsjax.base.model_config import WIDE
from tsjax.files.weight_files import StoredTensor, Version, read_pieces


@dataclasses.dataclass(frozen=True)
class Kind:
    """A type of tensors.

    Attributes:
      block, block_bytes: numbers that are stored together, and in how many bytes.
      dtype: of what `rows` gives; not one of DTYPES for types that no model has.
      format: the type's name where its blocks are taken apart as they are.
    """

    name: str
    block: int
    block_bytes: int
    dtype: str
    format: str = WIDE


# Types that NumPy has, by their numbers in files.
_PLAIN = {
    0: Kind("F32", 1, 4, "float32"), 1: Kind("F16", 1, 2, "float16"),
    28: Kind("F64", 1, 8, "float64"), 30: Kind("BF16", 1, 2, "bfloat16"),
}  # fmt: skip


@functools.cache
def kind_of_code(code: int) -> Kind:
    if code in _PLAIN:
        return _PLAIN[code]
    for name, block in BLOCK_TYPES.items():
        if block.code == code and native.on_host():
            return Kind(name, block.numbers, block.nbytes, "float32", name)
    gguf = _package()
    try:
        kind = gguf.GGMLQuantizationType(code)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        wanted = "the gguf package does not know it; a newer one may"
        raise NotSupported(f"tensors of type {code}: {wanted}") from None
    if re.fullmatch(r"I\d+", kind.name):
        return Kind(kind.name, 1, block_bytes, kind.name)
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        raise NotSupported(f"the gguf package does not dequantise {kind.name}") from None
    return Kind(kind.name, block, block_bytes, "float32")


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise NotInstalled(
            "GGUF files with numbers of this type, or without a C++ compiler, are read by the gguf "
            "package, which is not installed; pip install 'tsjax[gguf]'"
        ) from error
    return gguf


def stored_tensor(
    file: str, name: str, version: Version, place: int, shape: tuple[int, ...], row_bytes: int,
    kind: Kind,
) -> StoredTensor:  # fmt: skip
    read = functools.partial(_rows, file, name, version, place, shape, row_bytes, kind)
    apart = None
    if kind.format:
        apart = functools.partial(_apart, file, name, version, place, row_bytes, kind)
    return StoredTensor(name, file, shape, kind.dtype, read, kind.name, apart)


def _apart(
    file: str, name: str, version: Version, place: int, row_bytes: int, kind: Kind,
    start: int, stop: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """What the blocks of rows hold."""
    size = (stop - start) * row_bytes
    raw = read_pieces(file, name, version, [place + start * row_bytes], size)
    return taken_apart(raw.reshape(-1, row_bytes), kind.format)


def _rows(
    file: str, name: str, version: Version, place: int, shape: tuple[int, ...], row_bytes: int,
    kind: Kind, start: int, stop: int, columns: slice | None = None,
) -> np.ndarray:  # fmt: skip
    """A vector is a single row, of which a part is wanted."""
    if len(shape) == 1:
        return _rows(file, name, version, place, (1, *shape), row_bytes, kind, 0, 1)[0][start:stop]
    begin, count = place + start * row_bytes, stop - start
    raw = read_pieces(file, name, version, [begin], count * row_bytes).reshape(count, row_bytes)
    if kind in _PLAIN.values():
        found = raw.view(jnp.dtype(kind.dtype))
    else:
        found = _widened(raw, kind).reshape(count, -1)
    return found if columns is None else found[:, columns]


_AT_ONCE = 2**16  # numbers: the package's results in between stay in a processor's cache


def _widened(raw: np.ndarray, kind: Kind) -> np.ndarray:
    """The numbers of blocks, of which the package takes fewer at a time than is fast."""
    if kind.name in BLOCK_TYPES and native.on_host():
        return widened(raw, kind.name)
    gguf, blocks = _package(), raw.reshape(-1, kind.block_bytes)
    found, count = np.empty((len(blocks), kind.block), np.float32), _AT_ONCE // kind.block
    with np.errstate(all="ignore"):  # numbers that are not finite are told of later
        for begin in range(0, len(blocks), count):
            some = blocks[begin : begin + count].reshape(1, -1)
            wide = gguf.quants.dequantize(some, gguf.GGMLQuantizationType[kind.name])
            found[begin : begin + count] = wide.reshape(-1, kind.block)
    return found


def out_of_pairs(stored: StoredTensor, heads: int) -> StoredTensor:
    """Rows of q or k whose heads hold first the first number of each pair, then the second ones."""
    head_dim = stored.shape[0] // heads

    def wanted(found: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Of whole heads."""
        pairs = found.reshape(-1, head_dim // 2, 2, *found.shape[1:])
        apart = pairs.swapaxes(1, 2).reshape(found.shape)
        first = start // head_dim * head_dim
        return apart[start - first : stop - first]

    def heads_around(start: int, stop: int) -> tuple[int, int]:
        return start // head_dim * head_dim, -(-stop // head_dim) * head_dim

    def rows(start: int, stop: int, columns: slice | None = None) -> np.ndarray:
        return wanted(stored.rows(*heads_around(start, stop), columns), start, stop)

    def apart(start: int, stop: int) -> dict[str, np.ndarray]:
        assert stored.apart is not None
        found = stored.apart(*heads_around(start, stop))
        return {part: wanted(array, start, stop) for part, array in found.items()}

    return dataclasses.replace(stored, rows=rows, apart=stored.apart and apart)

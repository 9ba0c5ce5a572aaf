# SPDX-License-Identifier: Apache-2.0
"""A text that the model has read: later runs that begin with it go on from there, also in other
processes, from its file.

Knows tokens, their cache, and the file's format: safetensors, with the first rows of each layer in
the order of the text, whatever mesh held them, then the tokens, and at the end a checksum of the
header and of each array. Nothing is read twice, and nothing is mapped: a mapped file that is cut
off kills its process. Does not know how a run goes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import NarrowRows
from tsjax.base.checks import check, check_int, check_type
from tsjax.base.errors import BadValue, NoSuchFile
from tsjax.base.input_files import parsing, require_file
from tsjax.base.model_config import ModelConfig
from tsjax.base.telling import doing
from tsjax.files.checkpoint import Model, refuse_several, tsjax_version
from tsjax.files.fingerprint import check_held_alike, model_fingerprint
from tsjax.files.tensor_names import held_as
from tsjax.files.weight_files import Version, read_pieces, version_of
from tsjax.files.whole_files import replacing
from tsjax.model.cache import CACHE_AXES, KVCache, init_cache
from tsjax.model.sharding import everywhere, mesh_of, named_sharding, parts_of, placed

# Another one also where the same weights would have other keys or values in their caches.
PREFIX_FORMAT = 1
# How safetensors calls the types of a cache, of tokens and of checksums.
_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CODES |= {"int8": "I8", "int32": "I32", "uint32": "U32"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_WANTED = "what tsjax.read returns, or a file that its save wrote"
_LONGEST_HEADER = 2**26
_ABOUT, _METADATA, _TOKENS, _CHECKSUMS = "tsjax_prefix", "__metadata__", "tokens", "checksums"


@dataclasses.dataclass(frozen=True)
class Prefix:
    """What `tsjax.read` returns, and `generate(keep_prefix=True)` in its result.

    It stays valid however often it is used: runs copy it. It belongs to the weights that read it.

    Attributes:
      tokens: the text. The cache has the first `length` of them, all but the last or all.
      length: how many of them a run need not read again.
      is_approximate: whether a lazy prefill read a part of it. Its rows then are not those of a
        whole reading, and tokens that follow may be others, whatever reads them.
    """

    tokens: np.ndarray
    length: int
    cache: KVCache = dataclasses.field(repr=False)
    _model: Model = dataclasses.field(repr=False)
    is_approximate: bool = False

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in (*self.cache.k, *self.cache.v))

    def save(self, path: str | os.PathLike) -> None:
        """Writes or replaces a file that `prefix=` takes in its place, in any process with the same
        model. It holds the text and what the model computed of it. A file that cannot be written
        whole is not there."""
        refuse_several("Prefix.save")
        model = self._model
        about = {
            "format": PREFIX_FORMAT,
            "tsjax": tsjax_version(),
            "length": self.length,
            "approximate": self.is_approximate,
            "model": {
                "path": model.path,
                "dtype": model.cfg.dtype,
                "weights": held_as(model.cfg),
                "cache": model.cfg.cache,
                "fingerprint": model_fingerprint(model),
            },
        }
        header = _header(about, len(self.tokens), model.cfg)
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        sums = [zlib.crc32(encoded)]
        with (
            doing("saving the prefix", _end(header), "bytes") as work,
            replacing(path) as temporary,
            open(temporary, "wb") as file,
        ):
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for array in self._in_order():
                sums.append(zlib.crc32(array.data))
                file.write(array.data)
                work.done(file.tell() - 8 - len(encoded))
            file.write(np.asarray(sums, np.uint32).data)
            file.flush()
            os.fsync(file.fileno())

    def _in_order(self) -> Iterator[np.ndarray]:
        """The arrays of a file but for the checksums: of rows those that count, by token."""
        for _, rows in _named_rows(self.cache):
            by_token = np.moveaxis(np.asarray(rows), 0, 2)  # [K, S, P, H]
            by_token = by_token.reshape(len(by_token), -1, by_token.shape[-1])[:, : self.length]
            yield np.ascontiguousarray(by_token).reshape(-1).view(np.uint8)
        yield self.tokens.astype(np.int32).view(np.uint8)

    def shared_with(self, prompts: list[np.ndarray]) -> int:
        """How many of its tokens all prompts begin with. The last token of a prompt is left out, as
        no prefill reads it."""
        shared = self.length
        for prompt in prompts:
            most = min(shared, len(prompt) - 1)
            different = np.flatnonzero(self.tokens[:most] != prompt[:most])
            shared = int(different[0]) if len(different) else most
        return shared


def check_prefix(prefix: Any, model: Model) -> None:
    check_type(prefix, Prefix, "prefix", "what tsjax.read returns, or a file of it")
    read_by = prefix._model.path
    where = f"a prefix of {os.fspath(read_by)!r}" if read_by else "another model's"
    same = prefix._model is model or prefix._model.params is model.params
    check(same, "prefix", where, "one that tsjax.read made with this model: weights differ")
    held, wanted = prefix._model.cfg.cache, model.cfg.cache
    check(held == wanted, "prefix", f"one with cache={held!r}", f"one with cache={wanted!r}")


def check_prefix_is_read_alike(prefix: Prefix | None, length: int, argument: str) -> None:
    """A saved run reads its beginning anew when it goes on, as a whole."""
    if prefix is not None and length and prefix.is_approximate:
        raise BadValue(
            f"{argument} is not valid beside a prefix that a lazy prefill has read: the file has "
            "no cache, and a run that goes on reads the prefix as a whole"
        )


class _Opened(NamedTuple):
    """A file whose header is whole and of this format."""

    name: str
    header: dict[str, Any]
    about: Any  # what the header says of the text
    begin: int  # of the arrays
    version: Version
    sums: np.ndarray


def read_prefix(path: str | os.PathLike, model: Model, slots_for: Callable[[int], int]) -> Prefix:
    """What a file holds, on the model's devices, in as many slots as `slots_for` its rows says. A
    file of another model is refused, and so is one that is damaged anywhere."""
    file = open_prefix(path)
    said, read_by, length = f"prefix={file.name!r}", file.about["model"], file.about["length"]
    refuse_several(said)
    place, dtype = read_by["path"], read_by["dtype"]
    check_held_alike(said, place, dtype, read_by["weights"], read_by["cache"], model.cfg)
    if read_by["fingerprint"] != model_fingerprint(model):
        known = f", which was loaded from {read_by['path']!r}" if read_by["path"] else ""
        raise BadValue(f"{said} was read by another model: load that of the file{known}")
    whole = _end(file.header)
    with _parsing(file.name), doing("loading the prefix", whole, "bytes") as work:
        if file.header != _header(file.about, file.header[_TOKENS]["shape"][0], model.cfg):
            raise BadValue("its arrays are not those of its model")
        arrays = _checked(file, work)
        cache = _placed_rows(arrays, model, length, slots_for(length))
        return Prefix(next(arrays), length, cache, model, file.about["approximate"])


def open_prefix(path: str | os.PathLike) -> _Opened:
    """Reads the header, and refuses what this tsjax does not read."""
    name = os.fspath(path)
    if not os.path.exists(name):
        raise NoSuchFile(f"prefix={name!r} is not valid: no such file; {_WANTED}")
    with _parsing(name):
        require_file(name)
        with open(name, "rb") as file:
            encoded, version = _encoded_header(file), version_of(file)
        header, begin = json.loads(encoded), 8 + len(encoded)
        about = _about(header)
        size = begin + _end(header)
        if version.size != size:
            raise BadValue(f"it has {version.size:,} bytes where its header tells of {size:,}")
        count = 4 * (len(header) - 1)  # of the header, and of each array but themselves
        sums = read_pieces(name, _CHECKSUMS, version, [size - count], count).view(np.uint32)
        if zlib.crc32(encoded) != sums[0]:
            raise BadValue("its header is damaged: the checksum is another one")
        check_int(about["length"], "length", 0)
        return _Opened(name, header, about, begin, version, sums)


def _parsing(name: str) -> contextlib.AbstractContextManager[None]:
    return parsing(name, f" is not valid: {_WANTED}", argument="prefix")


def _encoded_header(file: BinaryIO) -> bytes:
    size = int.from_bytes(file.read(8), "little")
    encoded = file.read(size) if size <= _LONGEST_HEADER else b""
    if not encoded.startswith(b"{") or len(encoded) < size:
        raise BadValue("it does not begin with a whole header of safetensors")
    return encoded


def _about(header: Any) -> Any:
    """What a header says of the text; BadValue where it is none of this format."""
    metadata = header.get(_METADATA, {})
    if _ABOUT not in metadata:
        raise BadValue("it is another safetensors file, without a prefix")
    about = json.loads(metadata[_ABOUT])
    found = about["format"]
    if found != PREFIX_FORMAT:
        wrote = f"format {found!r} of tsjax {about['tsjax']}"
        newer = isinstance(found, int) and found > PREFIX_FORMAT
        remedy = "a newer tsjax reads it" if newer else "read the text anew"
        raise BadValue(f"{wrote}; this tsjax reads format {PREFIX_FORMAT}: {remedy}")
    return about


def _header(about: dict[str, Any], tokens: int, cfg: ModelConfig) -> dict[str, Any]:
    """Which arrays a file holds, in their order, and where."""
    rows = jax.eval_shape(lambda: init_cache(cfg, 1, about["length"]))
    shapes = {name: (x.shape[1:], str(x.dtype)) for name, x in _named_rows(rows)}
    shapes[_TOKENS] = (tokens,), "int32"
    shapes[_CHECKSUMS] = (len(shapes) + 1,), "uint32"
    header: dict[str, Any] = {_METADATA: {_ABOUT: json.dumps(about)}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        begin, end = end, end + math.prod(shape) * jnp.dtype(dtype).itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": [*shape], "data_offsets": [begin, end]}
    return header


def _end(header: dict[str, Any]) -> int:
    return header[_CHECKSUMS]["data_offsets"][1]


def _named_rows(cache: KVCache) -> Iterator[tuple[str, Any]]:
    """In the order of the leaves of k and v."""
    for name, layers in (("k", cache.k), ("v", cache.v)):
        for layer, rows in enumerate(layers):
            parts = rows._asdict() if isinstance(rows, NarrowRows) else {"rows": rows}
            yield from ((f"{name}.{layer}.{part}", leaf) for part, leaf in parts.items())


def _placed_rows(arrays: Iterator[np.ndarray], model: Model, length: int, slots: int) -> KVCache:
    """The next arrays as a cache of so many slots, dealt out over the model's mesh."""
    mesh = mesh_of(model.params)
    parts = parts_of(mesh)
    like = jax.eval_shape(lambda: init_cache(model.cfg, 1, slots))
    device = jax.tree.leaves(model.params)[0].sharding

    def rows_of(declared: Any) -> jax.Array:
        _, heads, _, width = declared.shape
        found = np.zeros((heads, -(-slots // parts) * parts, width), declared.dtype)
        found[:, :length] = next(arrays)
        by_part = np.moveaxis(found.reshape(heads, -1, parts, width), 2, 0)
        where = device if mesh is None else named_sharding(by_part.shape, CACHE_AXES, mesh)
        return placed(np.ascontiguousarray(by_part), where)

    k, v = jax.tree.map(rows_of, (like.k, like.v))
    where = device if mesh is None else everywhere(mesh)
    counted = placed(np.asarray([length], np.int32), where)
    return KVCache(k=k, v=v, length=counted, parts=parts)


def _checked(file: _Opened, work: Any) -> Iterator[np.ndarray]:
    """The arrays but for the checksums, one after another."""
    names = [name for name in file.header if name not in (_METADATA, _CHECKSUMS)]
    for name, expected in zip(names, file.sums[1:], strict=True):
        place = file.header[name]
        first, end = place["data_offsets"]
        found = read_pieces(file.name, name, file.version, [file.begin + first], end - first)
        if zlib.crc32(found.data) != expected:
            raise BadValue(f"its {name} is damaged: the checksum is another one")
        work.done(end)
        yield found.view(jnp.dtype(_DTYPES[place["dtype"]])).reshape(place["shape"])

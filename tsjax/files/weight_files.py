# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint: folders and hub ids, JSON, safetensors and pickled torch weights.

Knows formats and reads NumPy arrays in blocks of rows. Does not know what the tensors mean. torch,
safetensors and huggingface_hub are imported only by the functions that need them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tsjax.base.errors import BadValue, NoSuchFile, NotInstalled
from tsjax.base.input_files import kind_of, listed, parsing, read_json, require_file
from tsjax.files.whole_files import replacing

GGUF = ".gguf"  # how such a file ends; see gguf_files.py
_BLOCK_BYTES = 4 * 2**20  # what a thread reads at a time; a core's cache holds it until it moves on
_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, read when it is asked for."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str  # one of DTYPES, or whatever the file calls it
    rows: Callable[..., np.ndarray]  # reads rows start..stop, in any thread; of a slice of columns
    kind: str = ""  # how a GGUF file calls the type of its numbers
    # Of rows start..stop what `narrow_product.matrix.packed` takes: where they are stored so.
    apart: Callable[[int, int], dict[str, np.ndarray]] | None = None

    def __str__(self) -> str:
        return f"{self.name} in {self.file}"

    def blocks(self) -> Iterator[slice]:
        """The rows to read at a time, so that a big tensor is never in memory twice."""
        row_bytes = math.prod(self.shape[1:]) * jnp.dtype(self.dtype).itemsize
        step = max(1, _BLOCK_BYTES // row_bytes)
        for start in range(0, self.shape[0], step):
            yield slice(start, min(start + step, self.shape[0]))


Weights = Mapping[str, StoredTensor]  # the tensors of a checkpoint by name


def _list_safetensors(file: str) -> Weights:
    """What the safetensors package, which checks the file, finds in it."""
    import safetensors

    found = {}
    with (
        parsing(file, " is truncated or corrupt"),
        safetensors.safe_open(file, framework="np") as handle,
    ):
        begins, version = _first_bytes(file)
        for name in handle.keys():
            tensor = handle.get_slice(name)
            shape, code = tuple(tensor.get_shape()), str(tensor.get_dtype())
            dtype = _SAFETENSORS_DTYPES.get(code, code)
            place = file, name, version, begins[name], shape[1:], dtype
            rows = functools.partial(_safetensors_rows, *place)
            found[name] = StoredTensor(name, file, shape, dtype, rows)
    return found


class Version(NamedTuple):
    """Of a file: one that takes its place has another."""

    device: int
    number: int
    size: int
    changed: int


def version_of(stored: Any) -> Version:
    found = os.fstat(stored.fileno())
    return Version(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _first_bytes(file: str) -> tuple[dict[str, int], Version]:
    """Where each tensor begins in a file that safetensors has checked: after the header, whose
    length are the first 8 bytes."""
    with open(file, "rb") as stored:
        size = int.from_bytes(stored.read(8), "little")
        header = json.loads(stored.read(size))
        version = version_of(stored)
    header.pop("__metadata__", None)
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}, version


def _safetensors_rows(
    file: str, name: str, version: Version, begin: int, row: tuple[int, ...], dtype: str,
    start: int, stop: int, columns: slice | None = None,
) -> np.ndarray:  # fmt: skip
    size = jnp.dtype(dtype).itemsize
    row_bytes, begin = math.prod(row) * size, begin + start * math.prod(row) * size
    if columns is None or columns == slice(0, *row):
        pieces, width = [begin], (stop - start) * row_bytes
    else:
        pieces = range(begin + size * columns.start, begin + (stop - start) * row_bytes, row_bytes)
        row = (columns.stop - columns.start,)
        width = size * row[0]
    block = read_pieces(file, name, version, pieces, width)
    return block.view(jnp.dtype(dtype)).reshape(-1, *row)


def read_pieces(
    file: str, name: str, version: Version, pieces: Sequence[int], width: int
) -> np.ndarray:
    """The bytes from each of these places on, `width` each.

    Read into memory of our own: the safetensors package maps the file, whose pages then count as
    this process's memory, and keeps all other threads of Python waiting while it copies.
    """
    block = np.empty(len(pieces) * width, np.uint8)
    with parsing(file, f": {name} cannot be read"), open(file, "rb", buffering=0) as stored:
        if version_of(stored) != version:
            raise BadValue("the file was changed while it was read")
        for number, place in enumerate(pieces):
            stored.seek(place)
            missing = block.data[number * width : (number + 1) * width]
            while missing:
                count = stored.readinto(missing)
                if not count:
                    raise BadValue(f"the file ends {len(missing)} bytes too early")
                missing = missing[count:]
    return block


def _list_torch(file: str) -> Weights:
    """Only tensors and plain containers are unpickled (weights_only)."""
    try:
        import torch
    except ImportError as error:
        raise NotInstalled(
            f"{file!r} is a pickled torch file and torch is not installed; pip install torch, or "
            "convert the checkpoint to safetensors"
        ) from error
    with parsing(file, " is corrupt or holds more than tensors"):
        mapped = zipfile.is_zipfile(file)  # the format of torch < 1.6 cannot be mapped
        loaded = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
        other = [f"{name!s:.80}" for name, value in loaded.items() if not _is_tensor(name, value)]
    if other:
        raise BadValue(f"{file!r} holds more than tensors: {', '.join(listed(other))}")
    found = {}
    for name, value in loaded.items():
        dtype = str(value.dtype).removeprefix("torch.")
        rows = functools.partial(_torch_rows, file, name, value)
        found[name] = StoredTensor(name, file, tuple(value.shape), dtype, rows)
    return found


def _torch_rows(
    file: str, name: str, tensor: Any, start: int, stop: int, columns: slice | None = None
) -> np.ndarray:
    with parsing(file, f": {name} cannot be read"):
        return numpy_of_torch(
            tensor[start:stop] if columns is None else tensor[start:stop, columns]
        )


def numpy_of_torch(tensor: Any) -> np.ndarray:
    """From any device, with no gradient."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:  # torch cannot hand this type to NumPy
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def _is_tensor(name: Any, value: Any) -> bool:
    import torch

    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return isinstance(name, str) and plain and value.device.type == "cpu"


def open_weights(path: str, *, allow_pickle: bool = False) -> Weights:
    """The weight files of a checkpoint folder, or a single weight file.

    As in transformers, model.safetensors comes before an index, and safetensors before pickles.
    """
    if not os.path.isdir(path):
        return _open_files([path], allow_pickle)
    for single in ("model.safetensors", "pytorch_model.bin"):
        file = os.path.join(path, single)
        if os.path.exists(file):
            return _open_files([file], allow_pickle)
        if os.path.exists(index := f"{file}.index.json"):
            return _open_index(index, allow_pickle)
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    if len(names) == 1:
        return _open_files([os.path.join(path, names[0])], allow_pickle)
    raise NoSuchFile(
        f"{path!r} has no model.safetensors, no model.safetensors.index.json and no "
        f"pytorch_model.bin; it has {', '.join(listed(sorted(os.listdir(path)))) or 'nothing'}"
    )


def _open_files(files: Collection[str], allow_pickle: bool) -> Weights:
    for file in files:
        require_file(file)
    pickled = [file for file in files if not file.endswith(".safetensors")]
    if pickled and not allow_pickle:
        raise BadValue(
            f"{', '.join(listed(map(repr, pickled)))}: only pickled torch weights were found; pass "
            "allow_pickle=True (--allow-pickle) to read them with torch, or save the checkpoint as "
            "safetensors"
        )
    weights, problems = {}, []
    for file in files:
        try:
            found = _list_torch(file) if file in pickled else _list_safetensors(file)
        except ValueError as error:
            problems.append(str(error))
        else:
            problems += [f"{file!r} holds {x} again" for x in sorted(found.keys() & weights)]
            weights.update(found)
    raise_all(problems)
    return weights


def _open_index(index: str, allow_pickle: bool) -> Weights:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise BadValue(f"{index!r} has no weight_map")
    wrong = [f"{name}: {shard!r:.80}" for name, shard in places.items() if not _is_name(shard)]
    if wrong:
        trouble = "names what is no file, or files outside its folder"
        raise BadValue(f"{index!r} {trouble}: {', '.join(listed(wrong))}")
    files = [os.path.join(os.path.dirname(index), shard) for shard in sorted({*places.values()})]
    absent = [repr(file) for file in files if not os.path.exists(file)]
    if absent:
        raise NoSuchFile(f"{index!r} names missing files: {', '.join(listed(absent))}")
    weights = _open_files(files, allow_pickle)
    raise_all(
        f"{index!r} puts {name} in {shard}, which does not hold it"
        for name, shard in sorted(places.items())
        if name not in weights or os.path.basename(weights[name].file) != shard
    )
    return weights


def _is_name(shard: Any) -> bool:
    """Whether it can be the name of a file in the same folder."""
    return isinstance(shard, str) and bool(shard) and os.path.basename(shard) == shard


def raise_all(problems: Iterable[str], title: str = "the checkpoint cannot be read") -> None:
    """One error that lists the problems, so that a checkpoint is repaired in one go."""
    problems = listed(problems)
    if problems:
        raise BadValue("\n  ".join([f"{title}:", *problems]))


def write_safetensors(path: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes or replaces a file. It says torch's layout: transformers reads no other."""
    import safetensors.numpy

    try:
        with replacing(path) as temporary:
            safetensors.numpy.save_file(dict(tensors), temporary, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # a full disk, say
        raise OSError(f"{path!r} could not be written: {error}") from error


# The small English model of this package, and its folder in it.
EMBEDDED, EMBEDDED_FOLDER = "tsjax/small-english", "small_english"


def embedded_folder() -> str:
    return os.fspath(Path(__file__).resolve().parent.parent / EMBEDDED_FOLDER)


def find_folder(
    path: str | os.PathLike, *, allow_pickle: bool = False, argument: str = "path",
    hub: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """A folder or a GGUF file as it is, or the local snapshot of a hub id, downloaded if need be.

    EMBEDDED names the model that comes with this package; `hub` is for huggingface_hub.
    """
    name = os.fspath(path)
    if name == EMBEDDED:
        return embedded_folder()
    if os.path.isdir(name) or (os.path.exists(name) and name.endswith(GGUF)):
        return os.path.abspath(name)
    if os.path.exists(name):
        wanted = f"a checkpoint is a folder or a file ending in {GGUF}"
        raise BadValue(f"{argument}={name!r} is not valid: {wanted}, this is {kind_of(name)}")
    if name.endswith(GGUF):
        raise NoSuchFile(f"{argument}={name!r}: there is no such file")
    missing = f"{argument}={name!r}: there is no such folder, and"
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise NoSuchFile(f"{missing} it is not a hub id (organisation/name)")
    import huggingface_hub

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
    try:
        return huggingface_hub.snapshot_download(
            name,
            allow_patterns=patterns + ["*.bin", "medusa_lm_head.pt"] * allow_pickle,
            ignore_patterns=["*/*", "consolidated*"],  # second copies of the weights
            **(hub or {}),
        )
    except (OSError, ValueError) as error:  # huggingface_hub's errors derive from these
        first = [*str(error).strip().splitlines(), type(error).__name__][0]
        message = f"{missing} as a hub id it could not be downloaded: {first}"
        raise NoSuchFile(message) from error

# SPDX-License-Identifier: Apache-2.0
"""HuggingFace checkpoints: which parameters one has, and how all are read.

Does not know tensors' names (tensor_names.py), settings (config_files.py), file formats
(weight_files.py) or devices: it hands out NumPy arrays, one at a time.
"""

from __future__ import annotations

import collections
import functools
import math
import os
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import NarrowMatrix
from pallas_kernels.narrow_product.matrix import FORMATS, empty_parts, packed, rounded
from tsjax.base.checks import check
from tsjax.base.errors import NoSuchFile
from tsjax.base.input_files import listed, parsing, read_json
from tsjax.base.model_config import CHAINED, DTYPES, WIDE, ModelConfig
from tsjax.files.config_files import model_config
from tsjax.files.gguf_files import is_gguf, open_gguf
from tsjax.files.head_files import find_heads
from tsjax.files.tensor_names import Entry, Wanted, to_read
from tsjax.files.weight_files import StoredTensor, Weights, open_weights, raise_all

TYPE_OF_GGUF = "bfloat16"  # quantised numbers have fewer bits
_THREADS = min(8, os.cpu_count() or 1)  # that read; each has a block in memory
_AHEAD = 3  # arrays that they fill before they are asked for

# The frequencies of rotary embeddings, saved as buffers by old versions of transformers.
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq")


def open_checkpoint(
    folder: str, *, dtype: str | None = None, allow_pickle: bool = False
) -> tuple[ModelConfig, Weights]:
    """The settings and the weight files of a HuggingFace folder or a GGUF file; draft heads in it
    are counted."""
    if is_gguf(folder):
        raw, weights = open_gguf(folder)
        with parsing(folder, " holds a model that tsjax cannot read"):
            cfg = model_config(raw, dtype=dtype or TYPE_OF_GGUF)
            check_counts(cfg, len(weights), ("num_hidden_layers", "medusa_heads"))
        return cfg, weights
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path):
        names = sorted(os.listdir(folder))
        advice = "; of a GGUF file give the path of one" if any(map(is_gguf, names)) else ""
        if "adapter_config.json" in names:
            advice = "; it is an adapter: give the path of its model, and adapter= this folder"
        raise NoSuchFile(
            f"{folder!r} has neither a config.json (HuggingFace) nor a tsjax.json (tsjax); it has "
            f"{', '.join(listed(names)) or 'nothing'}{advice}"
        )
    raw = read_json(path)
    if dtype is None and (raw.get("dtype") or raw.get("torch_dtype")) is None:
        # As transformers: a file that does not say is read in the type of its tensors.
        stored = [t.dtype for t in open_weights(folder, allow_pickle=allow_pickle).values()]
        dtype = max(set(stored), key=stored.count, default=None)
    with parsing(path):
        cfg = model_config(raw, dtype=dtype)
    weights = open_weights(folder, allow_pickle=allow_pickle)
    with parsing(path):  # before anything is declared
        check_counts(cfg, len(weights), ("num_hidden_layers", "medusa_heads"))
        found = find_heads(weights, beside_model=True)
    if found is None:
        return cfg, weights
    # Of TokenSwift's the config knows the number; published configs of Medusa's name wrong ones.
    heads = max(cfg.num_draft_heads, found.count) if found.kind == CHAINED else found.count
    same = (heads, found.kind) == (cfg.num_draft_heads, cfg.head_kind)
    return cfg if same else cfg.with_heads(heads, found.kind), weights


def with_heads_of(cfg: ModelConfig, weights: Weights) -> ModelConfig:
    """The same model with the draft heads among the tensors, counted there."""
    found = find_heads(weights)
    return cfg.with_heads(found.count, found.kind) if found else cfg.with_heads(0)


def check_counts(cfg: ModelConfig, stored: int, names: tuple[str, str]) -> None:
    """Refuses more layers or heads than there are tensors; `names` are those of the counts."""
    for name, count in zip(names, (cfg.num_layers, cfg.num_draft_heads), strict=True):
        check(count <= stored, name, count, f"there are {stored} tensors in all")


def read_model(
    cfg: ModelConfig, weights: Weights, *, apart: bool = False, part: Wanted | None = None
) -> Iterator[tuple[Entry, Any]]:
    """Every parameter of `cfg`, one at a time; names and shapes are checked before the first.

    A narrow matrix comes as a NarrowMatrix of NumPy's arrays.

    With `apart` every tensor by itself: what only writes them again needs no memory to join them.
    `part` says which part of each array is read; the rest is then unspecified.
    """
    found = {name: tensor for name, tensor in weights.items() if not _HARMLESS.fullmatch(name)}
    if cfg.tie_embeddings:
        found.pop("lm_head.weight", None)  # transformers does not read it either
    heads = find_heads(weights, beside_model=True)
    if heads and (heads.kind != CHAINED or not cfg.num_draft_heads):
        found = {name: found[name] for name in found if name not in heads.names}
        found |= heads.tensors if cfg.num_draft_heads else {}
    wanted = [entry for entry in to_read(cfg) if not entry.path.startswith("drafter.")]
    if apart:
        wanted = [tensor for entry in wanted for tensor in entry.apart()]
    return _read(wanted, weights, found, part)


def read_heads(
    cfg: ModelConfig, weights: Weights, *, part: Wanted | None = None
) -> Iterator[tuple[Entry, Any]]:
    """The `cfg.num_draft_heads` heads in an adapter or a whole checkpoint with such heads."""
    heads = find_heads(weights)
    found = heads.tensors if heads else {}
    return _read([e for e in to_read(cfg) if e.path.startswith("heads.")], weights, found, part)


def read_drafter(
    cfg: ModelConfig, tensors: Weights, *, part: Wanted | None = None
) -> Iterator[tuple[Entry, Any]]:
    """What a file holds of the drafter that `cfg` names: its words it does not hold as they are,
    and their matrix only where it is not the model's."""
    absent = {"drafter.words"}
    if "drafter.lm_head.weight" not in tensors:
        absent.add("drafter.unembed")
    wanted = [e for e in to_read(cfg) if e.path.startswith("drafter.") and e.path not in absent]
    return _read(wanted, tensors, tensors, part)


def _read(
    wanted: list[Entry], weights: Weights, found: Weights, part: Wanted | None
) -> Iterator[tuple[Entry, Any]]:
    """Reads `wanted`; `found` has the tensors under the table's keys."""
    files = ", ".join(listed(sorted({tensor.file for tensor in weights.values()})))
    tensors = {tensor.key: tensor for entry in wanted for tensor in entry.tensors}
    problems = [f"missing in {files}: {key}" for key in tensors if key not in found]
    problems += [f"not part of this model: {found[key]}" for key in found if key not in tensors]
    for key, tensor in tensors.items():
        stored = found.get(key)
        if stored and stored.shape != tensor.shape:
            shapes = f"shape {list(stored.shape)}; the config asks for {list(tensor.shape)}"
            problems.append(f"{stored} has {shapes}")
        if stored and stored.dtype not in DTYPES:
            types = f"type {stored.dtype}, which is not one of {', '.join(DTYPES)}"
            problems.append(f"{stored} has {types}")
    raise_all(problems)
    return _read_arrays(wanted, found, part)


class _Begun(NamedTuple):
    """Arrays that threads fill, of a wide one by "", and for each of the tensors the blocks: are
    they finite?"""

    entry: Entry
    arrays: dict[str, np.ndarray]
    blocks: list[tuple[StoredTensor, list[Future[bool]]]]

    def finished(self) -> np.ndarray | NarrowMatrix:
        spec, name = self.entry.spec, self.entry.format
        if name == WIDE:
            return self.arrays[""]
        outputs = len(spec.shape) - spec.inputs
        return packed(FORMATS[name], spec.shape[:outputs], spec.shape[outputs:], **self.arrays)


def _read_arrays(
    wanted: list[Entry], found: Weights, part: Wanted | None
) -> Iterator[tuple[Entry, Any]]:
    """Reads by threads, which are never more than _AHEAD arrays further than the caller.

    Arrays come in the order of `wanted`, and so do errors: what comes after one is not asked for.
    """
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tsjax-read")
    wrong, begun = [], collections.deque[_Begun]()
    try:
        begun += [_begin(pool, one, found, part) for one in wanted[:_AHEAD]]
        for number in range(1, len(wanted) + 1):
            one = begun.popleft()
            for stored, blocks in one.blocks:
                if not all([block.result() for block in blocks]):
                    wrong.append(str(stored))
            further = wanted[number - 1 + _AHEAD :][:1]
            begun += [_begin(pool, entry, found, part) for entry in further]
            if wrong and number == len(wanted):  # here: the caller may not ask for another one
                have = f"{'has' if len(wrong) == 1 else 'have'} NaN or infinite values"
                names = ", ".join(listed(wrong))
                warnings.warn(f"{names} {have} as {one.entry.spec.dtype}", stacklevel=2)
            yield one.entry, one.finished()
    finally:  # also after an error, an interrupt, or when the caller has seen enough
        pool.shutdown(cancel_futures=True)


def _begin(pool: ThreadPoolExecutor, entry: Entry, found: Weights, part: Wanted | None) -> _Begun:
    spec, blocks, shape = entry.spec, [], entry.spec.shape
    if entry.format == WIDE:
        arrays = {"": _aligned_empty(shape, jnp.dtype(spec.dtype))}
    else:
        (first, *_), part = entry.tensors, None
        outputs = math.prod(shape) // first.shape[1]
        arrays = empty_parts(FORMATS[entry.format], outputs, first.shape[1])
    for tensor in entry.tensors:
        stored, rows = found[tensor.key], tensor.rows(shape)
        places, columns = [*stored.blocks()], None
        if part is not None:
            wanted, columns = tensor.within(shape, part(spec))
            places = [*_narrowed(places, wanted)]
        if entry.format == WIDE:
            matrix = arrays[""].reshape(-1, *tensor.shape[1:])  # a view
            read = functools.partial(_read_block, stored, columns=columns, matrix=matrix)
        else:
            read = functools.partial(_read_apart, stored, name=entry.format, arrays=arrays)
        jobs = [pool.submit(read, at=at, rows=rows[at]) for at in places]
        blocks.append((stored, jobs))
    return _Begun(entry, arrays, blocks)


def _read_apart(
    stored: StoredTensor, *, at: slice, name: str, arrays: dict[str, np.ndarray], rows: np.ndarray
) -> bool:
    """Fills these rows with what a format holds of them, rounded if they are not stored so."""
    if stored.apart is not None and stored.kind == name:
        found = stored.apart(at.start, at.stop)
    else:
        wide = stored.rows(at.start, at.stop).astype(np.float32, copy=False)
        found = rounded(wide, name)
    for part, array in found.items():
        arrays[part][rows] = array
    return all(_all_finite(array) for array in found.values() if array.dtype.kind == "f")


def _narrowed(blocks: list[slice], wanted: np.ndarray) -> Iterator[slice]:
    """Each block from its first wanted row to its last one."""
    for block in blocks:
        rows = np.flatnonzero(wanted[block])
        if len(rows):
            yield slice(block.start + int(rows[0]), block.start + int(rows[-1]) + 1)


def _read_block(
    stored: StoredTensor, *, at: slice, columns: slice | None, matrix: np.ndarray, rows: np.ndarray
) -> bool:
    """Fills these rows and columns of the matrix; returns whether all of them are finite."""
    block = stored.rows(at.start, at.stop, columns)
    with np.errstate(over="ignore", invalid="ignore"):
        block = block.astype(matrix.dtype, copy=False)
    if columns is None:
        matrix[rows] = block
    else:
        matrix[rows, columns] = block
    return _all_finite(block)


def _all_finite(block: np.ndarray) -> bool:
    if block.dtype != jnp.bfloat16:
        return bool(np.isfinite(block).all())
    # By the bits without the sign: NumPy asks one by one where a type is not its own.
    return bool((block.view(np.uint16) & 0x7FFF).max() < 0x7F80)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """As np.empty, at an address that lets a CPU device take the array over without a copy."""
    size, alignment = math.prod(shape) * dtype.itemsize, 64
    memory = np.empty(size + alignment, np.uint8)
    offset = -memory.ctypes.data % alignment
    return memory[offset : offset + size].view(dtype).reshape(shape)

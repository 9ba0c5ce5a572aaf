# SPDX-License-Identifier: Apache-2.0
"""The conversions as functions. Every one writes a new folder, whole or not at all.

Knows which files a converted folder has. Does not know the names and layouts of the tensors: they
are one table in tsjax/files/tensor_names.py, which is read in both directions.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from tsjax.config import CHAINED, ModelConfig, check
from tsjax.errors import BadValue
from tsjax.files import (
    adapters,
    checkpoint,
    checkpoint_folders,
    huggingface,
    tensor_names,
    weight_files,
)
from tsjax.files.config_files import config_to_hf, read_stop_ids
from tsjax.files.gguf_files import is_gguf, read_headers
from tsjax.files.gguf_tokenizer import special_ids_of
from tsjax.files.head_files import MEDUSA, MEDUSA_FILE, VLLM_FILE, head_config, named_in
from tsjax.files.tensor_names import Entry, Tensor
from tsjax.input_files import read_json

MERGE_HEADS, DROP_HEADS = "merge", "drop"
HEADS_FILE = "heads.safetensors"
MAX_SHARD_SIZE = "2GB"

OnTensor = Callable[[str, int], object]


@dataclasses.dataclass(frozen=True)
class Written:
    """What a conversion wrote."""

    path: str
    num_params: int
    num_bytes: int  # of all files in the folder


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint of either kind, read one array at a time in the order of the declaration.

    Of a HuggingFace checkpoint each tensor is an array.
    """

    cfg: ModelConfig
    stop_ids: tuple[int, ...]
    folder: str
    arrays: Iterator[tuple[Entry, np.ndarray]]


def open_source(
    path: str | os.PathLike,
    *,
    dtype: str | None = None,
    heads: str | os.PathLike | None = None,
    allow_pickle: bool = False,
) -> Source:
    """As tsjax.load, but HuggingFace tensors are read when they are asked for and not kept."""
    checkpoint.refuse_several("converting")
    if dtype is not None:
        checkpoint.check_dtype(dtype)
    folder = weight_files.find_folder(path, allow_pickle=allow_pickle)
    if checkpoint.is_tsjax(folder):
        model = checkpoint.load(folder, dtype=dtype, heads=heads, allow_pickle=allow_pickle)
        arrays = ((entry, np.asarray(leaf)) for entry, leaf in checkpoint.named_arrays(model))
        return Source(model.cfg, model.stop_ids, folder, arrays)

    cfg, weights = huggingface.open_checkpoint(folder, dtype=dtype, allow_pickle=allow_pickle)
    stop_ids = read_stop_ids(folder)
    if heads is None:
        arrays = huggingface.read_model(cfg, weights, apart=True)
        return Source(cfg, stop_ids, folder, arrays)
    adapter = adapters.open_heads(heads, allow_pickle=allow_pickle)
    own = huggingface.read_model(cfg.with_heads(0), weights, apart=True)
    cfg = huggingface.with_heads_of(cfg, adapter)
    arrays = itertools.chain(own, huggingface.read_heads(cfg, adapter))
    return Source(cfg, stop_ids, folder, arrays)


def tensors_of(
    arrays: Iterable[tuple[Entry, np.ndarray]], on_tensor: OnTensor | None
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """What the arrays are in a HuggingFace checkpoint."""
    for entry, array in arrays:
        if on_tensor is not None:
            on_tensor(entry.path, array.nbytes)
        for tensor in entry.tensors:
            yield tensor, tensor.of(array)


def to_tsjax(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    dtype: str | None = None,
    weights: str | None = None,
    heads: str | os.PathLike | None = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    on_tensor: OnTensor | None = None,
) -> Written:
    """HuggingFace folder, hub id, GGUF file or tsjax checkpoint -> tsjax checkpoint.

    Args:
      src, dst: where from and where to.
      dtype: of the arrays written; None keeps the checkpoint's own.
      weights: how the matrices are held, as for tsjax.load.
      heads: an adapter with draft heads to attach.
      allow_pickle: reads pickled torch weights where there are no safetensors.
      overwrite: replaces a checkpoint at dst.
      on_tensor: called with the path and the bytes of every array read.
    """
    checkpoint.refuse_several("converting")
    checkpoint_folders.check_new_folder(dst, "dst", overwrite=overwrite)
    model = checkpoint.load(
        src, dtype=dtype, weights=weights, heads=heads, allow_pickle=allow_pickle,
        on_tensor=on_tensor,
    )  # fmt: skip
    checkpoint.save(model, dst, overwrite=overwrite)
    return _written(dst, model.num_params)


def to_hf(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    dtype: str | None = None,
    heads: str | os.PathLike | None = None,
    draft_heads: str | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    allow_pickle: bool = False,
    overwrite: bool = False,
    on_tensor: OnTensor | None = None,
) -> Written:
    """tsjax checkpoint, HuggingFace folder, hub id or GGUF file -> HuggingFace folder with
    safetensors.

    Args:
      draft_heads: what to do with the model's draft heads, if it has any. MERGE_HEADS writes them
        beside the model, TokenSwift's as model.medusa_layers.*, where its own code looks for them;
        DROP_HEADS leaves them out.
      max_shard_size: bytes, or a size such as "2GB", of one weight file.
      The others are as for to_tsjax.
    """
    shard_bytes = parse_size(max_shard_size)
    checkpoint_folders.check_new_folder(dst, "dst", overwrite=overwrite)
    source = open_source(src, dtype=dtype, heads=heads, allow_pickle=allow_pickle)
    cfg = source.cfg
    if cfg.is_narrow:
        theirs = "and a HuggingFace folder of the wide ones would not be the same model"
        raise BadValue(f"src={os.fspath(src)!r} holds narrow weights, {theirs}")
    if cfg.num_draft_heads:
        check(
            draft_heads in (MERGE_HEADS, DROP_HEADS),
            "draft_heads",
            draft_heads,
            f"the model has {cfg.num_draft_heads} draft heads; {MERGE_HEADS!r} (--merge-heads) or "
            f"{DROP_HEADS!r} (--drop-heads), or export them alone (--heads-only)",
        )
        if draft_heads == DROP_HEADS:
            cfg = cfg.with_heads(0)
    config = {**config_to_hf(cfg), **_special_ids(source)}
    cfg = dataclasses.replace(cfg, drafter=None)  # it has a folder of its own
    kept = {entry.path for entry in tensor_names.entries(cfg)}
    arrays = ((entry, array) for entry, array in source.arrays if entry.path in kept)
    with checkpoint_folders.new_folder(dst, overwrite=overwrite) as folder:
        named = [tensor for entry in tensor_names.entries(cfg) for tensor in entry.tensors]
        tensors, item = tensors_of(arrays, on_tensor), jnp.dtype(cfg.dtype).itemsize
        num_params = _write_shards(folder, named, tensors, shard_bytes, item)
        for _ in source.arrays:  # those left out; with the last one comes the warning about NaN
            pass
        _write_json(os.path.join(folder, "config.json"), config)
        checkpoint_folders.copy_companions(source.folder, folder)
        generation = os.path.join(folder, "generation_config.json")
        if not os.path.exists(generation):
            _write_json(generation, _special_ids(source))
    return _written(dst, num_params)


def export_heads(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    dtype: str | None = None,
    heads: str | os.PathLike | None = None,
    layout: str = MEDUSA,
    allow_pickle: bool = False,
    overwrite: bool = False,
    on_tensor: OnTensor | None = None,
) -> Written:
    """The draft heads of a checkpoint alone, as an adapter that `heads=` understands.

    Args:
      layout: of parallel heads: "medusa", as Medusa's own code names them, or "vllm". TokenSwift's
        have one.
      The others are as for to_tsjax.
    """
    checkpoint_folders.check_new_folder(dst, "dst", overwrite=overwrite)
    source = open_source(src, dtype=dtype, heads=heads, allow_pickle=allow_pickle)
    cfg = source.cfg
    if not cfg.num_draft_heads:
        raise BadValue(f"src={os.fspath(src)!r} has no draft heads to export")
    arrays = (pair for pair in source.arrays if pair[0].path.startswith("heads."))
    found = tensors_of(arrays, on_tensor)
    tensors = {tensor.key: np.ascontiguousarray(array) for tensor, array in found}
    tensors = named_in(layout, tensors)
    file = HEADS_FILE
    if cfg.head_kind != CHAINED:
        file = MEDUSA_FILE if layout == MEDUSA else VLLM_FILE
    with checkpoint_folders.new_folder(dst, overwrite=overwrite) as folder:
        weight_files.write_safetensors(os.path.join(folder, file), tensors)
        if cfg.head_kind != CHAINED:  # their code reads it
            _write_json(os.path.join(folder, "config.json"), head_config(layout, cfg))
    return _written(dst, sum(array.size for array in tensors.values()))


def verify(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    heads: str | os.PathLike | None = None,
    allow_pickle: bool = False,
    on_tensor: OnTensor | None = None,
) -> int:
    """Reads both again and compares every tensor of dst, bit by bit, with src in dst's type.

    Returns:
      The number of tensors compared; a difference is a ValueError that lists all of them.
    """
    adapter = _adapter_in(dst)
    if adapter is not None:
        weights = weight_files.open_weights(adapter)
        dtype = next(iter(weights.values())).dtype
        expected = open_source(src, dtype=dtype, heads=heads, allow_pickle=allow_pickle)
        written = huggingface.read_heads(expected.cfg, weights)
    else:
        opened = open_source(dst)
        written = opened.arrays
        expected = open_source(src, dtype=opened.cfg.dtype, heads=heads, allow_pickle=allow_pickle)
        if opened.cfg.is_narrow:
            return _verify_arrays(src, dst, heads, allow_pickle)
    different, count = [], 0
    wanted = tensors_of(expected.arrays, None)
    for tensor, array in tensors_of(written, on_tensor):
        other = next((a for t, a in wanted if t.key == tensor.key), None)
        if other is None or not _same_bits(array, other):
            different.append(tensor.key)
        count += 1
    if different:
        raise BadValue(f"{os.fspath(dst)!r} differs from its source in {', '.join(different)}")
    return count


def _verify_arrays(
    src: str | os.PathLike, dst: str | os.PathLike, heads: Any, allow_pickle: bool
) -> int:
    """As `verify`, of narrow weights, which HuggingFace's tensors do not have."""
    written = checkpoint.load(dst)
    how = {"dtype": written.cfg.dtype, "weights": tensor_names.held_as(written.cfg)}
    again = checkpoint.load(src, heads=heads, allow_pickle=allow_pickle, **how)
    pairs = [checkpoint.named_arrays(model) for model in (written, again)]
    same = [
        (entry.path, _same_bits(np.asarray(one), np.asarray(other)))
        for (entry, one), (_, other) in zip(*pairs, strict=True)
    ]
    different = [path for path, is_same in same if not is_same]
    if different or written.cfg != again.cfg:
        names = ", ".join(different) or "its settings"
        raise BadValue(f"{os.fspath(dst)!r} differs from its source in {names}")
    return len(same)


def _adapter_in(folder: str | os.PathLike) -> str | None:
    """The file that `export_heads` has written there."""
    files = [os.path.join(folder, name) for name in (HEADS_FILE, MEDUSA_FILE)]
    config = os.path.join(folder, "config.json")
    if os.path.exists(config) and read_json(config).get("model_type") == "medusa":
        files.append(os.path.join(folder, VLLM_FILE))
    return next(filter(os.path.exists, files), None)


def parse_size(size: int | str) -> int:
    """ "500MB", "2GB", "1.5GiB" or a number of bytes -> bytes."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(size).strip(), re.IGNORECASE)
    unit = match[2].upper() if match else None
    number = float(match[1]) * units[unit] if match and unit in units else 0.0
    check(number >= 1, "max_shard_size", size, 'bytes, or a size such as "500MB" or "2GB"')
    return int(number)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    bits = f"u{a.dtype.itemsize}"
    return same_kind and bool(np.array_equal(a.view(bits), b.view(bits)))


def _special_ids(source: Source) -> dict[str, Any]:
    """The special token ids; written even when unknown, as transformers has defaults of its own."""
    known: dict[str, Any] = {}
    if is_gguf(source.folder):
        known |= special_ids_of(read_headers(source.folder)[0].fields)
    for name in ("config.json", "generation_config.json"):
        path = os.path.join(source.folder, name)
        if os.path.exists(path):
            known.update(read_json(path))
    stop = source.stop_ids
    return {
        "bos_token_id": known.get("bos_token_id"),
        "eos_token_id": stop[0] if len(stop) == 1 else list(stop) or None,
        "pad_token_id": known.get("pad_token_id"),
    }


def _write_shards(
    folder: str,
    named: list[Tensor],
    tensors: Iterator[tuple[Tensor, np.ndarray]],
    shard_bytes: int,
    item_bytes: int,
) -> int:
    """Writes model.safetensors, or shards with an index; returns the number of parameters."""
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in named:
        size = math.prod(tensor.shape) * item_bytes
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size

    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        some = itertools.islice(tensors, len(shard))
        content = {tensor.key: np.ascontiguousarray(array) for tensor, array in some}
        name = name if len(shards) > 1 else "model.safetensors"
        weight_files.write_safetensors(os.path.join(folder, name), content)
        weight_map.update(dict.fromkeys(content, name))
    num_params = sum(math.prod(tensor.shape) for tensor in named)
    if len(shards) > 1:
        total = num_params * item_bytes
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(os.path.join(folder, "model.safetensors.index.json"), index)
    return num_params


def _write_json(path: str, content: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def _written(path: str | os.PathLike, num_params: int) -> Written:
    files = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return Written(os.fspath(path), num_params, sum(map(os.path.getsize, files)))

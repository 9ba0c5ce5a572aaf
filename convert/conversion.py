# SPDX-License-Identifier: Apache-2.0
"""The conversions as functions. Every one writes a new folder, whole or not at all.

Knows which files a converted folder has. Does not know the names and layouts of the tensors: they
are one table in tsjax/files/tensor_names.py, which is read in both directions.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Any

import numpy as np

from tsjax.base.errors import BadValue
from tsjax.base.input_files import read_json
from tsjax.base.model_config import CHAINED
from tsjax.files import (
    adapters,
    checkpoint,
    checkpoint_folders,
    huggingface,
    tensor_names,
    weight_files,
)
from tsjax.files.config_files import read_stop_ids
from tsjax.files.head_files import MEDUSA, MEDUSA_FILE, VLLM_FILE, head_config, named_in
from tsjax.files.hf_folders import (
    MAX_SHARD_SIZE,
    OnTensor,
    Source,
    parse_size,
    tensors_of,
    write_hf_folder,
    write_json,
)

HEADS_FILE = "heads.safetensors"


@dataclasses.dataclass(frozen=True)
class Written:
    """What a conversion wrote."""

    path: str
    num_params: int
    num_bytes: int  # of all files in the folder


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
    parse_size(max_shard_size)  # refused before anything is read
    checkpoint_folders.check_new_folder(dst, "dst", overwrite=overwrite)
    source = open_source(src, dtype=dtype, heads=heads, allow_pickle=allow_pickle)
    num_params = write_hf_folder(
        source, dst, f"src={os.fspath(src)!r}", draft_heads=draft_heads,
        max_shard_size=max_shard_size, overwrite=overwrite, on_tensor=on_tensor,
    )  # fmt: skip
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
            write_json(os.path.join(folder, "config.json"), head_config(layout, cfg))
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


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    bits = f"u{a.dtype.itemsize}"
    return same_kind and bool(np.array_equal(a.view(bits), b.view(bits)))


def _written(path: str | os.PathLike, num_params: int) -> Written:
    files = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return Written(os.fspath(path), num_params, sum(map(os.path.getsize, files)))

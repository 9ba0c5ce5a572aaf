# SPDX-License-Identifier: Apache-2.0
"""HuggingFace folders, written: weights in shards, config.json and what goes along.

Knows which files such a folder has. Does not know names and layouts of tensors: they are one table
in tensor_names.py, which is read in both directions.
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

from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.base.input_files import read_json
from tsjax.base.model_config import ModelConfig
from tsjax.files import tensor_names, weight_files
from tsjax.files.checkpoint_folders import copy_companions, new_folder
from tsjax.files.config_files import config_to_hf
from tsjax.files.gguf_files import is_gguf, read_headers
from tsjax.files.gguf_tokenizer import special_ids_of
from tsjax.files.tensor_names import Entry, Tensor

MERGE_HEADS, DROP_HEADS = "merge", "drop"
MAX_SHARD_SIZE = "2GB"

OnTensor = Callable[[str, int], object]


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint of either kind, read one array at a time in the order of the declaration.

    Of a HuggingFace checkpoint each tensor is an array.
    """

    cfg: ModelConfig
    stop_ids: tuple[int, ...]
    folder: str | None  # where its tokenizer lies
    arrays: Iterator[tuple[Entry, np.ndarray]]


def tensors_of(
    arrays: Iterable[tuple[Entry, np.ndarray]], on_tensor: OnTensor | None
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """What the arrays are in a HuggingFace checkpoint."""
    for entry, array in arrays:
        if on_tensor is not None:
            on_tensor(entry.path, array.nbytes)
        for tensor in entry.tensors:
            yield tensor, tensor.of(array)


def write_hf_folder(
    source: Source, dst: str | os.PathLike, name: str, *, draft_heads: str | None,
    max_shard_size: int | str, overwrite: bool, on_tensor: OnTensor | None,
) -> int:  # fmt: skip
    """Writes the folder, whole or not at all; returns the number of parameters. `name` is the
    source's in errors."""
    shard_bytes, cfg = parse_size(max_shard_size), source.cfg
    if cfg.is_narrow:
        theirs = "and a HuggingFace folder of the wide ones would not be the same model"
        raise BadValue(f"{name} holds narrow weights, {theirs}")
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
    with new_folder(dst, overwrite=overwrite) as folder:
        named = [tensor for entry in tensor_names.entries(cfg) for tensor in entry.tensors]
        tensors, item = tensors_of(arrays, on_tensor), jnp.dtype(cfg.dtype).itemsize
        num_params = _write_shards(folder, named, tensors, shard_bytes, item)
        for _ in source.arrays:  # those left out; with the last one comes the warning about NaN
            pass
        write_json(os.path.join(folder, "config.json"), config)
        copy_companions(source.folder, folder)
        generation = os.path.join(folder, "generation_config.json")
        if not os.path.exists(generation):
            write_json(generation, _special_ids(source))
    return num_params


def parse_size(size: int | str) -> int:
    """ "500MB", "2GB", "1.5GiB" or a number of bytes -> bytes."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(size).strip(), re.IGNORECASE)
    unit = match[2].upper() if match else None
    number = float(match[1]) * units[unit] if match and unit in units else 0.0
    check(number >= 1, "max_shard_size", size, 'bytes, or a size such as "500MB" or "2GB"')
    return int(number)


def _special_ids(source: Source) -> dict[str, Any]:
    """The special token ids; written even when unknown, as transformers has defaults of its own."""
    known: dict[str, Any] = {}
    folder = source.folder or ""
    if is_gguf(folder):
        known |= special_ids_of(read_headers(folder)[0].fields)
    for name in ("config.json", "generation_config.json"):
        path = os.path.join(folder, name)
        if folder and os.path.exists(path):
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
        write_json(os.path.join(folder, "model.safetensors.index.json"), index)
    return num_params


def write_json(path: str, content: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")

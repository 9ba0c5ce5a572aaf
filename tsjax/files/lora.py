# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters as PEFT saves them, added to the matrices they belong to while these are read.

Knows PEFT's names and settings. What would make another model than the sum of the two is refused by
name. A block of rows is added up at a time, in float32.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tsjax.base.checks import check, check_float
from tsjax.base.errors import BadValue, NoSuchFile, NotSupported
from tsjax.base.input_files import parsing, read_json
from tsjax.base.model_config import ModelConfig
from tsjax.files.tensor_names import Entry, entries
from tsjax.files.weight_files import StoredTensor, Weights, find_folder, open_weights, raise_all

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<of>.+)\.lora_(?P<part>[AB])\.weight")
# Settings under which the sum is not W + scale * B A, with the values under which it is.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",),
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"), (False,)),
    **dict.fromkeys(("modules_to_save", "trainable_token_indices", "layer_replication"), ()),
    **dict.fromkeys(("target_parameters", "alora_invocation_tokens", "arrow_config"), ()),
    # Others take something off the model's own matrices first.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}  # fmt: skip


class LowRank(NamedTuple):
    """What is added to a matrix [outputs, inputs]: up @ down, in float32."""

    up: np.ndarray  # [outputs, rank], times the scale
    down: np.ndarray  # [rank, inputs]

    def rows(self, start: int, stop: int, columns: slice | None = None) -> np.ndarray:
        down = self.down if columns is None else self.down[:, columns]
        return self.up[start:stop] @ down


Adapter = Mapping[str, LowRank]  # by HuggingFace's name of the matrix


def open_adapter(path: str | os.PathLike, hub: Mapping[str, Any] | None = None) -> Adapter:
    """The adapter in a folder, or of a hub id."""
    folder = find_folder(path, argument="adapter", hub=hub)
    file = os.path.join(folder, ADAPTER_CONFIG) if os.path.isdir(folder) else folder
    if not os.path.isfile(file) or file == folder:
        raise NoSuchFile(
            f"adapter={os.fspath(path)!r} is not valid: a folder with {ADAPTER_CONFIG} in it"
        )
    config = read_json(file)
    with parsing(file):
        asked = [
            f"{name}={config[name]!r}"
            for name, plain in _PLAIN.items()
            if config.get(name) is not None and config[name] not in plain and config[name] != []
        ]
        if asked:
            raise NotSupported(
                f"{', '.join(asked)} is not supported: an adapter is read that adds low-rank "
                "matrices to some of the model's, and nothing else; merge it with PEFT "
                "(merge_and_unload, save_pretrained)"
            )
        check_float(config.get("lora_alpha"), "lora_alpha", -math.inf, math.inf)
    weights = open_weights(os.path.join(folder, ADAPTER_TENSORS))
    parts: dict[str, dict[str, StoredTensor]] = {}
    unknown = []
    for name, tensor in weights.items():
        found = _NAME.fullmatch(name)
        if found is None:
            unknown.append(f"not part of a low-rank adapter: {tensor}")
        else:
            parts.setdefault(found["of"], {})[found["part"]] = tensor
    raise_all([*unknown, *_misfits(parts)], "the adapter cannot be read")
    return {f"{of}.weight": _low_rank(of, both, config) for of, both in parts.items()}


def _misfits(parts: Mapping[str, Mapping[str, StoredTensor]]) -> Iterator[str]:
    for of, both in parts.items():
        shapes = {part: tensor.shape for part, tensor in both.items()}
        if shapes.keys() != {"A", "B"}:
            yield f"{of} has lora_{min(shapes)} alone"
        elif [*map(len, shapes.values())] != [2, 2] or shapes["A"][0] != shapes["B"][1]:
            yield f"{of} has shapes {shapes} that make no product"


def _low_rank(of: str, both: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> LowRank:
    down, up = (both[part].rows(0, both[part].shape[0]).astype(np.float32) for part in "AB")
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", of):
            alpha = value
            break
    rank = len(down)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(up * np.float32(scale), down)


def check_adapter(adapter: Adapter, cfg: ModelConfig, weights: str | None, folder: str) -> None:
    """Refuses an adapter of another model than that in the folder, or to be held as `weights`: a
    sum has other numbers than the blocks of a file, and narrow weights no room for it."""
    if weights == "stored":
        wanted = "'int8' or 'float': a matrix with an adapter is none of the file's"
        check(False, "weights", weights, wanted)
    if cfg.is_narrow:
        raise BadValue("adapter is not valid for a checkpoint of narrow weights: merge it before")
    shapes = {tensor.key: tensor.shape for entry in entries(cfg) for tensor in entry.tensors}
    problems, place = [], repr(folder)
    for name, low in adapter.items():
        shape = len(low.up), low.down.shape[1]
        if name not in shapes:
            problems.append(f"{name}: {place} has no such matrix")
        elif shapes[name] != shape:
            problems.append(f"{name}: shape {[*shape]}; {place} has {[*shapes[name]]}")
    raise_all(problems, "the adapter is not one of this model")


def with_adapter(weights: Weights, adapter: Adapter) -> Weights:
    """Tensors of files with the adapter added, each block as it is read."""
    return {n: _sum(one, adapter[n]) if n in adapter else one for n, one in weights.items()}


def _sum(tensor: StoredTensor, low: LowRank) -> StoredTensor:
    def rows(start: int, stop: int, columns: slice | None = None) -> np.ndarray:
        return tensor.rows(start, stop, columns).astype(dtype) + low.rows(start, stop, columns)

    dtype = "float64" if tensor.dtype == "float64" else "float32"
    return dataclasses.replace(tensor, rows=rows, dtype=dtype, kind="", apart=None)


def add_to_arrays(
    arrays: Iterable[tuple[Entry, Any]], adapter: Adapter
) -> Iterator[tuple[Entry, Any]]:
    """The same of arrays of a model, one at a time."""
    for entry, array in arrays:
        some = [tensor for tensor in entry.tensors if tensor.key in adapter]
        if some:
            kind, array = array.dtype, np.array(array)
            for tensor in some:
                low = adapter[tensor.key]
                place = array if tensor.part is None else array[:, tensor.part]
                delta = low.rows(0, len(low.up)).reshape(place.shape)
                place[...] = (place.astype(np.float32) + delta).astype(kind)
        yield entry, array

# SPDX-License-Identifier: Apache-2.0
"""Weights in memory under HuggingFace's names: into a model, and out of it.

Knows arrays of NumPy, jax and torch. Does not know names (tensor_names.py).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tsjax.base.checks import check, check_known, check_type
from tsjax.base.errors import BadType, BadValue
from tsjax.base.input_files import read_json
from tsjax.base.model_config import WEIGHTS, ModelConfig
from tsjax.files import huggingface, tensor_names
from tsjax.files.checkpoint import assembled, check_dtype, dtype_named, refuse_several
from tsjax.files.checkpoint_folders import check_new_folder
from tsjax.files.config_files import model_config, stop_ids_in
from tsjax.files.hf_folders import MAX_SHARD_SIZE, Source, parse_size, write_hf_folder
from tsjax.files.model_in_memory import Model, named_arrays
from tsjax.files.weight_files import StoredTensor, numpy_of_torch
from tsjax.model.params import Params, placement
from tsjax.model.sharding import placed, usable_mesh


def from_hf(
    tensors: Mapping[str, Any],
    config: Any,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    weights: str | None = None,
    path: str | os.PathLike | None = None,
) -> Model:
    """A model of tensors that are in memory, under the names that HuggingFace gives them.

    Args:
      tensors: a state dict: arrays of NumPy, jax or torch by their names.
      config: what says its shape: the content of a config.json, such a file or its folder,
        transformers' configuration, or a ModelConfig.
      dtype, mesh, weights: as of `load`; without a dtype the config's, or that of most tensors.
      path: the folder of its tokenizer; None for a model of token ids alone.
    """
    refuse_several("from_hf")
    check_type(tensors, Mapping, "tensors", "a dict of arrays by HuggingFace's names")
    check_known(weights, "weights", WEIGHTS)
    check(weights != "stored", "weights", weights, "of a GGUF file alone")
    mesh, dtype = usable_mesh(mesh), dtype_named(dtype)
    stored = {name: _stored(name, array) for name, array in tensors.items()}
    check(bool(stored), "tensors", {}, "at least one array")
    kinds = [tensor.dtype for tensor in stored.values()]
    cfg, stop_ids = _config(config, dtype, max(set(kinds), key=kinds.count))
    check_dtype(cfg.dtype)
    cfg = dataclasses.replace(cfg, drafter=None)  # whose tensors have no names here
    cfg = tensor_names.with_weights(cfg, weights, stored, "tensors")
    specs = {entry.path: entry.spec for entry in tensor_names.entries(cfg)}
    arrays = {}
    for entry, found in huggingface.read_model(cfg, stored):
        for name, array in tensor_names.arrays_of(entry.path, found).items():
            arrays[name] = placed(array, placement(specs[name], mesh))
    return assembled(arrays, cfg, stop_ids, None if path is None else os.path.abspath(path))


def _config(given: Any, dtype: str | None, of_most: str) -> tuple[ModelConfig, tuple[int, ...]]:
    if isinstance(given, ModelConfig):
        return dataclasses.replace(given, dtype=dtype or given.dtype), ()
    if isinstance(given, str | os.PathLike):
        file = os.fspath(given)
        given = read_json(os.path.join(file, "config.json") if os.path.isdir(file) else file)
    if hasattr(given, "to_diff_dict"):  # transformers' class
        given = given.to_dict()
    if not isinstance(given, Mapping):
        wanted = "the content of a config.json, its path, transformers' config or a ModelConfig"
        raise BadType(f"config={given!r:.80} is not valid: {wanted}")
    own = given.get("dtype") or given.get("torch_dtype")
    raw = {**given, "dtype": dtype_named(own) if own else None, "torch_dtype": None}
    return model_config(raw, dtype=dtype or raw["dtype"] or of_most), stop_ids_in(given, "config")


def _stored(name: Any, array: Any) -> StoredTensor:
    shape, kind = getattr(array, "shape", None), getattr(array, "dtype", None)
    if not isinstance(name, str) or shape is None or kind is None:
        wanted = "arrays of NumPy, jax or torch by their names"
        raise BadType(f"tensors[{name!r:.80}] of {type(array).__name__} is not valid: {wanted}")
    rows = functools.partial(_rows, array)
    return StoredTensor(name, "tensors", tuple(shape), dtype_named(kind), rows)


def _rows(array: Any, start: int, stop: int, columns: slice | None = None) -> np.ndarray:
    block = array[start:stop] if columns is None else array[start:stop, columns]
    return numpy_of_torch(block) if hasattr(block, "detach") else np.asarray(block)


def to_hf(model: Model | Params, cfg: ModelConfig | None = None) -> dict[str, jax.Array]:
    """The arrays of a model under HuggingFace's names and in its shapes; what `from_hf` takes.

    Args:
      model: from `tsjax.load`, or its parameters, or others of that shape, with its `cfg`.

    Draft heads have the names of their own code. A one-layer drafter is left out.
    """
    if isinstance(model, Params):
        check_type(cfg, ModelConfig, "cfg", "the model's cfg, beside parameters")
        assert cfg is not None
        model = Model(model, cfg=cfg)
    check_type(model, Model, "model", "what tsjax.load returns, or its params with its cfg")
    if model.cfg.is_narrow:
        raise BadValue("model is not valid: its weights are narrow, and the wide ones are lost")
    return {
        tensor.key: tensor.of(array)
        for entry, array in named_arrays(model)
        if not entry.path.startswith("drafter.")
        for tensor in entry.tensors
    }


def save_hf(
    model: Model,
    path: str | os.PathLike,
    *,
    draft_heads: str | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    overwrite: bool = False,
) -> None:
    """Writes a folder that transformers loads: config.json, safetensors, the tokenizer. Interrupted
    at any moment, it leaves no half-written folder.

    Args:
      draft_heads: "merge" or "drop", where the model has some.
      max_shard_size: bytes, or a size such as "2GB", of one weight file.
    """
    refuse_several("save_hf")
    check_type(model, Model, "model", "what tsjax.load returns")
    parse_size(max_shard_size)
    check_new_folder(path, overwrite=overwrite)
    arrays = ((entry, np.asarray(leaf)) for entry, leaf in named_arrays(model))
    source = Source(model.cfg, model.stop_ids, model.path, arrays)
    write_hf_folder(
        source, path, "model", draft_heads=draft_heads, max_shard_size=max_shard_size,
        overwrite=overwrite, on_tensor=None,
    )  # fmt: skip

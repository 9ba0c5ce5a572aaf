# SPDX-License-Identifier: Apache-2.0
"""Draft heads and drafters in files of their own, beside a model's checkpoint.

Knows the arrays of Params that they are. Does not know names (head_files.py, drafter_files.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsjax.base.errors import BadValue
from tsjax.base.model_config import ModelConfig
from tsjax.files import weight_files
from tsjax.files.drafter_files import PREFIX, WORD_NUMBERS, write_drafter
from tsjax.files.head_files import MEDUSA, MEDUSA_PICKLE, find_heads, named_in
from tsjax.files.model_in_memory import Model, named_arrays
from tsjax.files.tensor_names import entries
from tsjax.model.params import declare_params, is_spec, placement
from tsjax.model.sharding import placed
from tsjax.model.transformer import ModelWeights, unembedding_rows

TABLES = ("model.embed", "model.unembed")  # paths of what has a row for each token


def open_heads(
    path: str | os.PathLike, *, allow_pickle: bool = False, hub: Mapping[str, Any] | None = None
) -> weight_files.Weights:
    """The weight files of an adapter, or of a checkpoint with heads in it."""
    if os.path.isdir(path) or not os.path.exists(path):
        path = weight_files.find_folder(path, allow_pickle=allow_pickle, argument="heads", hub=hub)
        pickled = os.path.join(path, MEDUSA_PICKLE)
        has_others = any(name.endswith(".safetensors") for name in os.listdir(path))
        path = pickled if os.path.exists(pickled) and not has_others else path
    weights = weight_files.open_weights(os.fspath(path), allow_pickle=allow_pickle)
    if not find_heads(weights):
        found = ", ".join(sorted(weights)[:5])
        wanted = "it holds no model.medusa_layers.* (TokenSwift's heads) and no K.0.linear.* or "
        wanted += f"blocks.K.layers.0.* (Medusa's); it has {found}"
        raise BadValue(f"heads={os.fspath(path)!r} is not valid: {wanted}")
    return weights


def write_heads(model: Model, file: str) -> None:
    """Replaces a file with the model's draft heads, as TokenSwift's or Medusa's code names them."""
    weight_files.write_safetensors(file, named_in(MEDUSA, _tensors_of(model, "heads.")))


def _tensors_of(
    model: Model, beginning: str, left_out: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    return {
        tensor.key: np.ascontiguousarray(tensor.of(np.asarray(leaf)))
        for entry, leaf in named_arrays(model)
        if entry.path.startswith(beginning) and entry.path not in left_out
        for tensor in entry.tensors
    }


def add_words(arrays: dict[str, jax.Array], cfg: ModelConfig, words: np.ndarray, mesh: Any) -> None:
    """The tokens that a drafter can say, and where its file has none their rows of the model."""
    specs = declare_params(cfg).drafter
    assert specs is not None
    arrays["drafter.words"] = placed(words, placement(specs.words, mesh))
    if "drafter.unembed" not in arrays:
        model = declare_params(cfg).model
        own = {e.path: arrays[e.path] for e in entries(cfg) if e.path.startswith(TABLES)}
        tree = jax.tree.structure((model.embed, model.unembed), is_leaf=is_spec)
        embed, unembed = tree.unflatten(own.values())
        rows = unembedding_rows(ModelWeights(embed, (), None, unembed), arrays["drafter.words"])
        arrays["drafter.unembed"] = jax.device_put(rows, placement(specs.unembed, mesh))


def write_drafter_of(model: Model, folder: str) -> None:
    """Writes or replaces a model's drafter. Rows of the model's own matrix are left out."""
    drafter = model.params.drafter
    assert drafter is not None
    own = unembedding_rows(model.params.model, drafter.words)
    left_out = ["drafter.unembed"] if jnp.array_equal(own, drafter.unembed) else []
    tensors = _tensors_of(model, PREFIX, left_out)
    words = tensors.pop(PREFIX + WORD_NUMBERS)
    write_drafter(folder, model.cfg, tensors, words)

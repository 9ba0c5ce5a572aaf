# SPDX-License-Identifier: Apache-2.0
"""What tells two models apart, from few of their numbers.

Knows which settings and weights choose tokens; draft heads do not. Points of each tensor are named
as in a HuggingFace checkpoint and read on the devices, so a model keeps its fingerprint when it is
converted, placed on a mesh, or laid out otherwise by another tsjax: saved runs go on. Does not know
where the weights lie.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Any

import jax
import numpy as np

from tsjax.base.errors import BadValue
from tsjax.base.model_config import ModelConfig
from tsjax.files.checkpoint import Model
from tsjax.files.tensor_names import Tensor, entries, held_as

CHANGES_NO_TOKEN = ("num_draft_heads", "head_kind", "head_accuracy", "drafter", "family")
CHANGES_NO_TOKEN += ("max_positions",)


def model_fingerprint(model: Model) -> str:
    """A hash of the settings, of all vectors, and of points of each row and column of matrices."""
    settings = _set_fields(model.cfg)
    settings = {name: settings[name] for name in settings.keys() - {*CHANGES_NO_TOKEN}}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    leaves = jax.tree.leaves(model.params.model)
    pairs = zip(entries(model.cfg.alone), leaves, strict=True)
    samples = {t.key: _sample(t, leaf) for entry, leaf in pairs for t in entry.tensors}
    for key, values in sorted(jax.device_get(samples).items()):
        digest.update(key.encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]


def check_held_alike(
    name: str, path: str | None, dtype: str | None, weights: str | None, cache: str,
    cfg: ModelConfig,
) -> None:  # fmt: skip
    """Refuses a file of a model, or of that at `path`, whose numbers are held otherwise here;
    `tsjax.load` names how."""
    then, now = (dtype, weights, cache), (cfg.dtype, held_as(cfg), cfg.cache)
    for word, old, new in zip(("dtype", "weights", "cache"), then, now, strict=True):
        if old != new:
            remedy = f"load {repr(path) if path else 'it'} with {word}={old!r}"
            raise BadValue(f"{name} was saved with {word}={old!r}, the model has {new!r}: {remedy}")


def _set_fields(settings: Any) -> dict[str, Any]:
    """The fields that differ from their defaults: one that is added later changes nothing."""
    found = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value != field.default:
            found[field.name] = _set_fields(value) if dataclasses.is_dataclass(value) else value
    return found


def _sample(tensor: Tensor, leaf: jax.Array) -> jax.Array:
    """A vector as it is; of a matrix the points of `sampled_points`, in the model's type."""
    if len(tensor.shape) == 1:
        return tensor.of(leaf)
    rows, columns = sampled_points(*tensor.shape)
    number = tensor.rows(leaf.shape)[rows] * tensor.shape[1] + columns
    return _take(leaf, np.unravel_index(number, leaf.shape))


def sampled_points(num_rows: int, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The fewest points of a matrix that have one in every row and in every column."""
    # Coprime, so that each column is visited; far, so that rows of one head have distant ones.
    far = range(max(1, round(num_columns * 0.618)), num_columns + 1)
    step = next(stride for stride in far if math.gcd(stride, num_columns) == 1)
    number = np.arange(max(num_rows, num_columns))
    return number % num_rows, number * step % num_columns


@jax.jit
def _take(array: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
    return array.at[index].get(mode="promise_in_bounds")


def fingerprint_of_norms(model: Model, cfg: ModelConfig | None = None) -> str:
    """The fingerprint in saved runs of format 1."""
    settings = (cfg or model.cfg).to_dict()
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    weights = model.params.model
    for norm in (weights.final_norm, *(layer.attn_norm for layer in weights.layers)):
        digest.update(np.asarray(norm).tobytes())
    return digest.hexdigest()[:16]


def fingerprint_of_first_rows(model: Model) -> str:
    """The fingerprint in training checkpoints of format 1."""
    weights = model.params.model
    digest = hashlib.sha256(fingerprint_of_norms(model, model.cfg.alone).encode())
    # Of q and down the first 16 inputs, which came before the outputs then.
    queries = np.moveaxis(np.asarray(weights.layers[0].qkv[:, :-2, :, :16]), -1, 0)
    for array in (weights.embed[:16], queries, weights.layers[-1].down[:, :16].T):
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()[:16]

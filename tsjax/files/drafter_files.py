# SPDX-License-Identifier: Apache-2.0
"""A one-layer drafter in files: a folder of config.json and model.safetensors.

Knows the names that EAGLE-3's published code gives the tensors, and what a config says of the
drafter's shape. Tensors go on under the names of the table in huggingface.py, which knows shapes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tsjax.config import ModelConfig, OneLayer, RopeConfig, check
from tsjax.errors import BadValue, NoSuchFile
from tsjax.files.weight_files import Weights, find_folder, open_weights, write_safetensors
from tsjax.files.whole_files import write_text
from tsjax.input_files import parsing, read_json

CONFIG, FILE = "config.json", "model.safetensors"
OWN = "tsjax_drafter"  # in the config: what it says of a drafter that tsjax has trained
PREFIX = "drafter."  # of the tensors in the table
WORDS = "d2t"  # of each word, how far its token's number lies above its own
MATRIX = "lm_head.weight"  # absent where the words' rows are the model's own


class FoundDrafter(NamedTuple):
    """Attributes:
    shape: of the drafter.
    words: which tokens it can say.
    tensors: by their names in the table; the words' matrix may be missing.
    """

    shape: OneLayer
    words: np.ndarray
    tensors: Weights


def open_drafter(path: str | os.PathLike, cfg: ModelConfig) -> FoundDrafter:
    """The drafter in a folder, for a model of that shape. No weight is read yet."""
    folder = find_folder(path)
    wrong = f"drafter={os.fspath(path)!r} is not valid"
    file = os.path.join(folder, CONFIG)
    if not os.path.exists(file):
        raise NoSuchFile(f"{wrong}: the folder has no {CONFIG}; tsjax train-drafter makes one")
    raw, weights = read_json(file), dict(open_weights(folder))
    if OWN not in raw:
        raise BadValue(f"{wrong}: {CONFIG} says nothing of a one-layer drafter ({OWN})")
    with parsing(file, " is damaged", argument="drafter"):
        shape = _shape(raw[OWN])
        _check_model(raw, cfg)
    words = _words(weights, shape.words, cfg.vocab_size, wrong)
    tensors = {PREFIX + name: tensor for name, tensor in weights.items() if name != WORDS}
    return FoundDrafter(shape, words, tensors)


def _shape(fields: Mapping[str, Any]) -> OneLayer:
    return OneLayer(**{**fields, "rope": RopeConfig(**fields["rope"])})


def _check_model(raw: Mapping[str, Any], cfg: ModelConfig) -> None:
    """Refuses a drafter of another model's sizes, by the names of HuggingFace."""
    for name, value in _model_sizes(cfg).items():
        check(raw[name] == value, name, raw[name], f"{value}, as the model has it")


def _model_sizes(cfg: ModelConfig) -> dict[str, int]:
    return {
        "hidden_size": cfg.embed_dim,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "vocab_size": cfg.vocab_size,
    }


def _words(weights: Weights, count: int, vocab_size: int, wrong: str) -> np.ndarray:
    stored = weights.get(WORDS)
    if stored is None or stored.shape != (count,):
        found = "nothing" if stored is None else f"shape {stored.shape}"
        raise BadValue(
            f"{wrong}: {WORDS} should have one number for each of {count} words: {found}"
        )
    words = _read_integers(stored.file, WORDS) + np.arange(count)
    good = words.min() >= 0 and words.max() < vocab_size and len(np.unique(words)) == count
    if not good:
        raise BadValue(f"{wrong}: {WORDS} does not name {count} of the model's {vocab_size} tokens")
    return words.astype(np.int32)


def _read_integers(file: str, name: str) -> np.ndarray:
    import safetensors

    with parsing(file, f": {name} cannot be read"), safetensors.safe_open(file, "np") as handle:
        return np.asarray(handle.get_tensor(name)).astype(np.int64)


def write_drafter(
    folder: str, cfg: ModelConfig, tensors: Mapping[str, np.ndarray], words: np.ndarray
) -> None:
    """Writes or replaces a drafter; `tensors` by their names in the table."""
    assert cfg.drafter is not None
    os.makedirs(folder, exist_ok=True)
    named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    named[WORDS] = words.astype(np.int64) - np.arange(len(words))
    write_safetensors(os.path.join(folder, FILE), named)
    document = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_model_sizes(cfg),
        "intermediate_size": cfg.drafter.mlp_dim,
        "draft_vocab_size": cfg.drafter.words,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.drafter.rope.theta,
        "torch_dtype": cfg.dtype,
        OWN: dataclasses.asdict(cfg.drafter),
    }
    write_text(os.path.join(folder, CONFIG), json.dumps(document, indent=2) + "\n")

# SPDX-License-Identifier: Apache-2.0
"""Presets that come with the package: shapes of known models, and the paper's settings for them.

Knows the JSON files of tsjax.configs. `models.json` holds ModelConfig fields. `generation.json` has
the values of TokenSwift's Table 10, as GenerationConfig and TokenSwift fields, and `training.json`
those of its Table 9 that differ from HeadTraining's defaults.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any, NamedTuple

from tsjax.base.checks import check
from tsjax.base.generation_config import GenerationConfig
from tsjax.base.model_config import ModelConfig
from tsjax.base.training_config import HeadTraining
from tsjax.methods import TokenSwift


class Preset(NamedTuple):
    """Settings of the paper for one model: pass them as `config=` and `method=`."""

    config: GenerationConfig
    method: TokenSwift


def preset(name: str) -> Preset:
    """How the paper generates with a model, such as "llama3.1-8b"."""
    fields = _named("generation.json", name, "preset")
    method = TokenSwift.paper(**fields["tokenswift"])
    return Preset(GenerationConfig(**fields["generation"]), method)


def training_preset(name: str) -> HeadTraining:
    """How the paper trains the heads of a model, such as "qwen2.5-14b"."""
    return HeadTraining(**_named("training.json", name, "training_preset"))


def model_preset(name: str) -> ModelConfig:
    """The shape of a model, such as "qwen2.5-7b", for random weights of its size."""
    return ModelConfig.from_dict(_named("models.json", name, "model_preset"))


def preset_names() -> tuple[str, ...]:
    return tuple(_read("generation.json"))


def training_preset_names() -> tuple[str, ...]:
    return tuple(_read("training.json"))


def model_preset_names() -> tuple[str, ...]:
    return tuple(_read("models.json"))


def _named(file: str, name: Any, argument: str) -> dict[str, Any]:
    known = _read(file)
    check(name in known, argument, name, f"one of {', '.join(known)}")
    return known[name]


@functools.cache
def _read(file: str) -> dict[str, Any]:
    return json.loads((importlib.resources.files("tsjax.configs") / file).read_text("utf-8"))

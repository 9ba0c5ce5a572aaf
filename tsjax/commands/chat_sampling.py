# SPDX-License-Identifier: Apache-2.0
"""How answers to messages are sampled where no flag says it: as the checkpoint's
generation_config.json does, else as here.

Knows that file's place. Does not know any command.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tsjax
from tsjax.base.generation_config import GENERATION_NAMES, SAMPLING_NAMES
from tsjax.base.input_files import read_json
from tsjax.commands import arguments as cli

# Greedy answers of small models go in circles, and at temperature 1 they lose the thread.
CHAT_SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0}
PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"
# Of such a file: lengths are the user's to choose, and stop tokens are the model's.
CHAT_NAMES = "do_sample", *SAMPLING_NAMES, *PENALTIES, "suppress_tokens"


def check_for_chat(given: Mapping[str, Any]) -> None:
    """Refuses a wrong flag before the model is read."""
    tsjax.GenerationConfig(do_sample=True).replace(**given)


def settings_for_chat(folder: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's settings, with those of flags in their place."""
    plain = tsjax.GenerationConfig()
    config = _of_checkpoint(folder).replace(**given)
    found = {name: getattr(config, name) for name in CHAT_NAMES}
    return {n: value for n, value in found.items() if value != getattr(plain, n)} | dict(given)


def _of_checkpoint(folder: str | None) -> tsjax.GenerationConfig:
    path = os.path.join(folder or "", "generation_config.json")
    said: dict[str, Any] = {}
    if folder is not None and os.path.exists(path):  # a GGUF file has none
        said = {name: value for name, value in read_json(path).items() if value is not None}
    # What tsjax does not have is refused below.
    left_out = set(GENERATION_NAMES) - set(CHAT_NAMES)
    said = {name: value for name, value in said.items() if name not in left_out}
    if "do_sample" not in said:
        said = {**CHAT_SAMPLING, **said}
    try:
        return tsjax.GenerationConfig.from_hf(said)
    except tsjax.TsjaxError as error:
        cli.tell_once(f"[not sampled as {path} says: {' '.join(str(error).split())}]")
        return tsjax.GenerationConfig(**CHAT_SAMPLING)


def sampling_in_words(settings: Mapping[str, Any]) -> str:
    config = tsjax.GenerationConfig().replace(**settings)
    names = [*SAMPLING_NAMES, *PENALTIES] if config.do_sample else PENALTIES
    plain = tsjax.GenerationConfig()
    told = [n for n in names if n == "temperature" or getattr(config, n) != getattr(plain, n)]
    how = ["sampling" if config.do_sample else "greedy"]
    return ", ".join(how + [f"{name} {getattr(config, name)}" for name in told])

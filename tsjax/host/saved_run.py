# SPDX-License-Identifier: Apache-2.0
"""A run saved in a file, so that it can go on after a kill.

Knows the file's format. The file holds tokens and settings, not the cache: noise is keyed by
position, so prefilling prompt and output again continues with the same tokens.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tsjax.config import GenerationConfig, ModelConfig, check, check_int, without_unread
from tsjax.files.checkpoint import tsjax_version
from tsjax.files.whole_files import write_text
from tsjax.input_files import parsing, read_json
from tsjax.methods import METHODS, Auto
from tsjax.methods.ngram import as_tuples

FORMAT = 2
OLD_FORMAT = 1  # had neither version nor method, and a fingerprint of only the norms


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run as its file has it.

    Attributes:
      fingerprint: of the model, see fingerprint.py.
      model_path: where the model was, None if it came from nowhere; it may have moved since.
      method: as it was asked for.
      tokens: those made so far, one array per row.
      finish_reason: None for a row that has not ended.
      version: of the tsjax that wrote the file.
      is_old: whether the file has the older format. Then model_path, dtype, method and version are
        None, and the fingerprint is that of the norms.
    """

    fingerprint: str
    model_path: str | None
    dtype: str | None
    method: Any
    exceed_max_positions: bool
    single: bool
    config: GenerationConfig
    prompts: list[np.ndarray]
    tokens: list[np.ndarray]
    finish_reason: list[str | None]
    version: str | None = None
    is_old: bool = False


def write_run(path: str | os.PathLike, run: SavedRun) -> None:
    """Replaces the file in one step: a kill leaves the old one or the new one."""
    document = {
        "format": FORMAT,
        "tsjax": tsjax_version(),
        "model": {"path": run.model_path, "dtype": run.dtype, "fingerprint": run.fingerprint},
        "method": _method_to_dict(run.method),
        "exceed_max_positions": run.exceed_max_positions,
        "single": run.single,
        "config": dataclasses.asdict(run.config),
        "prompt": [row.tolist() for row in run.prompts],
        "tokens": [row.tolist() for row in run.tokens],
        "finish_reason": run.finish_reason,
    }
    write_text(os.path.realpath(path), json.dumps(document))  # a link stays one


def read_run(path: str | os.PathLike, argument: str = "resume_from") -> SavedRun:
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise FileNotFoundError(f"{argument}={name!r} is not valid: no such file")
    with parsing(name, " is not valid: a file written by save_to", argument=argument):
        saved = read_json(name)
        if saved["format"] not in (OLD_FORMAT, FORMAT):
            raise ValueError(f"format {saved['format']!r}")
        is_old = saved["format"] == OLD_FORMAT
        model = {"fingerprint": saved["model"]} if is_old else saved["model"]
        run = SavedRun(
            fingerprint=model["fingerprint"],
            model_path=None if is_old else model["path"],
            dtype=None if is_old else model["dtype"],
            method=None if is_old else _method_from_dict(saved["method"]),
            version=None if is_old else saved["tsjax"],
            is_old=is_old,
            exceed_max_positions=saved["exceed_max_positions"],
            single=saved["single"],
            # Greedy runs of older versions may hold values that nothing read.
            config=GenerationConfig(**without_unread({**saved["config"]})),
            prompts=_rows(saved["prompt"]),
            tokens=_rows(saved["tokens"]),
            finish_reason=list(saved["finish_reason"]),
        )
        if not len(run.prompts) == len(run.tokens) == len(run.finish_reason) > 0:
            raise ValueError("prompt, tokens and finish_reason have different numbers of rows")
        _check_types(run)
    return run


def _check_types(run: SavedRun) -> None:
    text = str | None if run.is_old else str
    for name, value, kind, wanted in (
        ("fingerprint", run.fingerprint, str, "a string"),
        ("path", run.model_path, str | None, "a string or null"),
        ("dtype", run.dtype, text, "a string"),
        ("version", run.version, text, "a string"),
        ("exceed_max_positions", run.exceed_max_positions, bool, "true or false"),
        ("single", run.single, bool, "true or false"),
    ):
        check(isinstance(value, kind), name, value, wanted)
    for value in run.finish_reason:
        check(isinstance(value, str | None), "finish_reason", value, "strings and nulls")


def _rows(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    for row in rows:
        for token in row:
            check_int(token, "token", 0)
    return [np.asarray(row, np.int32) for row in rows]


def check_savable(method: Any) -> None:
    """A file holds a method's name, so it has to have one."""
    if type(method) not in METHODS.values():
        kind = type(method).__name__
        remedy = f"give it a name first, tsjax.register_method('{kind.lower()}', {kind})"
        raise ValueError(f"save_to is not valid with method={kind}: {remedy}")


def _method_to_dict(method: Any) -> dict[str, Any]:
    """Its name and the fields that differ from their defaults."""
    kind: Any = type(method)
    (name,) = [name for name, one in METHODS.items() if one is kind]
    fields = {field.name: getattr(method, field.name) for field in dataclasses.fields(kind)}
    changed = {k: v for k, v in fields.items() if v != getattr(kind, k)}
    configs = {k: v.to_dict() for k, v in changed.items() if isinstance(v, ModelConfig)}
    return {"name": name, **changed, **configs}


def _method_from_dict(saved: Mapping[str, Any]) -> Any:
    fields = dict(saved)
    name = fields.pop("name")
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown: tsjax.register_method gives it its name")
    if "auto" in (fields.get("tree"), fields.get("draft_from")):
        return Auto()  # as older versions wrote it
    return METHODS[name](**{key: as_tuples(value) for key, value in fields.items()})

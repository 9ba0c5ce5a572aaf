# SPDX-License-Identifier: Apache-2.0
"""A run kept in a file, so that it can go on after a kill.

Knows the file's format. The file holds tokens and settings, not the cache: noise is keyed by
position, so prefilling prompt and output again continues with the same tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence

import numpy as np

from tsjax.config import GenerationConfig, check, check_int
from tsjax.input_files import parsing, read_json

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """Prompts, the tokens made so far and why rows ended (None for one that has not)."""

    model: str  # fingerprint
    exceed_max_positions: bool
    single: bool
    config: GenerationConfig
    prompts: list[np.ndarray]
    tokens: list[np.ndarray]
    finish_reason: list[str | None]


def check_target(path: str | os.PathLike) -> None:
    """Refuses a place that could not be written when the first tokens have been made."""
    check(isinstance(path, str | os.PathLike) and bool(os.fspath(path)), "save_to", path, "a file")
    name = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(name))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"save_to={name!r} is not valid: folder {folder!r} does not exist")
    if os.path.isdir(name):
        raise IsADirectoryError(f"save_to={name!r} is not valid: a file, not a folder")
    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(name))):
            pass
    except OSError as error:
        raise PermissionError(
            f"save_to={name!r} is not valid: a file in a folder that can be written; {error}"
        ) from error


def write_run(path: str | os.PathLike, run: SavedRun) -> None:
    """Replaces the file in one step: a kill leaves the old one or the new one."""
    document = {
        "format": FORMAT,
        "model": run.model,
        "exceed_max_positions": run.exceed_max_positions,
        "single": run.single,
        "config": dataclasses.asdict(run.config),
        "prompt": [row.tolist() for row in run.prompts],
        "tokens": [row.tolist() for row in run.tokens],
        "finish_reason": run.finish_reason,
    }
    target = os.path.realpath(path)  # a link stays one
    temporary = f"{target}.writing-{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read_run(path: str | os.PathLike) -> SavedRun:
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise FileNotFoundError(f"resume_from={name!r} is not valid: no such file")
    with parsing(name, " is not valid: a file written by save_to", argument="resume_from"):
        saved = read_json(name)
        if saved["format"] != FORMAT:
            raise ValueError(f"format {saved['format']!r}")
        run = SavedRun(
            model=saved["model"],
            exceed_max_positions=saved["exceed_max_positions"],
            single=saved["single"],
            config=GenerationConfig(**saved["config"]),
            prompts=_rows(saved["prompt"]),
            tokens=_rows(saved["tokens"]),
            finish_reason=list(saved["finish_reason"]),
        )
        if not len(run.prompts) == len(run.tokens) == len(run.finish_reason) > 0:
            raise ValueError("prompt, tokens and finish_reason have different numbers of rows")
        _check_types(run)
    return run


def _check_types(run: SavedRun) -> None:
    check(isinstance(run.model, str), "model", run.model, "a string")
    for name in ("exceed_max_positions", "single"):
        value = getattr(run, name)
        check(isinstance(value, bool), name, value, "true or false")
    for value in run.finish_reason:
        check(isinstance(value, str | None), "finish_reason", value, "strings and nulls")


def _rows(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    for row in rows:
        for token in row:
            check_int(token, "token", 0)
    return [np.asarray(row, np.int32) for row in rows]

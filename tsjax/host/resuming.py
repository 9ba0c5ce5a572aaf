# SPDX-License-Identifier: Apache-2.0
"""A saved run that goes on: with the same model, prompt, prefill and processors, or not at all."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.decoding.processors import LogitsProcessor
from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import check_held_alike, fingerprint_of_norms, model_fingerprint
from tsjax.host.prompts import check_row, prompt_rows
from tsjax.host.saved_run import SavedRun, read_run
from tsjax.lazy.prefill import LazyPrefill


def resumed_run(model: Model, path, prompt: Any, settings: Mapping[str, Any]) -> SavedRun:
    """The saved run, with a new number of tokens if one is asked for."""
    name = f"resume_from={os.fspath(path)!r}"
    run = read_run(path)
    check_same_model(name, run, model, stacklevel=5)
    prompts = [check_row(row, f"a prompt in {name}", model) for row in run.prompts]
    made = [check_row(row, f"a row in {name}", model) if len(row) else row for row in run.tokens]
    if prompt is not None:
        answers = run.config.num_return_sequences
        given = [row for row in prompt_rows(model, prompt)[0] for _ in range(answers)]
        if len(given) != len(prompts) or not all(map(np.array_equal, given, prompts)):
            raise BadValue(f"prompt is not the one saved in {name}: leave it out")
    config = run.config.replace(**settings)
    longest, most = max(map(len, made)), config.max_new_tokens
    wanted = f"at least the {longest} tokens that {name} holds"
    check(most >= longest, "max_new_tokens", most, wanted)
    # A row that had reached the length goes on where more tokens are asked for now.
    reasons: list[str | None] = ["length" if len(row) == most else None for row in made]
    for row, reason in enumerate(run.finish_reason):
        reasons[row] = reasons[row] if reason in (None, "length") else reason
    rows = {"prompts": prompts, "tokens": made, "finish_reason": reasons}
    return dataclasses.replace(run, config=config, **rows)


def check_same_model(name: str, run: SavedRun, model: Model, *, stacklevel: int) -> None:
    """Other weights would go on with other tokens, without a word."""
    if run.is_old:
        trouble = "is of an older tsjax: of the model only settings and norms were compared"
        warnings.warn(f"{name} {trouble}", stacklevel=stacklevel)
        same = run.fingerprint == fingerprint_of_norms(model)
    else:
        check_held_alike(name, run.model_path, run.dtype, run.weights, run.cache, model.cfg)
        same = run.fingerprint == model_fingerprint(model)
    if not same:
        other = "another model or dtype" if run.is_old else "another model"
        known = f", which was loaded from {run.model_path!r}" if run.model_path else ""
        raise BadValue(f"{name} was saved with {other}: load that of the run{known}")


def check_same_prefill(name: str, run: SavedRun, given: LazyPrefill | None) -> None:
    """Another one would go on with other tokens. Of two lazy ones, fields that differ are shown."""
    if given == run.prefill:
        return
    fields = [field.name for field in dataclasses.fields(LazyPrefill)]
    if given is not None and run.prefill is not None:
        fields = [name for name in fields if getattr(given, name) != getattr(run.prefill, name)]

    def shown(lazy: LazyPrefill | None) -> str:
        if lazy is None:
            return "'full'"
        return f"LazyPrefill({', '.join(f'{name}={getattr(lazy, name)!r}' for name in fields)})"

    raise BadValue(
        f"prefill={shown(given)} is not valid: {name} was saved with prefill={shown(run.prefill)}; "
        "leave it out"
    )


def check_same_processors(name: str, run: SavedRun, given: Sequence[LogitsProcessor]) -> None:
    """A function is in no file: the caller gives it again."""
    wanted, found = run.processors, [[one.name, one.version] for one in given]
    if wanted != found:

        def listed(processors) -> str:
            names = [f"{name} (version {version})" for name, version in processors]
            return ", ".join(names) or "none"

        raise BadValue(
            f"{name} was saved with these logits processors: "
            f"{listed(wanted)}; given: {listed(found)}; pass the same as logits_processor"
        )

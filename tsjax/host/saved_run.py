# SPDX-License-Identifier: Apache-2.0
"""A run saved in a file, so that it can go on after a kill.

Knows the file's format. The file holds tokens and settings, not the cache: noise is keyed by
position, so prefilling prompt and output again continues with the same tokens. After a lazy prefill
the output is read as it was made, so that it sees the same of the prompt.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tsjax.base.checks import check, check_int
from tsjax.base.errors import BadValue, NoSuchFile
from tsjax.base.generation_config import GenerationConfig, without_unread
from tsjax.base.input_files import parsing, read_json
from tsjax.base.model_config import ModelConfig
from tsjax.decoding.logprobs import LogProbs
from tsjax.files.checkpoint import tsjax_version
from tsjax.files.whole_files import write_text
from tsjax.host.result import log_probs_from_dict, log_probs_to_dict
from tsjax.lazy.prefill import LazyPrefill
from tsjax.methods import METHODS, Auto
from tsjax.methods.paths import as_tuples

FORMAT = 2
WITH_PROCESSORS = 3  # of runs with processors of a user's own, which format 2 did not know
WITH_LAZY_PREFILL = 4  # of runs with a lazy prefill, which format 3 did not know
# Of what tokens see of a prompt, by the settings of a lazy prefill. A change of that is another
# one: under it the tokens of older files would not go on as they began.
LAZY_VERSION = 3
OLD_FORMAT = 1  # had neither version nor method, and a fingerprint of only the norms


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run as its file has it.

    Attributes:
      fingerprint: of the model, see fingerprint.py.
      model_path: where the model was, None if it came from nowhere; it may have moved since.
      weights: how the model's matrices were held, for tsjax.load; None for wide ones.
      cache: how its keys and values were held, for tsjax.load.
      method: as it was asked for.
      prefill: a lazy one, with its cuts named; None where the whole prompt was computed.
      prefix_length: how many tokens of each prompt a lazy prefill took as read before.
      tokens: those made so far, one array per row.
      finish_reason: None for a row that has not ended.
      processors: name and version of each logits processor.
      logprobs: of the tokens of each row, where they were asked for.
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
    prefill: LazyPrefill | None = None
    prefix_length: int = 0
    processors: list[list[Any]] = dataclasses.field(default_factory=list)
    logprobs: list[LogProbs] | None = None
    version: str | None = None
    weights: str | None = None
    cache: str = "same"
    is_old: bool = False


def write_run(path: str | os.PathLike, run: SavedRun) -> None:
    """Replaces the file in one step: a kill leaves the old one or the new one."""
    # All of its fields: the defaults of a later version may be others.
    lazy = run.prefill and {"version": LAZY_VERSION, **dataclasses.asdict(run.prefill)}
    if lazy and run.prefix_length:  # older versions refuse what they do not know there
        lazy = {**lazy, "prefix_length": run.prefix_length}
    document = {
        "format": _format_of(run),
        "tsjax": tsjax_version(),
        "model": {
            "path": run.model_path,
            "dtype": run.dtype,
            "fingerprint": run.fingerprint,
            **({} if run.weights is None else {"weights": run.weights}),
            **({} if run.cache == "same" else {"cache": run.cache}),
        },
        "method": _method_to_dict(run.method),
        "exceed_max_positions": run.exceed_max_positions,
        "single": run.single,
        "config": dataclasses.asdict(run.config),
        "prompt": [row.tolist() for row in run.prompts],
        "tokens": [row.tolist() for row in run.tokens],
        "finish_reason": run.finish_reason,
        **({"prefill": lazy} if lazy else {}),
        **({"processors": run.processors} if run.processors else {}),
        **({"logprobs": [*map(log_probs_to_dict, run.logprobs)]} if run.logprobs else {}),
    }
    write_text(path, json.dumps(document))


def read_run(path: str | os.PathLike, argument: str = "resume_from") -> SavedRun:
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise NoSuchFile(f"{argument}={name!r} is not valid: no such file")
    with parsing(name, " is not valid: a file written by save_to", argument=argument):
        saved = read_json(name)
        if saved["format"] not in (OLD_FORMAT, FORMAT, WITH_PROCESSORS, WITH_LAZY_PREFILL):
            raise BadValue(f"format {saved['format']!r}")
        is_old, is_lazy = saved["format"] == OLD_FORMAT, saved["format"] == WITH_LAZY_PREFILL
        model = {"fingerprint": saved["model"]} if is_old else saved["model"]
        run = SavedRun(
            fingerprint=model["fingerprint"],
            model_path=None if is_old else model["path"],
            dtype=None if is_old else model["dtype"],
            weights=model.get("weights"),
            cache=model.get("cache", "same"),
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
            prefill=_prefill_from_dict(saved["prefill"]) if is_lazy else None,
            prefix_length=saved["prefill"].get("prefix_length", 0) if is_lazy else 0,
            processors=[list(one) for one in saved.get("processors", ())],
            logprobs=_log_probs(saved),
        )
        if run.logprobs and [len(one.raw) for one in run.logprobs] != [*map(len, run.tokens)]:
            raise BadValue("logprobs and tokens have different lengths")
        if not len(run.prompts) == len(run.tokens) == len(run.finish_reason) > 0:
            raise BadValue("prompt, tokens and finish_reason have different numbers of rows")
        _check_types(run)
        _check_prefix_length(run)
    return run


def _format_of(run: SavedRun) -> int:
    """The oldest that knows all there is, for older versions to read what they can."""
    if run.prefill is not None:
        return WITH_LAZY_PREFILL
    return WITH_PROCESSORS if run.processors else FORMAT


def _check_types(run: SavedRun) -> None:
    text = str | None if run.is_old else str
    for name, value, kind, wanted in (
        ("fingerprint", run.fingerprint, str, "a string"),
        ("path", run.model_path, str | None, "a string or null"),
        ("dtype", run.dtype, text, "a string"),
        ("weights", run.weights, str | None, "a string or null"),
        ("cache", run.cache, str, "a string"),
        ("version", run.version, text, "a string"),
        ("exceed_max_positions", run.exceed_max_positions, bool, "true or false"),
        ("single", run.single, bool, "true or false"),
    ):
        check(isinstance(value, kind), name, value, wanted)
    for value in run.processors:
        is_pair = len(value) == 2 and isinstance(value[0], str)
        check(is_pair, "processors", value, "pairs of a name and a version")
    for value in run.finish_reason:
        check(isinstance(value, str | None), "finish_reason", value, "strings and nulls")


def _check_prefix_length(run: SavedRun) -> None:
    if run.prefix_length:
        check_int(run.prefix_length, "prefix_length", 0, min(map(len, run.prompts)) - 1)
        begins = {row[: run.prefix_length].tobytes() for row in run.prompts}
        same = "a beginning that all prompts have"
        check(len(begins) == 1, "prefix_length", run.prefix_length, same)


def _log_probs(saved: Mapping[str, Any]) -> list[LogProbs] | None:
    top = saved["config"].get("logprobs")
    if top is None:
        return None
    dtype = np.float64 if saved["model"]["dtype"] == "float64" else np.float32
    return [log_probs_from_dict(one, top, dtype) for one in saved["logprobs"]]


def _rows(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    for row in rows:
        for token in row:
            check_int(token, "token", 0)
    return [np.asarray(row, np.int32) for row in rows]


def check_savable(method: Any) -> None:
    """A file holds a method's name, so it has to have one."""
    if type(method) not in METHODS.values():
        kind = type(method).__name__
        remedy = f"give it a name first, tsjax.methods.register_method('{kind.lower()}', {kind})"
        raise BadValue(f"save_to is not valid with method={kind}: {remedy}")


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
        remedy = "tsjax.methods.register_method gives it its name"
        raise BadValue(f"method {name!r} is unknown: {remedy}")
    if "auto" in (fields.get("tree"), fields.get("draft_from")):
        return Auto()  # as older versions wrote it
    return METHODS[name](**{key: as_tuples(value) for key, value in fields.items()})


def _prefill_from_dict(saved: Mapping[str, Any]) -> LazyPrefill:
    fields = {name: value for name, value in saved.items() if name != "prefix_length"}
    version = fields.pop("version")
    known = isinstance(version, int) and 1 <= version <= LAZY_VERSION
    check(known, "prefill", f"version {version!r}", f"version {LAZY_VERSION}")
    lazy = LazyPrefill(**{key: as_tuples(value) for key, value in fields.items()})
    check(not isinstance(lazy.keep, str), "keep", lazy.keep, "shares by layer")
    # Version 1 chose first at the choose_every-th new token, where it now is the first one; up to
    # version 2 what came back in batches was ranked token by token, whatever pool and block are.
    other = {}
    if version == 1 and lazy.revive != "never" and lazy.choose_every != 1:
        other = {"choose_every": lazy.choose_every}
    elif version <= 2 and lazy.revive == "in_batches" and (lazy.pool > 1 or lazy.block_tokens > 1):
        other = {"pool": lazy.pool, "block": lazy.block}
    given = ", ".join(f"{name}={value!r}" for name, value in other.items())
    wanted = f"version {LAZY_VERSION}, as this one chose other tokens"
    check(not other, "prefill", f"version {version} with {given}", wanted)
    return lazy

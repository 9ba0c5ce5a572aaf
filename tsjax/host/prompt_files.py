# SPDX-License-Identifier: Apache-2.0
"""Prompts from a file, answers to a file: each line of one has a line in the other.

Knows JSON lines, and which of them are answered. A line is written at once and whole, so after a
kill the file has what was answered, but for a last line that may be cut; the next run goes on with
the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tsjax.config import GenerationConfig, check
from tsjax.errors import BadValue, NoSuchFile
from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import model_fingerprint
from tsjax.host.many import OF_EACH, TEXTS, Answer, generate_many
from tsjax.host.result import log_probs_to_dict
from tsjax.host.saving import check_writable


@dataclasses.dataclass(frozen=True)
class Done:
    """How a run over a file went.

    Attributes:
      lines: of the file of prompts.
      before: that an earlier run had answered.
      failed: the numbers of lines that could not be answered, from 1.
      tokens: that this run made.
    """

    lines: int
    before: int
    failed: tuple[int, ...]
    tokens: int


class Answering:
    """Answers the lines of a file, one after another. Iterating yields each Answer once written.

    Attributes:
      waiting: how many lines have no answer yet.
    """

    def __init__(
        self,
        model: Model,
        prompts: str | os.PathLike,
        out: str | os.PathLike,
        config: GenerationConfig,
        **arguments: Any,
    ):
        """`arguments` are those of `generate_many`."""
        self._model, self._config, self._arguments = model, config, arguments
        self._out = os.fspath(out)
        self._lines = read_lines(prompts)
        same = os.path.realpath(prompts) == os.path.realpath(out)
        check(not same, "out", self._out, "another file than the prompts")
        folder = os.path.dirname(os.path.abspath(self._out))
        check(os.path.isdir(folder), "out", self._out, f"folder {folder!r} does not exist")
        check_writable(folder, self._out, "a file in a folder that can be written")
        self._run = _digest(model_fingerprint(model), model.cfg.dtype, dataclasses.asdict(config))
        answered = self._answered()
        self._before = len(answered)
        self._todo = [n for n in range(1, len(self._lines) + 1) if n not in answered]
        self._failed = [number for number, failed in answered.items() if failed]
        self._tokens = 0

    @property
    def waiting(self) -> int:
        return len(self._todo)

    @property
    def done(self) -> Done:
        failed = tuple(sorted(self._failed))
        return Done(len(self._lines), self._before, failed, self._tokens)

    def __iter__(self) -> Iterator[Answer]:
        texts = (_prompt_of(self._lines[number - 1]) for number in self._todo)
        with open(self._out, "ab", buffering=0) as file:
            answers = generate_many(self._model, texts, config=self._config, **self._arguments)
            for answer in answers:
                number = self._todo[answer.index]
                line = json.dumps(self._entry(number, answer)).encode() + b"\n"
                file.write(line)  # in one call
                os.fsync(file.fileno())
                self._tokens += len(answer.tokens)
                if answer.error is not None:
                    self._failed.append(number)
                yield answer

    def _entry(self, number: int, answer: Answer) -> dict[str, Any]:
        text = self._lines[number - 1]
        begun = {"line": number, "of": _digest(text), "run": self._run, **_name_of(text)}
        if answer.error is not None:
            return {**begun, "error": str(answer.error)}
        told = answer.logprobs
        return {
            **begun,
            "text": answer.text,
            "tokens": answer.tokens.tolist(),
            "finish_reason": answer.finish_reason,
            "prompt_tokens": answer.prompt_tokens,
            **({} if told is None else {"logprobs": log_probs_to_dict(told)}),
        }

    def _answered(self) -> dict[int, bool]:
        """The lines that have an answer, and whether it is an error. A cut last line is removed."""
        if not os.path.exists(self._out):
            return {}
        with open(self._out, "rb") as file:
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        found: dict[int, bool] = {}
        for index, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                number, of, run = entry["line"], entry["of"], entry["run"]
            except (ValueError, KeyError, TypeError) as error:
                raise BadValue(
                    f"out={self._out!r} is not valid: line {index} is none that tsjax wrote; "
                    "another file, which may not exist yet"
                ) from error
            known = isinstance(number, int) and 1 <= number <= len(self._lines)
            if not known or of != _digest(self._lines[number - 1]):
                raise BadValue(
                    f"out={self._out!r} has answers to other prompts: its line {index} is of line "
                    f"{number}; another file, or the same prompts"
                )
            if run != self._run:
                raise BadValue(
                    f"out={self._out!r} has answers by another model or other settings (line "
                    f"{index}): go on with the same ones, or choose another file"
                )
            found[number] = "error" in entry
        if len(whole) < len(content):
            with open(self._out, "r+b") as file:
                file.truncate(len(whole))
        return found


def read_lines(path: str | os.PathLike) -> list[str]:
    """The lines of a file; a last empty one is none."""
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise NoSuchFile(f"prompts={name!r} is not valid: no such file")
    with open(name, encoding="utf-8", errors="surrogateescape", newline="") as file:
        lines = file.read().split("\n")
    lines = lines[:-1] if lines and not lines[-1] else lines
    check(bool(lines), "prompts", name, "a file with at least one line")
    return lines


def _prompt_of(line: str) -> Any:
    """What `generate_many` takes, or the error that the line is."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        return BadValue(f"no JSON: {error}")
    if isinstance(entry, str):
        return {"prompt": entry}
    if not isinstance(entry, Mapping):
        return BadValue(f"{line:.80} is not valid: an object with {', '.join(TEXTS)}, or a text")
    return {name: value for name, value in entry.items() if name != "id"}


def _name_of(line: str) -> dict[str, Any]:
    """The line's own name for itself."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return {"id": entry["id"]} if isinstance(entry, Mapping) and "id" in entry else {}


def _digest(*values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


FIELDS: Sequence[str] = (*TEXTS, *OF_EACH, "id")

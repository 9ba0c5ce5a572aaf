# SPDX-License-Identifier: Apache-2.0
"""Prompts from a file, answers to a file: each line of one has a line in the other.

Knows JSON lines, and which of them are answered. A line is written at once and whole, so after a
kill the file has what was answered, but for a last line that may be cut; the next run goes on with
the others, and tries those again that could not be answered. One run at a time writes to a file.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from tsjax.base.checks import check
from tsjax.base.errors import BadValue, NoSuchFile, TsjaxError
from tsjax.base.generation_config import GenerationConfig
from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import model_fingerprint
from tsjax.files.locked_files import is_still, lock
from tsjax.files.whole_files import check_place, replacing
from tsjax.host.batch_lines import answer_to, asked_by, is_batch_line
from tsjax.host.many import TEXTS, Answer, generate_many
from tsjax.host.prompts import tokenizer_of
from tsjax.host.result import log_probs_to_dict

FIRST_FIELD = b'{"line": '  # how each line of ours begins


@dataclasses.dataclass(frozen=True)
class Done:
    """How a run over a file went.

    Attributes:
      lines: of the file of prompts that are not blank.
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
        same = os.path.realpath(prompts) == check_place(out, "out")
        check(not same, "out", self._out, "another file than the prompts")
        template = getattr(tokenizer_of(model), "chat_template", None)
        read_by = model_fingerprint(model), model.cfg.dtype, model.stop_ids, template
        self._run = _digest(*read_by, dataclasses.asdict(config))
        self._file, answered = self._opened()
        self._before = len(answered)
        self._todo = [number for number in self._lines if number not in answered]
        self._failed: list[int] = []
        self._tokens = 0

    @property
    def waiting(self) -> int:
        return len(self._todo)

    @property
    def done(self) -> Done:
        failed = tuple(sorted(self._failed))
        return Done(len(self._lines), self._before, failed, self._tokens)

    def __iter__(self) -> Iterator[Answer]:
        with self._file as file:
            for numbers, prompts, config in self._alike():
                answers = generate_many(self._model, prompts, config=config, **self._arguments)
                for answer in answers:
                    number = numbers[answer.index]
                    _append(file, json.dumps(self._entry(number, answer)).encode() + b"\n")
                    self._tokens += len(answer.tokens)
                    if answer.error is not None:
                        self._failed.append(number)
                    yield answer

    def _alike(self) -> Iterator[tuple[list[int], list[Any], GenerationConfig]]:
        """The lines that wait, those with the same settings together: all but those of OpenAI's
        batches have the command's."""
        groups: dict[GenerationConfig, tuple[list[int], list[Any]]] = {}
        for number in self._todo:
            config = self._config
            prompt, settings = prompt_of_line(self._lines[number])
            try:
                config = config.replace(**settings)
            except (TsjaxError, TypeError, ValueError) as error:
                prompt = error
            numbers, prompts = groups.setdefault(config, ([], []))
            numbers.append(number)
            prompts.append(prompt)
        for config, (numbers, prompts) in groups.items():
            yield numbers, prompts, config

    def _entry(self, number: int, answer: Answer) -> dict[str, Any]:
        text = self._lines[number]
        entry = _entry_of(text)
        begun = {"line": number, "of": _digest(text), "run": self._run}
        if isinstance(entry, Mapping) and "id" in entry:  # the line's own name for itself
            begun["id"] = entry["id"]
        if is_batch_line(entry):
            return begun | answer_to(entry, answer, tokenizer_of(self._model))
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

    def _opened(self) -> tuple[io.FileIO, set[int]]:
        """The file to append to, locked, and the lines that have an answer in it.

        A cut last line and errors are taken out: those lines are answered anew.
        """
        file = open(self._out, "a+b", buffering=0)  # noqa: SIM115
        try:
            _lock(file, self._out)
            file.seek(0)
            content = file.read()
            answers, found = self._parted(content)
            if answers == content:
                return file, found
            with replacing(self._out) as place:
                other = open(place, "a+b", buffering=0)  # noqa: SIM115
                _lock(other, place)  # before others can find it
                _append(other, answers)
        except BaseException:
            file.close()
            raise
        file.close()
        return other, found

    def _parted(self, content: bytes) -> tuple[bytes, set[int]]:
        """The lines that are answers, and which lines they answer."""
        whole, kept, found = content[: content.rfind(b"\n") + 1], [], set()
        for index, line in enumerate(whole.splitlines(keepends=True), 1):
            number = self._line_of(line, index)
            if number is not None:
                kept.append(line)
                found.add(number)
        rest = content[len(whole) :]
        if rest[: len(FIRST_FIELD)] != FIRST_FIELD[: len(rest)]:
            raise self._not_ours(whole.count(b"\n") + 1)
        return b"".join(kept), found

    def _line_of(self, line: bytes, index: int) -> int | None:
        """The line that one of the file answers; None for an error."""
        try:
            entry = json.loads(line)
            number, of, run = entry["line"], entry["of"], entry["run"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._not_ours(index) from error
        if entry.get("error") is not None:
            return None
        if not isinstance(number, int) or of != _digest(self._lines.get(number)):
            raise BadValue(
                f"out={self._out!r} has answers to other prompts: its line {index} is of line "
                f"{number}; another file, or the same prompts"
            )
        if run != self._run:
            raise BadValue(
                f"out={self._out!r} has answers by another model or other settings (line "
                f"{index}): go on with the same ones, or choose another file"
            )
        return number

    def _not_ours(self, index: int) -> BadValue:
        return BadValue(
            f"out={self._out!r} is not valid: line {index} is none that tsjax wrote; "
            "another file, which may not exist yet"
        )


def _lock(file: io.FileIO, name: str) -> None:
    """Until it is closed, at the latest when the process ends."""
    if not (lock(file) and is_still(file, name)):
        wanted = "wait for it, or choose another file"
        raise BadValue(f"out={name!r} is being written by another run: {wanted}")


def _append(file: io.FileIO, content: bytes) -> None:
    """All of it and on disk, or nothing: what a full disk takes in part is taken back."""
    before = os.fstat(file.fileno()).st_size
    try:
        written = file.write(content)
        if written != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        os.fsync(file.fileno())
    except OSError:
        os.ftruncate(file.fileno(), before)
        raise


def read_lines(path: str | os.PathLike) -> dict[int, str]:
    """The lines of a file that are not blank, by their numbers from 1."""
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise NoSuchFile(f"prompts={name!r} is not valid: no such file")
    with open(name, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = enumerate(file.read().split("\n"), 1)
    found = {number: line for number, line in lines if line.strip()}
    check(bool(found), "prompts", name, "a file with at least one line")
    lines_of: dict[str, int] = {}
    for number, line in found.items():
        if '"custom_id"' in line and is_batch_line(entry := _entry_of(line)):
            first = lines_of.setdefault(json.dumps(entry["custom_id"]), number)
            wanted = (
                f"a custom_id of its own in line {number}: {entry['custom_id']!r} is line {first}'s"
            )
            check(first == number, "prompts", name, wanted)
    return found


def _entry_of(line: str) -> Any:
    """What the line says, or the error that it is."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadValue(f"no JSON: {error}")


def prompt_of_line(line: str) -> tuple[Any, dict[str, Any]]:
    """What `generate_many` takes, or the error that the line is; and settings of its own."""
    entry = _entry_of(line)
    if isinstance(entry, BadValue):
        return entry, {}
    if isinstance(entry, str):
        return {"prompt": entry}, {}
    if not isinstance(entry, Mapping):
        wanted = f"an object with {', '.join(TEXTS)}, a line of an OpenAI batch, or a text"
        return BadValue(f"{line:.80} is not valid: {wanted}"), {}
    if is_batch_line(entry):
        try:
            return asked_by(entry)
        except TsjaxError as error:
            return error, {}
    return {name: value for name, value in entry.items() if name != "id"}, {}


def _digest(*values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

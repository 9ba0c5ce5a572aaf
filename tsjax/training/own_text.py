# SPDX-License-Identifier: Apache-2.0
"""Text that a model writes itself, to learn from: prompts of several kinds, a folder of answers.

    000123-story-57.npy   token ids of prompt and answer: its number, kind, and the prompt's length
    text.json             what they were written with

Knows prompts and the folder. An answer is in it as soon as it ends, so a run that was killed goes
on with the others.
"""

from __future__ import annotations

import importlib.resources
import itertools
import json
import os
import random
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tsjax.base.checks import check
from tsjax.base.errors import BadValue, NoSuchFile
from tsjax.base.generation_config import GenerationConfig
from tsjax.base.input_files import parsing, read_json
from tsjax.base.telling import doing
from tsjax.files.checkpoint import Model
from tsjax.files.fingerprint import model_fingerprint
from tsjax.files.whole_files import replacing, write_text
from tsjax.host.chat import chat_prompt
from tsjax.host.many import generate_many

RECORD = "text.json"
OWN_KIND = "prompt"  # of prompts that a user gives line by line
ANSWER = "text"  # in a template: a part of an earlier answer
FIRST_ANSWERS = 8  # until there are so many, prompts that need one wait
# Tokens of the answers, one of these each: most are short, and a few are long.
ANSWER_LENGTHS = (400, 800, 800, 1200, 1200, 2000, 4000)
LONGEST_QUOTE = 1200  # characters of an earlier answer
_NAME = re.compile(r"(\d{6})-([a-z]+)-(\d+)\.npy")


class OwnText(NamedTuple):
    """Token ids of a prompt and what followed it."""

    number: int
    kind: str
    prompt: int
    ids: np.ndarray


class Questions(NamedTuple):
    """What a model is asked: templates by kind, and the words that fill them."""

    kinds: Mapping[str, list[str]]
    words: Mapping[str, list[str]]

    def prompt(self, number: int, seed: int, quote: str | None) -> tuple[str, str]:
        """The kind and the text of a prompt; without a `quote` one that needs none."""
        draw = random.Random(f"{seed} {number}")
        kinds = [kind for kind in self.kinds if quote is not None or not self.needs_answer(kind)]
        kind = draw.choice(kinds)

        def filled(match: re.Match) -> str:
            return str(quote) if match[1] == ANSWER else draw.choice(self.words[match[1]])

        template = draw.choice(self.kinds[kind])
        return kind, re.sub(r"\{(\w+)\}", filled, template).strip()

    def needs_answer(self, kind: str) -> bool:
        return any("{" + ANSWER + "}" in template for template in self.kinds[kind])


def read_asked(path: str | os.PathLike | None) -> Questions:
    """What the package asks, or what a file says: JSON of the same form, or a prompt a line."""
    if path is None:
        place = importlib.resources.files("tsjax.configs") / "asked.json"
        raw = json.loads(place.read_text(encoding="utf-8"))
        return Questions(raw["kinds"], raw["words"])
    path = os.fspath(path)
    if not os.path.exists(path):
        raise NoSuchFile(f"prompts={path!r}: there is no such file")
    if path.endswith(".json"):
        raw = read_json(path)
        with parsing(path, " is not valid", argument="prompts"):
            asked = Questions(dict(raw["kinds"]), dict(raw.get("words", {})))
            _check_asked(asked)
        return asked
    with parsing(path, " is not valid", argument="prompts"), open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.strip()]
        if not lines:
            raise BadValue("the file has no line of text")
    return Questions({OWN_KIND: [re.sub(r"[{}]", "", line) for line in lines]}, {})


def _check_asked(asked: Questions) -> None:
    for kind, templates in asked.kinds.items():
        check(bool(re.fullmatch("[a-z]+", kind)), "kind", kind, "small letters")
        check(bool(templates), kind, templates, "a list of prompts, at least one")
        for name in re.findall(r"\{(\w+)\}", " ".join(templates)):
            known = name == ANSWER or bool(asked.words.get(name))
            check(known, kind, "{" + name + "}", "one of the words of the file, or {text}")
    alone = [kind for kind in asked.kinds if not asked.needs_answer(kind)]
    check(bool(alone), "kinds", list(asked.kinds), "at least one kind without {text}")


def write_own_text(
    model: Model,
    folder: str,
    asked: Questions,
    *,
    sampling: GenerationConfig,
    tokens: int,
    seconds: float | None = None,
    rows: int = 16,
    seed: int = 0,
) -> list[OwnText]:
    """Adds answers to the folder until it has so many tokens of them, or the time is over; returns
    all of them. Answers that run then are ended.

    Args:
      sampling: how they are drawn, penalties included; lengths and seeds are of each answer.
      rows: answers that are written side by side.
    """
    os.makedirs(folder, exist_ok=True)
    _check_record(folder, model, sampling, seed)
    texts = read_own_text(folder)
    if sum(len(text.ids) - text.prompt for text in texts) >= tokens:
        return texts
    writing = _Writing(model, folder, asked, texts, seed, tokens, seconds)
    with doing("writing text", tokens, "tokens") as work:
        work.done(writing.written)
        longest = max(ANSWER_LENGTHS) + LONGEST_QUOTE
        capacity = min(longest, model.cfg.max_positions)
        answers = generate_many(
            model, writing.prompts(), rows=rows, capacity=capacity, prefill_width=64,
            config=sampling,
        )  # fmt: skip
        for answer in answers:
            if answer.error is None:
                writing.keep(answer)
                work.done(min(writing.written, tokens))
            if writing.over:
                break
    return sorted(writing.texts)


class _Writing:
    """The prompts of one call, and the answers that are kept."""

    def __init__(
        self, model: Model, folder: str, asked: Questions, texts: list[OwnText], seed: int,
        tokens: int, seconds: float | None,
    ):  # fmt: skip
        self._model, self._folder, self._asked, self._seed = model, folder, asked, seed
        self._tokens, self._ends = tokens, None if seconds is None else time.monotonic() + seconds
        self.texts = texts
        self.written = sum(len(text.ids) - text.prompt for text in texts)
        self._open: dict[int, tuple[int, str, np.ndarray]] = {}

    @property
    def over(self) -> bool:
        late = self._ends is not None and time.monotonic() >= self._ends
        return self.written >= self._tokens or late

    def prompts(self) -> Iterator[dict[str, Any]]:
        """As `generate_many` takes them."""
        done, index = {text.number for text in self.texts}, 0
        for number in itertools.count():
            if self.over:
                return
            if number in done:
                continue
            kind, prompt = self._asked.prompt(number, self._seed, self._quote(number))
            ids = self._as_ids(prompt)
            self._open[index] = number, kind, ids
            most = random.Random(f"length {self._seed} {number}").choice(ANSWER_LENGTHS)
            room = self._model.cfg.max_positions - len(ids)
            yield {"ids": ids, "seed": number, "max_new_tokens": max(1, min(most, room))}
            index += 1

    def _as_ids(self, prompt: str) -> np.ndarray:
        tokenizer = self._model.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            return np.asarray(tokenizer(prompt)["input_ids"], np.int32)
        return chat_prompt(self._model, [{"role": "user", "content": prompt}])

    def _quote(self, number: int) -> str | None:
        if len(self.texts) < FIRST_ANSWERS:
            return None
        text = random.Random(f"quote {self._seed} {number}").choice(self.texts)
        answer = text.ids[text.prompt :].tolist()
        return self._model.tokenizer.decode(answer, skip_special_tokens=True)[:LONGEST_QUOTE]

    def keep(self, answer: Any) -> None:
        number, kind, prompt = self._open.pop(answer.index)
        ids = np.concatenate([prompt, answer.tokens]).astype(np.int32)
        name = f"{number:06d}-{kind}-{len(prompt)}.npy"
        with replacing(os.path.join(self._folder, name)) as temporary:
            with open(temporary, "wb") as file:
                np.save(file, ids)
        self.texts.append(OwnText(number, kind, len(prompt), ids))
        self.written += len(answer.tokens)


def read_own_text(folder: str) -> list[OwnText]:
    """All answers in a folder, in their order."""
    found = []
    for name in sorted(os.listdir(folder)):
        if match := _NAME.fullmatch(name):
            path = os.path.join(folder, name)
            with parsing(path, " is damaged"):
                ids = np.load(path, allow_pickle=False)
                wanted = "[tokens] integers, more than the prompt's"
                good = ids.ndim == 1 and ids.dtype == np.int32 and len(ids) > int(match[3])
                check(good, "ids", f"{ids.dtype} {ids.shape}", wanted)
            found.append(OwnText(int(match[1]), match[2], int(match[3]), ids))
    return found


def _check_record(folder: str, model: Model, sampling: GenerationConfig, seed: int) -> None:
    """Refuses to go on with a folder of another model or other settings."""
    path = os.path.join(folder, RECORD)
    drawn = {
        name: getattr(sampling, name)
        for name in ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                     "repetition_window", "presence_penalty", "frequency_penalty")
    }  # fmt: skip
    now = {"model": model_fingerprint(model), "seed": seed, "sampling": drawn}
    if not os.path.exists(path):
        write_text(path, json.dumps(now, indent=2) + "\n")
        return
    then = read_json(path)
    wrong = [name for name in now if then.get(name) != now[name]]
    if wrong:
        was = "; ".join(f"{name} {then.get(name)}, now {now[name]}" for name in wrong)
        raise BadValue(f"{folder!r} holds text that was written with {was}: choose another folder")

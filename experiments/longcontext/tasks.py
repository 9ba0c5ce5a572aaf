# SPDX-License-Identifier: Apache-2.0
"""Tasks for models that speak English and Python, with prompts of any length.

Prose comes from a folder of books and code from one of Python modules, of which each half of the
tasks has its own. A task is a function (sources, rng, length) -> Example: a prompt of at most
`length` tokens and nearly as many, in the model's chat template where something is asked, and what
is right to say next. An answer is begun for the model, as only what follows is of interest.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import tsjax
from tsjax.files.tokenizer import encode
from tsjax.host.chat import chat_prompt

HALVES = ("development", "reported")
COLOURS = (
    "amber", "azure", "black", "bronze", "copper", "crimson", "golden", "green", "grey", "indigo",
    "ivory", "olive", "orange", "pearl", "purple", "scarlet", "silver", "tawny", "violet", "white",
)  # fmt: skip
THINGS = (
    "anchor", "badger", "barrel", "beacon", "bridge", "candle", "castle", "cedar", "comet", "drum",
    "eagle", "falcon", "garden", "hammer", "harbor", "island", "kettle", "ladder", "lantern",
    "lemon", "marble", "meadow", "mirror", "needle", "oyster", "pepper", "pigeon", "rabbit",
    "saddle", "signal", "spider", "statue", "temple", "ticket", "tunnel", "turtle", "valley",
    "walnut", "whistle", "window",
)  # fmt: skip
SURNAMES = (
    "Abernathy", "Birkett", "Calloway", "Dunmore", "Ellery", "Fairbank", "Gresham", "Hollis",
    "Inskip", "Jardine", "Kestrel", "Lockwood", "Merrow", "Norwood", "Oakes", "Pemberly",
)  # fmt: skip
# What is told in the middle of a chapter, what is asked, and how the answer begins.
FACTS = (
    ("It was said in those days that Mr. {name} kept the {thing} money in a {colour} box.",
     "What colour was the box in which Mr. {name} kept money?", "The box was", "colour"),
    ("Mrs. {name} had, to every neighbour's wonder, taught her {colour} parrot to say '{thing}'.",
     "Which word had Mrs. {name} taught her parrot to say?", "The word was '", "thing"),
    ("The inn where Captain {name} lodged that winter was called the {colour} {thing}.",
     "What was the inn called where Captain {name} stayed in winter?", "It was called the",
     "colour thing"),
    ("Old Doctor {name} would take no other fee than a {thing}, which he painted {colour}.",
     "What did Doctor {name} take as his fee?", "His fee was a", "thing"),
)  # fmt: skip
MEMORY = "\n\nNow answer from the text above.\n"
FENCE = "```"


class Example(NamedTuple):
    prompt: np.ndarray  # [P] int32
    answers: tuple[str, ...]  # all of them are to be said
    new_tokens: int
    by: Callable[[str, Sequence[str]], float]  # what an answer scores, from 0 to 1


class Sources:
    """Sentences of books and Python modules of one half, with the model that is asked."""

    def __init__(self, model: tsjax.Model, books: Path, modules: Path, half: str):
        self.model, odd = model, HALVES.index(half)
        texts = [path.read_text(errors="replace") for path in sorted(books.glob("*.txt"))][odd::2]
        code = sorted(modules.glob("*.py"))[odd::2]
        self.modules = [path.read_text(errors="replace") for path in code]
        if not texts or not code:
            raise SystemExit(f"{books} has too few *.txt, or {modules} too few *.py: two of each")
        self.sentences = [_sentences(text) for text in texts]

    def ids(self, text: str) -> np.ndarray:
        return encode(self.model.tokenizer, text, add_special_tokens=False)

    def asked(self, text: str, answer: str) -> np.ndarray:
        """The tokens of a question, and of an answer's beginning."""
        chat = chat_prompt(self.model, [{"role": "user", "content": text}])
        return np.concatenate([chat, self.ids(answer)])

    def chapter(self, rng: np.random.Generator, tokens: int) -> list[str]:
        """Sentences in a row of one book, at most so many tokens."""
        book = self.sentences[int(rng.integers(len(self.sentences)))]
        start = int(rng.integers(max(1, len(book) - tokens // 12)))
        found, left = [], tokens
        for sentence in book[start:]:
            left -= len(self.ids(" " + sentence))
            if left < 0:
                break
            found.append(sentence)
        return found

    def filled(self, rng, length: int, told: Sequence[str], question: str, answer: str):
        """The prompt: a chapter with sentences `told` anywhere in it, and what is asked of it."""
        fixed = len(self.asked(" ".join(told) + MEMORY + question, answer))
        sentences = self.chapter(rng, length - fixed - 8)
        places = np.sort(rng.integers(1, max(2, len(sentences)), size=len(told)))
        for place, sentence in reversed(list(zip(places, told, strict=True))):
            sentences.insert(int(place), sentence)
        return self.asked(" ".join(sentences) + MEMORY + question, answer)


def _sentences(text: str) -> list[str]:
    body = " ".join(text.split())
    return re.split(r"(?<=[.!?]) (?=[A-Z])", body)[40:]  # without the title and the contents


def share_said(text: str, answers: Sequence[str]) -> float:
    """How many of the answers a text has, each at its first place as a whole word."""
    said = text.casefold()
    found = [re.search(rf"(?<!\w){re.escape(one.casefold())}(?!\w)", said) for one in answers]
    return float(np.mean([one is not None for one in found]))


def likeness(text: str, answers: Sequence[str]) -> float:
    """How alike a text and the answer are, their spaces made one."""
    said, wanted = (" ".join(one.split()) for one in (text.split(FENCE)[0], answers[0]))
    return difflib.SequenceMatcher(None, said[: 2 * len(wanted)], wanted, autojunk=False).ratio()


def first_line(text: str, answers: Sequence[str]) -> float:
    return likeness(text.lstrip("\n").split("\n")[0], answers)


def _keys(rng: np.random.Generator, count: int) -> list[str]:
    pairs = rng.choice(len(COLOURS) * len(THINGS), size=count, replace=False)
    return [f"{COLOURS[pair // len(THINGS)]} {THINGS[pair % len(THINGS)]}" for pair in pairs]


def _numbers(rng: np.random.Generator, count: int) -> list[str]:
    return [str(number) for number in rng.choice(90_000, size=count, replace=False) + 10_000]


def _told(keys: Sequence[str], numbers: Sequence[str]) -> list[str]:
    pairs = zip(keys, numbers, strict=True)
    return [f"The secret number of the {key} is {number}." for key, number in pairs]


def needle(sources: Sources, rng: np.random.Generator, length: int) -> Example:
    """One number in a chapter."""
    (key,), (number,) = _keys(rng, 1), _numbers(rng, 1)
    question = f"What is the secret number of the {key}?"
    begun = f"The secret number of the {key} is "
    prompt = sources.filled(rng, length, _told([key], [number]), question, begun)
    return Example(prompt, (number,), 10, share_said)


def keys(sources: Sources, rng: np.random.Generator, length: int) -> Example:
    """Nothing but names and numbers; one is asked for."""
    names, numbers = _keys(rng, 800), _numbers(rng, 800)
    lines, asked = [], int(rng.random() * (length - 100) / 18)
    question = f"What is the secret number of the {names[asked % 800]}?"
    begun = f"The secret number of the {names[asked % 800]} is "
    left = length - len(sources.asked(MEMORY + question, begun)) - 8
    told = _told(names, numbers)
    for index in range(800):  # the one that is asked for goes in where it lies
        left -= len(sources.ids(told[index] + "\n"))
        if left < 0:
            break
        lines.append(told[index])
    place = asked % len(lines)
    question, begun = (one.replace(names[asked % 800], names[place]) for one in (question, begun))
    prompt = sources.asked("\n".join(lines) + MEMORY + question, begun)
    return Example(prompt, (numbers[place],), 10, share_said)


def several(sources: Sources, rng: np.random.Generator, length: int) -> Example:
    """Four of eight numbers in a chapter, asked for at once."""
    names, numbers = _keys(rng, 8), _numbers(rng, 8)
    asked = rng.choice(8, size=4, replace=False)
    listed = ", ".join(f"the {names[one]}" for one in asked)
    question = (
        f"What are the secret numbers of {listed}? Write one line for each, such as "
        "'the pink house: 12345'."
    )
    begun = f"the {names[asked[0]]}: "
    prompt = sources.filled(rng, length, _told(names, numbers), question, begun)
    return Example(prompt, tuple(numbers[one] for one in asked), 56, share_said)


def variables(sources: Sources, rng: np.random.Generator, length: int) -> Example:
    """A number goes from name to name through a chapter; what has the last one?"""
    names = [one.replace(" ", "_") for one in _keys(rng, 6)]
    number, other = _numbers(rng, 2)
    told = [f"Let {names[0]} = {number}.", f"Let {names[3]} = {other}."]
    for before, after in ((0, 1), (3, 4), (1, 2), (4, 5)):
        told.append(f"Let {names[after]} = {names[before]}.")
    question = f"Which number is {names[2]} equal to, if you follow the 'Let' statements?"
    begun = f"{names[2]} = {names[1]} = {names[0]} = "
    return Example(sources.filled(rng, length, told, question, begun), (number,), 10, share_said)


def frequent(sources: Sources, rng: np.random.Generator, length: int) -> Example:
    """Which word is the most frequent in a long list."""
    names = [THINGS[i] for i in rng.choice(len(THINGS), size=20, replace=False)]
    weights = np.asarray([0.3, *[0.7 / 19] * 19])
    question = "Which word occurs most often in the list above?"
    begun = "The word that occurs most often is '"
    room = length - len(sources.asked(MEMORY + question, begun)) - 8
    words = [names[i] for i in rng.choice(20, size=room, p=weights)]
    shorter = len(words) * room // (len(sources.ids(" ".join(words))) + 1)
    listed = " ".join(words[: min(shorter, len(words)) - 4])
    return Example(sources.asked(listed + MEMORY + question, begun), (names[0],), 6, share_said)


def chapter(sources: Sources, rng: np.random.Generator, length: int) -> Example:
    """What a chapter tells by the way, asked for in other words."""
    sentence, question, begun, wanted = FACTS[int(rng.integers(len(FACTS)))]
    colour, thing = (str(rng.choice(some)) for some in (COLOURS, THINGS))
    names = {"name": str(rng.choice(SURNAMES)), "colour": colour, "thing": thing}
    answers = tuple(names[one] for one in wanted.split())
    told, question = sentence.format(**names), question.format(**names)
    return Example(sources.filled(rng, length, [told], question, begun), answers, 8, share_said)


def next_line(sources: Sources, rng: np.random.Generator, length: int) -> Example:
    """The next line of a module, which uses a name from its beginning."""
    for lines, counts in _long_modules(sources, rng, length):
        ends = np.cumsum(counts)
        first = {
            name for i in range(len(lines)) if ends[i] < length // 5
            for name in re.findall(r"^(?:import|from|def|class|)\s*(\w{4,})\b", lines[i])
        }  # fmt: skip
        fits = [
            i for i in range(1, len(lines)) if 0.85 * length < ends[i - 1] <= length - 4
            and len(lines[i].strip()) > 16 and first & set(re.findall(r"\w+", lines[i]))
            and not lines[i].lstrip().startswith(("#", '"', "'"))
        ]  # fmt: skip
        if fits:
            at = int(rng.choice(fits))
            prompt = sources.ids("\n".join(lines[:at]) + "\n")
            return Example(prompt[-length:], (lines[at].strip(),), 28, first_line)
    raise SystemExit(f"no module is long enough for a prompt of {length} tokens")


def distant_edit(sources: Sources, rng: np.random.Generator, length: int) -> Example:
    """A function of a module, to be written with another name in it, as the first line says."""
    for lines, _ in _long_modules(sources, rng, length):
        text = "\n".join(lines)
        for node in _short_functions(text, rng):
            source = ast.get_source_segment(text, node) or ""
            names = [arg.arg for arg in node.args.args if arg.arg not in ("self", "cls")]
            counts = {name: len(re.findall(rf"\b{name}\b", source)) for name in names}
            named = [name for name, count in counts.items() if count > 2 and len(name) > 2]
            if not named or len(sources.ids(source)) > 110:
                continue
            old, new = named[0], str(rng.choice(THINGS))
            edited = re.sub(rf"\b{old}\b", new, source)
            head, body = edited.split("(", 1)
            note = f"In the function `{node.name}`, `{old}` is to be called `{new}`."
            ask = f"Write the function `{node.name}` again, changed as the note at the top demands."
            begun = f"{FENCE}python\n{head}("
            room = length - len(sources.asked(f"{note}\n{FENCE}python\n{FENCE}\n{ask}", begun)) - 16
            shown = _around(sources, lines, node, room)
            if shown is None:
                continue
            question = f"{note}\n{FENCE}python\n{shown}\n{FENCE}\n{ask}"
            new_tokens = min(120, len(sources.ids(body)) + 12)
            return Example(sources.asked(question, begun), (body,), new_tokens, likeness)
    raise SystemExit(f"no module is long enough for a prompt of {length} tokens")


def _long_modules(sources: Sources, rng, length: int) -> Iterator[tuple[list[str], list[int]]]:
    """Modules of more than `length` tokens in any order: their lines, and the tokens of each."""
    for index in rng.permutation(len(sources.modules)):
        text = sources.modules[index]
        if len(text) > 2 * length:
            lines = text.splitlines()
            counts = [len(sources.ids(line + "\n")) for line in lines]
            if sum(counts) > length + 64:
                yield lines, counts


def _short_functions(text: str, rng) -> list[ast.FunctionDef]:
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return []
    short = [node for node in nodes if 3 <= (node.end_lineno or 0) - node.lineno <= 9]
    names = [node.name for node in nodes]
    short = [node for node in short if names.count(node.name) == 1]
    return [short[i] for i in rng.permutation(len(short))]


def _around(sources: Sources, lines: list[str], node: ast.FunctionDef, room: int) -> str | None:
    """Lines around a function, nearly as many as there is room for; None where they are too few."""
    counts = np.cumsum([0, *(len(sources.ids(line + "\n")) for line in lines)])
    begin, end = node.lineno - 1, node.end_lineno or node.lineno
    if counts[-1] < room:
        return None
    last = int(np.searchsorted(counts, min(counts[-1], counts[end] + room // 2), "right")) - 1
    first = int(np.searchsorted(counts, counts[last] - room, "left"))
    return "\n".join(lines[first:last]) if first <= begin and last >= end else None


TASKS: dict[str, Callable[[Sources, np.random.Generator, int], Example]] = {
    "needle": needle, "keys": keys, "several": several, "variables": variables,
    "frequent": frequent, "chapter": chapter, "next_line": next_line, "distant_edit": distant_edit,
}  # fmt: skip


def examples_of(
    sources: Sources, task: str, length: int, samples: range, seed: int, half: str
) -> list[Example]:
    """Each sample has a seed, so more of them may follow later."""
    place = [seed, HALVES.index(half), list(TASKS).index(task), length]
    return [
        TASKS[task](sources, np.random.default_rng([*place, index]), length) for index in samples
    ]

# SPDX-License-Identifier: Apache-2.0
"""Texts that are read once: a question about a text, with and without a prefix in a file.

In fresh processes, in turn, all programs kept: until the first token of an answer. In one process:
questions about one text, and a chat about it against one that reads all again at each turn. The
texts that are said are held against each other; where they part, the last line says so and the exit
code is 1.

    python -m benchmarks prefixes --model FILE --prompt BOOK.txt --out benchmarks/results/cpu
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tsjax
from benchmarks import report
from tsjax.base.input_files import read_text
from tsjax.base.model_config import WEIGHTS
from tsjax.base.telling import seconds_of_process
from tsjax.measure.timing import ratios, summary

READING, FROM_FILE = "reading", "prefix file"
QUESTIONS = (
    "\n\nQuestion: Who tells this story?\nAnswer:",
    "\n\nQuestion: Where does it take place?\nAnswer:",
    "\n\nQuestion: Who is the letter written to?\nAnswer:",
    "\n\nQuestion: What does the narrator want to find?\nAnswer:",
    "\n\nQuestion: What is the weather like?\nAnswer:",
)
TURNS = ("Who tells this story?", "Where is he?", "What does he want?", "Whom does he write to?")
Said = list[int]


def main(argv: Sequence[str]) -> int:
    parser = report.parser_of("prefixes", __doc__)
    parser.add_argument("--model", required=True, help="a GGUF file, or a HuggingFace folder")
    parser.add_argument("--weights", default="stored", choices=WEIGHTS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prompt", required=True, help="a file of text")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, its first ones")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--turns", type=int, default=len(TURNS))
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--file", help="as a fresh process: ask a question, with this file if any")
    args = parser.parse_args(argv)
    model = tsjax.load(args.model, dtype=args.dtype, weights=args.weights)
    text = model.tokenizer.encode(read_text(args.prompt))[: args.tokens]
    if args.file is not None:
        print(json.dumps(asked_here(model, text, args.file or None, args.answer)))
        return 0
    with tempfile.TemporaryDirectory(prefix="tsjax-prefixes-") as place:
        file = os.path.join(place, "text.prefix")
        begun = time.perf_counter()
        read = tsjax.read(model, text)
        seconds = {"reading": time.perf_counter() - begun}
        begun = time.perf_counter()
        read.save(file)
        seconds["saving"] = time.perf_counter() - begun
        fresh = in_fresh_processes(argv, file, args.rounds)
        questions = of_questions(model, text, file, args)
        document = {
            "model": Path(args.model).stem, "weights": args.weights, "dtype": args.dtype,
            "tokens": len(text), "answer": args.answer, "rounds": args.rounds,
            "file_bytes": os.path.getsize(file), "seconds": seconds, "fresh": fresh,
            "questions": questions, "chat": of_chat(model, text, args),
        }  # fmt: skip
    report.write(document, args.out, f"prefixes-{document['model']}")
    parted = [name for name in ("fresh", "questions", "chat") if not document[name]["same_text"]]
    if parted:
        print(f"texts parted: {', '.join(parted)}", file=sys.stderr)
    return 1 if parted else 0


def asked_here(
    model: tsjax.Model, text: list[int], file: str | None, answer: int
) -> dict[str, Any]:
    """The first question, and seconds: of loading the prefix, until the first token since the model
    was there, and since the process began."""
    begun, prefix = time.perf_counter(), None
    if file is not None:
        prefix = tsjax.read(model, prefix=file)
    loading = time.perf_counter() - begun
    said: Said = []
    first = whole = 0.0
    for chunk in tsjax.stream(
        model, text + model.tokenizer.encode(QUESTIONS[0]), prefix=prefix, max_new_tokens=answer
    ):
        if not said:
            first, whole = time.perf_counter() - begun, seconds_of_process()
        said += chunk.tokens[0].tolist()
    return {"loading": loading, "first": first, "process": whole, "said": said}


def in_fresh_processes(argv: Sequence[str], file: str, rounds: int) -> dict[str, Any]:
    ways = {READING: "", FROM_FILE: file}
    seconds: dict[str, dict[str, list[float]]] = {
        way: {"loading": [], "first": [], "process": []} for way in ways
    }
    said = []
    for number in range(-1, rounds):
        for way in ways if number % 2 else reversed(ways):
            command = [sys.executable, "-m", "benchmarks", "prefixes", *argv, "--file", ways[way]]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            said.append(found.pop("said"))
            for name, one in found.items() if number >= 0 else ():
                seconds[way][name].append(one)
            told = ", ".join(f"{name} {one:.2f} s" for name, one in found.items())
            print(f"round {number + 1}, {way}: {told}", file=sys.stderr)
    both = [seconds[way] for way in ways]
    return {
        "same_text": all(one == said[0] for one in said),
        "ways": {
            way: {name: summary(all_of) for name, all_of in of.items()}
            for way, of in seconds.items()
        },
        "reading_over_prefix": {
            name: ratios(*(one[name] for one in both)) for name in ("first", "process")
        },
    }


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    found = call()
    return time.perf_counter() - begun, found


def of_questions(model: tsjax.Model, text: list[int], file: str, args: Any) -> dict[str, Any]:
    """Questions about one text, each read with it, or all after its file was loaded once."""
    ids = [text + model.tokenizer.encode(one) for one in QUESTIONS[: args.questions]]
    asked: dict[str, Any] = {READING: [], FROM_FILE: []}
    loading, prefix = _timed(lambda: tsjax.read(model, prefix=file))
    for known in (None, prefix):  # has the programs
        tsjax.generate(model, ids[0][-64:], prefix=known, max_new_tokens=args.answer)
    for way, known in ((READING, None), (FROM_FILE, prefix)):
        for one in ids:
            how: dict[str, Any] = {"prefix": known, "max_new_tokens": args.answer}
            taken, found = _timed(lambda one=one, how=how: tsjax.generate(model, one, **how))
            asked[way].append((taken, found.tokens[0].tolist()))
            print(f"a question, {way}: {taken:.2f} s", file=sys.stderr)
    return compared(asked[READING], asked[FROM_FILE]) | {"loading": loading}


def of_chat(model: tsjax.Model, text: list[int], args: Any) -> dict[str, Any]:
    """Turns of a conversation, and the same messages read from the first one on at each turn."""
    system = "Answer questions about this text.\n\n" + model.tokenizer.decode(text)
    how: dict[str, Any] = {"max_new_tokens": args.answer, "method": "autoregressive"}
    talk = tsjax.Conversation(model, system=system, **how)
    anew, reused = [], []
    for turn in TURNS[: args.turns]:
        messages = [*talk.messages, {"role": "user", "content": turn}]
        taken, found = _timed(lambda of=messages: tsjax.generate(model, messages=of, **how))
        anew.append((taken, found.text))
        taken, pieces = _timed(lambda turn=turn: [*talk.say(turn)])
        reused.append((taken, "".join(pieces)))
        print(f"a turn, reading: {anew[-1][0]:.2f} s, reused: {taken:.2f} s", file=sys.stderr)
    return compared(anew, reused)


def compared(reading: list[tuple[float, Any]], known: list[tuple[float, Any]]) -> dict[str, Any]:
    """Each is a list of seconds and what was said."""
    return {
        "same_text": all(a[1] == b[1] for a, b in zip(reading, known, strict=True)),
        "reading_seconds": [taken for taken, _ in reading],
        "known_seconds": [taken for taken, _ in known],
    }

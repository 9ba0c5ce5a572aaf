# SPDX-License-Identifier: Apache-2.0
"""tsjax demo: plain decoding and TokenSwift side by side, then a table that compares them.

Knows terminals, colours and how to lay out text. Does not know how tokens are made: it advances two
streams of generation.py and shows what they yield, and what both took. Layout is done by pure
functions from what was made so far to lines; only `Screen` writes escape codes that move the
cursor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import os
import shutil
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import jax

from tsjax.base.generation_config import GenerationConfig
from tsjax.decoding.method import Measured, Method
from tsjax.decoding.tree import SOURCES
from tsjax.files.checkpoint import Model, load
from tsjax.files.tokenizer import Detokenizer, encode
from tsjax.files.weight_files import EMBEDDED
from tsjax.host.beside import BESIDE
from tsjax.host.generation import stream
from tsjax.host.interrupt import Interrupt
from tsjax.host.result import RunStats, StreamChunk
from tsjax.measure.bandwidth import read_rate
from tsjax.methods import Auto, Autoregressive
from tsjax.methods.devices import plain_bytes

METHOD = Auto()  # of the right column
# The first two are read with pleasure. Without a penalty the greedy text of a small model goes in
# circles, which is where drafts pay on any machine.
STYLES: dict[str, dict[str, Any]] = {
    "penalised": {"repetition_penalty": 1.1, "repetition_window": 256},
    "sampled": {"do_sample": True, "temperature": 0.8, "min_p": 0.1},
    "greedy": {},
}
PROMPT = "Once upon a time"
TOKENS = 2000

# What each of tsjax.methods.SOURCES is called here, and its colour: green, yellow, cyan.
NAMES = {"model": "model", "ngrams": "n-grams", "suffix": "suffix"}
COLOURS = {"model": "32", "ngrams": "33", "suffix": "36"}
OWN = ""  # a token that nobody drafted
BETWEEN = " | "
# A warm-up's chunks of steps with one method: the loop is entered from what came before, and from
# itself. A rehearsal has three: drafts, plain decoding, and drafts again.
WARM_UP_CHUNKS, REHEARSED = 2, 3
NOISE = 0.03  # two runs of the same work differ by that share of their time
EXCERPT, LEAD = 800, 60  # characters of a text that are printed, and of a long prompt
SENTENCE_WIDTH = 76  # of sentences

Piece = tuple[str, str]  # text, and its source: one of SOURCES or OWN
Glyph = tuple[str, str]  # what stands in one place of a line (or in two, a wide character); source


@dataclasses.dataclass
class Column:
    """One method's run so far.

    Attributes:
      pieces: the text, the prompt's first.
      seconds: of decoding.
      finish_reason: None while it runs.
      elapsed: seconds spent inside the stream.
    """

    name: str
    chunks: Iterator[StreamChunk]
    writer: Detokenizer
    pieces: list[Piece]
    tokens: list[int] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    stats: RunStats | None = None
    finish_reason: str | None = None
    elapsed: float = 0.0

    def advance(self) -> None:
        began = time.perf_counter()
        chunk = next(self.chunks)
        self.elapsed += time.perf_counter() - began
        self.add(chunk)
        # Not stats.decode_seconds, which leaves out what the host does between two chunks, as
        # going on with another method is. The prompt takes both as long, and no compiling counts.
        left_out = chunk.stats.prefill_seconds + chunk.stats.compile_seconds
        self.seconds = max(self.elapsed - left_out, 0.0)

    def add(self, chunk: StreamChunk) -> None:
        source = OWN
        for token, mask in zip(chunk.tokens[0].tolist(), chunk.sources[0].tolist(), strict=True):
            source = source_of(mask)
            self.tokens.append(token)
            self.pieces.append((printable(self.writer.push([token])), source))
        self.stats, self.finish_reason = chunk.stats, chunk.finish_reason[0]
        if self.finish_reason is not None:
            self.pieces.append((printable(self.writer.flush()), source))

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.stats.tokens_per_step if self.stats else 0.0


def source_of(mask: int) -> str:
    """The first source of a token, from the bits of StreamChunk.sources."""
    return next((source for bit, source in enumerate(SOURCES) if mask >> bit & 1), OWN)


# --- the run ------------------------------------------------------------------------------------


def run_demo(
    path: str,
    *,
    prompt: str = PROMPT,
    tokens: int = TOKENS,
    seed: int = 0,
    settings: Sequence[str] = tuple(STYLES),
    method: Method = METHOD,
    plain: bool = False,
    out: TextIO,
) -> int:
    """The whole demo with the model in `path`, once for each of `settings`; returns the exit code.

    0 where both methods returned the same tokens, 1 where they did not, 130 after Ctrl-C. Stop
    tokens are barred, so that both columns have `tokens` tokens.
    """
    same = dict(max_new_tokens=tokens, min_new_tokens=tokens, seed=seed)
    configs = {name: GenerationConfig(**same, **STYLES[name]) for name in STYLES}
    model = load(path, dtype="float32", drafter=EMBEDDED if path == EMBEDDED else None)
    for name in settings:  # what is wrong is said before anything is printed
        start(model, prompt, configs[name], method)
    live = can_redraw(plain, out.isatty(), os.environ)
    print(f"{path}: {model.num_params:,} parameters, on {jax.devices()[0].device_kind}", file=out)

    for name in settings:
        print(f"\n{describe(name)}\n", file=out, flush=True)
        warm_up(model, prompt, configs[name], method, out)
        columns = start(model, prompt, configs[name], method)
        with Screen(out) if live else contextlib.nullcontext() as screen:
            interrupted = race(columns, screen.draw if screen else lambda columns: None)
        if not live:
            text = "".join(text for text, _ in columns[-1].pieces)
            print(clean(excerpt(text), out), "\n", file=out)
        print("\n".join(table(columns)), file=out, flush=True)
        if not same_tokens(columns):
            return 1
        if interrupted:
            return 130
        given = len(encode(model.tokenizer, prompt))
        nbytes = plain_bytes(model.cfg, given + len(columns[0].tokens) / 2)
        for line in (verdict(columns), worth(columns[0], nbytes, read_rate(nbytes))):
            print(f"\n{textwrap.fill(line, SENTENCE_WIDTH)}", file=out, flush=True)
    return 0


def warm_up(
    model: Model, prompt: str, config: GenerationConfig, method: Method, out: TextIO
) -> None:
    """Compiles all that the columns will run."""
    began = time.perf_counter()
    print("Compiling both methods ...", end=" ", file=out, flush=True)
    moves = method.chooses

    def rehearse() -> None:
        columns = start(model, prompt, config, Rehearsal(method) if moves else method)
        for column, methods in zip(columns, (1, REHEARSED if moves else 1), strict=True):
            for chunk in itertools.islice(column.chunks, methods * WARM_UP_CHUNKS):
                if chunk.finish_reason == ["interrupted"]:
                    raise KeyboardInterrupt

    rehearse()
    if BESIDE.is_working:  # what is compiled beside the first rehearsal is there for the next
        BESIDE.finish()
        rehearse()
    print(f"{time.perf_counter() - began:.0f} s", file=out, flush=True)


@dataclasses.dataclass(frozen=True)
class Rehearsal(Method):
    """Goes on with plain decoding and with drafts in turn, as `method` may: both get compiled."""

    method: Method

    @property
    def wants_costs(self) -> bool:
        return self.method.wants_costs

    def next(self, measured: Measured) -> Method:
        current, plain = measured.current, Autoregressive()
        if current is not None and not measured.steps:  # the first chunk
            return current
        drafts = self.method.next(measured._replace(current=None))
        return plain if current not in (None, plain) else drafts


def describe(name: str) -> str:
    values = [f"{key}={value}" for key, value in STYLES[name].items()]
    return f"{name.capitalize()} ({', '.join(values)})" if values else name.capitalize()


def start(
    model: Model, prompt: str, config: GenerationConfig, method: Method
) -> tuple[Column, Column]:
    """Plain decoding and `method`, nothing of them computed yet."""
    ids, shown = encode(model.tokenizer, prompt).tolist(), printable(prompt)
    shown = shown if len(shown) <= LEAD else f"... {shown[-LEAD:]}"

    def column(name: str, method: Any) -> Column:
        chunks = stream(model, ids, config=config, method=method, on_interrupt="return")
        writer = Detokenizer(model.tokenizer, context=ids)
        return Column(name, chunks, writer, [(shown, OWN)])

    return column("plain decoding", Autoregressive()), column("TokenSwift", method)


def race(columns: Sequence[Column], draw: Callable[[Sequence[Column]], None]) -> bool:
    """Runs both to their ends; returns whether Ctrl-C ended them early.

    The next turn is that of the column which has used less time: both clocks go side by side.
    """
    with Interrupt() as interrupt:
        while running := [column for column in columns if column.finish_reason is None]:
            column = min(running, key=operator.attrgetter("seconds"))
            column.advance()
            draw(columns)
            if interrupt.requested or column.finish_reason == "interrupted":
                return True
    return False


def same_tokens(columns: Sequence[Column]) -> bool:
    """Whether they agree as far as both have come; whole runs must agree in length, too."""
    left, right = (column.tokens for column in columns)
    if any(column.finish_reason in (None, "interrupted") for column in columns):
        shorter = min(len(left), len(right))
        left, right = left[:shorter], right[:shorter]
    return left == right


# --- layout: from what was made so far to lines -------------------------------------------------


def printable(text: str) -> str:
    """Text without control and formatting characters; newlines stay, a tab becomes a space."""
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    text = text.replace("\t", " ")
    return "".join(c for c in text if c == "\n" or unicodedata.category(c) not in hidden)


def char_width(char: str) -> int:
    """How many places of a terminal's line a character takes."""
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def text_width(text: str) -> int:
    return sum(map(char_width, text))


def line_width(line: Iterable[Glyph]) -> int:
    return sum(text_width(text) for text, _ in line)


def wrap(pieces: Iterable[Piece], width: int) -> list[list[Glyph]]:
    """Breaks text into lines of at most `width` places, between words where that is possible."""
    lines: list[list[Glyph]] = [[]]
    used = 0
    for char, source in ((char, source) for text, source in pieces for char in text):
        line, size = lines[-1], char_width(char)
        if char == "\n" or (char == " " and used == width):  # the break stands for the space
            lines.append([])
            used = 0
            continue
        if size == 0 and line:  # an accent belongs to the letter before it
            line[-1] = (line[-1][0] + char, line[-1][1])
            continue
        while used and used + size > width:
            lines.append(take_last_word(lines[-1]))
            used = line_width(lines[-1])
        lines[-1].append((char, source))
        used += size
    return lines


def take_last_word(line: list[Glyph]) -> list[Glyph]:
    """Removes what follows the last space; nothing where there is no space."""
    start = next((i for i in range(len(line), 0, -1) if line[i - 1][0] == " "), len(line))
    word = line[start:]
    del line[start:]
    return word


def paint(line: Iterable[Glyph], colour: bool) -> str:
    """A line as text; each run of drafted tokens is one coloured stretch."""
    painted = []
    for source, cells in itertools.groupby(line, key=operator.itemgetter(1)):
        text = "".join(text for text, _ in cells)
        painted.append(f"\x1b[{COLOURS[source]}m{text}\x1b[0m" if colour and source else text)
    return "".join(painted)


def side_by_side(pair: Sequence[list[Glyph]], half: int, colour: bool) -> str:
    left, right = pair
    return paint(left, colour) + " " * (half - line_width(left)) + BETWEEN + paint(right, colour)


def frame(columns: Sequence[Column], width: int, height: int, colour: bool = True) -> list[str]:
    """The whole picture: titles, the last lines of both texts, figures, the legend."""
    half = max(2, (width - len(BETWEEN)) // 2)
    titles = [first_line(column.name, half) for column in columns]
    figures = [first_line(running_figures(column), half) for column in columns]
    key = [paint(line, colour) for line in wrap(legend(), width)]
    texts = [wrap(column.pieces, half) for column in columns]
    free = max(1, height - 4 - len(key))  # titles, two rules, figures
    count = min(free, max(map(len, texts)))
    texts = [lines[-count:] + [[]] * (count - len(lines)) for lines in texts]
    rule = "-" * (2 * half + len(BETWEEN))
    return [
        side_by_side(titles, half, colour), rule,
        *(side_by_side(pair, half, colour) for pair in zip(*texts, strict=True)),
        rule, side_by_side(figures, half, colour), *key,
    ]  # fmt: skip


def first_line(text: str, width: int) -> list[Glyph]:
    return wrap([(text, OWN)], width)[0]


def running_figures(column: Column) -> str:
    return f"{column.tokens_per_second:.0f} tokens/s, {column.tokens_per_step:.2f} per step"


def legend() -> list[Piece]:
    names = [piece for source in SOURCES for piece in ((" ", OWN), (NAMES[source], source))]
    return [("Accepted drafts:", OWN), *names, ("; without colour: own tokens", OWN)]


def excerpt(text: str) -> str:
    more = len(text) - EXCERPT
    return f"{text[:EXCERPT]} ... ({more:,} characters more)" if more > 0 else text


def table(columns: Sequence[Column]) -> list[str]:
    """The comparison, one line for each figure; at most 60 places wide."""
    common = min(len(column.tokens) for column in columns)
    verdict = "yes" if same_tokens(columns) else "NO"
    if not common:
        verdict = "-"
    elif verdict == "yes" and any(len(column.tokens) > common for column in columns):
        verdict = f"yes, the first {common}"
    rows = [
        ("", [column.name for column in columns]),
        ("same tokens", ["", verdict]),
        ("tokens", [f"{len(column.tokens):,}" for column in columns]),
        ("time of decoding", [f"{column.seconds:.2f} s" for column in columns]),
        ("tokens/s", [f"{column.tokens_per_second:.1f}" for column in columns]),
        ("speed-up", [ratio(column, columns[0]) for column in columns]),
        ("tokens per step", [f"{column.tokens_per_step:.2f}" for column in columns]),
        ("accepted drafts", [acceptance(column.stats) for column in columns]),
    ]
    for source in SOURCES:
        name = f"  from {NAMES[source]}"
        rows.append((name, [share(column.stats, source) for column in columns]))
    return [f"{label:18}{cells[0]:>16}{cells[1]:>26}".rstrip() for label, cells in rows]


def ratio(column: Column, plain: Column) -> str:
    known = column.tokens and plain.tokens
    return f"{column.tokens_per_second / plain.tokens_per_second:.2f}x" if known else "-"


def verdict(columns: Sequence[Column]) -> str:
    """What the speed-up means; no more than the clock can tell."""
    plain, drafted = columns
    if not (plain.tokens and drafted.tokens):
        return "Nothing was decoded."
    speed = drafted.tokens_per_second / plain.tokens_per_second
    gave_up = drafted.stats is not None and drafted.stats.gave_up
    if speed > 1 + NOISE and drafted.tokens_per_step > 1 + NOISE:
        each = f"a pass of the model gave {drafted.tokens_per_step:.2f} tokens"
        return f"{drafted.name} was {speed:.2f} times as fast: {each}."
    unlikely = "no drafts were found likely enough to pay for their rows"
    went_on = f"{drafted.name} went on with plain decoding"
    if speed >= 1 - NOISE:
        why = f"{unlikely}, and {went_on}" if gave_up else "drafts took what they saved"
        return f"About as fast, as the clock can tell: {why}."
    slower = f"{drafted.name} took {1 / speed:.2f} times as long"
    if gave_up:
        return f"{slower}: {unlikely}. Trying took that time; then {went_on}."
    return f"{slower}: drafts took more than they saved."


def worth(plain: Column, nbytes: float, rate: float) -> str:
    """Plain decoding against the time in which a step's bytes can be read."""
    if not plain.seconds:
        return "Nothing was decoded."
    taken, least = plain.seconds / len(plain.tokens), nbytes / rate
    return (
        f"Plain decoding took {1e3 * taken:.2f} ms per token. To read weights and cache once, "
        f"{nbytes / 1e6:,.0f} MB, takes {1e3 * least:.2f} ms, {least / taken:.0%} of that, at "
        f"{rate / 1e9:,.0f} GB/s, measured here by summing an array as large."
    )


def acceptance(stats: RunStats | None) -> str:
    if stats is None or not stats.drafted:
        return "-"
    rate = stats.accepted / stats.drafted
    return f"{stats.accepted:,} of {stats.drafted:,} ({rate:.0%})"


def share(stats: RunStats | None, source: str) -> str:
    """A source's share of the accepted drafts; one that several sources had counts for each."""
    if stats is None or not stats.accepted:
        return "-"
    return f"{stats.accepted_by_source[source] / stats.accepted:.0%}"


# --- the terminal -------------------------------------------------------------------------------


def can_redraw(plain: bool, terminal: bool, environ: Mapping[str, str]) -> bool:
    """Whether escape codes are wanted and understood."""
    dumb = environ.get("TERM", "dumb") == "dumb"
    return terminal and not plain and not dumb and not environ.get("NO_COLOR")


def clean(text: str, out: TextIO) -> str:
    """`text` with ? for what the output's encoding does not have."""
    encoding = out.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


class Screen:
    """Draws frames over one another. The cursor is hidden while it is entered."""

    def __init__(self, out: TextIO):
        self._out, self._drawn, self._size = out, 0, None

    def __enter__(self) -> Screen:
        self._out.write("\x1b[?25l")
        return self

    def __exit__(self, *_) -> None:
        self._out.write("\x1b[?25h\n")
        self._out.flush()

    def draw(self, columns: Sequence[Column]) -> None:
        size = shutil.get_terminal_size()
        # The last line stays free: the cursor waits there, and nothing scrolls.
        lines = frame(columns, size.columns, size.lines - 1)[: max(1, size.lines - 1)]
        begin = f"\x1b[{self._drawn}A\r" if self._drawn else ""
        if self._size not in (None, size):  # lines have moved: begin on an empty screen
            begin = "\x1b[2J\x1b[H"
        text = begin + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J"
        self._out.write(clean(text, self._out))
        self._out.flush()
        self._drawn, self._size = len(lines), size

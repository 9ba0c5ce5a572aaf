# SPDX-License-Identifier: Apache-2.0
"""tsjax demo: the layout on made-up text, and the command in a pipe and in a terminal."""

import dataclasses
import io
import os
import re
import signal
import types
from collections.abc import Sequence

import helpers
import hf_fixtures
import numpy as np
import pytest

import tsjax
from tsjax.__main__ import main
from tsjax.commands import side_by_side as demo
from tsjax.commands.side_by_side import OWN, Column, frame, paint, text_width, wrap

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOURED = re.compile(r"\x1b\[\d+m[^\x1b]*\x1b\[0m")
MIXED = [
    ("Once upon a time, ", OWN),
    ("there was ", "model"),
    ("日本語 の文 ", "ngrams"),
    ("e\u0301tude 😀😀\n\nextraordinarilylongwordwithoutspaces", "suffix"),
    (" end", OWN),
]
STATS = {"prompt_tokens": (4,), "prefill_seconds": 0.1, "decode_seconds": 1.0}


def text_of(lines) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def stats(new: int, steps: int, **changes) -> tsjax.results.RunStats:
    known = {**STATS, **changes}
    return tsjax.results.RunStats(new_tokens=(new,), steps=(steps,), computed_tokens=new, **known)


DRAFTS = {
    "drafted": 80,
    "accepted_lengths": (0, 0, 10),
    "accepted_by_source": {"model": 15, "ngrams": 5, "suffix": 2},
}


def column(
    name="plain decoding", pieces=MIXED, tokens: Sequence[int] = range(30), seconds=1.5, **changes
) -> Column:
    made = Column(name, iter(()), None, list(pieces), list(tokens), seconds, stats(30, 30))  # type: ignore[arg-type]
    for field, value in {"finish_reason": "length", **changes}.items():
        setattr(made, field, value)
    return made


def pair(**changes) -> tuple[Column, Column]:
    swift = {"seconds": 0.5, "stats": stats(30, 10, **DRAFTS), **changes}
    return column(), column("TokenSwift", **swift)


# --- layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 10, 38, 200])
def test_no_line_is_too_wide_and_no_letter_is_lost(width):
    lines = wrap(MIXED, width)
    assert max(map(demo.line_width, lines)) <= width
    whole = "".join(text for text, _ in MIXED)
    assert "".join(text_of(lines)).replace(" ", "") == re.sub(r"\s", "", whole)
    assert text_of(wrap([("the old house", OWN)], 9)) == ["the old ", "house"]
    assert text_of(wrap([("a\n\nb", OWN)], 9)) == ["a", "", "b"]
    assert wrap([("e", "model"), ("\u0301", "suffix")], 9) == [[("e\u0301", "model")]]


def test_each_token_has_the_colour_of_its_source():
    line = [("a", OWN), ("b", "model"), ("c", "model"), ("d", "suffix")]
    assert paint(line, True) == "a\x1b[32mbc\x1b[0m\x1b[36md\x1b[0m"
    assert paint(line, False) == "abcd"
    assert [demo.source_of(mask) for mask in range(8)] == [
        OWN, "model", "ngrams", "model", "suffix", "model", "ngrams", "model",
    ]  # fmt: skip
    assert set(demo.COLOURS) == set(demo.NAMES) == set(tsjax.methods.SOURCES)
    assert demo.printable("a\x1b[31mb\tc\r\n\u202ed\u200d\x9b") == "a[31mb c\nd"


@pytest.mark.parametrize(("height", "width"), [(8, 80), (50, 133)])
def test_frame_fits_and_closes_its_colours(width, height):
    lines = frame(pair(), width, height)
    assert len(lines) <= height
    for line in lines:
        assert "\x1b" not in COLOURED.sub("", line)
        assert text_width(ESCAPE.sub("", line)) <= width
    plain = frame(pair(), width, height, colour=False)
    assert plain == [ESCAPE.sub("", line) for line in lines]
    bars = {text_width(line[: line.index(" | ")]) for line in plain if " | " in line}
    assert len(bars) == 1  # the columns stand straight, also after wide characters
    assert re.search(r"20 tokens/s, 1.00 per step +\| 60 tokens/s, 3.00 per step", plain[-2])


def test_clock_counts_neither_prompt_nor_compiling(monkeypatch):
    now = iter([10.0, 14.0, 20.0, 21.5])  # 4 s for the first chunk, 1.5 s for the second
    monkeypatch.setattr(demo.time, "perf_counter", lambda: next(now))
    known = [stats(1, 1, compile_seconds=2.5, prefill_seconds=1.0)]
    known.append(dataclasses.replace(known[0], compile_seconds=3.0))
    empty = [np.array([], np.int32)]
    parts = {"tokens": empty, "sources": empty, "finish_reason": [None]}
    chunks = [types.SimpleNamespace(**parts, stats=stats) for stats in known]
    made = column(seconds=0.0, chunks=iter(chunks))
    made.advance()
    assert made.seconds == 0.5
    made.advance()
    assert made.seconds == 1.5


# --- the table -------------------------------------------------------------------------------


def row(lines, label) -> list[str]:
    (line,) = [line for line in lines if line.strip().startswith(label)]
    return re.split(r"\s{2,}", line.strip())[1:]


@pytest.mark.parametrize(
    ("seconds", "steps", "begins"),
    [
        (0.5, 10, "TokenSwift was 3.00 times as fast"),
        (1.46, 20, "About as fast"),
        (3.0, 20, "TokenSwift took 2.00 times as long"),
    ],
)
def test_verdict_says_no_more_than_the_clock_can_tell(seconds, steps, begins):
    swift = column("TokenSwift", seconds=seconds, stats=stats(30, steps, **DRAFTS))
    assert demo.verdict((column(), swift)).startswith(begins)


@pytest.mark.parametrize(
    ("tokens", "finish_reason", "verdict"),
    [
        ([*range(29), 7], "length", "NO"),
        (range(29), "length", "NO"),
        (range(20), "interrupted", "yes, the first 20"),
        ([], None, "-"),
    ],
)
def test_tokens_are_really_compared(tokens, finish_reason, verdict):
    columns = pair(tokens=list(tokens), finish_reason=finish_reason)
    assert row(demo.table(columns), "same tokens") == [verdict]
    assert demo.same_tokens(columns) == (verdict != "NO")


# --- the command -----------------------------------------------------------------------------

# A small step: most of the time goes into compiling it, once for all tests here.
FEW = ["--method-options", "tree=(1,)", "draft_passes=1", "num_ngrams=1", "suffix_length=1"]
FEW += ["draft_budget=32"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("demo") / "hf"
    hf_fixtures.make(folder, vocab_size=len(helpers.TOKENS), max_position_embeddings=4096)
    return helpers.save_tokenizer(folder)


@pytest.mark.wide
@pytest.mark.parametrize("name", demo.STYLES)
def test_one_of_them_alone(name, checkpoint, capsys):
    assert main(["demo", "--model", checkpoint, "--tokens", "8", f"--{name}", *FEW]) == 0
    out = capsys.readouterr().out
    assert out.count("same tokens") == 1 and demo.describe(name) in out
    assert "\x1b" not in out and "\r" not in out and " GB/s" in out


@pytest.mark.parametrize("path", [tsjax.EMBEDDED, "another"])
def test_the_embedded_model_is_shown_with_its_drafter(path, monkeypatch):
    asked = {}

    def load(path, **how):
        asked.update(how)
        raise LookupError(path)

    monkeypatch.setattr(demo, "load", load)
    with pytest.raises(LookupError):
        demo.run_demo(path, out=io.StringIO())
    assert asked["drafter"] == (tsjax.EMBEDDED if path == tsjax.EMBEDDED else None)


def test_ctrl_c_stops_both_and_shows_the_table(checkpoint, capsys, monkeypatch):
    advance, turns = Column.advance, []

    def interrupted(self):
        turns.append(self.name)
        if len(turns) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        advance(self)

    monkeypatch.setattr(Column, "advance", interrupted)
    assert main(["demo", "--model", checkpoint, "--tokens", "900", "--plain", *FEW]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert len(turns) == 4 and row(lines, "same tokens")[0].startswith("yes, the first")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "0"], "max_new_tokens=0"),
        (["--model", "no/such/folder/here"], "no/such/folder/here"),
        (["--method-options", "depth=3"], "depth"),
        (["--tokens", "5000"], "4096"),
    ],
)
def test_wrong_flags_are_one_line(flags, message, checkpoint, capsys):
    flags = flags if "--model" in flags else ["--model", checkpoint, *flags]
    try:
        code = main(["demo", *flags])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_when_to_redraw():
    assert demo.can_redraw(False, True, {"TERM": "xterm"})
    for plain, terminal, environ in (
        (True, True, {"TERM": "xterm"}),
        (False, False, {"TERM": "xterm"}),
        (False, True, {"TERM": "xterm", "NO_COLOR": "1"}),
        (False, True, {"TERM": "dumb"}),
    ):
        assert not demo.can_redraw(plain, terminal, environ)

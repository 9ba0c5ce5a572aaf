# SPDX-License-Identifier: Apache-2.0
"""What is at work is told: to functions, in lines, in place on a terminal. No test waits."""

import contextlib
import io
import re
import sys
import threading

import hf_fixtures
import jax
import pytest

import tsjax
from tsjax.__main__ import main
from tsjax.base import line_writer, telling
from tsjax.base.line_writer import LineWriter, told_as, told_on_stderr
from tsjax.base.telling import Progress, beside, doing, hearing, listening
from tsjax.files import huggingface


class Stream(io.StringIO):
    """A pipe, or a terminal: what is on its last line."""

    def __init__(self, terminal: bool = False):
        super().__init__()
        self.isatty = lambda: terminal

    def take(self) -> str:
        said = self.getvalue()
        self.truncate(0)
        self.seek(0)
        return said


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(line_writer, "SECONDS_UNTOLD", 1.0)
    monkeypatch.setattr(line_writer, "SECONDS_BETWEEN", 2.0)
    return Clock()


@contextlib.contextmanager
def told(out: Stream, clock: Clock):
    """What a look has written after some seconds."""
    writer = LineWriter(out, clock)
    with hearing(writer.hear, clock) as works:

        def after(seconds: float) -> str:
            clock.now += seconds
            writer.look(works)
            return out.take()

        yield after, writer


# --- works --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress("loading", 1_234_000_000, 2_500_000_000, "bytes"), "loading 1.2 of 2.5 GB"),
        (Progress("loading", 500_000, 269_000_000, "bytes"), "loading 0 of 269 MB"),
        (Progress("loading", None, 2_500_000_000, "bytes"), "loading 2.5 GB"),
        (Progress("reading", 4096, 16_000, "tokens"), "reading 4,096 of 16,000 tokens"),
        (Progress("reading", 12), "reading 12"),
        (Progress("compiling"), "compiling"),
        (
            Progress("measuring", beside=Progress("compiling", 2, 5)),
            "measuring; compiling 2 of 5 beside the run",
        ),
    ],
)
def test_progress_in_words(progress, text):
    assert str(progress) == text


def test_a_listener_hears_of_the_innermost_work_and_then_of_the_outer_one():
    heard = []
    with listening(heard.append):
        with doing("loading") as outer, doing("rounding", 3, "files") as inner:
            inner.done(2)
        with pytest.raises(ZeroDivisionError), doing("failing"):
            _ = 1 / 0
        with listening(None), doing("unheard"):
            pass
    with doing("after") as nobody:
        nobody.done(1)
    outer.done(1)  # a work that has ended says nothing more
    assert [*map(str, heard)] == [
        "loading", "rounding 3 files", "rounding 2 of 3 files", "loading", "failing",
    ]  # fmt: skip


def test_what_runs_beside_is_told_from_any_thread():
    heard = []
    with listening(heard.append), doing("measuring") as work:
        for given in (("compiling", 2, 5), (None,)):
            thread = threading.Thread(target=beside, args=given)
            thread.start()
            thread.join()
            work.done(1)
    assert [*map(str, heard)] == [
        "measuring", "measuring 1; compiling 2 of 5 beside the run", "measuring 1",
    ]  # fmt: skip


def test_threads_hear_of_their_own_works():
    heard = {name: [] for name in "ab"}
    both = threading.Barrier(2)

    def work(name):
        with listening(heard[name].append), doing(name):
            both.wait()

    threads = [threading.Thread(target=work, args=name) for name in heard]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: [*map(str, found)] for name, found in heard.items()} == {"a": ["a"], "b": ["b"]}


# --- lines --------------------------------------------------------------------------------------


def test_lines_in_a_pipe(clock):
    with told(Stream(), clock) as (after, writer):
        with doing("loading", 300, "files") as work:
            assert after(0.9) == ""
            work.done(1)
            assert after(0.2) == "[loading 1 of 300 files]\n"
            assert after(1.5) == "" and after(0.5) == "[loading 1 of 300 files]\n"
            clock.now += 100
            assert after(0) != "" and after(9) == "" and after(3) != "", "a tenth of its time"
        assert after(60) == ""
        for seconds in (0.7, 0.7):  # one after another: the second begins where the first ended
            with doing("measuring"):
                said = after(seconds)
        assert said == "[measuring, 1 s]\n"
        clock.now += 1
        with doing("reading"):
            assert after(0.9) == "", "after a pause it is new"


def test_a_line_in_place(clock):
    out = Stream(terminal=True)
    with told(out, clock) as (after, writer):
        with doing("loading"):
            assert after(0.9) == ""
            assert after(0.2) == "\r\x1b[K[loading, 1 s]"
            assert after(0.25) == "\r\x1b[K[loading, 1 s]"
            writer.pass_on(out, "a warning\n")
            assert out.take() == "\r\x1b[Ka warning\n"
            assert after(0.9) == "" and after(0.2) != ""
            with doing("rounding"):
                assert out.take() == "\r\x1b[K", "it is about something else"
                assert after(0.25) == "\r\x1b[K[rounding, 0 s]"
            assert out.take() == "\r\x1b[K", "it has ended"
            assert after(0.25) != ""
        assert out.take() == "\r\x1b[K" and after(5) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_text_that_has_not_ended_its_line_is_left_alone(terminal, clock):
    out = Stream(terminal)
    with told(out, clock) as (after, writer), doing("writing", 9, "tokens"):
        writer.pass_on(out, "Once upon")
        assert out.take() == "Once upon" and after(60) == ""
        writer.pass_on(out, " a time\n")
        out.take()
        assert after(60) != ""


def test_a_line_is_not_wider_than_the_terminal(clock, monkeypatch):
    monkeypatch.setattr(line_writer, "_width", lambda out: 12)
    with told(Stream(terminal=True), clock) as (after, _), doing("reading the prompt"):
        assert after(2) == "\r\x1b[K[reading th"


def test_stderr_is_told_once_and_given_back(monkeypatch):
    """Nested ones change nothing; stdout is watched where both end up in one place."""
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    with told_on_stderr():
        watched = sys.stderr, sys.stdout
        with told_as(True):
            assert (sys.stderr, sys.stdout) == watched
        print("text", file=sys.stderr)
    assert stream not in watched
    assert sys.stderr is sys.stdout is stream and stream.getvalue() == "text\n"
    monkeypatch.setattr(sys, "stdout", Stream())
    with told_on_stderr():
        assert sys.stderr is not stream and isinstance(sys.stdout, Stream)
    monkeypatch.setattr(sys, "stderr", None)
    with told_on_stderr(), doing("something"):
        assert sys.stderr is None


def test_the_seconds_of_a_process(monkeypatch):
    assert telling.seconds_of_process() > 0
    monkeypatch.setattr(telling, "open", lambda *_, **__: io.StringIO("no figures"), raising=False)
    monkeypatch.setattr(telling, "_LOADED", telling.time.monotonic() - 5)
    assert 5 <= telling.seconds_of_process() < 500


# --- the library and the commands ---------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("telling") / "hf"
    hf_fixtures.make(path)
    return str(path)


def test_calls_tell_a_function_what_they_do(folder):
    heard = []
    model = tsjax.load(folder, progress=heard.append)
    *_, last = [one for one in heard if one.unit == "bytes"]
    assert last.done == last.total == sum(x.nbytes for x in jax.tree.leaves(model.params))
    prompt, many = [3] * 700, dict(max_new_tokens=4, exceed_max_positions=True, eos_token_id=())
    heard.clear()
    tsjax.generate(model, prompt, progress=heard.append, **many)
    said = [*map(str, heard)]
    assert "reading the prompt 512 of 700 tokens" in said and said[-1] == "writing 4 of 4 tokens"
    heard.clear()
    list(tsjax.stream(model, prompt, progress=heard.append, **many))
    assert "reading the prompt 700 of 700 tokens" in [*map(str, heard)]
    heard.clear()
    tsjax.generate(model, prompt, **many)
    assert not heard


@pytest.mark.parametrize("progress", ["yes", 1, None])
def test_progress_is_refused_where_it_is_none(progress, folder):
    model = tsjax.load(folder)
    for call in (
        lambda: tsjax.load(folder, progress=progress),
        lambda: tsjax.generate(model, [3], progress=progress),
        lambda: tsjax.stream(model, [3], progress=progress),
    ):
        with pytest.raises(TypeError, match="False, True, or a function"):
            call()


@pytest.mark.parametrize("flags", [[], ["--quiet"]])
def test_a_command_tells_what_takes_long_unless_it_is_quiet(flags, folder, monkeypatch, capsys):
    """Loading goes on until a line was written, or would have been."""
    looked, look, read = threading.Event(), LineWriter.look, huggingface.read_model
    unheard = doing("nothing")

    def eager(writer, works):
        at_work = works.now() is not None
        look(writer, works)
        if at_work:
            looked.set()

    def slow(*args, **options):
        assert (doing("loading") is unheard) == bool(flags)
        assert flags or looked.wait(20)
        return read(*args, **options)

    monkeypatch.setattr(LineWriter, "look", eager)
    monkeypatch.setattr(huggingface, "read_model", slow)
    monkeypatch.setattr(line_writer, "SECONDS_UNTOLD", 0.0)
    argv = ["generate", folder, "--ids", "3,4", "--max-new-tokens", "2", "--json", *flags]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith("{")
    if flags:
        assert err == ""
    else:
        first, *_, last = err.splitlines()
        assert re.match(r"\[loading", first), err
        figures = r"\[2 tokens, .* tokens/s, .* since the command began, .* for compiling, length\]"
        assert re.fullmatch(figures, last)

# SPDX-License-Identifier: Apache-2.0
"""What signals do to a loop of runs, and to a process that does not catch what they raise."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from helpers import tiny_model

import tsjax
from tsjax.host.interrupt import Interrupt

BOTH = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def handlers():
    """Whatever a test sets is set back."""
    before = {number: signal.getsignal(number) for number in BOTH}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def raised_by(number):
    interrupt = Interrupt()
    with interrupt:
        os.kill(os.getpid(), number)
    with pytest.raises(tsjax.Interrupted) as raised:
        interrupt.finish("what there is", "raise")
    return raised.value


def test_it_carries_the_result(handlers):
    for number in BOTH:
        assert raised_by(number).result == "what there is"
        assert signal.getsignal(number) == handlers[number]


def test_it_is_what_the_signal_raises_elsewhere(handlers):
    assert isinstance(raised_by(signal.SIGINT), KeyboardInterrupt)
    terminated = raised_by(signal.SIGTERM)
    assert isinstance(terminated, SystemExit) and terminated.code == 143
    assert not isinstance(terminated, KeyboardInterrupt)


def test_an_interactive_session_is_not_left(handlers, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not isinstance(raised_by(signal.SIGINT), SystemExit)


@pytest.mark.parametrize("number", BOTH)
def test_an_earlier_handler_is_called_first_and_once(handlers, number):
    called = []

    def earlier(number, frame):
        assert signal.getsignal(number) is earlier  # it is in place again
        called.append(number)

    signal.signal(number, earlier)
    assert raised_by(number).result == "what there is"
    assert called == [number]


def test_what_an_earlier_handler_raises_is_raised(handlers):
    def earlier(number, frame):
        sys.exit(7)

    signal.signal(signal.SIGTERM, earlier)
    interrupt = Interrupt()
    with interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        interrupt.finish(None, "raise")
    assert raised.value.code == 7 and not isinstance(raised.value, tsjax.Interrupted)


@pytest.mark.parametrize("number", BOTH)
def test_an_ignored_signal_stays_ignored(handlers, number):
    signal.signal(number, signal.SIG_IGN)
    interrupt = Interrupt()
    with interrupt:
        os.kill(os.getpid(), number)
    assert not interrupt.requested and signal.getsignal(number) == signal.SIG_IGN


def test_the_first_signal_counts(handlers):
    interrupt = Interrupt()
    with interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a batch system that asks twice
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(SystemExit):
        interrupt.finish(None, "raise")


def test_nothing_is_raised_without_a_signal_or_on_request(handlers):
    interrupt = Interrupt()
    interrupt.finish(None, "raise")
    with interrupt:
        os.kill(os.getpid(), signal.SIGINT)
    interrupt.finish(None, "return")


def test_the_earlier_handler_finds_the_run_on_disk(handlers, tmp_path):
    path, seen = tmp_path / "run.json", []
    signal.signal(signal.SIGTERM, lambda *_: seen.append(json.loads(path.read_text())["tokens"]))

    class Streamer:
        def put(self, ids):
            os.kill(os.getpid(), signal.SIGTERM)

        def end(self):
            assert seen == []

    with pytest.raises(tsjax.Interrupted) as raised:
        tsjax.generate(tiny_model(), [1, 2], save_to=path, streamer=Streamer())
    assert seen == [[row.tolist() for row in raised.value.result.tokens]]


# --- whole processes ----------------------------------------------------------------------------

JOB = """
    import json, os, signal

    from helpers import RecordingStreamer, tiny_model
    import tsjax

    model = tiny_model()
    for number in range(4):
        def act(count):
            if number == 2 and count == 9:
                os.kill(os.getpid(), signal.{signal})

        result = tsjax.generate(
            model, [1 + number], max_new_tokens=40, do_sample=True, streamer=RecordingStreamer(act),
            save_to=f"run-{{number}}.json",
        )
        with open(f"{{number}}.json", "w") as file:
            json.dump(result.tokens[0].tolist(), file)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_job_over_prompts_ends_at_the_first_signal(number, code, tmp_path):
    """The results that were finished are there, and the run that was not can go on."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(JOB.format(signal=number.name))],
        cwd=tmp_path,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)},
    )
    assert done.returncode == code, done.stderr.decode()
    finished = ["0.json", "1.json"]
    assert sorted(os.listdir(tmp_path)) == [*finished, *(f"run-{n}.json" for n in range(3))]

    model = tiny_model()
    rows = [
        tsjax.generate(model, [1 + n], max_new_tokens=40, do_sample=True).tokens[0].tolist()
        for n in range(3)
    ]
    assert [json.loads((tmp_path / name).read_text()) for name in finished] == rows[:2]
    (saved,) = json.loads((tmp_path / "run-2.json").read_text())["tokens"]
    assert 9 <= len(saved) < 40 and saved == rows[2][: len(saved)]
    resumed = tsjax.generate(model, resume_from=tmp_path / "run-2.json")
    assert resumed.tokens[0].tolist() == rows[2]

# SPDX-License-Identifier: Apache-2.0
"""What signals do to a loop of runs, and to a process that does not catch what they raise."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import TOKENS, RecordingStreamer, chain, chain_model, save_tokenizer, tiny_model

import tsjax
from tsjax.host import run
from tsjax.host.interrupt import Interrupt

BOTH = [signal.SIGINT, signal.SIGTERM]
PROMPT = [1, 2, 3]
RAGGED = [[1, 2, 3], [4], [1, 2, 3], [5, 6, 7, 8, 9, 10, 11]]
SAMPLED = dict(do_sample=True, temperature=1.2, min_p=0.02, repetition_penalty=1.1, seed=7)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def tokens_of(result) -> list[list[int]]:
    return [row.tolist() for row in result.tokens]


def generate(model, prompt=PROMPT, **kwargs) -> list[list[int]]:
    return tokens_of(tsjax.generate(model, prompt, **kwargs))


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


def test_it_is_what_the_signal_raises_elsewhere_with_the_result(handlers, monkeypatch):
    for number in BOTH:
        assert raised_by(number).result == "what there is"
        assert signal.getsignal(number) == handlers[number]
    assert isinstance(raised_by(signal.SIGINT), KeyboardInterrupt)
    terminated = raised_by(signal.SIGTERM)
    assert isinstance(terminated, SystemExit) and terminated.code == 143
    assert not isinstance(terminated, KeyboardInterrupt)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # an interactive session is not left
    assert not isinstance(raised_by(signal.SIGINT), SystemExit)


def test_an_earlier_handler_is_called_first_and_once(handlers):
    called = []

    def earlier(number, frame):
        assert signal.getsignal(number) is earlier  # it is in place again
        called.append(number)

    for number in BOTH:
        signal.signal(number, earlier)
        assert raised_by(number).result == "what there is"
    assert called == BOTH
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an ignored signal stays ignored
    interrupt = Interrupt()
    with interrupt:
        os.kill(os.getpid(), signal.SIGINT)
    assert not interrupt.requested and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    interrupt = Interrupt()
    with interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        interrupt.finish(None, "raise")
    assert raised.value.code == 7 and not isinstance(raised.value, tsjax.Interrupted)


def test_the_first_signal_counts(handlers):
    interrupt = Interrupt()
    with interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a batch system that asks twice
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(SystemExit):
        interrupt.finish(None, "raise")


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


# --- runs ---------------------------------------------------------------------------------------

MANY = 20_000


def current_handlers():
    return [signal.getsignal(number) for number in BOTH]


def signal_in(monkeypatch, program: str, number: int, sent: int = signal.SIGINT) -> list:
    """A signal while the device works on the number-th call of a program; its calls."""
    real, calls = run.programs_of, []

    def signalled(model):
        def call(*args, **kwargs):
            calls.append(args)
            if len(calls) == number:
                os.kill(os.getpid(), sent)
            return getattr(real(model), program)(*args, **kwargs)

        return SimpleNamespace(**{**vars(real(model)), program: call})

    monkeypatch.setattr(run, "programs_of", signalled)
    return calls


def send(number: int, after: int):
    """For a RecordingStreamer: sends this process a signal when this many tokens have come."""

    def act(count: int):
        if count == after:
            os.kill(os.getpid(), number)

    return act


@pytest.mark.parametrize(
    ("number", "on_interrupt"), [(signal.SIGINT, "raise"), (signal.SIGTERM, "return")]
)
def test_a_signal_ends_the_run_with_what_there_is(model, number, on_interrupt):
    before, streamer = current_handlers(), RecordingStreamer(send(number, after=5))
    how = dict(max_new_tokens=MANY, streamer=streamer, on_interrupt=on_interrupt, **SAMPLED)
    if on_interrupt == "raise":
        result = interrupted(lambda: tsjax.generate(model, PROMPT, **how))
    else:
        result = tsjax.generate(model, PROMPT, **how)
    assert result.finish_reason == ["interrupted"]
    assert 5 <= len(result.tokens[0]) < MANY
    assert streamer.ended and [streamer.tokens] == tokens_of(result)
    assert current_handlers() == before
    # It is a prefix of the whole run; the capacity is named to share the compiled program.
    count = len(result.tokens[0])
    assert tokens_of(result) == generate(model, max_new_tokens=count, capacity=32768, **SAMPLED)


def interrupted(call) -> tsjax.GenerationResult:
    with pytest.raises(tsjax.Interrupted) as raised:
        call()
    return raised.value.result


class BeforeTheFirstToken(RecordingStreamer):
    def put(self, value):  # the prompt is put before anything is computed
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_before_the_first_step_gives_no_tokens(model, tmp_path):
    settings = dict(max_new_tokens=30, streamer=BeforeTheFirstToken())
    path = tmp_path / "run.json"
    result = interrupted(lambda: tsjax.generate(model, PROMPT, save_to=path, **settings))
    assert result.finish_reason == ["interrupted"] and tokens_of(result) == [[]]
    assert result.stats.steps == (0,)
    assert generate(model, None, resume_from=path) == generate(model, max_new_tokens=30)


def test_a_signal_during_the_prefill_ends_it(model, monkeypatch):
    """Also where the device is still compiling: the handler runs when it is done."""
    calls = signal_in(monkeypatch, "read_part", 1, signal.SIGTERM)
    result = interrupted(
        lambda: tsjax.generate(model, PROMPT * 9, prefill_width=8, max_new_tokens=9)
    )
    assert len(calls) == 1 and result.finish_reason == ["interrupted"]
    assert tokens_of(result) == [[]]


def test_a_signal_in_the_last_chunk_ends_a_loop_of_runs(model):
    """Nothing of this run is missing, but the next one must not begin."""
    streamer = RecordingStreamer(send(signal.SIGTERM, after=25))
    result = interrupted(
        lambda: tsjax.generate(model, PROMPT, max_new_tokens=25, streamer=streamer)
    )
    assert result.finish_reason == ["length"] and tokens_of(result) == [streamer.tokens]


def test_a_second_ctrl_c_and_an_error_in_a_streamer_restore_the_handlers(model):
    before = current_handlers()

    def twice(count: int):
        if count == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    def fail(count: int):
        raise RuntimeError("from the streamer")

    for act, error in ((twice, KeyboardInterrupt), (fail, RuntimeError)):
        with pytest.raises(error):
            streamer = RecordingStreamer(act)
            tsjax.generate(model, PROMPT, max_new_tokens=MANY, streamer=streamer, **SAMPLED)
        assert current_handlers() == before


def test_outside_the_main_thread_signals_are_left_alone(model):
    results = []
    thread = threading.Thread(target=lambda: results.append(generate(model, max_new_tokens=30)))
    thread.start()
    thread.join()
    assert results == [generate(model, max_new_tokens=30)]


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
def test_a_stream_ends_with_the_chunk_that_was_interrupted(model, monkeypatch, on_interrupt):
    expected, before = generate(model, max_new_tokens=30), current_handlers()
    interrupt_chunk(monkeypatch, 3, steps=4)
    stream = tsjax.stream(model, PROMPT, max_new_tokens=30, on_interrupt=on_interrupt)
    chunks = []
    for _ in range(3):
        chunks.append(next(stream))
        assert current_handlers() == before  # a signal between chunks is the caller's
    assert [chunk.finish_reason for chunk in chunks] == [[None], [None], ["interrupted"]]
    assert np.concatenate([chunk.tokens[0] for chunk in chunks]).tolist() == expected[0][:9]
    if on_interrupt == "raise":
        assert tokens_of(interrupted(lambda: next(stream))) == [expected[0][:9]]
    assert list(stream) == []


def interrupt_chunk(monkeypatch, number: int, steps: int):
    """Chunks of `steps` steps after a first one of 1; Ctrl-C while the device works on one."""
    signal_in(monkeypatch, "decode", number)
    monkeypatch.setattr(run, "_next_chunk", lambda *_: steps)


# --- what was interrupted goes on -----------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_an_interrupted_run_goes_on_with_the_same_tokens(model, settings, tmp_path, monkeypatch):
    """A batch; row 0 has ended before the interrupt, row 2 (its twin, when sampled) has not."""
    sampled = bool(settings)
    settings = dict(settings, max_new_tokens=40, min_new_tokens=3)
    settings["eos_token_id"] = generate(model, RAGGED, **settings)[0][4]
    whole = tsjax.generate(model, RAGGED, **settings)
    with monkeypatch.context() as patch:
        interrupt_chunk(patch, 3, steps=6)
        part = interrupted(
            lambda: tsjax.generate(model, RAGGED, save_to=tmp_path / "run.json", **settings)
        )
    assert part.finish_reason[0] == "eos" and "interrupted" in part.finish_reason
    assert part.finish_reason[2] == ("interrupted" if sampled else "eos")
    for row, expected in zip(tokens_of(part), tokens_of(whole), strict=True):
        assert row == expected[: len(row)]
    resumed = tsjax.generate(model, resume_from=tmp_path / "run.json")
    assert tokens_of(resumed) == tokens_of(whole)
    assert resumed.finish_reason == whole.finish_reason
    assert resumed.stats.prompt_tokens == whole.stats.prompt_tokens
    assert resumed.stats.new_tokens == whole.stats.new_tokens
    computed = sum(whole.stats.new_tokens) - sum(part.stats.new_tokens)
    assert resumed.stats.computed_tokens == sum(resumed.stats.steps) == computed


def test_a_stop_string_is_found_across_the_interrupt(tmp_path, monkeypatch):
    words = [TOKENS[name] for name in ("<s>", "▁the", "▁a", "b", "c", "d")]
    model = chain_model(chain(*words), vocab_size=len(TOKENS), path=save_tokenizer(tmp_path / "t"))
    path = tmp_path / "run.json"
    interrupt_chunk(monkeypatch, 3, steps=1)
    settings = dict(max_new_tokens=9, stop_strings="abc")
    part = interrupted(lambda: tsjax.generate(model, words[:1], save_to=path, **settings))
    assert tokens_of(part) == [words[1:4]]
    result = tsjax.generate(model, resume_from=path)
    assert tokens_of(result) == [words[1:5]] and result.finish_reason == ["stop_string"]
    assert result.text == "the abc"  # a single prompt stays one


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
            save_to=f"run-{{number}}.json", save_every=1,
        )
        with open(f"{{number}}.json", "w") as file:
            json.dump(result.tokens[0].tolist(), file)
"""


@pytest.mark.wide
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_job_over_prompts_ends_at_the_first_signal(number, code, tmp_path):
    """The results that were finished are there, and the run that was not can go on: where it was
    killed, from its last save, in a chunk before."""
    killed = number == signal.SIGKILL
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-c", textwrap.dedent(JOB.format(signal=number.name))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment)
    assert done.returncode == code, done.stderr.decode()
    finished = ["0.json", "1.json"]
    left = [*finished, *(f"run-{n}.json" for n in range(3)), *["run-2.json.lock"] * killed]
    assert sorted(os.listdir(tmp_path)) == left

    model = tiny_model()
    rows = [generate(model, [1 + n], max_new_tokens=40, do_sample=True)[0] for n in range(3)]
    assert [json.loads((tmp_path / name).read_text()) for name in finished] == rows[:2]
    path = tmp_path / "run-2.json"
    (saved,) = json.loads(path.read_text())["tokens"]
    assert saved == rows[2][: len(saved)]
    assert 0 < len(saved) <= 9 if killed else 9 <= len(saved) < 40
    assert generate(model, None, resume_from=path, save_to=path) == rows[2:]
    assert not (tmp_path / "run-2.json.lock").exists()

# SPDX-License-Identifier: Apache-2.0
"""Programs that are compiled beside a run: it begins plainly, and goes over when they are there."""

import itertools
import subprocess
import sys
import time

import jax
import pytest
from helpers import MIXED_COSTS, tiny_model
from test_kept_programs import SETTINGS, folder, in_a_new_process, made  # noqa: F401

import tsjax
from tsjax.decoding.method import Autoregressive
from tsjax.host import beside, kept_programs, moving, run
from tsjax.host.device_programs import Call, Program, programs_of
from tsjax.methods import auto

AUTO = tsjax.Auto(costs=MIXED_COSTS)
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


class Later:
    """Compiles after it was asked a few times whether it has ended."""

    looks = 3

    def __init__(self, asked):
        self._asked, self._left = asked, self.looks

    def has_ended(self):
        self._left -= 1
        if self._left == 0:
            for one in self._asked:
                one.compile()
        return self._left <= 0


@pytest.fixture
def helper(folder, monkeypatch):  # noqa: F811
    def new_process(kind=Later):
        in_a_new_process()
        monkeypatch.setattr(beside, "OtherProcess", kind)
        monkeypatch.setattr(moving, "BESIDE", found := beside.Beside())
        monkeypatch.setattr(run, "BESIDE", found)
        return found

    monkeypatch.setattr(run, "_next_chunk", lambda steps, share: 4)
    monkeypatch.setattr(auto, "STEPS_TO_JUDGE", 10_000)
    new_process()
    return new_process


@pytest.fixture
def decoded(monkeypatch):
    """By which method each chunk of steps was decoded."""
    used, called = [], Program.__call__

    def watched(self, *given, **named):
        if self.name == "decode":
            used.append("plain" if named["cfg"].method == Autoregressive() else "tree")
        return called(self, *given, **named)

    monkeypatch.setattr(Program, "__call__", watched)
    return used


def auto_says(model, method=AUTO):
    found = tsjax.generate(model, PROMPT, method=method, **{**SETTINGS, "max_new_tokens": 40})
    return found.tokens[0].tolist(), found.stats


def test_a_run_begins_plainly_and_goes_over(helper, made, decoded):  # noqa: F811
    model = tiny_model(vocab_size=67)
    plain = tsjax.generate(model, PROMPT, **{**SETTINGS, "max_new_tokens": 40}).tokens[0].tolist()
    helper()
    decoded.clear()
    tokens, stats = auto_says(model)
    assert tokens == plain and decoded == sorted(decoded) and {*decoded} == {"plain", "tree"}
    assert not stats.gave_up and stats.method != Autoregressive() and stats.beside_seconds > 0
    assert stats.accepted + sum(stats.steps) == stats.computed_tokens == 40
    # The next process begins by it as soon as it is read from disk.
    helper()
    made.clear()
    tokens, stats = auto_says(model)
    assert tokens == plain and decoded[-1] == "tree" and "decode" not in made
    assert stats.beside_seconds == 0
    # So do many prompts, and what is compiled beside them is what runs.
    made.clear()
    decoded.clear()
    many = {**SETTINGS, "max_new_tokens": 8, "method": AUTO, "rows": 2}
    for answer in tsjax.generate_many(model, [PROMPT] * 8, **many):
        assert answer.tokens.tolist() == plain[:8]
    assert decoded == sorted(decoded) and {*decoded} == {"plain", "tree"}
    assert made.count("decode") == 2 * 3  # traced, lowered and compiled
    # Larger buffers have programs of their own.
    decoded.clear()
    prompts, more = [*[PROMPT] * 2, PROMPT * 260, *[PROMPT] * 6], {"exceed_max_positions": True}
    said = [one.tokens.tolist() for one in tsjax.generate_many(model, prompts, **many, **more)]
    assert said.count(plain[:8]) >= 8
    assert [name for name, _ in itertools.groupby(decoded)] == ["tree", "plain", "tree"]


def test_other_prices_make_no_other_program(helper, decoded):
    model, costs = tiny_model(vocab_size=67), MIXED_COSTS._replace(any_rows=True)
    tokens, _ = auto_says(model, tsjax.Auto(costs=costs))
    assert "tree" in decoded
    helper()
    decoded.clear()
    kept = sorted(kept_programs.safe_folder().iterdir())
    dearer = costs.with_plain(3 * costs.plain(20), 20)
    found, stats = auto_says(model, tsjax.Auto(costs=dearer))
    assert found == tokens and {*decoded} == {"tree"} and stats.beside_seconds == 0
    assert sorted(kept_programs.safe_folder().iterdir()) == kept


def test_what_is_compiled_for_a_run_that_ends_first_is_there_for_the_next(helper, decoded):
    model = tiny_model(vocab_size=67)

    class Slow(Later):
        looks = 1000

    helpers = helper(Slow)
    _, stats = auto_says(model)
    assert {*decoded} == {"plain"} and not stats.gave_up and sum(stats.accepted_lengths) == 40
    assert len(stats.accepted_by_source) == 4, "as by the method that was to begin"
    while helpers._helper is not None:
        helpers.look()
    helper()
    auto_says(model)
    assert "tree" in decoded


def test_one_helper_at_a_time_and_nothing_twice(helper):
    begun = []

    class Noted(Later):
        def __init__(self, asked):
            super().__init__(asked)
            begun.append([one.words for one in asked])

    helpers = helper(Noted)
    one, two, three = (beside.Asked("adopt", "cpu", "float32", None, word) for word in "abc")
    Noted.looks = 10
    helpers.ask([one])
    helpers.ask([one, two])
    helpers.ask([three, two])
    assert begun == [["a"]]
    helpers._helper._left = 100
    helpers._helper.has_ended = lambda: True
    helpers.look()
    assert begun == [["a"], ["b", "c"]]


def test_a_helper_that_fails_is_told_and_the_run_goes_on(helper, decoded, monkeypatch):
    model = tiny_model(vocab_size=67)

    def fail(asked):
        raise MemoryError("no memory")

    monkeypatch.setattr(beside.Asked, "compile", fail)
    helper(beside.OtherThread)
    with pytest.warns(UserWarning, match="was not compiled beside the run: no memory"):
        auto_says(model)
    assert {*decoded} == {"plain"}


def test_where_nothing_is_kept_a_run_waits(monkeypatch):
    model = tiny_model(vocab_size=67)
    assert kept_programs.safe_folder() is None
    monkeypatch.setattr(beside, "OtherProcess", None)
    found = tsjax.generate(model, PROMPT, method=AUTO, max_new_tokens=8)
    assert not found.stats.gave_up and found.stats.beside_seconds == 0


def asked_of(model):
    call = Call.of((jax.numpy.ones((2, 3)), 3), {}).abstract()
    program = programs_of(model).adopt
    return beside.Asked("adopt", "cpu", "float32", call, program.words_for(call, jax.devices()[0]))


def test_another_program_than_the_one_asked_for_is_an_error(folder):  # noqa: F811
    asked = asked_of(tiny_model())
    with pytest.raises(RuntimeError, match="it would be another program"):
        asked._replace(words=asked.words + "x").compile()


@pytest.mark.wide
def test_another_process_compiles(folder, monkeypatch):  # noqa: F811
    """As its own words say, with all of jax's settings; a thread does the same."""
    model = tiny_model(vocab_size=67)
    monkeypatch.setattr(run, "_next_chunk", lambda steps, share: 1)
    found = tsjax.generate(model, PROMPT, method=AUTO, **{**SETTINGS, "max_new_tokens": 4})
    assert found.stats.beside_seconds > 0
    end = time.monotonic() + 120
    while moving.BESIDE._helper is not None:
        assert time.monotonic() < end
        time.sleep(0.1)
        moving.BESIDE.look()
    assert len(list(folder.glob("*.program"))) >= 5, "plain ones, first_memory and the tree's"
    thread = beside.OtherThread([])
    while not thread.has_ended():
        pass


def test_the_process_that_compiles_needs_nothing_but_its_input():
    done = subprocess.run(
        [sys.executable, "-c", beside.START, str(kept_programs.TSJAX.parent)],
        input=b"", capture_output=True,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(b"EOFError")

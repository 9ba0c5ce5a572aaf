# SPDX-License-Identifier: Apache-2.0
"""Auto in a run: when it goes on with another method, and what it remembers of those before."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from helpers import chain, chain_model, tiny_model
from test_auto import DEAR_ROWS, LLAMA, PLAIN, table

import tsjax
from tsjax.decoding.method import Measured, Tried
from tsjax.host import costs, judge, run
from tsjax.host.repetition import Foretold
from tsjax.host.saved_run import read_run
from tsjax.methods import Auto, LikelyTree, NGram, auto
from tsjax.methods.cost_model import Int8Costs, Line
from tsjax.methods.rates import first_rates

SETTINGS = dict(max_new_tokens=60, do_sample=True, seed=5)
PER_STEP = table((1, 1.0), (8, 1.0))  # a second for each step
DRAFTING = LikelyTree(width=4, pass_widths=(1,), places=2, costs=PER_STEP)
ROWS = [[1, 2, 3], [4]]


def spells(methods):
    """The methods one after the other, each as often as it was taken up."""
    return [method for method, _ in itertools.groupby(methods)]


def let_auto_choose(method, monkeypatch, drafting, plain):
    """Auto begins with a method and judges early; a chunk takes these seconds, one number for each
    spell of the method, the last one also for later spells.

    Returns what Auto was told, and what it said.
    """
    chunks, asked, told = run.Stopwatch, Auto.next, []
    seconds = {method: drafting, PLAIN: plain}

    class Stopwatch(chunks):
        def __exit__(self, *_):
            super().__exit__(*_)
            said = [one for _, one in told]
            spell = spells(said).count(said[-1]) - 1
            self.last = ([*seconds[said[-1]][: spell + 1]])[-1]

    def next_method(self, so_far):
        told.append((so_far, asked(self, so_far)))
        return told[-1][1]

    monkeypatch.setattr(run, "Stopwatch", Stopwatch)
    monkeypatch.setattr(Auto, "next", next_method)
    monkeypatch.setattr(auto, "opening", lambda *_, **__: method)
    monkeypatch.setattr(auto, "best_with_passes", lambda *_, **__: method)
    monkeypatch.setattr(auto, "SHORT_RUN", 0)
    monkeypatch.setattr(auto, "STEPS_TO_JUDGE", 6)
    monkeypatch.setattr(auto, "TRIAL_STEPS", 1)
    monkeypatch.setattr(run, "_next_chunk", lambda steps, elapsed: 5)
    monkeypatch.setattr(run, "FIRST_CHUNK", 5)
    return told


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def said_plainly(model):
    return [row.tolist() for row in tsjax.generate(model, ROWS, **SETTINGS).tokens]


def test_a_run_goes_on_with_what_takes_less_time(model, said_plainly, monkeypatch):
    """Chunks of five steps; clearly faster than plain decoding by the table."""
    told = let_auto_choose(DRAFTING, monkeypatch, [2.0], [5.0])
    found = tsjax.generate(model, ROWS, method=Auto(costs=PER_STEP), **SETTINGS)
    assert [row.tolist() for row in found.tokens] == said_plainly
    assert found.stats.method == DRAFTING and not found.stats.gave_up
    assert found.stats.accepted + sum(found.stats.steps) == found.stats.computed_tokens == 120
    assert sum(found.stats.accepted_lengths) == sum(found.stats.steps)
    assert spells(method for _, method in told) == [DRAFTING]
    # Of the first method the first chunk is left out; then each has five steps of two rows.
    first = [so_far for so_far, _ in told[1:3]]
    assert [so_far.steps for so_far in first] == [0, 10] and first[0].tried == ()
    assert first[1].seconds == first[1].since == 2 * 2.0 and first[1].tokens >= 10


def test_a_method_is_judged_from_its_second_chunk_on_and_remembered(monkeypatch):
    """What was measured last of each is what is known of it. The model says 1, 2, 3 for ever, so
    that a step with drafts finds up to four tokens."""
    told = let_auto_choose(DRAFTING, monkeypatch, [50.0, 40.0], [500.0])
    monkeypatch.setattr(auto, "TRIALS_COST", 1e6)
    model = chain_model(chain(1, 2, 3, 1))
    tsjax.generate(model, ROWS, method=Auto(costs=PER_STEP), max_new_tokens=200)
    records, changes = {}, 0
    for (so_far, said), (after, _) in itertools.pairwise(told):
        current = so_far.current
        if current is None:
            continue
        if said == current:
            assert after.steps > so_far.steps and after.since > so_far.since
        else:
            changes += 1
            per_token, per_step = so_far.seconds / so_far.tokens, so_far.tokens / so_far.steps
            records[current] = Tried(current, per_token, so_far.context, per_step)
            assert after.current == said and after.context > so_far.context
            assert after.steps == after.tokens == after.seconds == after.since == 0
        assert after.tried == tuple(records.values())
    assert changes >= 4
    assert records[PLAIN].seconds == 100 and records[DRAFTING].seconds < 8 / 2


@pytest.mark.wide
def test_what_was_long_ago_counts_less(model, monkeypatch):
    """Half of it is forgotten after two seconds of each row; `since` forgets nothing."""
    monkeypatch.setattr(judge, "LATELY", 2.0)
    told = let_auto_choose(DRAFTING, monkeypatch, [2.0], [5.0])
    tsjax.generate(model, ROWS, method=Auto(costs=PER_STEP), **SETTINGS)
    judged = [so_far for so_far, _ in told[1:6]]
    assert [so_far.seconds for so_far in judged] == [0, 4, 8, 8, 8]
    assert [so_far.steps for so_far in judged] == [0, 10, 20, 20, 20]
    assert [so_far.since for so_far in judged] == [0, 4, 8, 12, 16]


def test_a_run_comes_back_to_drafts_that_pay_again_and_knows_their_rates(
    model, said_plainly, monkeypatch
):
    told = let_auto_choose(DRAFTING, monkeypatch, [50.0, 1.0], [5.0])
    monkeypatch.setattr(auto, "TRIALS_COST", 0.2)  # of so short a run
    rates, begun_anew = [], run.begun_anew

    def watched(model, state, decode, *lesson):
        """Copies, as what a step was given is gone after it."""
        after = begun_anew(model, state, decode, *lesson)
        for memory in (state.memory, after.memory):
            if memory:
                rates.append(jax.tree.map(np.array, memory.rates))
        return after

    monkeypatch.setattr(run, "begun_anew", watched)
    found = tsjax.generate(model, ROWS, method=Auto(costs=PER_STEP), **SETTINGS)
    assert [row.tolist() for row in found.tokens] == said_plainly
    assert spells(method for _, method in told) == [DRAFTING, PLAIN, DRAFTING]
    assert not found.stats.gave_up
    assert found.stats.accepted + sum(found.stats.steps) == found.stats.computed_tokens == 120
    _, left, returned = rates
    assert np.array_equal(left.tried, returned.tried)
    assert np.array_equal(left.right, returned.right)
    assert not np.array_equal(left.tried, first_rates().tried)


def test_many_prompts_go_on_with_what_takes_less_time(model, said_plainly, monkeypatch):
    """By what steps took, whoever was in the rows: no answer is long enough to judge by."""
    told = let_auto_choose(DRAFTING, monkeypatch, [50.0, 1.0], [5.0])
    monkeypatch.setattr(auto, "STEPS_TO_JUDGE", 30)
    monkeypatch.setattr(judge, "LATELY", 1e9)
    monkeypatch.setattr(auto, "TRIALS_COST", 0.2)
    how = dict(SETTINGS, max_new_tokens=6, method=Auto(costs=PER_STEP), rows=2)
    for answer in tsjax.generate_many(model, ROWS[:1] * 24, **how):
        assert answer.tokens.tolist() == said_plainly[0][:6]
    assert spells(method for _, method in told)[:3] == [DRAFTING, PLAIN, DRAFTING]


@pytest.mark.wide
def test_a_resumed_run_says_the_same_by_any_table(tmp_path):
    """The first machine's table drafts with the heads, the second's does not; and the other way."""
    model, file = tiny_model(num_draft_heads=1), tmp_path / "run.json"
    plain = tsjax.generate(model, ROWS, **SETTINGS)
    drafts, text = Auto(costs=table((1, 1.0), (8, 1.1), heads=1e-2)), Auto(costs=DEAR_ROWS)
    methods = [tsjax.costs.choose_method(one, model, 100).method for one in (drafts, text)]
    assert [method.heads for method in methods] == [True, False]
    for first, second in ((drafts, text), (text, drafts)):
        tsjax.generate(model, ROWS, method=first, save_to=file, **SETTINGS | {"max_new_tokens": 23})
        assert read_run(file).method == first
        found = tsjax.generate(model, method=second, resume_from=file, max_new_tokens=60)
        assert [row.tolist() for row in found.tokens] == [row.tolist() for row in plain.tokens]


def test_a_run_goes_on_with_passes_that_promise_more(said_plainly, model):
    """Begun with the text alone; by the table passes in int8 take hardly any time."""
    costs = table((1, 1e-9), (8, 1e-9), int8=Int8Costs(Line(0.0), 0.0))
    seen = []

    class Watched(Auto):
        def next(self, measured):  # as where its programs are kept
            seen.append((measured, super().next(measured._replace(compiling=0.0))))
            return seen[-1][1]

    wanted = dict(SETTINGS, max_new_tokens=300)
    found = tsjax.generate(model, ROWS, method=Watched(costs=costs), **wanted)
    assert found.stats.method.draft_passes == 0
    assert [row[:60].tolist() for row in found.tokens] == said_plainly
    left, compiling = [(one.tokens_left, one.compiling) for one, _ in seen][-1]
    made = len(found.tokens[0])
    assert 0 <= left <= made / 2 + 20 and compiling > 0
    assert any(said.wants_int8 and said.draft_passes for _, said in seen)


@pytest.mark.wide
def test_steps_that_revival_ended_are_not_judged(model, monkeypatch):
    """Nor those of a chunk in which it came to its end; a row that has ended revives no more."""
    seen, judged = [], []
    of_lazy = tsjax.LazyPrefill.is_reviving

    def is_reviving(self, cfg, state):
        seen.append((int(state.stats.steps.sum()), of_lazy(self, cfg, state)))
        return seen[-1][1]

    def judge(self, measured):
        if measured.current is not None:
            judged.append(seen[-1][0] - measured.steps)
        return self

    monkeypatch.setattr(tsjax.LazyPrefill, "is_reviving", is_reviving)
    monkeypatch.setattr(NGram, "next", judge)
    monkeypatch.setattr(run, "_next_chunk", lambda steps, elapsed: 5)
    lazy = tsjax.LazyPrefill(keep={1: 0.1}, revive="background", choose_every=3, revive_rows=8)
    prompts = [list(range(1, 32)), list(range(2, 60))]
    settings = dict(max_new_tokens=40, do_sample=True, seed=5, prefill=lazy, method="ngram")
    first, second = tsjax.generate(model, prompts, **settings).tokens
    until = next(i for i, reviving in seen if not reviving)
    assert max(i for i, reviving in seen if reviving) < until
    assert all(begin >= until for begin in judged[-2:]) and judged[0] < until
    # The second row, with more to revive, ends first.
    end = next(t for t in second.tolist()[:6] if t not in first.tolist())
    seen.clear()
    ended = tsjax.generate(model, prompts, eos_token_id=end, **settings)
    assert ended.finish_reason == ["length", "eos"] and ended.stats.prompt_computed[1] < 1
    assert not seen[-1][1]


def test_choose_method_is_what_generate_takes(model, monkeypatch, tmp_path):
    """Also where the table is that of the machine."""
    monkeypatch.setenv("TSJAX_CACHE", str(tmp_path))  # without what other tests have measured
    monkeypatch.setattr(costs, "_KNOWN", {})
    monkeypatch.setattr(costs, "measure", lambda *_: table((1, 1.0), (8, 1.5)))
    choice = tsjax.costs.choose_method("tokenswift", model, 3 + 10)
    assert isinstance(choice.method, LikelyTree) and choice.method.draft_passes == 0
    assert choice.step_cost == pytest.approx(1) and choice.costs.origin == "measured"
    assert choice.method.pass_widths == (1, 4, 8) and choice.method.width == 16
    result = tsjax.generate(model, [1, 2, 3], method="tokenswift", max_new_tokens=20)
    assert result.stats.method == choice.method
    kept = tsjax.costs.choose_method(NGram.paper(), model, 13)
    assert kept.method == NGram.paper() and kept.step_cost == pytest.approx(1 + 0.5 / 7 * 76)


def test_a_run_begins_with_drafts_where_they_save_more_than_reading_their_program():
    """By what was promised, or by what the text has foretold; for what is left of the run."""
    prices = table((1, 1.0), (2, 1.0), (4, 1.1), (8, 1.2), (16, 1.4))
    first = LikelyTree(width=16, pass_widths=(1, 2, 4, 8), costs=prices)
    known = dict(current=PLAIN, first=first, costs=prices, steps=16)
    measured = Measured(LLAMA, "cpu", "cpu", 100, 1, **known)
    assert Auto().next(measured._replace(steps=15)) == PLAIN, "what a plain step takes comes first"
    for foretold, left, moving, begins in (
        (0.0, 100, 0.0, True),  # it is in memory, and the prior promises 1.2 tokens for a step
        (0.0, 100, 9.0, False),
        (0.0, 1000, 9.0, True),
        (0.9, 100, 30.0, True),
        (0.9, 100, 50.0, False),
        (0.2, 100, 9.0, False),
    ):
        now = measured._replace(foretold=foretold, tokens_left=left, moving=moving)
        assert (Auto().next(now) == first) == begins, (foretold, left, moving)


def test_what_the_text_foretells():
    """The share of the last tokens that stood after the same two or three before."""
    said = Foretold([4])
    text = np.asarray([[1, 2, 3, 4, *[1, 2, 3, 4] * 10, *range(10, 30)]])
    assert said.read(text, np.asarray([4])) == 0
    assert said.read(text, np.asarray([8])) == pytest.approx(2 / 16), "of few it is sure of little"
    assert said.read(text, np.asarray([44])) == pytest.approx(38 / 40)
    assert said.read(text, np.asarray([64])) == pytest.approx(38 / 60)
    both = Foretold([4, 4])
    assert both.read(np.repeat(text, 2, 0), np.asarray([24, 24])) == pytest.approx(18 / 20)

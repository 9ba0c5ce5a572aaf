# SPDX-License-Identifier: Apache-2.0
"""What Auto chooses by a table of seconds, and when a run goes on with another method."""

from __future__ import annotations

import dataclasses
import random

import pytest
from helpers import tiny_config, tiny_model

import tsjax
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.method import Measured
from tsjax.host import costs, run
from tsjax.host.saved_run import read_run
from tsjax.methods import Auto, Autoregressive, NGram, TokenSwift, auto
from tsjax.methods.auto import choose, options
from tsjax.methods.cost_model import (
    CPU,
    GPUS,
    PASS_WITH_REST_IS_RIGHT,
    REPEAT_IS_RIGHT,
    REPEATS,
    Costs,
    Line,
    as_costs,
    device_of,
    estimated,
    expected_tokens,
    seconds_per_token,
    step_seconds,
)

LLAMA_8B = {
    "vocab_size": 128_256,
    "embed_dim": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "mlp_dim": 14_336,
    "dtype": "bfloat16",
}
CONTEXTS = [0, 100, 1000, 10_000, 50_000, 100_000, 1_000_000]


def llama(heads: int = 3, **changes) -> tsjax.ModelConfig:
    return tiny_config(num_draft_heads=heads, **{**LLAMA_8B, **changes})


def table(*passes: tuple[int, float], per_token: float = 0.0, **changes) -> Costs:
    """Passes in milliseconds; by default they are all that takes time."""
    lines = tuple((rows, Line(1e-3 * time, 1e-3 * per_token)) for rows, time in passes)
    return Costs(lines, 0.0, Line(0.0), Line(0.0), 0.0, 0.0, "measured")._replace(**changes)


# Rows are free, and the cache outweighs the weights at 10,000 tokens: a GPU with large caches.
FREE_ROWS = table((1, 1.0), (128, 1.0), per_token=1e-3)
DEAR_ROWS = table((1, 1.0), (4, 3.0))
MIXED = Costs(
    passes=((1, Line(10.0, 0.5)), (4, Line(16.0, 0.5)), (8, Line(24.0, 1.5))),
    heads=3.0,
    choice=Line(2.0, 0.25),
    suffix=Line(0.125, 0.001),
    ngrams=0.75,
    overhead=4.0,
    origin="measured",
)


def measured(model, kind, context, batch=1, **changes):
    platform = "cpu" if kind == "cpu" else "gpu"
    return Measured(model, platform, kind, context, batch, **changes)


def chosen(model, kind, context, batch=1):
    return Auto().next(measured(model, kind, context, batch))


# --- the table -------------------------------------------------------------------------------


def test_passes_lie_on_straight_lines():
    times = {rows: MIXED.of_pass(rows, 20) for rows in (1, 2, 3, 4, 6, 8, 10)}
    assert times == {1: 20, 2: 22, 3: 24, 4: 26, 6: 40, 8: 54, 10: 68}
    assert MIXED.plain(20) == 24


def test_a_step_by_hand():
    """Two passes on 64 slots and one of three rows on everything."""
    method = TokenSwift(tree=(1, 1), draft_passes=2, draft_budget=64, num_ngrams=0, suffix_length=0)
    model, context = llama(0), 9000
    one, verify = 10 + 0.5 * 64, 14 + 0.5 * context

    def seconds(method, model=model):
        return step_seconds(method, model, MIXED, context)

    # What is displaced is chosen again after 48 tokens, of which a step finds some.
    tokens = 1 + 0.8 + 0.8**2
    assert expected_tokens(method, model) == pytest.approx(tokens)
    choice = 2 + 0.25 * context
    assert seconds(method) == pytest.approx(2 * one + verify + 4 + choice * tokens / 48)
    # Or after 4; and to sum up the rest, the partial cache is read once more.
    often = dataclasses.replace(method, draft_refresh=4, draft_rest=True)
    right = PASS_WITH_REST_IS_RIGHT
    tokens = 1 + right + right**2
    steps = 2 * one + 0.5 * 64 + verify + 4
    assert seconds(often) == pytest.approx(steps + choice * tokens / 4)
    # Heads, n-grams and a search.
    beside = TokenSwift(tree=(1,), draft_from="verified_state", num_ngrams=2, suffix_length=1)
    rows = 1 + 1 + 2 * 3 + 1
    wide = MIXED.of_pass(rows, context)
    assert seconds(beside, llama(1)) == pytest.approx(wide + 4 + 3 + 0.125 + 9 + 0.75)
    assert seconds(Autoregressive()) == 10 + 0.5 * context + 4


def test_repetitions_take_the_wider_pass():
    method = NGram(num_ngrams=0, suffix_length=7, suffix_match=8, pass_widths=(1,))
    usual, wide = MIXED.of_pass(1, 100), MIXED.of_pass(8, 100)
    expected = (1 - REPEATS) * usual + REPEATS * wide + 4 + 0.125 + 0.1
    assert step_seconds(method, llama(), MIXED, 100) == pytest.approx(expected)
    right = [REPEAT_IS_RIGHT**n for n in range(1, 8)]
    assert expected_tokens(method, llama()) == pytest.approx(1 + REPEATS * sum(right))


def test_drafts_that_a_repetition_replaces_take_no_passes():
    method = TokenSwift(
        tree=(1,), num_ngrams=0, suffix_length=1, suffix_match=8, draft_budget=64, suffix_alone=8
    )
    all_steps = step_seconds(dataclasses.replace(method, suffix_alone=0), llama(), MIXED, 0)
    width = {8: 2, 0: 3}  # the suffix beside the draft, or instead of it
    passes = [MIXED.of_pass(width[alone], 0) for alone in (8, 0)]
    found = step_seconds(method, llama(), MIXED, 0)
    assert all_steps - found == pytest.approx(passes[1] - passes[0] + REPEATS * 10)


def test_accuracy_of_heads_stands_for_the_papers():
    bad, good = (llama(head_accuracy=(x, x, x)) for x in (0.01, 0.7))
    method = TokenSwift(tree=(3, 3, 3), draft_from="verified_state", num_ngrams=0, suffix_length=0)
    assert expected_tokens(method, good) == pytest.approx(4)
    assert expected_tokens(method, bad) == pytest.approx(1.0145, abs=1e-4)
    narrow = dataclasses.replace(method, tree=(1, 1, 1))
    assert expected_tokens(narrow, good) == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("passes", ()),
        ("passes", ((1, (1.0, 0.0)),)),
        ("passes", ((2, (1.0, 0.0)), (4, (1.0, 0.0)))),
        ("passes", ((1, (1.0, 0.0)), (4, (1.0, 0.0)), (3, (1.0, 0.0)))),
        ("passes", ((1, (0.0, 0.0)), (4, (1.0, 0.0)))),
        ("passes", ((1, (1.0, 0.0)), (4.5, (1.0, 0.0)))),
        ("choice", (1.0, -0.5)),
        ("suffix", (1.0, 2.0, 3.0)),
        ("heads", float("nan")),
        ("ngrams", float("inf")),
        ("overhead", "much"),
        ("origin", "guessed"),
    ],
)
def test_what_is_no_table_is_refused(field, value):
    with pytest.raises(ValueError, match="costs=.* is not valid"):
        Auto(costs=MIXED._replace(**{field: value}))


def test_a_table_from_lists():
    def lists(value):
        return [*map(lists, value)] if isinstance(value, tuple) else value

    found = as_costs(lists(MIXED))
    assert found == MIXED and isinstance(found.passes[2][1], Line) and hash(found) == hash(MIXED)
    assert Auto(costs=lists(MIXED)) == Auto(costs=MIXED)


# --- the estimate ----------------------------------------------------------------------------


def test_an_estimate_is_bytes_and_operations():
    """Llama-3.1-8B on an A100: 15.0 GB of weights that a pass reads (the embedding is looked up),
    and 131,072 bytes of cache per token, as in docs/kernels.md. Both are in two bytes."""
    weights = 32 * (4096 * 128 * 2 * (32 + 8) + 3 * 4096 * 14_336) + 128_256 * 4096
    found = estimated(llama(), GPUS["a100"], 3)
    reading, products = 2 * weights / 2.04e12, 2 * weights / 312e12
    assert found.of_pass(1, 0) == pytest.approx(reading + 3 * products)
    assert found.of_pass(40, 0) == pytest.approx(reading + 3 * 40 * products)
    cache = 131_072 / 2.04e12 + 2 * 4 * 65_536 / 312e12  # four query heads for each kv head
    assert found.passes[0][1].per_token == pytest.approx(3 * cache)
    assert found.origin == "estimated" and as_costs(found) == found
    wider = estimated(llama(dtype="float32"), GPUS["a100"], 3)
    assert wider.of_pass(1, 0) == pytest.approx(2 * reading + 3 * products)


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu", "NVIDIA H200", "h200"),
        ("gpu", "something new", "a100"),
    ],
)
def test_devices(platform, kind, name):
    assert device_of(platform, kind) is GPUS[name]
    assert device_of("cpu", "cpu") is CPU


# --- the choice ------------------------------------------------------------------------------


def test_free_rows_get_a_wide_tree():
    method = choose(llama(), FREE_ROWS, 10_000)
    assert max(method.tree) == 3 and method.num_ngrams == 20 and method.pass_widths == ()
    assert choose(llama(0), FREE_ROWS, 10_000).draft_passes > 1  # without heads, more passes


def test_dear_rows_get_plain_decoding():
    """Four rows take three times as long as one."""
    assert choose(llama(), DEAR_ROWS, 10_000) == Autoregressive()
    assert choose(llama(0), DEAR_ROWS, 10_000) == Autoregressive()


def test_rows_that_cost_a_little_get_repetitions_or_one_path():
    """A pass on few tokens costs what a step costs, until the cache outweighs the weights."""
    costs = table((1, 1.0), (8, 2.0), per_token=1e-4)
    repeats = choose(llama(0), costs, 500)
    assert isinstance(repeats, NGram) and not isinstance(repeats, TokenSwift)
    assert repeats.num_ngrams == 0 and repeats.pass_widths == (1,)
    depths = [len(choose(llama(0), costs, n).tree) for n in (50_000, 200_000, 1_000_000)]
    assert depths == sorted(depths) and depths[0] < depths[-1]
    narrow = choose(llama(0), costs, 50_000)
    assert set(narrow.tree) == {1} and narrow.pass_widths == (1 + len(narrow.tree),)


def test_searches_that_take_long_are_left_out():
    costs = table((1, 1.0), (8, 2.0))
    assert isinstance(choose(llama(0), costs, 500), NGram)
    assert choose(llama(0), costs._replace(suffix=Line(2e-4)), 500) == Autoregressive()


def test_choices_of_the_partial_cache_that_take_long_are_made_seldom():
    costs = table((1, 1.0), (8, 1.2), per_token=1e-4)
    assert choose(llama(0), costs, 100_000).draft_refresh == 8
    slow = costs._replace(choice=Line(0.0, 1e-6))
    assert choose(llama(0), slow, 100_000).draft_refresh is None


def test_the_choice_never_costs_more_than_plain_decoding():
    """For a hundred tables and every option: none costs less than what is chosen."""
    rng = random.Random(0)
    for _ in range(100):
        widths = [1, *sorted(rng.sample(range(2, 130), rng.randint(1, 3)))]

        def seconds():
            return 10.0 ** rng.uniform(-6, -1)

        costs = Costs(
            passes=tuple((rows, Line(seconds(), 1e-5 * seconds())) for rows in widths),
            heads=seconds(),
            choice=Line(seconds(), 1e-5 * seconds()),
            suffix=Line(seconds(), 1e-5 * seconds()),
            ngrams=seconds(),
            overhead=seconds(),
            origin="measured",
        )
        model, context = llama(rng.choice([0, 1, 3, 5])), rng.choice(CONTEXTS)
        rivals = [seconds_per_token(option, model, costs, context) for option in options(model)]
        found = seconds_per_token(choose(model, costs, context), model, costs, context)
        assert found == min(rivals) <= costs.plain(context)


def test_more_rows_per_step_for_a_gpu_than_for_a_cpu():
    """By the formula, where nothing is measured."""
    for context in (30_000, 100_000):
        narrow, wide = (chosen(llama(), kind, context) for kind in ("cpu", "NVIDIA H200"))
        rows = [method.sizes(llama()).pass_widths[0] for method in (narrow, wide)]
        assert 2 * rows[0] < rows[1]
    assert not isinstance(chosen(llama(0), "cpu", 500), TokenSwift)


def test_tables_come_before_the_formula():
    """That of the method, then that of the machine, then the formula."""
    begun = measured(llama(), "NVIDIA H200", 50_000)
    assert isinstance(Auto().next(begun), TokenSwift)
    assert Auto().next(begun._replace(costs=DEAR_ROWS)) == Autoregressive()
    given = Auto(costs=FREE_ROWS)
    assert isinstance(given.next(begun._replace(costs=DEAR_ROWS)), TokenSwift)
    assert Auto().wants_costs and not given.wants_costs and not NGram().wants_costs


@pytest.mark.parametrize("method", [Autoregressive(), NGram(), TokenSwift(tree=(2,))])
def test_what_is_named_is_kept(method):
    begun = measured(llama(), "cpu", 1000)
    assert method.next(begun) == method
    slow = begun._replace(current=method, steps=10_000, tokens=10_000, seconds=1e9)
    assert method.next(slow) == method


def test_every_option_can_be_decoded():
    for heads in (0, 1, 3, 5):
        found = list(options(llama(heads)))
        assert len(set(found)) == len(found)
        for method in found:
            assert DecodeConfig(model=llama(heads), method=method).sizes.width <= 256


# --- giving up -------------------------------------------------------------------------------

DRAFTING = TokenSwift(tree=(1,), draft_budget=8, num_sinks=2, num_ngrams=2, suffix_length=2)
PLAIN = Autoregressive()


@pytest.mark.parametrize(
    ("current", "steps", "tokens", "seconds", "other", "follows"),
    [
        # A plain step takes 24 s by the table.
        (DRAFTING, 100, 200, 200 * 24.0, None, DRAFTING),
        (DRAFTING, 100, 200, 200 * 26.0, None, DRAFTING),
        (DRAFTING, 100, 200, 200 * 27.0, None, PLAIN),
        (DRAFTING, 100, 100, 100 * 24.0, None, DRAFTING),  # however many tokens a step finds
        (DRAFTING, 63, 100, 1e9, None, DRAFTING),  # too early
        (DRAFTING, 100, 0, 1e9, None, DRAFTING),
        # Once the other one has been seen, its own seconds count.
        (DRAFTING, 100, 200, 200 * 27.0, (PLAIN, 30.0), DRAFTING),
        (DRAFTING, 100, 200, 200 * 27.0, (PLAIN, 20.0), PLAIN),
        (PLAIN, 100, 100, 100 * 27.0, (DRAFTING, 26.0), PLAIN),
        (PLAIN, 100, 100, 100 * 27.0, (DRAFTING, 20.0), DRAFTING),
        (PLAIN, 63, 63, 1e9, (DRAFTING, 20.0), PLAIN),
        (PLAIN, 100, 100, 1e9, None, PLAIN),  # chosen from the start
    ],
)
def test_seconds_decide(current, steps, tokens, seconds, other, follows):
    so_far = measured(
        llama(), "cpu", 20, current=current, steps=steps, tokens=tokens, seconds=seconds,
        other=other, costs=MIXED,
    )  # fmt: skip
    assert Auto().next(so_far) == follows


def test_an_estimate_has_the_proportions_alone():
    """Whatever the clock says, drafts are given up where tokens are fewer than the step's cost."""
    costs = MIXED._replace(origin="estimated")
    cost = step_seconds(DRAFTING, llama(), costs, 20) / costs.plain(20)
    for seconds in (1e-3, 1e3):
        for gain, follows in ((1.0, DRAFTING), (1.2, PLAIN)):
            so_far = measured(
                llama(), "cpu", 20, current=DRAFTING, steps=1000, tokens=int(1000 * cost / gain),
                seconds=seconds, costs=costs,
            )  # fmt: skip
            assert Auto().next(so_far) == follows


# --- in a run --------------------------------------------------------------------------------

SETTINGS = dict(max_new_tokens=60, do_sample=True, seed=5)


def let_auto_choose(method, monkeypatch, seconds):
    """Auto begins with a method, judges early, and each chunk of a method takes these seconds.

    Returns what it was told, and what it said.
    """
    chunks, asked, told = run.Stopwatch, Auto.next, []

    class Stopwatch(chunks):
        def __exit__(self, *_):
            super().__exit__(*_)
            self.last = seconds[type(told[-1][1])]

    def next_method(self, so_far):
        told.append((so_far, asked(self, so_far)))
        return told[-1][1]

    monkeypatch.setattr(run, "Stopwatch", Stopwatch)
    monkeypatch.setattr(Auto, "next", next_method)
    monkeypatch.setattr(auto, "choose", lambda *_: method)
    monkeypatch.setattr(auto, "STEPS_TO_JUDGE", 6)
    monkeypatch.setattr(run, "_next_chunk", lambda steps, elapsed: 5)
    return told


PER_STEP = table((1, 1000.0), (8, 1000.0))  # a second for each step
ROWS = [[1, 2, 3], [4]]


@pytest.mark.parametrize(
    ("drafting", "plain", "gives_up"), [(5.0, 5.0, False), (50.0, 5.0, True), (50.0, 500.0, False)]
)
def test_a_run_goes_on_with_what_takes_less_time(drafting, plain, gives_up, monkeypatch):
    """Chunks of five steps. The tokens stay those of plain decoding, and so do the counters' sums.

    In the last case plain decoding takes longer than the table says, and the run returns.
    """
    model = tiny_model()
    expected = tsjax.generate(model, ROWS, **SETTINGS)
    told = let_auto_choose(DRAFTING, monkeypatch, {TokenSwift: drafting, Autoregressive: plain})
    found = tsjax.generate(model, ROWS, method=Auto(costs=PER_STEP), **SETTINGS)
    assert [row.tolist() for row in found.tokens] == [row.tolist() for row in expected.tokens]
    assert found.stats.method == DRAFTING and found.stats.gave_up == gives_up
    assert found.stats.accepted + sum(found.stats.steps) == found.stats.computed_tokens == 120
    assert sum(found.stats.accepted_lengths) == sum(found.stats.steps)
    said = [type(method) for _, method in told]
    changes = [i for i in range(1, len(said)) if said[i] != said[i - 1]]
    assert len(changes) == (0 if drafting == 5 else 1 if gives_up else 2)
    # Of each method the first chunk is left out, then each has five steps of two rows.
    first = [so_far for so_far, _ in told[1:3]]
    assert [so_far.steps for so_far in first] == [0, 10]
    assert first[1].seconds == 2 * drafting and first[1].tokens >= 10
    for index in changes:
        before = told[index][0]
        assert told[index + 1][0].steps == 0
        assert told[index + 1][0].other == (before.current, before.seconds / before.tokens)


def test_a_resumed_run_says_the_same_by_any_table(tmp_path):
    """The table of the first machine drafts, that of the second does not, and the other way."""
    model, file = tiny_model(num_draft_heads=1), tmp_path / "run.json"
    plain = tsjax.generate(model, ROWS, **SETTINGS)
    drafts, none = Auto(costs=table((1, 1.0), (8, 1.1), heads=1e-5)), Auto(costs=DEAR_ROWS)
    methods = [tsjax.choose_method(one, model, 100).method for one in (drafts, none)]
    assert isinstance(methods[0], TokenSwift) and methods[1] == PLAIN
    for first, second in ((drafts, none), (none, drafts)):
        tsjax.generate(model, ROWS, method=first, save_to=file, **SETTINGS | {"max_new_tokens": 23})
        assert read_run(file).method == first
        found = tsjax.generate(model, method=second, resume_from=file, max_new_tokens=60)
        assert [row.tolist() for row in found.tokens] == [row.tolist() for row in plain.tokens]


@pytest.mark.parametrize("revive_rows", [1, 8])
def test_drafts_are_judged_when_the_prompt_is_whole(revive_rows, monkeypatch):
    """Revival ends steps early: of 27 tokens, 8 at a time are back soon, one at a time never."""
    lazy = tsjax.LazyPrefill(
        keep={1: 0.1}, revive="background", choose_every=2, revive_rows=revive_rows
    )
    model, prompt = tiny_model(), [list(range(1, 32))]
    let_auto_choose(DRAFTING, monkeypatch, {TokenSwift: 500.0, Autoregressive: 5.0})
    settings = dict(max_new_tokens=40, seed=5, prefill=lazy)
    found = tsjax.generate(model, prompt, method=Auto(costs=PER_STEP), **settings)
    whole = found.stats.prompt_computed == (1.0, 1.0)
    assert found.stats.gave_up == whole == (revive_rows == 8)
    plain = tsjax.generate(model, prompt, **settings)
    assert found.tokens[0].tolist() == plain.tokens[0].tolist()


def test_steps_that_revival_ended_are_not_judged(monkeypatch):
    """Nor those of a chunk in which it came to its end; a row that has ended revives no more."""
    seen, judged = [], []
    of_lazy = tsjax.LazyPrefill.is_reviving

    def is_reviving(self, model, state):
        seen.append((int(state.stats.steps.sum()), of_lazy(self, model, state)))
        return seen[-1][1]

    def judge(self, measured):
        if measured.current is not None:
            judged.append(seen[-1][0] - measured.steps)
        return self

    monkeypatch.setattr(tsjax.LazyPrefill, "is_reviving", is_reviving)
    monkeypatch.setattr(NGram, "next", judge)
    monkeypatch.setattr(run, "_next_chunk", lambda steps, elapsed: 5)
    lazy = tsjax.LazyPrefill(keep={1: 0.1}, revive="background", choose_every=3, revive_rows=8)
    model, prompts = tiny_model(), [list(range(1, 32)), list(range(2, 60))]
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


def test_choose_method_is_what_generate_takes(monkeypatch):
    """Also where the table is that of the machine."""
    monkeypatch.setattr(costs, "_KNOWN", {})
    monkeypatch.setattr(costs, "measure", lambda *_: table((1, 1.0), (8, 1.5)))
    model = tiny_model()
    choice = tsjax.choose_method("tokenswift", model, 3 + 10)
    assert choice.method == NGram(num_ngrams=0, suffix_length=7, suffix_match=8, pass_widths=(1,))
    assert (
        choice.step_cost == pytest.approx(1 + REPEATS * 0.5) and choice.costs.origin == "measured"
    )
    result = tsjax.generate(model, [1, 2, 3], method="tokenswift", max_new_tokens=20)
    assert result.stats.method == choice.method
    kept = tsjax.choose_method("ngram", model, 13)
    assert kept.method == NGram() and kept.step_cost == pytest.approx(1 + 0.5 / 7 * 76)

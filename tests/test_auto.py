# SPDX-License-Identifier: Apache-2.0
"""What Auto begins with by a table of seconds, and when a run goes on with another method."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from helpers import MIXED_COSTS as MIXED

import tsjax
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.method import Measured, Tried
from tsjax.host.repetition import mean_repeat
from tsjax.methods import Auto, Autoregressive, LikelyTree, NGram, TokenSwift, auto
from tsjax.methods.auto import choose, options
from tsjax.methods.cost_model import Costs, Int8Costs, Line
from tsjax.methods.devices import CPU, GPUS, device_of, estimated

PRESETS = ["llama3.1-8b", "llama2-7b-yarn-128k", "qwen2.5-1.5b", "qwen2.5-14b"]
CONTEXTS = [0, 100, 1000, 10_000, 50_000, 100_000, 1_000_000]
PLAIN = Autoregressive()


def preset(name: str = "llama3.1-8b", heads: int = 3) -> tsjax.ModelConfig:
    return tsjax.model_preset(name).with_heads(heads)


LLAMA, WITHOUT_HEADS = preset(), preset(heads=0)


def table(*passes: tuple[int, float], per_token: float = 0.0, **changes) -> Costs:
    """Passes in seconds; by default they are all that takes time."""
    lines = tuple((rows, Line(time, per_token)) for rows, time in passes)
    return Costs(lines, 0.0, Line(0.0), Line(0.0), 0.0, 0.0, "measured")._replace(**changes)


# Rows are free, and the cache outweighs the weights at 10,000 tokens: a GPU with large caches.
FREE_ROWS = table((1, 1.0), (128, 1.0), per_token=1e-3)
DEAR_ROWS = table((1, 1.0), (4, 3.0))


def measured(model, kind, context, batch=1, **changes) -> Measured:
    platform = "cpu" if kind == "cpu" else "gpu"
    return Measured(model, platform, kind, context, batch, **changes)


# --- what drafts promise ---------------------------------------------------------------------

AFTER_PASS = [(0.83 * 0.7, []), (0.83 * 0.18, []), (0.83 * 0.12, [])]  # the second head's
DRAFTS = {  # (chance, what follows): of the text; then with a pass and two heads
    0: [(0.2, [])],
    1: [
        (0.2, []),
        (0.87, [(0.83 * share, AFTER_PASS) for share in (0.7, 0.18, 0.12)]),
        (0.13 * 0.4, []),
        (0.13 * 0.2, []),
    ],
}


def tokens_of_best(drafts, rows):
    """Of the tree that takes the likeliest draft next, until it has so many rows."""
    open_ones, tokens = list(drafts), 1.0
    for _ in range(rows - 1):
        if not open_ones:
            break
        likeliest = max(open_ones, key=lambda draft: draft[0])
        open_ones.remove(likeliest)
        chance, after = likeliest
        tokens += chance
        open_ones += [(chance * share, deeper) for share, deeper in after]
    return tokens


@pytest.mark.parametrize("drafts_per_second", [0.05, 20.0])
@pytest.mark.parametrize("context", [20, 9000])
@pytest.mark.parametrize("weights", ["model", "int8"])
def test_a_promise_by_hand(drafts_per_second, context, weights):
    """A pass on 64 slots that sees the rest summed up, two heads, and the text."""
    table = MIXED._replace(int8=Int8Costs(Line(1.0 / drafts_per_second, 0.25), 1.0))
    method = LikelyTree(
        width=8, pass_widths=(2, 4), places=2, draft_passes=1, heads=True, draft_budget=64,
        num_sinks=16, draft_refresh=8, draft_weights=weights,
    )  # fmt: skip
    slots = min(64, context)
    rows = {2: 12 + 0.5 * context, 4: 16 + 0.5 * context, 8: 24 + 1.5 * context}
    of_text = 0.125 + 0.001 * context + 0.75
    one_pass, heads = 10 + 0.5 * slots, 3.0
    if weights == "int8":
        one_pass, heads = 1.0 / drafts_per_second + 0.25 * slots, 1.0
    of_model = one_pass + 0.5 * slots + heads  # the rest reads the partial cache once more
    choices = (2 + 0.25 * context) / 8 if context > 64 else 0.0  # for each token
    expected = []
    for passes, width in itertools.product((0, 1), rows):
        tokens = tokens_of_best(DRAFTS[passes], width)
        seconds = rows[width] + 4 + of_text
        if passes:
            seconds += of_model + tokens * choices
        expected.append((tokens, seconds, width, passes))
    best = min(expected, key=lambda promise: promise[1] / promise[0])
    assert method.promise(preset(heads=2), table, context)[:4] == pytest.approx(best)


# --- the choice ------------------------------------------------------------------------------


@pytest.mark.parametrize(("eight", "width"), [(1.49, 64), (1.51, 8)])
def test_trees_are_wide_where_rows_are_nearly_free(eight, width):
    for option in options(LLAMA, table((1, 1.0), (8, eight))):
        assert option.width == width
        assert option.pass_widths == ((1, 16, 32) if width == 64 else (1, 2, 3, 4, 6))


def test_int8_drafts_are_chosen_where_they_are_cheaper():
    """And never where they are not offered, or where there is no memory for the copy."""
    fast, slow = (FREE_ROWS._replace(int8=Int8Costs(Line(s, 1e-3), 0.0)) for s in (0.4, 2.0))
    assert choose(WITHOUT_HEADS, fast, 2000).wants_int8
    for others in (slow, FREE_ROWS):
        assert choose(WITHOUT_HEADS, others, 2000).draft_passes
        assert not choose(WITHOUT_HEADS, others, 2000).wants_int8
    assert not any(option.wants_int8 for option in options(LLAMA, FREE_ROWS))
    told = measured(WITHOUT_HEADS, "cpu", 2000, costs=fast)
    assert Auto().next(told) == choose(WITHOUT_HEADS, fast, 2000)
    assert Auto().next(told._replace(int8_fits=False)) == choose(WITHOUT_HEADS, FREE_ROWS, 2000)


@pytest.mark.parametrize(("one_pass", "chosen"), [(0.69, 1), (0.72, 0)])
def test_passes_have_to_promise_clearly_more_than_the_text_alone(one_pass, chosen):
    """Rows are free: 1.2 tokens for each second from the text alone. A pass finds 0.87 + 0.13 * 0.6
    more, so that it gains 5% where it takes less than 0.705 seconds, and some up to 0.79."""
    found = choose(
        WITHOUT_HEADS, table((1, 1.0), (8, 1.0), int8=Int8Costs(Line(one_pass), 0.0)), 100
    )
    assert (found.draft_passes > 0) == chosen and 1.2 < 2.148 / (1 + one_pass)


def test_slow_choices_of_the_partial_cache_are_made_seldom():
    """Each reads the cache, so to speak, a hundred times as slowly as a pass does."""
    usual = table((1, 1.0), (8, 1.2), per_token=1e-4)
    assert choose(WITHOUT_HEADS, usual, 100_000).draft_refresh == 8
    assert choose(WITHOUT_HEADS, usual._replace(choice=Line(5.0)), 100_000).draft_refresh == 32
    slow = usual._replace(choice=Line(0.0, 1e-2))
    assert choose(WITHOUT_HEADS, slow, 100_000).draft_refresh is None


def random_table(rng: random.Random) -> Costs:
    def seconds():
        return 10.0 ** rng.uniform(-6, -1)

    def line():
        return Line(seconds(), 1e-5 * seconds())

    widths = [1, *sorted(rng.sample(range(2, 130), rng.randint(1, 3)))]
    ascending = (sorted(column) for column in zip(*(line() for _ in widths), strict=True))
    return Costs(
        passes=tuple(zip(widths, map(Line, *ascending), strict=True)),  # as it is measured
        heads=seconds(),
        choice=line(),
        suffix=line(),
        ngrams=seconds(),
        overhead=seconds(),
        origin="measured",
        int8=rng.choice([None, Int8Costs(line(), seconds())]),
    )


def test_nothing_that_is_offered_promises_much_more_than_what_is_chosen():
    """For a hundred tables. What drafts with the model does, more than the text alone."""
    rng, alone = random.Random(0), 0
    for _ in range(100):
        costs, context = random_table(rng), rng.choice(CONTEXTS)
        model = preset(heads=rng.choice([0, 1, 3, 5]))
        offered = list(options(model, costs))
        promised = [option.promise(model, costs, context).seconds_per_token for option in offered]
        method = choose(model, costs, context)
        found = promised[offered.index(method)]
        assert found <= auto.PROMISES * min(promised)
        assert method == offered[0] or found * auto.PROMISES < promised[0]
        alone += method == offered[0]
    assert 0 < alone < 100


def test_every_option_can_be_decoded():
    for heads, int8 in itertools.product((0, 1, 3, 5), (None, Int8Costs(Line(0.1), 0.1))):
        model = preset(heads=heads)
        found = list(options(model, FREE_ROWS._replace(int8=int8)))
        assert len(set(found)) == len(found)
        assert {option.heads for option in found} == {False, heads > 0}
        assert {option.wants_int8 for option in found} == {False, int8 is not None}
        depths = {DecodeConfig(model=model, method=option).sizes.depth for option in found}
        assert depths == {24}, "a run may go on with any other"


def test_tables_come_before_the_formula():
    """That of the method, then that of the machine, then the formula."""
    begun = measured(LLAMA, "NVIDIA H200", 50_000)
    assert Auto().next(begun).costs == estimated(LLAMA, GPUS["h200"], 1)
    of_machine = begun._replace(costs=DEAR_ROWS)
    assert Auto().next(of_machine).costs == DEAR_ROWS
    given = Auto(costs=FREE_ROWS)
    assert given.next(of_machine).costs == FREE_ROWS
    assert Auto().wants_costs and not given.wants_costs and not NGram().wants_costs


def test_dear_rows_leave_the_text_alone_and_cheap_ones_draft_with_the_model():
    """Four rows take three times as long as one; or a pass on the partial cache a seventh."""
    for model in (LLAMA, WITHOUT_HEADS):
        dear, free = (choose(model, costs, 10_000) for costs in (DEAR_ROWS, FREE_ROWS))
        assert (
            isinstance(dear, LikelyTree) and dear.places and not (dear.draft_passes or dear.heads)
        )
        assert free.draft_passes + free.heads > 1 and free.heads == (model == LLAMA)
    dear = LikelyTree(draft_passes=4).promise(WITHOUT_HEADS, DEAR_ROWS, 10)
    assert dear[:4] == (1.0, 1.0, 1, 0), "steps may do with fewer passes and narrower trees"
    free = LikelyTree(draft_passes=4).promise(WITHOUT_HEADS, FREE_ROWS, 100_000)
    assert free.passes == 4 and free.width == 16 and free.tokens > 4


def test_short_runs_are_decoded_plainly():
    """As far as that is known: choose_method knows no number of new tokens."""
    begun = measured(LLAMA, "cpu", 1000, costs=FREE_ROWS)
    said = [Auto().next(begun._replace(new_tokens=n)) for n in (1, 256, 257, None)]
    assert said == [PLAIN, PLAIN, *[choose(LLAMA, FREE_ROWS, 1000)] * 2]


@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("name", PRESETS)
def test_drafts_pay_on_a_gpu_by_the_formula(heads, name, kind="NVIDIA H100 80GB HBM3"):
    """And the passes that judge them take little more than plain steps."""
    model = preset(name, heads)
    costs = estimated(model, device_of("gpu", kind), 1)
    for context in (4096, 16_384, 32_768, 100_000):
        method, plain = Auto().next(measured(model, kind, context)), costs.plain(context)
        promise = method.promise(model, costs, context)
        assert costs.of_pass(promise.width, context) + costs.overhead < 1.4 * plain
        gain = plain / promise.seconds_per_token
        assert (1.7 if heads else 1.05) < gain < promise.tokens
        assert method.heads == (heads > 0)
        assert method.wants_int8 or context < 100_000


@pytest.mark.parametrize("method", [PLAIN, NGram(), TokenSwift(tree=(2,)), LikelyTree(places=3)])
def test_what_is_named_is_kept(method):
    """A LikelyTree without a table begins with that of the machine, or the formula's."""
    begun = measured(LLAMA, "cpu", 1000)
    given = isinstance(method, LikelyTree)
    formula = estimated(LLAMA, CPU, begun.batch)
    first = dataclasses.replace(method, costs=formula) if given else method
    assert method.next(begun) == first
    slow = begun._replace(current=method, steps=10_000, tokens=10_000, seconds=1e9)
    assert method.next(slow) == method
    told = method.next(begun._replace(costs=MIXED))
    assert told == (dataclasses.replace(method, costs=MIXED) if given else method)
    assert method.wants_costs == given and not told.wants_costs


# --- seconds decide --------------------------------------------------------------------------

BEGUN = choose(LLAMA, MIXED, 20)  # a plain step takes 24 s
OTHER = dataclasses.replace(BEGUN, places=4)
SHALLOW = LikelyTree(width=4, pass_widths=(1,), places=4, costs=MIXED)
LONG = 1e9  # seconds since the method was taken


def tried(method, seconds, context=20, tokens_per_step=2.0):
    return Tried(method, seconds, context, tokens_per_step)


@pytest.mark.parametrize(
    ("current", "seconds", "others", "since", "follows"),
    [
        # Plain decoding is tried early, unless drafts take less than 0.85 of a plain step.
        (BEGUN, 20.3, (), 0, BEGUN),
        (BEGUN, 20.5, (), 0, PLAIN),
        (BEGUN, 20.5, (tried(OTHER, 21.0),), 0, PLAIN),
        (BEGUN, 20.5, (tried(PLAIN, 24.0),), 0, BEGUN),
        # What is slower than a known one by more than 2% gives way to the best of these.
        (BEGUN, 23.7, (tried(PLAIN, 23.3),), 0, BEGUN),
        (BEGUN, 24.3, (tried(PLAIN, 23.3),), 0, PLAIN),
        (PLAIN, 24.0, (tried(BEGUN, 23.7),), 0, PLAIN),
        (PLAIN, 24.0, (tried(BEGUN, 23.3),), 0, BEGUN),
        (PLAIN, 24.0, (tried(BEGUN, 23.0), tried(OTHER, 20.0)), 0, OTHER),
        (PLAIN, 24.0, (tried(PLAIN, 1.0), tried(BEGUN, 23.0)), 0, BEGUN),  # as it once was
        # In plain steps: one took 14 s where nothing was known yet.
        (BEGUN, 24.3, (tried(PLAIN, 14.0, 0),), 0, BEGUN),
        (BEGUN, 24.6, (tried(PLAIN, 14.0, 0),), 0, PLAIN),
        # A trial of 96 steps of 24 s each, of which 0.15 are lost at least, for a hundredth.
        (PLAIN, 24.0, (tried(BEGUN, 26.0),), 34_500, PLAIN),
        (PLAIN, 24.0, (tried(BEGUN, 26.0),), 34_600, BEGUN),
        (PLAIN, 24.0, (tried(BEGUN, 48.0),), 230_000, PLAIN),  # all of it
        (PLAIN, 24.0, (tried(BEGUN, 48.0),), 230_800, BEGUN),
        (BEGUN, 12.0, (tried(PLAIN, 24.0),), 115_000, BEGUN),
        (BEGUN, 12.0, (tried(PLAIN, 24.0),), 115_400, PLAIN),
        # What promises most by now is tried as well, without being known.
        (OTHER, 12.0, (tried(PLAIN, 24.0),), 17_200, OTHER),
        (OTHER, 12.0, (tried(PLAIN, 24.0),), 17_300, BEGUN),
        (OTHER, 12.0, (), 17_300, BEGUN),
        # Not where its trees are deeper than those that the buffers were made for.
        (SHALLOW, 12.0, (), LONG, SHALLOW),
        (SHALLOW, 12.0, (tried(PLAIN, 24.0),), LONG, PLAIN),
        (PLAIN, 24.0, (tried(SHALLOW, 30.0),), LONG, SHALLOW),
        (PLAIN, 24.0, (tried(SHALLOW, 30.0), tried(OTHER, 30.0)), LONG, BEGUN),
    ],
)
def test_seconds_decide(current, seconds, others, since, follows):
    so_far = measured(
        LLAMA, "cpu", 20, current=current, steps=64, tokens=100, seconds=100 * seconds,
        since=since, tried=others, costs=MIXED,
    )  # fmt: skip
    assert Auto().next(so_far) == follows
    for early in ({"steps": 63}, {"tokens": 0}):
        assert Auto().next(so_far._replace(**early)) == current


@pytest.mark.parametrize(("tokens", "follows"), [(101, PLAIN), (102, BEGUN)])
def test_drafts_that_find_nothing_are_left_whatever_the_clock_says(tokens, follows):
    """A step with drafts does all that a plain one does: a busy machine may only seem to differ."""
    drafting = measured(
        LLAMA, "cpu", 20, current=BEGUN, steps=100, tokens=tokens, seconds=1e-3, costs=MIXED
    )
    assert Auto().next(drafting) == follows
    fast = tried(BEGUN, 1e-3, tokens_per_step=tokens / 100)
    plain = drafting._replace(current=PLAIN, tokens=100, seconds=2400.0, tried=(fast,))
    assert Auto().next(plain) == follows


def test_a_trial_of_many_rows_takes_as_many_steps_of_each():
    so_far = measured(
        LLAMA, "cpu", 20, batch=3, current=PLAIN, steps=300, tokens=300, seconds=300 * 24.0,
        tried=(tried(BEGUN, 26.0),), costs=MIXED,
    )  # fmt: skip
    found = [Auto().next(so_far._replace(since=3 * since)) for since in (34_500, 34_600)]
    assert found == [PLAIN, BEGUN]


@pytest.mark.parametrize(
    ("current", "repeats", "since", "tries"),
    [
        (PLAIN, 8, 3460, True),
        (PLAIN, 7, 3460, False),
        (BEGUN, 8, 34_500, False),  # drafts find repetitions as they are
    ],
)
def test_a_text_that_repeats_itself_is_worth_ten_times_the_trial(current, repeats, since, tries):
    other = tried(BEGUN if current == PLAIN else PLAIN, 26.0)
    so_far = measured(
        LLAMA, "cpu", 20, current=current, steps=100, tokens=150, seconds=150 * 24.0,
        since=since, tried=(other,), repeats=repeats, costs=MIXED,
    )  # fmt: skip
    assert Auto().next(so_far) == (other.method if tries else current)


def test_how_much_of_the_end_stood_there_before():
    """Against a search for each size. What lies beyond a row's length does not count."""

    def longest(text):
        sizes = range(1, min(len(text) - 1, 16) + 1)
        return max(
            (n for n in sizes if any(text[i - n : i] == text[-n:] for i in range(n, len(text)))),
            default=0,
        )

    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, rng.integers(1, 4), (2, 30)).astype(np.int32)
        lengths = rng.integers(1, 31, 2)
        rows = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
        expected = int(np.mean([*map(longest, rows)]))
        assert mean_repeat(tokens, lengths) == expected


def test_no_copy_in_int8_is_made_while_a_run_goes_on():
    """Nobody knows whether there is memory for it."""
    costs = FREE_ROWS._replace(int8=Int8Costs(Line(0.4), 0.0))
    text, in_int8 = next(options(LLAMA, costs)), choose(LLAMA, costs, 2000)
    narrower = dataclasses.replace(in_int8, places=4)
    assert in_int8.wants_int8 and not text.wants_int8
    for current, follows in ((text, text), (narrower, in_int8)):
        so_far = measured(
            LLAMA, "cpu", 2000, current=current, steps=100, tokens=150, seconds=150.0,
            since=LONG, costs=costs,
        )  # fmt: skip
        assert Auto().next(so_far) == follows


@pytest.mark.parametrize("seconds", [1e-3, 1e3])
def test_an_estimate_has_the_proportions_alone(seconds):
    """Whatever the clock says, plain decoding is tried, and what took less goes on."""
    costs = MIXED._replace(origin="estimated")
    begun = choose(LLAMA, costs, 20)
    drafting = measured(
        LLAMA, "cpu", 20, current=begun, steps=100, tokens=150, seconds=150 * seconds, costs=costs
    )
    assert Auto().next(drafting) == PLAIN
    for factor, follows in ((1.01, PLAIN), (1.03, begun)):
        plain = drafting._replace(
            current=PLAIN, seconds=factor * drafting.seconds, tried=(tried(begun, seconds),)
        )
        assert Auto().next(plain) == follows

# SPDX-License-Identifier: Apache-2.0
"""The table of costs: what is measured, by a clock that the test turns, and where it is kept."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os

import jax
import numpy as np
import pytest
from helpers import tiny_config, tiny_model

import tsjax
from tsjax.host import costs, judge, measuring, run
from tsjax.host.costs import costs_of
from tsjax.methods.cost_model import Costs, Int8Costs, Line, as_costs
from tsjax.methods.devices import CPU, estimated
from tsjax.model.cache import init_cache
from tsjax.model.params import abstract_params
from tsjax.model.passes import run_layers

MODEL = tiny_model(num_draft_heads=2)
TABLE = Costs(  # by which plain decoding is the fastest
    passes=((1, Line(1.0, 0.25)), (8, Line(100.0, 25.0))),
    heads=0.5,
    choice=Line(0.25),
    suffix=Line(0.125),
    ngrams=0.0,
    overhead=0.0625,
    origin="measured",
)


class Said(measuring.Clocked):
    """A part whose seconds are said here, some of them for each token of context."""

    def __init__(self, line):
        self.line = line

    def compile(self):
        pass

    def seconds(self, context, clock):
        return self.line[0] + self.line[1] * context


SECONDS = {
    1: (6.0, 0.25), 4: (7.0, 0.25), 8: (9.0, 0.5), 16: (12.0, 0.5),
    ("tokens", 1): (2.0, 0.0), ("tokens", 8): (9.0, 0.0),
    "int8": (2.5, 0.25), ("int8", "tokens"): (1.5, 0.0), "choice": (4.0, 0.5),
}  # fmt: skip


def table_of(monkeypatch, seconds, heads=2, times=1.0, at_once=True):
    class FakeParts:
        contexts, rows = (500, 4500), (1, 4, 8, 16)

        def __init__(self, *_):
            self._parts = {name: Said(line) for name, line in seconds.items()}

        def passes(self, rows, in_int8=False):
            return [measuring.Share(self._parts["int8" if in_int8 else rows], times)]

        def tokens(self, rows, in_int8=False):
            return measuring.Share(self._parts["int8" if in_int8 else "tokens", "tokens"
                                               if in_int8 else rows])  # fmt: skip

        def choice(self):
            return measuring.Share(self._parts["choice"], times)

    monkeypatch.setattr(measuring, "Parts", FakeParts)
    cfg = tiny_config(num_layers=2, num_draft_heads=heads)
    if at_once:
        return measuring.measure(MODEL.params, cfg, 1, 4096)
    going = measuring.pieces(MODEL.params, cfg, 1, 4096)
    with pytest.raises(StopIteration) as end:
        while True:
            next(going)
    return end.value.value


def test_the_table_is_the_sum_of_its_parts(monkeypatch):
    """Each further row takes a second to choose its token."""
    found, formula = table_of(monkeypatch, SECONDS), estimated(MODEL.cfg, CPU, 1)
    assert found == Costs(
        passes=(
            (1, Line(6.0, 0.25)), (4, Line(10.0, 0.25)), (8, Line(16.0, 0.5)),
            (16, Line(27.0, 0.5)),
        ),
        heads=2.0 + 2 * 1.0,
        choice=Line(4.0, 0.5),
        suffix=formula.suffix,
        ngrams=formula.ngrams,
        overhead=formula.overhead,
        origin="measured",
        int8=Int8Costs(Line(2.5, 0.25), 1.5 + 2 * 1.0),
        any_rows=formula.any_rows,
    )  # fmt: skip
    assert table_of(monkeypatch, SECONDS, at_once=False) == found, "in pieces, too"
    without = table_of(monkeypatch, SECONDS, heads=0)
    assert without.heads == without.int8.heads == 0
    twice = table_of(monkeypatch, SECONDS, times=2.0)  # where half of the layers stand for all
    assert twice.passes[1][1] == Line(14.0 + 3.0, 0.5) and twice.choice == Line(8.0, 1.0)
    wrong = SECONDS | {4: (0.5, 0.125), 8: (90.0, 0.25), "choice": (9000.0, -1.0)}
    found = table_of(monkeypatch, wrong)  # noise makes no part cheaper than a smaller one
    assert found.passes[1][1] == Line(6.0, 0.25) and found.choice.per_token == 0
    assert found.passes[2][1] == Line(8 * 6.0, 0.25), "nor dearer than its rows one by one"
    found = table_of(monkeypatch, SECONDS | {1: (-100.0, 0.25), "tokens": (0.0, 0.0)})
    assert as_costs(found).of_pass(1, 0) > 0, "weights take time, whatever noise says"


class Memory:
    """A machine: what was read lately is in its cache, and is read ten times as fast from there."""

    def __init__(self, nbytes, weights):
        self.nbytes, self.now, self._lately = nbytes, 0.0, {}
        self._weights = {*map(id, weights)}

    def read(self, arrays):
        for array in arrays:
            self.now += 1e-9 * array.nbytes * (0.1 if id(array) in self._lately else 1.0)
            self._lately.pop(id(array), None)
            self._lately[id(array)] = array.nbytes
            while sum(self._lately.values()) > self.nbytes:
                self._lately.pop(next(iter(self._lately)))

    def program(self, function, **_):
        def run(carry, *inputs):
            self.read(x for x in jax.tree.leaves(inputs) if id(x) in self._weights)
            return carry

        return run


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 2.0])
def test_the_table_is_that_of_whole_passes(kept, monkeypatch):
    """Whatever share of the weights a processor keeps in its cache: the seconds of a pass are those
    of steps that read the whole model again and again. Three layers that stand for all stay in the
    cache, and are ten times too fast."""
    model = tiny_model(num_layers=12, vocab_size=300)
    whole = [*jax.tree.leaves(model.params.model.layers), model.params.model.embed]
    memory = Memory(kept * sum(array.nbytes for array in whole), whole)
    for _ in range(3):
        begun = memory.now
        memory.read(whole)
    expected = memory.now - begun

    class OnMachine(measuring.Parts):
        def __init__(self, *given):
            super().__init__(*given)
            self._jit = memory.program

        def choice(self):
            return measuring.Share(Said((1.0, 0.0)))

    monkeypatch.setattr(measuring, "Parts", OnMachine)
    found = measuring.measure(model.params, model.cfg, 1, 64, lambda: memory.now)
    assert all(abs(line.at(64) / expected - 1) < 0.15 for _, line in found.passes)
    if 0.1 < kept < 1:
        monkeypatch.setattr(measuring, "MOST_WEIGHTS", 1)
        monkeypatch.setattr(measuring, "PROGRAM_LAYERS", 3)
        found = measuring.measure(model.params, model.cfg, 1, 64, lambda: memory.now)
        assert found.passes[0][1].at(64) < 0.5 * expected


@pytest.mark.parametrize("layers", [1, 4])
def test_parts_do_what_they_say(layers, monkeypatch):
    """All layers in turn, one by one or together; the first row's token; the partial cache."""
    monkeypatch.setattr(measuring, "PROGRAM_LAYERS", layers)
    model = tiny_model(num_layers=4)
    ticks, parts = itertools.count(), measuring.Parts(model.params, model.cfg, 3, 64)
    (share,) = parts.passes(4)
    share.part.compile()
    assert 0 < share.part.seconds(40, lambda: 1e-3 * next(ticks)) and share.times == 1
    hidden = np.random.default_rng(0).standard_normal((3, 4, 32)).astype(np.float32)
    share.part._begin = (hidden, hidden[:, :1])
    layered = share.part.run(share.part.calls(0)[:-2])  # without the choice of tokens
    cache = init_cache(model.cfg, 3, 64, None)
    positions = np.broadcast_to(np.arange(4, dtype=np.int32), (3, 4))
    mask, all_layers = np.tril(np.ones((4, 4), bool)), range(4)
    passed = run_layers(
        model.params.model, cache, hidden, positions, mask, all_layers, cfg=model.cfg
    ).hidden
    np.testing.assert_allclose(layered[0], passed, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(layered[1], layered[0][:, :1])

    part = parts.choice().part
    part.compile()
    part.seconds(40, lambda: 1e-3 * next(ticks))
    assert part._carry.length.tolist() == part._carry.seen.tolist() == [40] * 3
    part = parts.tokens(8).part
    noise = tsjax.decoding.noise.position_noise(
        tsjax.steps.row_keys([0] * 3, [0] * 3), np.tile(np.arange(8, dtype=np.int32), (3, 1)), 61,
        np.float32,
    )  # fmt: skip
    assert part.run(part.calls(0)).tolist() == np.argmax(noise, axis=2).tolist()


def test_a_model_with_a_drafter_is_measured_by_few_layers(monkeypatch):
    for name, value in {"PROGRAM_LAYERS": 1, "ROWS_OF_CPU": (1, 4), "REPETITIONS": 1}.items():
        monkeypatch.setattr(measuring, name, value)
    shape = tsjax.training.OneLayer(mlp_dim=16, words=8, taps=(0, 2, 4))
    model = tiny_model(num_layers=4, drafter=shape)
    found = measuring.measure(model.params, model.cfg, 1, 64)
    assert 0 < found.one_layer < found.plain(64)


def test_a_chain_of_drafts_reads_its_weights_from_memory():
    """As in a step, which has read the whole model before them."""
    shape = tsjax.training.OneLayer(mlp_dim=16, words=8, taps=(12,))
    model = tiny_model(num_layers=12, drafter=shape)
    layers, drafter = map(jax.tree.leaves, (model.params.model.layers, model.params.drafter))
    nbytes = sum(array.nbytes for array in drafter)
    memory = Memory(2 * nbytes, [*layers, *drafter])
    parts = measuring.Parts(model.params, model.cfg, 1, 64)
    parts._jit = memory.program
    part = parts.chain(parts.passes(1)[0].part).part
    part._program = lambda count, carry, inputs: (memory.read(drafter), carry)[1]
    assert part.seconds(40, lambda: memory.now) == pytest.approx(1e-9 * nbytes)


@pytest.mark.parametrize(("longest", "bucket"), [(1, 1024), (1025, 4096), (10**7, 2**18)])
def test_runs_of_about_one_length_have_one_table(longest, bucket):
    assert measuring.context_bucket(longest) == bucket


# --- the file --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder, and how often was measured."""
    monkeypatch.setenv("TSJAX_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(costs, "_KNOWN", {})
    calls = []
    monkeypatch.setattr(costs, "measure", lambda *given: calls.append(given) or TABLE)
    return tmp_path / "kept" / "costs", calls


def in_a_new_process(monkeypatch):
    monkeypatch.setattr(costs, "_KNOWN", {})


def of_model(model=MODEL, batch=1, context=100):
    return costs_of(model.params, model.cfg, batch, context)


def test_a_table_is_measured_once(folder, monkeypatch):
    place, calls = folder
    assert of_model() == of_model() == TABLE and len(calls) == 1
    assert len(list(place.iterdir())) == 1
    in_a_new_process(monkeypatch)
    found = of_model()
    assert found == TABLE and isinstance(found.passes[1][1], Line) and len(calls) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\xff",
        b"{}",
        {"costs": [1, 2]},
        {"costs": [[[1, [-1.0, 0.0]], [8, [1.0, 0.0]]], 0, [0, 0], [0, 0], 0, 0, "measured"]},
        {"costs": [[[1, [None, 0.0]], [8, [1.0, 0.0]]], 0, [0, 0], [0, 0], 0, 0, "measured"]},
        {"key": {"of": "another machine"}},
    ],
)
def test_a_damaged_file_is_measured_anew(folder, monkeypatch, content):
    place, calls = folder
    of_model()
    (file,) = place.iterdir()
    if isinstance(content, dict):
        content = json.dumps(json.loads(file.read_bytes()) | content).encode()
    file.write_bytes(content)
    in_a_new_process(monkeypatch)
    assert of_model() == TABLE and len(calls) == 2
    in_a_new_process(monkeypatch)
    assert of_model() == TABLE and len(calls) == 2, "it was written anew"


@pytest.mark.parametrize("place", ["", "/dev/null/here"])
def test_where_nothing_is_kept(place, folder, monkeypatch, tmp_path):
    _, calls = folder
    monkeypatch.setenv("TSJAX_CACHE", place)
    of_model()
    assert of_model() == TABLE and len(calls) == 1, "but it is known in this process"
    assert list(tmp_path.iterdir()) == []


def test_another_key_is_another_table(folder, monkeypatch):
    place, calls = folder
    of_model()
    of_model(batch=2)
    of_model(context=600)
    of_model(tiny_model(num_layers=3))
    of_model(tiny_model(num_draft_heads=2, dtype="bfloat16"))
    mesh = jax.make_mesh((2,), ("data",))
    of_model(tiny_model(num_draft_heads=2, mesh=mesh))
    monkeypatch.setenv("XLA_FLAGS", "--other")
    of_model()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(96), raising=False)
    of_model()
    monkeypatch.setattr(costs, "tsjax_version", lambda: "later")
    of_model()
    assert len(calls) == len(list(place.iterdir())) == 9
    of_model()
    assert len(calls) == 9


# --- measured or estimated -------------------------------------------------------------------


def test_what_cannot_run_is_estimated(folder):
    """Weights that are shapes, and a trace: nothing is measured, and the table says so."""
    _, calls = folder
    shapes = dataclasses.replace(MODEL, params=abstract_params(MODEL.cfg))
    found = tsjax.costs.choose_method("tokenswift", shapes, 1000, batch=2)
    assert found.costs == estimated(MODEL.cfg, CPU, 2) and found.costs.origin == "estimated"

    traced = []

    def trace(params):
        traced.append(costs_of(params, MODEL.cfg, 1, 100))
        return 0

    jax.jit(trace)(MODEL.params)
    assert traced == [estimated(MODEL.cfg, CPU, 1)] and not calls
    assert tsjax.costs.choose_method("tokenswift", MODEL, 1000).costs == TABLE and len(calls) == 1


def test_nothing_is_measured_for_methods_that_do_not_ask(folder):
    _, calls = folder
    tsjax.generate(MODEL, [1, 2], max_new_tokens=4)
    assert tsjax.costs.choose_method(tsjax.Auto(costs=TABLE), MODEL, 100).costs == TABLE
    for known in (False, True):
        found = tsjax.generate(MODEL, [1, 2], method="auto", max_new_tokens=400)
        assert found.stats.method.costs.origin == ("measured" if known else "estimated")
        assert len(calls) == known, "not before a run"
        of_model(context=202)


# --- in pieces ---------------------------------------------------------------------------------


def test_a_run_measures_in_pieces(folder, monkeypatch):
    """As many as its seconds allow; then it goes on by the table, and so do later ones."""
    now, made = [0.0], []

    def some(*given):
        for number in range(5):
            now[0] += 0.25
            made.append(number)
            yield
        return TABLE

    monkeypatch.setattr(costs, "pieces", some)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0])
    one_piece = costs.PIECE / costs.MEASURING_SHARE
    measuring_within = costs.Measuring(MODEL, True, 1, 100)
    for elapsed, count in ((0, 0), (0.9, 0), (1.1, 1), (1.5, 1), (2.0, 2), (3.5, 4)):
        assert measuring_within.go_on(elapsed * one_piece) is None and len(made) == count
    assert measuring_within.go_on(100 * one_piece) == TABLE and len(made) == 5
    assert measuring_within.go_on(200 * one_piece) is None and len(made) == 5, "once"
    _, calls = folder
    assert of_model() == TABLE and not calls
    assert costs.Measuring(MODEL, False, 1, 100).go_on(1e9) is None and len(made) == 5
    monkeypatch.setattr(costs, "available_bytes", lambda device: 0)
    assert costs.Measuring(MODEL, True, 1, 100).go_on(1e9) is None and len(made) == 5


# --- what a plain step takes -------------------------------------------------------------------


def test_what_a_plain_step_took_is_kept_for_later_runs(folder, monkeypatch):
    """Of runs as long and of as many rows; what cannot be read is not believed."""
    monkeypatch.setattr(judge, "STEPS_TO_KEEP", (16, 128))
    settings = dict(max_new_tokens=300, capacity=1024, prefill_width=16)
    assert costs.earlier_plain(MODEL, 1, 152) is None
    monkeypatch.setattr(run, "_next_chunk", lambda steps, *_: 16)
    tsjax.generate(MODEL, [1, 2], **settings)
    kept = costs.earlier_plain(MODEL, 1, 152)
    assert kept.method == tsjax.methods.Autoregressive()
    assert 0 < kept.seconds < 10 and kept.context > 128
    assert costs.earlier_plain(MODEL, 2, 152) is None is costs.earlier_plain(MODEL, 1, 5000)
    assert costs.measured_on(tsjax.Auto(), MODEL, 152, 1).plain == kept
    assert costs.measured_on(tsjax.Auto(costs=TABLE), MODEL, 152, 1).plain is None
    (file,) = folder[0].iterdir()
    for content in ("", "[]", '{"seconds": -1, "context": 1}', '{"seconds": 1}'):
        file.write_text(content)
        assert costs.earlier_plain(MODEL, 1, 152) is None
    monkeypatch.setenv("TSJAX_CACHE", "")
    costs.keep_plain(MODEL, 1, 152, 1.0, 9)
    assert costs.earlier_plain(MODEL, 1, 152) is None


# --- a table that a run contradicts ------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "measured"), [(1e6, 2), pytest.param(1e-9, 1, marks=pytest.mark.wide)]
)
def test_a_table_that_plain_steps_contradict_is_measured_anew(
    folder, monkeypatch, factor, measured
):
    """As after a measurement on a busy machine. This run goes on by it, the next has another."""
    place, calls = folder
    slow = tuple((rows, Line(factor * line.seconds, 0.0)) for rows, line in TABLE.passes)
    table = TABLE._replace(passes=slow, overhead=0.0)
    monkeypatch.setattr(costs, "measure", lambda *given: calls.append(given) or table)
    monkeypatch.setattr(run, "_next_chunk", lambda steps, *_: 64)
    settings = dict(max_new_tokens=900, capacity=1024, prefill_width=16, do_sample=True)
    for _ in range(2):
        of_model(context=452)
        tsjax.generate(MODEL, [1, 2], method="auto", **settings)
        kept = place.exists() and len(list(place.iterdir()))
        assert bool(kept) == (measured == 1)
        in_a_new_process(monkeypatch)
    assert len(calls) == measured

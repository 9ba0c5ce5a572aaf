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
from tsjax.host import costs, measuring
from tsjax.host.costs import costs_of
from tsjax.methods.cost_model import Costs, Int8Costs, Line
from tsjax.methods.devices import CPU, estimated
from tsjax.model.params import abstract_params

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


class FakeParts(measuring.Parts):
    """Parts whose seconds are said here: a name, and seconds for each token of context."""

    seconds: dict

    def part(self, name):
        class Part:
            def compile(self):
                pass

            def seconds(self, context, clock, line=self.seconds[name]):
                return line[0] + line[1] * context

        return Part()

    def __init__(self, params, cfg, batch):
        self.contexts, self.layers = (500, 4500), 1

    def layer(self, rows, in_int8=False):
        return self.part(("layer", "int8" if in_int8 else rows))

    def tokens(self, rows, in_int8=False):
        return self.part(("tokens", "int8" if in_int8 else rows))

    choice, suffix, ngrams, end_step = (
        lambda self, name=name: self.part(name) for name in ("choice", "suffix", "ngrams", "end")
    )


SECONDS = {
    ("layer", 1): (1.0, 0.25), ("layer", 8): (3.0, 0.25), ("layer", 64): (20.0, 0.5),
    ("tokens", 1): (2.0, 0.0), ("tokens", 8): (9.0, 0.0),
    ("layer", "int8"): (0.5, 0.25), ("tokens", "int8"): (1.5, 0.0),
    "choice": (4.0, 0.5), "suffix": (0.5, 0.125), "ngrams": (0.75, 0.0), "end": (0.25, 0.0),
}  # fmt: skip


def table_of(monkeypatch, seconds, layers=2, heads=2):
    monkeypatch.setattr(FakeParts, "seconds", seconds, raising=False)
    monkeypatch.setattr(measuring, "Parts", FakeParts)
    cfg = tiny_config(num_layers=layers, num_draft_heads=heads)
    return measuring.measure(None, cfg, 1)


def test_the_table_is_the_sum_of_its_parts(monkeypatch):
    """Two layers, and the choice of one token per row: 2 s, and 1 s for each further row."""
    found = table_of(monkeypatch, SECONDS)
    assert found == Costs(
        passes=((1, Line(4.0, 0.5)), (8, Line(15.0, 0.5)), (64, Line(105.0, 1.0))),
        heads=2.0 + 2 * 1.0,
        choice=Line(8.0, 1.0),
        suffix=Line(0.5, 0.125),
        ngrams=0.75,
        overhead=0.25,
        origin="measured",
        int8=Int8Costs(Line(2.5, 0.5), 1.5 + 2 * 1.0),
    )
    without = table_of(monkeypatch, SECONDS, heads=0)
    assert without.heads == without.int8.heads == 0
    wrong = SECONDS | {("layer", 8): (0.5, 0.125), "choice": (9000.0, -1.0), "suffix": (-1, 0.125)}
    found = table_of(monkeypatch, wrong)  # noise makes no part cheaper than a smaller one
    assert found.passes[1][1] == Line(10.0, 0.5) and found.choice.per_token == 0
    assert found.suffix.seconds == 0
    dear = SECONDS | {("layer", 8): (3.0, 0.6)}  # wide passes are not worth measuring
    assert [rows for rows, _ in table_of(monkeypatch, dear).passes] == [1, 8]


@pytest.mark.wide
@pytest.mark.parametrize("devices", [(2, 2), None])
def test_seconds_of_a_turn(devices, monkeypatch):
    """A clock that says 1/1024 s for each call: the longer calls have 20 turns.

    The rest is the sum of the parts, as above; both layers of the model are measured together.
    """
    monkeypatch.setattr(measuring, "FAR", 64)
    mesh = jax.make_mesh(devices, ("data", "model")) if devices else None
    dtype = "float32" if devices else "bfloat16"
    model, ticks = tiny_model(num_draft_heads=2, dtype=dtype, mesh=mesh), itertools.count()
    found = measuring.measure(model.params, model.cfg, 2, clock=lambda: next(ticks) / 1024)
    turn = 1 / 1024 / 20
    assert found == Costs(
        passes=tuple((rows, Line(2 * turn)) for rows in (1, 8, 64)),
        heads=turn,
        choice=Line(2 * turn),
        suffix=Line(turn),
        ngrams=turn,
        overhead=turn,
        origin="measured",
        int8=Int8Costs(Line(2 * turn), turn),
    )


def test_parts_do_what_they_say():
    """After some turns: the layer's output, the tokens chosen, n-grams entered, tokens emitted."""
    ticks = itertools.count()

    def after(part, context=40):
        part.compile()
        for _ in range(measuring.REPETITIONS):
            part.seconds(context, lambda: 1e-3 * next(ticks))
        return part._carry

    parts = measuring.Parts(MODEL.params, MODEL.cfg, 3)
    layer = after(parts.layer(4))
    assert layer.shape == (3, 4, 32)
    draft = after(parts.choice())
    assert draft.length.tolist() == [40] * 3 and draft.seen.tolist() == [40] * 3
    table, found = after(parts.ngrams())
    assert int(table.counts[0, 0]) > 1 and int(table.entered[0]) == 40 - 3
    assert found.shape == (3, 20, 3)
    state = after(parts.end_step())
    assert state.length.tolist() == [80] * 3 and not state.running.any()
    tokens = after(parts.tokens(8))
    noise = tsjax.decoding.noise.position_noise(
        tsjax.row_keys([0] * 3, [0] * 3), np.tile(np.arange(8, dtype=np.int32), (3, 1)), 61,
        np.float32,
    )  # fmt: skip
    assert tokens.tolist() == np.argmax(noise, axis=2).tolist()


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


def of_model(model=MODEL, batch=1):
    return costs_of(model.params, model.cfg, batch)


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
    assert len(calls) == len(list(place.iterdir())) == 8
    of_model()
    assert len(calls) == 8


# --- measured or estimated -------------------------------------------------------------------


def test_what_cannot_run_is_estimated(folder):
    """Weights that are shapes, and a trace: nothing is measured, and the table says so."""
    _, calls = folder
    shapes = dataclasses.replace(MODEL, params=abstract_params(MODEL.cfg))
    found = tsjax.choose_method("tokenswift", shapes, 1000, batch=2)
    assert found.costs == estimated(MODEL.cfg, CPU, 2) and found.costs.origin == "estimated"

    traced = []

    def trace(params):
        traced.append(costs_of(params, MODEL.cfg, 1))
        return 0

    jax.jit(trace)(MODEL.params)
    assert traced == [estimated(MODEL.cfg, CPU, 1)] and not calls
    assert tsjax.choose_method("tokenswift", MODEL, 1000).costs == TABLE and len(calls) == 1


def test_nothing_is_measured_for_methods_that_do_not_ask(folder):
    _, calls = folder
    tsjax.generate(MODEL, [1, 2], max_new_tokens=4)
    assert tsjax.choose_method(tsjax.Auto(costs=TABLE), MODEL, 100).costs == TABLE
    found = tsjax.generate(MODEL, [1, 2], method="auto", max_new_tokens=4)
    assert not calls and found.stats.method == tsjax.Autoregressive(), "so short a run is plain"


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
    settings = dict(max_new_tokens=900, capacity=1024, prefill_width=16, do_sample=True)
    for _ in range(2):
        tsjax.generate(MODEL, [1, 2], method="auto", **settings)
        kept = place.exists() and len(list(place.iterdir()))
        assert bool(kept) == (measured == 1)
        in_a_new_process(monkeypatch)
    assert len(calls) == measured

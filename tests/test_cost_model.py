# SPDX-License-Identifier: Apache-2.0
"""What a step takes by a table of seconds, and the formula that fills the table for a device."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from helpers import MIXED_COSTS as MIXED
from helpers import tiny_config

import tsjax
from tsjax.methods import Auto, Autoregressive, NGram, TokenSwift
from tsjax.methods.cost_model import Int8Costs, Line, as_costs
from tsjax.methods.devices import CPU, GPUS, device_of, estimated, pass_line, pass_work
from tsjax.methods.model_drafts import PASS_WITH_REST_IS_RIGHT
from tsjax.methods.ngram import REPEAT_IS_RIGHT, REPEATS

LLAMA_8B = dict(
    vocab_size=128_256, embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    mlp_dim=14_336, dtype="bfloat16",
)  # fmt: skip
CONTEXTS = [0, 100, 1000, 10_000, 50_000, 100_000, 1_000_000]


def llama(heads: int = 3, **changes) -> tsjax.ModelConfig:
    return tiny_config(num_draft_heads=heads, **{**LLAMA_8B, **changes})


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
        return method.promise(model, MIXED, context).seconds

    # What is displaced is chosen again after 48 tokens, of which a step finds some.
    tokens = 1 + 0.8 + 0.8**2
    assert method.promise(model, MIXED, context).tokens == pytest.approx(tokens)
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
    promise = method.promise(llama(), MIXED, 100)
    assert promise.seconds == pytest.approx(expected)
    right = [REPEAT_IS_RIGHT**n for n in range(1, 8)]
    assert promise.tokens == pytest.approx(1 + REPEATS * sum(right))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("passes", ()),
        ("passes", ((1, (1.0, 0.0)),)),
        ("passes", ((2, (1.0, 0.0)), (4, (1.0, 0.0)))),
        ("passes", ((1, (1.0, 0.0)), (4, (1.0, 0.0)), (3, (1.0, 0.0)))),
        ("passes", ((1, (1.0, 0.0)), (4.5, (1.0, 0.0)))),
        ("choice", (1.0, -0.5)),
        ("suffix", (1.0, 2.0, 3.0)),
        ("heads", float("nan")),
        ("ngrams", float("inf")),
        ("overhead", "much"),
        ("origin", "guessed"),
        ("int8", (1.0, 2.0)),
        ("int8", ((1.0, -1.0), 2.0)),
        ("int8", ((1.0, 0.0), float("nan"))),
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
    with_int8 = MIXED._replace(int8=Int8Costs(Line(1.0, 0.5), 2.0))
    found = as_costs(lists(with_int8))
    assert found == with_int8 and isinstance(found.int8, Int8Costs)
    any_rows = with_int8._replace(any_rows=True)
    assert as_costs(lists(any_rows)) == any_rows
    for fewer in (1, 2):
        assert as_costs(lists(MIXED)[:-fewer]) == MIXED, "of a run that was saved before"


def test_a_table_is_moved_to_what_a_plain_step_took():
    moved = MIXED.with_plain(30.0, 20)
    assert moved.plain(20) == 30.0
    for rows in (2, 4, 10):
        assert moved.of_pass(rows, 20) == MIXED.of_pass(rows, 20) + 6
    assert MIXED.with_plain(1e-9, 20).of_pass(1, 0) > 0


# --- the estimate ----------------------------------------------------------------------------


LLAMA2_7B = llama(0, num_kv_heads=32, mlp_dim=11_008, vocab_size=32_000)
WEIGHTS = 32 * (4096 * 128 * 2 * (32 + 8) + 3 * 4096 * 14_336)
VOCABULARY = 128_256 * 4096
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def results(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_work_of_a_pass():
    """Llama-3.1-8B: 15.0 GB of weights that a pass reads (the embedding is looked up), 131,072
    bytes of cache per token, and four query heads for each kv head, as in docs/kernels.md."""
    found = pass_work(llama(), 5, 1000, batch=3)
    assert found["products"] == (2 * WEIGHTS, 2 * 15 * WEIGHTS)
    assert found["logits"] == (2 * VOCABULARY, 2 * 15 * VOCABULARY)
    assert 2 * (WEIGHTS + VOCABULARY) == pytest.approx(15.0e9, rel=0.01)
    attention = 4 * 5 * 32 * 128 * 1000 * 32  # q·k and its sum, of all query heads and layers
    assert found["attention"] == (3 * 131_072 * 1000, 3 * attention)
    assert found["tokens"] == (3 * 4 * 15 * 128_256, 0)
    stored = pass_work(llama(), 5, 1000, weight_bytes=1)
    assert stored["products"].bytes == WEIGHTS and stored["attention"].bytes == 131_072 * 1000
    wider = pass_work(llama(dtype="float32"), 5, 1000)
    assert wider["products"].bytes == 4 * WEIGHTS and wider["attention"].bytes == 262_144 * 1000


@pytest.mark.parametrize(
    ("rows", "tile", "share", "tiles"),
    [(1, 1, 0.9, 16), (5, 8, 0.84, 32), (12, 16, 0.81, 64), (64, 64, 0.71, 256)],
)
def test_the_parts_of_a_pass_add_up(rows, tile, share, tiles):
    """Each is bound by what it reads or by what it computes, rows padded to whole tiles."""
    device, bandwidth, peak = GPUS["a100"], 2.04e12, 312e12
    weights = sum(
        max(2 * part / (share * bandwidth), 2 * tile * part / (0.44 * peak))
        for part in (WEIGHTS, VOCABULARY)
    )
    tokens, starts = 12 * rows * 128_256 / bandwidth, 32 * (10 if rows == 1 else 13) * 2.2e-6
    operations = 4 * tiles * 8 * 128 * 32
    cache = max(131_072 / (0.89 * bandwidth), operations / (0.44 * peak))
    found = pass_line(llama(), device, rows)
    assert found.seconds == pytest.approx(weights + tokens + starts)
    assert found.per_token == pytest.approx(cache)


@pytest.mark.parametrize("device", [GPUS["a100"], GPUS["h200"], CPU])
@pytest.mark.parametrize(("model", "batch"), [(llama(), 1), (LLAMA2_7B, 3)])
def test_the_table_is_the_formula(device, model, batch):
    """At every width, not only where a tile ends. More rows never take less, nor more tokens."""
    found = estimated(model, device, batch)
    assert found.origin == "estimated" and as_costs(found) == found
    assert len(found.passes) < 60
    for context in CONTEXTS:
        times = [found.of_pass(rows, context) for rows in range(1, 257)]
        assert times == pytest.approx(
            [pass_line(model, device, rows, batch).at(context) for rows in range(1, 257)]
        )
        assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(times))
    for rows in (1, 8, 41, 101):
        assert found.of_pass(rows, 1000) < found.of_pass(rows, 2000)


def test_the_formula_against_the_h200():
    """Today's programs on another GPU, from which the products of one row alone were taken: passes
    and plain steps within 6%, TokenSwift's steps within 10%."""
    costs, errors = estimated(llama(), GPUS["h200"], 1), {}
    for row in results("h200/step-llama3.1-8b")["rows"]:
        context, drafts = row["context"], row["pass"] == "tokenswift"
        expected = costs.of_pass(row["rows"], 4096 if row["pass"] == "draft" else context)
        expected += costs.overhead if row["pass"] in ("plain", "tokenswift") else 0
        if drafts:
            expected += costs.of_pass(1, 4096) + costs.heads + costs.ngrams
            expected += costs.suffix.at(context)
        found = 1000 * expected / row["ms"]["median"] - 1
        errors.setdefault(drafts, []).append(found)
    assert len(errors[False]) == 36 and max(map(abs, errors[False])) < 0.06, errors
    assert len(errors[True]) == 4 and max(map(abs, errors[True])) < 0.1, errors


def test_the_formula_against_a_cpu():
    """Passes of some rows of two models that no cache holds, on two cores."""
    smollm2 = tsjax.ModelConfig(
        vocab_size=49_152, embed_dim=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
        mlp_dim=1536, max_positions=8192, norm_eps=1e-5, dtype="bfloat16",
    )  # fmt: skip
    passes = results("cpu/rows-smollm2-135m-bfloat16")["passes"]
    cases = [(smollm2, one) for one in passes]
    random = tsjax.ModelConfig(
        vocab_size=49_152, embed_dim=1024, num_layers=16, num_heads=16, num_kv_heads=8, head_dim=64,
        mlp_dim=2816, max_positions=32_768, norm_eps=1e-5, dtype="bfloat16",
    )  # fmt: skip
    cases += [(random, one) for one in results("cpu/rows")["passes"] if one["model"] == "500 MB"]
    errors = {}
    for model, one in cases:
        costs = estimated(model, CPU, 1)
        for rows, found in one["rows"].items():
            expected = 1000 * costs.of_pass(int(rows), one["context"])
            errors[one["model"], one["context"], rows] = expected / found["ms"] - 1
    assert len(errors) == 24 and max(map(abs, errors.values())) < 0.16, errors
    assert sorted(map(abs, errors.values()))[len(errors) // 2] < 0.08, errors


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "a100 40gb"),
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu", "NVIDIA GeForce RTX 4090", "rtx 4090"),
        ("gpu", "something new", "a100"),
    ],
)
def test_devices(platform, kind, name):
    assert device_of(platform, kind) is GPUS[name]
    assert device_of("cpu", "cpu") is CPU

# SPDX-License-Identifier: Apache-2.0
"""What Auto chooses, and that a run gives up drafts that do not pay."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import tiny_config, tiny_model

import tsjax
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.method import Measured
from tsjax.decoding.programs import programs
from tsjax.host import run
from tsjax.methods import Auto, Autoregressive, NGram, TokenSwift, auto
from tsjax.methods.auto import cost_of
from tsjax.methods.cost_model import (
    CHIPS,
    CPU,
    CPU_PASS_IS_RIGHT,
    chip_of,
    expected_tokens,
    pass_time,
    row_cost,
    step_cost,
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


def measured(model, kind, context, batch=1):
    return Measured(model, "cpu" if kind == "cpu" else "gpu", kind, context, batch)


def chosen(model, kind, context, batch=1):
    return Auto().next(measured(model, kind, context, batch))


def faster_source(model, kind, context, **changes):
    """What the paper's tree is better drafted from."""

    def speed(source):
        method = TokenSwift(draft_from=source, **changes)
        found = expected_tokens(DecodeConfig(model, method), CHIPS[kind])
        return found / cost_of(method, measured(model, kind, context))

    return max(("partial_cache", "verified_state"), key=speed)


# --- the bound -------------------------------------------------------------------------------


def test_a_pass_reads_weights_and_cache_once():
    """Llama-3.1-8B on an A100: 15.0 GB of weights that a pass reads (the embedding is looked up),
    and 131,072 bytes of cache per token, as in docs/kernels.md."""
    weights = 2 * (32 * (4096 * 128 * 2 * (32 + 8) + 3 * 4096 * 14_336) + 128_256 * 4096)
    chip = CHIPS["a100"]
    assert pass_time(llama(), chip, 1, 0, 1) == pytest.approx(weights / 2.04e12)
    with_cache = pass_time(llama(), chip, 1, 50_000, 2)
    assert with_cache == pytest.approx((weights + 2 * 50_000 * 131_072) / 2.04e12)
    assert pass_time(llama(dtype="float32"), chip, 1, 0, 1) == pytest.approx(weights / 1.02e12)


def test_many_rows_are_bound_by_operations():
    chip = CHIPS["a100"]
    few, many = (pass_time(llama(), chip, rows, 0, 1) for rows in (64, 1024))
    assert few == pass_time(llama(), chip, 1, 0, 1)
    products = pass_time(llama(), chip, 1, 0, 1) * 2.04e12 / 2  # weights
    assert many == pytest.approx(2 * 1024 * products / 312e12)


def test_rows_of_a_cpu():
    for points in (CPU.rows.weights, CPU.rows.attention):
        assert [row_cost(points, rows) for rows, _ in points] == [cost for _, cost in points]
        costs = [row_cost(points, rows) for rows in range(1, 65)]
        assert costs == sorted(costs) and len(set(costs)) == 64


def test_a_pass_of_a_cpu_by_hand():
    """Weights of 15.0 GB in one row, cache of 500 tokens, three batch rows of four rows each."""
    weights, cache = pass_time(llama(), CPU, 1, 0, 1) - CPU.rows.overhead, 500 * 131_072
    assert weights == pytest.approx(
        2 * (32 * (4096 * 128 * 80 + 3 * 4096 * 14_336) + 128_256 * 4096)
    )
    expected = (
        weights * row_cost(CPU.rows.weights, 12)
        + 3 * cache * CPU.rows.cache_byte * row_cost(CPU.rows.attention, 4)
        + CPU.rows.overhead
    )
    assert pass_time(llama(), CPU, 4, 500, 3) == pytest.approx(expected)


def test_a_step_by_hand():
    """Two passes on 64 slots and one of three rows on everything."""
    method = TokenSwift(tree=(1, 1), draft_passes=2, draft_budget=64, num_ngrams=0, suffix_length=0)
    decode = DecodeConfig(model=llama(0), method=method)
    one, no_cache = (pass_time(llama(0), CPU, 1, slots, 1) for slots in (64, 0))
    choosing = CPU.rows.choosing
    plain, verify = (pass_time(llama(0), CPU, rows, 9000, 1) + choosing for rows in (1, 3))
    assert step_cost(decode, CPU, 9000, 1) == pytest.approx((2 * one + verify) / plain)
    assert step_cost(DecodeConfig(model=llama()), CPU, 9000, 1) == 1

    # Chosen again after 4 tokens, of which a step finds some: that many times, all keys are read.
    often = DecodeConfig(model=llama(0), method=dataclasses.replace(method, draft_refresh=4))
    tokens = 1 + CPU_PASS_IS_RIGHT + CPU_PASS_IS_RIGHT**2
    assert expected_tokens(often, CPU) == pytest.approx(tokens)
    more = 2 * one + verify + (plain - choosing - no_cache) * tokens / 4
    assert step_cost(often, CPU, 9000, 1) == pytest.approx(more / plain)

    # To sum up the rest, the partial cache is read once more.
    method = dataclasses.replace(often.method, draft_rest=True)
    summed = DecodeConfig(model=llama(0), method=method)
    assert step_cost(summed, CPU, 9000, 1) == pytest.approx((more + one - no_cache) / plain)


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu", "NVIDIA H200", "h200"),
        ("gpu", "something new", "a100"),
    ],
)
def test_chips(platform, kind, name):
    assert chip_of(platform, kind) is CHIPS[name]
    assert chip_of("cpu", "cpu") is CPU


# --- the choice ------------------------------------------------------------------------------


def test_without_heads_there_is_only_the_partial_cache():
    for context in CONTEXTS:
        method = chosen(llama(0), "a100", context)
        assert method == Autoregressive() or method.draft_from == "partial_cache"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_long_contexts_prefer_the_partial_cache(dtype):
    """Short ones are bound by the weights, which "partial_cache" reads twice."""
    model = llama(dtype=dtype)
    sources = [faster_source(model, "h200", context) for context in CONTEXTS]
    assert sources[0] == "verified_state"
    assert sources[-1] == "partial_cache"
    switch = sources.index("partial_cache")
    assert set(sources[:switch]) == {"verified_state"}
    assert set(sources[switch:]) == {"partial_cache"}


def test_costly_drafts_prefer_the_verified_state():
    for changes in ({"draft_passes": 3}, {"draft_budget": 200_000}):
        assert faster_source(llama(), "h200", 100_000, **changes) == "verified_state"


def test_a_cpu_gets_one_narrow_path_and_a_gpu_the_papers_tree():
    for context in (1000, 30_000, 100_000):
        narrow = chosen(llama(), "cpu", context)
        wide = chosen(llama(), "NVIDIA H200", context)
        assert set(narrow.tree) == {1} and narrow.pass_widths == (1 + len(narrow.tree),)
        assert max(wide.tree) == 3 and wide.num_ngrams == 20 and wide.pass_widths == ()


def test_more_passes_where_the_cache_outweighs_the_weights():
    small = tiny_config(num_layers=6, embed_dim=256, mlp_dim=704, vocab_size=4096, head_dim=32)
    passes = [chosen(small, "cpu", context) for context in (20_000, 60_000, 500_000)]
    depths = [len(method.tree) for method in passes]
    assert depths == sorted(depths) and depths[0] < depths[-1]


def test_no_pass_where_it_cannot_pay():
    """A pass on the partial cache costs what a step costs: it reads the same weights. Repetitions
    of the text are drafted where a step without one is a plain one."""
    repeats = chosen(llama(0), "cpu", 500)
    assert isinstance(repeats, NGram) and not isinstance(repeats, TokenSwift)
    assert repeats.num_ngrams == 0 and repeats.pass_widths == (1,)
    assert chosen(llama(0), "NVIDIA A100-SXM4-80GB", 500) == Autoregressive()
    assert cost_of(repeats, measured(llama(0), "cpu", 500)) == 1


@pytest.mark.parametrize("method", [Autoregressive(), NGram(), TokenSwift(tree=(2,))])
def test_what_is_named_is_kept(method):
    begun = measured(llama(), "cpu", 1000)
    assert method.next(begun) == method
    assert method.next(begun._replace(current=method, steps=10_000, tokens=10_000)) == method


def test_every_choice_can_be_decoded():
    for heads in (0, 1, 3, 5):
        for kind in ("cpu", *CHIPS):
            for context in CONTEXTS:
                for batch in (1, 8):
                    method = chosen(llama(heads), kind, context, batch)
                    DecodeConfig(model=llama(heads), method=method)
                    assert cost_of(method, measured(llama(heads), kind, context, batch)) >= 1


# --- in a run --------------------------------------------------------------------------------

SETTINGS = dict(max_new_tokens=60, do_sample=True, seed=5)
DRAFTING = TokenSwift(tree=(1,), draft_budget=8, num_sinks=2, num_ngrams=2, suffix_length=2)


def let_auto_choose(method, step_cost, monkeypatch):
    """Auto begins with a method, and judges it early and by this cost."""
    monkeypatch.setattr(auto, "choose", lambda measured: method)
    monkeypatch.setattr(auto, "cost_of", lambda method, measured: step_cost)
    monkeypatch.setattr(auto, "STEPS_TO_JUDGE", 6)
    monkeypatch.setattr(run, "_next_chunk", lambda steps, elapsed: 5)


@pytest.mark.parametrize("step_cost", [1.01, 100.0])
def test_a_run_gives_up_drafts_that_do_not_pay(step_cost, monkeypatch):
    """The tokens stay those of plain decoding, and so do the counters' sums."""
    model = tiny_model()
    plain = tsjax.generate(model, [[1, 2, 3], [4]], **SETTINGS)
    decode = programs("cpu", model.cfg.dtype).decode
    compiled = decode._cache_size()
    let_auto_choose(DRAFTING, step_cost, monkeypatch)
    found = tsjax.generate(model, [[1, 2, 3], [4]], method="tokenswift", **SETTINGS)
    assert [row.tolist() for row in found.tokens] == [row.tolist() for row in plain.tokens]
    assert found.stats.method == DRAFTING
    assert found.stats.gave_up == (step_cost == 100)
    assert found.stats.accepted + sum(found.stats.steps) == found.stats.computed_tokens == 120
    assert sum(found.stats.accepted_lengths) == sum(found.stats.steps)
    assert decode._cache_size() <= compiled + 1, "plain decoding has its program already"
    if found.stats.gave_up:  # every step after the first eleven found one token
        assert 120 - 2 * 11 * 4 <= sum(found.stats.steps) <= 120
    kept = tsjax.generate(model, [[1, 2, 3], [4]], method=DRAFTING, **SETTINGS)
    assert not kept.stats.gave_up and kept.stats.accepted > 0


@pytest.mark.parametrize("revive_rows", [1, 8])
def test_drafts_are_judged_when_the_prompt_is_whole(revive_rows, monkeypatch):
    """Revival ends steps early: of 27 tokens, 8 at a time are back soon, one at a time never."""
    lazy = tsjax.LazyPrefill(
        keep={1: 0.1}, revive="background", choose_every=2, revive_rows=revive_rows
    )
    model, prompt = tiny_model(), [list(range(1, 32))]
    let_auto_choose(DRAFTING, 100.0, monkeypatch)
    settings = dict(max_new_tokens=40, seed=5, prefill=lazy)
    found = tsjax.generate(model, prompt, method="tokenswift", **settings)
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


def test_choose_method_is_what_generate_takes():
    model = tiny_model()
    choice = tsjax.choose_method("tokenswift", model, 3 + 10)
    result = tsjax.generate(model, [1, 2, 3], method="tokenswift", max_new_tokens=20)
    assert result.stats.method == choice.method
    assert tsjax.choose_method("ngram", model, 13).method == NGram()

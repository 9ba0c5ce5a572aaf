# SPDX-License-Identifier: Apache-2.0
"""The tasks of benchmarks/longcontext, the choice of settings, a small run, and the model."""

import dataclasses
import itertools
import json
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from helpers import oracle_hidden, tiny_config, tiny_model
from lazy_oracle import LazyOracle
from test_longcontext_verdict import made_row

import tsjax
from benchmarks.longcontext import asking, evaluate, selection, texts, turns
from benchmarks.longcontext import model as training
from benchmarks.longcontext import rivals as rivals_module
from benchmarks.longcontext.attention import holding_most, last_attention, sparsity
from benchmarks.longcontext.model import PHASES
from benchmarks.longcontext.rivals import (
    FAMILIES,
    FULL,
    LEAST_SHARE,
    TARGETS,
    candidates,
    computed_share,
    operations,
    rivals,
    solved,
)
from benchmarks.longcontext.tasks import (
    HOPS,
    NAMES,
    PAIR,
    PART_TOKENS,
    TASKS,
    VALUE_TOKENS,
    VALUES,
    VOCAB,
    score,
)
from benchmarks.report import ROOT
from benchmarks.ttft import SCHEDULES, schedule
from tsjax.files.fingerprint import model_fingerprint


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    task=st.sampled_from(sorted(TASKS)),
    length=st.integers(24, 300),
    questions=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_every_task_fills_its_length_and_can_be_answered(task, length, questions, seed):
    example = TASKS[task](np.random.default_rng(seed), length, questions)
    prompt, answer = example.prompt, example.answer
    assert length - 1 <= len(prompt) <= length and prompt.dtype == answer.dtype == np.int32
    assert 0 <= min(prompt.min(), answer.min()) and max(prompt.max(), answer.max()) < VOCAB
    assert 1 <= len(example.questions) <= questions
    for question in example.questions:
        found = lookup(task, example.context, question.tokens)
        assert found == list(question.answer)


def lookup(task: str, context: list[int], question: list[int]) -> list[int]:
    """The answer, read from the context by a program that knows the task's grammar only."""
    if task == "common_word":
        return [max(set(context[1:]), key=context.count)]
    if task == "long_copy":
        starts = [i for i, token in enumerate(context) if token == question[-1]]
        return next(
            context[i + 1 : i + 1 + PART_TOKENS] for i in starts if context[i - 1] not in VALUES
        )
    facts = {
        name: context[i + 2 : i + 2 + VALUE_TOKENS]
        for i, (before, name) in enumerate(zip(context, context[1:], strict=False))
        if before == PAIR and name in NAMES
    }
    if task in ("multi_query", "late_query"):
        asked = question[1:-1] if task == "multi_query" else context[2:]
        asked = asked[: next((i for i, t in enumerate(asked) if t not in NAMES), len(asked))]
        return [token for name in asked for token in (name, *facts[name])]
    name = question[-1]
    for _ in range(HOPS + 1):
        if facts[name][0] in VALUES:
            return facts[name][:VALUE_TOKENS]
        name = facts[name][0]
    raise AssertionError("the chain has no end")


def test_the_score_is_the_share_of_values_at_their_places():
    answer = [NAMES[0], VALUES[1], VALUES[2], NAMES[1], VALUES[3], VALUES[4]]
    assert score(np.asarray(answer), answer) == 1
    assert score(np.asarray(answer), [0, VALUES[1], VALUES[2]]) == 0.5
    assert score(np.asarray(answer), []) == 0
    assert score(np.asarray(answer), answer[1:]) == 0  # none at its place
    assert score(np.asarray([NAMES[0]]), [NAMES[0], 5]) == 1


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [2, 3, 8, 32])
def test_rivals_fit_models_of_any_depth(layers):
    cfg = tiny_config(num_layers=layers)
    for name in SCHEDULES:
        assert schedule(name, layers) and all(0 < at < layers for at in schedule(name, layers))
    found = list(rivals(cfg).values())
    for family, target in itertools.product(FAMILIES.values(), TARGETS):
        found += [family.build(cuts, 0) for _, cuts in candidates(cfg, family, 500, target)]
    for rival in found:
        if isinstance(rival.prefill, tsjax.LazyPrefill):
            tsjax.DecodeConfig(model=cfg, prefill=rival.prefill)


def counted(cfg, tokens: int, cuts=(), layers: int | None = None) -> float:
    """Operations layer by layer: a product with each weight, and attention to half of the rows."""
    total, count, after = 0.0, tokens, dict(cuts)
    D, F, H = cfg.embed_dim, cfg.mlp_dim, cfg.head_dim
    for layer in range(cfg.num_layers if layers is None else layers):
        if layer in after:
            count = math.ceil(round(after[layer] * tokens, 6))
        q, kv = cfg.num_heads * H, cfg.num_kv_heads * H
        total += 2 * count * (D * q + 2 * D * kv + q * D + 3 * D * F)
        total += 2 * 2 * q * count * count / 2
    return total


def gain_by_hand(cfg, name: str, cuts, tokens: int) -> float:
    spent = counted(cfg, tokens, cuts)
    if name in ("GemFilter", "self-information"):
        ((layer, share),) = cuts
        left = math.ceil(round(share * tokens, 6))
        spent = counted(cfg, tokens, layers=layer) + counted(cfg, left)
    return counted(cfg, tokens) / spent


@pytest.mark.parametrize("name", FAMILIES)
def test_solved_shares_are_the_largest_that_meet_the_target(name):
    cfg, tokens = tiny_config(num_layers=6), 300
    family = FAMILIES[name]
    for target, shape in itertools.product((1.6, 3.0), family.shapes(6)):
        found = solved(cfg, family, shape, tokens, target)
        every = [shape.cuts(step / 1000) for step in range(1, 1001)]
        meeting = [cuts for cuts in every if gain_by_hand(cfg, name, cuts, tokens) >= target]
        assert found == (meeting[-1] if meeting else None)
        if found:
            assert min(share for _, share in found) >= LEAST_SHARE
            assert operations(cfg, family.build(found, 0), tokens) == pytest.approx(
                gain_by_hand(cfg, name, found, tokens)
            )


def test_the_share_that_is_computed_is_a_mean_over_layers():
    cfg = tiny_config(num_layers=8)
    static = FAMILIES["static"].build(((2, 0.5),), 0)
    assert computed_share(cfg, static) == (2 + 6 * 0.5) / 8
    assert computed_share(cfg, static, (1.0, 0.75)) == (2 + 6 * 0.75) / 8
    assert computed_share(cfg, FAMILIES["GemFilter"].build(((2, 0.25),), 0)) == (2 + 8 * 0.25) / 8
    assert computed_share(cfg, FULL) == 1


def test_the_best_candidate_is_chosen_and_of_equal_ones_the_first():
    def row(target, layer, score):
        return {"family": "static", "target": target, "shape": [[layer, 1]], "score": score}

    rows = [row(2.0, 3, 0.5), row(2.0, 2, 0.9), row(2.0, 1, 0.9), row(3.0, 1, 1.0)]
    document = {"candidates": rows, "targets": [1.6, 2.0, 3.0]}
    assert selection.chosen(document, "static", 2.0) == rows[1]
    assert selection.chosen(document, "static", 1.6) is None
    cfg = tiny_config(num_layers=6)
    full, *settings, last = selection.settings_for(cfg, document, 300)
    assert full["family"] == "full"
    settings = [one for one in settings if one["family"] == "static"]
    assert [(one["target"], one["cuts"][0][0]) for one in settings] == [(2.0, 2), (3.0, 1)]
    for one in settings:
        assert gain_by_hand(cfg, "", one["cuts"], 300) >= one["target"]
    assert last == {"family": "self-information", "target": None, "cuts": [[6, LEAST_SHARE]]}


# --- attention --------------------------------------------------------------------------------


@pytest.mark.wide
def test_the_attention_of_the_last_token_is_that_of_a_plain_softmax():
    prompt = np.random.default_rng(0).integers(0, 61, 37)
    with jax.enable_x64(True):
        model = tiny_model(num_layers=3, dtype="float64")
        expected = np.zeros((3, 37))

        def watch(layer, head, q, k, attention):
            del head, q, k
            expected[layer] += attention[-1] / model.cfg.num_heads

        oracle_hidden(model, prompt.tolist(), watch)
        found = last_attention(model, prompt)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
        both = sparsity(model, [prompt, prompt])
    assert both["share"] == pytest.approx(holding_most(expected).tolist())
    assert both["ranks"][0] == 1 and both["ranks"][-1] == 37
    np.testing.assert_allclose(
        both["sorted"], -np.sort(-expected)[:, np.asarray(both["ranks"]) - 1], atol=1e-7
    )


def test_how_many_tokens_hold_most_of_the_attention():
    weights = np.asarray([[0.25] * 4, [0.05, 0.9, 0.05, 0], [0.5, 0, 0.3, 0.2], [1, 0, 0, 0]])
    assert holding_most(weights).tolist() == [1, 0.25, 0.75, 0.25]


# --- a run ------------------------------------------------------------------------------------


def points_for(answer, said):
    """Of which random weights get any."""
    return sum(said) / len(answer) / VOCAB


class Run:
    """The command on a small model, few rivals and short prompts, and what they were asked."""

    def __init__(self, place, monkeypatch):
        self.model, self.place = tiny_model(num_layers=2, vocab_size=VOCAB), place
        tsjax.save(self.model, place / "model")
        self.asked = []
        names = ["LazyLLM", "no revival", "auto", "random", "GemFilter", "self-information"]
        self.families = {name: FAMILIES[name] for name in names}
        self.families["random"] = self.families["random"]._replace(draws=2)
        for module in (selection, turns):
            monkeypatch.setattr(module, "FAMILIES", self.families)
        monkeypatch.setattr(rivals_module, "BUDGET", 2)
        monkeypatch.setattr(selection, "DEVELOPMENT", ("key_values",))
        monkeypatch.setattr(evaluate, "sweep_cuts", lambda layers: [(1, 0.5)])
        monkeypatch.setattr(turns, "ask_compiled", self.ask)
        monkeypatch.setattr(turns, "score", points_for)

    def ask(self, model, rival, prompt, **settings):
        self.asked.append((rival, tuple(prompt)))
        return asking.ask_compiled(model, rival, prompt, **settings)

    def __call__(self, samples, *more, path="model", least_dense="0"):
        self.asked.clear()
        out = self.place / "out"
        argv = ["--model", str(self.place / path), "--out", str(out), "--least-dense", least_dense]
        argv += ["--samples", f"32:{samples}", "--tasks", "passkey", "multi_query"]
        argv += (
            "--targets 1.5 --develop-length 32 --develop-samples 3 --sweep-length 32 "
            "--sweep-tasks passkey --sweep-samples 2 --growth-samples 2 --growth-tasks late_query "
            "--attention-length 32 --attention-samples 2"
        ).split()
        evaluate.main([*argv, *more])
        return json.loads((out / "longcontext.json").read_text())

    def check_row(self, row, full, examples) -> None:
        """Scores and times are of the answers that generate gives to the same prompts."""
        for sample, example in enumerate(examples):
            rival, prompt = turns.rival_of(row, sample), example.prompt
            if rival.compress is not None:
                prompt = rival.compress(self.model, prompt)
            asked = dict(max_new_tokens=len(example.answer), prefill=rival.prefill)
            said = tsjax.generate(self.model, prompt, **asked).tokens[0]
            assert row["scores"][sample] == round(points_for(example.answer, said), 4)
            assert 0 < row["first"][sample] <= row["whole"][sample]
            assert row["full_first"][sample] == full["first"][sample]


@pytest.mark.wide
def test_a_run_from_model_to_figures(tmp_path, monkeypatch, capsys):
    run, out = Run(tmp_path, monkeypatch), tmp_path / "out"
    with pytest.raises(SystemExit, match="no task is left to choose settings on: of key_values"):
        run(2, least_dense="0.95")
    (out / "longcontext.json").unlink()
    before = run(2, "--parts", "dense", "develop")
    assert before["candidates"] and not before["rows"] and not run.asked
    document = run(2)
    assert document["candidates"] == before["candidates"]
    chosen = {row["family"] for row in before["candidates"]}
    assert chosen == {*run.families} - {"auto", "self-information"}  # with nothing to choose
    assert all(list(row["scores"]) == ["key_values"] for row in document["candidates"])
    rows, names = document["rows"], list(run.families)
    settings = [("full", None), *((name, 1.5) for name in names[:5]), (names[5], None)]
    asked = list(run.asked)
    for task in ("passkey", "multi_query"):
        mine = [row for row in rows if row["task"] == task]
        assert [(row["family"], row["target"]) for row in mine] == settings
        for row in mine:
            examples = selection.examples_of(task, 32, range(2), 1, "reported")
            run.check_row(row, mine[0], examples)
        lazy, never, auto = mine[1:4]
        rule = tsjax.LazyPrefill(keep="auto", speedup=1.5).resolved(run.model.cfg, 32)
        assert auto["cuts"] == [list(cut) for cut in rule.cuts] and auto["revive"] == "in_batches"
        assert lazy["operations"] >= 1.5 and lazy["computed"][0] == never["computed"][0] == 1
        assert lazy["computed_share"] >= never["computed_share"]
        assert never["computed_share"] == pytest.approx(never["let_through"], abs=1 / 32)
    # All have been met before, both random draws included; then each of four prompts is read in all
    # seven ways, in turn.
    assert len(asked) == 8 + 28 and len({prompt for _, prompt in asked[:8]}) == 1
    for first in range(8, 36, 7):
        assert len({prompt for _, prompt in asked[first : first + 7]}) == 1
    shares = [row["computed"] for row in document["growth"]]
    assert len(shares) == 12 and shares == sorted(shares)
    (cut,), (sparse,) = document["sweep"], document["attention"]
    assert (cut["layer"], cut["share"], cut["length"]) == (1, 0.5, 32)
    assert len(sparse["share"]) == 2 and document["verdict"]["goal"]
    for name in ("score", "cut", "computed", "attention"):
        assert (out / f"longcontext_{name}.png").stat().st_size > 0

    # One more sample is all that is measured; another model's results are not mixed in.
    more = run(3)
    assert len(run.asked) == 8 + 14
    for row, then in zip(more["rows"], rows, strict=True):
        assert len(row["scores"]) == 3
        for key in turns.MEASURED:
            assert row[key][:2] == then[key]
    assert more["candidates"] == document["candidates"] and more["sweep"] == document["sweep"]
    run(3)
    assert run.asked == []
    with pytest.raises(SystemExit, match="of another seed"):
        run(3, "--seed", "2")
    tsjax.save(tiny_model(num_layers=2, vocab_size=VOCAB, seed=1), tmp_path / "other")
    with pytest.raises(SystemExit, match="of another fingerprint"):
        run(3, path="other")


def test_a_family_that_is_new_is_measured_beside_the_full_prefill(monkeypatch):
    """Its times are held against those of the same turn, not of another day."""
    seconds = iter(range(1, 99))

    def ask(model, rival, prompt, **settings):
        return asking.Reply([], "", next(seconds), 100.0, len(prompt), ())

    monkeypatch.setattr(turns, "ask_compiled", ask)
    model = tiny_model(vocab_size=VOCAB)
    (example,) = selection.examples_of("passkey", 32, range(1), 1)
    full = made_row("passkey", "full", None, [])
    turns.take_turns(model, example, [full], 32)
    new = made_row("passkey", "static", 1.6, [], computed=[], cuts=[[1, 0.5]])
    turns.take_turns(model, example, [new], 32)
    assert full["first"] == full["full_first"] == [1]
    assert (new["full_first"], new["first"]) == ([2], [3])
    # The second prompt goes backwards.
    turns.take_turns(model, example, [full, new], 32)
    assert (new["first"], new["full_first"], full["first"]) == ([3, 4], [2, 5], [1, 5])


@pytest.mark.wide
@pytest.mark.parametrize("revive", ["on_demand", "never"])
def test_losses_of_a_suffix_are_those_of_the_oracle(revive):
    lazy = tsjax.LazyPrefill(keep={1: 0.5, 2: 0.3}, revive=revive)
    rng = np.random.default_rng(5)
    prompts, suffixes = rng.integers(0, 61, (2, 30)), rng.integers(0, 61, (2, 6))
    with jax.enable_x64(True):
        model = tiny_model(num_layers=3, dtype="float64")
        found = texts.suffix_losses(model, prompts, suffixes, lazy)
        full = texts.suffix_losses(model, prompts, suffixes, None)
        for row, (prompt, suffix) in enumerate(zip(prompts, suffixes, strict=True)):
            oracle = LazyOracle(model, prompt.tolist(), lazy)
            for token, loss in zip(suffix, found[row], strict=True):
                logs = oracle.logits - np.log(np.exp(oracle.logits).sum())
                np.testing.assert_allclose(loss, -logs[token], rtol=0, atol=1e-5)
                oracle.step(int(token))
            whole = np.asarray(tsjax.forward(model, np.concatenate([prompt, suffix])[None]))[0]
            logs = whole - np.log(np.exp(whole).sum(-1, keepdims=True))
            expected = [-logs[29 + i, token] for i, token in enumerate(suffix)]
            np.testing.assert_allclose(full[row], expected, rtol=0, atol=1e-5)


# --- the model ---------------------------------------------------------------------------------


@pytest.mark.wide
def test_the_checkpoint_is_small_masters_its_tasks_and_is_the_one_of_the_results():
    folder = ROOT / "benchmarks" / "longcontext" / "checkpoint"
    assert sum(file.stat().st_size for file in folder.rglob("*")) < 4 << 20
    assert tsjax.load(folder).cfg == dataclasses.replace(training.CONFIG, dtype="bfloat16")
    model = tsjax.load(folder, dtype="float32")
    results = json.loads((ROOT / "benchmarks/results/cpu/longcontext.json").read_text())
    assert model_fingerprint(model) == results["fingerprint"]
    updates = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert updates == sum(phase.updates for phase in PHASES)
    for task in ("passkey", "key_values", "multi_query"):
        assert training.accuracy(model.params.model, model.cfg, task, 256, 8) > 0.95, task

# SPDX-License-Identifier: Apache-2.0
"""The tasks of benchmarks/longcontext, and a small evaluation from model to plots."""

import itertools
import json

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from helpers import tiny_model
from lazy_oracle import LazyOracle

import tsjax
from benchmarks.longcontext import evaluate, plots, texts
from benchmarks.longcontext.evaluate import interval, rivals
from benchmarks.longcontext.tasks import (
    HOPS,
    NAMES,
    PAIR,
    PART_TOKENS,
    TASKS,
    VALUE_TOKENS,
    VALUES,
    VOCAB,
    passkey,
    score,
)
from benchmarks.ttft import SCHEDULES, schedule


@hypothesis.settings(max_examples=60)
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


def test_the_depth_of_a_passkey_is_where_it_is_put():
    rng = np.random.default_rng(0)
    places = [passkey(rng, 100, depth=depth).context.index(PAIR) for depth in (0, 0.5, 1)]
    assert places == [1, 47, 94]


def test_the_score_is_the_share_of_values_at_their_places():
    answer = [NAMES[0], VALUES[1], VALUES[2], NAMES[1], VALUES[3], VALUES[4]]
    assert score(np.asarray(answer), answer) == 1
    assert score(np.asarray(answer), [0, VALUES[1], VALUES[2]]) == 0.5
    assert score(np.asarray(answer), []) == 0
    assert score(np.asarray(answer), answer[1:]) == 0  # none at its place
    assert score(np.asarray([NAMES[0]]), [NAMES[0], 5]) == 1
    mean, half = interval([1.0, 0.0, 1.0, 1.0])
    assert mean == 0.75 and half == pytest.approx(1.96 * np.sqrt(0.1875 / 4))


def test_rivals_fit_models_of_any_depth():
    for layers in (2, 3, 8, 32):
        cfg = tiny_model(num_layers=layers).cfg
        for name in SCHEDULES:
            assert schedule(name, layers) and all(0 < at < layers for at in schedule(name, layers))
        for rival in rivals(cfg).values():
            if isinstance(rival.prefill, tsjax.LazyPrefill):
                tsjax.DecodeConfig(model=cfg, prefill=rival.prefill)


def test_an_evaluation_from_model_to_plots(tmp_path, monkeypatch, capsys):
    tsjax.save(tiny_model(num_layers=2, vocab_size=VOCAB), tmp_path / "model")
    names = ["full", "LazyLLM, halves", "static, 0.5", "GemFilter, 0.5"]
    monkeypatch.setattr(evaluate, "rivals", lambda cfg: {n: rivals(cfg)[n] for n in names})
    out = tmp_path / "out"
    argv = ["--model", str(tmp_path / "model"), "--out", str(out), "--lengths", "24"]
    argv += ["--tasks", "passkey", "--samples", "4", "--growth-samples", "2"]
    argv += ["--sweep-tasks", "passkey", "--sweep-samples", "2"]
    cut = {(1, 0.5): evaluate.sweep_rivals(tiny_model(num_layers=2).cfg)[1, 0.5]}
    monkeypatch.setattr(evaluate, "sweep_rivals", lambda cfg: cut)
    argv += ["--growth-tasks", "multi_query", "--grid-lengths", "20", "24", "--grid-samples", "2"]
    monkeypatch.setattr(evaluate, "GRID", ("full", "static, 0.5"))
    evaluate.main(argv)
    document = json.loads((out / "longcontext.json").read_text())
    assert [row["method"] for row in document["rows"]] == names
    full, lazy, *others = document["rows"]
    assert full["operations"] == 1 and full["computed"] == []
    assert lazy["operations"] > 1 and lazy["computed"][0] == 1 > lazy["computed"][1]
    static, gem_filter = others
    assert static["operations"] > 1
    # One of two layers reads the whole prompt, then both read half of it.
    assert gem_filter["operations"] == pytest.approx(1, abs=0.05)
    shares = [row["computed"] for row in document["growth"]]
    assert len(shares) == 12 and shares == sorted(shares)
    (one,) = document["sweep"]
    assert (one["layer"], one["share"], one["length"]) == (1, 0.5, 24)
    assert (out / "longcontext_cut.png").stat().st_size > 0
    assert (out / "longcontext_score.png").stat().st_size > 0
    assert (out / "longcontext_computed.png").stat().st_size > 0
    places = {(row["method"], row["length"], row["depth"]) for row in document["grid"]}
    assert places == set(itertools.product(evaluate.GRID, (20, 24), evaluate.DEPTHS))
    assert (out / "longcontext_passkey.png").stat().st_size > 0
    # A second run finds everything there; another model's results are not mixed in.
    before = len(capsys.readouterr().out.splitlines())
    evaluate.main(argv)
    assert before > 0 and capsys.readouterr().out == ""
    tsjax.save(tiny_model(num_layers=3, vocab_size=VOCAB), tmp_path / "other")
    argv[1] = str(tmp_path / "other")
    with pytest.raises(SystemExit, match="of another model or seed"):
        evaluate.main(argv)


def test_prompts_of_any_length_are_answered():
    """The passes of a prefill are powers of two and may be longer than prompt and answer."""
    model = tiny_model(num_layers=2, vocab_size=VOCAB)
    examples = [passkey(np.random.default_rng(0), 300)]
    assert evaluate.answers(model, evaluate.Rival(), examples)["read"] == 300


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


def test_lines_to_complete_are_those_of_the_files(tmp_path):
    lines = [f"value_{i} = {i} * {i}" for i in range(40)]
    (tmp_path / "one.py").write_text("\n".join(lines))
    ((text, line),) = texts.code_lines(tmp_path, 5, seed=0)
    assert (text + line).splitlines() == lines[: lines.index(line) + 1]
    with pytest.raises(ValueError, match="it holds no .*py file"):
        texts.code_lines(tmp_path / "none", 1, seed=0)


def test_methods_of_one_kind_are_one_line_of_the_plot():
    names = ("LazyLLM, halves", "LazyLLM, early", "full", "random drop, 0.3")
    assert [plots.family_of(n) for n in names] == ["LazyLLM", "LazyLLM", "full", "random drop"]

# SPDX-License-Identifier: Apache-2.0
"""How the model of the long-context tasks is trained: its rows, and that steps alone count."""

import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_model

import tsjax
from benchmarks.longcontext import model as training
from benchmarks.longcontext.model import LONGEST, PHASES, Phase, batch_of, part_done, phase_at
from benchmarks.longcontext.tasks import FILLER, NAMES
from benchmarks.report import ROOT
from tsjax.files.fingerprint import model_fingerprint
from tsjax.model.params import init_params

SMALL = dataclasses.replace(training.CONFIG, num_layers=2, embed_dim=32, mlp_dim=32)


@hypothesis.settings(max_examples=30)
@hypothesis.given(length=st.sampled_from([48, 64, 200, 600]), seed=st.integers(0, 999))
def test_rows_have_answers_to_learn_from_and_positions_with_gaps(length, seed):
    batch = batch_of(np.random.default_rng(seed), 3, length)
    tokens, positions, counts = batch
    assert tokens.shape == positions.shape == counts.shape == (3, length)
    assert counts.any(axis=1).all() and not counts[:, 0].any()
    steps = np.diff(positions, axis=1)
    assert (positions[:, 0] == 0).all() and (steps >= 1).all()
    assert positions.max() < LONGEST * 5 // 4
    # No gap parts a statement: one begins with a mark, and filler stands alone.
    after = tokens[:, 1:][steps > 1]
    assert ((after < NAMES[0]) | (after >= FILLER[0])).all()
    for name in ("tokens", "positions", "counts"):  # the seed decides all
        again = batch_of(np.random.default_rng(seed), 3, length)
        np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))


def test_the_longest_rows_have_no_room_for_gaps_beyond_what_is_read():
    assert PHASES[-1].length == LONGEST
    batch = batch_of(np.random.default_rng(0), 1, LONGEST)
    assert batch.positions.max() < LONGEST * 5 // 4


def test_phases_follow_one_another():
    phases = [Phase(1, 8, 2), Phase(1, 16, 1), Phase(3, 4, 4)]
    assert [phase_at(step, phases).length for step in range(7)] == [8, 8, 16, 4, 4, 4, 4]
    parts = [part_done(step, phases) for step in range(7)]
    assert parts == [0, 1 / 3, 2 / 3, 0, 1 / 4, 2 / 4, 3 / 4]  # each size from its beginning
    with pytest.raises(ValueError, match="step 7 lies after the last phase"):
        phase_at(7, phases)


def test_a_model_that_grows_says_the_same():
    old = init_params(SMALL, 3).model
    cfg = dataclasses.replace(SMALL, num_layers=7)
    new = training.spread_out(old, cfg, seed=1)
    assert len(new.layers) == 7
    same = [at for at, layer in enumerate(new.layers) if any(layer is one for one in old.layers)]
    assert same == [2, 5]
    tokens = np.arange(40, dtype=np.int32)[None] % 250
    positions = np.arange(40, dtype=np.int32)[None]
    ours, theirs = (
        training.logits_of(weights, tokens, positions, cfg)
        for weights, cfg in ((new, cfg), (old, SMALL))
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    # New layers are not nothing for ever: their outputs get gradients.
    gradient = jax.grad(lambda w: training.logits_of(w, tokens, positions, cfg).var())(new)
    assert all(float(jnp.abs(layer.o).max()) > 0 for layer in gradient.layers)


@pytest.mark.parametrize("length", [40, 300, 1100])
def test_the_training_pass_is_that_of_the_model(length):
    """In one block or in several, whatever is made again for the gradient."""
    model = tiny_model(num_layers=2)
    tokens = np.random.default_rng(0).integers(0, 61, (2, length)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    found = training.logits_of(model.params.model, tokens, positions, model.cfg)
    expected = tsjax.forward(model, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_a_gradient_is_the_same_where_it_makes_attention_again(monkeypatch):
    weights = init_params(SMALL, 0).model
    batch = batch_of(np.random.default_rng(0), 2, 300)

    def after_an_update():
        copy = jax.tree.map(jnp.array, weights)
        moments = training.OPTIMIZER.init(copy)
        return training.update.__wrapped__(copy, moments, batch, 0.01, cfg=SMALL)

    kept = after_an_update()
    monkeypatch.setattr(training, "FITS", 0)
    again = after_an_update()
    assert float(kept[2]) == pytest.approx(float(again[2]), abs=1e-5)
    for ours, theirs in zip(jax.tree.leaves(kept[0]), jax.tree.leaves(again[0]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-2)


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [3, 5])
def test_training_goes_on_as_if_it_had_never_stopped(at, tmp_path, monkeypatch):
    """Killed where layers have just been added, and after."""
    monkeypatch.setattr(training, "CONFIG", SMALL)
    monkeypatch.setattr(training, "SAVE_EVERY", 2)
    argv = ["--phases", "1:48:3", "2:64:3", "--batch", "96", "--every", "100"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    training.main([*argv, "--out", str(whole)])
    real, count = training.update, iter(range(100))

    def killed(*args, **kwargs):
        if next(count) == at:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(training, "update", killed)
    with pytest.raises(Killed):
        training.main([*argv, "--out", str(parts)])
    monkeypatch.setattr(training, "update", real)
    training.main([*argv, "--out", str(parts), "--resume"])
    ours, theirs = (tsjax.load(out / "checkpoint") for out in (whole, parts))
    assert ours.cfg.dtype == "bfloat16"
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    logs = [(out / "metrics.jsonl").read_text() for out in (whole, parts)]
    steps = [json.loads(line)["step"] for line in logs[0].splitlines()]
    assert logs[0] == logs[1] and steps == [2, 4, 6]

    with pytest.raises(SystemExit, match="written with other settings"):
        training.main([*argv, "--seed", "1", "--out", str(parts), "--resume"])
    with pytest.raises(SystemExit, match="is missing"):
        training.main([*argv, "--out", str(tmp_path / "none"), "--resume"])
    with pytest.raises(SystemExit):
        training.main(["--phases", "2:48:3", "1:64:3", "--out", str(tmp_path / "none")])


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

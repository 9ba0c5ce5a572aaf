# SPDX-License-Identifier: Apache-2.0
"""Training of one-layer drafters: the stream of texts, the first weights, the loss, a run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import tsjax
from tsjax.base.errors import AlreadyThere, BadValue, NoSuchFile
from tsjax.training import (
    DrafterTraining,
    batches,
    drafter_evaluation,
    drafter_loss,
    drafter_run,
    drafter_steps,
    least_squares,
    own_text,
)
from tsjax.training.batches import ROW_TOKENS, Stream
from tsjax.training.drafter_loss import Pieces
from tsjax.training.own_text import OwnText

# --- the stream ----------------------------------------------------------------------------------


def texts_of(lengths) -> list[OwnText]:
    """Each token says whose it is and where it stands."""
    return [
        OwnText(n, "kind" + "ab"[n % 2], 3, (1000 * n + np.arange(length)).astype(np.int32))
        for n, length in enumerate(lengths)
    ]


def stream_of(lengths, **options) -> Stream:
    return Stream(texts_of(lengths), lambda tokens: tokens[..., None, None] + 0.5, 3, **options)


@settings(max_examples=20)
@given(st.lists(st.integers(4, 700), min_size=2, max_size=12), st.integers(1, 3))
def test_each_token_comes_once_in_a_pass(lengths, count):
    stream = stream_of(lengths)
    mixed = min(batches.MIXED, stream.tokens // ROW_TOKENS)
    whole = max(1, mixed // count) * count * ROW_TOKENS  # tokens of steps that are mixed
    passes = -(-whole // stream.tokens)
    steps = [*itertools.islice(stream.rows(count), whole // (count * ROW_TOKENS))]
    assert all(step.tokens.shape == (count, ROW_TOKENS) for step in steps)
    found = np.concatenate([step.tokens.ravel() for step in steps])
    times = np.unique(found, return_counts=True)[1]
    assert len(found) == whole and times.max() == passes
    assert passes == 1 or (len(times) == stream.tokens and times.min() >= passes - 1)
    for step in steps:
        np.testing.assert_array_equal(step.states[..., 0, 0], step.tokens + 0.5)
        np.testing.assert_array_equal(step.place, step.tokens % 1000 - 3)
        np.testing.assert_array_equal(step.own, step.tokens % 1000 >= 2)
        kinds = np.asarray(stream.kinds)[step.kind]
        assert (kinds == np.where(step.tokens // 1000 % 2, "kindb", "kinda")).all()
        follows = np.diff(step.tokens, axis=1) == 1  # within a text
        np.testing.assert_array_equal(np.diff(step.text, axis=1) == 0, follows)


def test_a_stream_goes_on_where_it_was():
    lengths = [50, 300, 900, 1500, 20]
    whole = [*itertools.islice(stream_of(lengths).rows(2), 73)]
    for first in (1, 31, 32, 33, 70):
        found = itertools.islice(stream_of(lengths, cached=True).rows(2, first), 3)
        for one, other in zip(found, whole[first : first + 3], strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, other)


# --- the first weights and the loss --------------------------------------------------------------


def random_pieces(model, *, seed: int = 0, places: int = 32) -> Pieces:
    """Two rows, the second of two texts."""
    rng, D = np.random.default_rng(seed), model.cfg.embed_dim
    tokens = rng.integers(0, model.cfg.vocab_size, (2, places))
    text = np.zeros((2, places), np.int32)
    text[1, 13:] = 1
    own = np.ones((2, places), bool)
    own[0, :4] = own[1, 13:16] = False
    states = rng.standard_normal((2, places, 4, D)).astype(np.float32)
    return Pieces(*map(jnp.asarray, (states[:, :, :3], states[:, :, 3], tokens, text, own)))


def drafter_model(**changes) -> tsjax.Model:
    shape = tsjax.training.OneLayer(mlp_dim=32, words=12, taps=(0, 1, 2), window=8)
    model = tiny_model(drafter=shape, num_layers=2, **changes)
    words = np.random.default_rng(1).permutation(model.cfg.vocab_size)[:12].astype(np.int32)
    drafter = model.params.drafter.replace(words=jnp.asarray(words))
    return model.replace(params=model.params.replace(drafter=drafter))


def normed(x):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + least_squares.EPSILON)


def test_the_first_weights_are_those_of_least_squares():
    """In float64, row by row of a plain loop."""
    model = drafter_model()
    several = [random_pieces(model, seed=seed, places=60) for seed in range(8)]
    embed = np.asarray(model.params.model.embed)
    features, wanted, later = [], [], []
    for pieces in several:
        taps, last = normed(pieces.taps), normed(pieces.last)
        words = normed(embed[np.asarray(pieces.tokens)])
        for n, p in itertools.product(range(2), range(59)):
            text = np.asarray(pieces.text)[n]
            if not np.asarray(pieces.own)[n, p + 1]:
                continue
            row = np.concatenate([taps[n, p].ravel(), words[n, p + 1]])
            if text[p] == text[p + 1]:
                features.append(row)
                wanted.append(last[n, p + 1])
            if p < 58 and text[p] == text[p + 2]:  # the last but one has one token after it
                later.append((row, words[n, p + 2], last[n, p + 2]))

    def solved(X, Y):
        X, Y = np.stack(X), np.stack(Y)
        ridge = least_squares.RIDGE * np.trace(X.T @ X) / X.shape[1]
        return np.linalg.solve(X.T @ X + ridge * np.eye(X.shape[1]), X.T @ Y)

    both = solved(features, wanted)
    D = model.cfg.embed_dim
    states = [normed(row @ both) for row, _, _ in later]
    carry = solved(states, [y - word @ both[-D:] for _, word, y in later])
    fuse, token, found = least_squares.first_matrices(several, model.params.model.embed, kept=8)
    taps = both[:-D].reshape(3, D, D).transpose(2, 0, 1)
    np.testing.assert_allclose(fuse, taps, atol=2e-3)
    np.testing.assert_allclose(token, both[-D:].T, atol=2e-3)
    np.testing.assert_allclose(found, carry.T, atol=2e-3)


def test_the_first_weights_are_none_of_the_models():
    """Whose arrays would be gone after a step."""
    shape = tsjax.training.OneLayer(mlp_dim=16, words=8, taps=(0, 2))
    model = tiny_model(num_layers=2)  # in float32, as what is trained
    cfg = dataclasses.replace(model.cfg, drafter=shape)
    weights = drafter_steps.first_weights(cfg, model.params.model, 0)
    theirs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(model.params)}
    assert not theirs & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(weights)}


@pytest.mark.parametrize("variation", [0.0, 0.9])
def test_the_gradient_is_that_of_the_loss(variation):
    """By hand it is computed together with the loss; here by differences, in float64."""
    with jax.enable_x64(True):
        model = drafter_model(dtype="float64")
        pieces = random_pieces(model)
        pieces = pieces.replace(taps=pieces.taps.astype(float), last=pieces.last.astype(float))
        chosen = DrafterTraining(depth=3, every=4, variation=variation, temperature=0.8)
        starts = jnp.arange(1, 32, 4, dtype=jnp.int32)

        drafter = model.params.drafter
        frozen = {"unembed": drafter.unembed, "words": drafter.words}
        trained = drafter.replace(unembed=None, words=None)

        how = dict(settings=chosen, cfg=model.cfg)

        def loss(some):
            whole = some.replace(**frozen)
            return drafter_loss.objective(whole, model.params.model, pieces, starts, **how)[0]

        both = jax.jit(jax.value_and_grad(loss))
        gradient = both(trained)[1]
        rng = np.random.default_rng(3)
        for _ in range(4):
            way = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), trained)

            def at(by, way=way):
                return both(jax.tree.map(lambda x, d: x + by * d, trained, way))[0]

            moved = (at(1e-6) - at(-1e-6)) / 2e-6
            along = sum(map(jnp.vdot, jax.tree.leaves(gradient), jax.tree.leaves(way)))
            np.testing.assert_allclose(moved, float(along), rtol=2e-4)


def test_what_counts_in_the_loss_stays_within_a_text():
    """Other text after a text's end, and another prompt, change nothing of what is counted."""
    model = drafter_model()
    pieces, chosen = random_pieces(model), DrafterTraining(depth=3, every=4)
    starts = jnp.arange(0, 32, 4, dtype=jnp.int32)

    @jax.jit
    def measured(pieces):
        return drafter_loss.agreement(
            model.params.drafter, model.params.model, pieces, starts, settings=chosen,
            cfg=model.cfg,
        )  # fmt: skip

    only_first = pieces.replace(own=pieces.own.at[0].set(False).at[1, 13:].set(False))
    other = random_pieces(model, seed=9)
    changed = jax.tree.map(lambda x, y: x.at[1, 13:].set(y[1, 13:]), only_first, other)
    changed = changed.replace(text=pieces.text, own=only_first.own)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(same, measured(only_first), measured(changed))
    counted = measured(pieces).counted.tolist()
    text, own = np.asarray(pieces.text), np.asarray(pieces.own)
    for row, found in enumerate(counted):
        places = range(32) if row == 0 else range(0, 32, 4)
        some = [(n, p) for n, p in itertools.product(range(2), places) if p + row + 1 < 32]
        assert found == sum(
            text[n, p] == text[n, p + row + 1] and own[n, p + row + 1] for n, p in some
        )


def test_steps_go_from_what_was_right_to_the_token_after_it():
    accepted = np.asarray([[2, 9, 9, 0, 1, 9, 3, 9]])
    counted = np.asarray([[True, True, True, True, True, False, False, True]])
    met = drafter_evaluation.stepped(accepted, counted)
    # 0 and its two, 3, 4 and its one; 6 is no place for a step, 7 ends the row.
    assert np.flatnonzero(met[0]).tolist() == [0, 3, 4, 7]


def test_the_expected_speedup_is_that_of_the_best_chain():
    line = tsjax.costs.Line
    costs = tsjax.costs.Costs(
        ((1, line(0.8)), (2, line(1.0)), (3, line(1.2))), 0.0, line(0.0), line(0.0), 0.0, 0.2,
        "measured", one_layer=0.1,
    )  # fmt: skip
    # One draft brings 1.6 tokens in 1.3 plain steps, two bring 1.9 in 1.6.
    found = drafter_evaluation.expected_speedup([0.6, 0.5], costs, 10.0)
    assert found == pytest.approx(1.6 / 1.3)
    assert drafter_evaluation.expected_speedup([0.1, 0.1], costs, 10.0) == 1.0


def test_a_clock_leaves_out_pauses_and_what_comes_before_the_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(drafter_steps.time, "monotonic", lambda: now[0])
    clock = drafter_steps.Elapsed(60.0)
    now[0] = 120.0  # text was written
    assert (clock.elapsed, clock.share) == (20.0, 0.0)
    history = [{"elapsed": 30.0, "seconds": 10.0}, {"elapsed": 40.0, "seconds": 10.0}]
    now[0] = 1000.0
    resumed = drafter_steps.Elapsed(60.0)
    resumed.go_on(history)
    now[0] = 1010.0
    assert (resumed.elapsed, resumed.share) == (50.0, 0.75)


# --- own text, and a run of all ------------------------------------------------------------------

SAMPLED = tsjax.GenerationConfig(do_sample=True, temperature=0.9)
SHAPE = tsjax.training.OneLayer(mlp_dim=32, words=256, taps=(3, 6), window=64)
FEW = dict(tokens=900, shape=SHAPE, steps=4, step_tokens=512, depth=2, sampling=SAMPLED)


@pytest.fixture(scope="module")
def embedded() -> tsjax.Model:
    return tsjax.load(tsjax.EMBEDDED)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.json"
    kinds = {"story": ["{who} went to the {place}."], "more": ["Again: {text}"]}
    words = {"who": ["Tom", "Anna"], "place": ["sea", "wood", "town"]}
    path.write_text(json.dumps({"kinds": kinds, "words": words}), "utf-8")
    return path


@pytest.fixture(scope="module")
def trained(embedded, prompts, tmp_path_factory):
    """The folder and the result of a whole run."""
    folder = tmp_path_factory.mktemp("run") / "drafter"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_text, "ANSWER_LENGTHS", (40, 60))
        patch.setattr(own_text, "FIRST_ANSWERS", 3)
        found = tsjax.training.train_drafter(
            embedded, save_to=folder, prompts=prompts, evaluate_every=3, save_every=2, **FEW
        )
    return folder, found


def test_the_model_writes_text_that_plain_calls_write(trained, embedded):
    """Each answer is what `generate` says to its prompt with its number as the seed."""
    folder, _ = trained
    texts = own_text.read_own_text(folder / "text")
    assert sum(len(text.ids) - text.prompt for text in texts) >= 900
    assert {text.kind for text in texts} == {"story", "more"}
    for text in texts[:3]:
        alone = tsjax.generate(
            embedded, text.ids[: text.prompt].tolist(), seed=text.number, do_sample=True,
            temperature=0.9, max_new_tokens=len(text.ids) - text.prompt,
        )  # fmt: skip
        assert alone.tokens[0].tolist() == text.ids[text.prompt :].tolist()


def test_a_folder_of_text_goes_on_with_what_it_has(trained, embedded, prompts, tmp_path):
    folder, _ = trained
    asked = own_text.read_asked(prompts)
    for name in sorted(os.listdir(folder / "text"))[:2] + ["text.json"]:
        (tmp_path / name).write_bytes((folder / "text" / name).read_bytes())
    had = own_text.read_own_text(tmp_path)
    texts = own_text.write_own_text(
        embedded, tmp_path, asked, sampling=SAMPLED, tokens=200, seconds=60.0
    )
    assert [text.number for text in had] == [text.number for text in texts][:2]
    np.testing.assert_array_equal(texts[0].ids, had[0].ids)
    assert len({text.number for text in texts}) == len(texts) > 2
    with pytest.raises(BadValue, match="was written with sampling"):
        own_text.write_own_text(
            embedded, tmp_path, asked, sampling=tsjax.GenerationConfig(), tokens=10
        )


def test_a_run_leaves_a_drafter_that_loads(trained):
    folder, found = trained
    assert found.finish_reason == "steps" and not found.problems
    assert [record["step"] for record in found.history] == [1, 2, 3, 4]
    assert found.history[2]["tokens_per_step"] > 1 and found.history[2]["speedup"] >= 1
    right = found.evaluation["right"]
    assert found.evaluation["tokens_per_step"] == pytest.approx(1 + right[0] * (1 + right[1]))
    assert {"story", "from 0"} <= found.evaluation["by"].keys()
    model = tsjax.load(tsjax.EMBEDDED, drafter=folder)
    assert model.cfg.drafter == dataclasses.replace(SHAPE, accuracy=tuple(right))
    jax.tree.map(np.testing.assert_array_equal, model.params.drafter, found.model.params.drafter)


def test_a_run_that_was_ended_goes_on_with_the_same_numbers(trained, embedded, tmp_path):
    folder, found = trained

    def die(record):
        if record["step"] == 3:
            raise InterruptedError

    more = {**FEW, "save_every": 1, "evaluate_every": 3}
    shutil.copytree(folder / "text", tmp_path / "run" / "text")
    with pytest.raises(InterruptedError):
        tsjax.training.train_drafter(embedded, save_to=tmp_path / "run", on_step=die, **more)
    with pytest.raises(AlreadyThere, match="pass resume=True"):
        tsjax.training.train_drafter(embedded, save_to=tmp_path / "run", **more)
    with pytest.raises(BadValue, match="learning_rate=0.0002, now 0.1"):
        tsjax.training.train_drafter(
            embedded, save_to=tmp_path / "run", resume=True, learning_rate=0.1, **more
        )
    more["tokens"] = 9000  # it writes no more text once it has begun to learn
    resumed = tsjax.training.train_drafter(embedded, save_to=tmp_path / "run", resume=True, **more)
    for one, other in zip(resumed.history, found.history, strict=True):
        assert one["losses"] == other["losses"] and one["overlap"] == other["overlap"]
    drafters = resumed.model.params.drafter, found.model.params.drafter
    jax.tree.map(np.testing.assert_array_equal, *drafters)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, BadValue, "steps=0 is not valid: at least 1, or give minutes"),
        ({"minutes": 1.0, "steps": 3}, BadValue, "steps=3 is not valid: 0 with minutes"),
        ({"minutes": -1.0}, BadValue, "minutes=-1.0 is not valid"),
        ({"steps": 1, "prompts": "nowhere.txt"}, NoSuchFile, "prompts='nowhere.txt'"),
        ({"steps": 1, "step_tokens": 700}, BadValue, "step_tokens=700 is not valid: a multiple of"),
        ({"steps": 1, "every": 3}, BadValue, "every=3 is not valid: a divisor of 128"),
        ({"steps": 1, "leraning_rate": 1}, TypeError, "did you mean 'learning_rate'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    changes, error, message, embedded, tmp_path, monkeypatch
):
    monkeypatch.setattr(drafter_run, "write_own_text", None)  # is not called
    with pytest.raises(error, match=message):
        tsjax.training.train_drafter(embedded, save_to=tmp_path / "new", **changes)
    assert not (tmp_path / "new" / "text").exists()

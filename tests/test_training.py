# SPDX-License-Identifier: Apache-2.0
"""train_heads(): it learns, resumes with the same numbers, loses nothing and refuses early."""

import contextlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import helpers
import hf_fixtures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from test_head_training import oracle

import tsjax
from tsjax.training import run
from tsjax.training import saved as saved_training
from tsjax.training.corpus import Order
from tsjax.training.loss import init_heads
from tsjax.training.places import shared_out

LENGTH, ROWS = 16, 10
SETTINGS = tsjax.training.HeadTraining(
    num_heads=2, sequence_length=LENGTH, steps=7, warmup_steps=2, batch_size=4, micro_batch=2,
    chunk_tokens=12, init_scale=0.1,
)  # fmt: skip
DATA = np.random.default_rng(0).integers(0, helpers.VOCAB, (ROWS, LENGTH))


@pytest.fixture(scope="module")
def model():
    return helpers.tiny_model()


@pytest.fixture(scope="module")
def whole(model):
    """A run that nothing stopped."""
    return tsjax.training.train_heads(model, DATA, settings=SETTINGS)


def train(model, **options):
    return tsjax.training.train_heads(model, DATA, **{"settings": SETTINGS, **options})


def numbers(history):
    """Records without their times."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


def assert_same_run(trained, other):
    assert numbers(trained.history) == numbers(other.history)
    heads = trained.model.params.heads, other.model.params.heads
    jax.tree.map(np.testing.assert_array_equal, *heads)


def send_at_3(*numbers):
    """What sends signals after the third step."""

    def send(record):
        for number in numbers if record["step"] == 3 else ():
            os.kill(os.getpid(), number)

    return send


def stopped(model, folder):
    """A run that Ctrl-C ends after the third step."""
    how = dict(on_step=send_at_3(signal.SIGINT), on_interrupt="return")
    trained = train(model, save_to=folder, **how)
    assert trained.finish_reason == "interrupted" and len(trained.history) == 3


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- learning --------------------------------------------------------------------------------


def test_two_heads_learn_a_text_that_repeats_itself():
    size = 12
    model = helpers.chain_model({i: (i + 1) % size for i in range(size)}, vocab_size=size)
    sharp = model.params.model.replace(unembed=model.params.model.unembed * 8)
    model = model.replace(params=model.params.replace(model=sharp))
    text = np.arange(40 * 24) % size
    settings = tsjax.training.HeadTraining(
        num_heads=2, sequence_length=24, steps=80, warmup_steps=5, batch_size=4, micro_batch=4,
        learning_rate=0.05,
    )  # fmt: skip
    trained = tsjax.training.train_heads(model, text, settings=settings, held_out=0.1)
    jax.tree.map(np.testing.assert_array_equal, trained.model.params.model, sharp)  # stays as it is
    assert trained.finish_reason == "steps" and not trained.unsaved
    assert trained.history[0]["loss"] > 3
    assert max(trained.history[-1]["head_losses"]) < 0.01
    assert [record["top1"] for record in trained.evaluation] == [1.0, 1.0, 1.0]
    assert max(record["loss"] for record in trained.evaluation[1:]) < 0.01
    # Here counts are as good: each token is followed by one token.
    assert [record["skip_bigram"][0] for record in trained.evaluation] == [1.0, 1.0, 1.0]
    # The heads are drafts of the model from now on, and all of them are accepted.
    method = tsjax.TokenSwift(tree=(1, 1), num_ngrams=0, suffix_length=0)
    result = tsjax.generate(trained.model, [3], method=method, max_new_tokens=40)
    assert result.tokens[0].tolist() == [(4 + i) % size for i in range(40)]
    assert result.stats.tokens_per_step > 2.5


def test_each_step_has_the_losses_of_its_own_sequences(model, whole):
    # The first step's learning rate is 0, so two steps start from the same heads.
    heads = init_heads(model.cfg, SETTINGS)
    order = Order(ROWS, SETTINGS.seed)
    for step in range(2):
        tokens = DATA[order.numbers(4 * step, 4)]
        loss, hits = oracle(model, heads, tokens)
        labels = 4 * np.asarray(SETTINGS.labels)
        record = whole.history[step]
        np.testing.assert_allclose(record["head_losses"], loss[1:] / labels, rtol=1e-5)
        assert record["loss"] == pytest.approx((loss[1:] / labels).sum(), rel=1e-5)
        for k in range(3):
            np.testing.assert_allclose(record[f"top{k + 1}"], hits[1:, k] / labels)


def check_losses(trained, other) -> None:
    for a, b in zip(trained.history, other.history, strict=True):
        np.testing.assert_allclose(a["head_losses"], b["head_losses"], rtol=1e-5)
        assert a["top3"] == b["top3"]


@pytest.mark.parametrize("options", [{"micro_batch": 4}, {"cache_hidden": True}])
def test_micro_batches_and_cached_states_only_round_differently(options, model, whole):
    check_losses(train(model, **options), whole)


def test_it_is_saved_every_so_many_steps(model, tmp_path, monkeypatch):
    counts, save = [], saved_training.RunFolder.save

    def counted(self, run, history, **how):
        counts.append(len(history))
        save(self, run, history, **how)

    monkeypatch.setattr(saved_training.RunFolder, "save", counted)
    train(model, save_to=tmp_path, save_every=3)
    assert counts == [3, 6, 7]


def test_the_rows_of_a_batch_are_shared_out():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    rows = shared_out(np.zeros((4, 5), np.int32), helpers.tiny_model(mesh=mesh).params)
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 5)}


@pytest.mark.wide
def test_on_a_mesh(model):
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    trained = train(helpers.tiny_model(mesh=mesh), held_out=0.2)
    alone = train(model, held_out=0.2)
    check_losses(trained, alone)
    for a, b in zip(trained.evaluation, alone.evaluation, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert trained.model.params.heads[0].linear.sharding.mesh.shape == {"data": 2, "model": 2}


# --- how many steps --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequences", "parts", "changes", "wanted"),
    [
        (1, 1, {}, (50, 12, 1, 1)),
        (10, 1, {}, (63, 15, 8, 2)),
        (100, 3, {}, (53, 13, 96, 2)),
        (130, 1, {}, (55, 13, 120, 3)),
        (480, 1, {}, (200, 50, 120, 3)),
        (10**6, 4, {"head_kind": "parallel"}, (200, 40, 120, 3)),
        (10, 4, {}, (63, 15, 8, 2)),
        (10, 1, {"micro_batch": 4}, (63, 15, 8, 4)),
        (10, 1, {"batch_size": 120}, (5, 1, 120, 3)),
        (10, 1, {"warmup_steps": 60}, (63, 60, 8, 2)),
    ],
)
def test_little_data_has_fewer_steps_of_fewer_sequences(sequences, parts, changes, wanted):
    """At most MOST_PASSES over it. `wanted`: steps, warm-up, sequences of a step and of a pass."""
    found = run._fitted_to(sequences, parts, run.head_settings(None, changes), changes)
    assert found == dict(zip(run.SIZED_BY_DATA, wanted, strict=True))
    steps = tsjax.training.HeadTraining.__doc__.partition("steps:")[2]
    assert f"after {run.MOST_PASSES} passes" in steps.partition("batch_size:")[0]


def test_steps_that_nobody_gives_follow_the_data_or_the_run_that_goes_on(
    model, tmp_path, monkeypatch
):
    short = dict(num_heads=2, sequence_length=LENGTH, chunk_tokens=12)

    def of_run(model=model, **options):
        how = dict(on_step=send_at_3(signal.SIGINT), on_interrupt="return", **short)
        return tsjax.training.train_heads(model, DATA, **how, **options).settings

    # What an older tsjax has begun without a number of steps.
    given = tsjax.training.HeadTraining(**short, micro_batch=120)
    old = of_run(settings=given, save_to=tmp_path)
    assert old == given  # a whole recipe is taken as it is
    monkeypatch.setattr(run._Run, "step", lambda self, interrupt: None)
    again = of_run(save_to=tmp_path, resume=True)
    assert again == old and again.steps == 200
    told = of_run()
    assert [getattr(told, name) for name in run.SIZED_BY_DATA] == [63, 15, 8, 2]
    assert of_run(steps=8, warmup_steps=1).batch_size == 120
    mesh = jax.make_mesh((3, 1), ("data", "model"), devices=jax.devices()[:3])
    on_three = of_run(helpers.tiny_model(mesh=mesh))  # of which 120 is no multiple in threes
    assert (on_three.batch_size, on_three.micro_batch) == (6, 2)


# --- what is kept ----------------------------------------------------------------------------


def test_a_run_that_failed_and_was_resumed_is_the_run_that_did_not(model, whole, tmp_path):
    def fail(record):
        if record["step"] == 5:
            raise RuntimeError("the machine caught fire")

    (tmp_path / "checkpoint" / ".writing-1").mkdir(parents=True)  # what a killed writer left
    no_process = 2**31 - 1  # above every limit of Linux
    (tmp_path / f"loss.png.writing-{no_process}").write_text("half of it")
    with pytest.raises(RuntimeError, match="fire"):
        train(model, save_to=tmp_path, save_every=2, on_step=fail)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert os.listdir(tmp_path / "checkpoint") == ["step-00000005"]
    resumed = train(model, save_to=tmp_path, resume=True)
    assert_same_run(resumed, whole)
    assert numbers(read_metrics(tmp_path)) == numbers(whole.history)
    kept = os.stat(saved_training.latest(str(tmp_path)))
    again = train(model, save_to=tmp_path, resume=True)  # it has ended: nothing is left to do
    assert_same_run(again, whole)
    assert os.stat(saved_training.latest(str(tmp_path))).st_ino == kept.st_ino, "never removed"
    assert set(os.listdir(tmp_path)) <= saved_training.FILES_OF_HEADS


@pytest.mark.parametrize(
    ("numbers_sent", "raises"),
    [([signal.SIGTERM], tsjax.Interrupted), ([signal.SIGINT] * 2, KeyboardInterrupt)],
)
def test_a_signal_ends_the_run_with_what_there_is(numbers_sent, raises, model, whole, tmp_path):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(raises) as raised:
        train(model, save_to=tmp_path, on_step=send_at_3(*numbers_sent))
    assert isinstance(raised.value, (SystemExit, KeyboardInterrupt))
    if raises is tsjax.Interrupted:
        trained = raised.value.result
        assert trained.finish_reason == "interrupted" and trained.evaluation == []
        assert numbers(trained.history) == numbers(whole.history)[:3]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert_same_run(train(model, save_to=tmp_path, resume=True), whole)


@contextlib.contextmanager
def full_disk(monkeypatch):
    """safetensors as it behaves where arrays do not fit: a part is written, then comes an error."""
    whole = safetensors.numpy.save_file

    def save(tensors, path, **options):
        if "arrays" not in os.path.basename(path):
            return whole(tensors, path, **options)
        Path(path).write_bytes(b"a part")
        raise safetensors.SafetensorError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", save)
        yield


def test_a_full_disk_leaves_the_last_good_checkpoint(model, whole, tmp_path, monkeypatch):
    stopped(model, tmp_path)
    message = "checkpoint in .* not written: .* could not be written: No space left on device$"
    with full_disk(monkeypatch), pytest.warns(UserWarning, match=message):
        trained = train(model, save_to=tmp_path, save_every=2, resume=True)
    assert_same_run(trained, whole)  # it went on: what was made is returned
    assert trained.unsaved and "No space left" in trained.problems[0]
    assert os.listdir(tmp_path / "checkpoint") == ["step-00000003"]  # and nothing half-written
    resumed = train(model, save_to=tmp_path, resume=True)
    assert_same_run(resumed, whole)
    assert not resumed.unsaved and os.listdir(tmp_path / "checkpoint") == ["step-00000007"]


def test_the_folder_has_metrics_summary_and_plot(model, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    trained = train(model, save_to=tmp_path / "run", held_out=0.2)
    assert set(os.listdir(tmp_path / "run")) == saved_training.FILES_OF_HEADS
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 7 and summary["settings"]["learning_rate"] == 5e-3
    assert summary["evaluation"] == trained.evaluation
    assert [record["head"] for record in trained.evaluation] == [0, 1, 2]
    assert read_metrics(tmp_path / "run") == trained.history
    # Without matplotlib the plot alone is missing.
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    trained = train(model, save_to=tmp_path / "other", steps=3)
    assert trained.problems == ("no plot of the losses: pip install 'tsjax[plot]'",)
    assert not trained.unsaved and not (tmp_path / "other" / "loss.png").exists()


def test_the_adapter_is_read_by_tsjax_and_has_tokenswifts_names(tmp_path):
    base = str(hf_fixtures.make(tmp_path / "hf", vocab_size=helpers.VOCAB))
    trained = train(tsjax.load(base), save_to=tmp_path / "run", steps=3)
    adapter = tmp_path / "run" / "heads.safetensors"
    stored = safetensors.numpy.load_file(adapter)
    parts = ("linear", "input_layernorm", "post_layernorm")
    names = itertools.product(range(2), parts)
    assert set(stored) == {f"model.medusa_layers.{i}.{part}.weight" for i, part in names}
    linear = trained.model.params.heads[1].linear
    np.testing.assert_array_equal(stored["model.medusa_layers.1.linear.weight"], linear)

    for place in (tmp_path / "run", adapter):
        loaded = tsjax.load(base, heads=place)
        jax.tree.map(np.testing.assert_array_equal, loaded.params, trained.model.params)


# --- bad input -------------------------------------------------------------------------------


def test_resuming_something_else_is_refused_and_changes_nothing(model, tmp_path):
    train(model, save_to=tmp_path / "run", steps=3)
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file())

    def refused(message, error=ValueError, **options):
        options = {"save_to": tmp_path / "run", "resume": True, "steps": 3, **options}
        with pytest.raises(error, match=message):
            train(options.pop("model", model), **options)

    refused(r"made with learning_rate=0.005, now 0.01; seed=0, now 1$", learning_rate=0.01, seed=1)
    refused(r"made with another model \(or type\)", model=helpers.tiny_model(seed=1))
    with pytest.raises(ValueError, match="made with other data"):
        how = dict(settings=SETTINGS, steps=3, save_to=tmp_path / "run", resume=True)
        tsjax.training.train_heads(model, DATA[1:], **how)
    refused(r"it holds a run; pass resume=True \(--resume\)", FileExistsError, resume=False)
    refused(r"has no checkpoint/step-\*", FileNotFoundError, save_to=tmp_path / "other")
    refused("save_to names the folder", save_to=None)
    (file,) = (tmp_path / "run").rglob("run.json")
    intact = file.read_bytes(), os.stat(file)
    for content in ("{", "[]", "{}", file.read_text().replace('"format": 4', '"format": 5')):
        file.write_text(content)
        refused("step-00000003' is damaged")
    file.write_bytes(intact[0])
    os.utime(file, ns=(intact[1].st_atime_ns, intact[1].st_mtime_ns))
    after = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file())
    assert after == before


def test_an_older_run_goes_on_and_is_compared_by_its_own_rule(model, whole, tmp_path):
    """What version 0.1.0 wrote for tiny_model(): orbax's folder, matrices inputs first."""
    from orbax.checkpoint import v1 as ocp

    stopped(model, tmp_path)
    (file,) = tmp_path.rglob("run.json")
    document = json.loads(file.read_text())
    older = document | {"format": 1, "model": "c40436f888f9755a"}
    later = ("head_kind", "loss_decay")  # settings that older runs do not have
    older["settings"] = {k: v for k, v in document["settings"].items() if k not in later}
    file.write_text(json.dumps(older))
    arrays = safetensors.numpy.load_file(file.parent / "arrays.safetensors")
    (file.parent / "arrays.safetensors").unlink()
    turned = {k: np.ascontiguousarray(x.T) if x.ndim == 2 else x for k, x in arrays.items()}
    ocp.save(file.parent / "arrays", jax.tree.map(jnp.asarray, turned))
    message = "older tsjax: only the model's norms and some of its rows were compared"
    with pytest.warns(UserWarning, match=message), pytest.raises(ValueError, match="another model"):
        train(helpers.tiny_model(seed=1), save_to=tmp_path, resume=True)
    with pytest.warns(UserWarning, match=message):
        assert_same_run(train(model, save_to=tmp_path, resume=True), whole)
    (file,) = tmp_path.rglob("run.json")
    again = json.loads(file.read_text())
    assert (again["format"], again["model"]) == (4, document["model"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": 3}, TypeError, "did you mean 'steps'"),
        ({"batch_size": 5}, ValueError, r"batch_size=5 is not valid: a multiple of the 2 seq.* of"),
        ({"sequence_length": 10**6}, ValueError, "at most the 100000 positions"),
        ({"save_every": 0}, ValueError, "save_every=0"),
        ({"on_interrupt": "stop"}, ValueError, "on_interrupt='stop' is not valid"),
        ({"sequence_length": 17}, ValueError, "longest of 10 documents, 'the array.9.', has 16"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message, model):
    with pytest.raises(error, match=message):
        train(model, **options)


def test_wrong_places_are_refused(model, tmp_path):
    def refused(error, message, place):
        with pytest.raises(error, match=message):
            train(model, save_to=place)

    (tmp_path / "file").write_text("x")
    refused(NotADirectoryError, "a folder, which may be new", tmp_path / "file")
    refused(FileExistsError, "it has 'file'; choose a folder of its own", tmp_path)
    refused(ValueError, "save_to='' is not valid", "")
    with pytest.raises(TypeError, match="model=3 is not valid"):
        tsjax.training.train_heads(3, DATA)
    with pytest.raises(ValueError, match="batch_size=4 is not valid: a multiple of the 8 .* mesh"):
        mesh = jax.make_mesh((4, 1), ("data", "model"))
        train(helpers.tiny_model(mesh=mesh))
    with pytest.raises(ValueError, match="this model has no path, so it has no tokenizer"):
        text = tmp_path / "a.txt"
        text.write_text("some text")
        tsjax.training.train_heads(model, text, settings=SETTINGS)

# SPDX-License-Identifier: Apache-2.0
"""The file of a run: what it says, older files, and the method that a resumed run goes on with."""

import dataclasses
import errno
import fcntl
import itertools
import json
import os

import pytest
from helpers import RecordingStreamer, tiny_model

import tsjax
from tsjax.__main__ import main
from tsjax.files import locked_files
from tsjax.files.locked_files import WriterLock
from tsjax.host.saved_run import read_run, write_run

PROMPT = [3, 1, 4, 1, 5]
METHODS = [
    tsjax.methods.Autoregressive(),
    tsjax.NGram(suffix_length=4, pass_widths=(3,)),
    tsjax.Auto(),
    tsjax.TokenSwift(tree=((0,), (0, 1)), draft_from="partial_cache", noise_coupled=False),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def saved_by(model, path, **settings):
    """The content of the file of a short run."""
    tsjax.generate(model, PROMPT, save_to=path, **{"max_new_tokens": 6, **settings})
    return json.loads(path.read_text())


def test_the_file_says_who_wrote_it_and_with_what(model, tmp_path):
    saved = saved_by(model.replace(path="a/folder"), tmp_path / "run.json", method="tokenswift")
    assert saved["format"] == 2 and saved["tsjax"] == tsjax.__version__
    assert saved["model"]["path"] == "a/folder" and saved["model"]["dtype"] == "float32"
    assert saved["method"] == {"name": "auto"}  # as it was asked for


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    return saved_by(model, tmp_path_factory.mktemp("saved") / "run.json")


def test_the_method_comes_back(saved, tmp_path):
    path = tmp_path / "run.json"
    # What older versions left to the machine is Auto.
    older = {"name": "tokenswift", "draft_from": "auto", "num_ngrams": 3}
    path.write_text(json.dumps({**saved, "method": older}))
    run = read_run(path)
    assert run.method == tsjax.Auto()
    for method in METHODS:
        write_run(path, dataclasses.replace(run, method=method))
        assert read_run(path).method == method


def test_a_resumed_run_goes_on_with_its_method(model, tmp_path):
    path, method = tmp_path / "run.json", tsjax.NGram.paper(num_ngrams=0)
    saved_by(model, path, method=method)
    again = tsjax.generate(model, resume_from=path, max_new_tokens=9, save_to=path)
    assert again.stats.method == read_run(path).method == method
    other = tsjax.generate(model, resume_from=path, max_new_tokens=12, method="autoregressive")
    assert other.stats.method == tsjax.methods.Autoregressive()
    assert other.tokens[0].tolist()[:9] == again.tokens[0].tolist()
    with pytest.raises(ValueError, match="method='' is not valid"):
        tsjax.generate(model, resume_from=path, method="")


def test_the_command_resumes_with_the_saved_method(tmp_path, capsys):
    path = str(tmp_path / "run.json")
    begin = ["generate", tsjax.EMBEDDED, "Once", "--max-new-tokens", "3", "--save-to", path]
    assert main([*begin, "--method", "ngram", "--method-options", "num_ngrams=0"]) == 0
    go_on = ["generate", tsjax.EMBEDDED, "--resume-from", path, "--json"]
    other = ["--method", "ngram", "--method-options", "num_ngrams=20"]
    for more, num_ngrams in (["--max-new-tokens", "5"], 0), (other, 20):
        capsys.readouterr()
        assert main([*go_on, *more]) == 0
        assert json.loads(capsys.readouterr().out)["stats"]["method"]["num_ngrams"] == num_ngrams


@pytest.mark.parametrize(
    "damage",
    [
        {"tokens": [[1], [2]]},
        {"tokens": [["a"]]},
        {"tokens": [[61]]},
        {"prompt": [[]]},
        {"finish_reason": ["eos", "eos"]},
        {"single": True, "prompt": 5},
        {"config": {"zzz": 1}},
        {"model": {"path": None}},
        {"model": {"path": 3, "dtype": "float32", "fingerprint": ""}},
        {"tsjax": None},
        {"method": "ngram"},
        {"method": {"name": "beam"}},
        {"method": {"name": "ngram", "num_ngrams": -1}},
        {"method": {"name": "ngram", "zzz": 1}},
    ],
    ids=repr,
)
def test_a_damaged_file_is_refused(model, saved, damage, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(saved | damage))
    with pytest.raises(ValueError, match="resume_from=.*run.json'"):
        tsjax.generate(model, resume_from=path)


# --- files of format 1 --------------------------------------------------------------------------

# As version 0.1.0 wrote it: tiny_model(), PROMPT, max_new_tokens=6.
OLD_FILE = {
    "format": 1,
    "model": "81921387a4e33c38",
    "exceed_max_positions": False,
    "single": True,
    "config": {"max_new_tokens": 6},
    "prompt": [PROMPT],
    "tokens": [[]],
    "finish_reason": [None],
}
OF_AN_OLDER = "is of an older tsjax: of the model only settings and norms were compared"


def test_an_older_file_is_resumed_with_a_warning(model, saved, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(OLD_FILE))
    with pytest.warns(UserWarning, match=OF_AN_OLDER) as warned:
        result = tsjax.generate(model, resume_from=path, save_to=path)
    assert warned[0].filename == __file__
    assert result.tokens[0].tolist() == saved["tokens"][0]
    assert result.stats.method == tsjax.methods.Autoregressive()
    assert json.loads(path.read_text())["format"] == 2
    path.write_text(json.dumps(OLD_FILE))
    another = "saved with another model or dtype: load that of the run"
    with pytest.warns(UserWarning, match=OF_AN_OLDER), pytest.raises(ValueError, match=another):
        tsjax.generate(tiny_model(vocab_size=50), resume_from=path)


# --- two runs and one file ----------------------------------------------------------------------


def test_a_second_run_of_a_file_is_refused_and_the_first_is_unhurt(model, tmp_path):
    path, refusals = tmp_path / "run.json", []

    def second(count):
        for how in [dict(prompt=[7, 8]), dict(resume_from=path)][: 1 + path.exists()]:
            with pytest.raises(tsjax.TsjaxError, match="is being written by another run") as no:
                tsjax.generate(model, save_to=path, max_new_tokens=30, **how)
            refusals.append(no.value)

    how = dict(max_new_tokens=30, save_to=path, save_every=1)
    first = tsjax.generate(model, PROMPT, streamer=RecordingStreamer(second), **how)
    assert len(refusals) > 30 and read_run(path).tokens[0].tolist() == first.tokens[0].tolist()
    assert first.tokens[0].tolist() == tsjax.generate(model, PROMPT, **how).tokens[0].tolist()
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_run_that_fails_leaves_the_file_to_others(model, tmp_path):
    def fail(count):
        raise RuntimeError("the streamer's")

    path = tmp_path / "run.json"
    with pytest.raises(RuntimeError, match="the streamer's"):
        tsjax.generate(model, PROMPT, save_to=path, streamer=RecordingStreamer(fail))
    assert os.listdir(tmp_path) == ["run.json"]
    again = tsjax.generate(model, resume_from=path, save_to=path, max_new_tokens=4)
    assert len(again.tokens[0]) == 4 and os.listdir(tmp_path) == ["run.json"]


def test_a_lock_that_is_removed_while_another_waits_is_taken_anew(tmp_path, monkeypatch):
    """Between opening and locking; two would else have a lock, each on a file of its own."""
    path = str(tmp_path / "run.json")
    first, second, real = WriterLock(path), WriterLock(path), locked_files.lock
    assert first.take() and not second.take()

    def slow(file):
        first.give_back()
        return real(file)

    monkeypatch.setattr(locked_files, "lock", slow)
    assert second.take()
    monkeypatch.undo()
    assert not first.take() and os.listdir(tmp_path) == ["run.json.lock"]
    second.give_back()
    assert os.listdir(tmp_path) == []


def test_where_files_cannot_be_locked_a_run_says_so(model, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "run.json"
    with pytest.warns(UserWarning, match="run.json' cannot be locked: .*No locks") as warned:
        result = tsjax.generate(model, PROMPT, max_new_tokens=4, save_to=path)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert not result.unsaved and read_run(path).tokens[0].tolist() == result.tokens[0].tolist()


# --- a disk that is full ------------------------------------------------------------------------

ADVICE = "go on with --resume-from"


def full_disk(monkeypatch, failing: range):
    """These of the next writes fail, and others succeed."""
    real, calls = os.fsync, itertools.count()

    def fsync(handle):
        if next(calls) in failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("failing", [range(10**6), range(1), range(1, 10**6)], ids=str)
def test_a_result_says_that_it_is_not_on_disk(failing, model, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    full_disk(monkeypatch, failing)
    with pytest.warns(UserWarning, match="No space left on device") as warned:
        result = tsjax.generate(model, PROMPT, max_new_tokens=9, save_to=path, save_every=1)
    assert len(warned) == 1 and warned[0].filename == __file__
    problem = f"save_to={str(path)!r} was not written: [Errno 28] No space left on device"
    assert result.problems == (problem,) and len(result.tokens[0]) == 9
    assert result.unsaved == (len(failing) > 1)
    monkeypatch.undo()
    if len(failing) == 1:  # a later write succeeded
        assert read_run(path).tokens[0].tolist() == result.tokens[0].tolist()
    elif 0 not in failing:  # what had room goes on later
        assert 0 < len(read_run(path).tokens[0]) < 9
        again = tsjax.generate(model, resume_from=path, save_to=path)
        assert not again.unsaved and again.tokens[0].tolist() == result.tokens[0].tolist()


def test_the_command_says_what_is_not_on_disk(tmp_path, capsys, monkeypatch):
    path = str(tmp_path / "run.json")
    argv = ["generate", tsjax.EMBEDDED, "Once", "--max-new-tokens", "5", "--json"]
    full_disk(monkeypatch, range(10**6))
    with pytest.warns(UserWarning, match="No space left on device"):
        assert main([*argv, "--save-to", path, "--save-every", "1"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert len(document["tokens"][0]) == 5 and document["unsaved"]
    assert "No space left on device" in err and ADVICE not in err
    assert err.splitlines()[-1] == f"tsjax: error: {path!r} lacks the end of this run"

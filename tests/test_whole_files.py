# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole, and what killed processes leave beside them."""

import os
import socket
import subprocess
import sys

import pytest
from helpers import tiny_model

import tsjax
import tsjax_convert
from tsjax.__main__ import main
from tsjax.base.input_files import kind_of
from tsjax.files import adapters, whole_files


@pytest.fixture(scope="module")
def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leave(folder, name: str, *processes: int) -> list[str]:
    names = [f"{name}.writing-{process}" for process in processes]
    for left in names:
        (folder / left).write_text("half of")
    return names


def test_the_next_write_clears_what_a_killed_process_left(ended, tmp_path, monkeypatch):
    leave(tmp_path, "run.json", ended)
    others = leave(tmp_path, "run.json", os.getppid())  # it is still running
    others += leave(tmp_path, "other.json", ended)
    for name in ("run.json.writing-", "run.json.writing-x", f"my-run.json.writing-{ended}"):
        (tmp_path / name).write_text("no left-over of this file")
        others.append(name)
    monkeypatch.chdir(tmp_path)  # a name without a folder
    whole_files.write_text("run.json", "text")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "run.json"])
    assert (tmp_path / "run.json").read_text() == "text"


def test_an_error_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), whole_files.replacing(os.fspath(path)) as temporary:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write("half of")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["file"] and path.read_text() == "before"


def test_checkpoints_heads_and_runs_clear_theirs(ended, tmp_path):
    half = tmp_path / f".model.writing-{ended}"
    half.mkdir()
    (half / "params").write_text("half of")
    leave(tmp_path, "heads.safetensors", ended)
    leave(tmp_path, "run.json", ended)
    model = tiny_model(num_draft_heads=1)
    tsjax.save(model, tmp_path / "model")
    adapters.write_heads(model, os.fspath(tmp_path / "heads.safetensors"))
    tsjax.generate(model, [1, 2, 3], max_new_tokens=2, save_to=tmp_path / "run.json")
    assert sorted(os.listdir(tmp_path)) == ["heads.safetensors", "model", "run.json"]


def bind(path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.fspath(path))


@pytest.fixture(scope="module")
def result() -> tsjax.GenerationResult:
    return tsjax.generate(tiny_model(), [1, 2, 3], max_new_tokens=2)


# Devices are only asked about below, never written.
@pytest.mark.parametrize(
    ("kind", "make"), [("a folder", os.mkdir), ("a named pipe", os.mkfifo), ("a socket", bind)]
)
def test_what_is_no_file_is_refused_before_any_work_and_stays(
    kind, make, result, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    make("place.png")
    os.symlink("place.png", "link.png")
    (tmp_path / "p.jsonl").write_text('"the"\n')
    model = tiny_model()
    for place in ("place.png", "link.png"):
        with pytest.raises(OSError, match=f"path='{place}' is not valid: a file.*, not {kind}"):
            result.save(place)
        with pytest.raises(OSError, match=f"save_to='{place}' is not valid: a file.*, not {kind}"):
            tsjax.generate(model, [1, 2, 3], max_new_tokens=2, save_to=place)
        for argv in (
            ["generate", "no/model", "the", "--save-to", place],
            ["batch", "no/model", "p.jsonl", "--out", place],
            ["bench", "no/model", "--plot", place],
        ):
            assert main(argv) == 2
            said = capsys.readouterr().err
            assert f"{argv[-2]}='{place}' is not valid: a file" in said and f"not {kind}" in said
        if kind != "a folder":
            wrong = "not valid: it is not a checkpoint folder, and not overwritten"
            with pytest.raises(FileExistsError, match=f"path='{place}' is {wrong}"):
                tsjax.save(model, place, overwrite=True)
            for convert in (tsjax_convert.to_tsjax, tsjax_convert.to_hf):
                with pytest.raises(FileExistsError, match=f"dst='{place}' is {wrong}"):
                    convert("no/model", place, overwrite=True)
    assert kind_of("place.png") == kind and os.path.islink("link.png")


def test_devices_are_refused(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    for place in ("/dev/null", link):
        with pytest.raises(PermissionError, match=r"out='.*' is not valid: a file.*, not a device"):
            whole_files.check_place(place, "out")


def test_a_file_of_a_folder_of_training_may_be_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(PermissionError, match="metrics.jsonl' is not valid: a file.*a named pipe"):
        tsjax.training.train_heads(tiny_model(), [[1, 2, 3, 4] * 9], save_to=tmp_path)


def test_a_link_stays_and_its_target_is_replaced(tmp_path, result):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to("there/file")
    target.write_text("before")
    result.save(link)
    assert link.is_symlink() and target.read_text().startswith('{"text"')
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]
    assert os.listdir(tmp_path / "there") == ["file"]

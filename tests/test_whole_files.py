# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole, and what killed processes leave beside them."""

import os
import subprocess
import sys

import pytest
from helpers import tiny_model

import tsjax
from tsjax.files import checkpoint, whole_files


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


def test_the_next_write_clears_what_a_killed_process_left(ended, tmp_path):
    leave(tmp_path, "run.json", ended)
    others = leave(tmp_path, "run.json", os.getppid())  # it is still running
    others += leave(tmp_path, "other.json", ended)
    for name in ("run.json.writing-", "run.json.writing-x", f"my-run.json.writing-{ended}"):
        (tmp_path / name).write_text("no left-over of this file")
        others.append(name)
    whole_files.write_text(os.fspath(tmp_path / "run.json"), "text")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "run.json"])
    assert (tmp_path / "run.json").read_text() == "text"


def test_a_name_without_a_folder(ended, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leave(tmp_path, "run.json", ended)
    whole_files.write_text("run.json", "text")
    assert os.listdir() == ["run.json"]


def test_an_error_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), whole_files.replacing(os.fspath(path)) as temporary:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write("half of")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["file"] and path.read_text() == "before"


def test_a_saved_run_clears_what_a_killed_one_left(ended, tmp_path):
    leave(tmp_path, "run.json", ended)
    tsjax.generate(tiny_model(), [1, 2, 3], max_new_tokens=2, save_to=tmp_path / "run.json")
    assert os.listdir(tmp_path) == ["run.json"]


def test_checkpoints_and_heads_clear_theirs(ended, tmp_path):
    half = tmp_path / f".model.writing-{ended}"
    half.mkdir()
    (half / "params").write_text("half of")
    leave(tmp_path, "heads.safetensors", ended)
    model = tiny_model(num_draft_heads=1)
    tsjax.save(model, tmp_path / "model")
    checkpoint.write_heads(model, os.fspath(tmp_path / "heads.safetensors"))
    assert sorted(os.listdir(tmp_path)) == ["heads.safetensors", "model"]

# SPDX-License-Identifier: Apache-2.0
"""tsjax train-heads: it trains, saves and resumes, and says in one line what is wrong."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import helpers
import hf_fixtures
import numpy as np
import pytest
from test_training import full_disk, numbers, read_metrics

from tsjax.__main__ import main
from tsjax.training import run as training
from tsjax.training import saved as saved_training

FLAGS = (
    "--sequence-length 12 --steps 4 --warmup-steps 1 --batch-size 2 --micro-batch 2 --num-heads 2"
).split()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("training") / "hf"
    hf_fixtures.make(folder, vocab_size=len(helpers.TOKENS))
    return helpers.save_tokenizer(folder)


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("books")
    rng = np.random.default_rng(1)
    for name in "abcde":
        words = rng.choice(["the", "train", "and", "rain", "in", "her", "hair"], 40)
        (folder / f"{name}.txt").write_text(" ".join(words))
    (folder / "short.txt").write_text("a")
    return str(folder)


def test_steps_that_nobody_gives_follow_the_texts(checkpoint, books, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "MOST_PASSES", 4)
    argv = ["train-heads", checkpoint, "--data", books, "--save-to", str(tmp_path / "run")]
    assert main([*argv, "--sequence-length", "12", "--num-heads", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 5  # of 4 of the 5 texts


def test_the_command_trains_saves_and_resumes(checkpoint, books, tmp_path, capsys):
    run = str(tmp_path / "run")
    argv = ["train-heads", checkpoint, "--data", books, "--save-to", run, *FLAGS]
    argv += ["--held-out", "0.2", "--cache", "int8"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["steps"] == 4 and document["finish_reason"] == "steps"
    assert len(document["head_losses"]) == 2
    assert "4/4" in err and "top-1/2/3 %" in err and "short.txt" in err
    assert "head 2: " in err and "% by the best guess from counts" in err
    assert main([*argv, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    assert main([*argv, "--resume", "--cache", "same"]) == 2
    assert "another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "3,4"], "at most 4 devices"),
        (["--steps", "1"], "warmup_steps=1 is not valid: less than steps=1"),
        (["--held-out", "nowhere"], "held_out='nowhere': there is no such file"),
        (["--data", "nowhere"], "data='nowhere': there is no such file"),
    ],
)
def test_the_command_refuses_in_one_line(flags, message, checkpoint, books, tmp_path, capsys):
    argv = ["train-heads", checkpoint, "--data", books, "--save-to", str(tmp_path / "x"), *FLAGS]
    assert main([*argv, *flags]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_wrong_setting_is_refused_before_the_model_is_read(tmp_path, capsys):
    argv = ["train-heads", "no-model", "--data", "no-text", "--save-to", str(tmp_path / "x")]
    assert main([*argv, "--learning-rate", "-1"]) == 2
    assert "learning_rate=-1.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "full", "code", "goes_on"),
    [(3, False, 130, True), (3, True, 2, False), (1, False, 130, False)],
    ids=["saved", "full disk", "nothing made"],
)
def test_the_command_says_how_to_go_on_where_that_is_possible(
    number, full, code, goes_on, checkpoint, books, tmp_path, capsys, monkeypatch
):
    real, folder = training._Run.step, str(tmp_path / "run")

    def step(self, interrupt):
        if self.state.steps + 1 == number:
            signal.raise_signal(signal.SIGINT)
        return real(self, interrupt)

    monkeypatch.setattr(training._Run, "step", step)
    argv = ["train-heads", checkpoint, "--data", books, "--save-to", folder, *FLAGS]
    if full:
        with full_disk(monkeypatch), pytest.warns(UserWarning, match="No space left"):
            assert main(argv) == code
    else:
        assert main(argv) == code
    err = capsys.readouterr().err
    assert ("[go on with the same command and --resume]" in err) == goes_on
    error = f"tsjax: error: {folder!r} lacks the end of this run"
    assert (err.splitlines()[-1] == error) == full


KILLED = """
import os, signal, sys
from tsjax.__main__ import main

def note(event, arguments):
    if event == "os.rename" and arguments[0].startswith(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(note)
main(sys.argv[2:])
"""


@pytest.mark.wide
def test_the_command_killed_while_it_writes(checkpoint, books, tmp_path):
    """After its first checkpoint, with the heads that belong to it half in place."""
    command = ["train-heads", checkpoint, "--data", books, "--save-every", "1", *FLAGS]

    def run_in(name: str, *more: str):
        """What a finished run says, without times, and its heads."""
        folder = tmp_path / name
        assert main([*command, "--save-to", str(folder), *more]) == 0
        summary = json.loads((folder / "summary.json").read_text())
        del summary["last"]["seconds"]
        assert os.listdir(folder / "checkpoint") == ["step-00000004"]
        assert set(os.listdir(folder)) == saved_training.FILES_OF_HEADS  # nothing of a killed one
        return numbers(read_metrics(folder)), summary, (folder / "heads.safetensors").read_bytes()

    killed = str(tmp_path / "killed")
    argv = [f"{killed}/heads.safetensors.writing", *command, "--save-to", killed]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "XLA_FLAGS": flags}
    how = dict(env=env, capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-c", KILLED, *argv], **how)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert saved_training.latest(killed)
    assert run_in("killed", "--resume") == run_in("whole")

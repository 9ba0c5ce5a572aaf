# SPDX-License-Identifier: Apache-2.0
"""Several processes on this machine: the tokens of one, and what happens where one ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import hf_fixtures
import jax
import numpy as np
import one_of_several as job
import pytest
from conftest import QUICK_XLA
from helpers import tiny_model
from one_of_several import LONG, METHODS, PROMPTS, texts

import tsjax
import tsjax_convert
from tsjax.__main__ import main

GONE = "gloo/transport"  # says jax where another process does not answer
PROGRAM = os.path.join(os.path.dirname(__file__), "one_of_several.py")


@contextlib.contextmanager
def started(count, *argv, program=(sys.executable, PROGRAM)):
    """Processes that are killed at the end, if they are still there."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    root = os.path.dirname(os.path.dirname(PROGRAM))
    running = []
    for number in range(count):
        env = dict(
            os.environ, JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES=str(count),
            JAX_PROCESS_ID=str(number), PYTHONPATH=root,
        )  # fmt: skip
        env.setdefault("XLA_FLAGS", " ".join(QUICK_XLA))
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(subprocess.Popen([*program, *map(str, argv)], env=env, **pipes))
    try:
        yield running
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
            one.communicate()


def ended(running, seconds):
    """Exit codes and what was said, of processes that end by themselves."""
    found = [one.communicate(timeout=seconds) for one in running]
    return [one.returncode for one in running], found


def finished(running, seconds):
    """What was said by processes that end well."""
    codes, said = ended(running, seconds)
    assert codes == [0] * len(running), said[0][1][-3000:]
    return said


def read(path):
    with open(path) as file:
        return json.load(file)


def wait_for(path, seconds=120):
    end = time.monotonic() + seconds
    while not os.path.exists(path):
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def wanted():
    return texts(tiny_model(num_draft_heads=2), METHODS)


@pytest.mark.parametrize(
    ("count", "devices", "meshes"),
    [
        pytest.param(2, 2, ("1,2,2",), id="2x2", marks=pytest.mark.wide),
        pytest.param(4, 1, ("4,1", "1,2,2"), id="4x1", marks=pytest.mark.slow),
    ],
)
def test_processes_give_the_tokens_of_one(count, devices, meshes, wanted, tmp_path):
    out = tmp_path / "found.json"
    with started(count, "generate", devices, out, *meshes) as running:
        finished(running, 500)
    parts = [out, *(f"{out}.{number}" for number in range(1, count))]
    for found in map(read, parts):
        for sizes in meshes:
            for name, rows in found[sizes].items():
                assert rows == wanted[name], (sizes, name)


@pytest.mark.wide
def test_each_process_reads_its_own_part_of_a_checkpoint(tmp_path):
    folder, out = tmp_path / "hf", tmp_path / "found.json"
    hf_fixtures.make(folder)
    with started(2, "load", 1, out, folder, "1,2") as running:
        finished(running, 300)
    wanted = texts(tsjax.load(folder), ["plain"])
    size = (folder / "model.safetensors").stat().st_size
    for found in map(read, (out, f"{out}.1")):
        assert found["texts"] == wanted
        assert 0.45 * size < found["read"] < 0.55 * size


@pytest.mark.wide
def test_other_calls_say_the_same_and_some_are_refused(tmp_path):
    out, folder = tmp_path / "found.json", tmp_path / "heads"
    with started(2, "calls", 2, out, folder) as running:
        finished(running, 300)
    model = tiny_model()
    training = job.trained(model)
    plain, _ = job.measured_run(model, None, tmp_path / "run.json")
    for found in map(read, (out, f"{out}.1")):
        assert found["streamed"] == job.streamed(model)
        assert found["many"] == job.many(model)
        np.testing.assert_allclose(found["trained"], training, rtol=1e-4)
        wanted = ["save is not valid among 2", "process 1 of 2 has none"]
        wanted += 3 * ["a model on one device is not valid among 2"]
        wanted += [f"{name} is not asked for the same" for name in ("generate", "score")]
        wanted += ["train_heads is not asked for the same"]
        for why, beginning in zip(found["refused"], wanted, strict=True):
            assert beginning in why
        assert found["auto"][0] == plain
    assert read(out)["auto"] == read(f"{out}.1")["auto"]  # also which method, in how many steps
    # One process takes up what they have saved.
    again = job.trained(model, folder, resume=True)
    np.testing.assert_allclose(again, found["trained"], rtol=1e-4)


def test_what_writes_a_checkpoint_runs_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for convert in (tsjax_convert.to_tsjax, tsjax_convert.to_hf, tsjax_convert.export_heads):
        with pytest.raises(ValueError, match="converting is not valid among 2 processes"):
            convert(tmp_path / "there", tmp_path / "out")


def rest_of(path, run):
    """The tokens of a saved run and of its continuation, and those that were wanted."""
    tokens = tsjax.generate(tiny_model(max_positions=64), resume_from=path, **run).tokens
    how = {**LONG, **run, "eos_token_id": ()}
    plain = tsjax.generate(tiny_model(max_positions=64), PROMPTS, **how).tokens
    return [row.tolist() for row in tokens], [row.tolist() for row in plain]


def tokens_in(path):
    return len(read(path)["tokens"][0])


@pytest.mark.wide
def test_a_signal_to_one_ends_all_and_what_there_is_is_kept(tmp_path):
    out = tmp_path / "run.json"
    with started(2, "long_run", 1, out, "1,2") as running:
        wait_for(out)
        running[1].send_signal(signal.SIGINT)
        codes, _ = ended(running, 30)
    assert codes == [130, 130]
    run = dict(max_new_tokens=tokens_in(out) + 20)
    found, wanted = rest_of(out, run)
    assert found == wanted


@pytest.mark.wide
def test_where_one_is_killed_the_other_ends_with_an_error_and_a_saved_run(tmp_path):
    out = tmp_path / "run.json"
    with started(2, "long_run", 1, out, "1,2") as running:
        wait_for(out)
        before = tokens_in(out)
        time.sleep(1.5)
        other, killed = running
        killed.kill()
        _, said = other.communicate(timeout=30)
    assert other.returncode not in (0, 130) and GONE in said
    assert tokens_in(out) > before
    run = dict(max_new_tokens=tokens_in(out) + 20)
    found, wanted = rest_of(out, run)
    assert found == wanted


@pytest.mark.wide
def test_the_command_runs_in_several_processes(tmp_path, capfd):
    folder = tmp_path / "hf"
    hf_fixtures.make(folder)
    flags = ["generate", str(folder), "--ids", "3,4,5", "--max-new-tokens", "12", "--json"]
    program = (sys.executable, "-m", "tsjax")
    with started(2, *flags, "--distributed", "--mesh", "1,2", program=program) as running:
        said = finished(running, 200)
    assert main(flags) == 0
    wanted = json.loads(capfd.readouterr().out)
    found = json.loads(said[0][0].splitlines()[-1])
    assert found["tokens"] == wanted["tokens"] and not said[1][0].count("tokens")
    assert sum("tokens/s" in err for _, err in said) == 1


def test_several_processes_need_to_know_each_other(tmp_path, capsys, monkeypatch):
    hf_fixtures.make(tmp_path / "hf")
    argv = ["generate", str(tmp_path / "hf"), "--ids", "3", "--distributed"]
    assert main(argv) == 2
    assert "--mesh DATA,MODEL[,SLOTS] beside it" in capsys.readouterr().err
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    assert main([*argv, "--mesh", "1,2"]) == 2
    assert "JAX_NUM_PROCESSES='two'" in capsys.readouterr().err

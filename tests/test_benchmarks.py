# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: their list, that they run, what they write, and their arithmetic."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import report
from benchmarks.table_parts import made_by
from tsjax.__main__ import main
from tsjax.measure.paired_runs import times_by_position

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("folder", ["benchmarks", "tools", "examples", "experiments"])
def test_every_module_finds_what_it_imports(folder):
    """Most of them run in the wide tier alone, and pyright does not read them."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path.stem != "__main__":
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def program(*arguments: str) -> subprocess.CompletedProcess:
    """What a user types, from the root of the checkout."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def run(name: str, out: Path, *arguments: str, complete: bool = True) -> dict:
    done = program(name, "--quick", "--out", str(out), *arguments)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert {"commit", "date", "device"} <= set(document)
    assert document["command"].startswith(f"python -m benchmarks {name} --quick --out ")
    assert {"python", "jax", "numpy"} <= set(document["versions"])
    assert document["complete"] == complete == (not document["left_out"])
    assert document["copy_bytes_per_second"] > 0
    assert not [row for row in document["rows"] if "error" in row]
    return document


@pytest.mark.wide
def test_the_list_names_every_benchmark():
    done = program("decoding", "--rounds", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 'decoding' is no benchmark: cpu, narrow, ")
    done = program()
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == list(command.NAMES)
    folder = ROOT / "benchmarks"
    with_main = {
        str(path.relative_to(folder).with_suffix("")).removesuffix("/__init__").replace("/", ".")
        for path in folder.rglob("*.py")
        if "\ndef main(" in path.read_text()
    }
    assert with_main - {"__main__"} == set(command.NAMES)


def test_recorded_commands_are_shown_as_they_are_today():
    for then, now in (
        ("benchmarks/bench_decode.py --rounds 5", "-m benchmarks decode --rounds 5"),
        ("-m benchmarks.longcontext.evaluate --out A", "-m experiments.longcontext --out A"),
        ("-m benchmarks longcontext --out A", "-m experiments.longcontext --out A"),
        ("-m benchmarks ttft --new 32", "-m benchmarks ttft --new 32"),
    ):
        assert report.todays_command(f"python {then}") == f"python {now}"


def test_a_benchmark_that_is_gone_is_named_with_its_commit():
    here = "python -m benchmarks ttft --new 32"
    for ran, commit, said in (
        (here, "1a", f"`{here}`"),
        ("tsjax bench x", None, "`tsjax bench x`"),
        ("python -m benchmarks gone", "1a", "`python -m benchmarks gone` at commit 1a"),
        (
            "python benchmarks/bench_gone.py",
            "1a+",
            "`python benchmarks/bench_gone.py` at commit 1a, with changes",
        ),
        ("python -m benchmarks gone", None, "`python -m benchmarks gone` at a commit of that day"),
    ):
        assert made_by({"command": ran, "commit": commit}) == said


def test_the_series_asks_nothing_wrong(capsys, tmp_path):
    """Each line of `tsjax bench` fails at the model alone, which is none here."""
    lines = (ROOT / "benchmarks" / "series.sh").read_text().replace("\\\n", " ").splitlines()
    asked = [
        line.replace("$OUT", str(tmp_path)) for line in lines if line.startswith("tsjax bench")
    ]
    assert len(asked) > 5
    for line in asked:
        _, name, _, *flags = shlex.split(line)
        assert main([name, str(tmp_path / "none"), *flags]) == 2, line
        assert str(tmp_path / "none") in capsys.readouterr().err, line


@pytest.mark.wide
def test_kernels_run_on_a_cpu(tmp_path):
    document = run("kernels", tmp_path)
    assert json.loads((tmp_path / "kernels.json").read_text()) == document
    names = {(row["op"], row["T"], row["implementation"]) for row in document["rows"]}
    attention = {("decode_attention", 1), ("tree_attention", 8)}
    wanted = {(*one, by) for one in attention for by in ("xla", "jax.nn xla")}
    assert names == wanted | {(f"cache_scores {kind}", 1, "xla") for kind in ("dot", "softmax")}
    for row in document["rows"]:
        assert 0 < row["us"]["min"] <= row["us"]["median"]
        assert row["gb_per_s"] > 0 and row["share_of_copy"] > 0
    assert document["bars"] == []  # they are asked of the kernels alone
    late = run("kernels", tmp_path, "--minutes", "0", complete=False)
    assert not late["rows"] and len(late["left_out"]) == 4  # one of each operation


@pytest.mark.wide
def test_a_step_runs_on_a_cpu(tmp_path):
    document = run("step", tmp_path)
    assert json.loads((tmp_path / "step-llama3.1-8b.json").read_text()) == document
    names = {(row["context"], row["pass"], row["rows"]) for row in document["rows"]}
    passes = (("plain", 1), ("draft", 1), ("tokenswift", 16), ("verify", 1), ("verify", 8))
    assert names == {(context, *name) for context in (128, 256) for name in passes}
    for row in document["rows"]:
        assert row["ms"]["min"] > 0 and row["bound_ms"] > 0 and row["over_plain"] > 0
    assert len(document["bars"]) == 2  # the plain steps; no pass has 64 rows


def test_a_run_s_speed_is_told_by_output_position():
    chunks = [(0, 0, 0.0), (1024, 512, 1.0), (3072, 2560, 5.0), (3100, 2588, 5.028)]
    found = times_by_position([chunks])
    assert found["position"] == [1024, 2048, 3072, 3100]
    assert found["ms_per_token"] == pytest.approx([1e3 / 1024, 2e3 / 1024, 2e3 / 1024, 1])
    assert found["tokens_per_step"] == pytest.approx([2, 1, 1, 1])

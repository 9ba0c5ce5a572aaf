# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: their list, that they run, what they write, and their arithmetic."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import helpers
import hf_fixtures
import pytest

import tsjax
from benchmarks import __main__ as command
from benchmarks import equality, report
from tsjax.host.paired_runs import times_by_position

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
    assert done.stderr.startswith("error: 'decoding' is no benchmark: cpu, speedup, ")
    done = program()
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == list(command.MODULES)
    folder = ROOT / "benchmarks"
    with_main = {
        str(path.relative_to(folder).with_suffix("")).removesuffix("/__init__").replace("/", ".")
        for path in folder.rglob("*.py")
        if "\ndef main(" in path.read_text()
    }
    assert with_main - {"__main__"} == set(command.MODULES.values())


def test_recorded_commands_are_shown_as_they_are_today():
    for then, now in (
        ("benchmarks/bench_decode.py --rounds 5", "-m benchmarks decode --rounds 5"),
        ("-m benchmarks.longcontext.evaluate --out A", "-m experiments.longcontext --out A"),
        ("-m benchmarks longcontext --out A", "-m experiments.longcontext --out A"),
        ("-m benchmarks ttft --new 32", "-m benchmarks ttft --new 32"),
    ):
        assert report.todays_command(f"python {then}") == f"python {now}"


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


@pytest.mark.wide
def test_speedups_are_measured_on_a_cpu(tmp_path):
    """Where torch is installed, over torch and the bound as well."""
    torch = importlib.util.find_spec("torch") is not None
    text = tmp_path / "one.txt"
    text.write_text("a thin man " * 200)
    hf_fixtures.make(tmp_path / "hf", vocab_size=len(helpers.TOKENS), max_position_embeddings=512)
    arguments = ["--model", helpers.save_tokenizer(tmp_path / "hf"), "--out", str(tmp_path)]
    arguments += "--settings greedy --contexts 64 --tokens 40 --rounds 1".split()
    arguments += ["--text", str(text), "--threads", str(int(torch))]
    done = program("speedup", *arguments, "--random", "--long", "300")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "speedup.json").read_text())
    assert document["complete"] and not document["left_out"]
    rows = {(row["text"], row["method"]): row for row in document["rows"]}
    ours = ["plain", "paper", "auto", "text", "passes", "ngrams"]
    names = [("one.txt", name) for name in (*ours, *(["torch", "torch lookup"] if torch else []))]
    assert list(rows) == [*names, ("random", "plain"), ("random", "auto")]
    for (_, name), row in rows.items():
        assert row["ms_per_token"]["median"] > 0 and row["tokens_per_step"] >= 1
        assert row["same_tokens"] if name in ours else "same_tokens" not in row
        assert ("bound" in row) == (torch and name == "plain")
    assert rows["one.txt", "auto"]["best_fixed"] in {*ours} - {"auto"}
    assert (tmp_path / "speedup.png").stat().st_size > 0
    long = document["long"]["rows"]
    assert [(row["method"], row["same_tokens"]) for row in long] == [
        ("plain", True),
        ("auto", True),
    ]
    assert all(row["by_position"]["position"] == [300] for row in long)


def test_a_run_s_speed_is_told_by_output_position():
    chunks = [(0, 0, 0.0), (1024, 512, 1.0), (3072, 2560, 5.0), (3100, 2588, 5.028)]
    found = times_by_position([chunks])
    assert found["position"] == [1024, 2048, 3072, 3100]
    assert found["ms_per_token"] == pytest.approx([1e3 / 1024, 2e3 / 1024, 2e3 / 1024, 1])
    assert found["tokens_per_step"] == pytest.approx([2, 1, 1, 1])


@pytest.mark.wide
def test_methods_are_held_against_plain_decoding(tmp_path, monkeypatch, capsys):
    """Goes on with the second round; a token that differs is told with its place."""
    tsjax.save(helpers.tiny_model(num_layers=1), tmp_path / "model")
    monkeypatch.setattr(equality, "METHODS", {"ngram": tsjax.NGram()})
    argv = ["--model", str(tmp_path / "model"), "--length", "12", "--out", str(tmp_path)]
    generate = tsjax.generate

    def wrong(model, prompts, *, method, **asked):
        result = generate(model, prompts, method=method, **asked)
        if method != "autoregressive":
            result.tokens[1][5] += 1
        return result

    for rounds in (1, 2):
        equality.main([*argv, "--batch", "2", "--tokens", str(24 * rounds)])
        found = json.loads((tmp_path / "equality-float32.json").read_text())
        assert (found["rounds"], found["tokens"]) == (rounds, 24 * rounds)
        assert len(found["parted"]) == rounds - 1
        monkeypatch.setattr(tsjax, "generate", wrong)
    (parted,) = found["parted"]
    assert (parted["round"], parted["row"], parted["after"]) == (1, 1, 5)
    with pytest.raises(SystemExit, match="of another run"):
        equality.main([*argv, "--batch", "3", "--tokens", "48"])

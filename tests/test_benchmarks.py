# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: their list, that they run, what they write, and their arithmetic."""

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import helpers
import hf_fixtures
import numpy as np
import pytest

import tsjax
from benchmarks import __main__ as command
from benchmarks import draft_weights, equality, first_token, longrun, report, speedup, step, ttft
from benchmarks.kernels import cases, measuring, programs, tuning
from pallas_kernels.cache_scores import specs as scores_specs
from pallas_kernels.cache_scores import triton as scores_triton
from pallas_kernels.tree_attention import specs as tree_specs
from pallas_kernels.tree_attention import triton as tree_triton
from tsjax.host.paired_runs import times_by_position

ROOT = Path(__file__).resolve().parent.parent


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


def test_the_list_names_every_benchmark():
    done = program()
    assert done.returncode == 0
    lines = done.stdout.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(command.MODULES)
    assert all(len(line.split()) > 3 for line in lines)  # each says what it is
    folder = ROOT / "benchmarks"
    with_main = {
        str(path.relative_to(folder).with_suffix("")).removesuffix("/__init__").replace("/", ".")
        for path in folder.rglob("*.py")
        if re.search(r"^def main\(", path.read_text(), re.MULTILINE)
    }
    assert with_main - {"__main__"} == set(command.MODULES.values())


def test_an_unknown_name_is_refused():
    done = program("decoding", "--rounds", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 'decoding' is no benchmark: cpu, speedup, ")


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("python benchmarks/bench_decode.py --rounds 5", "python -m benchmarks decode --rounds 5"),
        ("python benchmarks/exactness.py", "python -m benchmarks exactness"),
        (
            "python -m benchmarks.longcontext.evaluate --out A",
            "python -m benchmarks longcontext --out A",
        ),
        ("python -m benchmarks.longcontext.texts", "python -m benchmarks longcontext_texts"),
        ("python -m examples.embedded_model train", "python -m tools.embedded_model train"),
        ("python -m benchmarks ttft --new 32", "python -m benchmarks ttft --new 32"),
    ],
)
def test_recorded_commands_are_shown_as_they_are_today(then, now):
    assert report.todays_command(then) == now


def test_kernels_run_on_a_cpu(tmp_path):
    document = run("kernels", tmp_path)
    assert json.loads((tmp_path / "kernels.json").read_text()) == document
    names = {(row["op"], row["T"], row["implementation"]) for row in document["rows"]}
    assert names == {
        ("decode_attention", 1, "xla"),
        ("decode_attention", 1, "jax.nn xla"),
        ("tree_attention", 8, "xla"),
        ("tree_attention", 8, "jax.nn xla"),
        ("cache_scores dot", 1, "xla"),
        ("cache_scores softmax", 1, "xla"),
    }
    for row in document["rows"]:
        assert 0 < row["us"]["min"] <= row["us"]["median"]
        assert row["gb_per_s"] > 0 and row["share_of_copy"] > 0
    assert document["bars"] == []  # they are asked of the kernels alone


@pytest.mark.slow
def test_tuning_runs_interpreted(tmp_path):
    document = run("kernels", tmp_path, "--tune")
    assert [row["op"] for row in document["rows"]] == ["tree_attention", "cache_scores"]
    table = json.loads((tmp_path / document["file"]).read_text())
    assert set(table) == {"tree_attention", "cache_scores"}
    for row in document["rows"]:
        assert not row["failed"] and len(row["tried"]) >= 2
        assert row["kept"] == (row["ratio"] <= 1 - tuning.LEAST_GAIN)
        assert table[row["op"]].get(row["key"]) == (row["best"] if row["kept"] else None)


def test_a_step_runs_on_a_cpu(tmp_path):
    document = run("step", tmp_path)
    assert json.loads((tmp_path / "step-llama3.1-8b.json").read_text()) == document
    names = {(row["context"], row["pass"], row["rows"]) for row in document["rows"]}
    assert names == {
        (context, *name)
        for context in (128, 256)
        for name in (
            ("plain", 1), ("draft", 1), ("tokenswift", 16), ("verify", 1), ("verify", 8),
        )
    }  # fmt: skip
    for row in document["rows"]:
        assert row["ms"]["min"] > 0 and row["bound_ms"] > 0 and row["over_plain"] > 0
    assert len(document["bars"]) == 2  # the plain steps; no pass has 64 rows


def test_speedups_are_measured_on_a_cpu(tmp_path):
    """Where torch is installed, over torch and the bound as well."""
    torch = importlib.util.find_spec("torch") is not None
    text = tmp_path / "one.txt"
    text.write_text("a thin man " * 200)
    hf_fixtures.make(tmp_path / "hf", vocab_size=len(helpers.TOKENS), max_position_embeddings=512)
    arguments = ["--model", helpers.save_tokenizer(tmp_path / "hf")]
    arguments += ["--text", str(text), "--out", str(tmp_path), "--settings", "greedy"]
    arguments += [
        "--contexts",
        "64",
        "--tokens",
        "40",
        "--rounds",
        "1",
        "--threads",
        str(int(torch)),
    ]
    done = program("speedup", *arguments, "--random", "--long", "300")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "speedup.json").read_text())
    assert document["complete"] and not document["left_out"]
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    assert document["text"] == {"name": "one.txt", "sha256": digest}
    rows = {(row["text"], row["method"]): row for row in document["rows"]}
    ours = ["plain", "paper", "auto", "text", "passes", "ngrams"]
    names = [("one.txt", name) for name in (*ours, *(["torch", "torch lookup"] if torch else []))]
    assert list(rows) == [*names, ("random", "plain"), ("random", "auto")]
    for (_, name), row in rows.items():
        assert (row["context"], row["setting"]) == (64, "greedy")
        assert row["ms_per_token"]["median"] > 0 and row["tokens_per_step"] >= 1
        assert row["same_tokens"] if name in ours else "same_tokens" not in row
        assert ("bound" in row) == (torch and name == "plain")
    plain, auto, text_alone = (rows["one.txt", name] for name in ("plain", "auto", "text"))
    if torch:
        inverse = 1 / rows["one.txt", "torch"]["speedup_over_plain"]["median"]
        assert plain["speedup_over_torch"]["median"] == pytest.approx(inverse)
    assert auto["best_fixed"] in {*ours} - {"auto"} and auto["speedup_over_best_fixed"]["min"] > 0
    assert text_alone["options"]["method"] == "LikelyTree"
    assert (tmp_path / "speedup.png").stat().st_size > 0

    long = document["long"]
    assert [row["method"] for row in long["rows"]] == ["plain", "auto"]
    for row in long["rows"]:
        found = row["by_position"]
        assert found["position"] == [300] and row["same_tokens"]
        assert found["ms_per_token"] == pytest.approx([row["ms_per_token"]["median"]])
        assert found["tokens_per_step"] == pytest.approx([row["tokens_per_step"]])


def test_slow_methods_say_fewer_tokens(monkeypatch):
    """All runs go on from copies of one state; each has a length of its own."""
    monkeypatch.setattr(speedup, "SLOW_TOKENS", 4)
    methods = {"plain": tsjax.Autoregressive(), "ngrams": tsjax.NGram()}
    ours = speedup.runs_of(helpers.tiny_model(), np.arange(1, 20), "greedy", methods, 9)
    said = {name: ours.run(name)["tokens"].tolist() for name in ("plain", "ngrams", "plain")}
    assert len(said["plain"]) == 9 and said["ngrams"] == said["plain"][:4]


def test_a_run_s_speed_is_told_by_output_position():
    chunks = [(0, 0, 0.0), (1024, 512, 1.0), (3072, 2560, 5.0), (3100, 2588, 5.028)]
    found = times_by_position([chunks])
    assert found["position"] == [1024, 2048, 3072, 3100]
    assert found["ms_per_token"] == pytest.approx([1e3 / 1024, 2e3 / 1024, 2e3 / 1024, 1])
    assert found["tokens_per_step"] == pytest.approx([2, 1, 1, 1])


def test_int8_drafts_are_held_against_the_model_s(tmp_path, monkeypatch):
    helpers.save_tokenizer(tmp_path)
    vocabulary = len(helpers.TOKENS)
    model = helpers.tiny_model(num_layers=1, vocab_size=vocabulary, path=str(tmp_path))
    tsjax.save(model, tmp_path / "model")
    (tmp_path / "book.txt").write_text("the tea in the tin and the rain " * 8)
    one = tsjax.TokenSwift(tree=(1,), draft_budget=8, num_sinks=1, num_ngrams=0, suffix_length=0)
    monkeypatch.setattr(draft_weights, "methods", lambda budget: {"one pass": one})
    draft_weights.main(
        ["--model", str(tmp_path / "model"), "--books", str(tmp_path), "--out", str(tmp_path)]
        + ["--prompt-tokens", "16", "--new-tokens", "12", "--skip", "0"]
    )
    rows = json.loads((tmp_path / "draft_weights.json").read_text())["rows"]
    for cells in rows["one pass"].values():
        assert {*cells} == {"model", "int8"}
        for found in cells.values():
            assert sum(found["accepted_lengths"]) > 0 and found["tokens_per_step"] >= 1


def test_methods_are_held_against_plain_decoding(tmp_path, monkeypatch, capsys):
    tsjax.save(helpers.tiny_model(num_layers=1), tmp_path / "model")
    monkeypatch.setattr(equality, "METHODS", {"ngram": tsjax.NGram()})
    argv = ["--model", str(tmp_path / "model"), "--length", "12", "--out", str(tmp_path)]
    document = tmp_path / "equality-float32.json"
    equality.main([*argv, "--batch", "2", "--tokens", "24"])
    first = json.loads(document.read_text())
    assert (first["rounds"], first["tokens"], first["parted"]) == (1, 24, [])
    assert len(first["tokens_per_step"]["ngram"]) == 1

    # Goes on with the second round; a token that differs is told with its place.
    generate = tsjax.generate

    def wrong(model, prompts, *, method, **asked):
        result = generate(model, prompts, method=method, **asked)
        if method != "autoregressive":
            result.tokens[1][5] += 1
        return result

    monkeypatch.setattr(tsjax, "generate", wrong)
    equality.main([*argv, "--batch", "2", "--tokens", "48"])
    second = json.loads(document.read_text())
    (parted,) = second["parted"]
    assert (second["rounds"], second["tokens"]) == (2, 48)
    assert (parted["round"], parted["row"], parted["after"]) == (1, 1, 5)
    assert parted["token"] == parted["plain"] + 1
    with pytest.raises(SystemExit, match="of another run"):
        equality.main([*argv, "--batch", "3", "--tokens", "48"])


def test_lazy_prefills_are_measured_on_a_cpu(tmp_path, monkeypatch, capsys):
    scaled = ttft.scaled_model(4, 64, "bfloat16").cfg
    monkeypatch.setattr(ttft, "SCHEDULES", {"halves": ttft.SCHEDULES["halves"]})
    monkeypatch.setattr(ttft, "AUTO", 1.9)
    monkeypatch.setattr(tsjax, "model_preset", {"scaled": scaled}.__getitem__)
    argv = ["--model", "scaled", "--prompts", "96", "--new", "4", "--rounds", "1"]
    argv += ["--generate", "halves"]
    ttft.main([*argv, "--schedules", "halves", ttft.AUTO_NAME, "--out", str(tmp_path)])
    document = json.loads((tmp_path / "ttft.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document
    cfg = dataclasses.replace(scaled, dtype="float32")
    assert document["model"] == json.loads(json.dumps(cfg.to_dict()))
    full, *lazy = document["rows"]
    assert (full["schedule"], "speedup" in full) == ("full", False)
    assert [row["schedule"] for row in lazy] == ["halves", ttft.AUTO_NAME]
    for row in lazy:
        seconds = [one["first_token_seconds"]["median"] for one in (full, row)]
        assert row["speedup"]["median"] == pytest.approx(seconds[0] / seconds[1])
        assert row["predicted"] > 1
    ((name, case),) = [(case["schedule"], case["runs"]) for case in document["generations"]]
    ways = {"full", "in batches", "paper's rule", "paper's rule, every 8", "never", "everything"}
    assert name == "halves" and set(case) == ways
    assert case["everything"]["computed"] == [1.0] * 4
    assert case["never"]["computed"] == pytest.approx([1.0, 0.5, 0.25, 0.125])


def test_no_case_begins_when_no_time_is_left(tmp_path):
    document = run("kernels", tmp_path, "--minutes", "0", complete=False)
    assert not document["rows"]
    assert len(document["left_out"]) == 4  # one of each operation


def test_the_bytes_of_a_kernel():
    gqa = cases.Case("tree_attention", "GQA", 1024, 8)
    assert gqa.read_bytes == 2 * 8 * 1024 * 128 * 2
    assert cases.Case("decode_attention", "MHA", 1024).read_bytes == 4 * gqa.read_bytes
    assert cases.Case("cache_scores dot", "GQA", 1024).read_bytes * 2 == gqa.read_bytes


def test_the_bytes_of_a_step():
    sizes = dict(weights=1000, heads=7, per_token=10, budget=64)
    assert step.read_bytes("plain", context=128, **sizes) == 1000 + 1280
    assert step.read_bytes("verify", context=128, **sizes) == 1000 + 1280
    assert step.read_bytes("draft", context=128, **sizes) == 1000 + 640
    assert step.read_bytes("draft", context=32, **sizes) == 1000 + 320
    assert step.read_bytes("tokenswift", context=128, **sizes) == 2280 + 1640 + 7


def test_every_case_once_and_the_important_first():
    found = cases.cases()
    assert len(found) == len(set(found)) == 8 * (1 + 5 + 2)  # S and heads; decode, trees, scores
    long = [case.S >= 32_768 for case in found]
    assert long == sorted(long, reverse=True)
    assert {case.heads for case in found[: len(found) // 4]} == {"GQA"}
    for case in found:
        names = measuring.implementations(case, is_gpu=True)
        assert names[:2] == ["triton", "xla"]
        assert ("torch sdpa" in names) == case.is_attention


def test_caches_take_turns_beyond_the_l2_cache():
    for nbytes in (2**23, 2**28, 2**31):
        copies = programs.copies_needed(nbytes, is_gpu=True)
        assert copies == 1 or (copies - 1) * nbytes < 4 * programs.L2_BYTES
        assert copies * nbytes >= min(nbytes, 4 * programs.L2_BYTES)
        unrolled = programs.rounds_of_caches(copies, "triton", is_gpu=True)
        assert copies * unrolled >= programs.TURN_CALLS


@pytest.mark.parametrize("name", tree_specs.SPECS)
def test_tree_candidates_are_valid(name):
    spec = tree_specs.SPECS[name]
    case = tuning.TuneCase("tree_attention", spec.key(), spec)
    found = case.candidates()
    assert found[0] == case.default()
    assert 8 <= len(found) == len(set(found)) <= 13
    for blocks in found:
        assert isinstance(blocks, tree_triton.Blocks)
        assert blocks.rows in (16, 32, 64, 128) and blocks.slots in (32, 64, 128)
        assert 1 <= blocks.parts <= tree_triton.MOST_PARTS
        assert blocks.warps in (4, 8) and blocks.stages in (2, 3)


@pytest.mark.parametrize("name", scores_specs.SPECS)
def test_scores_candidates_are_valid(name):
    spec = scores_specs.SPECS[name]
    case = tuning.TuneCase("cache_scores", spec.key(), spec)
    found = case.candidates()
    assert found[0] == case.default()
    assert 8 <= len(found) == len(set(found)) <= 12
    for blocks in found:
        assert isinstance(blocks, scores_triton.Blocks)
        assert blocks.slots in (32, 64, 128, 256) and 1 <= blocks.parts <= 128
        assert blocks.warps in (4, 8) and blocks.stages in (2, 3)


def test_every_key_is_tuned_once():
    found = [(case.op, case.key) for case in tuning.tune_cases(quick=False)]
    assert len(found) == len(set(found))
    keys = {("tree_attention", spec.key()) for spec in tree_specs.SPECS.values()}
    keys |= {("cache_scores", spec.key()) for spec in scores_specs.SPECS.values()}
    assert set(found) == keys


def test_the_best_of_each_field_combined():
    default = scores_triton.Blocks(slots=64, parts=8, warps=4, stages=2)
    ratios = {
        default: 1.0,
        default._replace(slots=128): 0.9,
        default._replace(slots=32): 0.95,
        default._replace(parts=16): 0.99,  # too little
        default._replace(stages=3): 0.8,
    }
    assert tuning.combined(default, ratios) == default._replace(slots=128, stages=3)
    assert tuning.combined(default, {default: 1.0}) == default


def test_bars_of_the_kernels():
    def row(op, T, us, share, **changes):
        row = dict(op=op, heads="GQA", S=32_768, T=T, G=4, implementation="triton")
        return {**row, "us": {"median": us}, "share_of_copy": share, **changes}

    found = measuring.bars(
        [
            row("decode_attention", 1, 30.0, 0.9),
            row("decode_attention", 1, 10.0, 0.9, S=4096),
            row("decode_attention", 1, 10.0, 0.9, implementation="xla"),
            row("tree_attention", 16, 40.0, 0.8),
            row("tree_attention", 64, 45.0, 0.6),
            row("tree_attention", 32, 0.0, 0.6) | {"error": "no"},
        ]
    )
    assert [(round(bar["value"], 3), bar["met"]) for bar in found] == [
        (0.9, True), (0.8, False), (1.5, False),
    ]  # fmt: skip


def test_a_budget_ends():
    now = [100.0]
    budget = report.Budget(2, clock=lambda: now[0], began=90.0)
    assert budget.used == 10 and budget.left == 110 and not budget.is_used_up
    now[0] = 300.0
    assert budget.left == 0 and budget.is_used_up


def test_tasks_side_by_side():
    def fail():
        raise ValueError("first\nsecond")

    found = report.attempt_all({"good": lambda: 1, "bad": fail}, workers=2)
    assert found["good"] == 1
    assert report.first_line(found["bad"]) == "ValueError: first"


def test_a_document_is_written_whole(tmp_path):
    for value in (1, 2):
        report.save({"value": value}, tmp_path / "new", "name")
    assert json.loads((tmp_path / "new" / "name.json").read_text()) == {"value": 2}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["name.json"]
    assert report.save({}, None, "name") is None


def test_bandwidth_by_name():
    assert report.nominal_bandwidth("NVIDIA H200") == 4.8e12
    assert report.nominal_bandwidth("NVIDIA A100-SXM4-80GB") == 2.04e12
    assert report.nominal_bandwidth("cpu") is None


def test_contexts_that_do_not_fit():
    model = tsjax.model_preset("llama3.1-8b")
    assert step.fitting([4096, 106_496], model, 100e9) == ([4096, 106_496], [])
    assert step.fitting([106_496, 4096], model, 20e9) == ([4096], [106_496])
    assert step.fitting([4096], model, None) == ([4096], [])


def test_when_a_command_has_begun():
    assert not first_token.has_begun("generate", b"") and first_token.has_begun("generate", b",")
    before = b"tsjax/small-english: 5,477,120 parameters, on cpu\nCompiling both methods ..."
    assert not first_token.has_begun("demo", before)
    assert first_token.has_begun("demo", before + b" 12 s\n")


def test_bars_of_the_first_token():
    rows = [
        {"command": "plain", "kept": "nothing", "seconds": 20.0},
        {"command": "plain", "kept": "all but programs", "seconds": 8.1},
        {"command": "plain", "kept": "all", "seconds": 3.0},
    ]
    assert [bar["met"] for bar in first_token.bars(rows)] == [True, False, True]
    assert [bar["bar"] for bar in first_token.bars(rows)] == [20.0, 8.0, 3.0]


def test_a_command_that_fails_is_told(tmp_path):
    with pytest.raises(RuntimeError, match="there is no such folder"):
        first_token.run(["generate", str(tmp_path / "none"), "Once"], "")


def test_long_runs_are_told_by_position(tmp_path, capsys, monkeypatch):
    tsjax.save(helpers.tiny_model(num_layers=1, vocab_size=len(helpers.TOKENS)), tmp_path / "model")
    helpers.save_tokenizer(tmp_path / "model")
    monkeypatch.setattr(longrun, "PROMPT", "the tea")
    argv = ["--model", str(tmp_path / "model"), "--tokens", "100", "--out", str(tmp_path)]
    argv += ["--settings", "greedy", "--methods", "plain", "ngram"]
    assert longrun.main(argv) is None
    document = json.loads((tmp_path / "longrun.json").read_text())
    (group,) = document["groups"]
    assert group["complete"] and group["group"] == ["greedy", "plain", "ngram"]
    assert group["facts"]["command"] == document["command"] and group["facts"]["device"]
    assert group["marks"] == [20, 40, 60, 80, 100] and len(group["text"]) == 5
    plain, ngram = (group["methods"][name] for name in ("plain", "ngram"))
    assert plain["speedup"] == [1.0] * 5 and plain["tokens_per_step"] == [1.0] * 5
    assert ngram["same_tokens"] and sum(ngram["accepted_lengths"]) <= 100
    for mine, theirs, gain in zip(
        plain["ms_per_token"], ngram["ms_per_token"], ngram["speedup"], strict=True
    ):
        assert gain == pytest.approx(mine / theirs)

    # What is there is not run again; another series is refused.
    monkeypatch.setattr(longrun, "side_by_side", None)
    assert longrun.main(argv) is None
    assert "there already: greedy, plain, ngram" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="its tokens is 100, not 50"):
        longrun.main([*argv, "--tokens", "50"])


def test_the_method_that_has_said_least_goes_on():
    """So each part of a text is timed on all of them at about the same time."""

    class Runs:
        requests = dict.fromkeys(("plain", "other"))

        def chunks(self, name):
            text = np.arange(10)
            for count in range(1 if name == "plain" else 3, 11, 1 if name == "plain" else 3):
                went.append(name)
                yield {
                    "tokens": text[:count], "made": [(0, 0, 0.0), (count, count, 1.0 * count)],
                    "stats": SimpleNamespace(
                        accepted_lengths=(0,), accepted_by_source={}, alpha=0.0, draft_positions=0
                    ),
                    "gave_up": False,
                }  # fmt: skip
            yield {**last, "tokens": text}

        def begins_with(self, name):
            return {}

    went: list[str] = []
    last = {
        "made": [(0, 0, 0.0), (10, 10, 10.0)], "gave_up": False,
        "stats": SimpleNamespace(
            accepted_lengths=(0,), accepted_by_source={}, alpha=0.0, draft_positions=0
        ),
    }  # fmt: skip
    found = list(longrun.side_by_side(Runs(), 10))
    assert [one["complete"] for one in found] == [False] * 4 + [True]
    assert went[:8] == ["plain", "other", "plain", "plain", "plain", "other", "plain", "plain"]

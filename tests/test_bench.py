# SPDX-License-Identifier: Apache-2.0
"""tsjax bench on tiny models: what it measures, writes and refuses, and what a Ctrl-C leaves."""

import importlib.util
import itertools
import json
import os
import re
import signal

import helpers
import hf_fixtures
import jax.numpy as jnp
import numpy as np
import pytest

import tsjax
from tsjax.__main__ import main
from tsjax.host.device_programs import programs_of
from tsjax.host.progress import TimeLeft, in_words
from tsjax.measure import bandwidth, bench_question, peers
from tsjax.measure import bench as bench_module
from tsjax.measure.paired_runs import Runs
from tsjax.methods.devices import plain_bytes

QUICK = ["--lengths", "16", "--new-tokens", "24", "--rounds", "1", "--settings", "greedy"]
TWO = ["--methods", "plain", "ngram"]
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny HuggingFace folder with a tokenizer."""
    path = tmp_path_factory.mktemp("bench") / "hf"
    hf_fixtures.make(path, vocab_size=len(helpers.TOKENS), max_position_embeddings=512)
    return str(helpers.save_tokenizer(path))


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> str:
    """A tsjax checkpoint without a tokenizer."""
    path = tmp_path_factory.mktemp("bench") / "own"
    tsjax.save(helpers.tiny_model(num_layers=1), path)
    return str(path)


def run(capsys, *argv: str, code: int = 0) -> tuple[dict, list[str], str]:
    """The document, the lines before it, and stderr."""
    assert main(["bench", *argv]) == code
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    return json.loads(last), lines, err


# --- what it measures -------------------------------------------------------------------------


@pytest.mark.wide
def test_rivals_side_by_side(own, tmp_path, capsys):
    """All say what plain decoding says; methods without use for a second model run without."""
    tsjax.save(helpers.tiny_model(num_layers=1, embed_dim=16, seed=4), tmp_path / "small")
    rivals = ["magicdec", "draft_model", "triforce"]
    argv = [own, "--methods", "plain", *rivals, "--draft-model", str(tmp_path / "small")]
    found, _, _ = run(capsys, *argv, *QUICK, "--no-peers")
    assert [row["method"] for row in found["rows"]] == ["plain", *rivals]
    assert all(row["same_tokens"] for row in found["rows"])
    assert found["draft_model"] == str(tmp_path / "small")


def test_cells_of_a_tiny_model(folder, capsys):
    argv = [folder, *TWO, "--lengths", "16", "--new-tokens", "24", "--rounds", "2"]
    more = ["--no-peers", "--dtype", "float32", "--cache", "int8"]
    found, lines, err = run(capsys, *argv, *more)
    assert (found["dtype"], found["weights"], found["cache"]) == ("float32", None, "int8")
    assert found["complete"] and not found["left_out"] and not found["simulated"]
    assert found["command"] == "tsjax bench " + " ".join([*argv, *more])
    assert {"device", "cpus", "versions", "date"} <= set(found)
    cells = [(row["setting"], row["method"]) for row in found["rows"]]
    assert cells == [(s, m) for s in ("sampled", "greedy") for m in ("plain", "ngram")]
    assert len(lines) == len(cells)
    for (setting, method), row, line in zip(cells, found["rows"], lines, strict=True):
        assert line.split()[:3] == ["16", setting, method] and row["context"] == 16
        for name in ("ms_per_token", "bound_ms", "share_of_bound"):
            one = row[name]
            assert 0 < one["min"] <= one["median"] <= one["max"]
        assert row["rounds"] == 2 and row["same_tokens"] and row["parted_at"] is None
        assert row["tokens_per_step"] >= 1 and row["peak_bytes"] > 0
        assert row["prefill_seconds"] > 0 and row["compile_seconds"] >= 0
        assert sum(row["accepted_lengths"]) > 0  # steps
        assert ("speedup_over_plain" in row) == (method == "ngram")
        assert "by_position" not in row  # a short run
        model = tsjax.load(folder, dtype="float32", cache="int8")
        assert row["bound_bytes"] == plain_bytes(model.cfg, 16 + 12)
    assert "[18 of 18 runs, the end: 16 tokens, greedy done]" in err  # 2 cells, 3 calls, 3 rounds
    assert re.search(r"\[9 of 18 runs, about \d+ s left: 16 tokens, sampled done\]", err)


def test_prompts_are_the_beginning_of_a_text(folder, capsys, monkeypatch, tmp_path):
    prompts = []

    class Seen(Runs):
        def __init__(self, model, prompt, *rest):
            prompts.append((model, prompt))
            super().__init__(model, prompt, *rest)

    monkeypatch.setattr(bench_module, "Runs", Seen)
    text = tmp_path / "one.txt"
    text.write_text("a thin man " * 40)
    argv = [folder, "--methods", "plain", *QUICK, "--no-peers", "--text", str(text)]
    found, _, err = run(capsys, *argv, "--warm-up", "0")
    assert found["warm_up"] == 0 and "[2 of 2 runs, the end" in err  # one, and a read of memory
    ((model, prompt),) = prompts
    assert prompt.tolist() == list(model.tokenizer.encode("a thin man " * 40))[:16]
    assert found["text"]["name"] == str(text) and len(found["text"]["sha256"]) == 64


def test_rows_are_methods_with_fields_and_say_what_a_run_of_the_library_says(own, capsys):
    """One method often; a comma in brackets parts nothing. Counts of one round are those of one
    run of `generate` after the same prompt."""
    rows = ["ngram", "ngram:num_ngrams=0,suffix_length=4", "ngram:pass_widths=(1,2),num_ngrams=1"]
    found, lines, _ = run(capsys, own, "--methods", "plain", *rows, *QUICK, "--no-peers")
    assert [row["method"] for row in found["rows"]] == ["plain", *rows]
    assert all(row["same_tokens"] for row in found["rows"])
    _, row, one, other = found["rows"]
    assert (one["options"]["num_ngrams"], one["options"]["suffix_length"]) == (0, 4)
    assert (other["options"]["num_ngrams"], other["options"]["pass_widths"]) == (1, [1, 2])
    assert all(row in line for row, line in zip(rows, lines[1:], strict=True))

    ids = np.random.default_rng(0).integers(helpers.VOCAB, size=16, dtype=np.int32)
    settings = dict(max_new_tokens=24, eos_token_id=())
    stats = tsjax.generate(tsjax.load(own), ids, method=tsjax.NGram(), **settings).stats
    assert row["tokens_per_step"] == pytest.approx(stats.tokens_per_step)
    assert row["accepted_lengths"] == list(stats.accepted_lengths)
    assert row["alpha"] == pytest.approx(stats.alpha)
    assert row["accepted_of_drafted"] == (stats.accepted / stats.drafted if stats.drafted else None)
    assert row["accepted_per_step"] == {
        source: count / sum(stats.steps) for source, count in stats.accepted_by_source.items()
    }


# --- tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_other_tokens_are_told(own, capsys, monkeypatch, dtype, code):
    """The sixth is another one: an error where rounding is no excuse."""
    honest = Runs.run

    def run_wrongly(self, name):
        found = honest(self, name)
        found["tokens"][5] += name == "ngram"
        return found

    monkeypatch.setattr(Runs, "run", run_wrongly)
    found, lines, err = run(capsys, own, *TWO, *QUICK, "--dtype", dtype, code=code)
    plain, ngram = found["rows"]
    assert plain["same_tokens"] and not ngram["same_tokens"]
    assert ngram["parted_at"] == 5 and "OTHER TOKENS from 5 on" in lines[-1]
    assert ("runs differ" in err) == bool(code)


# --- a signal ---------------------------------------------------------------------------------


def test_a_signal_leaves_what_was_measured(own, capsys, monkeypatch):
    """The warm-up goes backwards and takes 12 chunks; the signal comes in the second round, while
    the third of its chunks runs."""
    begun = itertools.count(1)

    class Stopping(Runs):
        def __init__(self, model, *others):
            def program(params, state, steps, at_least, *, cfg):
                if next(begun) == 12 + 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                return programs_of(model).decode(params, state, 2, cfg=cfg)

            super().__init__(model, *others[:4], {"ngram": program})

    monkeypatch.setattr(bench_module, "Runs", Stopping)
    argv = [own, *TWO, *QUICK, "--no-peers", "--settings", "greedy", "sampled"]
    found, lines, _ = run(capsys, *argv, code=143)
    assert not found["complete"]
    assert [(row["method"], row["rounds"]) for row in found["rows"]] == [("plain", 1)]
    assert len(lines) == 1
    stopped = found["interrupted"]
    assert stopped["method"] == "ngram" and 0 < stopped["tokens"] < 24
    assert stopped["ms_per_token"] > 0


def test_what_does_not_fit_is_left_out_and_an_error_leaves_what_was_measured(
    own, capsys, monkeypatch
):
    raised = [MemoryError("not enough memory: much of it"), RuntimeError("a bug")]

    class Large(Runs):
        def __init__(self, model, prompt, *rest):
            if len(prompt) > 8:
                raise raised[0]
            super().__init__(model, prompt, *rest)

    monkeypatch.setattr(bench_module, "Runs", Large)
    argv = [own, "--methods", "plain", *QUICK, "--lengths", "8", "16"]
    found, lines, err = run(capsys, *argv)
    assert found["complete"] and [row["context"] for row in found["rows"]] == [8]
    gone = [(one["context"], one["error"]) for one in found["left_out"] if one["method"] == "all"]
    assert gone == [(16, "not enough memory: much of it")]
    assert "left out: all, context=16" in lines[-1]
    assert "[4 of 8 runs, about 0 s left: 8 tokens, greedy done]" in err
    del raised[0]
    with pytest.raises(RuntimeError, match="a bug"):
        main(["bench", *argv])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not found["complete"] and [row["context"] for row in found["rows"]] == [8]


# --- peers ------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.parity
@pytest.mark.skipif(not HAS_TORCH, reason="there is no torch")
def test_transformers_runs_beside(folder, capsys, monkeypatch):
    new = ["--new-tokens", "80", "--peer-tokens", "32"]
    monkeypatch.setattr(bench_module, "EVERY", 30)
    argv = [folder, "--methods", "plain", *QUICK, *new, "--dtype", "float32"]
    found, lines, _ = run(capsys, *argv)
    assert not found["left_out"]
    assert [row["method"] for row in found["rows"]] == ["plain", "torch", "torch lookup"]
    plain, torch, _ = found["rows"]
    ratio = plain["ms_per_token"]["median"] / torch["ms_per_token"]["median"]
    assert torch["speedup_over_plain"]["median"] == pytest.approx(ratio)
    assert torch["tokens_per_step"] == 1 and "same_tokens" not in torch
    # The first token comes with the prompt.
    assert (plain["timed_tokens"], torch["timed_tokens"]) == (80, 31)
    assert torch["by_position"]["position"] == [31]
    (ms,) = torch["by_position"]["ms_per_token"]
    assert ms == pytest.approx(torch["ms_per_token"]["median"])


def test_peers_that_cannot_run_are_left_out_with_the_reason(own, folder, capsys, monkeypatch):
    found, lines, _ = run(capsys, own, "--methods", "plain", *QUICK)
    wanted = "no HuggingFace folder" if HAS_TORCH else "there is no torch"
    assert [gone["method"] for gone in found["left_out"]] == ["torch", "torch lookup"]
    assert all(wanted in gone["error"] for gone in found["left_out"])
    assert "left out: torch: " in lines[0] and wanted in lines[1]

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert "there is no torch" in str(peers.why_not(folder))


def test_a_peer_that_fails_is_left_out(folder, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("their own\ntrouble")

    monkeypatch.setattr(peers, "why_not", lambda folder: None)
    monkeypatch.setattr(peers, "Peer", lambda *_: object())
    monkeypatch.setattr(peers, "PeerRuns", fail)
    found, _, err = run(capsys, folder, "--methods", "plain", *QUICK)
    assert found["complete"] and [row["method"] for row in found["rows"]] == ["plain"]
    assert [gone["error"] for gone in found["left_out"]] == 2 * ["their own trouble"]
    assert "[4 of 4 runs, the end" in err  # plain and the bound, twice


# --- simulated acceptance ---------------------------------------------------------------------


@pytest.fixture
def presets(monkeypatch):
    cfg = helpers.tiny_config(num_layers=1, dtype="float32")
    monkeypatch.setattr(bench_question, "model_preset", {"shape": cfg}.__getitem__)
    monkeypatch.setattr(bench_question, "model_preset_names", lambda: ("shape",))
    swift = tsjax.TokenSwift.paper(draft_budget=32, num_sinks=2, num_ngrams=0, suffix_length=0)
    monkeypatch.setattr(bench_question, "preset_names", lambda: ("shape",))
    monkeypatch.setattr(
        bench_question, "preset", lambda name: tsjax.preset("llama3.1-8b")._replace(method=swift)
    )


@pytest.mark.wide
def test_accepted_lengths_are_replayed(capsys, presets, tmp_path):
    """Steps of 3, 1, 3, 1, ... accepted drafts: 24 tokens in 8 steps, whatever the model thinks."""
    trace = tmp_path / "trace.json"
    trace.write_text("[3, 1]")
    argv = ["shape", "--methods", "plain", "tokenswift", *QUICK]
    found, lines, _ = run(capsys, *argv, "--simulate-acceptance", str(trace))
    assert found["simulated"] and found["complete"]
    plain, swift = found["rows"]
    assert swift["tokens_per_step"] == swift["trace_tokens_per_step"] == 3
    assert swift["accepted_lengths"][:4] == [0, 4, 0, 4]
    assert plain["tokens_per_step"] == 1 and "trace_tokens_per_step" not in plain
    for row in found["rows"]:
        assert row["simulated"] and "same_tokens" not in row
    assert all("simulated acceptance" in line for line in lines[2:]) and len(lines) == 4
    assert all(line.startswith("left out: torch") and "random" in line for line in lines[:2])

    # What was measured is a trace too; there lengths come in an order that is drawn.
    measured = tmp_path / "bench.json"
    measured.write_text("\n".join([*lines, json.dumps(found)]))
    again, *_ = run(capsys, *argv, "--simulate-acceptance", str(measured))
    assert again["rows"][1]["trace_tokens_per_step"] == 3
    assert sum(again["rows"][1]["accepted_lengths"]) in (7, 8, 9)


# --- what is wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--methods", "plain", "eagle"], ["--methods='eagle'", "'plain', 'autoregressive'"]),
        (["--methods", "ngram"], ["--methods='ngram'", "with plain among them"]),
        (["--methods", "plain", "plain"], ["--methods='plain plain'", "each once"]),
        (["--methods", "plain", "ngram:no=1"], ["unknown option of NGram 'no'", "num_ngrams"]),
        (["--methods", "plain", "ngram:num_ngrams=x"], ["num_ngrams='x'", "an integer"]),
        (["--methods", "plain", "ngram:"], ["--methods ''", "NAME=VALUE"]),
        (["--methods", "plain", "plain:a=1"], ["--methods ['a=1']", "Autoregressive has none"]),
        (["--chat"], ["--chat=True", "with --prompts FILE"]),
        (["--prompts", "no.txt"], ["no.txt", "no such file"]),
        (["--out", "no/out.json"], ["--out='no/out.json'", "folder"]),
        (["--methods", "plain", "draft_model"], ["--methods='draft_model'", "--draft-model PATH"]),
        (["--draft-model", "x"], ["--draft-model='x'", "draft_model or triforce"]),
        (["--lengths", "0"], ["--lengths=0", "an integer, at least 1"]),
        (["--warm-up", "-1"], ["--warm-up=-1", "at least 0"]),
        (["--peer-tokens", "31"], ["--peer-tokens=31", "at least 32"]),
        (["--settings", "wild"], ["--settings='wild'", "'sampled', 'greedy', 'chat'"]),
        (["--plot", "times.txt"], ["--plot='times.txt'", ".png or .svg or .pdf"]),
        (["--text", "no.txt"], ["no.txt", "No such file"]),
        (["--text", "SHORT"], ["--text=", "at least the 600 tokens of --lengths; it has "]),
        (["--simulate-acceptance", "no.json"], ["model=", "name of a preset", "llama3.1-8b"]),
    ],
)
def test_wrong_questions(argv, words, folder, capsys, monkeypatch, tmp_path):
    def computes(*_):
        pytest.fail("it computes")

    monkeypatch.setattr(bench_module, "generate", computes)
    monkeypatch.setattr(bench_module, "Runs", computes)
    monkeypatch.setattr(bench_question, "random_params", computes)
    if "SHORT" in argv:
        (tmp_path / "short.txt").write_text("a thin man")
        argv = ["--text", str(tmp_path / "short.txt"), "--lengths", "600"]
    assert main(["bench", folder, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and all(word in err for word in words), err


@pytest.mark.parametrize("content", ["[1, -1]", "[]", "nothing", '{"rows": [{"method": "auto"}]}'])
def test_wrong_traces(content, capsys, presets, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_question, "random_params", lambda cfg: pytest.fail("it computes"))
    trace = tmp_path / "trace.json"
    trace.write_text(content)
    argv = ["shape", "--methods", "plain", "tokenswift", "--simulate-acceptance", str(trace)]
    assert main(["bench", *argv]) == 2
    assert "--simulate-acceptance=" in capsys.readouterr().err


def test_a_shape_has_to_fit(capsys, presets, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_question, "random_params", lambda cfg: pytest.fail("it computes"))
    (tmp_path / "trace.json").write_text("[1]")
    trace = ["--simulate-acceptance", str(tmp_path / "trace.json")]
    monkeypatch.setattr(bench_question, "available_bytes", lambda device: 1000)
    assert main(["bench", "shape", "--methods", "plain", *trace]) == 2
    assert "not enough memory: the weights of shape in float32 are" in capsys.readouterr().err


# --- time and memory --------------------------------------------------------------------------


def test_time_left():
    left = TimeLeft([("a", 1), ("a", 1), ("a", 2), ("b", 1), ("b", 2)])
    assert (left.total, left.made, left.seconds) == (5, 0, 0)  # nothing is known
    left.add(("a", 1), 8.0)
    assert left.seconds == 4 * 8.0  # all that is known
    left.add(("a", 1), 2.0)
    assert left.seconds == 3 * 2.0  # the first time it compiled
    left.add(("b", 1), 10.0)
    assert left.seconds == 2.0 + 10.0  # each kind as in the other place
    left.drop(("b", 2))
    assert (left.total, left.made, left.seconds) == (4, 3, 2.0)
    assert [in_words(x) for x in (0.4, 89, 300, 7200)] == ["0 s", "89 s", "5 min", "2.0 h"]


def test_runs_have_all_their_tokens_and_plain_s_prompt():
    """A stop token ends nothing here."""
    model = helpers.chain_model(helpers.chain(1, 2, 3, 1), stop_ids=(2,))
    methods = {"plain": tsjax.methods.Autoregressive(), "ngram": tsjax.NGram()}
    runs = Runs(model, jnp.asarray([1]), {}, methods, {"plain": 12, "ngram": 6})
    assert runs.run("plain")["tokens"].tolist() == 4 * [2, 3, 1]
    found = runs.run("ngram")
    assert found["tokens"].tolist() == 2 * [2, 3, 1]
    assert found["made"][-1][0] == 6 and found["stats"].new_tokens == (6,)
    assert runs.run("plain")["tokens"].tolist() == 4 * [2, 3, 1]  # the state is read once


def test_a_copy_counts_what_it_reads_and_writes():
    """Of the best round, by a clock that says when each begins and ends."""
    seconds = [5.0] * (bandwidth.COPY_ROUNDS - 1) + [2.0]
    ticks = itertools.accumulate(itertools.chain(*((1.0, one) for one in seconds)))
    rate = bandwidth.copier(4096, lambda: next(ticks))()
    assert rate == 2 * 4096 * bandwidth.COPIES / 2.0

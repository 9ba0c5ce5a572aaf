# SPDX-License-Identifier: Apache-2.0
"""tsjax roofline: bytes and times against numbers counted by hand, and the command."""

import json

import hf_fixtures
import numpy as np
import pytest

import tsjax
from tsjax.__main__ import main
from tsjax.decoding.held import held_by_text, int8_copy_bytes
from tsjax.files.checkpoint import read_config
from tsjax.measure import roofline_table
from tsjax.methods.devices import CPU, GPUS, estimated
from tsjax.methods.likely_tree import LikelyTree
from tsjax.methods.roofline import Span, expected, has_room, ideal_speedup, reads, step_reads


def promise_of(method, model, context: float = 9000):
    promise = method.promise(model, estimated(model, GPUS["a100"], 1), context)
    assert promise is not None
    return promise


A100 = 2.04e12  # bytes per second
# As the models are published: layers, width, query heads, kv heads, head size, MLP, vocabulary, and
# whether the embedding is the unembedding too.
SHAPES = {
    "llama3.1-8b": (32, 4096, 32, 8, 128, 14_336, 128_256, False),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 128, 8960, 151_936, True),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 18_944, 152_064, False),
    "qwen2.5-14b": (48, 5120, 40, 8, 128, 13_824, 152_064, False),
}
# Of an A100 after 4,096 tokens for 102,400 more, by all parameters and the cache: milliseconds per
# token, minutes. To the last digit that is written, as they were published by others than us.
PUBLISHED = {
    "llama3.1-8b": (11.4, 19.5),
    "qwen2.5-1.5b": (2.3, 3.9),
    "qwen2.5-7b": (9.0, 15.4),
    "qwen2.5-14b": (19.8, 33.8),
}


def counted(name: str, context: float) -> tuple[float, float, float]:
    """Bytes in bfloat16 of the parameters that a step multiplies by, of the cache, of the table."""
    layers, width, heads, kv_heads, size, mlp, vocabulary, tied = SHAPES[name]
    of_layer = width * size * (2 * heads + 2 * kv_heads) + 3 * width * mlp  # q, o, k, v; the MLP
    weights = layers * of_layer + width * vocabulary
    cache = context * layers * 2 * kv_heads * size
    return 2 * weights, 2 * cache, 0 if tied else 2 * width * vocabulary


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_bounds(name):
    """Half of the last digit: 0.05 ms per token and 0.05 minutes."""
    span, device = Span(4096, 102_400), GPUS["a100"]
    step = reads(tsjax.model_preset(name), span.mean_context)
    seconds = step.whole / device.bytes_per_second
    ms, minutes = PUBLISHED[name]
    assert 1e3 * seconds == pytest.approx(ms, abs=0.05)
    assert seconds * span.new / 60 == pytest.approx(minutes, abs=0.05)
    # The mean over the run's steps, counted one by one.
    contexts = span.prompt + np.arange(span.new) + 0.5
    weights, _, table = counted(name, 0)
    caches = counted(name, 1)[1] * contexts
    assert seconds == pytest.approx((weights + table + caches).mean() / A100, rel=1e-9)
    # What has to be read is less by the table of embeddings, where there is one.
    assert step.least == pytest.approx(step.whole - table)
    # A batch has a cache for each row; a weight in int8 takes a byte.
    weights, cache, table = counted(name, 5000)
    model = tsjax.model_preset(name)
    assert reads(model, 5000, 7) == pytest.approx((weights, 7 * cache, table))
    assert reads(model, 5000, in_int8=True).weights == int8_copy_bytes(model) == weights / 2
    # What is held has norms and biases too.
    known = weights + cache + table
    assert known < held_by_text(model, 1, 5000) < 1.001 * known


@pytest.mark.parametrize(
    ("alpha", "speedups"), [(0.84, (2.34, 2.55, 2.81)), (0.60, (1.83, 1.99, 2.19))]
)
def test_the_published_ideal_speedups(alpha, speedups):
    """TokenSwift on Llama-3.1-8B at 25K, 55K and 106K tokens, to 0.01: (4 alpha + 1) plain steps
    over one that drafts on 4,096 slots and one that verifies."""
    model = tsjax.model_preset("llama3.1-8b").with_heads(3)
    method = tsjax.preset("llama3.1-8b").method
    assert promise_of(method, model).positions == 4
    for context, speedup in zip((25_000, 55_000, 106_000), speedups, strict=True):
        promise = promise_of(method, model, context)
        found = ideal_speedup(promise, model, context, 1 + 4 * alpha)
        assert found == pytest.approx(speedup, abs=0.01)
        plain, draft = (sum(counted("llama3.1-8b", n)) for n in (context, 4096))
        assert found == pytest.approx((1 + 4 * alpha) * plain / (draft + plain))


def test_a_step_reads_what_its_passes_read():
    model = tsjax.model_preset("llama3.1-8b").with_heads(3)
    weights, cache, table = counted("llama3.1-8b", 1)
    passes = tsjax.TokenSwift(tree=(1,) * 5, draft_passes=2, draft_budget=512)
    wide, narrow = 9000 * cache, 512 * cache
    assert step_reads(promise_of(passes, model), model, 9000) == pytest.approx(
        (3 * weights, wide + 2 * narrow, 3 * table)
    )
    in_int8 = tsjax.TokenSwift(draft_weights="int8", draft_budget=512)
    assert step_reads(promise_of(in_int8, model), model, 9000).weights == pytest.approx(
        1.5 * weights
    )
    for one_pass in (
        tsjax.methods.Autoregressive(),
        tsjax.NGram(),
        tsjax.TokenSwift(draft_from="verified_state"),
        LikelyTree(draft_passes=4),  # a step may leave them out
    ):
        assert step_reads(promise_of(one_pass, model), model, 9000) == reads(model, 9000)


def test_a_narrow_cache_takes_a_byte_for_a_number_and_partial_caches_do_not(capsys):
    argv = ["llama3.1-8b", "--device", "a100", "--prompt", "8000", "--new", "2000", "--json"]
    found = json.loads(said(capsys, *argv, "--weights", "int8", "--cache", "int8"))
    weights, cache, table = counted("llama3.1-8b", 9000)
    weights, narrow = weights * 8.5 / 16, cache / 2 * 129 / 128  # with each row's exponent
    assert found["step_bytes"] == pytest.approx(
        {"weights": weights, "cache": narrow, "embedding": table}
    )
    assert found["bounds"]["step_seconds"] == pytest.approx((weights + narrow) / A100)
    model = tsjax.model_preset("llama3.1-8b").with_heads(3).with_cache("int8")
    method, of_slots = tsjax.TokenSwift(draft_budget=512), counted("llama3.1-8b", 512)[1]
    assert step_reads(promise_of(method, model), model, 9000).cache == pytest.approx(
        narrow + of_slots
    )
    assert "No GPU has run" in said(capsys, *argv[:-1], "--cache", "int8")


def test_expected_times_are_means_over_the_run():
    model, device = tsjax.model_preset("llama3.1-8b").with_heads(3), GPUS["h100"]
    costs, span, method = estimated(model, device, 1), Span(1000, 32_000), tsjax.TokenSwift()
    found = expected(method, model, costs, device, span)
    fine = [method.promise(model, costs, 1000.5 + n) for n in range(0, 32_000, 50)]
    per_token = np.mean([promise.seconds_per_token for promise in fine])
    assert found.seconds == pytest.approx(per_token, rel=0.01)
    assert found.least < found.seconds
    # With other drafts: the same steps, more tokens.
    more = expected(method, model, costs, device, span, 2 * found.tokens_per_step)
    assert more.seconds == pytest.approx(found.seconds / 2, rel=1e-6)
    plain = expected(tsjax.methods.Autoregressive(), model, costs, device, span)
    assert plain.tokens_per_step == 1
    assert plain.least == pytest.approx(sum(counted("llama3.1-8b", 17_000)[:2]) / 3.35e12)
    assert has_room(model, device, 40_000) and not has_room(model, GPUS["rtx 4090"], 131_072)


# --- the command ------------------------------------------------------------------------------


def said(capsys, *argv: str) -> str:
    assert main(["roofline", *argv]) == 0
    return capsys.readouterr().out


def test_the_document(capsys):
    argv = ["qwen2.5-7b", "--device", "a100", "--prompt", "1000", "--new", "8000", "--batch", "3"]
    found = json.loads(said(capsys, *argv, "--dtype", "float32", "--json"))
    weights, cache, table = (2 * x for x in counted("qwen2.5-7b", 5000))
    assert found["step_bytes"] == pytest.approx(
        {"weights": weights, "cache": 3 * cache, "embedding": table}
    )
    assert (found["mean_context"], found["batch"], found["fits"]) == (5000, 3, True)
    bounds = found["bounds"]
    assert bounds["step_seconds"] == pytest.approx((weights + 3 * cache) / A100)
    assert bounds["run_seconds"] == pytest.approx(8000 * bounds["step_seconds"])
    names = ["plain", "ngram", "tokenswift", "auto"]
    assert list(found["estimates"]) == names
    for row in found["estimates"].values():
        assert row["bound_seconds_per_token"] < row["seconds_per_token"]
    out = said(capsys, "llama3.1-8b", "--device", "rtx-4090")
    assert "No room: weights and cache are 29" in out and "the device has 24.00 GB" in out
    assert "(bounds)" in out and "estimates by the cost model" in out


def test_acceptance_is_given_for_all_or_one_or_by_a_bench(capsys, tmp_path):
    def tokens(*acceptance: str) -> dict:
        more = ["--acceptance", *acceptance] if acceptance else []
        found = json.loads(said(capsys, "llama3.1-8b", "--device", "a100", "--json", *more))
        return {
            name: (row["tokens_per_step"], row["tokens_per_step_are"])
            for name, row in found["estimates"].items()
        }

    usual = tokens()
    assert {kind for _, kind in usual.values()} == {"by definition", "assumed"}
    given = tokens("0.84")
    assert given["tokenswift"] == (pytest.approx(1 + 4 * 0.84), "given")
    assert given["auto"][1] == "given"
    assert given["ngram"] == usual["ngram"]  # its drafts are not the model's
    one = tokens("0.84", "ngram=0.5")
    assert one["ngram"] == (pytest.approx(1 + 3 * 0.5), "given")
    rows = [{"method": "auto", "tokens_per_step": x} for x in (2.0, 3.0)]
    bench = tmp_path / "bench.txt"
    bench.write_text("a line before\n" + json.dumps({"rows": rows}) + "\n")
    assert tokens(str(bench))["auto"] == (2.5, "measured")


def test_a_cpu_s_speed_is_measured(capsys, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(roofline_table, "read_rate", lambda n: asked.append(n) or 5e9)
    hf_fixtures.make(tmp_path / "hf")
    cfg = read_config(tmp_path / "hf")
    assert cfg == tsjax.load(tmp_path / "hf").cfg
    argv = [str(tmp_path / "hf"), "--device", "cpu", "--prompt", "10", "--new", "20", "--json"]
    found = json.loads(said(capsys, *argv))
    assert asked == [reads(cfg, 0).least]
    assert (found["device"], found["bytes_per_second"]) == ("cpu", 5e9)
    assert "measured now" in found["speed"] and "assumed" in found["speed"]
    assert found["bounds"]["step_seconds"] == pytest.approx(reads(cfg, 20).least / 5e9)
    assert CPU.bytes_per_second != 5e9
    tsjax.save(tsjax.load(tmp_path / "hf"), tmp_path / "own")
    assert read_config(tmp_path / "own") == cfg


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["llama"], ["path='llama'", "names that need no folder: ", "llama3.1-8b"]),
        (["llama3.1-8b", "--prompt", "0"], ["--prompt=0 is not valid: an integer, at least 1"]),
        (["llama3.1-8b", "--heads", "-2"], ["--heads=-2", "at least 0"]),
        (["llama3.1-8b", "--acceptance", "1.5"], ["--acceptance='1.5'", "from 0 to 1"]),
        (["llama3.1-8b", "--acceptance", "medusa=0.5"], ["'medusa=0.5'", "ngram, tokenswift"]),
        (["llama3.1-8b", "--acceptance", "auto=much"], ["'auto=much'", "NAME=SHARE"]),
        (["llama3.1-8b", "--acceptance", "no.json"], ["'no.json'", "No such file"]),
    ],
)
def test_wrong_arguments(argv, words, capsys, monkeypatch):
    monkeypatch.setattr(roofline_table, "read_rate", lambda n: pytest.fail("it measures"))
    assert main(["roofline", *argv, "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(word in err for word in words), err

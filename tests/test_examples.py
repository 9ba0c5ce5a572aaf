# SPDX-License-Identifier: Apache-2.0
"""Each example runs as a user would run it, and says what it promises.

Those that compile many programs take a tiny model by their first argument, the others the embedded
one.
"""

import re
import runpy
import sys
from pathlib import Path

import helpers
import hf_fixtures
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def run(capsys, monkeypatch):
    def run(name: str, *argv: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *argv])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def make_tiny(folder: Path, **sizes) -> str:
    hf_fixtures.make(folder, vocab_size=len(helpers.TOKENS), max_position_embeddings=2048, **sizes)
    helpers.save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "hf")


def test_every_example_is_one_screen_and_has_a_test():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60
    tests = {name.removeprefix("test_") + ".py" for name in globals() if name.startswith("test_")}
    assert {path.name for path in EXAMPLES.glob("*.py")} <= tests


@pytest.mark.wide
def test_quickstart(run, tiny):
    out = run("quickstart.py", tiny)
    assert out.startswith("Once upon a time")
    assert "the same text: True" in out
    plain, swift = map(float, re.findall(r"([\d.]+) tokens per step", out))
    assert plain == 1.0 and swift > 1.3


@pytest.mark.wide
def test_streaming(run):
    out = run("streaming.py")
    text, summary = out.rstrip("\n").rsplit("\n", 1)
    assert text.startswith("The old man")
    reason, count, drafted = re.fullmatch(
        r"\[(\w+): (\d+) tokens, (\d+) of them drafted\]", summary
    ).groups()
    assert reason in ("stop_string", "length", "eos")
    assert ("." in text) == (reason == "stop_string")
    assert 0 <= int(drafted) < int(count) <= 100


@pytest.mark.wide
def test_batch(run):
    out = run("batch.py")
    assert "row 1 alone is row 1 of the batch: True" in out
    assert "row 0 and row 2, same prompt and seed, differ: True" in out
    assert (
        len(re.findall(r"^seed \d: (?:The old house|She opened the door and).{9}", out, re.M)) == 4
    )


@pytest.mark.wide
def test_same_tokens(run, tiny):
    out = run("same_tokens.py", tiny)
    found = re.findall(r"^(.*): (the same|OTHER) tokens$", out, re.M)
    assert [verdict for _, verdict in found] == ["the same"] * 4
    drafted, streamed, batch, killed = (how for how, _ in found)
    assert re.fullmatch(r"[\d.]+ tokens per step", drafted) and float(drafted.split()[0]) > 1
    assert streamed == "streamed" and batch == "in a batch"
    assert re.fullmatch(r"killed after [1-9]\d+ tokens and resumed", killed)


@pytest.mark.wide
def test_inside_jit(run):
    out = run("inside_jit.py")
    (name, few, steps), (_, more, fewer_steps) = re.findall(r"(\w+): (\d+) tokens in (\d+)", out)
    assert name == "Autoregressive" and few == steps
    assert int(fewer_steps) < int(steps) and int(more) >= int(few)
    plain, drafted = (eval(line) for line in re.findall(r"^  (.*)$", out, re.M))
    # A step that finds several tokens may go on after the one that was wanted.
    assert plain.startswith("It was a dark") and drafted.startswith(plain)


@pytest.mark.wide
def test_lazy_llm(run, tmp_path):
    out = run("lazy_llm.py", make_tiny(tmp_path / "hf", num_hidden_layers=3))
    batches, demanded, never = (
        [int(share) for share in line.rstrip("%").split("%, ")]
        for line in re.findall(r"^computed by each group of layers: (.*)", out, re.M)
    )
    assert never == [100, 50, 25]
    assert demanded[0] == 100 and all(50 < share <= 100 for share in demanded[1:])
    assert batches[0] == 100 and all(25 < share <= 100 for share in batches[1:])
    assert "the same text with drafts: True" in out


@pytest.mark.wide
def test_train_heads(run, tmp_path):
    out = run("train_heads.py", "tsjax/small-english", str(tmp_path / "heads"))
    first, last = (
        [float(loss) for loss in line.split(", ")]
        for line in re.findall(r"losses of the heads (.*)", out)
    )
    assert len(first) == 2 and all(b < a for a, b in zip(first, last, strict=True))
    assert re.search(r"^\d+ of [1-9]\d* drafts accepted", out, re.M)
    assert "the same text as without heads: True" in out
    assert (tmp_path / "heads" / "heads.safetensors").exists()


@pytest.mark.wide
def test_rollouts(run):
    out = run("rollouts.py", "tsjax/small-english", "12")
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", out)]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])

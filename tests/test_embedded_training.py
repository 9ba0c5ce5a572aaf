# SPDX-License-Identifier: Apache-2.0
"""The embedded model's tool: what it keeps of stories; a miniature learns, goes on and exports."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import tsjax
from tests.test_chat import CHATML, with_template
from tools.embedded_model import stories, training
from tools.embedded_model.__main__ import main

SMALL = (
    "--embed-dim 32 --num-layers 1 --num-heads 4 --num-kv-heads 2 --head-dim 8 --mlp-dim 48 "
    "--length 64 --final-length 128 --final-part 0.25 --batch 256 --micro 128 "
    "--evals 4 --chunk 5 --learning-rate 0.01 --steps 40"
).split()


def write_books(folder: Path, size: int = 30_000) -> Path:
    """Sentences of a few words, with hard line breaks."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name in ("first", "second"):
        paragraphs = []
        while sum(map(len, paragraphs)) < size:
            words = rng.choice("the old captain saw a small white ship upon a dark sea".split(), 40)
            lines = [" ".join(words[i : i + 10]) for i in range(0, 40, 10)]
            paragraphs.append("\n".join(lines).capitalize() + ".")
        (folder / f"{name}.txt").write_text("\n\n".join(paragraphs))
    return folder


WORDS = "one day a small fox went to look for the blue stone that it had lost in the snow".split()
TALE = " ".join(f"{word}{number}" for number, word in enumerate(5 * WORDS))


@pytest.mark.parametrize(
    ("text", "ended", "kept"),
    [
        (f"{TALE}.\n\n \u201cYes\u201d,  he said.\nAnd so", False, f'{TALE}.\n\n"Yes", he said.'),
        (f"{TALE}. And so", True, f"{TALE}. And so"),
        (f"**A tale** {TALE}.", True, None),
        (f"{TALE} \u65e5.", True, None),
        (" ".join(WORDS) + ".", True, None),  # short
        (f"{TALE} so{12 * ' he ran and'} fell.", True, None),
        (TALE, False, None),  # no sentence
    ],
)  # fmt: skip
def test_what_is_kept_of_a_story(text, ended, kept):
    assert stories.cleaned(text, ended) == kept


def test_stories_go_on_where_they_were_ended(tmp_path, monkeypatch, capsys):
    """Batch by batch, the same file as without an end; what a killed batch left is gone."""
    model = with_template(tmp_path, CHATML)
    monkeypatch.setattr(stories, "cleaned", lambda text, ended: text.strip() or None)
    monkeypatch.setattr(stories, "prompts", lambda seed, batch, rows: ["the tea"] * rows)
    monkeypatch.setitem(stories.SETTINGS, "max_new_tokens", 6)
    monkeypatch.setattr(stories, "sha256_of", lambda path: "0")
    monkeypatch.setattr(tsjax, "load", lambda path, dtype: model)

    def write(folder: str, tokens: int, seed: int = 3) -> int:
        argv = ["--model", "file", "--texts", str(tmp_path / folder), "--rows", "2"]
        return main(["stories", *argv, "--tokens", str(tokens), "--seed", str(seed)])

    assert write("whole", 60) == 0 and write("parts", 20) == 0
    with open(tmp_path / "parts" / stories.FILE, "ab") as file:
        file.write(b"half a sto")
    assert write("parts", 60) == 0
    whole, parts = ((tmp_path / name / stories.FILE).read_text() for name in ("whole", "parts"))
    assert parts.startswith(whole) or whole.startswith(parts)
    assert len(set(parts.split(stories.BETWEEN))) > 2 and "half" not in parts
    assert write("parts", 99, seed=4) == 1
    assert "was begun with seed 3, not 4" in capsys.readouterr().err


@pytest.mark.wide
def test_a_miniature_from_books_to_heads(tmp_path):
    """Two model folders by one schedule, `whole` and `continued`, are one; then heads join it."""
    books = write_books(tmp_path / "books")
    for name in ("whole", "continued"):
        work = ["--work", str(tmp_path / f"work-{name}")]
        command = ["train", *work, "--out", str(tmp_path / name), *SMALL]
        assert main(["tokenizer", "--texts", str(books), *work, "--vocab-size", "300"]) == 0
        if name == "continued":
            assert main([*command, "--stop-at", "25"]) == 0
            assert not (tmp_path / name).exists()
            command.append("--resume")
        assert main(command) == 0
    whole, continued = (tmp_path / name / "model.safetensors" for name in ("whole", "continued"))
    assert whole.read_bytes() == continued.read_bytes()

    lines = (tmp_path / "work-whole" / training.METRICS).read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [line["length"] for line in metrics] == [64, 64, 64, 128]
    assert metrics[0]["loss"] < np.log(300) - 1
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1
    assert metrics[-1]["held_out"] < metrics[0]["held_out"] < np.log(300) - 1

    card = (tmp_path / "whole" / "README.md").read_text()
    assert "40 updates of 256 tokens" in card and str(tmp_path) not in card
    model = tsjax.load(tmp_path / "whole")
    assert model.cfg.dtype == "bfloat16" and model.cfg.tie_embeddings
    text = 'Once "upon" a time -- \u65e5\u672c\n\n  the sea'
    ids = model.tokenizer.encode(text)
    assert ids[0] == model.tokenizer.bos_token_id and 1 in model.stop_ids
    assert model.tokenizer.decode(ids, skip_special_tokens=True) == text

    command = ["heads", "--work", str(tmp_path / "work-whole"), "--out", str(tmp_path / "heads")]
    command += "--steps 4 --warmup-steps 1 --sequence-length 64".split()
    assert main([*command, *"--batch-size 4 --micro-batch 2".split()]) == 0
    longer = tsjax.load(tmp_path / "heads")
    assert longer.cfg.num_draft_heads == 3 and model.cfg.num_draft_heads == 0
    jax.tree.map(np.testing.assert_array_equal, longer.params.model, model.params.model)
    assert "4 steps of 4 rows of 64 tokens" in (tmp_path / "heads" / "README.md").read_text()

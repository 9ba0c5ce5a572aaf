# SPDX-License-Identifier: Apache-2.0
"""The embedded model's training commands, on a miniature: they learn, go on, and export."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import tsjax
from tools.embedded_model import rows, texts, training
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two model folders, `whole` and `continued`, by the same schedule."""
    top = tmp_path_factory.mktemp("embedded")
    books = write_books(top / "books")
    for name in ("whole", "continued"):
        work = ["--work", str(top / f"work-{name}")]
        command = ["train", *work, "--out", str(top / name), *SMALL]
        assert main(["tokenizer", "--texts", str(books), *work, "--vocab-size", "300"]) == 0
        if name == "continued":
            assert main([*command, "--stop-at", "25"]) == 0
            assert not (top / name).exists()
            command.append("--resume")
        assert main(command) == 0
    return top


@pytest.mark.wide
def test_the_loss_falls_in_both_phases(runs):
    lines = (runs / "work-whole" / training.METRICS).read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [line["length"] for line in metrics] == [64, 64, 64, 128]
    assert metrics[0]["loss"] < np.log(300) - 1
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1
    assert metrics[-1]["held_out"] < metrics[0]["held_out"] < np.log(300) - 1


@pytest.mark.wide
def test_a_continued_run_is_the_same_run(runs):
    whole, continued = (runs / name / "model.safetensors" for name in ("whole", "continued"))
    assert whole.read_bytes() == continued.read_bytes()


@pytest.mark.wide
def test_the_folder(runs):
    folder = runs / "whole"
    card = (folder / "README.md").read_text()
    assert "40 updates of 256 tokens" in card and str(runs) not in card
    assert "--texts TEXTS --work WORK --vocab-size 300" in card
    model = tsjax.load(folder)
    assert model.cfg.dtype == "bfloat16" and model.cfg.tie_embeddings
    text = 'Once "upon" a time -- \u65e5\u672c\n\n  the sea'
    ids = model.tokenizer.encode(text)
    assert ids[0] == model.tokenizer.bos_token_id and 1 in model.stop_ids
    assert model.tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.wide
def test_transformers_reads_the_same_model(runs):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = runs / "whole"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = tsjax.load(folder, dtype="float32")
    ids = transformers.AutoTokenizer.from_pretrained(folder)("The old captain saw")["input_ids"]
    assert ids == ours.tokenizer.encode("The old captain saw")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(tsjax.forward(ours, np.array([ids])), expected, atol=1e-3)


def test_rows_with_gaps(rng):
    """Both parts are the stream's own tokens at the stream's own distances."""
    starts = np.flatnonzero(rng.random(5000) < 0.05)
    stream = texts.Stream(np.arange(5000, dtype=np.int32), starts, bos=-1)
    windows = rows.Order(stream, 128, 4096, gaps=0.9, seed=0).take(200)
    inputs, targets, positions = map(np.asarray, rows.cut_rows(stream.tokens, windows, 128, -1))
    assert inputs.shape == targets.shape == (200, 128)
    assert (inputs[:, 0] == -1).all() and (positions[:, 0] == 0).all()
    assert np.isin(inputs[:, 1], starts).all()
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(np.diff(inputs[:, 1:]), np.diff(positions[:, 1:]))
    jumps = np.diff(inputs[:, 1:]) > 1
    assert 0 < jumps.any(1).mean() < 1 and jumps.sum(1).max() == 1
    assert np.isin(inputs[:, 2:][jumps], starts).all()
    assert positions.max() < 4096 and positions.max() > 2048


def test_clean():
    raw = (
        "The Project Gutenberg EBook\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\r\n\r\n"
        "TITLE\n\n\n"
        "\u201cIt was a _very_ long line of the book, which went on until it was full,\u201d he\n"
        "said to the other one who was there\u2014and who listened to all of it,--\n"
        "patiently.\n\n"
        "   A verse\n   of two lines\n\n"
        "*** END OF THIS PROJECT GUTENBERG EBOOK X ***\nLicence\n"
    )
    assert texts.clean(raw) == (
        "TITLE\n\n"
        '"It was a very long line of the book, which went on until it was full," he said to the '
        "other one who was there--and who listened to all of it,--patiently.\n\n"
        "A verse\nof two lines"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such folder"),
        ({}, "it holds no *.txt file"),
        ({"a.txt": b"\xff\xfe"}, "is not UTF-8"),
        ({"a.txt": b"One line."}, "has no paragraphs"),
        ({"a.txt": b"One.\n\n" * 500}, "are too little to learn from"),
        ({"a.txt": b"One day.\n\n" * 5000}, "use more text or a smaller vocabulary"),
    ],
)
def test_bad_texts(content, message, tmp_path, capsys):
    folder = tmp_path / "books"
    if content is not None:
        folder.mkdir()
        for name, data in content.items():
            (folder / name).write_bytes(data)
    argv = ["tokenizer", "--texts", str(folder), "--work", str(tmp_path / "work")]
    assert main(argv) == 1
    assert message in capsys.readouterr().err


@pytest.mark.wide
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "either minutes or steps"),
        (["--steps", "5", "--batch", "100"], "at least a row of 128 tokens"),
        (["--steps", "5", "--embed-dim", "2048"], "at most 12,000,000"),
        (["--steps", "5", "--length", "40000"], "need at least"),
        (["--steps", "5", "--resume"], "was written with other settings"),
    ],
)
def test_bad_training(options, message, runs, capsys):
    argv = ["train", "--work", str(runs / "work-whole"), "--out", str(runs / "new")]
    argv += SMALL[: SMALL.index("--steps")]
    if "--length" in options:
        argv += ["--batch", "40000"]
    assert main([*argv, *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.wide
def test_heads_join_the_folder(runs):
    work, out = runs / "work-whole", runs / "with-heads"
    command = ["heads", "--work", str(work), "--out", str(out), "--steps", "4"]
    small = "--warmup-steps 1 --sequence-length 64 --batch-size 4 --micro-batch 2".split()
    assert main([*command, *small]) == 0
    model, before = tsjax.load(out), tsjax.load(runs / "whole")
    assert model.cfg.num_draft_heads == 3 and before.cfg.num_draft_heads == 0
    pairs = zip(
        jax.tree.leaves(model.params.model), jax.tree.leaves(before.params.model), strict=True
    )
    assert all((a == b).all() for a, b in pairs)
    card = (out / "README.md").read_text()
    assert "4 steps of 4 rows of 64 tokens" in card and "heads --work WORK --out OUT" in card
    evaluation = json.loads((out / "training.json").read_text())["heads"]["evaluation"]
    for name, record in zip(("the model", "1", "2", "3"), evaluation, strict=True):
        shares = [record["top1"], record["skip_bigram"][0], record["unigram"][0], record["top3"]]
        row = [name, f"{record['loss']:.3f}", *(f"{share:.1%}" for share in shares)]
        assert f"| {' | '.join(row)} |" in card

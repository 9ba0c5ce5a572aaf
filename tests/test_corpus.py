# SPDX-License-Identifier: Apache-2.0
"""Training sequences: what is read, in which order it comes, what is refused, what counts say."""

import collections
import json

import helpers
import numpy as np
import pytest

from tsjax.files.tokenizer import load_tokenizer
from tsjax.training.corpus import Order, predictions_from_counts, read_training_corpus

VOCAB = len(helpers.TOKENS)
WORDS = "the cat sat on the train and the rain ran in the lane".replace("c", "h")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(helpers.save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def read(data, *, length=8, tokenizer=None, **options):
    options = {"vocab_size": VOCAB, **options}
    return read_training_corpus(
        data, sequence_length=length, tokenizer=lambda: tokenizer, **options
    )


def text(seed: int, words: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS.split(), words))


@pytest.fixture
def books(tmp_path):
    """Four texts, one of them short, in nested folders, among files that are none."""
    folder = tmp_path / "books"
    (folder / "b" / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b" / "one.txt").write_text(text(1, 30))
    (folder / "b" / "deep" / "two.text").write_text(text(2, 40))
    (folder / "a.txt").write_text(text(3, 50))
    (folder / "short.txt").write_text("a")
    (folder / "cover.jpg").write_bytes(b"\xff\xd8\0")
    (folder / ".git" / "x.txt").write_text(text(4, 50))
    return folder


def test_the_first_tokens_of_each_text_in_sorted_order(books, tokenizer, tmp_path):
    corpus = read(books, tokenizer=tokenizer)
    names = ["a.txt", "b/one.txt", "b/deep/two.text"]
    assert corpus.names == tuple(str(books / name) for name in names)
    assert corpus.skipped == (str(books / "short.txt"),)
    wanted = [tokenizer.encode((books / name).read_text())[:8] for name in names]
    np.testing.assert_array_equal(corpus.sequences(range(3)), wanted)
    whole = read(books, tokenizer=tokenizer, whole_books=True)
    ids = tokenizer.encode((books / "a.txt").read_text())
    count = len(ids) // 8
    assert count > 2 and len(whole) > 3 * 2
    np.testing.assert_array_equal(
        whole.sequences(range(count)), np.reshape(ids[: count * 8], (count, 8))
    )
    assert corpus.sequences([2, 0]).tolist() == [wanted[2], wanted[0]]
    # Of a long text, they are those of the whole; what is named twice is read once.
    (tmp_path / "long.txt").write_text(text(1, 3000))
    long = read(tmp_path / "long.txt", length=50, tokenizer=tokenizer)
    ids = tokenizer.encode((tmp_path / "long.txt").read_text())
    assert long.sequences([0])[0].tolist() == ids[:50]
    again = read([str(books / "a.txt"), books], tokenizer=tokenizer)
    assert again.names == corpus.names and again.fingerprint == corpus.fingerprint


def test_files_of_token_ids(tmp_path):
    ids = np.random.default_rng(0).integers(0, VOCAB, 50)
    np.save(tmp_path / "flat.npy", ids.astype(np.uint16))
    np.save(tmp_path / "rows.npy", ids.reshape(2, 25))
    ids.astype(np.uint16).tofile(tmp_path / "raw.bin")
    windows = ids[:48].reshape(6, 8)
    for data, options in (
        (tmp_path / "flat.npy", {}),
        (tmp_path / "raw.bin", {"data_dtype": "uint16"}),
        (ids, {}),
    ):
        corpus = read(data, **options)
        np.testing.assert_array_equal(corpus.sequences(range(6)), windows)
        assert len(corpus) == 6 and corpus.sequences([0]).dtype == np.int32
    rows = read(tmp_path / "rows.npy")
    np.testing.assert_array_equal(rows.sequences(range(2)), ids.reshape(2, 25)[:, :8])
    whole = read(tmp_path / "rows.npy", whole_books=True)
    wanted = ids.reshape(2, 25)[:, :24].reshape(6, 8)
    np.testing.assert_array_equal(whole.sequences(range(6)), wanted)
    assert whole.fingerprint != rows.fingerprint


def test_the_order_is_a_permutation_for_each_pass_and_a_function_of_the_seed():
    order = Order(5, seed=3)
    numbers = order.numbers(0, 15)
    passes = [numbers[i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(one) == list(range(5)) for one in passes) and passes[0] != passes[1]
    assert Order(5, seed=3).numbers(7, 6) == numbers[7:13]  # from anywhere, across two passes
    assert order.numbers(0, 5) == numbers[:5]  # and back
    assert Order(5, seed=4).numbers(0, 15) != numbers


def test_what_is_held_out_is_not_trained_on(books, tokenizer):
    corpus = read(books, tokenizer=tokenizer, whole_books=True)
    train, held = corpus.split(0.3, seed=1)
    assert len(held.names) == 1 and set(train.names) | set(held.names) == set(corpus.names)
    assert len(train) + len(held) == len(corpus) and train.skipped == corpus.skipped
    again, _ = corpus.split(0.3, seed=1)
    assert again.fingerprint == train.fingerprint
    stream = read(np.arange(40) % VOCAB)  # a single document: its end
    train, held = stream.split(0.2, seed=1)
    np.testing.assert_array_equal(held.sequences([0]), stream.sequences([4]))
    assert (len(train), len(held)) == (4, 1)
    with pytest.raises(ValueError, match=r"held_out=0.5 is not valid: the data has 1 sequences"):
        read(np.arange(8)).split(0.5, seed=1)
    with pytest.raises(ValueError, match=r"held_out=1.5 is not valid"):
        stream.split(1.5, seed=1)


def test_predictions_from_counts():
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.geometric(0.3, 400), 9)
    train, held = read(ids[:240], vocab_size=12), read(ids[240:], vocab_size=12)
    for distance in (1, 3):
        followers = collections.defaultdict(collections.Counter)
        counts = collections.Counter(train.sequences(range(30)).ravel().tolist())
        for row in train.sequences(range(30)).tolist():
            for a, b in zip(row, row[distance:], strict=False):
                followers[a][b] += 1

        def best(counter, base=()):
            ranked = sorted(counter, key=lambda token: (-counter[token], token))[:3]
            return ranked + list(base)[len(ranked) :]

        frequent = best(counts)
        hits, total = np.zeros((2, 3)), 0
        for row in held.sequences(range(len(held))).tolist():
            for a, b in zip(row, row[distance:], strict=False):
                total += 1
                for kind, guesses in enumerate((frequent, best(followers[a], frequent))):
                    hits[kind] += [b in guesses[:k] for k in (1, 2, 3)]
        found = predictions_from_counts(train, held, distance=distance, vocab_size=12, top=3)
        np.testing.assert_allclose(found["unigram"], hits[0] / total)
        np.testing.assert_allclose(found["skip_bigram"], hits[1] / total)


# --- bad input -------------------------------------------------------------------------------


def refused(data, message, error=ValueError, **options):
    with pytest.raises(error, match=message):
        read(data, **options)


def test_data_that_cannot_be_used_is_refused(books, tmp_path, tokenizer):
    by = dict(tokenizer=tokenizer)
    refused(tmp_path / "no", r"data='.*no': there is no such file or folder", FileNotFoundError)
    refused(tmp_path / "no", "held_out='.*no'", FileNotFoundError, argument="held_out")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused([books, empty], "empty' is not valid: the folder has no text", **by)
    refused(7, "data=7 is not valid", TypeError)
    longest = r"the longest of 4 documents, '.*', has \d+ tokens and sequence_length=900"
    refused(books, longest, length=900, **by)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"abc\0def")
    not_utf8 = r"not a text in UTF-8 \(byte 0x00 at 3\); files of token ids end in .npy or"
    refused(binary, not_utf8, **by)
    unfit = r"the tokenizer does not fit the model: .* gives the id \d+, .* vocab_size=9"
    refused(books, unfit, vocab_size=9, **by)


def test_files_of_ids_that_cannot_be_used_are_refused(tmp_path):
    raw = tmp_path / "raw.bin"
    np.arange(20, dtype=np.uint16).tofile(raw)
    refused(raw, r"does not say .* give data_dtype \(--data-dtype\), one of uint16")
    refused(raw, "data_dtype='float32' is not valid: one of uint16", data_dtype="float32")
    raw.write_bytes(b"abc")
    refused(raw, "3 bytes are no whole number of uint16 ids", data_dtype="uint16")
    file = tmp_path / "x.npy"
    np.save(file, np.asarray([1, 2, VOCAB] * 9))
    refused(file, f"it has the id {VOCAB}, and the model has vocab_size={VOCAB}")
    np.save(file, np.ones(20))
    refused(file, r"shape \(20,\) and type float64; \[tokens\] or \[documents, tokens\] integers")
    file.write_bytes(b"no array")
    refused(file, "x.npy' is not valid: ")
    np.save(file, np.arange(5))
    refused(file, "has 5 tokens and sequence_length=8")


def test_lines_of_json_are_documents(tokenizer, tmp_path):
    """Answers of `tsjax batch`, and texts; never the braces."""
    file = tmp_path / "answers.jsonl"
    words = text(5, 30)
    entries = [
        {"line": 1, "tokens": [*range(5, 25)], "text": "not read"}, {"text": words},
        {"line": 3, "error": "too long"}, {"ids": [*range(9, 20)]}, {"line": 5, "tokens": []},
    ]  # fmt: skip
    file.write_text("".join(f"{json.dumps(entry)}\n\n" for entry in entries))
    corpus = read(file, tokenizer=tokenizer, whole_books=True)
    assert corpus.names == (f"{file}:1", f"{file}:3", f"{file}:7")
    assert corpus.documents[0].tolist() == [[*range(5, 13)], [*range(13, 21)]]
    ids = tokenizer.encode(words)
    count = len(ids) // 8
    assert corpus.documents[1].tolist() == np.reshape(ids[: 8 * count], (count, 8)).tolist()
    assert len(read(file, tokenizer=tokenizer)) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "the"}', "an object with one of tokens, ids, text"),
        ("[1, 2]", "an object with one of"),
        ("the cat", "x.jsonl:1.* is not valid"),
        ('{"tokens": [1, 99999]}', "id 99999"),
        ('{"tokens": [0.5]}', "integers"),
    ],
)
def test_other_lines_are_refused(line, message, tokenizer, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text(line)
    refused(file, message, tokenizer=tokenizer)

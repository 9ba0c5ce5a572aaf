# SPDX-License-Identifier: Apache-2.0
"""Plain text files -> clean paragraphs, a byte-level BPE, and arrays of token ids.

Does not know models.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
HELD_OUT = 0.02  # the end of every book
PARAGRAPHS = 20_000  # encoded at a time
SMALLEST = 20_000  # characters of all books together

# Words with the space before them, numbers, punctuation and the line breaks after it.
PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+\n*|\s*\n+|\s+(?!\S)|\s+"

# Every writer has other quotation marks and dashes; prompts are typed in ASCII.
TYPOGRAPHY = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u02bc", "'"),
        **dict.fromkeys("\u201c\u201d\u201e", '"'),
        **dict.fromkeys("\u2014\u2015", "--"),
        **dict.fromkeys("\u2010\u2011\u2013", "-"),
        **dict.fromkeys("\u00a0\u2007\u2009\u202f\t", " "),
        "\u2026": "...",
        "\ufeff": "",
    }
)


@dataclasses.dataclass(frozen=True)
class Book:
    name: str
    train: str
    held_out: str
    sha256: str  # of the file

    @property
    def size(self) -> int:
        return len(self.train) + len(self.held_out)


def read_books(folder: Path) -> list[Book]:
    """Every *.txt of the folder, cleaned; the last part of each is held out."""
    if not folder.is_dir():
        raise FileNotFoundError(f"--texts {folder}: there is no such folder")
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"--texts {folder}: it holds no *.txt file")
    books = []
    for file in files:
        content = file.read_bytes()
        try:
            text = clean(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8: {error}") from error
        cut = text.rfind("\n\n", 0, int(len(text) * (1 - HELD_OUT))) + 2
        if cut < 2:
            raise ValueError(f"{file} has no paragraphs: blank lines separate them")
        digest = hashlib.sha256(content).hexdigest()
        books.append(Book(file.stem, text[:cut], text[cut:], digest))
    total = sum(book.size for book in books)
    if total < SMALLEST:
        raise ValueError(
            f"--texts {folder}: {total:,} characters are too little to learn from; at least "
            f"{SMALLEST:,}, and several million for readable text"
        )
    return books


def clean(text: str) -> str:
    """Paragraphs on one line each, a blank line between them, ASCII quotation marks and dashes."""
    text = unicodedata.normalize("NFC", text).translate(TYPOGRAPHY)
    blocks = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text))
    return "\n\n".join(block for block in blocks if block)


def paragraphs(text: str) -> list[str]:
    """Each with the blank line after it. No piece of PIECES goes on behind one, so that a text has
    the tokens of its paragraphs, which all processors encode at once."""
    return re.findall(r"(?s).+?(?:\n\n|\Z)", text)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE: any text comes back as it was. Encoding puts BOS in front."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(itertools.chain.from_iterable(map(paragraphs, texts)), trainer)
    if bpe.get_vocab_size() != vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: these texts give only {bpe.get_vocab_size()} entries; "
            "use more text or a smaller vocabulary"
        )
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return bpe


def save_tokenizer(bpe: Any, folder: Path, context: int) -> None:
    """The files that transformers reads, of version 4 and 5, and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    ids = {"bos_token_id": bpe.token_to_id(BOS), "eos_token_id": bpe.token_to_id(EOS)}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


@dataclasses.dataclass(frozen=True)
class Stream:
    """Token ids of all books one after the other, each ended by EOS.

    Attributes:
      tokens: [n] int32.
      starts: the places where a paragraph begins.
    """

    tokens: np.ndarray
    starts: np.ndarray
    bos: int

    @classmethod
    def of(cls, bpe: Any, texts: Iterable[str]) -> Stream:
        bos, eos = bpe.token_to_id(BOS), bpe.token_to_id(EOS)
        rows: list[Any] = []
        for text in texts:
            pieces = paragraphs(text)
            for begin in range(0, len(pieces), PARAGRAPHS):
                some = pieces[begin : begin + PARAGRAPHS]
                rows += [row.ids for row in bpe.encode_batch_fast(some, add_special_tokens=False)]
            rows.append([eos])
        tokens = np.concatenate([np.asarray(row, np.int32) for row in rows])
        # Byte-level BPE writes a line break as this letter.
        breaks = [i for token, i in bpe.get_vocab().items() if token.endswith("\u010a\u010a")]
        ends = np.isin(tokens, [*breaks, eos])
        return cls(tokens, np.flatnonzero(np.concatenate([[True], ends[:-1]])), bos)

    def save(self, file: Path) -> None:
        np.savez(file, tokens=self.tokens, starts=self.starts, bos=self.bos)

    @classmethod
    def load(cls, file: Path) -> Stream:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; run the tokenizer command first")
        with np.load(file) as arrays:
            return cls(arrays["tokens"], arrays["starts"], int(arrays["bos"]))

    def next_start(self, places: np.ndarray) -> np.ndarray:
        """The first paragraph that begins at or after each place; the last one for the end."""
        index = np.searchsorted(self.starts, places)
        return self.starts[np.minimum(index, len(self.starts) - 1)]

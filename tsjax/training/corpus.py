# SPDX-License-Identifier: Apache-2.0
"""Training sequences from text files, folders of them, or files of token ids.

Knows files and tokenizers, the order in which sequences are taken, and what counts of tokens
predict. Does not know models. Everything is read and checked before the first step.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tsjax.base.checks import check, check_float
from tsjax.base.errors import BadType, BadValue, NoSuchFile
from tsjax.base.input_files import listed, parsing, require_file
from tsjax.files.tokenizer import encode

TEXT_SUFFIXES = (".txt", ".text")
TOKEN_SUFFIXES = (".npy", ".bin")
LINES_SUFFIX = ".jsonl"  # each line a document; only where such a file itself is named
LINE_FIELDS = ("tokens", "ids", "text")
TOKEN_DTYPES = ("uint16", "int32", "uint32", "int64")

_CHARACTERS_PER_TOKEN = 16  # more than tokens of text have; see _encode_start
_FINGERPRINTED = 4096  # sequences
_COUNTED_TOKENS = 2**24  # what the predictors from counts learn from


@dataclasses.dataclass(frozen=True)
class TrainingCorpus:
    """Sequences of one length, grouped by the document they come from.

    Attributes:
      documents: [sequences, T] token ids each; files of ids are mapped, not read.
      names: of the documents.
      skipped: names of documents shorter than a sequence.
    """

    documents: tuple[np.ndarray, ...]
    names: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def sequence_length(self) -> int:
        return self.documents[0].shape[1]

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(document) for document in self.documents])

    def sequences(self, numbers: Iterable[int]) -> np.ndarray:
        """The sequences with these numbers, [len(numbers), T] int32."""
        rows = []
        for number in numbers:
            document = int(np.searchsorted(self._ends, number, side="right"))
            rows.append(self.documents[document][number - self._ends[document]])
        return np.stack(rows).astype(np.int32)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells corpora apart by their size and up to 4096 sequences, evenly spaced."""
        digest = hashlib.sha256(f"{len(self)} x {self.sequence_length}".encode())
        for number in _evenly(len(self), _FINGERPRINTED):
            digest.update(self.sequences([number]).tobytes())
        return digest.hexdigest()[:16]

    def split(self, fraction: float, seed: int) -> tuple[TrainingCorpus, TrainingCorpus]:
        """What remains and what is held out: whole documents, or the end of a single one."""
        check_float(fraction, "held_out", 0.0, 1.0)
        check(0 < fraction < 1, "held_out", fraction, "between 0 and 1, both excluded")
        if len(self.documents) == 1:
            (whole,) = self.documents
            rest = len(whole) - _share(fraction, len(whole), "sequences")
            held = TrainingCorpus((whole[rest:],), self.names)
            return dataclasses.replace(self, documents=(whole[:rest],)), held
        order = np.random.default_rng(seed).permutation(len(self.documents))
        count = _share(fraction, len(order), "documents")
        return self._part(order[count:], self.skipped), self._part(order[:count])

    def _part(self, numbers: Iterable[int], skipped: tuple[str, ...] = ()) -> TrainingCorpus:
        chosen = sorted(numbers)
        documents = tuple(self.documents[i] for i in chosen)
        return TrainingCorpus(documents, tuple(self.names[i] for i in chosen), skipped)


def _share(fraction: float, total: int, what: str) -> int:
    check(total > 1, "held_out", fraction, f"the data has {total} {what}, nothing can be held out")
    return min(max(1, round(fraction * total)), total - 1)


def _evenly(total: int, limit: int) -> np.ndarray:
    return np.unique(np.linspace(0, total - 1, min(total, limit)).astype(np.int64))


class Order:
    """Which sequence comes when: a permutation for each pass over the data, by seed and pass."""

    def __init__(self, total: int, seed: int):
        self.total, self.seed = total, seed
        self._epoch, self._permutation = -1, np.zeros(0, np.int64)

    def numbers(self, first: int, count: int) -> list[int]:
        """The numbers of the sequences first .. first + count, counted from the start of a run."""
        return [self.number(place) for place in range(first, first + count)]

    def number(self, place: int) -> int:
        epoch, place = divmod(place, self.total)
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._epoch, self._permutation = epoch, generator.permutation(self.total)
        return int(self._permutation[place])


def read_training_corpus(
    data: Any,
    *,
    sequence_length: int,
    vocab_size: int,
    tokenizer: Callable[[], Any],
    whole_books: bool = False,
    data_dtype: str | None = None,
    argument: str = "data",
) -> TrainingCorpus:
    """The sequences in files and folders, or in arrays of token ids.

    Args:
      data: a path or several, or an array of token ids. Folders are searched for text files
        (.txt, .text) and files of token ids (.npy, .bin), in sorted order. An array [tokens] is one
        document and gives all its sequences; of [documents, tokens] every row is a document. Of a
        .jsonl each line is one: its "tokens" or "ids", or else its "text".
      vocab_size: every id must be below it.
      tokenizer: called when there is text.
      whole_books: take all whole sequences of a text or of a row, not its first one.
      data_dtype: type of the ids in .bin files, which do not say.
    """
    types = ", ".join(TOKEN_DTYPES)
    check(data_dtype in (None, *TOKEN_DTYPES), "data_dtype", data_dtype, f"one of {types}")

    def read() -> Iterator[tuple[str, np.ndarray, bool]]:
        """Names, ids, and whether all their sequences are taken."""
        if isinstance(data, np.ndarray):
            yield from rows("the array", data)
            return
        for file in _files(data, argument):
            require_file(file)
            if file.endswith(TOKEN_SUFFIXES):
                yield from rows(file, _map_ids(file, data_dtype, argument))
            elif file.endswith(LINES_SUFFIX):
                for name, found in _lines(file, argument):
                    if isinstance(found, str):
                        found = _encode_start(tokenizer(), found, None)
                    _check_ids(name, found, vocab_size, argument)
                    yield name, found, whole_books
            else:
                text = _read_text(file, argument)
                ids = _encode_start(tokenizer(), text, None if whole_books else sequence_length)
                _check_text_ids(file, ids, vocab_size, argument)
                yield file, ids, whole_books

    def rows(name: str, ids: np.ndarray) -> Iterator[tuple[str, np.ndarray, bool]]:
        _check_ids(name, ids, vocab_size, argument)
        if ids.ndim == 1:
            yield name, ids, True
        else:
            yield from ((f"{name}[{i}]", row, whole_books) for i, row in enumerate(ids))

    documents, names, skipped, longest = [], [], [], (0, "")
    for name, ids, all_of_it in read():
        count = len(ids) // sequence_length
        longest = max(longest, (len(ids), name))
        if count == 0:
            skipped.append(name)
            continue
        count = count if all_of_it else 1
        documents.append(ids[: count * sequence_length].reshape(count, sequence_length))
        names.append(name)
    if not documents:
        found = f"the longest of {len(skipped)} documents, {longest[1]!r}, has {longest[0]} tokens"
        remedy = "choose a smaller sequence_length or longer texts"
        raise BadValue(f"{argument} is not valid: {found} and {sequence_length=}; {remedy}")
    return TrainingCorpus(tuple(documents), tuple(names), tuple(skipped))


def _files(data: Any, argument: str) -> list[str]:
    """All files in the order in which they are read, none of them twice."""
    paths = [data] if isinstance(data, str | os.PathLike) else data
    is_list = isinstance(paths, Sequence) and len(paths) > 0
    if not (is_list and all(isinstance(path, str | os.PathLike) for path in paths)):
        wanted = "a path, a list of paths, or an array of ids"
        raise BadType(f"{argument}={data!r:.80} is not valid: {wanted}")
    found: dict[str, str] = {}
    for path in (os.fspath(path) for path in paths):
        if os.path.isdir(path):
            inside = list(_files_in(path))
            if not inside:
                texts, ids = ", ".join(TEXT_SUFFIXES), ", ".join(TOKEN_SUFFIXES)
                wanted = f"the folder has no text ({texts}) and no files of token ids ({ids})"
                has = ", ".join(listed(sorted(os.listdir(path)))) or "nothing"
                raise BadValue(f"{argument}={path!r} is not valid: {wanted}; it has {has}")
        elif os.path.exists(path):
            inside = [path]
        else:
            raise NoSuchFile(f"{argument}={path!r}: there is no such file or folder")
        for file in inside:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _files_in(folder: str) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.endswith(TEXT_SUFFIXES + TOKEN_SUFFIXES) and not name.startswith("."):
                yield os.path.join(place, name)


def _read_text(file: str, argument: str) -> str:
    with open(file, "rb") as handle:
        content = handle.read()
    where = content.find(b"\0")
    if where < 0:
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            where = error.start
    found = f"not a text in UTF-8 (byte {content[where]:#04x} at {where})"
    remedy = f"files of token ids end in {' or '.join(TOKEN_SUFFIXES)}"
    raise BadValue(f"{argument}={file!r} is not valid: {found}; {remedy}")


def _lines(file: str, argument: str) -> Iterator[tuple[str, np.ndarray | str]]:
    """What each line of JSON holds: ids, or a text. Lines of answers that failed hold none."""
    for number, line in enumerate(_read_text(file, argument).split("\n"), 1):
        if not line.strip():
            continue
        name = f"{file}:{number}"
        with parsing(name, " is not valid", argument=argument):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("error") is not None:
                continue
            found = [entry[k] for k in LINE_FIELDS if isinstance(entry, dict) and entry.get(k)]
            if isinstance(entry, dict) and "tokens" in entry and not found:  # an empty answer
                continue
            if not found:
                fields = ", ".join(LINE_FIELDS)
                raise BadValue(f"an object with one of {fields}; it is {line:.60}")
            yield name, found[0] if isinstance(found[0], str) else np.asarray(found[0])


def _encode_start(tokenizer: Any, text: str, wanted: int | None) -> np.ndarray:
    """Token ids of the text; of a longer text than needed at least the first `wanted`.

    The start of a long text is enough when it gives twice that number: tokens far from the cut are
    those of the whole text.
    """
    if wanted is not None and len(text) > _CHARACTERS_PER_TOKEN * wanted:
        ids = encode(tokenizer, text[: _CHARACTERS_PER_TOKEN * wanted], verbose=False)
        if len(ids) >= 2 * wanted:
            return ids[:wanted]
    return encode(tokenizer, text, verbose=False)


def _check_text_ids(file: str, ids: np.ndarray, vocab_size: int, argument: str) -> None:
    highest = int(ids.max(initial=0))
    if highest >= vocab_size:
        found = f"for {argument}={file!r} it gives the id {highest}"
        remedy = f"the model has vocab_size={vocab_size}; use the model's own tokenizer"
        raise BadValue(f"the tokenizer does not fit the model: {found}, and {remedy}")


def _map_ids(file: str, data_dtype: str | None, argument: str) -> np.ndarray:
    with parsing(file, " is not valid", argument=argument):
        if file.endswith(".npy"):
            ids = np.load(file, mmap_mode="r", allow_pickle=False)
            if not isinstance(ids, np.ndarray):
                raise BadValue("an archive of several arrays; save only the array of ids")
            return ids
        if data_dtype is None:
            remedy = f"give data_dtype (--data-dtype), one of {', '.join(TOKEN_DTYPES)}"
            raise BadValue(f"the file does not say of which type its ids are; {remedy}")
        size, item = os.path.getsize(file), np.dtype(data_dtype).itemsize
        if size == 0 or size % item:
            raise BadValue(f"{size} bytes are no whole number of {data_dtype} ids")
        return np.memmap(file, data_dtype, mode="r")


def _check_ids(name: str, ids: np.ndarray, vocab_size: int, argument: str) -> None:
    what = f"{argument}: {name!r} is not valid"
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        wanted = "[tokens] or [documents, tokens] integers"
        raise BadValue(f"{what}: it has shape {ids.shape} and type {ids.dtype}; {wanted}")
    rows = np.atleast_2d(ids)
    step = max(1, 2**24 // max(1, rows.shape[0]))
    for start in range(0, rows.shape[1], step):
        block = rows[:, start : start + step]
        low, high = int(block.min(initial=0)), int(block.max(initial=0))
        if low < 0 or high >= vocab_size:
            found = f"it has the id {low if low < 0 else high}, and the model has {vocab_size=}"
            remedy = "the ids must come from the model's own tokenizer"
            raise BadValue(f"{what}: {found}; {remedy}")


def predictions_from_counts(
    train: TrainingCorpus, held_out: TrainingCorpus, *, distance: int, vocab_size: int, top: int
) -> dict[str, np.ndarray]:
    """How often the token `distance` places further is among the first 1 .. `top` guesses.

    "unigram" guesses the most frequent tokens of `train`. "skip_bigram" guesses those that come
    most frequently `distance` after the last token, then the former. Ties go to the lower id.

    Returns:
      For each of the two the shares [top] of all such tokens in `held_out`.
    """
    limit = max(1, _COUNTED_TOKENS // train.sequence_length)
    tokens = train.sequences(_evenly(len(train), limit)).astype(np.int64)
    counts = np.bincount(tokens.ravel(), minlength=vocab_size)
    frequent = np.argsort(-counts, kind="stable")[:top]

    pairs = (tokens[:, :-distance] * vocab_size + tokens[:, distance:]).ravel()
    pairs, counts = np.unique(pairs, return_counts=True)
    last, following = np.divmod(pairs, vocab_size)
    order = np.lexsort((following, -counts, last))
    last, following = last[order], following[order]
    rank = np.arange(len(last)) - np.searchsorted(last, last)
    best = np.tile(frequent, (vocab_size, 1))
    kept = rank < best.shape[1]
    best[last[kept], rank[kept]] = following[kept]

    hits, total = np.zeros((2, top)), 0
    for number in range(len(held_out)):
        (row,) = held_out.sequences([number])
        context, label = row[:-distance], row[distance:]
        always = np.broadcast_to(frequent, (len(label), len(frequent)))
        for index, guesses in enumerate((always, best[context])):
            right = guesses == label[:, None]
            found = np.logical_or.accumulate(right, axis=1).sum(axis=0)
            hits[index] += np.pad(found, (0, top - len(found)), mode="edge")
        total += len(label)
    return {"unigram": hits[0] / total, "skip_bigram": hits[1] / total}

# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and, piece by piece, back.

Knows HuggingFace's tokenizers: the usual ones by the package tokenizers, the others by
transformers, which takes seconds to import. usual_tokenizer.py says which. Does not know models.
Whatever those libraries raise, Rust's panics too, becomes a ValueError that names the folder.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Iterable
from typing import Any

import numpy as np

from tsjax.base.errors import NoSuchFile
from tsjax.base.input_files import filtered_log, parsing, require_file
from tsjax.files import gguf_tokenizer
from tsjax.files.gguf_files import is_gguf, read_headers
from tsjax.files.plain_tokenizer import PlainTokenizer
from tsjax.files.usual_tokenizer import NeedsTransformers, described_folder

REPLACEMENT = "\ufffd"  # what an incomplete or invalid UTF-8 sequence decodes to

# Without one of these there is no tokenizer, whatever its settings say; see load_tokenizer.
_VOCABULARY = re.compile(
    r"tokenizer\.(json|model.*)|vocab.*|merges\.txt|tekken\.json|.*\.(model|tiktoken)"
)
_DAMAGED = " has a tokenizer that cannot be loaded; token ids work without it"
# (name, size, time of the last change, inode) of each file.
_State = tuple[tuple[str, int, int, int], ...]


def load_tokenizer(path: str) -> Any:
    """The tokenizer in a local folder or GGUF file; loaded again when a file there has changed.

    A place without one is a FileNotFoundError, a tokenizer that cannot be used a ValueError.
    """
    if is_gguf(path):
        info = os.stat(path)
        return _load_tokenizer(path, ((path, info.st_size, info.st_mtime_ns, info.st_ino),))
    state = _folder_state(path)
    if not any(_VOCABULARY.fullmatch(name) for name, *_ in state):
        raise NoSuchFile(
            f"no tokenizer could be loaded from {path!r}: pass token ids instead of text, or copy "
            "tokenizer.json and its companions there"
        )
    return _load_tokenizer(path, state)


@functools.lru_cache(maxsize=8)
def _load_tokenizer(path: str, state: _State) -> Any:
    if is_gguf(path):
        fields = read_headers(path)[0].fields
        if not gguf_tokenizer.has_tokenizer(fields):
            raise NoSuchFile(f"{path!r} has no tokenizer: pass token ids instead of text")
        describe = functools.partial(gguf_tokenizer.described, fields)
    else:
        for name, *_ in state:
            require_file(os.path.join(path, name))
        describe = functools.partial(described_folder, path)
    with parsing(path, _DAMAGED):
        try:
            tokenizer = PlainTokenizer(path, describe())
        except NeedsTransformers:
            tokenizer = _by_transformers(path)
        _visible_and_byte_tokens(tokenizer)  # is read later, while tokens are made
        return tokenizer


def _by_transformers(path: str) -> Any:
    # Whoever imports transformers for a tokenizer need not hear that it found no torch.
    with filtered_log("transformers", lambda record: "PyTorch was not" not in record.getMessage()):
        import transformers
    load = transformers.AutoTokenizer.from_pretrained
    return load(path, local_files_only=True, trust_remote_code=False)


def _folder_state(path: str) -> _State:
    """What tells contents of a folder apart. Folders in it count only in place of vocabularies."""
    found = []
    for entry in os.scandir(path) if os.path.isdir(path) else ():
        with contextlib.suppress(FileNotFoundError):  # a link to nothing
            info = entry.stat()
            if not stat.S_ISDIR(info.st_mode) or _VOCABULARY.fullmatch(entry.name):
                found.append((entry.name, info.st_size, info.st_mtime_ns, info.st_ino))
    return tuple(sorted(found))


def encode(tokenizer: Any, text: str, **options: Any) -> np.ndarray:
    """Token ids of `text`, [T] int32, with the special tokens this tokenizer adds."""
    with parsing(tokenizer.name_or_path, " has a tokenizer that cannot encode this text"):
        return np.asarray(tokenizer.encode(text, **options), np.int32)


def decode_text(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text of `ids` without special tokens, spaces as the tokens have them."""
    with parsing(tokenizer.name_or_path, " has a tokenizer that cannot decode these tokens"):
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return tokenizer.decode(list(ids), **options)


@functools.lru_cache(maxsize=8)
def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens that `decode_text` leaves out, with what they are called."""
    added = tokenizer.added_tokens_decoder.items()
    return {index: token.content for index, token in added if token.special}


@functools.lru_cache(maxsize=8)
def _visible_and_byte_tokens(tokenizer: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Tokens that decoding does not skip, and tokens that stand for a single byte."""
    vocab = tokenizer.get_vocab()
    byte = re.compile(r"<0x[0-9A-Fa-f]{2}>")
    return (
        frozenset(vocab.values()) - special_tokens(tokenizer).keys(),
        frozenset(index for token, index in vocab.items() if byte.fullmatch(token)),
    )


class Detokenizer:
    """The text of one growing row of tokens, handed out as soon as it can no longer change.

    `context` are the tokens before the row, a prompt: the text continues theirs, so a first token
    that begins a word brings its space along. The pieces of all calls, `flush` included, join to
    `decode_text` of context and row, less that of the context. Only a window of recent tokens is
    decoded again, however long the row is. Two things are held back: an incomplete UTF-8 sequence
    at the end, and a run of byte tokens (<0xE2> and so on, which SentencePiece vocabularies fall
    back to) until another token ends it, because one invalid byte changes the text of the run.
    """

    _CONTEXT = 16  # tokens of the context to keep
    _WINDOW = 64  # tokens to collect before the window is cut
    # Tokens to keep, the first that turns out to be a clean cut. Each is at least a byte, so a
    # UTF-8 sequence that the cut divides has ended long before the last of them.
    _TAILS = (8, 16, 32)

    def __init__(self, tokenizer: Any, context: Iterable[int] = ()):
        self._tokenizer = tokenizer
        self._visible, self._bytes = _visible_and_byte_tokens(tokenizer)
        known = [int(token) for token in context if int(token) in self._visible]
        # Recent tokens; what came before no longer matters.
        self._window: list[int] = known[-self._CONTEXT :]
        # Characters of the window's text that were handed out, or are the context's.
        text = decode_text(tokenizer, self._window)
        self._emitted = len(text) - text.endswith(REPLACEMENT)

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens; returns the text that became final."""
        new = [int(token) for token in ids if int(token) in self._visible]
        self._window += new
        if not new or new[-1] in self._bytes:
            return ""
        text = decode_text(self._tokenizer, self._window)
        # Bytes that follow can only change an incomplete sequence, and that is one character.
        final = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._emitted : final]
        self._emitted = max(self._emitted, final)
        if len(self._window) > self._WINDOW:
            self._cut(text)
        return piece

    def pending(self) -> str:
        """What `flush` would return now: text that later tokens may still change."""
        return decode_text(self._tokenizer, self._window)[self._emitted :]

    def flush(self) -> str:
        """The rest of the text; the row has ended."""
        piece = self.pending()
        self._window, self._emitted = [], 0
        return piece

    def _cut(self, text: str) -> None:
        """Forgets old tokens where the text of those that remain is an end of the whole text."""
        for size in self._TAILS:
            tail = decode_text(self._tokenizer, self._window[-size:])
            emitted = self._emitted - (len(text) - len(tail))
            if text.endswith(tail) and emitted >= 0:
                self._window, self._emitted = self._window[-size:], emitted
                return

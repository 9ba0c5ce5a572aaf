# SPDX-License-Identifier: Apache-2.0
"""What a change is."""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """One mistake that somebody could make.

    Attributes:
      name, meaning: a word to call it by, and what is wrong then, in a sentence.
      file: where its old text is, once; or a folder, and it is once in all its modules.
      old, new: the text, and what replaces it.
      tests: files of the default suite, or tests in them, that are expected to notice: the
        likeliest first, as pytest takes them.
    """

    name: str
    meaning: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

# SPDX-License-Identifier: Apache-2.0
"""What a change is, and those of changes.txt, which says how it is read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Change(NamedTuple):
    """One mistake that somebody could make.

    Attributes:
      name, meaning: a word to call it by, and what is wrong then, in a sentence.
      file: where its old text is, once; or a folder, and it is once in all its modules.
      old, new: the text, and what replaces it.
      tests: files of the default suite, or tests in them, that are expected to notice.
    """

    name: str
    meaning: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _read(block: str) -> Change:
    head, file, *rest = block.splitlines()
    name, meaning = head.split(": ", 1)
    old, new = ("\n".join(line[2:] for line in rest if line[0] == sign) for sign in "-+")
    return Change(name, meaning, file, old, new, tuple(one for one in rest if one[0] not in "-+"))


_BLOCKS = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").strip().split("\n\n")
CHANGES = tuple(_read(block) for block in _BLOCKS if not block.startswith("#"))

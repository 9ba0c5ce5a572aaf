# SPDX-License-Identifier: Apache-2.0
"""What was written otherwise in the last release still works in this one, and says what to write.

Knows those words of the command line alone. It goes with the next release.
"""

from __future__ import annotations

import tsjax
from tsjax.commands.parser import tell


def in_new_words(argv: list[str]) -> list[str]:
    """The command that is meant; what it is called now is said once on stderr."""
    command, words = argv[:1], argv[1:]
    if command == ["generate"] and (file := _taken(words, "--prompts")) is not None:
        now = "tsjax batch MODEL FILE --out FILE"
        _say(words, f"generate --prompts is now: {now} (by auto, where no --method is named)")
        _taken(words, "--save-every")  # it did nothing there, nor did a full prefill
        if (prefill := _taken(words, "--prefill")) not in (None, "full"):
            words.append(f"--prefill={prefill}")  # which is refused
        # At the end, where no flag before takes it for one of its values.
        return ["batch", *words, *([] if "--" in words else ["--"]), file]
    if command == ["info"] and (mesh := _taken(words, "--mesh")) is not None:
        _say(words, "info --mesh is now: tsjax fits MODEL DATA,MODEL[,SLOTS]")
        return ["fits", _taken(words, "--model") or tsjax.EMBEDDED, mesh, *words]
    return argv


def _taken(words: list[str], flag: str) -> str | None:
    """The value of a flag; both are taken out."""
    for place, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return words.pop(place).removeprefix(f"{flag}=")
        if word == flag and place + 1 < len(words):
            del words[place]
            return words.pop(place)
    return None


def _say(words: list[str], line: str) -> None:
    if "--quiet" not in words:
        tell(f"tsjax: {line}")

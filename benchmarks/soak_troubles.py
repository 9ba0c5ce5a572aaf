# SPDX-License-Identifier: Apache-2.0
"""What should be so in the document of a soak, and is not: tokens, exit codes, memory, programs."""

from __future__ import annotations

from typing import Any, NamedTuple

WARM_UP = 2000  # tokens of a process
WITHIN, ANY_TIME, ASKED, BY_ITSELF = "within a chunk", "at any time", "asked to end", "by itself"
FULL_TOKENS = 2000  # of the run whose disk is full
EXIT_CODES = {"SIGKILL": -9, "SIGINT": 130, "SIGTERM": 143}
MOST_GROWTH = 0.05  # of the memory that a process has after its warm-up


class Growth(NamedTuple):
    """Resident bytes of a process between two counts of its tokens."""

    since: int
    until: int
    first: int
    most: int
    last: int

    @property
    def share(self) -> float:
        return self.most / self.first - 1


def growth(life: dict[str, Any], since: int) -> Growth | None:
    """From that many tokens on; None where it has no two samples."""
    found = [(tokens, size) for tokens, size in life["memory"] if tokens >= since]
    if len(found) < 2:
        return None
    sizes = [size for _, size in found]
    return Growth(found[0][0], found[-1][0], sizes[0], max(sizes), sizes[-1])


def growths(part: dict[str, Any]) -> list[Growth]:
    """Of each life: from a fifth of the run on where one process makes all of it, else from the end
    of its warm-up on."""
    fifth = part["new_tokens"] // 5 if len(part["lives"]) == 1 else 0
    starts = [max(fifth, life["tokens_at_begin"] + WARM_UP) for life in part["lives"]]
    found = map(growth, part["lives"], starts)
    return [one for one in found if one is not None]


def troubles(document: dict[str, Any]) -> list[str]:
    """What is not as it should be, of all parts."""
    wanted, found = document["tokens_of_plain_decoding"], []
    first = {part["sha256_of_first"] for part in document["parts"] if "sha256" in part}
    if len(first) > 1:
        found.append(f"the first {FULL_TOKENS} tokens are not the same in all parts")
    for part in document["parts"]:
        if "left_out" in part:
            continue
        name, lives = part["part"], part["lives"]
        tokens = FULL_TOKENS if name == "full disk" else document["new_tokens"]
        if (part["new_tokens"], part["finish_reason"]) != (tokens, "length"):
            found.append(f"{name}: ended after {part['new_tokens']} tokens")
        if name != "full disk" and wanted and part["sha256"] != wanted["sha256"]:
            found.append(f"{name}: other tokens than plain decoding's")
        for number, life in enumerate(lives, 1):
            found += [f"{name}, life {number}: {what}" for what in troubles_of_life(life)]
        if again := part.get("programs", {}).get("made_again"):
            found.append(f"{name}: compiled again: {again}")
        for one in growths(part):
            if one.share > MOST_GROWTH:
                found.append(f"{name}: memory grew by {one.share:.1%} from {one.since:,} tokens on")
        if name == "killed":
            second = part["second_run"]
            refused = second["exit_code"] == 1 and "by another run" in second["said"]
            if not (refused and second["first_was_there"]):
                found.append(f"{name}: a second run was not refused: {second}")
        if name == "full disk":
            was_full, later = (life["result"] for life in lives)
            if not (was_full["unsaved"] and "No space left" in "".join(was_full["problems"])):
                found.append(f"{name}: it was not full: {was_full}")
            if later["unsaved"] or not 0 < lives[0]["tokens_saved"] < FULL_TOKENS:
                found.append(f"{name}: it did not go on with what had room")
    return found


def troubles_of_life(life: dict[str, Any]) -> list[str]:
    found = []
    wanted = EXIT_CODES[life["signal"]] if "signal" in life else 0
    if life["exit_code"] != wanted:
        found.append(f"exit code {life['exit_code']}, not {wanted}")
    if life["ended"] == ASKED and life["tokens_saved"] != life["tokens_at_end"]:
        found.append(f"{life['tokens_saved']} of {life['tokens_at_end']} tokens were saved")
    return found

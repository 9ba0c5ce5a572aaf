# SPDX-License-Identifier: Apache-2.0
"""Files with what drafts found: documents of `tsjax bench`, and lists of accepted lengths.

Knows their formats. Does not know what is done with them.
"""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.base.input_files import read_text

MOST_DRAFTED = 4096  # drafted tokens of a step


def read_bench(path: str, argument: str, wanted: str) -> list[dict[str, Any]]:
    """The rows of a bench's document, which may follow other lines, as on its stdout."""
    rows = _read(path, argument, wanted)
    check(isinstance(rows, dict), argument, path, wanted)
    rows = rows.get("rows")
    kept = isinstance(rows, list) and all(
        isinstance(row, dict) and {"method", "tokens_per_step"} <= set(row) for row in rows
    )
    check(kept and bool(rows), argument, path, wanted)
    return rows


def read_trace(path: str, methods: list[str], argument: str) -> dict[str, tuple[int, ...]]:
    """Accepted lengths, step by step, for each method that drafts.

    A list stands for every method. A bench's document has counts of lengths for each method; their
    order is drawn, the same each time.
    """
    wanted = "a JSON list of accepted lengths, one for each step, or a file that tsjax bench wrote"
    found = _read(path, argument, wanted)
    drafting = [name for name in methods if name != "plain"]
    if isinstance(found, list):
        return dict.fromkeys(drafting, _lengths(found, path, argument, wanted))
    rows = [row for row in read_bench(path, argument, wanted) if row.get("accepted_lengths")]
    traces = {}
    for name in drafting:
        lengths = [
            length
            for row in rows
            if row["method"] == name
            for length, steps in enumerate(row["accepted_lengths"])
            for _ in range(steps)
        ]
        known = ", ".join(sorted({row["method"] for row in rows}))
        check(bool(lengths), argument, path, f"one that measured {name}; it has {known or 'none'}")
        random.Random(0).shuffle(lengths)
        traces[name] = _lengths(lengths, path, argument, wanted)
    return traces


def _lengths(values: list, path: str, argument: str, wanted: str) -> tuple[int, ...]:
    good = bool(values) and all(type(x) is int and 0 <= x <= MOST_DRAFTED for x in values)
    check(good, argument, path, wanted)
    return tuple(values)


def _read(path: str, argument: str, wanted: str) -> Any:
    try:
        text = read_text(path)
    except OSError as error:
        raise BadValue(f"{argument}={path!r} is not valid: {error.strerror}; {wanted}") from error
    for part in (text, text.rstrip().rpartition("\n")[2]):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(part)
    raise BadValue(f"{argument}={path!r} is not valid: {wanted}")

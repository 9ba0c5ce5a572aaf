# SPDX-License-Identifier: Apache-2.0
"""What all tables of the docs are made of: committed results, how they are named, and the writer.

A table is rows of a result and columns; a column is its title and what each row says there: a
format of the row's fields, as in ``{ms[median]:.1f} ms``, or a function of the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.__main__ import NAMES
from benchmarks.report import ROOT, todays_command

RESULTS = ROOT / "benchmarks" / "results"
Column = tuple[str, str | Callable[[Any], str]]


# --- results ----------------------------------------------------------------------------------


def read(name: str, folder: str = "cpu") -> dict:
    return json.loads((RESULTS / folder / f"{name}.json").read_text("utf-8"))


def matching(pattern: str) -> list[dict]:
    """Of CPUs, by their names."""
    return [read(path.stem) for path in sorted((RESULTS / "cpu").glob(f"{pattern}.json"))]


def of_gpu(name: str) -> dict:
    """What was measured on the GPU that ran last."""
    return read(name, "h200")


def made_by(document: dict) -> str:
    """The command as it is today; of a benchmark that is gone as it was, and the commit that ran
    it."""
    command = todays_command(document["command"])
    name = re.search(r"-m benchmarks (\w+)", command)
    if name is None or name[1] in NAMES:
        return f"`{command}`"
    commit = document.get("commit")
    then = f"commit {commit}" if commit else "a commit of that day"
    return f"`{document['command']}` at {then.replace('+', ', with changes')}"


def source(*documents: dict) -> str:
    """The commands, each machine and each commit once."""
    made: dict[str, list[str]] = {}
    for document in documents:
        versions = document["versions"]
        where = (
            f"({document['cpus']} cores of {document['device']}, jax {versions['jax']}, "
            f"Python {versions['python']}, {document['date']})"
        )
        made.setdefault(where, []).append(made_by(document))

    def once(commands: list[str]) -> str:
        ends = [command.rpartition("`")[2] for command in commands]
        pairs = zip(commands, ends, [*ends[1:], ""], strict=True)
        return ", ".join(
            one.removesuffix(end) if end == after else one for one, end, after in pairs
        )

    return "; ".join(f"{once(commands)} {where}" for where, commands in made.items())


def machine(document: dict) -> str:
    return f"{document['cpus']} cores of {document['device']}, {document['date']}"


# --- the writer -------------------------------------------------------------------------------


def table(rows: Iterable[Any], *columns: Column) -> list[str]:
    """Its lines: the titles, and one for each row."""
    lines = head(*(title for title, _ in columns))
    for row in rows:
        lines.append(
            line(*(cell(row) if callable(cell) else cell.format_map(row) for _, cell in columns))
        )
    return lines


def head(*titles: str) -> list[str]:
    """The first two lines of a table."""
    return [line(*titles), "|---" * len(titles) + "|"]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def with_note(lines: Sequence[str], note: str, *documents: dict) -> str:
    """What stands below a table: what it shows, and how the documents that it is of were made."""
    made = f"Made by {source(*documents)}." if documents else ""
    return "\n".join([*lines, "", " ".join(filter(None, (note, made)))])


def times(gain: Mapping[str, float], spread: str = "") -> str:
    """How many times faster: the median, with `spread` between the least and the most."""
    ends = f" ({gain['min']:.2f}{spread}{gain['max']:.2f})" if spread else ""
    return f"{gain['median']:.2f}x{ends}"


def write(sections: Mapping[tuple[str, str], Callable[[], str]], check: bool) -> int:
    """Puts texts between the markers of their pages, by page and section, or only looks.

    Returns 1 if a look finds that a page would change.
    """
    changed = False
    for (name, section), render in sections.items():
        path = ROOT / name
        text = path.read_text("utf-8")
        begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        wanted = f"{before}{begin}\n{render()}\n{end}{after}"
        changed |= wanted != text
        if not check:
            path.write_text(wanted, "utf-8")
    return int(check and changed)

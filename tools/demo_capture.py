# SPDX-License-Identifier: Apache-2.0
"""Records a run of `tsjax demo` and draws what the terminal showed at its end, as SVG.

python -m tools.demo_capture --model FILE --greedy    writes docs/images/demo.svg

All arguments go to `tsjax demo`. Knows the escape codes that the demo writes, and no others. Does
not know what the demo shows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tools.facts import facts

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "demo.svg"
COLUMNS, LINES = 96, 60  # of the terminal: no line of the run may leave it

CHAR_WIDTH, LINE_HEIGHT, MARGIN = 7.8, 18, 16
BACKGROUND, INK, FAINT = "#161b22", "#d1d7e0", "#7d8590"
COLOURS = {"32": "#56d364", "33": "#e3b341", "36": "#39c5cf"}  # green, yellow, cyan
CODE = re.compile(r"\x1b\[(\??)(\d*)([A-Za-z])")

Cell = tuple[str, str]  # a character and its colour
Line = list[Cell]


def record(command: Sequence[str]) -> str:
    """What a command writes to a terminal."""
    ours, its = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    environ.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=its, env=environ)
    os.close(its)
    written = bytearray()
    with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
        while part := os.read(ours, 65536):
            written += part
    os.close(ours)
    if process.wait():
        raise SystemExit(f"{shlex.join(command)} ended with exit code {process.returncode}")
    return written.decode()


def screen(written: str) -> list[Line]:
    """The lines that stand in the terminal at the end."""
    lines: list[Line] = [[]]
    row, colour, at = 0, INK, 0
    while at < len(written):
        if found := CODE.match(written, at):
            private, number, letter = found.groups()
            at = found.end()
            if letter == "A":
                row -= int(number)
            elif letter == "K":
                lines[row] = []
            elif letter == "J":
                del lines[row + 1 :]
                lines[row] = []
            elif letter == "m":
                colour = COLOURS.get(number, INK)
            elif not private:  # the private ones hide and show the cursor
                raise ValueError(f"the escape code {found.group()!r} is unknown here")
            continue
        char = written[at]
        at += 1
        if char == "\n":
            row += 1
            if row == len(lines):
                lines.append([])
        elif char != "\r":  # it stands before a new line, or before a line that is cleared
            lines[row].append((char, colour))
    return lines[:-1] if not lines[-1] else lines


def draw(lines: Sequence[Line]) -> str:
    """The lines as SVG; every stretch of one colour has its own place and width."""
    width = 2 * MARGIN + CHAR_WIDTH * max(map(len, lines))
    height = 2 * MARGIN + LINE_HEIGHT * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" font-size="13" '
        "font-family=\"ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', "
        'monospace">',
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
    ]
    for row, line in enumerate(lines):
        y, column = MARGIN + LINE_HEIGHT * row + 13, 0
        for colour, cells in itertools.groupby(line, key=lambda cell: cell[1]):
            text = "".join(char for char, _ in cells)
            for words in re.finditer(r"\S+(?: \S+)*", text):
                x, length = MARGIN + CHAR_WIDTH * (column + words.start()), len(words.group())
                parts.append(
                    f'<text x="{x:.1f}" y="{y}" fill="{colour}" '
                    f'textLength="{CHAR_WIDTH * length:.1f}">{escape(words.group())}</text>'
                )
            column += len(text)
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    arguments = sys.argv[1:]
    lines = screen(record([sys.executable, "-m", "tsjax", "demo", *arguments]))
    run = facts()
    machine = f"{run['cpus']} cores of {run['device']}, jax {run['versions']['jax']}, {run['date']}"
    lines.insert(0, [(char, FAINT) for char in "$ " + shlex.join(["tsjax", "demo", *arguments])])
    lines += [[], [(char, FAINT) for char in machine]]
    TARGET.write_text(draw(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole: written beside their place, then moved there in one step.

After a kill or on a full disk, the file that was there before is still there. A killed process may
leave a file beside it that carries the number of the process; the next write to the same place
removes it. A link stays one, and what is no file is refused: to replace a device or a pipe would
take it away.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from tsjax.base.checks import check
from tsjax.base.errors import NoSuchFile, NotAFile, NotWritable
from tsjax.base.input_files import FILE, FOLDER, kind_of


def path_of(path: Any, argument: str, wanted: str) -> str:
    is_path = isinstance(path, str | os.PathLike) and bool(os.fspath(path))
    check(is_path, argument, path, wanted)
    return os.fspath(path)


def place_of(path: Any, argument: str = "path") -> str:
    """Where writing to `path` makes or replaces a file, behind all links."""
    wanted = "a file, which may be new"
    name = path_of(path, argument, wanted)
    check(name != "-", argument, name, f"{wanted}, not standard output (a file of that name: ./-)")
    try:
        kind = kind_of(name)
    except FileNotFoundError:
        kind = FILE  # a new one
    except OSError as error:
        raise NotWritable(f"{argument}={name!r} is not valid: {wanted}; {error}") from error
    if kind != FILE:
        refusal = NotAFile if kind == FOLDER else NotWritable
        raise refusal(f"{argument}={name!r} is not valid: {wanted}, not {kind}")
    return os.path.realpath(name)


def check_place(path: Any, argument: str) -> str:
    """Refuses before a run what its end could not write; `place_of` what it can."""
    place, said = place_of(path, argument), f"{argument}={os.fspath(path)!r} is not valid"
    folder = os.path.dirname(place)
    if not os.path.isdir(folder):
        raise NoSuchFile(f"{said}: folder {folder!r} does not exist")
    check_writable(folder, f"{said}: a file in a folder that can be written")
    return place


def check_writable(folder: str, otherwise: str) -> None:
    """Makes a folder where there is none. One that can hold no new file is an error that says
    `otherwise`."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # without a name that a kill would leave
            pass
    except OSError as error:
        raise NotWritable(f"{otherwise}; {error}") from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[str]:
    """A place for a file that replaces the one at `path` when the block ends without error."""
    place = place_of(path)
    temporary = own_place(f"{place}.writing-")
    try:
        yield temporary
        os.replace(temporary, place)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_text(path: str | os.PathLike, text: str) -> None:
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def own_place(prefix: str) -> str:
    """`prefix` with the number of this process; those of processes that have ended are removed."""
    folder, beginning = os.path.split(prefix)
    for name in os.listdir(folder or "."):
        number = name.removeprefix(beginning)
        if name.startswith(beginning) and number.isdecimal() and not _is_running(int(number)):
            _remove(os.path.join(folder, name))
    return f"{prefix}{os.getpid()}"


def final_name(name: str) -> str:
    """The name that a file will have once it is whole."""
    return re.sub(r"\.writing-\d+$", "", name)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


def _remove(path: str) -> None:
    """What cannot be removed stays: it only takes space."""
    with contextlib.suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

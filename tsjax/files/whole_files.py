# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole: written beside their place, then moved there in one step.

After a kill or on a full disk, the file that was there before is still there. A killed process may
leave a file beside it that carries the number of the process; the next write to the same place
removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """A place beside `path` for a file that replaces it when the block ends without error."""
    temporary = own_place(f"{path}.writing-")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_text(path: str, text: str) -> None:
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

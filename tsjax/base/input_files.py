# SPDX-License-Identifier: Apache-2.0
"""Files that come from outside: opened only if they are files, parsed with one kind of error.

Knows that parsers of damaged files raise anything. Whatever it is becomes a ValueError that names
the file. Does not know what the files mean.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tsjax.base.errors import BadValue, NotSupported

LISTED = 20  # of a list of problems or names
_LONGEST_REASON = 1000  # characters of what a parser says
_LONGEST_INTEGER = 300  # digits; a longer one cannot become a float
_DEEPEST = 50  # levels of a JSON document
FILE, FOLDER = "a file", "a folder"
_KINDS = {stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER}
_KINDS |= {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


def kind_of(path: str | os.PathLike) -> str:
    """What lies there, in words; links are followed."""
    return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "a device")


def require_file(path: str | os.PathLike) -> None:
    """Refuses what is not a regular file before it is opened: opening a named pipe waits."""
    kind = kind_of(path)
    if kind != FILE:
        raise BadValue(f"{os.fspath(path)!r} is {kind}; it must be a file")


@contextlib.contextmanager
def filtered_log(name: str, keep: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Lets through only those records of a logger that are to `keep`."""
    logger = logging.getLogger(name)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@contextlib.contextmanager
def parsing(
    path: str | os.PathLike, trouble: str = "", *, argument: str | None = None
) -> Iterator[None]:
    """Turns what a parser raises into a ValueError: the file's name, `trouble` and the reason.

    What is not supported stays a NotImplementedError. Signals and missing libraries pass: they have
    nothing to do with the file. `argument` says as which argument the file was given.
    """
    name = repr(os.fspath(path)) if argument is None else f"{argument}={os.fspath(path)!r}"
    try:
        yield
    except (ImportError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except NotImplementedError as error:
        raise NotSupported(f"{name}{trouble}: {reason(error)}") from error
    except BaseException as error:  # Rust's panics do not derive from Exception
        raise BadValue(f"{name}{trouble}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """What an error says, shortened; with its type where the message alone would not do."""
    text = str(error).strip()
    if not text or not isinstance(error, ValueError | NotImplementedError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    half = _LONGEST_REASON // 2
    return text if len(text) <= 2 * half else f"{text[:half]} ... {text[-half:]}"


def listed(items: Iterable[str]) -> list[str]:
    """The first of many, and how many more there are."""
    items = list(items)
    more = len(items) - LISTED
    return items if more <= 0 else [*items[:LISTED], f"... and {more} more"]


def read_text(path: str | os.PathLike) -> str:
    require_file(path)
    with open(path, encoding="utf-8") as file, parsing(path, " is not a text in UTF-8"):
        return file.read()


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    require_file(path)
    with open(path, "rb") as file, parsing(path, " is not valid JSON"):
        content = json.loads(file.read().decode("utf-8"), parse_int=_integer)
        _check_depth(content)
    if not isinstance(content, dict):
        found = type(content).__name__
        raise BadValue(f"{os.fspath(path)!r} must hold a JSON object, not a {found}")
    return content


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_INTEGER:
        raise BadValue(f"an integer of {len(digits)} digits")
    return int(digits)


def _check_depth(content: Any) -> None:
    """Refuses values that are nested so deeply that `repr` could not show them in a message."""
    level = [content]
    for _ in range(_DEEPEST):
        inner = [v.values() if isinstance(v, dict) else v for v in level if type(v) in (dict, list)]
        level = [value for values in inner for value in values]
        if not level:
            return
    raise BadValue(f"values are nested more than {_DEEPEST} levels deep")

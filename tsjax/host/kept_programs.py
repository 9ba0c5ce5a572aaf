# SPDX-License-Identifier: Apache-2.0
"""Finished programs on disk, whole: who finds one there neither traces, lowers nor compiles it.

Knows files, and all that a program depends on beside what it computes. Does not know when a program
is wanted. A file is written whole or not at all, under a name made of what the program depends on;
one that is damaged counts as none. It holds pickles, so a folder that others may write is not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import os
import pickle
import platform
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

import pallas_kernels
from pallas_kernels import native
from tsjax.files.whole_files import replacing
from tsjax.host.compilation import executables_folder
from tsjax.host.info import cores

MOST_WHOLE = 2 * 2**30  # of one folder; the least recently used go first
ENDING = ".program"
TSJAX = Path(__file__).parent.parent
OURS = ("tsjax", "pallas_kernels", "numpy", "jax", "ml_dtypes", "builtins")
# Settings of jax that say where things are kept and what is told, and not what is computed.
ASIDE = ("cache", "log", "dump", "traceback", "transfer", "explain", "preemption", "distributed")


class NotKept(Exception):
    """What a program depends on cannot be told in words that another process would find."""


def read_program(words: str, device: Any) -> jax.stages.Compiled | None:
    """The program that depends on this, for its device; None where there is none that is whole."""
    folder = safe_folder()
    if folder is None:
        return None
    path = folder / name_of(words)
    try:
        found = path.read_bytes()
        digest, content = found[:32], found[32:]
        if hashlib.sha256(content).digest() != digest:
            raise ValueError("it was cut or changed")
        functions, *program = pickle.loads(content)
        for function in functions:  # XLA has to know a kernel before a program that calls it
            native.library().target(function)
        os.utime(path)  # so that it is not among the least recently used
        return serialize_executable.deserialize_and_load(*program, execution_devices=[device])
    except FileNotFoundError:
        return None
    except Exception:  # by another jax, say, or of another machine: it is made anew, and replaced
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def is_kept(words: str) -> bool:
    return bytes_of(words) > 0


def bytes_of(words: str) -> int:
    """Of its file; 0 where there is none."""
    folder = safe_folder()
    try:
        return 0 if folder is None else (folder / name_of(words)).stat().st_size
    except OSError:
        return 0


def keep_program(words: str, program: jax.stages.Compiled) -> None:
    """Where it cannot be kept, the next process makes it anew."""
    folder = safe_folder()
    if folder is None:
        return
    try:
        functions = native.library().registered
    except NotImplementedError:
        functions = ()
    try:
        content = pickle.dumps((functions, *serialize_executable.serialize(program)))
    except Exception:  # of a device, say, whose programs cannot be taken out
        return
    with contextlib.suppress(OSError):
        with replacing(folder / name_of(words)) as part:
            Path(part).write_bytes(hashlib.sha256(content).digest() + content)
        _remove_the_oldest(folder)


def name_of(words: str) -> str:
    """Of its file."""
    return hashlib.sha256(words.encode()).hexdigest()[:40] + ENDING


def safe_folder() -> Path | None:
    """Where programs are kept; None for nowhere, or where others could write."""
    folder = executables_folder()
    return folder if folder is not None and _is_ours_alone(folder) else None


@functools.cache
def _is_ours_alone(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(folder, os.W_OK)


def _remove_the_oldest(folder: Path) -> None:
    found = []
    for path in folder.glob(f"*{ENDING}*"):  # also what a killed process was writing
        with contextlib.suppress(OSError):
            facts = path.stat()
            found.append((facts.st_mtime, facts.st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= MOST_WHOLE:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        left -= size


# --- what a program depends on -------------------------------------------------------------------


def words_of(function: str, static: Any, arguments: Any, device: Any) -> str:
    """All that a program depends on; NotKept where another process could not say the same."""
    leaves, tree = jax.tree.flatten(arguments)
    # What holds no arrays is a part of the tree: it is told as what is static is.
    parts = (
        *of_process(device.platform), *map(str, settings()), device.device_kind, str(device.id),
        function, told(static), f"{tree}", *map(_form_of, leaves),
    )  # fmt: skip
    if " at 0x" in parts[-len(leaves) - 1]:
        raise NotKept(f"{tree}")
    return "\n".join(parts)


def _form_of(leaf: Any) -> str:
    """What a program is compiled for."""
    if isinstance(leaf, bool | int | float):
        return type(leaf).__name__
    return f"{leaf.dtype}{[*leaf.shape]}{'~' * bool(getattr(leaf, 'weak_type', False))}"


def told(value: Any) -> str:
    """A static setting in words, as far as they are the same in each process: of plain values,
    and of what tsjax, jax and NumPy define at the top of a module."""
    if value is None or isinstance(value, bool | int | float | str | bytes | np.dtype | np.generic):
        return repr(value)
    kind = type(value)
    if isinstance(value, type) or isinstance(value, FunctionType):
        return _named(value)
    name = _named(kind)
    if isinstance(value, enum.Enum):
        return f"{name}.{value.name}"
    if isinstance(value, np.ndarray):
        contents = hashlib.sha256(value.tobytes()).hexdigest()
        return f"{name}({value.dtype}, {value.shape}, {contents})"
    if dataclasses.is_dataclass(value):
        fields = (
            f"{field.name}={told(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
        )
        return f"{name}({', '.join(fields)})"
    if isinstance(value, tuple | list):
        return f"{name}({', '.join(map(told, value))})"
    if isinstance(value, dict):
        return f"{name}({', '.join(sorted(f'{told(k)}: {told(v)}' for k, v in value.items()))})"
    if isinstance(value, set | frozenset):
        return f"{name}({', '.join(sorted(map(told, value)))})"
    raise NotKept(f"{name}: its contents are not known")


def _named(thing: Any) -> str:
    module, name = thing.__module__, thing.__qualname__
    if module.partition(".")[0] not in OURS or "<" in name:
        raise NotKept(f"{module}.{name} is not of tsjax")
    return f"{module}.{name}"


def settings() -> tuple[Any, ...]:
    """Of jax, in this thread."""
    return tuple(getattr(jax.config, name, None) for name in setting_names())


@functools.cache
def setting_names() -> tuple[str, ...]:
    names = sorted(jax.config.values)
    return tuple(name for name in names if not any(part in name for part in ASIDE))


@functools.cache
def of_process(device: str) -> tuple[str, ...]:
    """What does not change while a process runs."""
    path = native.status(try_now=True).path if device == "cpu" else None
    kernels = path and Path(path).name  # of their contents
    versions = (module.__version__ for module in (jax, jaxlib, flax, np))
    environment = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(("XLA_", "TSJAX_", "LIBTPU_")) and name != "TSJAX_CACHE"
    )
    return (
        sys.version, platform.machine(), native.cpu(), str(cores()), str(kernels), _code(),
        *versions, jax.devices(device)[0].client.platform_version, *environment,
    )  # fmt: skip


@functools.cache
def _code() -> str:
    """A digest of the sources that programs are made of."""
    digest = hashlib.sha256()
    for root in (TSJAX, Path(pallas_kernels.__file__).parent):
        for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()

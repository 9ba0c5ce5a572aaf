# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for this machine's CPU when they are first wanted, and keeps the result.

The library lies in the user's cache folder under a key of all that it depends on: sources,
compiler, flags, jaxlib and CPU. Its file is named by its contents, so a damaged one is not loaded
but built anew, and processes that build at the same time do not meet.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.cache_folder import cache_folder

SWITCH, MORE_FLAGS, COMPILER = "TSJAX_NATIVE", "TSJAX_NATIVE_FLAGS", "CXX"
COMPILERS = ("c++", "g++", "clang++")
# -ffp-contract: which products and sums are joined is written in the sources.
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-ffp-contract=off", "-pthread")
DTYPES = ("float32", "bfloat16")


class Status(NamedTuple):
    """Whether the kernels are used in this process, and why.

    Attributes:
      state: "ready", "off" (by the user, or the CPU is not the default device), "failed" (there is
        no compiler, or it failed) or "not tried".
      reason: one line for people.
      compiler: its path; None if none was found.
      path: of the library, if there is one.
      built: whether this process compiled it.
    """

    state: str
    reason: str
    compiler: str | None = None
    path: str | None = None
    built: bool = False


class Library:
    """The loaded library. Programs name its functions with its hash, so a program never runs
    another version of a kernel than it was compiled with."""

    def __init__(self, path: Path, digest: str):
        self._loaded = ctypes.CDLL(str(path))
        self._digest = digest[:16]
        self._registered: set[str] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Library({self._digest!r})"

    @property
    def registered(self) -> tuple[str, ...]:
        """The functions that XLA knows so far."""
        return tuple(sorted(name.removesuffix(f"_{self._digest}") for name in self._registered))

    def function(self, name: str, arguments: Sequence[Any]) -> Any:
        """A function that Python calls, and no program; it returns an int."""
        found = getattr(self._loaded, name)
        found.argtypes = arguments
        return found

    def target(self, function: str) -> str:
        """The name of a function in programs; XLA knows it from here on."""
        name = f"{function}_{self._digest}"
        with self._lock:
            if name not in self._registered:
                handler = jax.ffi.pycapsule(getattr(self._loaded, function))
                jax.ffi.register_ffi_target(name, handler, platform="cpu")
                self._registered.add(name)
        return name


def check_supported(dtype, *, head_dim: int = 8) -> None:
    """Raises NotImplementedError for what no kernel here serves."""
    if dtype not in DTYPES:
        raise NotImplementedError(f"type {dtype}: only {', '.join(DTYPES)}")
    if head_dim % 8:
        raise NotImplementedError(f"head_dim {head_dim}: a multiple of 8")


def serves(dtype, *, head_dim: int) -> bool:
    """Whether a model with such arrays runs by these kernels, where it lies on a CPU."""
    try:
        check_supported(dtype, head_dim=head_dim)
        library()
    except NotImplementedError:
        return False
    return True


def all_rows() -> tuple[jax.Array]:
    """The operand `live` of a kernel that computes all rows."""
    return (jnp.zeros((0,), jnp.int32),)


_lock = threading.Lock()
_library: Library | None = None
_status = Status("not tried", "no program for a CPU was traced yet")


def library() -> Library:
    """The kernels, compiled if this machine has none; NotImplementedError where they are not to
    be had. Is tried once per process."""
    global _library, _status
    with _lock:
        if _status.state == "not tried":
            if os.environ.get(SWITCH) != "0" and (backend := jax.default_backend()) != "cpu":
                _status = Status("off", f"the default device is a {backend}")
            else:
                _library, _status = _found()
                if _status.state == "failed":
                    _say(f"{_status.reason}; plain XLA runs, which is slower")
        if _library is None:
            raise NotImplementedError(_status.reason)
        return _library


def on_host() -> Library | None:
    """The kernels for what no device computes, beside a GPU too; None where they are not to be
    had."""
    with _lock:
        return _found()[0]


def status(*, try_now: bool = False) -> Status:
    """Whether the kernels are used; with `try_now` this compiles or loads them first."""
    if try_now:
        try:
            library()
        except NotImplementedError:
            pass
    return _status


@functools.cache
def _found() -> tuple[Library | None, Status]:
    if os.environ.get(SWITCH) == "0":
        return None, Status("off", f"{SWITCH}=0")
    compiler = find_compiler()
    if compiler is None:
        tried = os.environ.get(COMPILER) or ", ".join(COMPILERS)
        return None, Status("failed", f"no C++ compiler for the CPU kernels (tried {tried})")
    flags = (*FLAGS, *shlex.split(os.environ.get(MORE_FLAGS, "")))
    base = cache_folder()
    folder = base / "native" / _key(compiler, flags) if base is not None else None
    if folder is not None and (found := _load_kept(folder)):
        path, kept = found
        return kept, Status("ready", "compiled earlier", compiler, str(path))
    begin = time.perf_counter()
    _say("compiling the CPU kernels (once on this machine, some seconds) ...")
    try:
        path = _build(compiler, flags, folder)
        built = _load(path)
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", None) or str(error)
        line = next((line for line in text.splitlines() if "error" in line), text.strip()[:200])
        return None, Status("failed", f"{compiler} did not make the CPU kernels: {line}", compiler)
    seconds = time.perf_counter() - begin
    reason = f"compiled in {seconds:.1f} s"
    if folder is None or folder not in path.parents:
        reason += ", not kept: " + (
            "TSJAX_CACHE is empty" if base is None else f"{base} is not writable"
        )
    return built, Status("ready", reason, compiler, str(path), built=True)


def find_compiler() -> str | None:
    """$CXX, or the first of the usual names."""
    own = os.environ.get(COMPILER)
    for name in [own] if own else COMPILERS:
        if path := shutil.which(name):
            return path
    return None


def sources() -> dict[str, str]:
    """The C++ files by their paths in this package."""
    root = resources.files("pallas_kernels")
    return {
        f"{folder.name}/{file.name}": file.read_text()
        for folder in sorted(root.iterdir(), key=lambda entry: entry.name)
        if folder.is_dir()
        for file in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if file.name.endswith((".cc", ".h"))
    }


def _key(compiler: str, flags: Sequence[str]) -> str:
    real = os.path.realpath(compiler)
    facts = os.stat(real)
    parts = (
        *(part for item in sources().items() for part in item),
        real, str(facts.st_size), str(facts.st_mtime_ns),
        *flags, jax.__version__, metadata.version("jaxlib"), cpu(),
    )  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
        facts = [line for line in lines if line.partition(":")[0].strip() in wanted]
    except OSError:
        facts = [platform.processor()]
    return "\n".join([platform.machine(), *facts])


def _load_kept(folder: Path) -> tuple[Path, Library] | None:
    for path in sorted(folder.glob("*.so")):
        try:
            return path, _load(path)
        except OSError:
            continue  # damaged, or removed by somebody else
    return None


def _load(path: Path) -> Library:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if path.stem != digest:
        raise OSError(f"{path} is not what its name says")
    return Library(path, digest)


def _build(compiler: str, flags: Sequence[str], folder: Path | None) -> Path:
    """Compiles all sources side by side; returns the library, in `folder` if it can be there."""
    with tempfile.TemporaryDirectory(prefix="tsjax-native-") as name:
        work = Path(name)
        texts = sources()
        for path, text in texts.items():
            (work / path).parent.mkdir(exist_ok=True)
            (work / path).write_text(text)
        include = jax.ffi.include_dir()
        units = _units({path: len(text) for path, text in texts.items() if path.endswith(".cc")})
        for index, unit in enumerate(units):
            (work / f"{index}.cc").write_text("".join(f'#include "{path}"\n' for path in unit))
        objects = [f"{index}.o" for index in range(len(units))]
        command = [compiler, *flags, "-isystem", include, "-c"]
        _run_all([[*command, f"{index}.cc"] for index in range(len(units))], work)
        _run_all([[compiler, *flags, "-shared", *objects, "-o", "kernels.so"]], work)
        built = work / "kernels.so"
        try:
            if folder is not None:
                return _keep(built, folder)
        except OSError:
            pass  # status says that it is not kept
        return _keep(built, Path(_folder_of_this_process().name))


def _units(sizes: Mapping[str, int]) -> list[list[str]]:
    """The sources in so many groups of about one size as there are CPUs: a group reads the
    headers once, which takes as long as a small kernel."""
    units: list[list[str]] = [[] for _ in range(min(os.cpu_count() or 1, len(sizes)))]
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        min(units, key=lambda unit: sum(sizes[other] for other in unit)).append(path)
    return units


def _keep(built: Path, folder: Path) -> Path:
    """Copies a library to a folder under the name of its contents, whole or not at all."""
    content = built.read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        path = folder / f"{hashlib.sha256(content).hexdigest()}.so"
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    return path


@functools.cache
def _folder_of_this_process() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="tsjax-native-")


def _run_all(commands: Sequence[Sequence[str]], folder: Path) -> None:
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)
        for command in commands
    ]
    for process, command in zip(running, commands, strict=True):
        output, errors = process.communicate()
        if process.returncode:
            for other in running:
                other.kill()
                other.wait()
            raise subprocess.CalledProcessError(process.returncode, command, output, errors)


def _say(line: str) -> None:
    print(f"tsjax: {line}", file=sys.stderr, flush=True)

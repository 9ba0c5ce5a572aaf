# SPDX-License-Identifier: Apache-2.0
"""tsjax info: the machine, and what of this package is used on it.

Knows the machine, versions and folders. Whatever is missing, a compiler or a device, is said and is
no error: this is what one looks at when something else has failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import native
from pallas_kernels.cache_folder import cache_folder
from pallas_kernels.device import table, table_file
from tsjax.base.input_files import reason
from tsjax.host.compilation import programs_folder
from tsjax.host.memory import main_memory

PACKAGES = ("tsjax", "jax", "jaxlib", "numpy", "transformers")
DRIVER = "/proc/driver/nvidia/version"
# jax's own names for the share of a GPU's memory that it takes, and its share if neither is set.
MEMORY_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
USUAL_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """Attributes:
    memory: bytes that programs may use; None where it is the machine's own.
    capability: CUDA's number for what it can do, such as "9.0"; None for what is no such GPU.
    tuned: of each kernel, the shapes whose block sizes were measured on this kind of GPU.
    """

    name: str
    kind: str
    memory: int | None
    capability: str | None = None
    tuned: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Folder:
    """Attributes:
    path: None where nothing is kept.
    writable: whether it can be written, or made where it does not exist.
    sizes: bytes of each thing in it.
    """

    path: str | None
    writable: bool
    sizes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Info:
    """Attributes:
    versions: of Python and of packages; a package that is missing has none.
    cores: that this process may use.
    memory: bytes of the machine, or those that a container allows.
    devices: those of jax's first platform.
    trouble: why jax has no device.
    driver: version of NVIDIA's driver; None where it is not found.
    runtime: what jax says of the libraries below it, such as CUDA's version.
    memory_share: of a GPU's memory, what jax takes; None where there is no GPU or no limit.
    xla_flags: the variable XLA_FLAGS; None where it is not set.
    operations: for each the implementations that serve the platform, the first choice first.
    native: whether the kernels for CPUs are there, and why; also their compiler and where they lie.
    cache: what is kept between processes.
    programs: where commands keep compiled programs: in `cache`, or where jax was told to.
    """

    versions: dict[str, str]
    system: str
    cpu: str
    cores: int
    memory: int | None
    devices: tuple[DeviceFacts, ...]
    trouble: str | None
    driver: str | None
    runtime: str | None
    memory_share: float | None
    xla_flags: str | None
    operations: dict[str, tuple[str, ...]]
    native: native.Status
    cache: Folder
    programs: str | None


def info() -> Info:
    from pallas_kernels.operations import implementations  # those of GPUs take time to import

    devices: list[Any] = []
    trouble = None
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # a platform was asked for that is not here
        asked: Any = jax.config
        trouble = f"jax_platforms={asked.jax_platforms!r}: {' '.join(reason(error).split())}"
    # jax has one name for the devices of two makers; programs are compiled for one of them.
    kind = devices[0].platform if devices else "cpu"
    runtime = " ".join(devices[0].client.platform_version.split()) if devices else None
    if kind == "gpu":
        kind = "rocm" if "rocm" in str(runtime).lower() else "cuda"
    return Info(
        versions=versions(PACKAGES),
        system=platform.platform(),
        cpu=cpu_name(),
        cores=cores(),
        memory=main_memory(),
        devices=tuple(map(_device, devices)),
        trouble=trouble,
        driver=_driver(),
        runtime=runtime,
        memory_share=memory_share() if kind in ("cuda", "rocm") else None,
        xla_flags=os.environ.get("XLA_FLAGS") or None,
        operations=implementations(kind) if devices else {},
        native=native.status(try_now=True),
        cache=_folder(cache_folder()),
        programs=_programs(),
    )


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Python's and those of packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def facts(packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """What stands beside a figure: device, versions and date."""
    device = jax.devices()[0]
    return {
        "device": f"{cpu_name()} (CPU)" if device.platform == "cpu" else device.device_kind,
        "cpus": cores(),
        "versions": versions(packages),
        "date": datetime.date.today().isoformat(),
    }


def cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device(device: Any) -> DeviceFacts:
    stats = device.memory_stats() or {}
    capability = getattr(device, "compute_capability", None)
    tuned = table(device.device_kind) if capability else {}
    return DeviceFacts(
        name=f"{device.platform}:{device.id}",
        kind=device.device_kind,
        memory=stats.get("bytes_limit"),
        capability=capability,
        tuned={name: len(shapes) for name, shapes in tuned.items()},
    )


def _driver() -> str | None:
    with contextlib.suppress(OSError), open(DRIVER, errors="replace") as file:
        found = re.search(r"\d{3,}\.\d+(\.\d+)?", file.readline())
        return found and found[0]
    return None


def memory_share() -> float | None:
    """The share of a GPU's memory that jax takes by its variables; None where it has no limit."""
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        return None
    chosen = next((value for name in MEMORY_SHARES if (value := os.environ.get(name))), None)
    with contextlib.suppress(ValueError):
        return USUAL_SHARE if chosen is None else float(chosen)
    return None


def _folder(path: Path | None) -> Folder:
    if path is None:
        return Folder(None, False, {})
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    sizes = {}
    with contextlib.suppress(OSError):
        sizes = {entry.name: _bytes_in(entry) for entry in sorted(path.iterdir())}
    return Folder(str(path), writable, sizes)


def _bytes_in(path: Path) -> int:
    """The size of a file, or of all files in a folder; what is removed meanwhile counts nothing."""
    total = 0
    for entry in [path, *path.rglob("*")] if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            total += entry.stat().st_size if entry.is_file() else 0
    return total


def _programs() -> str | None:
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return None
    folder = config.jax_compilation_cache_dir or programs_folder()
    return folder and str(folder)


def info_lines(known: Info) -> list[str]:
    names = ", ".join(f"{name} {version}" for name, version in known.versions.items())
    memory = _size(known.memory) if known.memory is not None else "unknown"
    rows = [
        ("versions", names),
        ("system", known.system),
        ("CPU", f"{known.cpu}, {known.cores} cores, {memory} of memory"),
    ]
    for device in known.devices:
        own = _size(device.memory) if device.memory is not None else "memory of the machine"
        able = f", compute capability {device.capability}" if device.capability else ""
        rows.append(("device", f"{device.name}, {device.kind}, {own}{able}"))
    if known.trouble is not None:
        rows.append(("device", f"none: {known.trouble}"))
    rows += _rows_of_gpus(known)
    rows.append(("XLA_FLAGS", known.xla_flags or "not set"))
    for name, choices in known.operations.items():
        first, *others = choices
        rest = f", for what it cannot serve {', '.join(others)}" if others else ""
        rows.append((name, first + rest))
    rows.append(("CPU kernels", f"{known.native.state}: {known.native.reason}"))
    rows += [("", path) for path in (known.native.compiler, known.native.path) if path]
    cache = known.cache.path or "none: TSJAX_CACHE is empty, or no home is known"
    unwritable = known.cache.path and not known.cache.writable
    rows.append(("cache", cache + (", which cannot be written" if unwritable else "")))
    rows += [("", f"{name}: {_size(size)}") for name, size in known.cache.sizes.items()]
    rows.append(("programs", known.programs or "commands keep none"))
    return [f"{label:22}{text}".rstrip() for label, text in rows]


def _rows_of_gpus(known: Info) -> list[tuple[str, str]]:
    gpus = [device for device in known.devices if device.capability]
    driver = known.driver or f"not found in {DRIVER}"
    if known.driver and not gpus:
        driver += "; jax uses no GPU of it: docs/first_hour.md"
    rows = [("NVIDIA driver", driver)]
    if gpus:
        rows.append(("jax runs on", known.runtime or "unknown"))
        share = "no limit" if known.memory_share is None else f"{known.memory_share:.0%}"
        rows.append(("share of its memory", f"{share}; {MEMORY_SHARES[1]} changes it"))
    for kind, tuned in {device.kind: device.tuned for device in gpus}.items():
        shapes = ", ".join(f"{name} {count} shapes" for name, count in tuned.items())
        if file := table_file(kind):
            shapes += f", in {file.name}"
        rows.append(
            ("measured block sizes", f"{kind}: {shapes or 'none, docs/kernels.md derives them'}")
        )
    return rows


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

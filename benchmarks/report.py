# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: the facts beside the figures, and where they are written.

The commands for a GPU share more: a time budget, a file that is written again after every case,
programs compiled side by side, and the bandwidth of a copy. They may run from a copy of the
checkout without its history: the variable TSJAX_COMMIT then names the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

from tools.facts import facts as facts
from tools.facts import todays_command as todays_command
from tsjax.base.input_files import read_json
from tsjax.files.whole_files import write_text
from tsjax.measure.timing import Rounds, fill

ROOT = Path(__file__).resolve().parent.parent
BEGAN = time.monotonic()
NOMINAL = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}  # bytes per second by data sheet


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser for the benchmark of this name with --out; `about` is its module's docstring."""
    text = (about or "").splitlines()[0]
    run = name if name.startswith("experiments") else f"benchmarks {name}"
    parser = argparse.ArgumentParser(prog=f"python -m {run}", description=text)
    parser.add_argument("--out", type=_folder, help="folder that receives the JSON document")
    return parser


def _folder(name: str) -> Path:
    if os.path.lexists(name) and not os.path.isdir(name):
        raise argparse.ArgumentTypeError(f"{name!r} is not valid: a folder, which may be new")
    return Path(name)


def save(document: dict[str, Any], out: Path | None, name: str) -> Path | None:
    """The document as it stands, in `out`; a run that is killed leaves the last one whole."""
    if out is None:
        return None
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    write_text(path, json.dumps(document, indent=1) + "\n")
    return path


def series(out: Path | None, name: str, asked: dict[str, Any], entries: str) -> dict[str, Any]:
    """A document whose list of `entries` is measured part by part: that of an earlier part, if it
    was asked the same, or a new one."""
    document = {**facts(), **asked, entries: []}
    path = None if out is None else out / f"{name}.json"
    if path is None or not path.exists():
        return document
    known = read_json(path)
    for field, value in asked.items():
        if known.get(field) != value:
            raise SystemExit(
                f"{path} is of another series: its {field} is {known.get(field)!r}, not {value!r}; "
                "another --out, or the same flags"
            )
    return {**document, entries: known[entries]}


def write(document: dict[str, Any], out: Path | None, name: str) -> None:
    """One JSON document as the last line on stdout, and as a file in `out`."""
    document = {**facts(), **document}
    if path := save(document, out, name):
        print(f"written: {path}", file=sys.stderr)
    print(json.dumps(document))


def first_line(error: BaseException | str) -> str:
    """What went wrong, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if isinstance(error, BaseException):
        text = f"{type(error).__name__}: {text}"
    return text[:300]


def show_bars(document: dict[str, Any]) -> None:
    """What was asked of the figures, and whether they met it."""
    for bar in document.get("bars", []):
        verdict = "met" if bar["met"] else "MISSED"
        print(f"{verdict:7}{bar['value']:7.3f} against {bar['bar']}: {bar['what']}")


def interleaved(
    calls: Mapping[Any, Callable[[], Any]], rounds: int, *, warmup: int = 1, **how: Any
) -> Rounds:
    """Several calls side by side, so that a machine whose speed drifts favours none of them; `how`
    is that of `fill`."""
    found = Rounds({name: [] for name in calls}, {name: [] for name in calls}, {})
    for _ in fill(found, calls, rounds, warmup, **how):
        pass
    return found


class Budget:
    """Minutes since the start of the process after which no new case begins."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic, began=BEGAN):
        self.minutes, self._clock, self._began = minutes, clock, began

    @property
    def used(self) -> float:
        """Seconds."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, 60 * self.minutes - self.used)

    @property
    def is_used_up(self) -> bool:
        return not self.left


def add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=float, default=9, help="no case begins after this many minutes"
    )


def attempt_all(tasks: dict[Any, Callable[[], Any]], workers: int, timeout: float | None = None):
    """What each task returns or raises, the errors as values. They run side by side.

    XLA compiles without Python's lock, so compilations take turns only while they are traced. A
    task that is not done in time is a TimeoutError; its thread goes on.
    """
    pool = futures.ThreadPoolExecutor(workers)
    submitted = {name: pool.submit(task) for name, task in tasks.items()}
    futures.wait(submitted.values(), timeout)
    results = {}
    for name, future in submitted.items():
        if future.done():
            results[name] = future.exception() or future.result()
        else:
            results[name] = TimeoutError(f"not done after {timeout:.0f} s")
            _abandoned.append(name)
    pool.shutdown(wait=False, cancel_futures=True)
    return results


_abandoned: list = []


def leave() -> None:
    """Ends the process if `attempt_all` has given up threads, which Python would wait for."""
    if not _abandoned:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def on_gpu(parser: argparse.ArgumentParser, quick: bool) -> bool:
    """Whether there is a GPU; without one only the quick variant runs."""
    import jax

    is_gpu = jax.default_backend() == "gpu"
    if not is_gpu and not quick:
        parser.error("this needs a GPU; --quick runs tiny shapes on a CPU")
    return is_gpu


def begun(is_gpu: bool, **more: Any) -> dict[str, Any]:
    """The document of a command for a GPU, with the bandwidth of a copy, before the first case."""
    import jax

    from tsjax.measure.bandwidth import copier

    kind = jax.devices()[0].device_kind
    bandwidth = copier(2**31 if is_gpu else 2**25)()
    print(f"{kind}: a copy moves {bandwidth / 1e9:.0f} GB/s")
    return {
        **facts(),
        **more,
        "copy_bytes_per_second": bandwidth,
        "nominal_bytes_per_second": nominal_bandwidth(kind),
        "complete": False,
        "rows": [],
        "left_out": [],
    }


def nominal_bandwidth(device_kind: str) -> float | None:
    return next((value for name, value in NOMINAL.items() if name in device_kind), None)


def use_configs() -> None:
    """Makes `tsjax.configs` importable in a checkout that is not installed: see setup.py."""
    try:
        import tsjax.configs  # noqa: F401
    except ModuleNotFoundError:
        import configs

        sys.modules["tsjax.configs"] = configs

# SPDX-License-Identifier: Apache-2.0
"""Breaks a copy of the library in one place at a time, and says which test notices.

python -m tools.mutate                     every change against the tests that it names
python -m tools.mutate NAME ...            some of them
python -m tools.mutate --whole NAME ...    against the default suite
python -m tools.mutate NAME -- -n 0        with more options for pytest

The checkout itself stays as it is. Exits with 1 where a change survives or cannot be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.mutate.changes import CHANGES, Change

KILLED, SURVIVED, ERROR = "killed", "survived", "error"
ITS_OWN_TESTS = "tests/test_mutate.py"  # of a broken copy these always fail
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)


class BadChange(ValueError):
    """A change that cannot be made, which is a mistake of the list."""


class Outcome(NamedTuple):
    """Attributes:
    kind: KILLED, SURVIVED or ERROR.
    test: the first test that failed.
    seconds: of the tests, their start included.
    detail: what went wrong, of an ERROR.
    """

    kind: str
    test: str | None = None
    seconds: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        if self.kind == KILLED:
            return f"killed by {self.test} in {self.seconds:.1f} s"
        if self.kind == SURVIVED:
            return f"SURVIVED {self.seconds:.1f} s of tests"
        return f"ERROR: {self.detail}"


def place_of(change: Change, root: Path) -> Path:
    """The one file that has the old text, once."""
    where = root / change.file
    files = sorted(where.rglob("*.py")) if where.is_dir() else [where] if where.exists() else []
    counts = {file: file.read_text().count(change.old) for file in files}
    if sum(counts.values()) != 1:
        found = sum(counts.values())
        raise BadChange(f"{change.name}: its old text is {found} times in {change.file}, not once")
    (file,) = [file for file, count in counts.items() if count]
    return file


def copy_tree(tree: Path, folder: Path) -> Path:
    """The copy: files that git knows or would add, as they are now."""
    into = folder / "tree"
    listing = ["git", "-C", str(tree), "ls-files", "-z", "-co", "--exclude-standard"]
    names = subprocess.run(listing, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (tree / name).is_file():  # not one that was removed
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, into / name)
    # Found by this name only where tsjax is installed: from the checkout, not from the copy.
    (folder / "names").mkdir()
    (folder / "names/tsjax_convert").symlink_to(into / "convert")
    return into


def python(root: Path, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Python in the copy, which imports the copy."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, root.parent / "names")))}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, timeout=timeout
    )


def run_tests(root: Path, arguments: Sequence[str], timeout: float) -> Outcome:
    begun = time.perf_counter()
    options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", *arguments]
    try:
        done = python(root, "-m", "pytest", *options, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Outcome(ERROR, detail=f"no end after {timeout:.0f} s")
    seconds = time.perf_counter() - begun
    if done.returncode == 0:
        return Outcome(SURVIVED, seconds=seconds)
    failed = _FAILED.search(done.stdout)
    if failed is None:  # nothing was collected, or pytest itself ended
        tail = " | ".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        return Outcome(ERROR, seconds=seconds, detail=f"pytest exited {done.returncode}: {tail}")
    return Outcome(KILLED, failed[1], seconds)


def try_change(change: Change, root: Path, arguments: Sequence[str], timeout: float) -> Outcome:
    """Makes a change in the copy, runs tests, and takes it back."""
    try:
        file = place_of(change, root)
    except BadChange as error:
        return Outcome(ERROR, detail=str(error))
    whole = file.read_text()
    file.write_text(whole.replace(change.old, change.new))
    try:
        # Compiled files are known by size and second, which a change may leave as they were.
        shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
        imported = python(root, "-c", "import tsjax", timeout=timeout)
        if imported.returncode:
            why = imported.stderr.strip().splitlines()[-1:]
            return Outcome(ERROR, detail=f"import tsjax fails: {' '.join(why)}")
        return run_tests(root, arguments, timeout)
    finally:
        file.write_text(whole)
        shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)


def tests_of(changes: Sequence[Change], whole: bool) -> list[str]:
    named = dict.fromkeys(test for change in changes for test in change.tests)
    return [f"--ignore={ITS_OWN_TESTS}"] if whole else [*named]


def selected(names: Sequence[str], changes: Sequence[Change]) -> list[Change]:
    known = {change.name: change for change in changes}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no such change: {', '.join(unknown)}; --list names them")
    return [known[name] for name in names] if names else [*changes]


def main(argv: Sequence[str] | None = None, changes: Sequence[Change] = CHANGES) -> int:
    given = [*(sys.argv[1:] if argv is None else argv)]
    cut = given.index("--") if "--" in given else len(given)
    given, options = given[:cut], given[cut + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="changes; all where none is named")
    parser.add_argument("--list", action="store_true", help="says what there is and ends")
    parser.add_argument("--tree", type=Path, default=Path.cwd(), help="the checkout (this folder)")
    parser.add_argument("--whole", action="store_true", help="runs the default suite each time")
    parser.add_argument("--baseline", action="store_true", help="runs the tests unbroken first")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for each change")
    parser.add_argument("--json", type=Path, metavar="OUT", help="writes what was found")
    args = parser.parse_args(given)
    chosen = selected(args.names, changes)
    if args.list:
        for change in chosen:
            print(f"{change.name}: {change.meaning}")
        return 0

    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tsjax-mutate-") as folder:
        root = copy_tree(args.tree, Path(folder))
        if args.baseline:
            tests = [*tests_of(chosen, args.whole), *options]
            found = run_tests(root, tests, args.timeout)
            if found.kind != SURVIVED:
                print(f"the unbroken library: {found}")
                return 1
            print(f"the unbroken library passes in {found.seconds:.1f} s", flush=True)
        for change in chosen:
            tests = [*tests_of([change], args.whole), *options]
            outcome = try_change(change, root, tests, args.timeout)
            print(f"{change.name}: {outcome}", flush=True)
            records.append({"name": change.name, **outcome._asdict(), "tests": [*change.tests]})
            if args.json:
                args.json.write_text(json.dumps(records, indent=1) + "\n")
    killed = sum(record["kind"] == KILLED for record in records)
    print(f"{killed} of {len(records)} killed")
    return 0 if killed == len(records) else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The list of changes fits the library and the tests, and the tool tells what a toy's tests do."""

import json
import subprocess
from pathlib import Path

import pytest

from tools.mutate.__main__ import main, place_of
from tools.mutate.changes import CHANGES, Change

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_each_change_can_be_made_and_has_tests(change):
    assert change.old != change.new and change.tests
    place_of(change, ROOT)
    for test in change.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), test


def test_no_two_have_one_name():
    assert len({change.name for change in CHANGES}) == len(CHANGES)


# --- a toy ---------------------------------------------------------------------------------------

ADD = "def add(a, b):\n    return a + b\n"
TESTS = "from tsjax.sums import add\n\n\ndef test_two():\n    assert add(0, 2) == 2\n"


def toy(name: str, old: str = "a + b", new: str = "a - b", **more) -> Change:
    found = dict(meaning="", file="tsjax/sums.py", tests=("tests/test_sums.py",)) | more
    return Change(name=name, old=old, new=new, **found)


TOYS = {
    toy("killed"): "killed by tests/test_sums.py::test_two",
    toy("survived", new="b + a"): "SURVIVED",
    toy("absent", old="a * b"): "ERROR: absent: its old text is 0 times in tsjax/sums.py, not once",
    toy("twice", old="b"): "ERROR: twice: its old text is 2 times",
    toy("broken", new="a +"): "ERROR: import tsjax fails: SyntaxError",
    toy("no_such_test", tests=("tests/test_sums.py::test_3",)): "ERROR: pytest exited 4",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    files = {
        "tsjax/__init__.py": "from tsjax import sums as sums\n",
        "tsjax/sums.py": ADD,
        "tests/test_sums.py": TESTS,
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-q'\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q", folder], check=True)
    return folder


@pytest.mark.wide
def test_it_tells_what_survives_what_is_killed_and_what_cannot_be_tried(tree, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["--baseline", f"--tree={tree}", f"--json={out}"], [*TOYS][:-1]) == 1
    begun, *lines, total = capsys.readouterr().out.splitlines()
    assert begun.startswith("the unbroken library passes")
    for line, (change, said) in zip(lines, TOYS.items(), strict=False):
        assert line.startswith(f"{change.name}: {said}")
    assert total == f"1 of {len(TOYS) - 1} killed"
    assert [one["kind"] for one in json.loads(out.read_text())][:2] == ["killed", "survived"]
    assert (tree / "tsjax/sums.py").read_text() == ADD


@pytest.mark.wide
def test_it_exits_with_0_where_all_are_killed(tree, capsys):
    assert main(["--whole", "killed", f"--tree={tree}"], [*TOYS]) == 0
    assert "1 of 1 killed" in capsys.readouterr().out
    assert main(["no_such_test", f"--tree={tree}"], [*TOYS]) == 1
    assert "no_such_test: ERROR: pytest exited 4" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no such change: unknown"):
        main(["unknown"], [*TOYS])

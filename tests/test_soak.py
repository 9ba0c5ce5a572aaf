# SPDX-License-Identifier: Apache-2.0
"""The soak: what was recorded is without trouble, trouble is named, and a small one as a whole."""

import copy
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import soak_troubles

ROOT = Path(__file__).resolve().parent.parent
RECORDED = json.loads((ROOT / "benchmarks/results/cpu/soak.json").read_text())


def test_what_was_recorded_is_no_trouble():
    assert soak_troubles.troubles(RECORDED) == RECORDED["troubles"] == []


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (["parts", 0, "sha256"], "x", "killed: other tokens than plain decoding's"),
        (["parts", 1, "sha256_of_first"], "x", "the first 2000 tokens are not the same"),
        (["parts", 0, "finish_reason"], None, "killed: ended after 102400 tokens"),
        (["parts", 0, "programs", "made_again"], {"decode": 1}, "killed: compiled again"),
        (["parts", 0, "lives", 0, "exit_code"], 1, "killed, life 1: exit code 1, not -9"),
        (["parts", 0, "second_run", "exit_code"], 0, "a second run was not refused"),
        (["parts", 1, "lives", 0, "result", "problems"], [], "full disk: it was not full"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_as_it_should_be_is_named(place, value, said):
    found = copy.deepcopy(RECORDED)
    *way, last = place
    inner = found
    for name in way:
        inner = inner[name]
    inner[last] = value
    assert any(said in one for one in soak_troubles.troubles(found)), soak_troubles.troubles(found)


@pytest.mark.slow
def test_a_small_soak(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "soak", "--new-tokens", "4000", "--kills", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    document = json.loads((tmp_path / "soak.json").read_text())
    assert document == json.loads(done.stdout.splitlines()[-1]) and document["troubles"] == []
    parts = {part["part"]: part for part in document["parts"]}
    assert list(parts) == ["plain", "killed", "full disk"]
    assert document["tokens_of_plain_decoding"]["from"] == "plain"
    assert len({parts[name]["sha256"] for name in ("plain", "killed")}) == 1
    assert {part["sha256_of_first"] for part in parts.values() if "left_out" not in part} == {
        parts["plain"]["sha256_of_first"]
    }
    ends = Counter(one.get("signal") for one in parts["killed"]["lives"])
    assert ends == {"SIGKILL": 2, "SIGINT": 1, "SIGTERM": 1, None: 1}
    for part in parts.values():
        assert {"commit", "date", "device", "cpus"} <= set(part["facts"])

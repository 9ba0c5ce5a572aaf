# SPDX-License-Identifier: Apache-2.0
"""The soak: when its processes end, what one of them notes, what counts as trouble, and a small
one as a whole."""

import copy
import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import helpers
import jax
import pytest

import tsjax
from benchmarks import longrun, soak, soak_life, soak_troubles
from tsjax.host import compilation
from tsjax.host.saved_run import read_run

ROOT = Path(__file__).resolve().parent.parent


def test_the_ends_are_as_many_as_asked_and_the_same_for_a_seed():
    ends = soak.planned(100_000, 20, seed=0)
    assert ends == soak.planned(100_000, 20, seed=0) != soak.planned(100_000, 20, seed=1)
    hows = Counter((end.how, signal.Signals(end.number).name) for end in ends)
    assert hows == {
        ("within a chunk", "SIGKILL"): 10, ("at any time", "SIGKILL"): 10,
        ("asked to end", "SIGINT"): 1, ("asked to end", "SIGTERM"): 1,
    }  # fmt: skip
    after = [end.after for end in ends]
    assert after == sorted(after) and 1000 <= after[0] and after[-1] <= 50_000
    # One that may end at any time knows how long the one before it took to begin.
    assert ends[0].how != "at any time" and ends[-1].how != "at any time"
    assert all(0 <= end.share < 2 for end in ends)


def test_growth_is_told_from_the_warm_up_on():
    life = {"tokens_at_begin": 0, "memory": [[1, 50], [200, 100], [600, 104], [1000, 102]]}
    found = soak_troubles.growth(life, 150)
    assert found == soak_troubles.Growth(since=200, until=1000, first=100, most=104, last=102)
    assert found.share == pytest.approx(0.04)
    assert soak_troubles.growth(life, 1000) is None
    part = {"new_tokens": 1000, "lives": [life]}
    assert soak_troubles.growths(part) == []  # shorter than a warm-up


def test_the_recorded_hash_is_that_of_the_same_run():
    settings = {**longrun.SETTINGS[soak.SETTING], "seed": 0}
    asked = {
        "model": Path(tsjax.EMBEDDED).name, "dtype": "bfloat16", "new_tokens": longrun.NEW_TOKENS,
        "prompt": longrun.PROMPT, "setting": soak.SETTING, "settings": settings,
    }  # fmt: skip
    document = json.loads((ROOT / "benchmarks/results/cpu/longrun.json").read_text())
    (group,) = [one for one in document["groups"] if one["group"][0] == soak.SETTING]
    assert soak.recorded_tokens(asked)["sha256"] == group["sha256"]
    assert soak.recorded_tokens({**asked, "new_tokens": 100}) is None
    assert soak.recorded_tokens({**asked, "settings": {**settings, "seed": 1}}) is None


# --- one life -----------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path):
    model = helpers.tiny_model(num_layers=1, vocab_size=len(helpers.TOKENS))
    tsjax.save(model, tmp_path / "model")
    places = {"model": "model", "saved": "run.json", "notes": "notes.jsonl", "counter": "count"}
    return {
        "prompt": [3, 1, 4], "settings": {"do_sample": True}, "method": "ngram", "tokens": 12,
        "save_every": 5, **{name: str(tmp_path / file) for name, file in places.items()},
    }  # fmt: skip


@pytest.fixture
def heard(monkeypatch):
    """What would listen to jax: only in a process of its own."""
    compilation._listen()  # which does so once for all tests
    listeners = []
    for kind in ("event", "event_duration_secs"):
        monkeypatch.setattr(jax.monitoring, f"register_{kind}_listener", listeners.append)
    return listeners


def test_a_life_counts_its_tokens_and_goes_on(asked, heard):
    soak_life.live(asked)
    assert soak_life.COUNT.unpack(Path(asked["counter"]).read_bytes()) == (12,)
    run = read_run(asked["saved"])
    assert len(run.tokens[0]) == 12 and run.method == tsjax.NGram()
    *_, ended = map(json.loads, Path(asked["notes"]).read_text().splitlines())
    assert ended["ended"]["tokens"] == 12 and not ended["ended"]["unsaved"]
    # A second life finds that all is done.
    soak_life.live({**asked, "counter": asked["counter"] + "-2"})
    assert read_run(asked["saved"]).tokens[0].tolist() == run.tokens[0].tolist()


# --- trouble ------------------------------------------------------------------------------------


def life(**changes):
    told = {
        "tokens_at_begin": 0, "tokens_at_end": 9000, "tokens_saved": 9000, "exit_code": 0,
        "ended": soak_troubles.BY_ITSELF, "memory": [[t, 1000] for t in range(1, 9000, 100)],
        "result": {"unsaved": False, "problems": []},
    }  # fmt: skip
    return {**told, **changes}


def document():
    tokens = {"finish_reason": "length", "sha256_of_first": "b"}
    whole = {"new_tokens": 9000, "sha256": "a", **tokens, "programs": {"made_again": {}}}
    ends = [
        life(signal="SIGKILL", exit_code=-9, ended=soak_troubles.WITHIN, tokens_saved=8000),
        life(signal="SIGINT", exit_code=130, ended=soak_troubles.ASKED),
        life(),
    ]
    said = "is being written by another run"
    refused = {"exit_code": 1, "said": said, "first_was_there": True}
    full = life(result={"unsaved": True, "problems": ["No space left on device"]}, tokens_saved=500)
    return {
        "new_tokens": 9000,
        "tokens_of_plain_decoding": {"sha256": "a"},
        "parts": [
            {"part": "whole", **whole, "lives": [life()]},
            {"part": "killed", **whole, "lives": ends, "second_run": refused},
            {"part": "full disk", "new_tokens": 2000, "sha256": "c", **tokens,
             "lives": [full, life()]},
            {"part": "full disk", "left_out": "no file system could be mounted"},
        ],
    }  # fmt: skip


def test_what_is_as_it_should_be_is_no_trouble():
    assert soak_troubles.troubles(document()) == []


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (["parts", 0, "sha256"], "x", "whole: other tokens than plain decoding's"),
        (["parts", 2, "sha256_of_first"], "x", "the first 2000 tokens are not the same"),
        (["parts", 1, "finish_reason"], None, "killed: ended after 9000 tokens"),
        (["parts", 1, "programs", "made_again"], {"decode": 1}, "killed: compiled again"),
        (["parts", 0, "lives", 0, "memory", 80], [8001, 1100], "memory grew by 10.0% from 2,0"),
        (["parts", 1, "lives", 0, "exit_code"], 1, "killed, life 1: exit code 1, not -9"),
        (["parts", 1, "lives", 1, "exit_code"], -2, "killed, life 2: exit code -2, not 130"),
        (["parts", 1, "lives", 1, "tokens_saved"], 8999, "life 2: 8999 of 9000 tokens were saved"),
        (["parts", 1, "second_run", "exit_code"], 0, "a second run was not refused"),
        (["parts", 1, "second_run", "first_was_there"], False, "a second run was not refused"),
        (["parts", 2, "lives", 0, "result", "problems"], [], "full disk: it was not full"),
        (["parts", 2, "lives", 0, "tokens_saved"], 2000, "did not go on with what had room"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_is_named(place, value, said):
    found = copy.deepcopy(document())
    *way, last = place
    inner = found
    for name in way:
        inner = inner[name]
    inner[last] = value
    assert any(said in one for one in soak_troubles.troubles(found)), soak_troubles.troubles(found)


# --- a small one --------------------------------------------------------------------------------


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

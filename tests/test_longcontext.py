# SPDX-License-Identifier: Apache-2.0
"""benchmarks/longcontext, whose results are committed: its model is the one that they are of.

That its tables are made from the results, test_readme.py says; longbench.py has tests of its own.
"""

import dataclasses
import json

import numpy as np
import pytest

import tsjax
from benchmarks.longcontext import model as training
from benchmarks.longcontext.verdict import interval
from benchmarks.report import ROOT
from tsjax.files.fingerprint import model_fingerprint


def test_intervals():
    """As longbench.py gives them too."""
    mean, half = interval([1.0, 0.0, 1.0, 1.0])
    assert mean == 0.75 and half == pytest.approx(1.96 * np.sqrt(0.1875 / 4))


@pytest.mark.wide
def test_the_checkpoint_is_small_masters_its_tasks_and_is_the_one_of_the_results():
    folder = ROOT / "benchmarks" / "longcontext" / "checkpoint"
    assert sum(file.stat().st_size for file in folder.rglob("*")) < 4 << 20
    assert tsjax.load(folder).cfg == dataclasses.replace(training.CONFIG, dtype="bfloat16")
    model = tsjax.load(folder, dtype="float32")
    results = json.loads((ROOT / "benchmarks/results/cpu/longcontext.json").read_text())
    assert model_fingerprint(model) == results["fingerprint"]
    updates = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert updates == sum(phase.updates for phase in training.PHASES)
    for task in ("passkey", "key_values", "multi_query"):
        assert training.accuracy(model.params.model, model.cfg, task, 256, 8) > 0.95, task

# SPDX-License-Identifier: Apache-2.0
"""tsjax.check_run and `tsjax check`: a saved run's tokens against plain decoding.

The oracle is the slow decoder of helpers.py in float64; files of runs are altered by hand.
"""

import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SIZES, chain, chain_model, oracle_logits, tiny_model

import tsjax
from tsjax.__main__ import main
from tsjax.decoding.sampling import position_noise

RAGGED = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
SAMPLED: dict[str, Any] = dict(
    do_sample=True, temperature=0.8, seed=[5, 6, 5], repetition_penalty=1.3, repetition_window=4
)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def run_of(model, path, prompt=RAGGED, **settings):
    """The file of a run, and what it says."""
    tsjax.generate(model, prompt, save_to=path, **{"max_new_tokens": 24, **SIZES, **settings})
    return path, json.loads(path.read_text())


def oracle_scores(model, history, seed):
    """Scores of the next token in float64: the penalty, and what sampling adds."""
    scores = oracle_logits(model, history)[-1]
    for token in set(history[-SAMPLED["repetition_window"] :]):
        scores[token] *= 1.3 if scores[token] < 0 else 1 / 1.3
    key, at = tsjax.steps.row_keys([seed], [0]), jnp.asarray([[len(history)]])
    noise = position_noise(key, at, len(scores), jnp.float32)
    return scores / SAMPLED["temperature"] + np.asarray(noise, np.float64)[0, 0]


def test_in_float32_all_tokens_are_the_best_and_lead_as_the_oracle_says(model, tmp_path):
    path, saved = run_of(model, tmp_path / "run.json", **SAMPLED)
    found = tsjax.check_run(model, path)
    assert found.departures == [] and found.departures_per_1000 == 0
    assert found.num_tokens == 72 and found.dtype == "float32"
    nearest = found.nearest(4)
    assert [lead for *_, lead in nearest] == np.sort(np.concatenate(found.leads))[:4].tolist()
    assert all(found.leads[row][index] == lead for row, index, lead in nearest)
    rows = zip(RAGGED, saved["tokens"], found.leads, SAMPLED["seed"], strict=True)
    for prompt, made, leads, seed in rows:
        for index, token in [*enumerate(made)][::5]:
            scores = oracle_scores(model, prompt + made[:index], seed)
            assert np.argmax(scores) == token
            second, first = np.sort(scores)[-2:]
            assert leads[index] == pytest.approx(first - second, abs=1e-4)


def test_a_token_that_was_altered_is_found(model, tmp_path):
    path, saved = run_of(model, tmp_path / "run.json", **SAMPLED)
    row, index = 1, 7
    made = saved["tokens"][row]
    choice, made[index] = made[index], (made[index] + 1) % 61
    path.write_text(json.dumps(saved))
    found = tsjax.check_run(model, path)
    first = found.departures[0]
    assert (first.row, first.index, first.token, first.choice) == (row, index, made[index], choice)
    history = RAGGED[row] + made[:index]
    scores = oracle_scores(model, history, 6)
    assert first.behind == pytest.approx(scores[choice] - scores[made[index]], abs=1e-4)
    # The oracle, too, judges what follows after the altered token.
    for departure in found.departures:
        assert departure.row == row and departure.index >= index
    departed = {departure.index for departure in found.departures}
    for later in range(index, 24):
        scores = oracle_scores(model, RAGGED[row] + made[:later], 6)
        assert (later in departed) == (np.argmax(scores) != made[later])
    assert found.departures_per_1000 == pytest.approx(1000 * len(departed) / 72)


def test_rows_that_end_early_and_tokens_that_were_barred(tmp_path):
    model = chain_model(chain(1, 2, 3, 4, 5, 6, 7, 8), stop_ids=(4,))
    path, saved = run_of(model, tmp_path / "run.json", [[1], [5], [3]], max_new_tokens=3)
    assert saved["tokens"] == [[2, 3, 4], [6, 7, 8], [4]]
    assert saved["finish_reason"] == ["eos", "length", "eos"]
    found = tsjax.check_run(model, path)
    assert found.departures == [] and [len(row) for row in found.leads] == [3, 3, 1]
    assert found.num_below(1.0) == 0 and found.num_below(100.0) == 7
    # A stop token in the middle, and a token that min_new_tokens bars.
    saved["config"]["min_new_tokens"] = 2
    saved["tokens"] = [[2, 4, 0], [6, 7, 8], [4]]
    path.write_text(json.dumps(saved))
    found = tsjax.check_run(model, path)
    assert [(d.row, d.index, d.token, d.choice) for d in found.departures] == [
        (0, 1, 4, 3), (0, 2, 0, 5), (2, 0, 4, 0),
    ]  # fmt: skip
    assert found.departures[0].behind == math.inf == found.departures[2].behind


def test_what_cannot_be_checked_is_refused(model, tmp_path):
    path, saved = run_of(model, tmp_path / "run.json")
    with pytest.raises(ValueError, match=r"run='.*run\.json' was saved with another model"):
        tsjax.check_run(tiny_model(seed=1), path)
    with pytest.raises(ValueError, match="saved with dtype='float32'"):
        tsjax.check_run(tiny_model(dtype="bfloat16"), path)
    with pytest.raises(TypeError, match=r"model=.*what tsjax\.load returns"):
        tsjax.check_run("a/folder", path)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="run='nowhere' is not valid: no such file"):
        tsjax.check_run(model, "nowhere")
    saved["tokens"][1][3] = 61
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"a row in run=.* holds token id 61"):
        tsjax.check_run(model, path)
    saved["tokens"][1] = [1] * 25
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="at most max_new_tokens=24 tokens in a row"):
        tsjax.check_run(model, path)


# --- the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("embedded") / "run.json"
    model = tsjax.load(tsjax.EMBEDDED, dtype="float32")
    tsjax.generate(model, "Once upon", method="ngram", max_new_tokens=12, save_to=path)
    return path


def command(capsys, *argv):
    code = main(["check", *map(str, argv)])
    return code, capsys.readouterr()


@pytest.mark.wide
def test_the_command_line_finds_the_model_itself(embedded_run, tmp_path, capsys):
    code, said = command(capsys, embedded_run)
    assert code == 0 and said.out.splitlines()[:2] == [
        "12 tokens in 1 rows, float32",
        "not plain decoding's choice: 0 (0.00 per 1,000)",
    ]
    assert len(said.out.splitlines()) < 20
    saved = json.loads(embedded_run.read_text())
    choice = saved["tokens"][0][5]
    saved["tokens"][0][5] = 7 if choice != 7 else 8
    altered = tmp_path / "altered.json"
    altered.write_text(json.dumps(saved))
    code, said = command(capsys, altered, "--model", tsjax.EMBEDDED, "--json", "--dtype", "float32")
    document = json.loads(said.out)
    first = document["departures"][0]
    assert code == 1 and (first["index"], first["choice"]) == (5, choice)
    assert document["tokens"] == 12 and "0.001" in document["leads_below"]
    code, said = command(capsys, altered)
    assert code == 1 and f"row 0, token 5: {saved['tokens'][0][5]} " in said.out


def test_wrong_arguments_are_one_line(model, embedded_run, tmp_path, capsys):
    nameless, _ = run_of(model, tmp_path / "run.json")
    for argv, words in (
        (["nowhere"], "run='nowhere' is not valid: no such file"),
        ([nameless], "does not say where its model is: give --model PATH"),
        ([embedded_run, "--dtype", "bfloat16"], "--dtype='bfloat16' is not valid: the run's, flo"),
        ([nameless, "--model", tsjax.EMBEDDED], "was saved with another model"),
    ):
        code, said = command(capsys, *argv)
        (line,) = said.err.splitlines()
        assert code == 2 and line.startswith("tsjax: error: ") and words in line

# SPDX-License-Identifier: Apache-2.0
"""Runs with a lazy prefill that are saved and go on: their tokens are those of a run never stopped.

What a token saw of the prompt depends on all that came before it, so besides tokens the states are
compared: that of a resumed run has the sets, the rows and their places that the steps had left.
"""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from helpers import tiny_model
from test_interrupt import signal_in
from test_interrupt import tokens_of as rows_of

import tsjax
from tsjax.host import run as host_run
from tsjax.host.asking import make_request
from tsjax.host.interrupt import Interrupt
from tsjax.host.saved_run import read_run
from tsjax.host.saving import Saving

CUTS = {1: 0.49, 2: 0.343}
SIZES = dict(capacity=160, prefill_width=16)
PENALISED = dict(do_sample=True, temperature=0.9, repetition_penalty=1.2, min_p=0.02)
NEW = 18


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=3, num_draft_heads=2)  # of one kind, to share programs


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 61, length).tolist() for length in lengths]


PROMPTS = prompts_of(53, 37, 5)


def saved_chunks(model, folder, settings, lazy):
    """A run's request, after each chunk (1, 3 or 2 steps) its file and a copy of its state, and in
    the end its tokens."""
    request = make_request(model, PROMPTS, None, settings, prefill=lazy, **SIZES)
    sizes, saved, news = itertools.cycle([1, 3, 2]), [], None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_run, "_next_chunk", lambda *_: next(sizes))
        for number, news in enumerate(host_run.run(model, request, Interrupt())):
            path = folder / f"{number}.json"
            Saving(model, request, path, 1).save(news, last=True)
            saved.append((path, jax.tree.map(np.array, news.state.replace(row_key=()))))
    assert news is not None
    return request, saved, [row.tolist() for row in news.all_tokens]


def assert_same(begun, found):
    """What later steps read of a state."""
    np.testing.assert_array_equal(found.kv.length, begun.kv.length)
    np.testing.assert_array_equal(found.kv.absent, begun.kv.absent)
    for row, n in enumerate(begun.prompt_length):
        for name in ("done", "computed"):
            ours, theirs = (getattr(state.prompt, name)[..., row, :n] for state in (found, begun))
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
        for name in ("chosen", "slots"):
            for ours, theirs in zip(
                getattr(found.prompt, name), getattr(begun.prompt, name), strict=True
            ):
                np.testing.assert_array_equal(ours[row, :n], theirs[row, :n], err_msg=name)
        for layer in range(len(begun.kv.k)):
            count = int(begun.kv.length[row] - begun.kv.absent[layer, row])
            for ours, theirs in ((found.kv.k, begun.kv.k), (found.kv.v, begun.kv.v)):
                np.testing.assert_allclose(
                    ours[layer][row, :, :count], theirs[layer][row, :, :count], rtol=0, atol=2e-5
                )
            if layer:  # each is a stage of its own
                ours, theirs = (state.prompt.order[layer - 1][row] for state in (found, begun))
                np.testing.assert_array_equal(ours[:count], theirs[:count])


IN_BATCHES = dict(choose_every=3, revive_rows=4)
WIDE = {
    # Tokens come back during the first pass over what was made, and in part of the second.
    "background": (dict(revive="background", choose_every=3, revive_rows=5), {}),
    "on demand": (
        dict(revive="on_demand", revive_rows=64, choose_every=4, window=2, pool=3, sinks=1),
        PENALISED,
    ),
    "never": (dict(revive="never", recent=2), PENALISED),
}
RUNS = {"in batches": (IN_BATCHES, {}), **WIDE}


@pytest.mark.parametrize(
    "name", ["in batches", *(pytest.param(name, marks=pytest.mark.wide) for name in WIDE)]
)
def test_a_run_that_is_killed_after_any_chunk_goes_on_as_if_it_never_was(model, name, tmp_path):
    options, settings = RUNS[name]
    lazy = tsjax.LazyPrefill(keep=CUTS, **options)
    settings = dict(settings, max_new_tokens=NEW, seed=4)
    rows = rows_of(tsjax.generate(model, PROMPTS, prefill=lazy, **SIZES, **settings))
    # One that ends the second row, before the others.
    settings["eos_token_id"] = next(t for t in rows[1][5:] if t not in rows[0] + rows[2])
    first, saved, whole = saved_chunks(model, tmp_path, settings, lazy)
    assert len(whole[1]) < NEW == len(whole[0]) == len(whole[2])
    for number, (path, state) in enumerate(saved):
        request = make_request(model, None, None, {}, resume_from=path, **SIZES)
        # By the programs that had read the prompt.
        assert request.prefill_widths == first.prefill_widths
        assert request.prompt_capacity == first.prompt_capacity
        found = host_run.start_run(model, request, Interrupt()).replace(row_key=())
        assert_same(state, jax.tree.map(np.array, found))
        if number % 4 == 0:
            assert rows_of(tsjax.generate(model, resume_from=path, **SIZES)) == whole
    if name == "on demand":  # it costs programs of its own
        assert tsjax.check_run(model, saved[-1][0]).departures == []


def test_a_run_that_is_stopped_while_it_reads_goes_on(model, tmp_path):
    """Once in the prompt, and then twice in what was made."""
    path = tmp_path / "run.json"
    lazy = tsjax.LazyPrefill(keep=CUTS, **IN_BATCHES)
    settings = dict(max_new_tokens=40, on_interrupt="return", save_to=path, **SIZES)
    whole = rows_of(tsjax.generate(model, PROMPTS, prefill=lazy, **settings))
    with pytest.MonkeyPatch.context() as patch:
        signal_in(patch, "read_part", 3)
        part = tsjax.generate(model, PROMPTS, prefill=lazy, **settings)
    assert rows_of(part) == [[]] * 3 and part.finish_reason == ["interrupted"] * 3
    assert read_run(path).prefill is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_run, "_next_chunk", lambda *_: 10)
        signal_in(patch, "decode", 4)
        part = tsjax.generate(model, resume_from=path, **settings)
    made = rows_of(part)
    assert made == [row[:31] for row in whole]
    for number in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            signal_in(patch, "read_made", number)
            part = tsjax.generate(model, resume_from=path, **settings)
        assert rows_of(part) == made and part.stats.computed_tokens == 0
        assert set(part.finish_reason) == {"interrupted"}
    assert rows_of(tsjax.generate(model, resume_from=path, **settings)) == whole
    # The same settings may be given again, and no others.
    assert rows_of(tsjax.generate(model, resume_from=path, prefill=lazy, **settings)) == whole
    for other in ("full", dataclasses.replace(lazy, window=2)):
        with pytest.raises(ValueError, match=r"prefill=.* was saved with prefill=.*leave it out"):
            tsjax.generate(model, resume_from=path, prefill=other, max_new_tokens=44)


@pytest.mark.parametrize(
    "name", ["in batches", *(pytest.param(name, marks=pytest.mark.wide) for name in WIDE)]
)
def test_a_run_that_began_with_a_prefix_goes_on_without_it(model, name, tmp_path):
    path, prompt = tmp_path / "run.json", PROMPTS[0]
    lazy, prefix = tsjax.LazyPrefill(keep=CUTS, **RUNS[name][0]), tsjax.read(model, prompt[:30])
    settings = dict(max_new_tokens=NEW, seed=4, **RUNS[name][1], **SIZES)
    whole = tsjax.generate(model, prompt, prefill=lazy, prefix=prefix, **settings)
    begun = settings | {"max_new_tokens": 7, "save_to": path}
    tsjax.generate(model, prompt, prefill=lazy, prefix=prefix, **begun)
    assert read_run(path).prefix_length == 29
    for more in ({}, {"prefix": prefix}, {"prefix": tsjax.read(model, prompt[:9])}):
        rest = tsjax.generate(model, resume_from=path, max_new_tokens=NEW, **more, **SIZES)
        assert rows_of(rest) == rows_of(whole)
    assert tsjax.check_run(model, path).departures == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (None, "prefill"),
        ({"version": 4}, "version 4"),
        ({"version": "3"}, "version '3'"),
        ({"version": 1}, "version 1 with choose_every=4"),
        ({"version": 2, "block": 32}, "version 2 with pool=1, block=32"),
        ({"keep": "paper"}, "keep='paper' is not valid: shares by layer"),
        ({"window": 0}, "window=0"),
        ({"zzz": 1}, "zzz"),
        ({"prefix_length": 2}, "prefix_length=2 is not valid: an integer, at most 1"),
    ],
    ids=repr,
)
def test_a_damaged_file_is_refused(damage, message, tmp_path):
    path, lazy = tmp_path / "run.json", tsjax.LazyPrefill(keep=CUTS, choose_every=4)
    model = {"path": None, "dtype": "float32", "fingerprint": ""}
    document = {
        "format": 4, "tsjax": "0", "model": model, "method": {"name": "autoregressive"},
        "exceed_max_positions": False, "single": True, "config": {"max_new_tokens": 6},
        "prompt": [[1, 2]], "tokens": [[3]], "finish_reason": [None],
    }  # fmt: skip

    def read(prefill):
        path.write_text(json.dumps({**document, **prefill}))
        return read_run(path).prefill

    saved = {"version": 3, **dataclasses.asdict(lazy)}
    for version in (2, 3):
        assert read({"prefill": {**saved, "version": version}}) == lazy
    for same in ({"revive": "never"}, {"revive": "on_demand", "choose_every": 1}):
        old = {**saved, **same, "version": 1}
        assert read({"prefill": old}) == dataclasses.replace(lazy, **same)
    with pytest.raises(ValueError, match=f"is not valid: a file written by save_to.*{message}"):
        read({} if damage is None else {"prefill": {**saved, **damage}})

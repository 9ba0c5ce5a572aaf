# SPDX-License-Identifier: Apache-2.0
"""Runs with a lazy prefill that are saved and go on: their tokens are those of a run never stopped.

What a token saw of the prompt depends on all that came before it, so besides tokens the states are
compared: that of a resumed run has the sets, the rows and their places that the steps had left.
"""

import dataclasses
import itertools
import json
import os
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import PROMPTS as SHORT_PROMPTS
from helpers import SIZES as SHORT_SIZES
from helpers import looping_model, tiny_model

import tsjax
from tsjax.__main__ import main
from tsjax.host import run as host_run
from tsjax.host.asking import make_request
from tsjax.host.interrupt import Interrupt
from tsjax.host.saved_run import read_run
from tsjax.host.saving import Saving
from tsjax.methods import METHODS

CUTS = {1: 0.49, 2: 0.343}
SIZES = dict(capacity=160, prefill_width=16)
PENALISED = dict(do_sample=True, temperature=0.9, repetition_penalty=1.2, min_p=0.02)
NEW = 30


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=3, num_draft_heads=2)  # of one kind, to share programs


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 61, length).tolist() for length in lengths]


PROMPTS = prompts_of(53, 37, 5)


def rows_of(result) -> list[list[int]]:
    return [row.tolist() for row in result.tokens]


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


RUNS = {"in batches": (dict(choose_every=3, revive_rows=4), {})}
WIDE = {
    # Tokens come back during the first pass over what was made, and in part of the second.
    "background": (dict(revive="background", choose_every=3, revive_rows=5), {}),
    "on demand": (dict(revive="on_demand", revive_rows=5), {}),
    "on demand, seldom": (
        dict(revive="on_demand", revive_rows=64, choose_every=4, window=2, pool=3, sinks=1),
        PENALISED,
    ),
    "in batches, always": (dict(choose_every=1, revive_rows=7, sinks=1), PENALISED),
    "never": (dict(revive="never", recent=2), PENALISED),
    "background, at once": (dict(revive="background", revive_rows=64), PENALISED),
}


@pytest.mark.parametrize(
    "name", [*RUNS, *(pytest.param(name, marks=pytest.mark.wide) for name in WIDE)]
)
def test_a_run_that_is_killed_after_any_chunk_goes_on_as_if_it_never_was(model, name, tmp_path):
    options, settings = (RUNS | WIDE)[name]
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
    if lazy.revive != "never":  # which costs programs of its own
        assert tsjax.check_run(model, saved[-1][0]).departures == []


def signal_in(patch, program: str, number: int):
    """Ctrl-C while the device works on the number-th pass of `program`."""
    real, calls = host_run.programs_of, itertools.count(1)

    def signalled(model):
        def run(*args, **kwargs):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGINT)
            return getattr(real(model), program)(*args, **kwargs)

        return SimpleNamespace(**{**vars(real(model)), program: run})

    patch.setattr(host_run, "programs_of", signalled)


def test_a_run_that_is_stopped_while_it_reads_goes_on(model, tmp_path):
    """Once in the prompt, and then twice in what was made."""
    path = tmp_path / "run.json"
    lazy = tsjax.LazyPrefill(keep=CUTS, **RUNS["in batches"][0])
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


@pytest.mark.wide
def test_a_run_goes_on_with_another_method(tmp_path, monkeypatch):
    """Begun plainly, then by drafts, and plainly in the end."""
    monkeypatch.setitem(METHODS, "any_tree", AnyTree)
    model, path = looping_model(num_layers=3), tmp_path / "run.json"
    lazy = tsjax.LazyPrefill(keep=CUTS, **RUNS["in batches"][0])
    prompts = [row * 7 for row in SHORT_PROMPTS]
    settings = dict(PENALISED, seed=5, **SIZES)
    whole = tsjax.generate(model, prompts, prefill=lazy, max_new_tokens=40, **settings)
    begun = dict(prompt=prompts, prefill=lazy, **settings)
    for method, length in (("autoregressive", 9), (AnyTree(), 31), ("autoregressive", 40)):
        found = tsjax.generate(model, method=method, max_new_tokens=length, save_to=path, **begun)
        assert rows_of(found) == [row[:length] for row in rows_of(whole)]
        assert (found.stats.accepted > 5) == (method != "autoregressive")
        begun = dict(resume_from=path, **SIZES)


def test_the_file_says_with_which_prefill(model, tmp_path):
    path = tmp_path / "run.json"
    lazy = tsjax.LazyPrefill(keep="auto", speedup=1.2, revive="never", window=3)
    settings = dict(save_to=path, max_new_tokens=2, **SIZES)
    first = tsjax.generate(model, PROMPTS[0], prefill=lazy, **settings)
    saved = json.loads(path.read_text())
    assert saved["format"] == 4 and saved["prefill"]["version"] == 2
    named = lazy.resolved(model.cfg, 64)
    assert read_run(path).prefill == named and saved["prefill"]["keep"] == [list(named.cuts[0])]
    # The same settings may be given again, by either name.
    for same in (None, lazy, named):
        again = tsjax.generate(model, resume_from=path, prefill=same, **settings)
        assert rows_of(again) == rows_of(first) and read_run(path).prefill == named
    # A prompt that is shorter than what the file says of it.
    path.write_text(json.dumps({**saved, "prompt": [[1, 2]]}))
    with pytest.raises(ValueError, match=r"window=3 is not valid: at most the 2 tokens"):
        tsjax.generate(model, resume_from=path, max_new_tokens=4)
    path.write_text(json.dumps(saved))
    for other, message in (
        ("full", r"prefill='full' is not valid: resume_from=.*run.json' was saved with "
         r"prefill=LazyPrefill\(keep=.*; leave it out"),
        (tsjax.LazyPrefill(keep=named.keep, revive="never", window=2),
         r"prefill=LazyPrefill\(window=2\) .* with prefill=LazyPrefill\(window=3\); leave it out"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            tsjax.generate(model, resume_from=path, prefill=other, max_new_tokens=4)


def test_a_run_cannot_go_on_with_another_prefill(tmp_path):
    path, model = tmp_path / "run.json", looping_model()
    tsjax.generate(model, SHORT_PROMPTS[:1], max_new_tokens=2, save_to=path, **SHORT_SIZES)
    saved = json.loads(path.read_text())
    assert saved["format"] == 2 and "prefill" not in saved and read_run(path).prefill is None
    message = r"prefill=LazyPrefill\(.* is not valid: .*was saved with prefill='full'; leave it out"
    with pytest.raises(ValueError, match=message):
        tsjax.generate(model, resume_from=path, prefill="lazy", max_new_tokens=4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (None, "prefill"),
        ({"version": 3}, "version 3"),
        ({"version": 1}, "version 1 with choose_every=4"),
        ({"version": None}, "version None"),
        ({"keep": "paper"}, "keep='paper' is not valid: shares by layer"),
        ({"keep": [[1, 1.5]]}, "share 1.5"),
        ({"window": 0}, "window=0"),
        ({"revive": "later"}, "revive='later'"),
        ({"zzz": 1}, "zzz"),
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

    saved = {"version": 2, **dataclasses.asdict(lazy)}
    assert read({"prefill": saved}) == lazy
    for same in ({"revive": "never"}, {"revive": "on_demand", "choose_every": 1}):
        old = {**saved, **same, "version": 1}
        assert read({"prefill": old}) == dataclasses.replace(lazy, **same)
    with pytest.raises(ValueError, match=f"is not valid: a file written by save_to.*{message}"):
        read({} if damage is None else {"prefill": {**saved, **damage}})


@pytest.mark.wide
def test_the_command_goes_on_with_the_saved_prefill(tmp_path, capsys):
    path = str(tmp_path / "run.json")

    def tokens_of(*argv: str):
        assert main(["generate", tsjax.EMBEDDED, *argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["tokens"]

    lazily = ["Once upon a time there was", "--prefill", "lazy", "--method", "autoregressive"]
    lazily += ["--prefill-options", "keep={2:0.3}"]
    whole = tokens_of(*lazily, "--max-new-tokens", "9")
    tokens_of(*lazily, "--max-new-tokens", "4", "--save-to", path)
    more = ["--resume-from", path, "--max-new-tokens", "9"]
    assert tokens_of(*more) == whole
    assert main(["generate", tsjax.EMBEDDED, *more, "--prefill", "full"]) == 2
    assert "prefill='full' is not valid" in capsys.readouterr().err


@pytest.mark.wide
@pytest.mark.parametrize("prefill", ["full", tsjax.LazyPrefill(keep={1: 0.5}, choose_every=8)])
def test_a_run_goes_on_with_other_devices(prefill, tmp_path):
    """Begun on one device, it goes on on four, and ends on one."""
    path, run = tmp_path / "run.json", dict(PENALISED, seed=3, **SIZES)
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    one, four = (tiny_model(mesh=mesh) for mesh in (None, mesh))
    whole = tsjax.generate(one, PROMPTS, prefill=prefill, max_new_tokens=24, **run)
    begun = dict(prompt=PROMPTS, prefill=prefill, **run)
    for model, length in zip((one, four, one), (7, 15, 24), strict=True):
        found = tsjax.generate(model, max_new_tokens=length, save_to=path, **begun)
        assert rows_of(found) == [row[:length] for row in rows_of(whole)]
        begun = dict(resume_from=path, **SIZES)

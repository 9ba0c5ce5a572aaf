# SPDX-License-Identifier: Apache-2.0
"""Finished programs on disk: who finds one neither traces nor compiles, and what makes another."""

import contextlib
import dataclasses
import os
import pickle

import jax
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import MIXED_COSTS, tiny_model

import tsjax
from tsjax.decoding.method import PLAINLY
from tsjax.host import compilation, kept_programs
from tsjax.host.device_programs import Call, programs_on
from tsjax.methods import METHODS

SETTINGS = dict(max_new_tokens=6, do_sample=True, seed=3)


@pytest.fixture
def folder(tmp_path):
    compilation.choose_folder(tmp_path / "whole")
    in_a_new_process()
    yield tmp_path / "whole"
    compilation.choose_folder(None)
    in_a_new_process()


def in_a_new_process():
    programs_on.cache_clear()
    jax.clear_caches()


@contextlib.contextmanager
def named_as_they_are_made(events=compilation.COMPILING):
    """The names of programs that are traced, lowered and compiled from now on."""
    names = []

    def note(event, duration_secs, *, fun_name="?", **_):
        if event.startswith(events):
            names.append(fun_name.removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture
def made():
    with named_as_they_are_made() as names:
        yield names


def said(model, **settings):
    found = tsjax.generate(model, [1, 2, 3], **{**SETTINGS, **settings})
    return [row.tolist() for row in found.tokens], found.stats


def kept(folder):
    return sorted(folder.glob("*.program"))


OURS = {"begin", "read_part", "decode", "first_memory"}


@pytest.mark.parametrize(
    "method", [None, tsjax.LikelyTree(costs=MIXED_COSTS)], ids=["plain", "tree"]
)
def test_a_second_process_traces_nothing(folder, made, method):
    model = tiny_model(vocab_size=67)
    first, _ = said(model, method=method)
    assert OURS & {*made} == OURS - {"first_memory"} and len(kept(folder)) == 3
    in_a_new_process()
    made.clear()
    again, stats = said(model, method=method)
    assert again == first and not OURS & {*made}
    assert stats.compile_seconds > 0, "what is read in its place is told"
    # Neither values nor prices are a part of a program; in this process too.
    dearer = method and dataclasses.replace(method, costs=MIXED_COSTS._replace(overhead=9.0))
    assert said(model, method=dearer, seed=4, temperature=0.5) != again
    assert "decode" not in made and "read_part" not in made
    said(model, method=method, top_k=5)
    assert made.count("decode") >= 1, "another program"


def test_a_damaged_program_is_made_anew(folder, made):
    model = tiny_model(vocab_size=67)
    first, _ = said(model)
    damages = lambda x: x[: len(x) // 2], lambda x: x[:-1] + b"?", lambda x: b""
    for path, damage in zip(kept(folder), damages, strict=True):
        path.write_bytes(damage(path.read_bytes()))
    in_a_new_process()
    made.clear()
    assert said(model)[0] == first and {*made} >= OURS - {"first_memory"}
    in_a_new_process()
    made.clear()
    assert said(model)[0] == first and not OURS & {*made}


def test_what_another_process_could_not_find_is_left_to_jax(folder):
    model = tiny_model(vocab_size=67)
    barred = said(model, logits_processor=lambda logits, tokens, length: logits.at[7].set(-np.inf))
    assert said(model, method=AnyTree()) is not None and 7 not in barred[0][0]
    assert len(kept(folder)) == 1, "the prompt is read as for all"
    for own in (AnyTree(), lambda x: x, object(), [AnyTree]):
        with pytest.raises(kept_programs.NotKept):
            kept_programs.told(own)
    for method in METHODS.values():
        assert kept_programs.told(method()) == kept_programs.told(method())


def test_a_folder_that_others_may_write_is_not_used(folder):
    folder.mkdir()
    folder.chmod(0o777)
    kept_programs._is_ours_alone.cache_clear()
    said(tiny_model(vocab_size=67))
    assert not kept(folder)
    kept_programs._is_ours_alone.cache_clear()


def test_the_least_recently_used_go_first(folder, monkeypatch):
    said(tiny_model(vocab_size=67))
    paths = kept(folder)
    for age, path in enumerate(paths):
        os.utime(path, (1000 - age, 1000 - age))
    monkeypatch.setattr(kept_programs, "MOST_WHOLE", paths[0].stat().st_size)
    kept_programs._remove_the_oldest(folder)
    assert kept(folder) == paths[:1]


def test_what_a_program_depends_on():
    """Shapes say as much as arrays, in this process and in one that is told of them."""
    program, x = programs_on("cpu", "float32").adopt, np.ones(3, np.float32)
    device = jax.devices()[0]

    def words(call):
        return kept_programs.words_of(program.name, call.static, call.arguments, device)

    def of(*given, cfg=PLAINLY):
        return words(Call.of(given, {"cfg": cfg}))

    arrays = {"a": jax.numpy.ones((2, 3)), "b": x}
    base = of(arrays, 3)
    shapes = Call.of((arrays, 3), {"cfg": PLAINLY}).abstract()
    assert words(pickle.loads(pickle.dumps(shapes))) == base
    others = [
        of(arrays, 4.0), of(arrays, 3, cfg=tsjax.NGram()), of({**arrays, "b": x[:2]}, 3),
        of({**arrays, "b": x.astype(int)}, 3), of([*arrays.values()], 3),
    ]  # fmt: skip
    with jax.enable_x64(not jax.config.jax_enable_x64):
        others.append(of(arrays, 3))
    with jax.default_matmul_precision("float32"):
        others.append(of(arrays, 3))
    assert len({base, *others}) == 8
    assert of(arrays, 3) == base


def test_what_lies_on_several_devices_is_left_to_jax(folder):
    devices = jax.devices()[:2]
    both = [jax.device_put(np.ones(2), device) for device in devices]
    assert Call.of(tuple(both), {}).device() is None
    assert Call.of((both[1], np.ones(3)), {}).device() == devices[1]
    program = programs_on("cpu", "float32").adopt
    assert program._had(Call.of(tuple(both), {})) is program._jitted

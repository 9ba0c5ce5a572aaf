# SPDX-License-Identifier: Apache-2.0
"""Seconds of compiling, and programs that are kept between processes."""

import functools
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import pytest
from any_tree import AnyTree
from helpers import MIXED_COSTS, TOKENS, save_tokenizer, tiny_config, tiny_model
from test_kept_programs import named_as_they_are_made

import tsjax
from pallas_kernels import dispatch
from pallas_kernels.cache_folder import cache_folder
from tsjax.files.locked_files import lock
from tsjax.host import compilation, device_programs
from tsjax.host.compilation import Stopwatch

ROOT = Path(__file__).resolve().parent.parent


# --- seconds -------------------------------------------------------------------------------------


def test_a_stopwatch_leaves_compiling_out(monkeypatch):
    """On a clock of the test's own, which goes on while something is traced and while it is not."""
    now = [100.0]
    monkeypatch.setattr(compilation.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(compilation, "_INTERVALS", compilation._Intervals())
    watch = Stopwatch()
    with watch:
        now[0] += 5
        jax.monitoring.record_event_duration_secs(f"{compilation.COMPILING}inner", 2.0)
        now[0] += 4
        jax.monitoring.record_event_duration_secs(f"{compilation.COMPILING}outer", 8.0)
        jax.monitoring.record_event_duration_secs("/another/event", 3.0)
        now[0] += 1
    assert (watch.compiling, watch.seconds, watch.last) == (8.0, 2.0, 2.0)
    with watch:
        now[0] += 3
    assert (watch.compiling, watch.seconds, watch.last) == (8.0, 5.0, 3.0)


def test_rates_of_a_run_leave_compiling_out():
    model = tiny_model(vocab_size=71)  # a shape of its own, so nothing is compiled yet
    began = time.perf_counter()
    first = tsjax.generate(model, [1, 2, 3], max_new_tokens=4).stats
    wall = time.perf_counter() - began
    again = tsjax.generate(model, [1, 2, 3], max_new_tokens=4).stats
    assert again.compile_seconds < first.compile_seconds
    assert first.prefill_seconds + first.decode_seconds + first.compile_seconds <= wall
    assert first.tokens_per_second == first.computed_tokens / first.decode_seconds


# --- how many programs ---------------------------------------------------------------------------


@pytest.fixture
def compiled():
    """The names of the programs that are compiled from now on, as in a fresh process."""
    jax.clear_caches()
    with named_as_they_are_made("/jax/core/compile/backend_compile_duration") as names:
        yield names


def test_a_run_is_three_programs(compiled):
    """Also with weights that are bound to a device."""
    model = tiny_model(vocab_size=67)
    model = model.with_params(jax.device_put(model.params, jax.devices()[0]))
    compiled.clear()  # those of the weights
    tsjax.generate(model, [[1, 2, 3], [4]], max_new_tokens=4, method=AnyTree())
    assert compiled == ["begin", "read_part", "decode"]
    changes = [{"seed": 5}, {"eos_token_id": 3}, {"max_new_tokens": 300}]

    def run(length=5, **settings):
        other = [[*range(length)]] * 2
        how = {"method": AnyTree(), "max_new_tokens": 9, **settings}
        tsjax.generate(model, other, **how)
        list(tsjax.stream(model, other, **how))

    for change in changes:
        run(**change)
    for length in (2, 17):  # up to 16 committed tokens is one bucket
        run(length)
    assert compiled == ["begin", "read_part", "decode"], "and no other call makes one"
    # Which processors are on is compiled in, what they are set to is not.
    sampling = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.2}
    others = {"temperature": 1.0, "top_p": 0.8, "repetition_penalty": 1.1, "repetition_window": 3}
    for change in ({}, *changes, others):
        run(**{**sampling, **change})
    assert compiled == ["begin", "read_part", "decode", "begin", "decode"]
    # A prompt of another bucket makes one more prefill.
    for length in (18, 25, 33):
        run(length)
    assert compiled.count("read_part") == 2 and compiled.count("decode") == 2


def test_methods_share_the_programs_of_the_prefill(compiled):
    """As do lazy prefills that part only when tokens come back."""
    model, prompt = tiny_model(vocab_size=67), list(range(20))
    compiled.clear()
    for method in (None, AnyTree()):
        tsjax.generate(model, prompt, max_new_tokens=8, method=method)
    assert (compiled.count("decode"), compiled.count("read_part")) == (2, 1)
    compiled.clear()
    for revive in ("on_demand", "never"):
        lazy = tsjax.LazyPrefill(keep={1: 0.5}, revive=revive)
        tsjax.generate(model, prompt, max_new_tokens=8, prefill=lazy)
    assert (compiled.count("decode"), compiled.count("read_part")) == (2, 2)


def test_rows_that_the_host_ends_compile_nothing(compiled, tmp_path):
    """Stop strings and resumed runs put flags into the state; its type must stay the same."""
    model = tiny_model(vocab_size=len(TOKENS), path=save_tokenizer(tmp_path / "tokenizer"))
    prompts, path = [[5], [6, 7]], tmp_path / "run.json"
    settings = dict(eos_token_id=(), save_to=path)
    text = tsjax.generate(model, prompts, max_new_tokens=14, **settings).text
    stop = text[0][:3]
    assert stop not in text[1]
    compiled.clear()
    part = tsjax.generate(model, prompts, max_new_tokens=14, stop_strings=stop, **settings)
    result = tsjax.generate(model, resume_from=path, max_new_tokens=60)
    assert part.finish_reason == ["stop_string", "length"]
    assert len(result.tokens[0]) == len(part.tokens[0]) and len(result.tokens[1]) > 14
    assert "decode" not in compiled and "read_part" not in compiled


@pytest.mark.wide
def test_a_run_that_changes_its_method_compiles_each_once(compiled):
    """With a copy in int8 first, plainly after that."""
    model = tiny_model(vocab_size=67)

    class Changing(tsjax.Auto):
        def next(self, measured):
            if measured.current is None:
                sizes = dict(width=4, pass_widths=(1, 2), places=4, draft_budget=8, num_sinks=2)
                return tsjax.LikelyTree(
                    draft_passes=1, draft_weights="int8", costs=MIXED_COSTS, **sizes
                )
            return tsjax.methods.Autoregressive()

    tsjax.generate(model, [1, 2, 3], max_new_tokens=60, method=Changing(), eos_token_id=())
    assert compiled.count("decode") == 2


# --- programs on disk ----------------------------------------------------------------------------


# Nothing is said of kept programs, nor of kernels.
FRESH = {
    name: value
    for name, value in os.environ.items()
    if name not in ("JAX_ENABLE_COMPILATION_CACHE", "TSJAX_CACHE")
} | {"TSJAX_NATIVE": "0"}


def run_python(*arguments, **environment):
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, env={**FRESH, **environment}, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.wide
def test_the_command_line_keeps_programs(tmp_path):
    save_tokenizer(tmp_path)
    tsjax.save(tiny_model(vocab_size=67, path=str(tmp_path)), tmp_path / "model")
    command = ["-m", "tsjax", "generate", tmp_path / "model", "--ids", "1,2,3", "--json"]
    command += ["--max-new-tokens", 2]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    first = run_python(*command, **cache)
    kept = {*(tmp_path / "home" / "tsjax" / "programs").rglob("*-cache")}
    assert kept
    second = run_python(*command, **cache)
    assert {*tmp_path.rglob("*-cache")} == kept, "the same programs are found again"
    assert " s for compiling" in second.stderr.splitlines()[-1]
    for done in (first, second):
        assert json.loads(done.stdout)["stats"]["compile_seconds"] > 0


def test_while_a_process_keeps_a_program_none_is_removed(tmp_path):
    cut = tmp_path / "jit_decode-0123-cache"
    cut.write_bytes(b"half of")
    with open(tmp_path / ".lockfile", "ab") as file:
        assert lock(file)
        compilation._remove_cut_programs(str(tmp_path))
        assert cut.exists()
    compilation._remove_cut_programs(str(tmp_path))
    assert not cut.exists()


WHERE = """
import jax, sys
from tsjax.__main__ import parser_for
from tsjax.commands.arguments import keep_programs_as_asked
from tsjax.host.compilation import keep_programs
if sys.argv[1:] == ["library"]:
    keep_programs()
else:
    argv = ["demo", *sys.argv[1:]]
    keep_programs_as_asked(parser_for(argv).parse_args(argv))
print(jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache)
"""


def folder_after(*flags, **environment):
    """The folder that jax is told to keep programs in; None where it keeps none."""
    folder, enabled = run_python("-c", WHERE, *flags, **environment).stdout.split()
    return Path(folder) if enabled == "True" and folder != "None" else None


@pytest.mark.wide
def test_where_programs_are_kept(tmp_path):
    home, mine = tmp_path / "home", tmp_path / "mine"
    for flags, environment, wanted in (
        ((), {}, home / "tsjax" / "programs"),
        (("--compilation-cache", mine), {}, mine),
        (("--no-compilation-cache",), {}, None),
        (("library",), {"TSJAX_CACHE": str(mine)}, mine / "programs"),
        ((), {"XDG_CACHE_HOME": "/dev/null"}, None),  # nothing can be written there
    ):
        found = folder_after(*flags, **{"XDG_CACHE_HOME": str(home), **environment})
        assert (found and found.parent) == wanted
    own = {"XDG_CACHE_HOME": str(home), "JAX_COMPILATION_CACHE_DIR": str(mine)}
    assert folder_after(**own) == mine, "the user has said where"


def test_the_library_warns_of_a_cache_that_cannot_be_written(monkeypatch):
    def refuse():
        raise PermissionError("no")

    monkeypatch.setattr(compilation, "keep_programs", refuse)
    with pytest.warns(UserWarning, match="compiled programs are not kept: no"):
        compilation.try_to_keep_programs.__wrapped__()


def test_a_folder_that_cannot_be_written_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(PermissionError, match=str(tmp_path)):
        tsjax.enable_compilation_cache(tmp_path)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, "/home/me/.cache/tsjax"),
        ({"XDG_CACHE_HOME": "not/absolute"}, "/home/me/.cache/tsjax"),
        ({"TSJAX_CACHE": "/mine", "XDG_CACHE_HOME": "/fast"}, "/mine"),
        ({"TSJAX_CACHE": ""}, None),
        ({"HOME": "nowhere"}, None),
    ],
)
def test_the_cache_folder(monkeypatch, environment, wanted):
    for name in ("TSJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == (wanted and Path(wanted))


def test_kernels_are_told_apart_in_words_that_stay():
    """By code, settings, closures and defaults, whatever else holds on to their constants."""

    def made(cell, default=1):
        def kernel(x, *, given=default):
            def inner(y):
                return y * 3 + cell

            return inner(x) + given

        return kernel

    told = dispatch._told(made(2))
    held = [*made(2).__code__.co_consts, *made.__code__.co_consts]
    assert dispatch._told(made(2)) == told and held
    bound = functools.partial(made(2), given=5), functools.partial(made(2), 6)
    others = [made(3), made(2, 4), *bound]
    assert len({told, *map(dispatch._told, others)}) == 5
    assert not any(" at 0x" in dispatch._told(one) for one in others)


def test_the_library_keeps_programs_on_a_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(device_programs, "try_to_keep_programs", lambda: asked.append("gpu"))
    array = types.SimpleNamespace(devices=lambda: [types.SimpleNamespace(platform="gpu")])
    device_programs.programs_of(types.SimpleNamespace(params=[array], cfg=tiny_config()))
    assert asked == ["gpu"]
    tsjax.generate(tiny_model(), [1, 2, 3], max_new_tokens=2)
    assert asked == ["gpu"], "on a CPU finished programs are kept whole"

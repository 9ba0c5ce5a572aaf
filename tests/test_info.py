# SPDX-License-Identifier: Apache-2.0
"""tsjax info: the facts, what is missing, and how they are printed."""

import json
from importlib import metadata

import jax
import pytest

from pallas_kernels import native
from pallas_kernels.dispatch import Implementation, serving
from pallas_kernels.operations import OPERATIONS, implementations
from tsjax.__main__ import main
from tsjax.host.info import info, lines


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TSJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_serves_a_platform():
    choices = [Implementation(name, on, print) for name, on in (("a", "cuda"), ("b", None))]
    choices.append(Implementation("c", "cpu", print))
    assert [one.name for one in serving(choices, "cuda")] == ["a", "b"]
    assert [one.name for one in serving(choices, "cpu")] == ["b", "c"]
    assert serving(choices[:1], "rocm") == []


def test_each_operation_has_an_implementation_everywhere():
    for platform in ("cpu", "cuda", "rocm", "tpu"):
        found = implementations(platform)
        assert found.keys() == OPERATIONS.keys()
        assert all("xla" in names for names in found.values())
    assert implementations("cuda")["tree_attention"][0] == "triton"
    assert "triton" not in implementations("cpu")["tree_attention"]


@pytest.mark.parametrize("state", ["ready", "off", "failed"])
def test_kernels_that_are_not_there_are_not_named(state, monkeypatch):
    monkeypatch.setattr(native, "status", lambda try_now: native.Status(state, "why"))
    for operation, names in implementations("cpu").items():
        has_native = state == "ready" and operation != "rotary_heads"
        assert names == (("native", "xla") if has_native else ("xla",))


def test_the_facts_of_this_machine(cache):
    found = info()
    assert found.versions["jax"] == jax.__version__ == metadata.version("jax")
    assert [device.name for device in found.devices] == [f"cpu:{n}" for n in range(4)]
    assert found.cores >= 1 and found.memory is not None and found.memory > 1e8
    assert found.trouble is None
    assert found.cache.path == str(cache) and found.cache.writable and not cache.exists()
    assert found.programs is None, "conftest.py has jax keep none"


def test_sizes_of_what_is_kept(cache):
    (cache / "programs" / "kind").mkdir(parents=True)
    (cache / "programs" / "kind" / "one").write_bytes(b"12345")
    (cache / "programs" / "two").write_bytes(b"123")
    (cache / "table.json").write_bytes(b"{}")
    assert info().cache.sizes == {"programs": 8, "table.json": 2}


def test_where_programs_are_kept(monkeypatch, cache, tmp_path):
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        assert info().programs == str(cache / "programs")
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
        assert info().programs == str(tmp_path / "mine")
    finally:
        jax.config.update("jax_enable_compilation_cache", False)
        jax.config.update("jax_compilation_cache_dir", None)


def test_without_compiler_cache_and_device(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda':\n  no library")

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setattr(native, "status", lambda try_now: native.Status("failed", "no compiler"))
    monkeypatch.setenv("TSJAX_CACHE", "")
    found = info()
    assert found.devices == () and found.operations == {}
    assert "Unable to initialize backend 'cuda': no library" in found.trouble
    assert found.cache.path is None and not found.cache.writable
    text = "\n".join(lines(found))
    assert "failed: no compiler" in text
    assert "TSJAX_CACHE is empty" in text and "no library" in text


def test_a_cache_that_cannot_be_written(monkeypatch):
    monkeypatch.setenv("TSJAX_CACHE", "/dev/null/cache")
    found = info()
    assert not found.cache.writable and found.cache.sizes == {}
    assert any("/dev/null/cache, which cannot be written" in line for line in lines(found))


def test_the_command_prints_the_facts(capsys):
    assert main(["info", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["versions"] == info().versions
    assert "xla" in document["operations"]["tree_attention"]
    assert main(["info"]) == 0
    assert capsys.readouterr().out.splitlines() == lines(info())

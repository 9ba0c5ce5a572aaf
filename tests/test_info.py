# SPDX-License-Identifier: Apache-2.0
"""tsjax info: the facts, what is missing, and how they are printed."""

import dataclasses
import json
import types
from importlib import metadata

import jax
import pytest

from pallas_kernels import native
from pallas_kernels.dispatch import Implementation, serving
from pallas_kernels.operations import OPERATIONS, implementations
from tsjax.__main__ import main
from tsjax.host import info as info_module
from tsjax.host.info import info, info_lines, memory_share


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


def test_the_facts_of_this_machine(cache, no_kept_programs):
    found = info()
    assert found.versions["jax"] == jax.__version__ == metadata.version("jax")
    assert [device.name for device in found.devices] == [f"cpu:{n}" for n in range(4)]
    assert found.cores >= 1 and found.memory is not None and found.memory > 1e8
    assert found.trouble is None
    assert found.cache.path == str(cache) and found.cache.writable and not cache.exists()
    (cache / "programs" / "kind").mkdir(parents=True)
    (cache / "programs" / "kind" / "one").write_bytes(b"12345")
    (cache / "table.json").write_bytes(b"{}")
    assert info().cache.sizes == {"programs": 5, "table.json": 2}
    assert found.programs is None


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
    text = "\n".join(info_lines(found))
    assert "failed: no compiler" in text
    assert "TSJAX_CACHE is empty" in text and "no library" in text


def fake_gpu(kind="NVIDIA H100 80GB HBM3", version="PJRT C API\ncuda 13000", number=0):
    """What jax shows of a GPU."""
    return types.SimpleNamespace(
        platform="gpu",
        id=number,
        device_kind=kind,
        compute_capability="9.0",
        client=types.SimpleNamespace(platform_version=version),
        memory_stats=lambda: {"bytes_limit": 63_900_000_000, "bytes_in_use": 5},
    )


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """The file of the driver, which is there; and no variable that jax reads is set."""
    for name in (*info_module.MEMORY_SHARES, "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    monkeypatch.setattr(info_module, "DRIVER", str(file))
    return file


def row(text: list[str], label: str) -> str:
    (found,) = (line for line in text if line.startswith(label))
    return found.removeprefix(label).strip()


def test_a_gpu(driver, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [fake_gpu(), fake_gpu(number=1)])
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=dump")
    found = info()
    assert (found.driver, found.runtime) == ("580.82.07", "PJRT C API cuda 13000")
    assert found.memory_share == 0.75 and found.xla_flags == "--xla_dump_to=dump"
    assert found.operations["tree_attention"][0] == "triton"
    one = found.devices[0]
    assert (one.name, one.memory, one.capability) == ("gpu:0", 63_900_000_000, "9.0")
    assert one.tuned.keys() == {"tree_attention", "cache_scores"} and min(one.tuned.values()) > 1
    text = info_lines(found)
    assert row(text, "device                gpu:0") == (
        ", NVIDIA H100 80GB HBM3, 63.9 GB, compute capability 9.0"
    )
    assert row(text, "NVIDIA driver") == "580.82.07"
    assert row(text, "jax runs on") == "PJRT C API cuda 13000"
    assert row(text, "share of its memory").startswith("75%; XLA_PYTHON_CLIENT_MEM_FRACTION")
    assert row(text, "XLA_FLAGS") == "--xla_dump_to=dump"
    shapes = row(text, "measured block sizes")  # once for both
    assert shapes.startswith("NVIDIA H100 80GB HBM3: ")
    assert f"tree_attention {one.tuned['tree_attention']} shapes" in shapes
    assert shapes.endswith(", in nvidia_h100_80gb_hbm3.json")
    json.dumps(dataclasses.asdict(found))
    for value, share in ((".5", 0.5), ("much", None)):
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", value)
        assert memory_share() == share


def test_the_command_prints_the_facts(capsys):
    assert main(["info", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["versions"] == info().versions
    assert "xla" in document["operations"]["tree_attention"]
    assert main(["info"]) == 0
    assert capsys.readouterr().out.splitlines() == info_lines(info())

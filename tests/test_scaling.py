# SPDX-License-Identifier: Apache-2.0
"""What a mesh would hold is what it holds; docs/devices.md says what is counted today."""

import json
import types

import jax
import pytest
from helpers import tiny_config, tiny_model

import tsjax
from benchmarks import scaling
from benchmarks.table_parts import read
from tsjax.__main__ import main
from tsjax.measure import layout
from tsjax.model.cache import init_cache
from tsjax.model.sharding import usable_mesh


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 4), (2, 1, 2), (1, 4, 1)], ids=str)
def test_the_bytes_are_those_of_arrays(sizes):
    """Also where 2 kv heads and 3 draft heads' matrices do not divide."""
    names = dict(zip(("data", "model", "slots"), sizes, strict=True))
    mesh = usable_mesh(jax.make_mesh(sizes, tuple(names)))
    model = tiny_model(num_draft_heads=3, mesh=mesh)
    found = layout.layout("tiny", model.cfg, names, 1000, rows=2)
    cache = init_cache(model.cfg, 2, 1000, mesh)
    held = [array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(model.params)]
    assert sum(part.each for part in found.parts if part.name != "cache") == sum(held)
    assert sum(part.whole for part in found.parts if part.name != "cache") == sum(
        array.nbytes for array in jax.tree.leaves(model.params)
    )
    buffers = (*cache.k, *cache.v)
    assert found.parts[-1].each == sum(one.addressable_shards[0].data.nbytes for one in buffers)
    assert found.each == sum(part.each for part in found.parts)


def test_what_does_not_divide_is_said():
    """2 kv heads on 4 devices: attention and cache are whole on each, the rest is not."""
    found = layout.layout("tiny", tiny_config(), {"data": 1, "model": 4, "slots": 1}, 64)
    parts = {part.name: part for part in found.parts}
    assert (parts["attention"].split, parts["attention"].could) == (1, 4)
    assert (parts["mlp"].split, parts["mlp"].could) == (4, 4)
    assert parts["cache"].each == parts["cache"].whole
    said = "\n".join(layout.layout_lines(found))
    assert "4 copies (it could be cut in 4)" in said
    # An axis that does not divide leaves the next one its turn: 48 columns, 5 parts of the model.
    found = layout.layout("tiny", tiny_config(), {"data": 1, "model": 5, "slots": 2}, 64)
    assert next(part.split for part in found.parts if part.name == "mlp") == 2


def test_what_a_mesh_holds(capsys, monkeypatch):
    monkeypatch.setattr(layout, "available_bytes", lambda device: 40_000_000_000)
    argv = ["fits", "llama3.1-70b", "1,8,2", "--context", "1048576"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    # 80 layers of 8 heads of 128 numbers, keys and values, in two bytes.
    assert "of 343.60 GB: cut in 16" in said and "16 devices (data 1, model 8, slots 2)" in said
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts"][-1]["each"] == 2 * 2 * 80 * 8 * 128 * 1048576 // 16
    assert main([*argv, "--json", "--cache", "int8"]) == 0
    narrow = json.loads(capsys.readouterr().out)
    assert narrow["parts"][-1]["each"] == 2 * 80 * 8 * (128 + 1) * 1048576 // 16
    assert narrow["parts"][:-1] == found["parts"][:-1]
    # In the words of the last release, which are told once.
    for model in (["llama3.1-70b"], []):
        old = ["info", "--rows", "2", "--mesh", "2,1", *(f"--model={name}" for name in model)]
        assert main(["fits", *(model or [tsjax.EMBEDDED]), "2,1", "--rows", "2"]) == 0
        wanted = capsys.readouterr().out
        assert main(old) == 0
        assert (said := capsys.readouterr()).out == wanted
        assert said.err == "tsjax: info --mesh is now: tsjax fits MODEL DATA,MODEL[,SLOTS]\n"


def test_whether_it_fits_and_what_would(capsys, monkeypatch):
    """Llama-3.1-8B: so many weights, and 65,536 numbers of each token, in two bytes."""
    weights, token, room = 2 * 8_030_261_248, 2 * 65_536, 36_000_000_000
    most = (room - weights) // token

    def last(mesh: str, context: int | str, *more: str, model: str = "llama3.1-8b") -> str:
        assert main(["fits", model, mesh, "--context", str(context), *more]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    card = ["--device", "a100-40gb"]
    end = f"the 36.00 GB for each, nine tenths of its memory; at most {most:,} tokens fit"
    assert last("1,1", most, *card) == f"fits a100-40gb: 0.00 GB are left of {end}"
    assert last("1,1", most + 1, *card) == (
        f"does not fit a100-40gb: 0.00 GB more than {end}; all fits on 2 devices, MESH 1,2,1"
    )
    for typed, tokens in (("1M", 2**20), ("64k", 2**16)):
        assert last("1,1", typed, *card) == last("1,1", tokens, *card)
    assert last("1,1", "1M", *card).endswith("; all fits on 6 devices, MESH 1,2,3")
    assert last("1,2,3", "1m", *card).startswith("fits")
    for mesh in ("1,5", "1,1,5", "1,4", "1,2,2"):
        assert last(mesh, "1024K", *card).startswith("does not fit"), mesh
    said = last("1,1", "1024M", *card, model="llama3.1-70b")
    assert said.endswith("; no token fits")  # and no 1,024 devices either
    # Simulated devices share what this machine has free.
    monkeypatch.setattr(layout, "available_bytes", lambda device: 40_000_000_000)
    of_free = end.replace("its memory", "what is free")
    assert last("1,1", most) == f"fits this machine: 0.00 GB are left of {of_free}"
    said = last("1,2", "1M", "--device", "cpu")
    assert "more than the 18.00 GB for each" in said and said.endswith(" tokens fit")
    # A machine with one GPU, and one of which nothing is known.
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA A")
    monkeypatch.setattr(jax, "devices", lambda name: [gpu])
    assert last("1,1", most).startswith("fits NVIDIA A: 0.00 GB are left")
    said = "does not fit NVIDIA A: the mesh has more devices than the 1 here"
    assert last("1,2", 1000) == f"{said}; all fits on 1 device, MESH 1,1,1"
    assert last("1,2", "1M") == said
    monkeypatch.setattr(layout, "available_bytes", lambda device: None)
    unknown = "whether it fits is not known: {} does not say; --device names a card"
    assert last("1,1", 1000) == unknown.format("NVIDIA A")

    def fail(name):
        raise RuntimeError("Unable to initialize backend")

    monkeypatch.setattr(jax, "devices", fail)
    assert last("1,1", 1000) == unknown.format("this machine")


def test_meshes_that_are_none_are_refused_and_models_that_are_none(capsys):
    for sizes in ("", "2", "0,1", "1,2,3,4", "a,b", "1.5,2"):
        assert main(["fits", "qwen2.5-14b", sizes]) == 2
        assert f"MESH={sizes!r} is not valid: DATA,MODEL" in capsys.readouterr().err
    for wrong in ("ten", "K", "1.5M", "32KB"):
        with pytest.raises(SystemExit, match="2"):
            main(["fits", "qwen2.5-14b", "1,1", "--context", wrong])
        said = f"argument --context: {wrong!r} is not valid: a count of tokens, such as 32768, 32K"
        assert said in capsys.readouterr().err
    assert main(["fits", "qwen2.5-15b", "1,1"]) == 2
    assert "names that need no folder: tsjax/small-english" in capsys.readouterr().err
    assert main(["fits", "qwen2.5-14b", "1,1", "--rows", "0"]) == 2
    assert "--rows=0 is not valid" in capsys.readouterr().err


def test_the_page_is_of_today():
    assert scaling.main(["--check"]) == 0, "run python -m benchmarks scaling"


def test_what_was_compiled_fits_and_sends_no_cache():
    """The figures that are committed, also of the cases that CI does not compile."""
    cases = read("scaling", "aot")["cases"]
    assert cases.keys() == scaling.aot.SCALING.keys()
    for case, found in cases.items():
        check_compiled(case, found)


def check_compiled(case: str, found: dict) -> None:
    """It fits a device of 80 GB, and sends neither cache nor weights."""
    step = scaling.aot.SCALING[case]
    assert scaling.memory(found) < 80e9, case
    assert scaling.largest(found) < found["cache_bytes"] / 16, case
    # A choice sends what it has chosen of all layers, which XLA puts together up to 30 MB.
    most = max(one["bytes"] for one in found["sent"]["each"])
    assert most < min(found["cache_bytes"] / 2, 32e6), case
    assert found["cache_copies"] == 0, case
    # All of a step together is of the size of its rows' states, and their logits.
    model, rows = tsjax.model_preset(step.model), 1 if step.method == "autoregressive" else 128
    states = 4 * rows * model.embed_dim * model.num_layers
    assert found["sent"]["step"] < 6 * states + 8 * model.vocab_size, case

# SPDX-License-Identifier: Apache-2.0
"""The memory that a run is said to need: near what the compilers say, and told in parts."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny_model

import tsjax
from tools import aot
from tsjax.decoding.held import memory_bytes, temporary_bytes
from tsjax.decoding.programs import programs
from tsjax.files.tensor_names import with_weights
from tsjax.host import asking, sizes
from tsjax.host.info import MEMORY_SHARES
from tsjax.methods import METHODS, auto
from tsjax.methods.cost_model import Costs, Int8Costs, Line
from tsjax.model.cache import cache_bytes

ROOT = Path(__file__).resolve().parent.parent
RECORDED = json.loads((ROOT / "benchmarks/results/aot/aot.json").read_text())["cases"]
# Plain decoding, and TokenSwift with the paper's settings, on one device.
STEPS = [case for case in RECORDED if re.fullmatch(r"step \S+ (plain|tokenswift)", case)]
# A pass of so many tokens, compiled for an A100 by jax 0.10.2: model, tokens, bytes.
PREFILLS = [
    ("llama3.1-8b", 512, 113_810_692),
    ("llama3.1-8b", 2048, 458_259_972),
    ("llama2-7b-yarn-128k", 512, 298_360_064),
    ("llama2-7b-yarn-128k", 2048, 1_193_311_744),
    ("qwen2.5-1.5b", 512, 46_614_808),
    ("qwen2.5-1.5b", 2048, 178_286_084),
    ("llama3.1-8b, int8", 512, 338_205_956),
]


def decode_config(step: aot.Step) -> tsjax.steps.DecodeConfig:
    """What tools/aot.py compiles."""
    model, method = tsjax.model_preset(step.model), METHODS[step.method]()
    if step.method == "tokenswift":
        model = dataclasses.replace(model, num_draft_heads=3)
        method = tsjax.preset(step.model).method if step.model in aot.PAPER else method
    return tsjax.steps.DecodeConfig(model, method)


@pytest.mark.parametrize("case", STEPS)
def test_a_step_needs_about_what_the_compiler_for_an_a100_says(case):
    assert {"step llama3.1-8b plain", "step llama2-7b-yarn-128k tokenswift"} < {*STEPS}
    step, needed = aot.STEPS[case], RECORDED[case]["a100"]["temp_bytes"]
    estimate = temporary_bytes(decode_config(step), 1, step.capacity, prefill_width=1)
    assert needed <= estimate <= 2 * needed + 100e6


@pytest.mark.parametrize(("model", "width", "needed"), PREFILLS)
def test_a_pass_of_the_prefill_needs_about_what_the_compiler_says(model, width, needed):
    name, _, weights = model.partition(", ")
    model = with_weights(tsjax.model_preset(name), weights or "float", {}, "")
    cfg = tsjax.steps.DecodeConfig(model)
    estimate = temporary_bytes(cfg, 1, 32_768, width)
    assert needed <= estimate <= 2 * needed + 100e6


@pytest.mark.parametrize(
    "method", [pytest.param("autoregressive", marks=pytest.mark.wide), "tokenswift"]
)
def test_no_program_for_this_machine_needs_more(method):
    model = tiny_model()
    cfg = tsjax.steps.DecodeConfig(model.cfg, METHODS[method]())
    lengths = jnp.array([3, 3]), jnp.array([100, 100])
    state = tsjax.steps.init_state(
        jnp.ones((2, 3), jnp.int32), lengths[0], cfg=cfg, capacity=4096, max_length=lengths[1]
    )
    run = programs("cpu", model.cfg.dtype)
    reads = run.read_part.lower(model.params, state, 0, part=0, width=512, cfg=cfg)
    steps = run.decode.lower(model.params, state, 8, cfg=cfg)
    for program, width in ((reads, 512), (steps, 1)):
        needed = program.compile().memory_analysis().temp_size_in_bytes
        assert 0 < needed <= temporary_bytes(cfg, 2, 4096, width)


def test_what_makes_it_larger():
    model = dataclasses.replace(tsjax.model_preset("llama3.1-8b"), num_draft_heads=3)
    drafts = tsjax.steps.DecodeConfig(model, tsjax.TokenSwift())
    plain = tsjax.steps.DecodeConfig(model)

    def needed(cfg, batch=1, capacity=32_768, width=16):
        return temporary_bytes(cfg, batch, capacity, width)

    assert needed(plain) < needed(drafts) < needed(drafts, batch=2)
    assert needed(plain) == needed(plain, capacity=131_072) < needed(plain, width=512)
    chosen = needed(drafts, capacity=524_288) - needed(drafts, capacity=262_144)
    assert chosen == 262_144 * 32 * 8 * (4 + 4)  # of each key a score and an integer
    no_pass = tsjax.steps.DecodeConfig(model, tsjax.TokenSwift(draft_from="verified_state"))
    assert needed(no_pass, capacity=262_144) == needed(no_pass, capacity=131_072)


# --- how wide a prefill is -----------------------------------------------------------------------


def test_passes_of_a_prefill_are_wide_on_a_gpu_where_that_fits(monkeypatch):
    """Of all rows together; by the width that was asked for, and for as many slots."""
    model, text = tiny_model(), [1] * 5200
    monkeypatch.setattr(asking, "device_in", lambda params: (platform, "any"))

    def widths(rows=1, **given):
        given = {"exceed_max_positions": True} | given
        settings = {"max_new_tokens": 4}
        return asking.make_request(model, [text] * rows, None, settings, **given).prefill_widths[0]

    platform, narrow = "cpu", [*[512] * 10, 128]
    assert widths() == narrow
    platform = "gpu"
    assert widths() == [2048] * 3
    assert widths(prefill_width=512) == widths(capacity=5250) == narrow
    assert widths(rows=2) == [*[1024] * 5, 128] and widths(rows=4) == narrow
    monkeypatch.setattr(
        sizes, "memory_shortage", lambda one, _: "short" if 2048 in one.prefill_widths[0] else None
    )
    assert widths() == narrow


# --- what a user is told -----------------------------------------------------------------------


class Device(NamedTuple):
    """One that has 50 MB left."""

    platform: str

    def memory_stats(self):
        return {"bytes_limit": 60_000_000, "bytes_in_use": 10_000_000}


def refusal(monkeypatch, platform="gpu", method: Any = "autoregressive", **changes) -> str:
    monkeypatch.setattr(sizes, "own_device", lambda params: Device(platform))
    with pytest.raises(MemoryError) as error:
        tsjax.generate(
            tiny_model(**changes), [1, 2, 3], method=method, max_new_tokens=16, capacity=262_144
        )
    return str(error.value)


def test_the_parts_are_named_and_add_up(monkeypatch):
    text = refusal(monkeypatch, method=tsjax.TokenSwift.paper(draft_budget=64))
    cfg = tsjax.steps.DecodeConfig(tiny_model().cfg, tsjax.TokenSwift.paper(draft_budget=64))
    cache = cache_bytes(cfg.model, 1, 262_144)
    method = memory_bytes(cfg, 1, 262_144, 0)
    temporary = temporary_bytes(cfg, 1, 262_144, 16)
    assert text.startswith(
        f"not enough memory: capacity=262144 slots for 1 rows take {cache + method + temporary:,} "
        "bytes per device, 50,000,000 are free: "
        f"{cache:,} for the cache, {method:,} for what method and prefill remember, "
        f"{temporary:,} for temporary arrays, an estimate; lower max_new_tokens"
    )
    assert "load the model as bfloat16" in text
    assert "method='autoregressive' remembers and scores less" in text
    text = refusal(monkeypatch, dtype="bfloat16")  # what does not help is not named
    assert "bfloat16" not in text and "autoregressive" not in text and "remember" not in text


@pytest.mark.parametrize(
    ("platform", "share", "told"),
    [("gpu", "0.5", True), ("gpu", "0.92", False), ("tpu", None, False)],
)
def test_jax_may_take_more_of_a_gpu(platform, share, told, monkeypatch):
    for name in MEMORY_SHARES:
        monkeypatch.delenv(name, raising=False)
    if share is not None:
        monkeypatch.setenv(MEMORY_SHARES[0], share)
    text = refusal(monkeypatch, platform)
    assert ("XLA_PYTHON_CLIENT_MEM_FRACTION=0.92" in text) == told
    assert (f"jax takes {float(share or 0.75):.0%} of a GPU's memory" in text) == told


def test_weights_in_int8_count_until_they_are_there(monkeypatch):
    model, method = tiny_model(), tsjax.TokenSwift(draft_weights="int8")
    needed = model.bytes_for(method)
    matrices = 2 * (32 * (4 + 2 + 2) * 8 + 32 * 32 + 3 * 32 * 48)  # of two layers
    assert needed == matrices + 61 * 32
    assert model.bytes_for(tsjax.TokenSwift()) == 0
    text = refusal(monkeypatch, method=method)
    assert f"{needed:,} for weights in int8" in text
    made = model.params_for(method).drafts
    arrays = [leaf for leaf in jax.tree.leaves(made) if leaf.dtype == jnp.int8]
    assert sum(array.nbytes for array in arrays) == needed
    assert model.bytes_for(method) == 0


def test_temporary_arrays_alone_can_be_too_much(monkeypatch):
    """The cache and the method's memory would fit."""
    model = tiny_model(vocab_size=61)
    cfg = tsjax.steps.DecodeConfig(model.cfg)
    needed = cache_bytes(model.cfg, 1, 2048) + memory_bytes(cfg, 1, 2048, 0)
    temporary = temporary_bytes(cfg, 1, 2048, 16)
    monkeypatch.setattr(sizes, "available_bytes", lambda device: needed + temporary - 1)
    with pytest.raises(MemoryError, match=f"{temporary:,} for temporary arrays"):
        tsjax.generate(model, [1, 2, 3], max_new_tokens=16)
    monkeypatch.setattr(sizes, "available_bytes", lambda device: needed + temporary)
    assert len(tsjax.generate(model, [1, 2, 3], max_new_tokens=16).tokens[0]) == 16


@pytest.mark.wide
def test_auto_does_without_a_copy_in_int8_that_does_not_fit(monkeypatch):
    """What was asked for by name is refused; what Auto would like is not."""
    free = Line(1.0)
    costs = Costs(
        ((1, free), (128, free)), 0, free, free, 0.0, 0.0, "measured", Int8Costs(Line(0.1), 0)
    )
    model = tiny_model(embed_dim=64, num_layers=2, mlp_dim=4096)
    monkeypatch.setattr(auto, "SHORT_RUN", 1)
    asked = dict(max_new_tokens=8, capacity=128, prefill_width=16)
    needed, shortage = [], sizes.memory_shortage

    def counted(one, of):
        needed.append(of.int8_bytes if one.may_want_int8 else 0)
        return "no room" if needed[-1] else shortage(one, of)

    monkeypatch.setattr(sizes, "memory_shortage", counted)
    found = tsjax.generate(model, [1, 2, 3], method=tsjax.Auto(costs=costs), **asked)
    assert len(found.tokens[0]) == 8 and needed[0] > 0 and needed[1] == 0
    in_int8 = tsjax.LikelyTree(draft_passes=1, draft_weights="int8", costs=costs)
    with pytest.raises(MemoryError, match="no room"):
        tsjax.generate(model, [1, 2, 3], method=in_int8, **asked)
    needed.clear()
    monkeypatch.setattr(auto, "SHORT_RUN", 8)
    tsjax.generate(model, [1, 2, 3], method=tsjax.Auto(costs=costs), **asked)
    assert needed == [0], "so short a run tries no passes"


def test_a_copy_of_an_earlier_run_gives_way(monkeypatch):
    """Of a run that does not draft with it and would not fit beside it."""
    model, method = tiny_model(), tsjax.TokenSwift(draft_weights="int8")
    model.params_for(method)
    shortage = sizes.memory_shortage

    def beside(one, of):
        return shortage(one, of) or ("no room" if "_with_int8" in vars(of) else None)

    monkeypatch.setattr(sizes, "memory_shortage", beside)
    with pytest.raises(MemoryError, match="no room"):
        tsjax.generate(model, [1, 2, 3], method=method, max_new_tokens=8)
    assert model.bytes_for(method) == 0, "is kept where it is wanted"
    assert len(tsjax.generate(model, [1, 2, 3], max_new_tokens=8).tokens[0]) == 8
    assert model.bytes_for(method) > 0


def test_rows_that_lie_on_several_devices_count_once():
    cfg = tsjax.steps.DecodeConfig(tiny_model().cfg, tsjax.TokenSwift.paper(draft_budget=64))
    mesh = jax.make_mesh((4, 1), ("data", "model"))
    one, four = (temporary_bytes(cfg, rows, 2048, 16) for rows in (2, 8))
    assert temporary_bytes(cfg, 8, 2048, 16, mesh) == one < four
    assert temporary_bytes(cfg, 7, 2048, 16, mesh) == temporary_bytes(cfg, 7, 2048, 16)


def test_a_copy_in_int8_is_counted_by_what_each_device_holds():
    model = tiny_model(mesh=jax.make_mesh((1, 2), ("data", "model")))
    matrices = [leaf for leaf in jax.tree.leaves(model.params.model.layers) if leaf.ndim > 1]
    held = sum(leaf.addressable_shards[0].data.size for leaf in matrices)
    assert held <= model.int8_bytes < tiny_model().int8_bytes

# SPDX-License-Identifier: Apache-2.0
"""Meshes of three axes: the tokens of one device, what each device holds, and what is sent."""

import math

import jax
import numpy as np
import pytest
from helpers import tiny_model

import tsjax
from pallas_kernels import native
from tools.gpu_program import sent
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.programs import programs
from tsjax.decoding.start import UNMERGED
from tsjax.errors import NotEnoughMemory
from tsjax.host import sizes
from tsjax.model.cache import cache_bytes, init_cache
from tsjax.model.sharding import usable_mesh

AXES = ("data", "model", "slots")
RAGGED = [[1, 2, 3, 1, 2, 3, 1], [4, 4, 5], [6, 5, 4, 3, 2, 1]]
SAMPLED = dict(do_sample=True, seed=3, repetition_penalty=1.2, repetition_window=8)
SMALL = dict(draft_budget=24, num_sinks=4)
METHODS = {
    "plain": None,
    "ngram": tsjax.NGram(suffix_length=4),
    "tokenswift": tsjax.TokenSwift(tree=(2, 2), draft_rest=True, **SMALL),
    "magicdec": tsjax.MagicDec(draft_budget=24),
    "triforce": tsjax.TriForce(draft_budget=32),
    "auto": tsjax.Auto(),
}


def mesh_of(*sizes):
    return jax.make_mesh(sizes, AXES)


def texts(model, prompts, method, **settings):
    how = dict(max_new_tokens=40, eos_token_id=(), **settings)
    return [row.tolist() for row in tsjax.generate(model, prompts, method=method, **how).tokens]


@pytest.fixture(scope="module")
def single():
    return tiny_model(num_layers=2, num_draft_heads=2)


@pytest.fixture(scope="module")
def wanted(single):
    return texts(single, RAGGED, None, **SAMPLED), texts(single, RAGGED[:1], None)


@pytest.mark.parametrize("sizes", [(1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1)], ids=str)
def test_a_mesh_gives_the_same_tokens(sizes, wanted):
    model = tiny_model(num_layers=2, num_draft_heads=2, mesh=mesh_of(*sizes))
    names = METHODS if sizes in ((1, 1, 4), (1, 2, 2)) else ("plain", "tokenswift")
    for name in names:
        sampled = texts(model, RAGGED, METHODS[name], **SAMPLED)
        assert sampled == wanted[0], name
    assert texts(model, RAGGED[:1], METHODS["tokenswift"]) == wanted[1]


def test_medusa(wanted):
    """Which has heads of its own."""
    shape = dict(num_layers=2, num_draft_heads=2, head_kind="parallel")
    model = tiny_model(mesh=mesh_of(1, 2, 2), **shape)
    found = texts(model, RAGGED, tsjax.Medusa(tree=(2, 2)), **SAMPLED)
    assert found == texts(tiny_model(**shape), RAGGED, None, **SAMPLED)


@pytest.mark.parametrize("choice", ["retrieval", "streaming", "snapkv", "all"])
def test_every_choice_of_a_draft_cache(choice, single):
    """With the drafts of one device: choices do not depend on who holds a token."""
    method = tsjax.TokenSwift(tree=(2,), draft_choice=choice, draft_budget=40, num_sinks=4)
    model = tiny_model(num_layers=2, num_draft_heads=2, mesh=mesh_of(1, 1, 4))
    how = dict(max_new_tokens=60, eos_token_id=(), method=method)
    found, expected = (tsjax.generate(one, RAGGED, **how) for one in (model, single))
    assert [row.tolist() for row in found.tokens] == [row.tolist() for row in expected.tokens]
    assert found.stats.accepted_lengths == expected.stats.accepted_lengths


def test_what_was_read_before_and_runs_that_are_saved(wanted, tmp_path):
    """A prefix and a conversation's cache are dealt out as well; a run goes on where it may."""
    model = tiny_model(num_layers=2, num_draft_heads=2, mesh=mesh_of(1, 2, 2))
    prefix = tsjax.read(model, RAGGED[0][:5])
    method, path = METHODS["tokenswift"], tmp_path / "run.json"
    assert texts(model, RAGGED[:1], method, prefix=prefix) == wanted[1]
    kept = tsjax.generate(model, RAGGED[0], max_new_tokens=9, eos_token_id=(), keep_prefix=True)
    assert kept.tokens[0].tolist() == wanted[1][0][:9]
    longer = [*RAGGED[0], *wanted[1][0][:9]]
    found = texts(model, [longer], method, prefix=kept.prefix)
    assert found[0][:31] == wanted[1][0][9:]
    how = dict(max_new_tokens=17, eos_token_id=(), method=method, **SAMPLED)
    tsjax.generate(model, RAGGED, save_to=path, **how)
    for one in (tiny_model(num_layers=2, num_draft_heads=2), model):
        rest = tsjax.generate(one, resume_from=path, max_new_tokens=40)
        assert [row.tolist() for row in rest.tokens] == wanted[0]


@pytest.mark.parametrize("sizes", [(1, 2, 2), (1, 1, 3)], ids=str)
def test_many_prompts(sizes, single, monkeypatch):
    """Rows that others leave are filled, and the buffers grow, in each part."""
    monkeypatch.setattr(sizes, "capacity_bucket", lambda needed, smallest=1: -(-needed // 32) * 32)
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, AXES, devices=devices)
    model = tiny_model(num_layers=2, num_draft_heads=2, mesh=mesh)
    lines = [*RAGGED, [7] * 70, [5, 4, 5], list(range(1, 30))]
    how = dict(max_new_tokens=12, eos_token_id=(), method=METHODS["tokenswift"], rows=2, **SAMPLED)
    found = {one.index: one.tokens.tolist() for one in tsjax.generate_many(model, lines, **how)}
    wanted = {one.index: one.tokens.tolist() for one in tsjax.generate_many(single, lines, **how)}
    assert found == wanted and len(found) == len(lines)


def test_a_lazy_prefill_is_refused_where_slots_are_split():
    model = tiny_model(num_layers=2, mesh=mesh_of(1, 2, 2))
    with pytest.raises(ValueError, match=r"lazy prefill .*2 parts of slots.*'data' and 'model'"):
        tsjax.generate(model, RAGGED[0], max_new_tokens=2, prefill=tsjax.LazyPrefill(keep={1: 0.5}))


def test_each_device_holds_its_part_and_a_run_that_one_cannot_hold_works(monkeypatch, single):
    model = tiny_model(num_layers=2, num_draft_heads=2, mesh=mesh_of(1, 1, 4))
    cache = init_cache(model.cfg, 3, 2048, mesh=usable_mesh(mesh_of(1, 1, 4)))
    whole = cache_bytes(model.cfg, 3, 2048)
    for device in range(4):
        held = [buffer.addressable_shards[device].data for buffer in (*cache.k, *cache.v)]
        assert sum(one.nbytes for one in held) == whole // 4
    # With room for three quarters of what the cache of one device takes; a CPU's devices share.
    large = 262_144
    limit = UNMERGED + 3 * cache_bytes(single.cfg, 1, large) // 4
    monkeypatch.setattr(sizes, "available_bytes", lambda device: limit)
    run = dict(max_new_tokens=5, capacity=large, exceed_max_positions=True)
    with pytest.raises(NotEnoughMemory):
        tsjax.generate(single, RAGGED[0], **run)
    by_heads = tiny_model(num_layers=2, num_draft_heads=2, mesh=mesh_of(1, 4, 1))
    with pytest.raises(
        NotEnoughMemory,
        match="4 devices hold 4 copies of the cache: more of them along an axis 'slo",
    ):
        tsjax.generate(by_heads, RAGGED[0], **run)
    monkeypatch.setattr(sizes, "available_bytes", lambda device: 4 * limit)
    found = tsjax.generate(model, RAGGED[0], **run).tokens[0]
    monkeypatch.undo()
    assert found.tolist() == tsjax.generate(single, RAGGED[0], max_new_tokens=5).tokens[0].tolist()


@pytest.mark.parametrize("sizes", [(1, 1, 4), (1, 2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["plain", "tokenswift", "prefill"])
def test_no_cache_and_no_weight_is_sent(name, sizes):
    """Each collective of a step is smaller than a part of a layer's cache and than a matrix."""
    mesh = usable_mesh(mesh_of(*sizes))
    capacity, method = 16_384, METHODS.get(name) or tsjax.Autoregressive()
    model = tiny_model(num_layers=2, num_draft_heads=2, mesh=mesh, mlp_dim=8192)
    cfg = DecodeConfig(model.cfg, method)
    rows = 2 * sizes[0]
    state = tsjax.init_state(
        np.ones((rows, 8), np.int32), np.full(rows, 8), cfg=cfg, capacity=capacity,
        max_length=np.full(rows, 4000), mesh=mesh,
    )  # fmt: skip
    made = programs("cpu", "float32")
    if name == "prefill":
        lowered = made.read_part.lower(model.params, state, 0, part=0, width=16, cfg=cfg)
    else:
        lowered = made.decode.lower(model.params, state, 1, cfg=cfg)
    # In plain XLA a choice gathers scores, a block at a time: XLA does not split its top_k.
    every = native.status(try_now=True).state == "ready"
    each = sent(lowered.compile().as_text())["each"]
    found = [one["bytes"] for one in each if every or len(one["inside"]) < 2]
    part = state.kv.k[0].addressable_shards[0].data.nbytes
    matrix = model.params.model.layers[0].down.addressable_shards[0].data.nbytes
    assert found and max(found) < min(part, matrix) / 2

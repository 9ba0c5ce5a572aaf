# SPDX-License-Identifier: Apache-2.0
"""Meshes of three axes: the tokens of one device, what each device holds, and what is sent.

Every method meets a mesh in test_method_contract.py.
"""

import math

import jax
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import PROMPTS, SIZES, compilations, looping_model, tiny_model

import tsjax
from pallas_kernels import native
from tools.gpu_program import sent
from tsjax.base.errors import NotEnoughMemory
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.held import UNMERGED
from tsjax.decoding.programs import programs
from tsjax.host import sizes as run_sizes
from tsjax.model.cache import cache_bytes, init_cache
from tsjax.model.sharding import usable_mesh

AXES = ("data", "model", "slots")
SAMPLED = dict(do_sample=True, min_p=0.02, repetition_penalty=1.1, seed=7)  # as in the contract
ANY = AnyTree()
HOW = dict(max_new_tokens=24, **SIZES)
TOKENSWIFT = tsjax.TokenSwift(tree=(2, 2), draft_rest=True, draft_budget=24, num_sinks=4)


def mesh_of(*sizes):
    return jax.make_mesh(sizes, AXES, devices=jax.devices()[: math.prod(sizes)])


def texts(model, prompts=PROMPTS, method=ANY, **settings):
    result = tsjax.generate(model, prompts, method=method, **{**HOW, **SAMPLED, **settings})
    assert method is None or result.stats.tokens_per_step > 1.1
    return [row.tolist() for row in result.tokens]


@pytest.fixture(scope="module")
def wanted():
    return texts(looping_model(), method=None)


@pytest.mark.wide
@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 2, 1)], ids=str)
def test_a_mesh_gives_the_same_tokens(sizes, wanted):
    model = looping_model(mesh=mesh_of(*sizes))
    assert texts(model) == wanted == texts(model, method=None)


def test_a_batch_that_the_mesh_does_not_divide_compiles_once(wanted):
    model = looping_model(mesh=mesh_of(2, 1, 2))
    assert texts(model) == wanted
    with compilations() as names:
        texts(model, max_new_tokens=30, eos_token_id=5)
    assert not {"jit(decode)", "jit(read_part)"} & {*names}


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ({"model": 4}, {"vocab_size": 64, "num_kv_heads": 4}),
        ({"model": 4}, {"num_heads": 6, "num_kv_heads": 3}),  # only the mlp can be cut in 4
        ({"model": 2}, {"num_kv_heads": 1}),  # and query heads, as kernels are on each device
    ],
)
def test_shapes_that_are_hard_to_cut(shape, changes):
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape))  # with Explicit axes
    placed, single = (tiny_model(num_layers=1, mesh=one, **changes) for one in (mesh, None))
    assert not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(placed.params))
    if shape == {"model": 2}:
        assert texts(placed, method=None) == texts(single, method=None)
    logits = tsjax.forward(placed, PROMPTS[:1])
    np.testing.assert_allclose(logits, tsjax.forward(single, PROMPTS[:1]), atol=2e-5)


def test_an_unknown_axis_is_refused(tmp_path):
    mesh = jax.make_mesh((4,), ("tensor",))
    with pytest.raises(ValueError, match=r"'tensor'.*use 'data' and 'model' and 'slots'"):
        tsjax.load(tmp_path, mesh=mesh)


@pytest.mark.wide
def test_what_was_read_before_and_runs_that_are_saved(wanted, any_tree_has_a_name, tmp_path):
    """A prefix and a conversation's cache are dealt out as well; a run goes on where it may."""
    model, path = looping_model(mesh=mesh_of(1, 2, 2)), tmp_path / "run.json"
    prompt, made = PROMPTS[0], wanted[0]
    prefix = tsjax.read(model, prompt[:5])
    assert texts(model, [prompt], prefix=prefix) == [made]
    begin = dict(HOW, **SAMPLED, max_new_tokens=9, method=ANY)
    kept = tsjax.generate(model, prompt, keep_prefix=True, save_to=path, **begin)
    assert kept.tokens[0].tolist() == made[:9]
    longer = [*prompt, *made[:9]]
    assert texts(model, [longer], prefix=kept.prefix, max_new_tokens=15) == [made[9:]]
    for one in (looping_model(), model):
        rest = tsjax.generate(one, resume_from=path, max_new_tokens=24, **SIZES)
        assert rest.tokens[0].tolist() == made


@pytest.mark.wide
def test_many_prompts(monkeypatch):
    """Rows that others leave are filled, and the buffers grow, in each part."""
    monkeypatch.setattr(
        run_sizes, "capacity_bucket", lambda needed, smallest=1: -(-needed // 64) * 64
    )
    model, single = looping_model(mesh=mesh_of(1, 1, 3)), looping_model()
    lines = [*PROMPTS, [7] * 70, [5, 4, 5], list(range(1, 24))]
    how = dict(max_new_tokens=12, method=ANY, rows=2, prefill_width=16, **SAMPLED)
    answers = list(tsjax.generate_many(model, lines, **how))
    assert len(answers) == len(lines)
    for one in answers:
        alone = texts(single, [lines[one.index]], None, max_new_tokens=12)
        assert [one.tokens.tolist()] == alone


REVIVALS = {
    "in_batches": (1, 2, 2),
    "never": (1, 1, 4),
    "on_demand": (1, 1, 3),
    "background": (2, 1, 2),
}


@pytest.mark.parametrize(
    "revive", ["in_batches", *(pytest.param(one, marks=pytest.mark.wide) for one in REVIVALS)]
)
def test_a_lazy_prefill_where_slots_are_split(revive):
    """Each layer deals out the tokens that it has; what is kept lies in the order of the text."""
    lazy = tsjax.LazyPrefill(keep={1: 0.3}, revive=revive, choose_every=3, revive_rows=5)
    prompts = [row * 8 for row in PROMPTS]
    mesh, single = looping_model(mesh=mesh_of(*REVIVALS[revive])), looping_model()
    how = dict(method=None, prefill=lazy)
    assert texts(mesh, prompts, **how) == texts(single, prompts, **how)
    last = []
    for model in (mesh, single):
        kept = tsjax.generate(
            model, prompts[0], prefill=lazy, keep_prefix=True, max_new_tokens=7, **SIZES
        )
        longer = [*prompts[0], *kept.tokens[0].tolist(), *prompts[1]]
        last.append(texts(model, [longer], prefix=kept.prefix, **how))
        if model is mesh:
            _, *split = REVIVALS[revive]
            for held in kept.prefix.cache.k:  # also the first one, as the run had it
                assert held.addressable_shards[0].data.nbytes * math.prod(split) == held.nbytes
    assert last[0] == last[1]


def test_each_device_holds_its_part_and_a_run_that_one_cannot_hold_works(monkeypatch):
    model, single = looping_model(mesh=mesh_of(1, 1, 4)), looping_model()
    whole, mesh = cache_bytes(model.cfg, 3, 2048), usable_mesh(mesh_of(1, 1, 4))
    in_program = jax.jit(init_cache, static_argnames=("cfg", "batch", "capacity", "mesh"))
    for make in (init_cache, in_program):
        cache = make(cfg=model.cfg, batch=3, capacity=2048, mesh=mesh)
        for device in range(4):
            held = [buffer.addressable_shards[device].data for buffer in (*cache.k, *cache.v)]
            assert sum(one.nbytes for one in held) == whole // 4
    # With room for three quarters of what the cache of one device takes; a CPU's devices share.
    large = 262_144
    limit = UNMERGED + 3 * cache_bytes(single.cfg, 1, large) // 4
    monkeypatch.setattr(run_sizes, "available_bytes", lambda device: limit)
    run = dict(max_new_tokens=5, capacity=large, exceed_max_positions=True)
    with pytest.raises(NotEnoughMemory):
        tsjax.generate(single, PROMPTS[0], **run)
    with pytest.raises(
        NotEnoughMemory,
        match="4 devices hold 4 copies of the cache: more of them along an axis 'slo",
    ):
        tsjax.generate(looping_model(mesh=mesh_of(1, 4, 1)), PROMPTS[0], **run)
    monkeypatch.setattr(run_sizes, "available_bytes", lambda device: 4 * limit)
    found = tsjax.generate(model, PROMPTS[0], **run).tokens[0]
    monkeypatch.undo()
    wanted = tsjax.generate(single, PROMPTS[0], max_new_tokens=5, **SIZES).tokens[0]
    assert found.tolist() == wanted.tolist()


BY_DEFAULT = [("prefill", (1, 2, 2)), ("tokenswift", (1, 2, 2))]
WIDE = [(name, sizes) for name in ("prefill", "tokenswift") for sizes in ((1, 1, 4), (2, 1, 2))]


@pytest.mark.parametrize(
    ("name", "sizes"), [*BY_DEFAULT, *(pytest.param(*one, marks=pytest.mark.wide) for one in WIDE)]
)
def test_no_cache_and_no_weight_is_sent(name, sizes):
    """Each collective of a step is smaller than a part of a layer's cache and than a matrix."""
    mesh, rows = usable_mesh(mesh_of(*sizes)), 2 * sizes[0]
    model = tiny_model(num_layers=2, num_draft_heads=2, mesh=mesh, mlp_dim=8192)
    plain = tsjax.methods.Autoregressive()
    cfg = DecodeConfig(model.cfg, plain if name == "prefill" else TOKENSWIFT)
    state = tsjax.steps.init_state(
        np.ones((rows, 8), np.int32), np.full(rows, 8), cfg=cfg, capacity=16_384,
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


@pytest.mark.parametrize("given", ["host", "one device", "another mesh", "the same mesh"])
def test_other_weights_are_placed_as_the_model_is(given):
    """From wherever a trainer has them; those that lie there already are not copied."""
    mesh = mesh_of(2, 2, 1)
    model, other = looping_model(mesh=mesh), looping_model(seed=3).params
    if given == "host":
        other = jax.tree.map(np.asarray, other)
    elif given == "another mesh":
        other = looping_model(seed=3, mesh=mesh_of(1, 2, 2)).params
    elif given == "the same mesh":
        other = looping_model(seed=3, mesh=mesh).params
    found = model.with_params(other).params
    wanted = jax.tree.leaves(looping_model(seed=3).params)
    leaves = zip(*map(jax.tree.leaves, (found, model.params, other)), wanted, strict=True)
    for one, old, array, value in leaves:
        assert one.sharding == old.sharding
        assert (one is array) == (given == "the same mesh")
        np.testing.assert_array_equal(one, value)

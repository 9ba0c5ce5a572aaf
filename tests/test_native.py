# SPDX-License-Identifier: Apache-2.0
"""The kernels in C++ for CPUs: their values, their one order of summation, and how they get there.

Values are held against float64 NumPy. The order of summation is held against itself: a row that
runs alone, with all that it sees committed, has the bits that it has among others.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_model
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernel_cases import (
    check_scores,
    define_both,
    define_scores,
    make_inputs,
    make_rest,
    make_score_inputs,
    poison,
    random_tree,
    relative_error,
)

from pallas_kernels import (
    Ranks,
    Summary,
    cache_scores,
    decode_attention,
    native,
    product,
    rms_norm,
    tree_attention,
)
from pallas_kernels.native import build
from pallas_kernels.product.reference import product as product_reference
from tsjax.model.cache import init_cache, write_rows
from tsjax.model.passes import run_rows
from tsjax.model.transformer import final_norm, unembed

ROOT = pathlib.Path(__file__).parents[1]
HAS_COMPILER = native.status(try_now=True).state == "ready"
needs_kernels = pytest.mark.skipif(not HAS_COMPILER, reason=native.status().reason)
LARGEST_ERROR = {"float32": 3e-6, "bfloat16": 1e-2}

run_native = jax.jit(
    functools.partial(tree_attention, implementation="native", with_log_totals=True)
)


# --- values ----------------------------------------------------------------------------------

# Blocks of 64 slots, parts of 1024, groups of 96 rows, tiles of 6: sizes around their edges.
CASES = [
    dict(B=3, T=1, length=(40, 0, 17)),
    dict(B=3, T=5, K=3, G=1, length=(40, 1, 39)),
    dict(B=2, T=7, K=2, G=3, H=48, S=300, length=(300, 191)),
    dict(B=2, T=1, K=2, G=8, H=128, S=130, length=(128, 127)),
    dict(T=20, K=1, G=5, H=80, S=130, length=(65,)),
    dict(B=4, T=3, K=5, G=1, H=24, S=2100, length=(1024, 1023, 1025, 2100)),
    dict(T=150, K=2, G=1, H=64, S=2500, length=(2040,)),
    dict(T=100, B=2, K=2, G=2, H=8, S=1100, length=(1000, 64)),
    # Keys that AVX-512 turns: long ones for many rows, and some whose rows are no whole vectors.
    dict(T=40, K=1, G=2, H=128, S=300, length=(300,)),
    dict(T=9, K=2, G=1, H=24, S=200, length=(190,)),
]


@needs_kernels
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("shape", CASES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_attention(shape, dtype, rng):
    inputs = make_inputs(rng, **shape, dtype=dtype)
    rest = make_rest(rng, inputs)
    B, T, S = *inputs[0].shape[:2], inputs[1].shape[2]
    slots = rng.integers(0, 9, (B, S)).astype(np.int32)
    rows = rng.integers(1, 9, (B, T)).astype(np.int32)
    visible = slots[:, None] < rows[..., None]
    for summary, ranks in ((None, None), (rest, None), (rest, Ranks(slots, rows))):
        expected = define_both(*inputs, rest=summary, visible=None if ranks is None else visible)
        found = run_native(*inputs, rest=summary and Summary(*summary), ranks=ranks)
        assert found[0].dtype == dtype and found[1].dtype == jnp.float32
        assert relative_error(found[0], expected[0]) < LARGEST_ERROR[dtype]
        assert relative_error(found[1], expected[1]) < 3e-6


@needs_kernels
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize(
    "shape",
    [
        dict(B=2, T=5, K=2, G=2, S=700, length=(700, 333)),
        dict(T=120, K=1, G=2, H=32, S=2500, length=(2300,)),
    ],
)
def test_blocks_that_no_row_may_see_are_left_out(shape, dtype, rng):
    """Slots in the order in which tokens were computed, in ascending pieces; rows by position."""
    inputs = make_inputs(rng, **shape, dtype=dtype)
    B, T, S = *inputs[0].shape[:2], inputs[1].shape[2]
    slots = np.empty((B, S), np.int32)
    for b in range(B):
        positions, cut = rng.permutation(2 * S)[:S], S // 3
        slots[b] = np.concatenate([np.sort(piece) for piece in np.split(positions, [cut, 2 * cut])])
    rows = np.sort(rng.integers(1, 2 * S, (B, T)).astype(np.int32), axis=1)
    rows[:, 0] = 1
    expected = define_both(*inputs, visible=slots[:, None] < rows[..., None])
    together = run_native(*inputs, ranks=Ranks(slots, rows))
    assert relative_error(together[0], expected[0]) < LARGEST_ERROR[dtype]
    assert relative_error(together[1], expected[1]) < 3e-6
    # A row has the same bits where it alone decides which blocks are read.
    q, k_cache, v_cache, length, k_new, v_new, mask = inputs
    blind = run_native(
        q, k_cache, v_cache, length, k_new, v_new, np.zeros((B, T, T), bool),
        ranks=Ranks(slots, rows),
    )  # fmt: skip
    for t in (0, 1, T // 2, T - 1):
        mine = slice(t, t + 1)
        itself = np.zeros((B, 1, 1), bool)
        alone = run_native(
            q[:, mine], k_cache, v_cache, length, k_new[:, mine], v_new[:, mine], itself,
            ranks=Ranks(slots, rows[:, mine]),
        )  # fmt: skip
        if (slots < rows[:, mine]).any(axis=1).all():  # else it sees nothing, which is unspecified
            np.testing.assert_array_equal(alone[0], blind[0][:, mine])
            np.testing.assert_array_equal(alone[1], blind[1][:, mine])


@needs_kernels
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_slots_beyond_the_length_and_rows_that_are_not_seen_change_nothing(bad, rng):
    inputs = make_inputs(rng, B=3, T=6, S=200, length=(200, 67, 0))
    q, k_cache, v_cache, length, *fresh, mask = inputs
    clean = run_native(*inputs)
    caches = [poison(cache, length, bad) for cache in (k_cache, v_cache)]
    for found, expected in zip(run_native(q, *caches, *inputs[3:]), clean, strict=True):
        np.testing.assert_array_equal(found, expected)


@needs_kernels
@pytest.mark.parametrize("mode", ["dot", "softmax"])
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize(
    "shape",
    [
        dict(length=(40, 11, 0)),
        dict(K=3, G=7, S=300, H=48, length=(300, 65)),
        dict(K=2, G=1, S=2100, H=80, length=(1024, 2049)),
        dict(K=1, G=8, S=70, H=128, length=(64,)),
    ],
)
def test_scores(shape, dtype, mode, rng):
    inputs = make_score_inputs(rng, dtype=dtype, **shape)
    q, k_cache, length = inputs
    scores = functools.partial(cache_scores, q, poison(k_cache, length), length, mode)
    scores = functools.partial(scores, implementation="native")
    check_scores(scores(), inputs, mode)
    if mode == "softmax":
        log_totals = jnp.asarray(rng.uniform(3, 9, q.shape[:2]), jnp.float32)
        expected = define_scores(*inputs, mode, log_totals=np.asarray(log_totals, float))
        assert relative_error(scores(log_totals=log_totals), expected) < 3e-6


WEIGHTS = {  # rows, weights, and the largest error relative to the largest sum
    "float32": ("float32", "float32", 1e-6),
    "bfloat16": ("bfloat16", "bfloat16", 1e-6),
    "int8": ("float32", "int8", 1e-6),
    "bfloat16-int8": ("bfloat16", "int8", 1e-6),
}


def make_product(rng, kind, lead, outputs, inputs):
    rows_type, weights_type, error = WEIGHTS[kind]
    rows = jnp.asarray(rng.standard_normal((*lead, inputs)), rows_type)
    scales = None
    if weights_type == "int8":
        weights = jnp.asarray(rng.integers(-127, 128, (outputs, inputs)), "int8")
        scales = jnp.asarray(rng.uniform(0.1, 1, outputs), "float32")
    else:
        weights = jnp.asarray(rng.standard_normal((outputs, inputs)), weights_type)
    matrix = np.asarray(weights, float)
    matrix = matrix if scales is None else matrix * np.asarray(scales, float)[:, None]
    return (rows, weights, scales), np.asarray(rows, float) @ matrix.T, error


@needs_kernels
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(
    "lead, outputs, inputs",
    [
        ((), 1, 1),
        ((1,), 9, 16),
        ((1, 2), 30, 37),
        ((2, 3), 131, 288),
        ((7,), 5, 8),
        ((3, 50), 64, 99),
    ],
)
def test_products(lead, outputs, inputs, kind, rng):
    (rows, weights, scales), expected, error = make_product(rng, kind, lead, outputs, inputs)
    out = product(rows, weights, scales=scales, implementation="native")
    assert out.dtype == jnp.float32
    assert relative_error(out, expected) < error
    xla = product(rows, weights, scales=scales, implementation="xla")
    assert relative_error(xla, expected) < error
    assert relative_error(product_reference(rows, weights, scales), expected) < error


@needs_kernels
@pytest.mark.parametrize("kind", WEIGHTS)
@hypothesis.settings(max_examples=20)
@hypothesis.given(
    T=st.integers(2, 30),
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 90),
    seed=st.integers(0),
)
def test_a_row_of_a_product_has_the_same_bits_alone(kind, T, inputs, outputs, seed):
    rng = np.random.default_rng(seed)
    (rows, weights, scales), _, _ = make_product(rng, kind, (1, T), outputs, inputs)
    together = np.asarray(product(rows, weights, scales=scales, implementation="native"))
    for t in {0, T // 2, T - 1}:
        alone = product(rows[:, t], weights, scales=scales, implementation="native")
        np.testing.assert_array_equal(alone, together[:, t])


@needs_kernels
@pytest.mark.parametrize("split", ["outputs", "inputs"])
def test_products_on_a_mesh(split, rng):
    """Weights that are split by outputs need no other device; by inputs, sums are added up."""
    (rows, weights, _), expected, _ = make_product(rng, "float32", (2, 3), 32, 64)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    placed = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))
        for array, axes in zip(
            (rows, weights),
            (("data", None, None), ("model", None))
            if split == "outputs"
            else (("data", None, "model"), (None, "model")),
            strict=True,
        )
    ]
    compiled = jax.jit(functools.partial(product, implementation="native")).lower(*placed).compile()
    text = compiled.as_text()
    assert "tsjax_product_" in text and "all-gather" not in text
    assert ("all-reduce" in text) == (split == "inputs")
    assert relative_error(compiled(*placed), expected) < 1e-6


@needs_kernels
def test_products_under_vmap_and_grad(rng):
    (rows, weights, _), expected, _ = make_product(rng, "float32", (4, 3), 8, 16)
    kernel = functools.partial(product, implementation="native")
    np.testing.assert_array_equal(jax.vmap(kernel, (0, None))(rows, weights), kernel(rows, weights))
    several = jnp.stack([weights, 2 * weights])
    both = jax.vmap(kernel, (None, 0))(rows, several)
    assert relative_error(both, np.stack([expected, 2 * expected])) < 1e-6
    found = jax.grad(lambda weights: jnp.sum(product(rows, weights) ** 2))(weights)
    wanted = 2 * np.einsum("tio,tid->od", expected, np.asarray(rows, float))
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize(
    "rows, weights, scales, message",
    [
        (np.ones((2, 3), "f"), np.ones((4, 5), "f"), None, r"rows \(2, 3\), weights \(4, 5\)"),
        (np.ones((2, 3), "i"), np.ones((4, 3), "f"), None, "rows of type int32 is not valid"),
        (np.ones((2, 3), "f"), np.ones((4, 3), "b"), None, "type int8 is not valid: fl"),
        (np.ones((2, 3), "f"), np.ones((4, 3), "f"), np.ones(4, "f"), "with scales: int8"),
        (np.ones((2, 3), "f"), np.ones((4, 3), "b"), np.ones(3, "f"), r"scales of shape \(3,\)"),
    ],
)
def test_products_that_do_not_fit_are_refused(rows, weights, scales, message):
    with pytest.raises(ValueError, match=message):
        product(rows, weights, scales=scales)


@needs_kernels
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("shape", [(5,), (1, 8), (2, 3, 37), (1, 40, 288), (2, 5, 3, 16)])
def test_norms(shape, dtype, rng):
    rows = jnp.asarray(rng.standard_normal(shape), dtype)
    weight = jnp.asarray(rng.uniform(0.5, 2, shape[-1]), dtype)
    wide = np.asarray(rows, float)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(weight, float)
    for name in ("native", "xla"):
        out = rms_norm(rows, weight, 1e-5, implementation=name)
        assert out.dtype == dtype and relative_error(out, expected) < LARGEST_ERROR[dtype]
    together = np.asarray(rms_norm(rows, weight, 1e-5)).reshape(-1, shape[-1])
    for row, whole in zip(rows.reshape(-1, shape[-1]), together, strict=True):
        np.testing.assert_array_equal(rms_norm(row, weight, 1e-5), whole)


@needs_kernels
def test_norms_under_vmap_and_grad_and_on_a_mesh(rng):
    rows = jnp.asarray(rng.standard_normal((4, 2, 16)), jnp.float32)
    weight = jnp.asarray(rng.uniform(0.5, 2, 16), jnp.float32)
    kernel = functools.partial(rms_norm, eps=1e-5, implementation="native")
    expected = kernel(rows, weight)
    np.testing.assert_array_equal(jax.vmap(kernel, (0, None))(rows, weight), expected)
    one_each = jax.vmap(kernel, (0, 0))(rows, jnp.stack([weight] * 4))
    np.testing.assert_allclose(one_each, expected, rtol=1e-6)

    def total(rows, implementation):
        return jnp.sum(rms_norm(rows, weight, 1e-5, implementation=implementation) ** 3)

    found = jax.grad(total)(rows, None)
    np.testing.assert_allclose(found, jax.grad(total)(rows, "xla"), rtol=0, atol=1e-4)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    placed = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
    compiled = jax.jit(kernel).lower(placed, weight).compile()
    assert "all-gather" not in compiled.as_text()
    np.testing.assert_array_equal(compiled(placed, weight), expected)


def test_norms_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"rows \(2, 3\), weight \(4,\)"):
        rms_norm(np.ones((2, 3), "f"), np.ones(4, "f"), 1e-5)
    with pytest.raises(ValueError, match="rows of type int32"):
        rms_norm(np.ones((2, 3), "i"), np.ones(3, "f"), 1e-5)


def test_what_is_not_served_goes_to_xla(rng):
    for wrong, message in ((dict(H=12), "head_dim 12: a multiple"), (dict(dtype="float16"), "16")):
        inputs = make_inputs(rng, **wrong)
        with pytest.raises(NotImplementedError, match=f"native: .*{message}"):
            tree_attention(*inputs, implementation="native")
        out = tree_attention(*inputs)
        np.testing.assert_array_equal(out, tree_attention(*inputs, implementation="xla"))


@needs_kernels
def test_it_is_chosen_for_cpus_and_for_nothing_else(rng):
    inputs = make_inputs(rng)
    traced = jax.jit(tree_attention).trace(*inputs)
    assert "tsjax_tree_attention_" in traced.lower().as_text()
    assert "tsjax_tree_attention_" not in traced.lower(lowering_platforms=("rocm",)).as_text()


@needs_kernels
@pytest.mark.parametrize("arrays, attributes", [(1, 1), (3, 1), (2, 0)])
def test_a_call_with_other_arrays_or_attributes_is_an_error(arrays, attributes):
    x = jnp.ones((2, 8))
    call = jax.ffi.ffi_call(
        native.library().target("tsjax_rms_norm"), jax.ShapeDtypeStruct(x.shape, x.dtype)
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="too few or too many arrays"):
        call(*[x] * arrays, **dict(eps=np.float32(1e-5)) if attributes else {})


@hypothesis.given(
    sizes=st.dictionaries(st.text(), st.integers(1, 20_000), min_size=1),
    cpus=st.none() | st.integers(1, 8),
)
def test_sources_are_compiled_in_so_many_parts_as_there_are_cpus(sizes, cpus):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: cpus)
        units = build._units(sizes)
    assert sorted(path for unit in units for path in unit) == sorted(sizes)
    assert len(units) == min(cpus or 1, len(sizes))
    loads = [sum(sizes[path] for path in unit) for unit in units]
    assert all(units) and max(loads) <= sum(sizes.values()) / len(units) + max(sizes.values())


@needs_kernels
def test_a_derivative_is_that_of_xla(rng):
    q, *others = make_inputs(rng, T=4)

    def total(q, implementation=None):
        return jnp.sum(jnp.sin(tree_attention(q, *others, implementation=implementation)))

    found, expected = (
        jax.grad(total)(q),
        jax.grad(functools.partial(total, implementation="xla"))(q),
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert np.abs(expected).max() > 1e-2


@needs_kernels
def test_vmap_makes_more_batch_rows(rng):
    together = [make_inputs(rng, B=2, length=(40, 7)) for _ in range(3)]
    stacked = [jnp.stack(arrays) for arrays in zip(*together, strict=True)]
    kernel = functools.partial(tree_attention, implementation="native")
    for one, inputs in zip(jax.vmap(kernel)(*stacked), together, strict=True):
        np.testing.assert_array_equal(one, kernel(*inputs))


@needs_kernels
def test_on_a_mesh_each_device_has_its_rows_and_heads(rng):
    """The cache stays where it is: no device sees the shard of another."""
    inputs = make_inputs(rng, B=2, K=2, G=2, T=3, length=(40, 9))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    parts = [("data", None, "model"), *[("data", "model")] * 2, ("data",)]
    parts += [("data", None, "model")] * 2 + [("data",)]
    placed = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec(*part)))
        for array, part in zip(inputs, parts, strict=True)
    ]
    compiled = run_native.lower(*placed).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and "tsjax_tree_attention_" in text
    for found, expected in zip(compiled(*placed), run_native(*inputs), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.sharding.spec[0] == "data"


@needs_kernels
def test_inside_x64(rng):
    with jax.enable_x64(True):
        inputs = make_inputs(rng, B=2, length=(40, 9))
        inputs = *inputs[:3], jnp.asarray(inputs[3], jnp.int64), *inputs[4:]
        out = tree_attention(*inputs, implementation="native")
        assert out.dtype == jnp.float32
        assert relative_error(out, define_both(*inputs)[0]) < 3e-6


# --- one order of summation -------------------------------------------------------------------


def alone(inputs, b, t):
    """The inputs of row t of batch row b as plain decoding has them: it runs alone, and what it
    sees, itself excepted, is committed."""
    q, k_cache, v_cache, length, k_new, v_new, mask = (np.asarray(x) for x in inputs)
    seen = [u for u in np.flatnonzero(mask[b, t]) if u != t]
    n, m = int(length[b]), len(seen)
    caches = []
    for cache, fresh in ((k_cache, k_new), (v_cache, v_new)):
        longer = np.zeros((1, cache.shape[1], n + m + 1, cache.shape[3]), cache.dtype)
        longer[0, :, :n] = cache[b, :, :n]
        longer[0, :, n : n + m] = fresh[b, seen].swapaxes(0, 1)
        caches.append(longer)
    rows = (x[b : b + 1, t : t + 1] for x in (k_new, v_new))
    itself = np.ones((1, 1, 1), bool)
    return q[b : b + 1, t : t + 1], *caches, np.asarray([n + m], np.int32), *rows, itself


@needs_kernels
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
def test_a_row_has_the_same_bits_whatever_runs_beside_it(dtype, data):
    """Any tree, group, batch and position; cached or fresh; parts of the context crossed or not."""
    B, T = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 3), (3, 8), (1, 40), (1, 130)]))
    K, G, H = data.draw(st.sampled_from([(1, 1, 8), (2, 3, 48), (1, 7, 16), (3, 2, 24)]))
    edge = data.draw(st.sampled_from([0, 64, 1024, 2048]))
    lengths = [max(0, edge + data.draw(st.integers(-40, 40))) for _ in range(B)]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    inputs = list(make_inputs(rng, B=B, T=T, K=K, G=G, H=H, S=2100, length=lengths, dtype=dtype))
    kind = data.draw(st.sampled_from(["tree", "chain"]))
    tree = np.tril(np.ones((T, T), bool)) if kind == "chain" else random_tree(rng, T)
    inputs[6] = np.broadcast_to(tree, (B, T, T))
    out, log_totals = map(np.asarray, run_native(*inputs))
    for b in range(B):
        for t in {0, T - 1, int(rng.integers(0, T))}:
            own_out, own_total = map(np.asarray, run_native(*alone(inputs, b, t)))
            np.testing.assert_array_equal(own_out[0, 0], out[b, t])
            np.testing.assert_array_equal(own_total[0, 0], log_totals[b, t])


@needs_kernels
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_one_row_by_its_own_function(dtype, rng):
    """decode_attention, a row of many in a long pass, and a row in a batch: the same bits."""
    inputs = make_inputs(rng, B=2, T=200, K=1, G=2, H=16, S=1500, length=(1000, 77), dtype=dtype)
    inputs = *inputs[:6], np.broadcast_to(np.tril(np.ones((200, 200), bool)), (2, 200, 200))
    out = run_native(*inputs)[0]
    for b, t in ((0, 0), (0, 23), (0, 199), (1, 150)):
        q, k_cache, v_cache, length, k_new, v_new, _ = alone(inputs, b, t)
        one = decode_attention(q[:, 0], k_cache, v_cache, length, k_new[:, 0], v_new[:, 0])
        np.testing.assert_array_equal(one[0], out[b, t])


@needs_kernels
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("length, T", [(5, 3), (60, 9), (1000, 40)])
def test_a_row_of_a_whole_pass_has_the_bits_of_plain_decoding(dtype, length, T, rng):
    """Logits, keys and values: so drafts cannot change a token, in bfloat16 either."""
    model = tiny_model(dtype=dtype, num_layers=2)
    cfg, weights = model.cfg, model.params.model
    cache = init_cache(cfg, 1, length + T)

    def normal(buffer):
        return jnp.asarray(rng.standard_normal(buffer.shape), dtype)

    cache = cache.replace(
        k=tuple(map(normal, cache.k)), v=tuple(map(normal, cache.v)),
        length=jnp.full((1,), length, jnp.int32),
    )  # fmt: skip
    tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, (1, T)), jnp.int32)

    @jax.jit
    def run(cache, tokens, positions, mask):
        rows = run_rows(weights, cache, tokens, positions, mask, cfg=cfg)
        return rows, unembed(weights, final_norm(weights, rows.hidden, cfg=cfg), cfg=cfg)

    positions = length + jnp.arange(T, dtype=jnp.int32)[None]
    together, logits = run(cache, tokens, positions, jnp.tril(jnp.ones((T, T), bool)))
    for t in range(T):
        one = slice(t, t + 1)
        alone, own_logits = run(cache, tokens[:, one], positions[:, one], jnp.ones((1, 1), bool))
        np.testing.assert_array_equal(own_logits[0, 0], logits[0, t])
        for ours, theirs in zip((*alone.k, *alone.v), (*together.k, *together.v), strict=True):
            np.testing.assert_array_equal(ours[:, 0], theirs[:, t])
        cache = write_rows(cache, alone.k, alone.v, cache.length, after=own_logits)
        cache = cache.replace(length=cache.length + 1)


# --- how it gets there ------------------------------------------------------------------------

PROBE = """
import json, sys
import numpy as np
from pallas_kernels import decode_attention, native
one = np.ones((1, 1, 8), np.float32)
out = decode_attention(one, one[:, None], one[:, None], np.ones(1, np.int32), one, one)
assert (np.asarray(out) == 1).all()
print(json.dumps(native.status()._asdict()))
"""


def start(folder, **environment):
    base = {name: value for name, value in os.environ.items() if not name.startswith("TSJAX_")}
    return subprocess.Popen(
        [sys.executable, "-c", PROBE],
        cwd=ROOT, env=base | {"TSJAX_CACHE": str(folder), "JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    lines = [line for line in errors.splitlines() if line.startswith("tsjax: ")]
    return json.loads(output), lines


@pytest.fixture
def quick_compiler(tmp_path):
    """A compiler that takes the library of this process for its result, and counts its calls."""
    path, calls = tmp_path / "c++", tmp_path / "calls"
    calls.mkdir()
    kept = native.status(try_now=True).path
    path.write_text(
        f"""#!/bin/sh
touch {calls}/$$
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then cp {kept} "$2"; fi; shift; done
"""
    )
    path.chmod(0o755)
    return path, lambda: len(list(calls.iterdir()))


@needs_kernels
def test_kernels_are_compiled_once_and_a_damaged_library_is_made_anew(tmp_path, quick_compiler):
    compiler, calls = quick_compiler
    folder = tmp_path / "cache"
    first, *others = [start(folder, CXX=str(compiler)) for _ in range(3)]  # at the same time
    facts, said = end(first)
    assert facts["state"] == "ready" and facts["compiler"] == str(compiler)
    assert len(said) <= 1
    for other in others:
        assert end(other)[0]["state"] == "ready"
    made = calls()
    assert made >= 2  # one for each source, one to link
    facts, said = end(start(folder, CXX=str(compiler)))
    assert not facts["built"] and not said and calls() == made
    library = pathlib.Path(facts["path"])
    assert folder in library.parents
    library.write_bytes(library.read_bytes()[:5000])
    facts, said = end(start(folder, CXX=str(compiler)))
    assert facts["state"] == "ready" and facts["built"] and calls() > made
    assert len(said) == 1 and "compiling" in said[0]
    assert not list(folder.rglob("*.part"))


@needs_kernels
def test_where_nothing_can_be_kept_it_is_compiled_for_one_process(tmp_path, quick_compiler):
    compiler, _ = quick_compiler
    (tmp_path / "file").write_text("")
    for folder, reason in ((tmp_path / "file" / "cache", "not writable"), ("", "TSJAX_CACHE is")):
        facts, _ = end(start(folder, CXX=str(compiler)))
        assert facts["state"] == "ready" and reason in facts["reason"]
        assert not pathlib.Path(facts["path"]).exists()


def test_without_a_compiler_plain_xla_runs_and_says_so(tmp_path):
    facts, said = end(start(tmp_path, CXX="no-such-compiler"))
    assert facts["state"] == "failed" and facts["compiler"] is None
    assert said == [
        "tsjax: no C++ compiler for the CPU kernels (tried no-such-compiler); "
        "plain XLA runs, which is slower"
    ]


def test_a_compiler_that_fails_is_quoted(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cc:1: fatal error: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    facts, said = end(start(tmp_path / "cache", CXX=str(compiler)))
    assert facts["state"] == "failed" and "fatal error: no such file" in said[1]


def test_it_can_be_switched_off(tmp_path):
    facts, said = end(start(tmp_path, TSJAX_NATIVE="0"))
    assert facts["state"] == "off" and facts["reason"] == "TSJAX_NATIVE=0" and not said

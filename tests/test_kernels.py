# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels without a GPU: what they compute, what they touch, when they are chosen.

Values come from interpretation by Pallas. It cannot show an access outside an array, so that is
looked for in the lowered programs and by running the kernels in NumPy (kernel_programs.py).
test_on_gpu.py runs the compiled kernels.
"""

import functools
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_model
from jax.experimental.pallas import triton as backend
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernel_cases import (
    define,
    define_both,
    define_scores,
    make_inputs,
    make_rest,
    make_score_inputs,
    poison,
    relative_error,
)
from kernel_programs import in_numpy, kernel_names, lower_for_cuda, unmasked_accesses

import tsjax
from pallas_kernels import cache_scores, decode_attention, device, tree_attention
from pallas_kernels.cache_scores import reference as scores_reference
from pallas_kernels.cache_scores import triton as scores_triton
from pallas_kernels.tree_attention import reference as attention_reference
from pallas_kernels.tree_attention import specs as attention_specs
from pallas_kernels.tree_attention import triton as attention_triton
from pallas_kernels.tree_attention.api import Summary
from tsjax.decoding.programs import programs

LARGEST_ERROR = {"float32": 2e-6, "bfloat16": 1e-2}
ATTENTION_KERNELS = {"tsjax_tree_attention", "tsjax_tree_attention_merge"}
STEP_KERNELS = ATTENTION_KERNELS | {"tsjax_rms_norm", "tsjax_rotary_heads"}
SCORES_KERNELS = {
    "dot": {"tsjax_cache_scores"},
    "softmax": {"tsjax_cache_scores_totals", "tsjax_cache_scores_softmax"},
}


def attention_blocks(rows, slots, parts):
    return attention_triton.Blocks(rows, slots, parts, warps=4, stages=2)


def scores_blocks(slots, parts):
    return scores_triton.Blocks(slots, parts, warps=4, stages=2)


def batches(capacity, slots, batch):
    """All lengths around the edges of blocks, in batches."""
    lengths = [capacity, 0, 1, slots - 1, slots, slots + 1, 2 * slots, capacity - 1]
    lengths = [min(length, capacity) for length in lengths]
    return [(lengths[i:] + lengths)[:batch] for i in range(0, len(lengths), batch)]


reference_both = jax.jit(attention_reference.tree_attention)
reference_scores = jax.jit(scores_reference.cache_scores, static_argnames="mode")


# --- values ----------------------------------------------------------------------------------

# A shape of make_inputs, rows and slots of a block and the number of parts, and a type. No capacity
# is a multiple of its block; forty parts are more than there are blocks.
ATTENTION_CASES = [
    (dict(B=4, T=1, K=2, G=4, H=128, S=83), (16, 16, 5), "float32"),
    (dict(B=4, T=1, K=2, G=4, H=128, S=83), (16, 16, 5), "bfloat16"),
    (dict(B=2, T=2, K=3, G=1, H=64, S=70), (16, 32, 1), "float32"),
    (dict(B=3, T=8, K=1, G=5, H=80, S=71), (32, 16, 40), "float32"),
    (dict(B=4, T=17, K=2, G=7, H=96, S=101), (32, 32, 5), "float32"),
    (dict(B=4, T=17, K=2, G=7, H=96, S=101), (32, 32, 5), "bfloat16"),
    (dict(B=1, T=64, K=2, G=8, H=64, S=150), (128, 32, 5), "float32"),
    (dict(B=2, T=128, K=1, G=2, H=128, S=150), (64, 64, 40), "float32"),
]
SCORES_CASES = [
    (dict(B=4, K=2, G=4, H=128, S=83), (16, 5), "float32"),
    (dict(B=4, K=2, G=4, H=128, S=83), (16, 5), "bfloat16"),
    (dict(B=2, K=3, G=1, H=64, S=70), (32, 1), "float32"),
    (dict(B=3, K=1, G=5, H=80, S=71), (16, 40), "float32"),
    (dict(B=1, K=2, G=7, H=96, S=150), (64, 2), "bfloat16"),
    (dict(B=2, K=2, G=8, H=64, S=40), (16, 2), "float32"),
]


def named(cases):
    names = ["-".join(f"{key}{n}" for key, n in shape.items()) for shape, _, _ in cases]
    return pytest.mark.parametrize(
        "shape, blocks, dtype",
        [
            pytest.param(*case, id=f"{name}-{case[2]}")
            for name, case in zip(names, cases, strict=True)
        ],
    )


def reference_attention(*inputs):
    return reference_both(*inputs)[0]


def interpret_both(blocks):
    blocks = attention_blocks(*blocks)
    return functools.partial(attention_triton.tree_attention, blocks=blocks, interpret=True)


def interpret_attention(blocks):
    return lambda *inputs: interpret_both(blocks)(*inputs)[0]


def check_attention(shape, blocks, dtype, rng):
    """All lengths; and then what neither slots beyond them nor a second run may change."""
    attention, bound = interpret_attention(blocks), LARGEST_ERROR[dtype]
    for length in batches(shape["S"], blocks[1], shape["B"]):
        inputs = make_inputs(rng, **shape, length=length, dtype=dtype)
        out = attention(*inputs)
        assert out.dtype == dtype and out.shape == inputs[0].shape
        assert relative_error(out, define(*inputs)) < bound
        assert relative_error(out, reference_attention(*inputs)) < bound
        q, k_cache, v_cache, _, *fresh = inputs
        caches = [poison(cache, length) for cache in (k_cache, v_cache)]
        np.testing.assert_array_equal(attention(q, *caches, inputs[3], *fresh), out)
    np.testing.assert_array_equal(attention(*inputs), out)


@named(ATTENTION_CASES)
def test_tree_attention(shape, blocks, dtype, rng):
    check_attention(shape, blocks, dtype, rng)


@named(ATTENTION_CASES)
def test_rest_and_log_totals(shape, blocks, dtype, rng):
    length = batches(shape["S"], blocks[1], shape["B"])[0]
    inputs = make_inputs(rng, **shape, length=length, dtype=dtype)
    for rest in ((), make_rest(rng, inputs)):
        out, log_totals = interpret_both(blocks)(*inputs, *rest)
        expected, expected_logs = define_both(*inputs, rest=rest or None)
        assert out.dtype == dtype and log_totals.dtype == jnp.float32
        assert relative_error(out, expected) < LARGEST_ERROR[dtype]
        assert relative_error(log_totals, expected_logs) < LARGEST_ERROR["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("H", [64, 80, 96, 128])
@pytest.mark.parametrize("G", [1, 4, 5, 7, 8])
@pytest.mark.parametrize("T", [1, 2, 8, 17, 64, 128])
def test_tree_attention_in_all_shapes(T, G, H, dtype, rng):
    parts = int(rng.choice([1, 5, 40]))
    shape = dict(B=1 + (T + G) % 4, T=T, K=1 + T % 2, G=G, H=H, S=int(rng.integers(65, 140)))
    check_attention(shape, (16 if T * G < 64 else 64, 32, parts), dtype, rng)


def check_scores(shape, blocks, dtype, mode, rng):
    score = functools.partial(
        scores_triton.cache_scores, mode=mode, blocks=scores_blocks(*blocks), interpret=True
    )
    shape = dict(shape)
    for length in batches(shape["S"], blocks[0], shape.pop("B", 1)):
        inputs = make_score_inputs(rng, **shape, length=length, dtype=dtype)
        out, expected = score(*inputs), reference_scores(*inputs, mode=mode)
        assert out.dtype == jnp.float32 and out.shape == inputs[1].shape[:3]
        for got, want in [
            (out, define_scores(*inputs, "dot" if mode == "dot" else "shares")),
            (out if mode == "dot" else jnp.sum(out, axis=1) / inputs[0].shape[1], expected),
        ]:
            got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
            beyond = -np.inf if mode == "dot" else 0
            np.testing.assert_array_equal(got == beyond, want == beyond)
            within = want != beyond
            # Products of bfloat16 are exact, so its error is that of float32.
            if within.any():
                assert relative_error(got[within], want[within]) < LARGEST_ERROR["float32"]
        q, k_cache, length = inputs
        np.testing.assert_array_equal(score(q, poison(k_cache, length), length), out)
        if mode == "softmax":
            sums = jnp.sum(out, axis=(1, 2)) / q.shape[1]
            np.testing.assert_allclose(sums, length > 0, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(score(*inputs), out)


@pytest.mark.parametrize("mode", SCORES_KERNELS)
@named(SCORES_CASES)
def test_cache_scores(shape, blocks, dtype, mode, rng):
    check_scores(shape, blocks, dtype, mode, rng)


@named(SCORES_CASES)
def test_weights_among_more_than_these_slots(shape, blocks, dtype, rng):
    score = functools.partial(
        scores_triton.cache_scores, mode="softmax", blocks=scores_blocks(*blocks), interpret=True
    )
    shape = dict(shape)
    for length in batches(shape["S"], blocks[0], shape.pop("B", 1)):
        inputs = make_score_inputs(rng, **shape, length=length, dtype=dtype)
        totals = jnp.asarray(rng.uniform(4, 9, inputs[0].shape[:2]), jnp.float32)
        out = score(*inputs, totals)
        assert out.dtype == jnp.float32
        expected = define_scores(*inputs, "shares", log_totals=np.asarray(totals, float))
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=0)


def test_extreme_scores(rng):
    """The running maximum jumps from part to part, and nothing overflows."""
    shape, blocks, _ = ATTENTION_CASES[0]
    q, k_cache, *rest = make_inputs(rng, **shape, length=[83, 17, 0, 16])
    ramp = jnp.linspace(-30, 30, 83)[:, None]
    inputs = (jnp.abs(q) * 4, k_cache + ramp, *rest)
    out = interpret_attention(blocks)(*inputs)
    np.testing.assert_allclose(out, define(*inputs), rtol=0, atol=2e-3)


def test_float16(rng):
    inputs = make_inputs(rng, B=2, T=5, H=64, length=[40, 9], dtype=jnp.float16)
    out = interpret_attention((16, 16, 2))(*inputs)
    assert out.dtype == jnp.float16
    assert relative_error(out, define(*inputs)) < 2e-3


def test_one_mask_for_all_rows_of_the_batch(rng):
    shape, blocks, _ = ATTENTION_CASES[3]
    *inputs, mask = make_inputs(rng, **shape, length=[0, 20, 71])
    attention = interpret_attention(blocks)
    shared = attention(*inputs, mask[0])
    np.testing.assert_array_equal(shared, attention(*inputs, np.stack([mask[0]] * 3)))


@pytest.mark.parametrize("attend", [tree_attention, decode_attention])
def test_public_attention_on_this_machine(attend, rng):
    """decode_attention is tree_attention for T = 1."""
    inputs = make_inputs(rng, B=3, T=1, G=4, H=64, length=[40, 0, 17])
    if attend is decode_attention:
        q, k_cache, v_cache, length, k_new, v_new, _ = inputs
        out = attend(q[:, 0], k_cache, v_cache, length, k_new[:, 0], v_new[:, 0])[:, None]
    else:
        out = attend(*inputs)
    assert relative_error(out, define(*inputs)) < LARGEST_ERROR["float32"]
    np.testing.assert_array_equal(out, tree_attention(*inputs))


# --- no access outside an array, no result left out -------------------------------------------


def check_accesses(shape, blocks, length, rng):
    """`attention_triton._attention` is what runs on each device."""
    inputs = make_inputs(rng, **shape, length=np.minimum(length, shape["S"]))
    rest = make_rest(rng, inputs) if shape["T"] % 2 else ()
    *arrays, mask = inputs
    with in_numpy():
        out, log_totals = attention_triton._attention(
            *arrays, mask.astype(np.int8), *rest, blocks=attention_blocks(*blocks), interpret=False
        )
    expected, expected_logs = define_both(*inputs, rest=rest or None)
    assert relative_error(out, expected) < LARGEST_ERROR["float32"]
    assert relative_error(log_totals, expected_logs) < LARGEST_ERROR["float32"]


@hypothesis.given(
    shape=st.fixed_dictionaries(
        dict(
            B=st.integers(1, 2),
            T=st.integers(1, 9),
            K=st.integers(1, 2),
            G=st.sampled_from([1, 3, 4, 5, 8]),
            H=st.sampled_from([8, 24]),
            S=st.integers(1, 70),
        )
    ),
    parts=st.integers(1, 6),
    lengths=st.lists(st.integers(0, 70), min_size=2, max_size=2),
)
@hypothesis.settings(max_examples=5)
def test_tree_attention_touches_what_it_should(shape, parts, lengths):
    rng = np.random.default_rng(0)
    check_accesses(shape, (16, 16, parts), lengths[: shape["B"]], rng)


@hypothesis.given(
    K=st.integers(1, 2),
    G=st.sampled_from([1, 3, 4, 5, 8, 17]),
    H=st.sampled_from([8, 24]),
    S=st.integers(1, 70),
    parts=st.integers(1, 7),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    mode=st.sampled_from(list(SCORES_KERNELS)),
)
@hypothesis.settings(max_examples=6)
def test_cache_scores_touches_what_it_should(K, G, H, S, parts, lengths, mode):
    rng = np.random.default_rng(0)
    inputs = make_score_inputs(rng, K=K, G=G, H=H, S=S, length=np.minimum(lengths, S))
    run = scores_triton._dot_scores if mode == "dot" else scores_triton._softmax_scores
    with in_numpy():
        out = np.asarray(run(*inputs, blocks=scores_blocks(16, parts), interpret=False))
    expected = define_scores(*inputs, "dot" if mode == "dot" else "shares")
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


def test_lengths_above_the_capacity_are_cut(rng):
    """A traced length cannot be refused; it must not lead out of the cache either."""
    shape, blocks = dict(T=2, H=8, S=37), attention_blocks(16, 16, 2)
    q, k_cache, v_cache, length, *fresh, mask = make_inputs(rng, **shape)
    run = functools.partial(attention_triton._attention, blocks=blocks, interpret=False)
    with in_numpy():
        full = run(q, k_cache, v_cache, length, *fresh, mask.astype(np.int8))
        above = run(q, k_cache, v_cache, length + 9, *fresh, mask.astype(np.int8))
    for one, other in zip(above, full, strict=True):
        np.testing.assert_array_equal(one, other)
    q, blocks = q[:, 0], scores_blocks(16, 2)
    for score in (scores_triton._dot_scores, scores_triton._softmax_scores):
        with in_numpy():
            full, above = (
                score(q, k_cache, n, blocks=blocks, interpret=False) for n in (length, length + 9)
            )
        np.testing.assert_array_equal(above, full)


def without_mask(ref, index, inside, other=0):
    return backend.load(ref.at[tuple(index)])


def with_a_mask_that_lets_all_through(ref, index, inside, other=0):
    inside = jnp.ones(jnp.broadcast_shapes(*map(jnp.shape, index)), bool)
    return backend.load(ref.at[tuple(index)], mask=inside, other=jnp.asarray(other, ref.dtype))


def store_without_mask(ref, index, value, inside):
    backend.store(ref.at[tuple(index)], value)


# Two shapes that nothing divides, and one where the number of columns is that of a block.
RAGGED = [
    dict(B=2, T=5, K=2, G=5, H=80, S=101),
    dict(B=1, T=67, K=1, G=7, H=96, S=1023),
    dict(B=3, T=1, K=2, G=1, H=128, S=64),
]


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("shape", RAGGED, ids=["ragged", "ragged in many blocks", "even"])
def test_every_access_is_masked(shape, dtype, rng):
    inputs = make_inputs(rng, **shape, dtype=dtype)
    rest = Summary(*make_rest(rng, inputs))
    for options in ({}, dict(rest=rest)):
        attention = functools.partial(tree_attention, **options)
        found = unmasked_accesses(lower_for_cuda(attention, *inputs))
        assert found == {name: [] for name in ATTENTION_KERNELS}
    q, k_cache, _, length, *_ = inputs
    for mode, names in SCORES_KERNELS.items():
        lowered = lower_for_cuda(lambda *x, m=mode: cache_scores(*x, m), q[:, 0], k_cache, length)
        assert unmasked_accesses(lowered) == {name: [] for name in names}


@pytest.mark.parametrize(
    "name, change, kernel",
    [
        ("load", without_mask, "tsjax_tree_attention"),
        ("load", with_a_mask_that_lets_all_through, "tsjax_tree_attention_merge"),
        ("store", store_without_mask, "tsjax_tree_attention_merge"),
    ],
)
def test_a_missing_mask_is_found(name, change, kernel, monkeypatch, rng):
    """The tests above can fail: in the program, and in NumPy."""
    inputs = make_inputs(rng, T=6, H=72, S=39)  # traced by no other test
    *arrays, mask = inputs
    blocks = attention_blocks(16, 16, 2)
    monkeypatch.setattr(attention_triton, name, change)
    run = functools.partial(attention_triton._attention, blocks=blocks, interpret=False)
    found = unmasked_accesses(lower_for_cuda(run, *arrays, mask.astype(np.int8)))
    assert found[kernel]


@pytest.mark.parametrize("name", ["load", "store"])
def test_an_access_outside_an_array_is_found(name, rng):
    inputs = make_inputs(rng, T=5, H=24, S=37)
    *arrays, mask = inputs
    with in_numpy(), pytest.MonkeyPatch.context() as patch:
        original = getattr(attention_triton, name)
        patch.setattr(attention_triton, name, lambda *args: original(*args[:-1], True))
        with pytest.raises(AssertionError, match="outside of its array"):
            attention_triton._attention(
                *arrays, mask.astype(np.int8), blocks=attention_blocks(16, 16, 2), interpret=False
            )


# --- which implementation is chosen ----------------------------------------------------------


def lower_here(function, *args, **static):
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    return jitted.trace(*args, **static).lower()


def test_tree_attention_is_a_kernel_on_a_gpu(rng):
    inputs = make_inputs(rng, T=5, H=64)
    assert kernel_names(lower_for_cuda(tree_attention, *inputs).as_text()) == ATTENTION_KERNELS
    assert not kernel_names(lower_here(tree_attention, *inputs).as_text())
    xla = functools.partial(tree_attention, implementation="xla")
    assert "tsjax_" not in lower_for_cuda(xla, *inputs).as_text()


@pytest.mark.parametrize("mode", SCORES_KERNELS)
def test_cache_scores_is_a_kernel_on_a_gpu(mode, rng):
    inputs = make_score_inputs(rng, G=4, H=64)
    score = functools.partial(cache_scores, mode=mode)
    assert kernel_names(lower_for_cuda(score, *inputs).as_text()) == SCORES_KERNELS[mode]
    assert not kernel_names(lower_here(score, *inputs).as_text())
    xla = functools.partial(score, implementation="xla")
    assert "tsjax_" not in lower_for_cuda(xla, *inputs).as_text()


@pytest.mark.parametrize("target", ["a100", "h100", "h200"])
def test_kernels_are_lowered_for_every_target(target, rng):
    lowered = lower_for_cuda(tree_attention, *make_inputs(rng, T=2, H=64), target=target)
    assert kernel_names(lowered.as_text()) == ATTENTION_KERNELS


@pytest.mark.parametrize(
    "method, names",
    [
        (tsjax.Autoregressive(), STEP_KERNELS),
        (tsjax.TokenSwift(), STEP_KERNELS | SCORES_KERNELS["dot"]),
    ],
    ids=["autoregressive", "tokenswift"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_runs_the_kernels(method, names, dtype):
    """The program that `generate` runs, for tiny model and cache."""
    model = tiny_model(num_draft_heads=3, dtype=dtype)
    cfg = tsjax.DecodeConfig(model.cfg, method)
    state = tsjax.init_state(
        jnp.ones((1, 4), jnp.int32), jnp.array([4]), cfg=cfg, capacity=256, max_length=[99]
    )
    decode = programs("gpu", model.cfg.dtype).decode
    lowered = lower_for_cuda(decode, model.params, state, 2, cfg=cfg)
    assert kernel_names(lowered.as_text()) == names
    assert not kernel_names(lower_here(decode, model.params, state, 2, cfg=cfg).as_text())


@pytest.mark.parametrize(
    "H, dtype", [(64, "float64"), (256, "float32"), (12, "float32"), (256, "bfloat16")]
)
def test_what_no_kernel_serves_takes_xla(H, dtype, rng):
    with jax.enable_x64(dtype == "float64"):
        attention = make_inputs(rng, H=H, dtype=dtype)
        scores = make_score_inputs(rng, H=H, dtype=dtype)
        for function, inputs in [(tree_attention, attention), (cache_scores, scores)]:
            assert "tsjax_" not in lower_for_cuda(function, *inputs).as_text()
            kernel = functools.partial(function, implementation="triton")
            with pytest.raises(NotImplementedError, match=f"triton: .*({dtype}|head_dim {H}):"):
                lower_for_cuda(kernel, *inputs)


def test_a_kernel_is_refused_on_this_machine(rng):
    """By name; it is compiled for GPUs alone."""
    with pytest.raises(NotImplementedError):
        tree_attention(*make_inputs(rng, H=64), implementation="triton")
    with pytest.raises(NotImplementedError):
        cache_scores(*make_score_inputs(rng, H=64), implementation="triton")


@pytest.mark.parametrize("name", ["cuda", "", "Triton"])
def test_unknown_implementations_are_refused(name, rng):
    message = f"implementation={name!r} is not valid: one of triton, native, xla"
    inputs = make_inputs(rng, T=1)
    q, k_cache, v_cache, length, k_new, v_new, _ = inputs
    with pytest.raises(ValueError, match=message):
        tree_attention(*inputs, implementation=name)
    with pytest.raises(ValueError, match=message):
        decode_attention(
            q[:, 0], k_cache, v_cache, length, k_new[:, 0], v_new[:, 0], implementation=name
        )
    with pytest.raises(ValueError, match=message):
        cache_scores(q[:, 0], k_cache, length, implementation=name)


# --- over a device mesh ----------------------------------------------------------------------


@pytest.fixture
def place():
    """Puts an array on a mesh of 2 x 2 devices."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    return lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))


def run_split(function, *arrays):
    """The result, after a look at the program: a device needs nothing of the others."""
    compiled = jax.jit(function).lower(*arrays).compile()
    moved = [op for op in ("all-gather", "all-to-all", "all-reduce") if op in compiled.as_text()]
    assert not moved
    return compiled(*arrays)


def is_placed(out, place, *axes):
    return out.sharding.is_equivalent_to(place(jnp.zeros(out.shape), *axes).sharding, out.ndim)


@pytest.mark.parametrize("fresh, G", [("placed", 3), ("everywhere", 3), ("placed", 1)])
def test_tree_attention_is_split_as_the_cache(fresh, G, place, rng):
    """Fresh rows come placed, as from a model's layers, or whole."""
    inputs = make_inputs(rng, B=2, T=5, S=90, K=2, G=G, H=64, length=[90, 33])
    q, k_cache, v_cache, length, k_new, v_new, mask = inputs
    heads = ("data", None, "model") if fresh == "placed" else ()
    caches = [place(cache, "data", "model") for cache in (k_cache, v_cache)]
    new = [place(x, *heads) for x in (k_new, v_new)]
    arrays = (place(q, *heads), *caches, place(length), *new, place(mask))
    rest = make_rest(rng, inputs)
    if fresh == "placed":
        mean, log_total = place(rest[0], "data", "model"), place(rest[1], "data", "model")
    else:
        mean, log_total = map(place, rest)
    for found, expected in (
        (run_split(interpret_both((16, 16, 3)), *arrays), define_both(*inputs)),
        (
            run_split(interpret_both((16, 16, 3)), *arrays, mean, log_total),
            define_both(*inputs, rest=rest),
        ),
    ):
        for out, wanted in zip(found, expected, strict=True):
            assert is_placed(out, place, "data", None, "model")
            assert relative_error(out, wanted) < LARGEST_ERROR["float32"]


def test_kv_heads_that_no_axis_divides_are_everywhere(place, rng):
    inputs = make_inputs(rng, B=2, T=5, S=90, K=3, G=2, H=64, length=[90, 33])
    q, k_cache, v_cache, *rest = inputs
    caches = [place(cache, "data") for cache in (k_cache, v_cache)]
    arrays = (place(q), *caches, *(place(x) for x in rest))
    out = run_split(interpret_attention((16, 16, 3)), *arrays)
    assert is_placed(out, place, "data")
    assert relative_error(out, reference_attention(*inputs)) < LARGEST_ERROR["float32"]


@pytest.mark.parametrize("mode", SCORES_KERNELS)
@pytest.mark.parametrize(
    "K, G, axes", [(2, 3, ("data", "model")), (2, 1, ("data", "model")), (3, 3, ("data",))]
)
def test_cache_scores_is_split_as_the_cache(mode, K, G, axes, place, rng):
    """Also where the query is everywhere, as the one that a draft cache keeps."""
    q, k_cache, length = make_score_inputs(rng, K=K, G=G, S=90, H=64, length=(90, 33))
    score = functools.partial(
        scores_triton.cache_scores, mode=mode, blocks=scores_blocks(16, 3), interpret=True
    )
    out = run_split(score, place(q), place(k_cache, *axes), place(length))
    assert is_placed(out, place, *axes)
    expected = define_scores(q, k_cache, length, "dot" if mode == "dot" else "shares")
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)
    if mode == "softmax":
        totals = np.asarray(rng.uniform(2, 5, q.shape[:2]), np.float32)
        out = run_split(score, place(q), place(k_cache, *axes), place(length), place(totals))
        assert is_placed(out, place, *axes)
        expected = define_scores(q, k_cache, length, "shares", log_totals=totals)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=0)


# --- block sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("programs", "places", "parts"),
    [
        (8, 216, 27),  # one full round
        (16, 108, 13),  # six parts would leave twelve places idle, thirteen eight of two rounds
        (128, 108, 3),
        (1, 216, 128),  # as many as may be
        (1000, 108, 1),
    ],
)
def test_parts_keep_the_places_busy(programs, places, parts):
    assert device.even_parts(programs, places, most=128) == parts


def test_tuned_block_sizes_take_the_place_of_the_rule(monkeypatch, tmp_path):
    shape = dict(B=1, T=3, N=8, K=2, S=1000, H=64, dtype=jnp.bfloat16)
    rule = attention_triton.default_blocks(**shape)
    line = {"rows": 32, "slots": 128, "parts": 7, "warps": 8, "stages": 2}
    table = {"tree_attention": {attention_specs.tuned_key(**shape): line}}
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "nvidia_test_gpu.json").write_text(json.dumps(table))
    monkeypatch.setattr(device.resources, "files", lambda _: tmp_path)
    monkeypatch.setitem(device.SAME_MULTIPROCESSORS, "its_sister.json", "nvidia_test_gpu.json")
    measured = tuple(line.values())
    kinds = {"NVIDIA Test-GPU": measured, "Its Sister": measured, "another": rule}
    for name, expected in kinds.items():
        device.table.cache_clear()
        monkeypatch.setattr(device, "gpu", lambda name=name: (name, device.DEFAULT_CORES))
        assert attention_triton.default_blocks(**shape) == expected
    other = attention_triton.default_blocks(**{**shape, "T": 40})
    assert other.rows == 128  # a shape without a line follows the rule
    device.table.cache_clear()


# --- transformations -------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["public", "interpreted"])
def test_vmap_is_a_loop(implementation, rng):
    attention, scores = tree_attention, cache_scores
    if implementation == "interpreted":
        attention = interpret_attention((16, 16, 3))
        blocks = dict(blocks=scores_blocks(16, 3), interpret=True)
        scores = functools.partial(scores_triton.cache_scores, mode="dot", **blocks)
    cases = [make_inputs(rng, B=2, T=3, S=40, length=length) for length in ([40, 7], [0, 21])]
    q, k_cache, *rest = (
        jnp.stack([jnp.asarray(x) for x in pair]) for pair in zip(*cases, strict=True)
    )
    # The second cache is that of both; the mapped axis of the query is not the first.
    out = jax.jit(jax.vmap(attention, in_axes=(1, None, 0, 0, 0, 0, 0)))(
        jnp.swapaxes(q, 0, 1), k_cache[1], *rest
    )
    for index in range(2):
        alone = attention(q[index], k_cache[1], *(x[index] for x in rest))
        assert relative_error(out[index], alone) < LARGEST_ERROR["float32"]
    out = jax.jit(jax.vmap(scores))(q[:, :, 0], k_cache, rest[1])
    for index in range(2):
        alone = scores(q[index, :, 0], k_cache[index], rest[1][index])
        np.testing.assert_allclose(out[index], alone, rtol=1e-5)


def test_forward_derivatives_are_those_of_the_definition(rng):
    q, k_cache, *rest = (jnp.asarray(x) for x in make_inputs(rng, B=2, T=3, S=40, length=[40, 7]))

    def derivative(attention):
        def of(q, k_cache):
            return attention(q, k_cache, *rest)

        return jax.jit(lambda *x: jax.jvp(of, x, x)[1])(q, k_cache)

    expected = derivative(reference_attention)
    assert relative_error(derivative(tree_attention), expected) < 1e-5

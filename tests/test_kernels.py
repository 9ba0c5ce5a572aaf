# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels without a GPU: what they touch, when they are chosen, how they are split.

Their values are tested with those of the other implementations (test_tree_attention.py,
test_cache_scores.py, test_layer_kernels.py). Interpretation by Pallas cannot show an access outside
an array, so that is looked for in the lowered programs and by running the kernels in NumPy
(kernel_programs.py). test_on_gpu.py runs the compiled kernels.
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
from kernel_cases import (
    check_near,
    define_both,
    define_scores,
    make_inputs,
    make_ranks,
    make_rest,
    make_score_inputs,
    place,
    relative_error,
    with_wide_caches,
)
from kernel_programs import in_numpy, kernel_names, lower_for_cuda, unmasked_accesses

import tsjax
from pallas_kernels import cache_scores, decode_attention, device, narrowed, tree_attention
from pallas_kernels.cache_scores import triton as scores_triton
from pallas_kernels.tree_attention import specs as attention_specs
from pallas_kernels.tree_attention import triton as attention_triton
from pallas_kernels.tree_attention.api import Ranks, Summary
from tsjax.decoding.programs import programs
from tsjax.methods import Autoregressive

kernels = pytest.mark.kernels
LARGEST_ERROR = 2e-6  # in float32
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


interpreted = functools.partial(
    attention_triton.tree_attention, blocks=attention_blocks(16, 16, 3), interpret=True
)
interpreted_scores = functools.partial(
    scores_triton.cache_scores, blocks=scores_blocks(16, 3), interpret=True
)


def as_held(held, inputs):
    """Inputs of attention with their caches in wide or in narrow rows."""
    q, k, v, *others = inputs
    return inputs if held == "wide" else (q, narrowed(k), narrowed(v), *others)


# --- no access outside an array, no result left out -------------------------------------------


def run_attention(inputs, rest=(), parts=2):
    """What runs on each device."""
    *arrays, mask = inputs
    arrays += [mask.astype(np.int8), *rest]
    blocks = attention_blocks(16, 16, parts)
    return attention_triton._attention(*arrays, blocks=blocks, interpret=False)


def run_scores(mode, *inputs, parts=2):
    run = scores_triton._dot_scores if mode == "dot" else scores_triton._softmax_scores
    return run(*inputs, blocks=scores_blocks(16, parts), interpret=False)


some = st.integers


@kernels
@hypothesis.given(
    shape=st.fixed_dictionaries(
        dict(B=some(1, 2), T=some(1, 9), K=some(1, 2), G=some(1, 8), S=some(1, 70))
    ),
    H=st.sampled_from([8, 24]),
    parts=some(1, 6),
    lengths=st.lists(some(0, 70), min_size=2, max_size=2),
)
@hypothesis.settings(max_examples=4)
def test_tree_attention_touches_what_it_should(shape, H, parts, lengths):
    rng = np.random.default_rng(0)
    inputs = make_inputs(rng, **shape, H=H, length=np.minimum(lengths[: shape["B"]], shape["S"]))
    rest = make_rest(rng, inputs) if shape["T"] % 2 else ()
    ranks, visible = make_ranks(rng, inputs) if shape["S"] % 2 else ((), None)
    with in_numpy():
        found = run_attention(inputs, (*ranks, *rest), parts)
    check_near(found, define_both(*inputs, rest=rest or None, visible=visible), LARGEST_ERROR)


@kernels
@hypothesis.given(
    shape=st.fixed_dictionaries(dict(K=some(1, 2), G=some(1, 17), S=some(1, 70))),
    H=st.sampled_from([8, 24]),
    parts=some(1, 7),
    lengths=st.lists(some(0, 70), min_size=1, max_size=3),
    mode=st.sampled_from(list(SCORES_KERNELS)),
)
@hypothesis.settings(max_examples=6)
def test_cache_scores_touches_what_it_should(shape, H, parts, lengths, mode):
    rng = np.random.default_rng(0)
    inputs = make_score_inputs(rng, **shape, H=H, length=np.minimum(lengths, shape["S"]))
    with in_numpy():
        out = np.asarray(run_scores(mode, *inputs, parts=parts))
    expected = define_scores(*inputs, "dot" if mode == "dot" else "shares")
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


@kernels
def test_lengths_above_the_capacity_are_cut(rng):
    """A traced length cannot be refused; it must not lead out of the cache either."""
    inputs = q, k_cache, v_cache, length, *fresh = make_inputs(rng, T=2, H=8, S=37)
    above = length + 9
    with in_numpy():
        for one, other in zip(
            run_attention((q, k_cache, v_cache, above, *fresh)), run_attention(inputs), strict=True
        ):
            np.testing.assert_array_equal(one, other)
        for mode in SCORES_KERNELS:
            one, other = (run_scores(mode, q[:, 0], k_cache, n) for n in (above, length))
            np.testing.assert_array_equal(one, other)


# One shape that nothing divides, in many blocks, and one with as many columns as a block.
RAGGED = [dict(B=1, T=67, K=1, G=7, H=96, S=1023), dict(B=3, T=1, K=2, G=1, H=128, S=64)]


MASKED = [("a100", shape, dtype, "wide") for shape in (0, 1) for dtype in ("float32", "bfloat16")]
MASKED += [(target, 0, dtype, "narrow") for target in ("a100", "h100")
           for dtype in ("float32", "bfloat16", "float16")]  # fmt: skip


@kernels
@pytest.mark.parametrize("target, shape, dtype, held", MASKED)
def test_every_access_is_masked(target, shape, dtype, held, rng):
    inputs = as_held(held, make_inputs(rng, **RAGGED[shape], dtype=dtype))
    ranks, rest = Ranks(*make_ranks(rng, inputs)[0]), Summary(*make_rest(rng, inputs))
    for options in ({}, dict(rest=rest), dict(rest=rest, ranks=ranks)):
        attention = functools.partial(tree_attention, **options)
        found = unmasked_accesses(lower_for_cuda(attention, *inputs, target=target))
        assert found == {name: [] for name in ATTENTION_KERNELS}
    q, k_cache, _, length, *_ = inputs
    for mode, names in SCORES_KERNELS.items():
        score = functools.partial(cache_scores, mode=mode)
        lowered = lower_for_cuda(score, q[:, 0], k_cache, length, target=target)
        assert unmasked_accesses(lowered) == {name: [] for name in names}


# The tests above can fail: a function of a module and the arrays that it takes, in float32.
DAMAGED = {
    "attention": (attention_triton, lambda rng: run_attention(make_inputs(rng, T=6, H=72, S=39))),
    "scores": (
        scores_triton,
        lambda rng: run_scores("dot", *make_score_inputs(rng, G=4, H=72, S=39, length=(39,))),
    ),
}


def load_without_mask(ref, index, inside, other=0):
    return backend.load(ref.at[tuple(index)])


def load_with_a_mask_that_lets_all_through(ref, index, inside, other=0):
    inside = jnp.ones(jnp.broadcast_shapes(*map(jnp.shape, index)), bool)
    return backend.load(ref.at[tuple(index)], mask=inside, other=jnp.asarray(other, ref.dtype))


def store_without_mask(ref, index, value, inside):
    backend.store(ref.at[tuple(index)], value)


@kernels
@pytest.mark.parametrize(
    "change", [load_without_mask, load_with_a_mask_that_lets_all_through, store_without_mask]
)
@pytest.mark.parametrize("kernel", DAMAGED)
def test_a_missing_mask_is_found(kernel, change, monkeypatch, rng):
    module, run = DAMAGED[kernel]
    monkeypatch.setattr(module, change.__name__.split("_")[0], change)
    jax.clear_caches()  # what was traced with its masks
    assert any(unmasked_accesses(lower_for_cuda(lambda: run(rng))).values())
    jax.clear_caches()


@kernels
@pytest.mark.parametrize("name", ["load", "store"])
def test_an_access_outside_an_array_is_found(name, rng):
    module, run = DAMAGED["attention"]
    with in_numpy(), pytest.MonkeyPatch.context() as patch:
        checked = getattr(module, name)
        inside = 2 if name == "load" else 3  # its place among the arguments
        patch.setattr(module, name, lambda *x: checked(*x[:inside], True, *x[inside + 1 :]))
        with pytest.raises(AssertionError, match="outside of its array|written twice"):
            run(rng)


# --- which implementation is chosen ----------------------------------------------------------


def lower_here(function, *args, **static):
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    return jitted.trace(*args, **static).lower()


@kernels
@pytest.mark.parametrize("mode", [None, *SCORES_KERNELS])
def test_it_is_a_kernel_on_a_gpu(mode, rng):
    run, names, inputs = tree_attention, ATTENTION_KERNELS, make_inputs(rng, T=5, H=64)
    if mode is not None:
        run, names = functools.partial(cache_scores, mode=mode), SCORES_KERNELS[mode]
        inputs = make_score_inputs(rng, G=4, H=64)
    for target in ("a100", "h100", "h200"):
        assert kernel_names(lower_for_cuda(run, *inputs, target=target).as_text()) == names
    xla = functools.partial(run, implementation="xla")
    assert "tsjax_" not in lower_for_cuda(xla, *inputs).as_text()
    with pytest.raises(NotImplementedError):  # by name, on this machine
        run(*inputs, implementation="triton")


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        (tsjax.TokenSwift(), "bfloat16"),
        pytest.param(tsjax.TokenSwift(), "float32", marks=kernels),
        pytest.param(Autoregressive(), "bfloat16", marks=kernels),
    ],
    ids=["tokenswift", "tokenswift in float32", "autoregressive"],
)
def test_a_decode_step_runs_the_kernels(method, dtype):
    """The program that `generate` runs, for tiny model and cache."""
    model = tiny_model(num_draft_heads=3, dtype=dtype)
    cfg = tsjax.steps.DecodeConfig(model.cfg, method)
    state = tsjax.steps.init_state(
        jnp.ones((1, 4), jnp.int32), jnp.array([4]), cfg=cfg, capacity=256, max_length=[99]
    )
    decode = programs("gpu", model.cfg.dtype).decode
    names = STEP_KERNELS | (SCORES_KERNELS["dot"] if method != Autoregressive() else set())
    assert kernel_names(lower_for_cuda(decode, model.params, state, 2, cfg=cfg).as_text()) == names
    assert not kernel_names(lower_here(decode, model.params, state, 2, cfg=cfg).as_text())


@kernels
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


def test_unknown_implementations_are_refused(rng):
    inputs = q, k_cache, v_cache, length, k_new, v_new, _ = make_inputs(rng, T=1)
    row = q[:, 0], k_cache, v_cache, length, k_new[:, 0], v_new[:, 0]
    calls = (tree_attention, inputs), (decode_attention, row), (cache_scores, (row[0], *row[1:4:2]))
    for function, arrays in calls:
        with pytest.raises(ValueError, match="implementation='Triton' is not valid: one of triton"):
            function(*arrays, implementation="Triton")


# --- over a device mesh ----------------------------------------------------------------------


def run_split(function, *arrays):
    """The result, after a look at the program: a device needs nothing of the others."""
    compiled = jax.jit(function).lower(*arrays).compile()
    moved = [op for op in ("all-gather", "all-to-all", "all-reduce") if op in compiled.as_text()]
    assert not moved
    return compiled(*arrays)


def is_placed(out, *axes):
    return out.sharding.is_equivalent_to(place(jnp.zeros(out.shape), *axes).sharding, out.ndim)


@kernels
@pytest.mark.parametrize(
    "fresh, K, G, held",
    [
        ("placed", 2, 3, "wide"), ("everywhere", 2, 3, "wide"), ("placed", 2, 1, "wide"),
        ("everywhere", 3, 2, "wide"), ("placed", 2, 3, "narrow"),
    ],
)  # fmt: skip
def test_tree_attention_is_split_as_the_cache(fresh, K, G, held, rng):
    """Fresh rows come placed, as from a model's layers, or whole; 3 heads are not divided."""
    inputs = as_held(held, make_inputs(rng, B=2, T=5, S=90, K=K, G=G, H=64, length=[90, 33]))
    q, k_cache, v_cache, length, k_new, v_new, mask = inputs
    axes = ("data", "model") if K == 2 else ("data",)
    heads = ("data", None, "model") if fresh == "placed" else ()
    caches = jax.tree.map(lambda x: place(x, *axes), (k_cache, v_cache))
    new = [place(x, *heads) for x in (k_new, v_new)]
    arrays = (place(q, *heads), *caches, place(length), *new, place(mask))
    rest, (ranks, visible) = make_rest(rng, inputs), make_ranks(rng, inputs)
    with_rest = [place(x, *heads[::2]) for x in rest]
    with_ranks = [*with_rest, *(place(x, "data") for x in ranks)]
    define = functools.partial(define_both, *with_wide_caches(inputs, "float32"))
    for more, expected in (
        ((), define()),
        (with_rest, define(rest=rest)),
        (with_ranks, define(rest=rest, visible=visible)),
    ):
        found = run_split(interpreted, *arrays, *more)
        assert all(is_placed(out, axes[0], None, *axes[1:]) for out in found)
        check_near(found, expected, LARGEST_ERROR)


@kernels
@pytest.mark.parametrize("mode", SCORES_KERNELS)
@pytest.mark.parametrize(
    "K, G, held", [(2, 3, "wide"), (2, 1, "wide"), (3, 3, "wide"), (2, 3, "narrow")]
)
def test_cache_scores_is_split_as_the_cache(mode, K, G, held, rng):
    """Also where the query is everywhere, as the one that a draft cache keeps."""
    q, k_cache, length = make_score_inputs(rng, K=K, G=G, S=90, H=64, length=(90, 33))
    if held == "narrow":
        k_cache = narrowed(k_cache)
    axes = ("data", "model") if K == 2 else ("data",)
    score = functools.partial(interpreted_scores, mode=mode)
    totals = np.asarray(rng.uniform(2, 5, q.shape[:2]), np.float32)
    law = "dot" if mode == "dot" else "shares"
    for given in (None, totals) if mode == "softmax" else (None,):
        more = () if given is None else (place(given),)
        placed = jax.tree.map(lambda x: place(x, *axes), k_cache)
        out = run_split(score, place(q), placed, place(length), *more)
        assert is_placed(out, *axes)
        (wide,) = with_wide_caches([k_cache], "float32")
        expected = define_scores(q, wide, length, law, log_totals=given)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 if given is None else 0)


# --- block sizes -----------------------------------------------------------------------------


def test_tuned_block_sizes_take_the_place_of_the_rule(monkeypatch, tmp_path):
    """At every capacity, those of the nearest one."""
    shape = dict(B=1, T=3, N=8, K=2, S=1000, H=64, dtype=jnp.bfloat16)
    chip = device.Gpu("NVIDIA Test-GPU", cores=132, capability=9.0)
    rule = attention_triton.default_blocks(chip, **shape)
    near, far = (
        {"rows": 32, "slots": slots, "parts": 7, "warps": 8, "stages": 2} for slots in (128, 32)
    )
    lines = {
        attention_specs.tuned_key(**{**shape, "S": S}): x for S, x in ((1024, near), (2**17, far))
    }
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "nvidia_test_gpu.json").write_text(json.dumps({"tree_attention": lines}))
    monkeypatch.setattr(device.resources, "files", lambda _: tmp_path)
    monkeypatch.setitem(device.SAME_MULTIPROCESSORS, "its_sister.json", "nvidia_test_gpu.json")
    device.table.cache_clear()
    for kind, expected in ((chip.kind, near), ("Its Sister", near), ("another", rule._asdict())):
        blocks = attention_triton.default_blocks(chip._replace(kind=kind), **shape)
        assert blocks._asdict() == expected
    for S, line in ((8192, near), (16_384, far), (200_000, far)):
        found = attention_triton.default_blocks(chip, **{**shape, "S": S})
        assert found._asdict() == line
    few = attention_triton.default_blocks(chip, **{**shape, "S": 300})
    assert few._asdict() == {**near, "parts": 4}  # no more than there are blocks of slots
    other = attention_triton.default_blocks(chip, **{**shape, "T": 40})
    assert other.rows == 128  # a shape without a line follows the rule
    device.table.cache_clear()


@pytest.mark.parametrize("T, K, G", [(512, 2, 6), (512, 4, 7), (101, 32, 1), (16, 8, 4)])
def test_hopper_reads_three_blocks_ahead(T, K, G):
    """Of tiles of 64 rows and more, where nothing was measured: an A100 has no room for it."""
    shape = dict(B=1, T=T, N=K * G, K=K, S=9000, H=128, dtype="bfloat16")

    def stages(capability, **changes):
        chip = device.Gpu("another", 132, capability)
        return attention_triton.default_blocks(chip, **{**shape, **changes}).stages

    assert [stages(capability) for capability in (8.0, 9.0, 10.0)] == [2, 3, 2]
    assert stages(9.0, dtype="float32") == 2


@kernels
def test_one_part_needs_no_merge(rng):
    """It gives what the merge gives, here with a rest that weighs nothing."""
    inputs = make_inputs(rng, B=2, T=5, K=2, G=3, S=40, H=24, length=(40, 7))
    B, _, N, H = inputs[0].shape
    rest = jnp.ones((B, N, H)), jnp.full((B, N), -1e30)
    run = functools.partial(attention_triton.tree_attention, blocks=attention_blocks(16, 16, 1))
    alone, by_merge = (run(*inputs, *more, interpret=True) for more in ((), rest))
    check_near(alone, by_merge, LARGEST_ERROR)
    names = [kernel_names(lower_for_cuda(run, *inputs, *more).as_text()) for more in ((), rest)]
    assert names == [{"tsjax_tree_attention"}, ATTENTION_KERNELS]


# --- transformations -------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("implementation", ["public", "interpreted", "narrow"])
def test_vmap_is_a_loop(implementation, rng):
    """Of narrow caches with ranks, which are those of all."""
    cases = [make_inputs(rng, B=2, T=3, S=40, length=length) for length in ([40, 7], [0, 21])]
    attention, scores, ranks = tree_attention, cache_scores, {}
    if implementation == "narrow":
        ranks = dict(zip(("slot_ranks", "row_ranks"), make_ranks(rng, cases[0])[0], strict=True))
        cases = [as_held("narrow", inputs) for inputs in cases]
    if implementation != "public":
        scores = functools.partial(interpreted_scores, mode="dot")

        def attention(*inputs):
            return interpreted(*inputs, **ranks)[0]

    def at(arrays, index):
        return jax.tree.map(lambda x: x[index], arrays)

    q, k_cache, *rest = jax.tree.map(lambda *x: jnp.stack([*map(jnp.asarray, x)]), *cases)
    # The second cache is that of both; the mapped axis of the query is not the first.
    out = jax.jit(jax.vmap(attention, in_axes=(1, None, 0, 0, 0, 0, 0)))(
        jnp.swapaxes(q, 0, 1), at(k_cache, 1), *rest
    )
    mapped = jax.jit(jax.vmap(scores))(q[:, :, 0], k_cache, rest[1])
    for index in range(2):
        alone = attention(q[index], at(k_cache, 1), *at(rest, index))
        assert relative_error(out[index], alone) < LARGEST_ERROR
        alone = scores(q[index, :, 0], at(k_cache, index), rest[1][index])
        np.testing.assert_allclose(mapped[index], alone, rtol=1e-5, atol=1e-5)

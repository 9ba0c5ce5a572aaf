# SPDX-License-Identifier: Apache-2.0
"""Weights of four and eight bits and their products, against NumPy."""

import functools
import subprocess
from dataclasses import replace
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import place
from kernel_programs import in_numpy, lower_for_cuda, unmasked_accesses

from pallas_kernels import narrow_product, native
from pallas_kernels.narrow_product import matrix as matrices
from pallas_kernels.narrow_product import triton, xla
from pallas_kernels.narrow_product.matrix import FORMATS, NarrowMatrix
from pallas_kernels.narrow_product.native import _narrow_product
from pallas_kernels.narrow_product.reference import as_multiplied
from pallas_kernels.narrow_product.split import Layout
from pallas_kernels.native import build

NATIVE = native.status(try_now=True).state == "ready"
in_cpp = functools.partial(narrow_product, implementation="native")


def of_kernels(test):
    return pytest.mark.kernels(pytest.mark.skipif(not NATIVE, reason="no compiler")(test))


def make_matrix(rng, name, outputs, inputs):
    """A matrix; its numbers, each product and sum rounded to float32; how large their parts are."""
    format = FORMATS[name]
    groups = -(-inputs // 32) * 32 // format.group
    q = rng.integers(0, 1 << format.bits, (outputs, inputs)).astype(np.uint8)
    scales, steps, of_scale = make_level(rng, format, outputs, groups)
    least, least_steps, of_least = make_level(rng, format, outputs, groups)
    if not format.with_least:
        least = least_steps = None
        of_least = np.zeros_like(of_least)
    scale, low = (np.repeat(one, format.group, 1)[:, :inputs] for one in (of_scale, of_least))
    products = scale * (q.astype(np.float32) - format.zero)
    wanted, sizes = products + low, np.abs(products) + np.abs(low)
    sizes_of = (outputs,), (inputs,)
    matrix = matrices.packed(format, *sizes_of, q, scales, steps, least, least_steps)
    return matrix, wanted, sizes


def make_level(rng, format, outputs, groups):
    """Numbers of the groups as they are stored, and as they are."""
    if not format.two_levels:
        halves = rng.standard_normal((outputs, groups)).astype(np.float16)
        return halves, None, halves.astype(np.float32)
    each = 256 // format.group
    halves = rng.standard_normal((outputs, groups // each)).astype(np.float16)
    steps = rng.integers(-128, 128, (outputs, groups)).astype(np.int8)
    wide = np.repeat(halves.astype(np.float32), each, axis=1)
    return halves, steps, wide * steps.astype(np.float32)


def define_rows(rows):
    """As they are multiplied: those of bfloat16 are integers times a scale for each 32 entries."""
    wide = np.array(rows, np.float32)
    for row in wide.reshape(-1, wide.shape[-1]) if rows.dtype == jnp.bfloat16 else ():
        for first in range(0, len(row), 32):
            entries = row[first : first + 32]
            largest = np.abs(entries).max()
            steps = np.float32(127) / largest if largest else np.float32(0)
            entries[:] = np.rint(entries * steps) * (largest / np.float32(127))
    return wide.astype(float)


def check_product(found, rows, weights, sizes):
    check_sums(found, define_rows(rows), weights, sizes)


def check_sums(found, rows, weights, sizes):
    """Within the rounding of float32, of the sum of what was added."""
    assert found.dtype == jnp.float32
    rows = np.asarray(rows, float)
    error = np.abs(np.asarray(found, float) - rows @ weights.astype(float).T)
    assert (error <= 1e-6 * (np.abs(rows) @ sizes.astype(float).T) + 1e-30).all()


def make_rows(rng, *shape, dtype="bfloat16"):
    rows = rng.standard_normal(shape) * np.exp(rng.uniform(-3, 3, shape))
    rows[..., : shape[-1] // 7] = 0
    return jnp.asarray(rows, dtype)


@st.composite
def cases(draw):
    name = draw(st.sampled_from(sorted(FORMATS)))
    usual = st.one_of(st.integers(1, 300), st.sampled_from([512, 576, 1100]))
    whole = st.sampled_from([256, 512, 1280])
    inputs = draw(whole if FORMATS[name].two_levels else usual)
    outputs, count = draw(st.integers(1, 70)), draw(st.integers(1, 17))
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    return name, outputs, inputs, count, dtype, draw(st.integers(0, 2**32))


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_numbers(name, rng):
    """And those that jax makes have the same bits."""
    matrix, wanted, _ = make_matrix(rng, name, 19, 512 if FORMATS[name].two_levels else 75)
    np.testing.assert_array_equal(matrix.numbers(), wanted)
    found = jax.jit(NarrowMatrix.numbers)(jax.tree.map(jnp.asarray, matrix))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_rounding_is_wrong_by_half_a_step(name, rng):
    """Groups of one number, zero too, are kept to the digits that a float16 has."""
    wide = rng.standard_normal((5, 100)).astype(np.float32)
    wide[0, :32], wide[1, :32] = 0, -0.37
    parts = matrices.rounded(wide, name)
    found = matrices.packed(FORMATS[name], (5,), (100,), **parts).numbers()
    steps = np.repeat(parts["scales"].astype(float), 32, axis=1)[:, :100]
    # A step and a least are float16, with eleven digits: so is what they leave out at the end.
    error = np.abs(found - wide)
    assert (error <= 0.5 * steps + 2e-3 * np.abs(wide).max()).all()
    assert np.median(error / np.maximum(steps, 1e-30)) < 0.3
    np.testing.assert_array_equal(found[0, :32], 0)
    np.testing.assert_allclose(found[1, :32], -0.37, rtol=1e-3)


def test_rows_are_rounded_to_integers(rng):
    rows = make_rows(rng, 3, 75)
    np.testing.assert_allclose(as_multiplied(rows), define_rows(rows), rtol=1e-6)
    np.testing.assert_array_equal(as_multiplied(rows.astype("float32")), rows.astype("float32"))


# --- products --------------------------------------------------------------------------------


@hypothesis.settings(max_examples=30)
@hypothesis.example(("Q4_K", 33, 1280, 13, "bfloat16", 0))
@hypothesis.example(("Q8_0", 40, 1100, 5, "bfloat16", 0))
@hypothesis.given(cases())
def test_products(case):
    name, outputs, inputs, count, dtype, seed = case
    rng = np.random.default_rng(seed)
    matrix, wanted, sizes = make_matrix(rng, name, outputs, inputs)
    rows = make_rows(rng, count, inputs, dtype=dtype)
    for implementation in ("xla", *["native"] * NATIVE):
        found = narrow_product(rows, matrix, implementation=implementation)
        check_product(found, rows, wanted, sizes)


@pytest.mark.kernels
@pytest.mark.parametrize("name", FORMATS)
def test_products_on_a_gpu(name, rng):
    """Rows are multiplied as they are."""
    inputs = 256 if FORMATS[name].two_levels else 300
    matrix, wanted, sizes = make_matrix(rng, name, 70, inputs)
    rows = make_rows(rng, 21, inputs)
    blocks = triton.Blocks(64, 16, parts=2, warps=4, stages=3)
    found = triton.narrow_product(rows, matrix, blocks=blocks, interpret=True)
    check_sums(found, rows, wanted, sizes)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q5_K", "Q6_K"])
def test_what_a_gpu_touches(name, rng):
    """Nothing outside of an array."""
    inputs = 256 if FORMATS[name].two_levels else 76
    matrix, wanted, sizes = make_matrix(rng, name, 20, inputs)
    layout, blocks = Layout.of(matrix), triton.Blocks(64, 16, parts=2, warps=4, stages=3)
    rows = make_rows(rng, 3, inputs, dtype="float16")
    with in_numpy():
        settings = dict(layout=layout, blocks=blocks, chip=None, interpret=False)
        found = triton._narrow_product(rows, *layout.arrays_of(matrix), **settings)
    check_sums(found[:, :20], rows, wanted, sizes)


@pytest.mark.kernels
def test_what_a_gpu_is_given(rng):
    matrix, wanted, sizes = make_matrix(rng, "Q4_1", 40, 300)
    rows = make_rows(rng, 2, 64, 300)
    lowered = lower_for_cuda(narrow_product, rows, matrix)
    assert unmasked_accesses(lowered) == {"tsjax_narrow_product": []}
    for others, why in (
        (make_rows(rng, 2, 65, 300), "130 rows: up to 128"), (rows.astype("float32"), "float32")
    ):  # fmt: skip
        text = lower_for_cuda(narrow_product, others, matrix).as_text()
        assert "tsjax_narrow_product" not in text
        with pytest.raises(NotImplementedError, match=f"triton: {why}"):
            lower_for_cuda(
                functools.partial(narrow_product, implementation="triton"), others, matrix
            )
    # XLA's product there has weights of eight digits, as the rows have.
    check_sums(xla.narrow_product(rows, matrix), rows, wanted, sizes * (2**-8 / 1e-6))


@of_kernels
@hypothesis.settings(max_examples=30)
@hypothesis.given(cases())
def test_a_row_has_the_same_bits_alone(case):
    """Also where some rows are left out, and where several threads share the work."""
    name, outputs, inputs, count, dtype, seed = case
    rng = np.random.default_rng(seed)
    matrix, _, _ = make_matrix(rng, name, outputs, inputs)
    more = {field: np.tile(array, (20, 1, 1)) for field, array in vars(matrix).items()
            if isinstance(array, np.ndarray)}  # fmt: skip
    matrix = replace(matrix, **more, outputs=(len(more["values"]), 16))
    rows = make_rows(rng, 2, count, inputs, dtype=dtype)
    together = np.asarray(in_cpp(rows, matrix))
    live = rng.integers(0, count + 1, 2).astype(np.int32)
    some = in_cpp(rows, matrix, live=live)
    for b, t in {(0, 0), (1, count // 2), (1, count - 1)}:
        alone = in_cpp(rows[b, t], matrix)
        np.testing.assert_array_equal(alone, together[b, t])
        np.testing.assert_array_equal(some[b, t], alone if t < live[b] else 0)


@of_kernels
def test_rows_that_are_not_finite_or_tiny(rng):
    """Spoil their own sums and no others."""
    matrix, wanted, sizes = make_matrix(rng, "Q4_1", 16, 64)
    rows = make_rows(rng, 4, 64)
    spoilt = rows.at[0, 3].set(jnp.nan).at[1, 40].set(-jnp.inf).at[2].set(1e-32)
    for implementation in ("native", "xla"):
        found = narrow_product(spoilt, matrix, implementation=implementation)
        assert jnp.isnan(found[:2]).all() and (found[2] == 0).all()
        check_product(found[3:], rows[3:], wanted, sizes)


PROCESSORS = {
    "AVX2": ("-mno-avx512f", ("avx2", "fma", "f16c")),
    "AVX-512 without integers": ("-mno-avx512vnni -mno-avx512bw", ("avx512f",)),
}


@of_kernels
@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_processors_compute_the_same_bits(processor, tmp_path, rng):
    flags, needed = PROCESSORS[processor]
    if not {*needed} <= {*native.cpu().split()}:
        pytest.skip("this processor cannot run it")
    source = Path(build.__file__).parents[1] / "narrow_product" / "native.cc"
    usual = [flag for flag in build.FLAGS if flag != "-O3"]
    command = [build.find_compiler(), *usual, "-O1", *flags.split(), "-shared", str(source)]
    command += ["-isystem", jax.ffi.include_dir(), "-o", str(tmp_path / "kernel.so")]
    subprocess.run(command, check=True)
    library = native.Library(tmp_path / "kernel.so", f"{processor} of tests")
    for name in ("Q4_1", "Q8_0", "Q2_K", "Q6_K"):
        matrix = jax.tree.map(jnp.asarray, make_matrix(rng, name, 48, 512)[0])
        layout = Layout.of(matrix)
        kernel = functools.partial(_narrow_product, layout=layout, library=library)
        for dtype in ("bfloat16", "float32"):
            rows = make_rows(rng, 14, 512, dtype=dtype)
            for count in (1, 2, 5, 14):
                found = kernel(rows[:count], *layout.arrays_of(matrix))
                np.testing.assert_array_equal(found, in_cpp(rows[:count], matrix))


# --- devices, batches, derivatives -----------------------------------------------------------


@of_kernels
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
@pytest.mark.parametrize("split", ["outputs", "inputs"])
def test_on_a_mesh(split, name, rng):
    """Weights that are split by outputs need no other device; by inputs, sums are added up."""
    matrix, wanted, sizes = make_matrix(rng, name, 64, 512)
    rows = make_rows(rng, 2, 3, 512)
    axes = ("model",) if split == "outputs" else (None, "model")
    of_rows = ("data",) if split == "outputs" else ("data", None, "model")
    placed = place(rows, *of_rows), jax.tree.map(lambda array: place(array, *axes), matrix)
    compiled = jax.jit(in_cpp).lower(*placed).compile()
    text = compiled.as_text()
    assert "tsjax_narrow_product_" in text and "all-gather" not in text
    assert ("all-reduce" in text) == (split == "inputs")
    check_product(compiled(*placed), rows, wanted, sizes)


@of_kernels
@pytest.mark.parametrize(
    ("name", "outputs", "inputs", "axes"),
    [
        ("Q4_0", 30, 64, ("model",)),  # a panel that is not full
        ("Q4_0", 16, 96, ()),  # one panel
        ("Q4_0", 30, 300, (None, "model")),  # groups that are not full, and three of 256 inputs,
        ("Q4_K", 30, 768, (None, "model")),  # are not split
    ],
)
def test_what_is_not_whole_on_a_mesh(name, outputs, inputs, axes, rng):
    matrix, wanted, sizes = make_matrix(rng, name, outputs, inputs)
    rows = make_rows(rng, 2, 3, inputs)
    placed = replace(matrix, values=place(matrix.values, *axes))
    check_product(jax.jit(in_cpp)(place(rows, "data"), placed), rows, wanted, sizes)


@of_kernels
def test_under_vmap_and_grad(rng):
    matrix, wanted, sizes = make_matrix(rng, "Q4_1", 8, 300)
    rows = make_rows(rng, 4, 3, 300)
    live = np.asarray([1, 3, 0, 2], np.int32)
    found = jax.vmap(in_cpp, (0, None))(rows, matrix)
    np.testing.assert_array_equal(found, in_cpp(rows, matrix))
    each = jax.vmap(lambda rows, live: in_cpp(rows[None], matrix, live=live[None])[0])(rows, live)
    np.testing.assert_array_equal(each, in_cpp(rows, matrix, live=live))
    several = jax.tree.map(lambda array: jnp.stack([array, array]), matrix)
    check_product(jax.vmap(in_cpp, (None, 0))(rows, several)[1], rows, wanted, sizes)
    found = jax.grad(lambda rows: jnp.sum(narrow_product(rows, matrix)))(rows)
    np.testing.assert_allclose(
        found.astype("f"), np.broadcast_to(wanted.sum(0), rows.shape), rtol=1e-2, atol=1e-2
    )


def test_what_does_not_fit_is_refused(rng):
    usual, two = (make_matrix(rng, name, 20, 256)[0] for name in ("Q4_1", "Q4_K"))
    rows = np.ones((2, 256), "f")
    for matrix, message in (
        (replace(usual, values=usual.values[:1]), r"values is \(\(1, 8, 256\), 'uint8'\) and not"),
        (replace(usual, scales=usual.scales.astype("f")), "scales is .*'float32'"),
        (replace(usual, least=None), "least is None and not valid"),
        (replace(usual, steps=two.steps), r"steps is .* not valid: None"),
        (replace(two, steps=two.steps[:, :5]), r"steps is \(\(2, 5, 16\)"),
        (replace(usual, inputs=(255,)), r"rows \[..., 256\], weights of \(255,\) inputs"),
    ):
        with pytest.raises(ValueError, match=message):
            narrow_product(rows, matrix)
    with pytest.raises(ValueError, match="255 inputs are not valid for .*: a multiple of 256"):
        narrow_product(rows[:, :255], replace(two, inputs=(255,)))
    with pytest.raises(ValueError, match="rows of shape .* and type int32"):
        narrow_product(rows.astype("i"), usual)
    with pytest.raises(NotImplementedError, match="float16"):
        in_cpp(rows.astype("float16"), usual)
    assert narrow_product(rows.astype("float16"), two).dtype == np.float32

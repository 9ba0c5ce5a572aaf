# SPDX-License-Identifier: Apache-2.0
"""Norms, and queries and keys of a layer, by all implementations, the Triton kernels interpreted.

Accesses are looked for by NumPy and in the lowered programs, as in test_kernels.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import check_near, define_norm, make_heads, make_norm, place, relative_error
from kernel_programs import in_numpy, kernel_names, lower_for_cuda, unmasked_accesses

from pallas_kernels import add_rms_norm, gated, native, rms_norm, rotary_heads
from pallas_kernels.operations import implementations
from pallas_kernels.rms_norm import triton as norm_triton
from pallas_kernels.rotary import triton as rotary_triton

HAS_COMPILER = native.status(try_now=True).state == "ready"
EPS = 1e-5
LARGEST_ERROR = {"float32": 3e-6, "bfloat16": 1e-2, "float16": 2e-3}
kernels = pytest.mark.kernels


def compiled_text(function, *arrays):
    return jax.jit(function).lower(*arrays).compile().as_text()


# --- norms -----------------------------------------------------------------------------------


NORMS = {
    "triton": (
        functools.partial(norm_triton.rms_norm, eps=EPS, interpret=True),
        functools.partial(norm_triton.add_rms_norm, eps=EPS, interpret=True),
    ),
    "xla": tuple(
        functools.partial(norm, eps=EPS, implementation="xla") for norm in (rms_norm, add_rms_norm)
    ),
    "public": tuple(functools.partial(norm, eps=EPS) for norm in (rms_norm, add_rms_norm)),
}
SHAPES = [(2, 3, 37), (5,), (1, 8), (2, 2070), (2, 5, 3, 16)]


NORM_CALLS = [
    *(("public", dtype, shape) for dtype in LARGEST_ERROR for shape in SHAPES[1:]),
    *(("triton", "float32", shape) for shape in SHAPES[1:]),
    ("triton", "bfloat16", SHAPES[0]), ("triton", "float16", SHAPES[3]),
    ("xla", "bfloat16", SHAPES[4]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        *((name, "float32", SHAPES[0]) for name in NORMS),
        *(pytest.param(*call, marks=kernels) for call in NORM_CALLS),
    ],
)
def test_norms(name, dtype, shape, rng):
    """And each row alone has the same bits."""
    rows, update, weight = make_norm(rng, shape, dtype)
    norm, add_norm = NORMS[name]
    sums = rows + update.astype(dtype)
    out, (added, normed) = norm(rows, weight), add_norm(rows, update, weight)
    np.testing.assert_array_equal(added, sums)
    for found, of in ((out, rows), (normed, sums)):
        assert found.dtype == dtype and found.shape == shape
        assert relative_error(found, define_norm(of, weight, EPS)) < LARGEST_ERROR[dtype]
    np.testing.assert_array_equal(norm(sums, weight), normed)
    np.testing.assert_array_equal(add_norm(rows, update.astype(dtype), weight)[1], normed)
    if name == "public" and HAS_COMPILER and dtype != "float16":
        for row, whole in zip(rows.reshape(-1, shape[-1]), out.reshape(-1, shape[-1]), strict=True):
            np.testing.assert_array_equal(norm(row, weight), whole)
    if name == "triton":
        with in_numpy():
            checked = norm_triton._norms(rows, update, weight, eps=EPS, interpret=False)
        check_near(checked, (added, normed), LARGEST_ERROR[dtype])


@kernels
@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_norms_have_a_kernel_on_a_gpu(dtype, rng):
    rows, update, weight = make_norm(rng, (2, 3, 40), dtype)
    norm, add_norm = NORMS["public"]
    for lowered in (
        lower_for_cuda(norm, rows, weight), lower_for_cuda(add_norm, rows, update, weight)
    ):  # fmt: skip
        assert unmasked_accesses(lowered) == {"tsjax_rms_norm": []}
    wide = jnp.ones((2, norm_triton.WIDEST + 8), dtype)
    kernel = functools.partial(norm, implementation="triton")
    with pytest.raises(NotImplementedError, match="triton: rows of 16392: up to 16384"):
        lower_for_cuda(kernel, wide, wide[0])


@kernels
@pytest.mark.parametrize("name", ["triton", "public"])
def test_sums_and_norms_under_vmap_and_on_a_mesh(name, rng):
    rows, update, weight = make_norm(rng, (4, 2, 16), "float32")
    kernel = NORMS[name][1]
    expected = kernel(rows, update, weight)
    of_one = kernel(rows, jnp.broadcast_to(update[0], rows.shape), weight)
    placed = place(rows, "data"), place(update, "data"), place(weight)
    assert "all-gather" not in compiled_text(kernel, *placed)
    for found, wanted in (
        (jax.vmap(kernel, (0, 0, None))(rows, update, weight), expected),
        (jax.vmap(kernel)(rows, update, jnp.stack([weight] * 4)), expected),
        (jax.vmap(kernel, (0, None, None))(rows, update[0], weight), of_one),
        (jax.jit(kernel)(*placed), expected),
    ):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@kernels
def test_derivatives_of_norms_are_those_of_xla(rng):
    rows, update, weight = make_norm(rng, (4, 2, 16), "float32")

    def total(rows, **options):
        added, normed = add_rms_norm(rows, update, weight, EPS, **options)
        alone = rms_norm(rows, weight, EPS, **options)
        return jnp.sum(added**2) + jnp.sum(normed**3) + jnp.sum(alone**3)

    found, wanted = jax.grad(total)(rows), jax.grad(total)(rows, implementation="xla")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


# --- queries, keys and values ----------------------------------------------------------------


def define_heads(fresh, cos, sin, dtype):
    """One vector at a time, as a product of complex numbers, in float64."""
    fresh = np.asarray(jnp.asarray(fresh, dtype), float)
    B, T, K, P, H = fresh.shape
    turns = np.asarray(cos, float) + 1j * np.asarray(sin, float)
    out = [np.empty((B, T, n, H)) for n in (K * (P - 2), K, K)]
    for b, t, k, p in np.ndindex(B, T, K, P):
        vector = fresh[b, t, k, p]
        turned = (vector[: H // 2] + 1j * vector[H // 2 :]) * turns[b, t]
        turned = np.concatenate([turned.real, turned.imag])
        if p < P - 2:
            out[0][b, t, k * (P - 2) + p] = turned
        else:
            out[p - P + 3][b, t, k] = turned if p == P - 2 else vector
    return out


HEADS = [(2, 3, 2, 1, 64), (1, 1, 8, 4, 128), (1, 5, 3, 7, 80), (2, 2, 1, 5, 96), (1, 2, 2, 2, 6)]


HEAD_CALLS = [*(("bfloat16", shape) for shape in HEADS), ("float16", HEADS[2])]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", HEADS[0]), *(pytest.param(*call, marks=kernels) for call in HEAD_CALLS)],
)
def test_heads(dtype, shape, rng):
    kernel = functools.partial(rotary_triton.rotary_heads, dtype=dtype, interpret=True)
    for wide in (True, False):
        arrays = make_heads(rng, *shape, dtype, wide=wide)
        expected = define_heads(*arrays, dtype)
        with in_numpy():
            checked = rotary_triton._heads(*arrays, dtype=jnp.dtype(dtype), interpret=False)
        for found in (kernel(*arrays), checked, rotary_heads(*arrays, dtype)):
            assert {one.dtype for one in found} == {jnp.dtype(dtype)}
            check_near(found, expected, LARGEST_ERROR[dtype])
            np.testing.assert_array_equal(found[2], expected[2])  # values are not turned


@kernels
def test_heads_have_a_kernel_on_a_gpu(rng):
    arrays = make_heads(rng, 2, 3, 2, 5, 80, "bfloat16")
    kernel = functools.partial(rotary_heads, dtype="bfloat16")
    assert unmasked_accesses(lower_for_cuda(kernel, *arrays)) == {"tsjax_rotary_heads": []}
    arrays = make_heads(rng, 1, 1, 1, 1, 256, "bfloat16")
    assert "tsjax_" not in lower_for_cuda(kernel, *arrays).as_text()
    with pytest.raises(NotImplementedError, match="triton: head_dim 256: up to 128"):
        lower_for_cuda(functools.partial(kernel, implementation="triton"), *arrays)


@kernels
@pytest.mark.parametrize("group", [1, 3])
def test_heads_on_a_mesh_and_under_vmap(group, rng):
    fresh, cos, sin = make_heads(rng, 2, 3, 2, group, 64, "float32")
    kernel = functools.partial(rotary_triton.rotary_heads, dtype="float32", interpret=True)
    expected = kernel(fresh, cos, sin)
    placed = place(fresh, "data", None, "model"), place(cos, "data"), place(sin, "data")
    text = compiled_text(kernel, *placed)
    assert "all-gather" not in text and "all-reduce" not in text
    for found, wanted in zip(jax.jit(kernel)(*placed), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
        axes = ("data", None, "model")
        assert found.sharding.is_equivalent_to(place(jnp.zeros(found.shape), *axes).sharding, 4)
    several = jax.vmap(kernel, (0, None, None))(jnp.stack([fresh, 2 * fresh]), cos, sin)
    for found, wanted in zip(several, expected, strict=True):
        np.testing.assert_array_equal(found, np.stack([wanted, 2 * wanted]))


# --- gates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("shape", [(2, 3, 37), (1, 1, 16), (5, 40)])
@pytest.mark.parametrize("wide", [True, False])
def test_gates(dtype, shape, wide, rng):
    """Of large numbers too; and each row alone has the same bits."""
    opened = rng.standard_normal((*shape, 2)) * np.exp(rng.uniform(-3, 4, shape))[..., None]
    opened = jnp.asarray(opened, "float32" if wide else dtype)
    gate, up = np.moveaxis(np.asarray(opened.astype(dtype), float), -1, 0)
    with np.errstate(over="ignore"):
        wanted = gate / (1 + np.exp(-gate)) * up
    smallest = float(jnp.finfo(dtype).tiny) * (1 + np.abs(up))  # below it digits are lost
    found = gated(opened, dtype)
    for one in (found, gated(opened, dtype, implementation="xla")):
        assert one.dtype == dtype and one.shape == shape
        error = np.abs(np.asarray(one, float) - wanted)
        assert (error <= LARGEST_ERROR[dtype] * np.abs(wanted) + smallest).all()
    if HAS_COMPILER and dtype != "float16" and len(shape) == 3:
        for b, t in np.ndindex(shape[:2]):
            alone = gated(opened[b : b + 1, t : t + 1], dtype)
            np.testing.assert_array_equal(alone[0, 0], found[b, t])


# --- what is refused --------------------------------------------------------------------------

ROWS, WEIGHT = np.ones((2, 3), "f"), np.ones(3, "f")
NOT_ROWS = r"update of shape .* not valid: \(2, 3\) of float32"


def heads(parts, angles, dtype):
    angles = np.ones((1, 2, angles), "f")
    rotary_heads(np.ones((1, 2, 3, parts, 8), "f"), angles, angles, dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(ROWS, np.ones(4, "f"), EPS), r"rows \(2, 3\), weight \(4,\)"),
        (lambda: rms_norm(ROWS.astype("i"), WEIGHT, EPS), "rows of type int32"),
        (lambda: add_rms_norm(ROWS, np.ones((2, 4), "f"), WEIGHT, EPS), NOT_ROWS),
        (lambda: add_rms_norm(ROWS, ROWS.astype("i"), WEIGHT, EPS), NOT_ROWS),
        (lambda: heads(2, 4, "float32"), r"\(1, 2, 3, 2, 8\) is not valid: .* at least 3"),
        (lambda: heads(4, 8, "float32"), r"so cos and sin \(1, 2, 4\); got cos \(1, 2, 8\)"),
        (lambda: heads(4, 4, "int32"), "with dtype int32 is not valid: dtype is one of"),
        (lambda: heads(4, 4, "float64"), "float32 with dtype float64 is not valid"),
        (lambda: gated(ROWS, "float32"), r"\(2, 3\) is not valid: \[\.\.\., F, 2\]"),
        (lambda: gated(ROWS[:, :2], "int32"), "with dtype int32 is not valid: dtype is one of"),
        (lambda: gated(ROWS[:, :2], "float64"), "float32 with dtype float64 is not valid"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- the switch ------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("named", ["rms_norm", "rms_norm, rotary_heads", "all"])
def test_kernels_are_switched_off_by_name(named, monkeypatch, rng):
    monkeypatch.setenv("TSJAX_NO_TRITON", named)
    off = ("rms_norm", "rotary_heads") if named == "all" else named.split(", ")
    for name, found in implementations("cuda").items():
        has_one = name not in ("product", "gated", "threshold")
        is_off = named == "all" or name.removeprefix("add_") in off
        assert ("triton" in found) == (has_one and not is_off)
    rows, _, weight = make_norm(rng, (2, 64), "bfloat16")
    text = lower_for_cuda(functools.partial(rms_norm, eps=EPS), rows, weight).as_text()
    assert not kernel_names(text)


def test_a_switch_that_names_no_operation_is_refused(monkeypatch, rng):
    monkeypatch.setenv("TSJAX_NO_TRITON", "norms")
    rows, _, weight = make_norm(rng, (2, 64), "bfloat16")
    with pytest.raises(ValueError, match="TSJAX_NO_TRITON='norms' is not valid: all, or some"):
        lower_for_cuda(functools.partial(rms_norm, eps=EPS), rows, weight)

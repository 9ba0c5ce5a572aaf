# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels on a GPU, for the shapes of real models: pytest -m gpu tests/test_on_gpu.py

Needs jax, numpy and pytest only. Errors are the largest error over the largest entry, against the
float32 reference of the same inputs, which is computed for one kv head after the other.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels.cache_scores import reference as scores_reference
from pallas_kernels.cache_scores import specs as scores_specs
from pallas_kernels.cache_scores.api import cache_scores
from pallas_kernels.rms_norm import reference as norm_reference
from pallas_kernels.rms_norm.api import add_rms_norm, rms_norm
from pallas_kernels.rotary import reference as rotary_reference
from pallas_kernels.rotary.api import rotary_heads
from pallas_kernels.tree_attention import reference as attention_reference
from pallas_kernels.tree_attention import specs as attention_specs
from pallas_kernels.tree_attention.api import tree_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

ATTENTION_ERROR = {"float32": 1e-5, "bfloat16": 1e-2}
SCORES_ERROR = {"dot": 1e-5, "softmax": 1e-3}


@pytest.fixture(autouse=True)
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU; this is {jax.default_backend()}")


def lengths(spec):
    """For each batch row another one, and each row has had all of them."""
    edges = [spec.S, spec.S // 2 + 3, 1, 0]
    return [[edges[(first + row) % 4] for row in range(spec.B)] for first in range(4)]


def wide(*arrays):
    return [x.astype(jnp.float32) for x in arrays]


@jax.jit
def expected_attention(q, k_cache, v_cache, length, k_new, v_new, tree_mask):
    """The reference in float32: [B, T, N, H]."""
    (B, T, N, H), K = q.shape, k_cache.shape[1]
    grouped = jnp.moveaxis(q.reshape(B, T, K, N // K, H), 2, 0)

    def attend(head):
        caches = (lax.dynamic_slice_in_dim(x, head, 1, axis=1) for x in (k_cache, v_cache))
        fresh = (lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (k_new, v_new))
        inputs = *wide(grouped[head], *caches), length, *wide(*fresh), tree_mask
        return attention_reference.tree_attention(*inputs)[0]

    out = lax.map(attend, jnp.arange(K))  # [K, B, T, G, H]
    return jnp.moveaxis(out, 0, 2).reshape(B, T, N, H)


@functools.partial(jax.jit, static_argnames="mode")
def expected_scores(q, k_cache, length, mode):
    """The reference in float32, as the public function."""
    (B, N, H), K = q.shape, k_cache.shape[1]
    grouped = jnp.moveaxis(q.reshape(B, K, N // K, H), 1, 0)

    def score(head):
        k = lax.dynamic_slice_in_dim(k_cache, head, 1, axis=1)
        return scores_reference.cache_scores(*wide(grouped[head], k), length, mode)

    scores = lax.map(score, jnp.arange(K))  # [K, B, 1, S] or [K, B, S]
    return jnp.moveaxis(scores[:, :, 0], 0, 1) if mode == "dot" else jnp.mean(scores, axis=0)


@jax.jit
def relative_error(out, expected):
    """NaN if there is one in either; equal infinities are no error."""
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    infinite = jnp.isinf(expected) & (out == expected)
    out, expected = (jnp.where(infinite, 0, x) for x in (out, expected))
    largest = jnp.max(jnp.abs(expected))
    return jnp.max(jnp.abs(out - expected)) / jnp.where(largest == 0, 1, largest)


@jax.jit
def poison(cache, length):
    beyond = jnp.arange(cache.shape[2]) >= length[:, None]
    return jnp.where(beyond[:, None, :, None], jnp.nan, cache).astype(cache.dtype)


def compile_kernels(function, inputs, *names):
    """The compiled function, in which these kernels are."""
    compiled = jax.jit(function).lower(*inputs).compile()
    text = compiled.as_text()
    assert all(name in text for name in names)
    return compiled


def check_kernel(run, specs, spec, names, bound, define, caches) -> None:
    """Values, the same bits twice, and that nothing beyond the lengths is read."""
    kernel = None
    for length in lengths(spec):
        arrays = specs.inputs(spec, length=length)
        inputs = tuple(arrays.values())
        if kernel is None:
            kernel = compile_kernels(run, inputs, *names)
            xla = jax.jit(functools.partial(run, implementation="xla"))
        out, expected = kernel(*inputs), define(*inputs)
        assert out.shape == expected.shape
        assert relative_error(out, expected) < bound, length
        assert relative_error(out, xla(*inputs)) < 2 * bound, length
        assert jnp.array_equal(kernel(*inputs), out), "not the same bits twice"
        for cache in caches:
            arrays[cache] = poison(arrays[cache], arrays["length"])
        assert jnp.array_equal(kernel(*arrays.values()), out), "slots beyond length are read"
        assert out.dtype == (spec.dtype if run is tree_attention else jnp.float32)


@pytest.mark.parametrize("name", attention_specs.SPECS)
def test_tree_attention(name):
    spec = attention_specs.SPECS[name]
    names, caches = ["tsjax_tree_attention", "tsjax_tree_attention_merge"], ["k_cache", "v_cache"]
    bound = ATTENTION_ERROR[spec.dtype]
    check_kernel(tree_attention, attention_specs, spec, names, bound, expected_attention, caches)


@pytest.mark.parametrize("mode", SCORES_ERROR)
@pytest.mark.parametrize("name", scores_specs.SPECS)
def test_cache_scores(name, mode):
    names = {
        "dot": ["tsjax_cache_scores"],
        "softmax": ["tsjax_cache_scores_totals", "tsjax_cache_scores_softmax"],
    }
    run = functools.partial(cache_scores, mode=mode)
    define = functools.partial(expected_scores, mode=mode)
    spec, bound = scores_specs.SPECS[name], SCORES_ERROR[mode]
    check_kernel(run, scores_specs, spec, names[mode], bound, define, ["k_cache"])


@pytest.mark.parametrize("dtype", ATTENTION_ERROR)
@pytest.mark.parametrize("shape", [(1, 1, 4096), (1, 101, 4096), (2, 3, 1536), (1, 7, 80)])
def test_norms(shape, dtype):
    normal, keys = jax.random.normal, jax.random.split(jax.random.key(0), 3)
    rows, update = normal(keys[0], shape, dtype), normal(keys[1], shape, "float32")
    weight = normal(keys[2], shape[-1:], dtype)
    norm, add_norm = (functools.partial(run, eps=1e-5) for run in (rms_norm, add_rms_norm))
    kernel = compile_kernels(add_norm, (rows, update, weight), "tsjax_rms_norm")
    sums, normed = kernel(rows, update, weight)
    wanted = norm_reference.add_rms_norm(rows, update, weight, 1e-5)
    assert jnp.array_equal(sums, wanted[0])
    assert relative_error(normed, wanted[1]) < ATTENTION_ERROR[dtype]
    alone = compile_kernels(norm, (sums, weight), "tsjax_rms_norm")
    assert jnp.array_equal(alone(sums, weight), normed)


@pytest.mark.parametrize("dtype", ATTENTION_ERROR)
@pytest.mark.parametrize("shape", [(1, 1, 8, 6, 128), (1, 101, 2, 8, 128), (2, 3, 4, 3, 80)])
def test_heads(shape, dtype):
    fresh = jax.random.normal(jax.random.key(0), shape, "float32")
    angles = jax.random.uniform(jax.random.key(1), (*shape[:2], shape[-1] // 2), maxval=6.0)
    inputs = fresh, jnp.cos(angles), jnp.sin(angles)
    kernel = compile_kernels(
        functools.partial(rotary_heads, dtype=dtype), inputs, "tsjax_rotary_heads"
    )
    wanted = rotary_reference.rotary_heads(*inputs, dtype)
    for found, expected in zip(kernel(*inputs), wanted, strict=True):
        assert found.dtype == dtype
        assert relative_error(found, expected) < ATTENTION_ERROR[dtype]

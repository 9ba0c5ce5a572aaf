# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels on a GPU, for the shapes of real models: pytest -m gpu tests/test_on_gpu.py

Needs jax, numpy and pytest only. Errors are the largest error over the largest entry, against the
float32 reference of the same inputs, which is computed for one kv head after the other.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels import NarrowMatrix, Ranks, narrow_product, narrowed, widened
from pallas_kernels.cache_scores import reference as scores_reference
from pallas_kernels.cache_scores import specs as scores_specs
from pallas_kernels.cache_scores.api import cache_scores
from pallas_kernels.narrow_product.matrix import FORMATS, shapes_of
from pallas_kernels.product import reference as product_reference
from pallas_kernels.product.api import product
from pallas_kernels.rms_norm import reference as norm_reference
from pallas_kernels.rms_norm.api import add_rms_norm, rms_norm
from pallas_kernels.rotary import reference as rotary_reference
from pallas_kernels.rotary.api import rotary_heads
from pallas_kernels.tree_attention import reference as attention_reference
from pallas_kernels.tree_attention import specs as attention_specs
from pallas_kernels.tree_attention.api import decode_attention, tree_attention

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


@jax.jit
def expected_attention(q, k_cache, v_cache, length, k_new, v_new, tree_mask):
    """The reference in float32: [B, T, N, H]."""
    (B, T, N, H), K = q.shape, k_cache.shape[1]
    grouped = q.reshape(B, T, K, N // K, H)

    def attend(head):
        q_head = lax.dynamic_index_in_dim(grouped, head, 2, keepdims=False)
        caches = (lax.dynamic_slice_in_dim(x, head, 1, axis=1) for x in (k_cache, v_cache))
        fresh = (lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (k_new, v_new))
        q_head, k, v, k_fresh, v_fresh = (x.astype(jnp.float32) for x in (q_head, *caches, *fresh))
        inputs = q_head, k, v, length, k_fresh, v_fresh, tree_mask
        return attention_reference.tree_attention(*inputs)[0]

    out = lax.map(attend, jnp.arange(K))  # [K, B, T, G, H]
    return jnp.moveaxis(out, 0, 2).reshape(B, T, N, H)


@functools.partial(jax.jit, static_argnames="mode")
def expected_scores(q, k_cache, length, mode):
    """The reference in float32, as the public function."""
    (B, N, H), K = q.shape, k_cache.shape[1]
    grouped = q.reshape(B, K, N // K, H)

    def score(head):
        q_head = lax.dynamic_index_in_dim(grouped, head, 1, keepdims=False)
        k = lax.dynamic_slice_in_dim(k_cache, head, 1, axis=1)
        q_head, k = q_head.astype(jnp.float32), k.astype(jnp.float32)
        return scores_reference.cache_scores(q_head, k, length, mode)

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


@pytest.mark.parametrize("name", attention_specs.SPECS)
def test_tree_attention(name):
    spec = attention_specs.SPECS[name]
    attention = xla = None
    for length in lengths(spec):
        arrays = attention_specs.inputs(spec, length=length)
        inputs = tuple(arrays.values())
        if attention is None:
            attention = compile_kernels(
                tree_attention, inputs, "tsjax_tree_attention", "tsjax_tree_attention_merge"
            )
            xla = jax.jit(functools.partial(tree_attention, implementation="xla"))
        out = attention(*inputs)
        assert out.dtype == spec.dtype and out.shape == arrays["q"].shape
        bound = ATTENTION_ERROR[spec.dtype]
        assert relative_error(out, expected_attention(*inputs)) < bound, length
        assert relative_error(out, xla(*inputs)) < 2 * bound, length
        assert jnp.array_equal(attention(*inputs), out), "not the same bits twice"
        for cache in ("k_cache", "v_cache"):
            arrays[cache] = poison(arrays[cache], arrays["length"])
        assert jnp.array_equal(attention(*arrays.values()), out), "slots beyond length are read"


@pytest.mark.parametrize("mode", SCORES_ERROR)
@pytest.mark.parametrize("name", scores_specs.SPECS)
def test_cache_scores(name, mode):
    spec = scores_specs.SPECS[name]
    names = {
        "dot": ["tsjax_cache_scores"],
        "softmax": ["tsjax_cache_scores_totals", "tsjax_cache_scores_softmax"],
    }
    score = xla = None
    for length in lengths(spec):
        arrays = scores_specs.inputs(spec, length=length)
        inputs = tuple(arrays.values())
        if score is None:
            run = functools.partial(cache_scores, mode=mode)
            score = compile_kernels(run, inputs, *names[mode])
            xla = jax.jit(functools.partial(run, implementation="xla"))
        out = score(*inputs)
        assert out.dtype == jnp.float32
        bound = SCORES_ERROR[mode]
        assert relative_error(out, expected_scores(*inputs, mode=mode)) < bound, length
        assert relative_error(out, xla(*inputs)) < 2 * bound, length
        if mode == "softmax":
            sums = jnp.sum(out, axis=1)
            assert jnp.max(jnp.abs(sums - (arrays["length"] > 0))) < 1e-3
        assert jnp.array_equal(score(*inputs), out), "not the same bits twice"
        arrays["k_cache"] = poison(arrays["k_cache"], arrays["length"])
        assert jnp.array_equal(score(*arrays.values()), out), "slots beyond length are read"


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_product(weights, rows):
    """XLA's; there is no kernel."""
    keys = jax.random.split(jax.random.key(0), 3)
    given = jax.random.normal(keys[0], (rows, 4096), "bfloat16")
    matrix, scales = jax.random.normal(keys[1], (6144, 4096), "bfloat16"), None
    if weights == "int8":
        matrix = jax.random.randint(keys[1], (6144, 4096), -127, 128, jnp.int8)
        scales = jax.random.uniform(keys[2], (6144,), minval=0.1)
    out = jax.jit(product)(given, matrix, scales=scales)
    assert out.dtype == jnp.float32 and out.shape == (rows, 6144)
    assert relative_error(out, product_reference.product(given, matrix, scales)) < 1e-5


@pytest.mark.parametrize("rows", [1, 16, 101])
@pytest.mark.parametrize("name", FORMATS)
def test_narrow_product(name, rows):
    """And a row has the bits that it has alone."""
    key, format = jax.random.key(0), FORMATS[name]
    arrays: dict = dict.fromkeys(("values", "scales", "steps", "least", "least_steps"))
    for part, (shape, dtype) in shapes_of(format, 6144, 4096).items():
        random = jax.random.normal if dtype == "float16" else jax.random.bits
        arrays[part] = random(key, shape, dtype if dtype != "int8" else "uint8").astype(dtype)
    matrix = NarrowMatrix(*arrays.values(), format, (6144,), (4096,))
    given = jax.random.normal(key, (rows, 4096), "bfloat16")
    out = compile_kernels(narrow_product, (given, matrix), "tsjax_narrow_product")(given, matrix)
    weights = jax.jit(NarrowMatrix.numbers)(matrix)
    assert relative_error(out, product_reference.product(given.astype("float32"), weights)) < 1e-5
    assert jnp.array_equal(jax.jit(narrow_product)(given[-1:], matrix), out[-1:])


@pytest.mark.parametrize("name", ["llama3.1-8b t1", "llama3.1-8b t101"])
def test_narrow_caches(name):
    """As the same numbers in a wide cache; of sums over int8 tiles the order may be another one."""
    spec = attention_specs.SPECS[name]
    arrays = attention_specs.inputs(spec, length=spec.S - 5)
    caches = [jax.jit(narrowed)(arrays[cache]) for cache in ("k_cache", "v_cache")]
    wide = [widened(cache, spec.dtype) for cache in caches]
    (q, _, _, length, *others) = arrays.values()
    given = q, *caches, length, *others
    out = compile_kernels(tree_attention, given, "tsjax_tree_attention")(*given)
    wanted = jax.jit(tree_attention)(q, *wide, length, *others)
    assert relative_error(out, wanted) < ATTENTION_ERROR[spec.dtype]
    for mode in SCORES_ERROR:
        score = jax.jit(functools.partial(cache_scores, mode=mode))
        found, wanted = score(q[:, 0], caches[0], length), score(q[:, 0], wide[0], length)
        assert relative_error(found, wanted) < SCORES_ERROR[mode]


@pytest.mark.parametrize("name", ["llama3.1-8b t8", "llama2-7b t64", "float32 t1"])
def test_ranks(name):
    """Slots of any order, by their ranks: each row sees those that it would see of a shorter text,
    and the first one none."""
    spec = attention_specs.SPECS[name]._replace(S=4096)
    q, k_cache, v_cache, _, *fresh = attention_specs.inputs(spec, length=spec.S).values()
    places = jax.random.permutation(jax.random.key(1), spec.S).astype(jnp.int32)
    seen = [spec.S * row // spec.T for row in range(spec.T)]
    ranks = Ranks(places[None], jnp.asarray([seen], jnp.int32))
    length = jnp.full((1,), spec.S, jnp.int32)
    given = q, k_cache[:, :, places], v_cache[:, :, places], length, *fresh, ranks

    def attend(*given, implementation=None):
        return tree_attention(*given[:-1], ranks=given[-1], implementation=implementation)

    out = compile_kernels(attend, given, "tsjax_tree_attention")(*given)
    assert jnp.array_equal(jax.jit(attend)(*given), out), "not the same bits twice"
    xla = jax.jit(functools.partial(attend, implementation="xla"))(*given)
    assert relative_error(out, xla) < 2 * ATTENTION_ERROR[spec.dtype]
    for row in {0, spec.T // 2, spec.T - 1}:
        expected = expected_attention(q, k_cache, v_cache, jnp.asarray([seen[row]]), *fresh)
        assert relative_error(out[:, row], expected[:, row]) < ATTENTION_ERROR[spec.dtype]


LAZILY = """
import sys, tsjax
model = tsjax.load(tsjax.EMBEDDED, dtype="float32")
lazy = tsjax.LazyPrefill(keep={2: 0.5, 4: 0.3}, revive=sys.argv[1])
prompt = [1 + 37 * i % 250 for i in range(1500)]
found = tsjax.generate(model, prompt, prefill=lazy, max_new_tokens=128)
print(found.tokens[0].tolist(), found.stats.prompt_computed)
"""


@pytest.mark.parametrize("revive", ["in_batches", "on_demand", "background"])
def test_a_lazy_generation_says_what_it_says_in_plain_xla(revive):
    """Processes of their own, as programs are kept by what the environment says when they start."""
    pytest.importorskip("tsjax")
    said = []
    for switched_off in ("", "all"):
        beside = dict(TSJAX_NO_TRITON=switched_off, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        command = [sys.executable, "-c", LAZILY, revive]
        done = subprocess.run(
            command, env=os.environ | beside, capture_output=True, text=True, check=True
        )
        said.append(done.stdout.splitlines()[-1])
    assert said[0] == said[1]


def test_decode_attention_is_tree_attention_for_one_row():
    spec = attention_specs.SPECS["llama3.1-8b t1"]
    q, k_cache, v_cache, length, k_new, v_new, mask = attention_specs.inputs(
        spec, length=spec.S - 5
    ).values()
    tree = jax.jit(tree_attention)(q, k_cache, v_cache, length, k_new, v_new, mask)
    one = jax.jit(decode_attention)(q[:, 0], k_cache, v_cache, length, k_new[:, 0], v_new[:, 0])
    assert jnp.array_equal(one, tree[:, 0])


@pytest.mark.parametrize("dtype", ATTENTION_ERROR)
@pytest.mark.parametrize("shape", [(1, 1, 4096), (1, 101, 4096), (2, 3, 1536), (1, 7, 80)])
def test_norms(shape, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    rows, update, weight = (
        jax.random.normal(key, size, kind)
        for key, size, kind in zip(
            keys, (shape, shape, shape[-1:]), (dtype, "float32", dtype), strict=True
        )
    )
    run = functools.partial(add_rms_norm, eps=1e-5)
    kernel = compile_kernels(run, (rows, update, weight), "tsjax_rms_norm")
    sums, normed = kernel(rows, update, weight)
    wanted = norm_reference.add_rms_norm(rows, update, weight, 1e-5)
    assert jnp.array_equal(sums, wanted[0])
    assert relative_error(normed, wanted[1]) < ATTENTION_ERROR[dtype]
    alone = compile_kernels(
        functools.partial(rms_norm, eps=1e-5), (sums, weight), "tsjax_rms_norm"
    )(sums, weight)
    assert jnp.array_equal(alone, normed)


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


@pytest.mark.parametrize("H", [12, 256])
def test_what_no_kernel_serves_takes_xla(H):
    spec = attention_specs.Spec(5, K=2, G=4, H=H, S=1000, dtype="float32")
    inputs = tuple(attention_specs.inputs(spec, length=777).values())
    compiled = jax.jit(tree_attention).lower(*inputs).compile()
    assert "tsjax_" not in compiled.as_text()
    assert relative_error(compiled(*inputs), expected_attention(*inputs)) < 1e-5

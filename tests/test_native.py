# SPDX-License-Identifier: Apache-2.0
"""The kernels in C++ for CPUs: their one order of summation, and how they get there.

Values are tested with those of the other implementations (test_tree_attention.py), products here.
The order of summation is held against itself: a row that runs alone, with all that it sees
committed, has the bits that it has among others.
"""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_model
from kernel_cases import define_both, make_inputs, place, random_tree, relative_error

from pallas_kernels import Ranks, narrowed, native, product, tree_attention
from pallas_kernels.product.reference import product as product_reference
from pallas_kernels.tree_attention import reference
from tsjax.base.model_config import CACHES
from tsjax.model.cache import init_cache, write_rows
from tsjax.model.passes import run_rows
from tsjax.model.transformer import final_norm, unembed

ROOT = pathlib.Path(__file__).parents[1]
HAS_COMPILER = native.status(try_now=True).state == "ready"
needs_kernels = pytest.mark.skipif(not HAS_COMPILER, reason=native.status().reason)
LARGEST_ERROR = {"float32": 3e-6, "bfloat16": 1e-2}


def of_kernels(test):
    """Marks a test of kernels alone."""
    return pytest.mark.kernels(needs_kernels(test))


run_native = jax.jit(
    functools.partial(tree_attention, implementation="native", with_log_totals=True)
)


# --- values ----------------------------------------------------------------------------------


@of_kernels
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
    q, *caches, length, k_new, v_new, _ = inputs
    blind = run_native(*inputs[:-1], np.zeros((B, T, T), bool), ranks=Ranks(slots, rows))
    for t in (0, 1, T // 2, T - 1):
        mine, itself = slice(t, t + 1), np.zeros((B, 1, 1), bool)
        fresh, ranks = (x[:, mine] for x in (k_new, v_new)), Ranks(slots, rows[:, mine])
        alone = run_native(q[:, mine], *caches, length, *fresh, itself, ranks=ranks)
        if (slots < rows[:, mine]).any(axis=1).all():  # else it sees nothing, which is unspecified
            for one, among in zip(alone, blind, strict=True):
                np.testing.assert_array_equal(one, among[:, mine])


WEIGHTS = {  # rows, weights
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("float32", "int8"),
    "bfloat16-int8": ("bfloat16", "int8"),
}


def make_product(rng, kind, lead, outputs, inputs):
    rows_type, weights_type = WEIGHTS[kind]
    rows = jnp.asarray(rng.standard_normal((*lead, inputs)), rows_type)
    scales = None
    if weights_type == "int8":
        weights = jnp.asarray(rng.integers(-127, 128, (outputs, inputs)), "int8")
        scales = jnp.asarray(rng.uniform(0.1, 1, outputs), "float32")
    else:
        weights = jnp.asarray(rng.standard_normal((outputs, inputs)), weights_type)
    matrix = np.asarray(weights, float)
    matrix = matrix if scales is None else matrix * np.asarray(scales, float)[:, None]
    return (rows, weights, scales), np.asarray(rows, float) @ matrix.T


SHAPES = [((), 1, 1), ((1, 2), 30, 37), ((3, 50), 64, 99)]


@needs_kernels
@pytest.mark.parametrize(
    "lead, outputs, inputs",
    [((2, 3), 131, 288), *(pytest.param(*shape, marks=pytest.mark.kernels) for shape in SHAPES)],
)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_products(lead, outputs, inputs, kind, rng):
    (rows, weights, scales), expected = make_product(rng, kind, lead, outputs, inputs)
    for name in ("native", "xla"):
        out = product(rows, weights, scales=scales, implementation=name)
        assert out.dtype == jnp.float32 and relative_error(out, expected) < 1e-6
    assert relative_error(product_reference(rows, weights, scales), expected) < 1e-6


@of_kernels
@pytest.mark.parametrize("kind", WEIGHTS)
@hypothesis.settings(max_examples=15)
@hypothesis.given(
    T=st.integers(2, 30),
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 90),
    seed=st.integers(0),
)
def test_a_row_of_a_product_has_the_same_bits_alone(kind, T, inputs, outputs, seed):
    rng = np.random.default_rng(seed)
    (rows, weights, scales), _ = make_product(rng, kind, (1, T), outputs, inputs)
    together = np.asarray(product(rows, weights, scales=scales, implementation="native"))
    for t in {0, T // 2, T - 1}:
        alone = product(rows[:, t], weights, scales=scales, implementation="native")
        np.testing.assert_array_equal(alone, together[:, t])


@of_kernels
@pytest.mark.parametrize("split", ["outputs", "inputs"])
def test_products_on_a_mesh(split, rng):
    """Weights that are split by outputs need no other device; by inputs, sums are added up."""
    (rows, weights, _), expected = make_product(rng, "float32", (2, 3), 32, 64)
    if split == "outputs":
        placed = place(rows, "data"), place(weights, "model")
    else:
        placed = place(rows, "data", None, "model"), place(weights, None, "model")
    compiled = jax.jit(functools.partial(product, implementation="native")).lower(*placed).compile()
    text = compiled.as_text()
    assert "tsjax_product_" in text and "all-gather" not in text
    assert ("all-reduce" in text) == (split == "inputs")
    assert relative_error(compiled(*placed), expected) < 1e-6


@of_kernels
def test_products_under_vmap_and_grad(rng):
    (rows, weights, _), expected = make_product(rng, "float32", (4, 3), 8, 16)
    kernel = functools.partial(product, implementation="native")
    np.testing.assert_array_equal(jax.vmap(kernel, (0, None))(rows, weights), kernel(rows, weights))
    several = jnp.stack([weights, 2 * weights])
    both = jax.vmap(kernel, (None, 0))(rows, several)
    assert relative_error(both, np.stack([expected, 2 * expected])) < 1e-6
    found = jax.grad(lambda weights: jnp.sum(product(rows, weights) ** 2))(weights)
    wanted = 2 * np.einsum("tio,tid->od", expected, np.asarray(rows, float))
    assert relative_error(found, wanted) < 1e-5


def test_products_that_do_not_fit_are_refused():
    rows, narrow = np.ones((2, 3), "f"), np.ones((4, 3), "b")
    for given, weights, scales, message in (
        (rows, np.ones((4, 5), "f"), None, r"rows \(2, 3\), weights \(4, 5\)"),
        (rows.astype("i"), np.ones((4, 3), "f"), None, "rows of type int32 is not valid"),
        (rows, narrow, None, "type int8 is not valid: fl"),
        (rows, np.ones((4, 3), "f"), np.ones(4, "f"), "with scales: int8"),
        (rows, narrow, np.ones(3, "f"), r"scales of shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            product(given, weights, scales=scales)


def test_what_is_not_served_goes_to_xla(rng):
    for wrong, message in ((dict(H=12), "head_dim 12: a multiple"), (dict(dtype="float16"), "16")):
        inputs = make_inputs(rng, **wrong)
        with pytest.raises(NotImplementedError, match=f"native: .*{message}"):
            tree_attention(*inputs, implementation="native")
        assert "tsjax_" not in jax.jit(tree_attention).lower(*inputs).as_text()


@of_kernels
def test_it_is_chosen_for_cpus_and_for_nothing_else(rng):
    traced = jax.jit(tree_attention).trace(*make_inputs(rng))
    assert "tsjax_tree_attention_" in traced.lower().as_text()
    assert "tsjax_tree_attention_" not in traced.lower(lowering_platforms=("rocm",)).as_text()


@of_kernels
def test_a_derivative_is_that_of_the_definition_also_inside_x64(rng):
    with jax.enable_x64(True):
        q, *others = make_inputs(rng, T=4)
        others[2] = jnp.asarray(others[2], jnp.int64)
        assert tree_attention(q, *others, implementation="native").dtype == jnp.float32

        def total(q, attention):
            return jnp.sum(jnp.sin(attention(q, *others)))

        def defined(*inputs):
            return reference.tree_attention(*inputs)[0]

        found, expected = (jax.grad(total)(q, one) for one in (tree_attention, defined))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert np.abs(expected).max() > 1e-2


@of_kernels
def test_on_a_mesh_each_device_has_its_rows_and_heads(rng):
    """The cache stays where it is: no device sees the shard of another."""
    inputs = make_inputs(rng, B=2, K=2, G=2, T=3, length=(40, 9))
    parts = [("data", None, "model"), *[("data", "model")] * 2, ("data",)]
    parts += [("data", None, "model")] * 2 + [("data",)]
    placed = [place(array, *part) for array, part in zip(inputs, parts, strict=True)]
    compiled = run_native.lower(*placed).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and "tsjax_tree_attention_" in text
    for found, expected in zip(compiled(*placed), run_native(*inputs), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.sharding.spec[0] == "data"


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


@of_kernels
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
@pytest.mark.parametrize(
    "length, T",
    [(60, 9), *(pytest.param(*one, marks=pytest.mark.kernels) for one in ((5, 3), (1000, 40)))],
)
@pytest.mark.parametrize("held", CACHES)
def test_a_row_of_a_whole_pass_has_the_bits_of_plain_decoding(dtype, length, T, held, rng):
    """Logits, keys and values: so drafts cannot change a token, in bfloat16 either."""
    model = tiny_model(dtype=dtype, num_layers=2, cache=held)
    cfg, weights = model.cfg, model.params.model
    cache = init_cache(cfg, 1, length + T)

    def normal(buffer):
        rows = jnp.asarray(rng.standard_normal(buffer.shape), dtype)
        return rows if held == "same" else narrowed(rows)

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


@of_kernels
@pytest.mark.wide
def test_kernels_are_compiled_once_and_a_damaged_library_is_made_anew(tmp_path, quick_compiler):
    compiler, calls = quick_compiler
    folder = tmp_path / "cache"
    together = [start(folder, CXX=str(compiler)) for _ in range(3)]  # at the same time
    for facts, said in map(end, together):
        assert facts["state"] == "ready" and facts["compiler"] == str(compiler) and len(said) <= 1
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
    # Where nothing can be kept it is compiled for one process.
    for folder, reason in ((compiler / "cache", "not writable"), ("", "TSJAX_CACHE is")):
        facts, _ = end(start(folder, CXX=str(compiler)))
        assert facts["state"] == "ready" and reason in facts["reason"]
        assert not pathlib.Path(facts["path"]).exists()


@pytest.mark.kernels
@pytest.mark.wide
@pytest.mark.parametrize(
    ("setting", "state", "says"),
    [
        (dict(CXX="no-such-compiler"), "failed", r"no C\+\+ compiler .*tried no-such-compiler"),
        (dict(CXX="{}/c++"), "failed", "fatal error: no such file"),
        (dict(TSJAX_NATIVE="0"), "off", ""),
    ],
)
def test_without_kernels_plain_xla_runs_and_says_why(setting, state, says, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cc:1: fatal error: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    facts, said = end(start(tmp_path, **{k: v.format(tmp_path) for k, v in setting.items()}))
    assert facts["state"] == state
    assert re.search(says, "\n".join(said)) if says else not said

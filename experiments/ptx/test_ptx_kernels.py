# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels as ptxas gets them, executed in NumPy (experiments/ptx), and damaged on purpose.

`pytest -m aot`, with JAX_PLATFORMS=cpu and the CUDA plugin installed (see tools/aot.py). Each run
fails if an access leaves its array or is misaligned, if something is read that nothing wrote, or if
two warps race for shared memory. Of the caches only what is committed may be read.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    check_near,
    check_scores,
    define_both,
    make_inputs,
    make_ranks,
    make_rest,
    make_score_inputs,
    with_wide_caches,
)
from test_narrow_product import check_sums, make_matrix

from experiments.ptx import Array, compiled, execute
from experiments.ptx.memory import Fault
from pallas_kernels import triton as backend
from pallas_kernels.cache_scores import triton as scores_triton
from pallas_kernels.narrow_product import triton as narrow_triton
from pallas_kernels.narrow_product.split import Layout
from pallas_kernels.narrow_rows import narrowed, numbers_and_exponents, widened
from pallas_kernels.rms_norm import reference as norm_reference
from pallas_kernels.rms_norm import triton as norm_triton
from pallas_kernels.rotary import reference as rotary_reference
from pallas_kernels.rotary import triton as rotary_triton
from pallas_kernels.tree_attention import triton as attention_triton

pytestmark = pytest.mark.aot

KERNELS = (attention_triton, scores_triton, norm_triton, rotary_triton, narrow_triton)
ERROR = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}  # over the largest entry


class Call(NamedTuple):
    """One start of a kernel."""

    name: str
    compiled: compiled.Compiled
    inputs: list[Array]
    outputs: list
    results: list[Array]

    def again(self, text: str) -> list[Array]:
        """With another text of the module."""
        return execute(
            text, self.compiled.grid, self.compiled.shared_bytes, self.inputs, self.outputs
        )


class Simulation:
    """Stands in for the GPU: `launch` compiles a kernel and executes its PTX."""

    def __init__(self):
        self.calls: list[Call] = []
        self.partly: dict[int, tuple[jax.Array, Array]] = {}  # arrays with gaps, by their id

    def with_gaps(self, values: jax.Array, written) -> jax.Array:
        """An array of which only some entries may be read."""
        values = jnp.array(values)
        found = Array(np.asarray(values), np.broadcast_to(written, values.shape))
        self.partly[id(values)] = values, found
        return values

    def launch(self, kernel, *arrays, grid, outputs, interpret, **options):
        call = functools.partial(
            backend.launch, kernel, grid=grid, outputs=outputs, interpret=False, **options
        )
        made = compiled.compile_kernel(call, arrays)
        inputs = [
            self.partly[id(one)][1] if id(one) in self.partly else Array(np.asarray(one))
            for one in arrays
        ]
        results = execute(made.text, made.grid, made.shared_bytes, inputs, outputs)
        self.calls.append(Call(options["name"], made, inputs, outputs, results))
        return [self.with_gaps(jnp.asarray(one.values), one.written) for one in results]


@contextlib.contextmanager
def simulated():
    simulation = Simulation()
    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        for module in KERNELS:
            patch.setattr(module, "launch", simulation.launch)
        yield simulation


def committed(simulation, cache, length):
    """The cache [B, K, S, H], or exponents [B, K, S], of which slots beyond the lengths may not be
    read."""
    written = np.arange(cache.shape[2]) < np.asarray(length)[:, None]
    return simulation.with_gaps(
        cache, written.reshape(-1, 1, cache.shape[2], *[1] * (cache.ndim - 3))
    )


# --- the kernels -----------------------------------------------------------------------------

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
ATTENTION = {
    "one row": (dict(B=2, T=1, K=2, G=6, H=64, S=1000, length=[1000, 333]), None),
    "one row, one head": (dict(T=1, K=3, G=1, H=128, S=130, length=[97]), None),
    "a tree": (dict(B=2, T=21, K=1, G=7, H=80, S=200, length=[200, 66]), None),
    "one part": (dict(B=2, T=20, K=1, G=2, H=64, S=150, length=[150, 1]), (64, 32, 1, 4, 2)),
    "large tiles": (dict(T=40, K=1, G=4, H=128, S=200, length=[190]), (128, 64, 2, 8, 2)),
    "one stage": (dict(T=42, K=1, G=5, H=72, S=120, length=[95]), (128, 32, 3, 4, 1)),
    "nothing committed": (dict(T=20, K=2, G=1, H=64, S=64, length=[0]), (16, 16, 3, 4, 2)),
    "float16": (dict(T=5, K=1, G=4, H=128, S=100, length=[90], dtype=F16), None),
    "float32, 1 part": (dict(T=18, K=1, H=80, S=90, length=[85], dtype=F32), (16, 16, 1, 4, 2)),
}  # fmt: skip
NARROW_ATTENTION = {
    "one row": (dict(B=2, T=1, K=2, G=6, H=64, S=200, length=[200, 77]), None),
    "a tree": (dict(B=2, T=5, K=1, G=7, H=80, S=200, length=[200, 66]), None),
    "large tiles": (dict(T=40, K=1, G=4, H=128, S=130, length=[121]), (128, 32, 2, 8, 2)),
    "float16": (dict(T=5, K=1, G=4, H=128, S=100, length=[90], dtype=F16), None),
    "float32": (dict(T=5, K=1, G=4, H=80, S=90, length=[85], dtype=F32), None),
}
ONE_PART = ("one part", "float32, 1 part")


def run_attention(rng, shape, blocks=None, with_rest=False, ranked=False, narrow=False):
    """Ranked, some rows see no slot, as those to spare of a pass."""
    inputs = q, *caches, length, k_new, v_new, mask = make_inputs(rng, **{"dtype": BF16, **shape})
    rest = make_rest(rng, inputs) if with_rest else ()
    ranks, visible = make_ranks(rng, inputs) if ranked else ((), None)
    if narrow:
        caches = [narrowed(cache) for cache in caches]
    inputs = q, *caches, length, k_new, v_new, mask
    found, calls = attention_of(inputs, rest, blocks, ranks)
    expected = define_both(*with_wide_caches(inputs, F32), rest=rest or None, visible=visible)
    check_near(found, expected, (ERROR[q.dtype.name], ERROR["float32"]))
    assert all(one.written.all() for one in calls[-1].results)
    return calls


def attention_of(inputs, rest=(), blocks=None, ranks=()):
    """The results, and what was started; caches may be narrow. Ranks beyond the lengths may not be
    read either."""
    q, *caches, length, k_new, v_new, mask = inputs
    (k_cache, k_exponents), (v_cache, v_exponents) = map(numbers_and_exponents, caches)
    with simulated() as simulation:
        k_cache, v_cache, *exponents = (
            committed(simulation, one, length)
            for one in (k_cache, v_cache, *k_exponents, *v_exponents)
        )
        if ranks:
            slots = np.arange(ranks[0].shape[1]) < np.asarray(length)[:, None]
            ranks = simulation.with_gaps(ranks[0], slots), ranks[1]
        found = attention_triton._attention(
            q, k_cache, v_cache, length, k_new, v_new, mask.astype(np.int8), *exponents,
            *ranks, *rest,
            blocks=blocks and attention_triton.Blocks(*blocks), interpret=False,
        )  # fmt: skip
    return found, simulation.calls


@pytest.mark.parametrize("with_rest", [False, True], ids=["alone", "with a rest"])
@pytest.mark.parametrize("case", ATTENTION)
def test_tree_attention(case, with_rest, rng):
    calls = run_attention(rng, *ATTENTION[case], with_rest=with_rest)
    names = ["tsjax_tree_attention", "tsjax_tree_attention_merge"]
    is_alone = case in ONE_PART and not with_rest
    assert [call.name for call in calls] == names[: 1 if is_alone else 2]


@pytest.mark.parametrize("case", NARROW_ATTENTION)
def test_tree_attention_of_a_narrow_cache(case, rng):
    """Here sums may have another order than those of a wide cache have."""
    run_attention(rng, *NARROW_ATTENTION[case], with_rest=True, narrow=True)


RANKED = {
    case: ATTENTION[case] for case in ("one row", "one part", "large tiles", "float32, 1 part")
}
RANKED |= {f"{case}, narrow": NARROW_ATTENTION[case] for case in ("a tree", "float32")}


@pytest.mark.parametrize("case", RANKED)
def test_tree_attention_with_ranks(case, rng):
    has_rest, narrow = case not in ONE_PART, case.endswith("narrow")
    run_attention(rng, *RANKED[case], with_rest=has_rest, ranked=True, narrow=narrow)


SCORES = {
    "groups": (dict(K=1, G=7, H=80, S=200, length=(200, 100)), None),
    "two parts": (dict(K=2, G=4, H=128, S=700, length=(655,)), (64, 2, 4, 2)),
    "small blocks": (dict(K=1, G=4, H=64, S=90, length=(90, 1)), (16, 3, 4, 3)),
    "float16": (dict(K=2, G=2, H=64, S=100, length=(100, 50), dtype=F16), None),
    "float32": (dict(K=2, G=4, H=128, S=100, length=(100, 51), dtype=F32), None),
}


def run_scores(rng, shape, blocks, mode):
    inputs = make_score_inputs(rng, **{"dtype": BF16, **shape})
    found, calls = scores_of(inputs, blocks, mode)
    check_scores(found, inputs, mode)
    return calls


def scores_of(inputs, blocks, mode):
    """The result, and what was started; the cache may be narrow."""
    q, cache, length = inputs
    kernel = dict(dot=scores_triton._dot_scores, softmax=scores_triton._softmax_scores)[mode]
    cache, exponents = numbers_and_exponents(cache)
    with simulated() as simulation:
        blocks = blocks and scores_triton.Blocks(*blocks)
        cache, *exponents = (committed(simulation, one, length) for one in (cache, *exponents))
        found = kernel(q, cache, length, *exponents, blocks=blocks, interpret=False)
    if mode == "softmax":
        found = jnp.sum(found, axis=1) / q.shape[1]
    return found, simulation.calls


@pytest.mark.parametrize("mode", ["dot", "softmax"])
@pytest.mark.parametrize("case", SCORES)
def test_cache_scores(case, mode, rng):
    calls = run_scores(rng, *SCORES[case], mode)
    assert len(calls) == (1 if mode == "dot" else 2)
    assert all(one.written.all() for call in calls for one in call.results)


@pytest.mark.parametrize("mode", ["dot", "softmax"])
@pytest.mark.parametrize("case", ["groups", "two parts", "float16", "float32"])
def test_cache_scores_of_a_narrow_cache(case, mode, rng):
    shape, blocks = SCORES[case]
    q, k, length = make_score_inputs(rng, **{"dtype": BF16, **shape})
    found, calls = scores_of((q, narrowed(k), length), blocks, mode)
    assert all(one.written.all() for call in calls for one in call.results)
    check_scores(found, (q, widened(narrowed(k), q.dtype), length), mode)


def run_norm(rng, width, dtype, adds):
    rows, update = (jnp.asarray(rng.standard_normal((3, width)), t) for t in (dtype, F32))
    weight = jnp.asarray(rng.standard_normal(width), dtype)
    arrays = (rows, update, weight) if adds else (rows, weight)
    with simulated() as simulation:
        found = norm_triton._norms(*arrays, eps=1e-5, interpret=False)
    define = norm_reference.add_rms_norm if adds else norm_reference.rms_norm
    check_near(*map(jax.tree.leaves, (found, define(*arrays, 1e-5))), ERROR[rows.dtype.name])
    return simulation.calls


@pytest.mark.parametrize("adds", [False, True], ids=["alone", "with a sum"])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(200, BF16), (1099, BF16), (4096, BF16), (96, F32), (1536, F32), (128, F16)],
)
def test_rms_norm(width, dtype, adds, rng):
    (call,) = run_norm(rng, width, dtype, adds)
    assert len(call.results) == 1 + adds and all(one.written.all() for one in call.results)


NARROW = {  # format, outputs, inputs, rows
    "Q8_0, ragged": ("Q8_0", 90, 300, 3),
    "Q4_1": ("Q4_1", 64, 512, 1),
    "Q4_1, many rows": ("Q4_1", 64, 512, 37),
    "Q4_K": ("Q4_K", 30, 512, 5),
    "Q5_1": ("Q5_1", 64, 256, 2),
    "Q6_K": ("Q6_K", 40, 256, 17),
}


def run_narrow(matrix, rows, parts=2):
    layout = Layout.of(matrix)
    blocks = narrow_triton.default_blocks(narrow_triton.device.Gpu(), layout, len(rows))
    settings = dict(layout=layout, chip=None, interpret=False)
    settings["blocks"] = blocks._replace(parts=parts)
    with simulated() as simulation:
        found = narrow_triton._narrow_product(rows, *layout.arrays_of(matrix), **settings)
    return found[:, : matrix.outputs[0]], simulation.calls


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("case", NARROW)
def test_narrow_product(case, dtype, rng):
    """And a row has the bits that it has alone."""
    name, outputs, inputs, count = NARROW[case]
    matrix, weights, sizes = make_matrix(rng, name, outputs, inputs)
    rows = jnp.asarray(rng.standard_normal((count, inputs)), dtype)
    found, (call,) = run_narrow(matrix, rows)
    assert call.results[0].written.all()
    check_sums(found, rows, weights, sizes)
    alone, _ = run_narrow(matrix, rows[-1:])
    np.testing.assert_array_equal(found[-1:], alone)


def run_rotary(rng, head_dim, dtype, fresh_dtype):
    fresh = jnp.asarray(rng.standard_normal((2, 3, 2, 5, head_dim)), fresh_dtype)
    cos, sin = (jnp.asarray(rng.uniform(-1, 1, (2, 3, head_dim // 2)), F32) for _ in range(2))
    with simulated() as simulation:
        found = rotary_triton._heads(fresh, cos, sin, dtype=jnp.dtype(dtype), interpret=False)
    expected = rotary_reference.rotary_heads(fresh, cos, sin, dtype)
    check_near(found, expected, ERROR[jnp.dtype(dtype).name])
    return simulation.calls


@pytest.mark.parametrize(
    ("head_dim", "dtype", "fresh_dtype"),
    [(64, BF16, F32), (80, BF16, F32), (128, BF16, BF16), (128, F32, F32)],
)
def test_rotary_heads(head_dim, dtype, fresh_dtype, rng):
    (call,) = run_rotary(rng, head_dim, dtype, fresh_dtype)
    assert all(one.written.all() for one in call.results)


# --- damage that must be found ---------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> dict[str, Call]:
    """One start of each kernel, small, with loops that run several times."""

    def rng():
        return np.random.default_rng(0)

    tree = dict(T=20, K=1, G=1, H=64, S=140, length=[115])
    exact = dict(T=18, K=1, G=1, H=64, S=60, length=[55], dtype=F32)
    cache = dict(K=1, G=4, H=64, S=330, length=(300,)), (64, 2, 4, 2)
    calls = {}
    calls["attention"], calls["merge"] = run_attention(rng(), tree, (32, 16, 2, 4, 3))
    calls["attention, float32"], _ = run_attention(rng(), exact, (16, 16, 2, 4, 2))
    (calls["scores"],) = run_scores(rng(), *cache, "dot")
    calls["totals"], calls["softmax"] = run_scores(rng(), *cache, "softmax")
    (calls["norm"],) = run_norm(rng(), 200, BF16, adds=True)
    (calls["rotary"],) = run_rotary(rng(), 80, BF16, F32)
    return calls


# What to look for, and what to write in its place.
DAMAGES = {
    "barrier": (r"bar\.sync\s+0;", lambda found: ""),
    "wait": (r"(cp\.async\.wait_group\s+)(\d+);", lambda found: f"{found[1]}{int(found[2]) + 1};"),
    "guard": (r"@(%p\d+ (?:ld|st)\.global)", lambda found: f"@!{found[1]}"),
    "size": (r"(selp\.b32\s+%r\d+, )(\d+), 0,", lambda found: f"{found[1]}0, {found[2]},"),
    "bound": (
        r"(setp\.lt\.[su]32\s+%p\d+, %r\d+, )(\d+);",
        lambda found: f"{found[1]}{int(found[2]) + 1};",
    ),
    "offset": (r"(\[ %rd\d+ \+ )0( \])", lambda found: f"{found[1]}16{found[2]}"),
}
# Of each kernel the least share of damages that must be found. The others do no harm: the first
# barrier before anything was written, copies for a turn of a loop that never comes (their size is
# 0), stores that other warps repeat with the same bits, bounds of blocks that are full.
FOUND = {
    "barrier": {
        "attention": 0.8, "attention, float32": 0.7, "merge": 0.8, "scores": 1, "totals": 0.8,
        "softmax": 1, "norm": 1,
    },
    "wait": {"attention": 0.6, "attention, float32": 0.8, "totals": 0.5},
    "guard": {
        "attention": 0.7, "merge": 0.7, "scores": 1, "totals": 1, "softmax": 1, "norm": 1,
        "rotary": 1,
    },
    "size": {"attention": 0.7, "totals": 1},
    "bound": {
        "attention": 0.4, "scores": 0.5, "totals": 0.6, "softmax": 0.7, "norm": 1, "rotary": 1,
    },
    "offset": {
        "attention": 0.7, "merge": 0.7, "scores": 1, "totals": 1, "softmax": 0.7, "norm": 1,
        "rotary": 1,
    },
}  # fmt: skip


def damaged(text: str, damage: str) -> Iterator[str]:
    """The module with one place changed, each in turn; of many other than barriers, some."""
    pattern, replacement = DAMAGES[damage]
    places = list(re.finditer(pattern, text))
    step = 1 if damage == "barrier" else 1 + len(places) // 16
    for place in places[::step]:
        yield text[: place.start()] + replacement(place) + text[place.end() :]


def outcome(call: Call, text: str) -> str:
    try:
        results = call.again(text)
    except Fault as fault:
        return type(fault).__name__
    same = all(
        np.array_equal(new.written, old.written) and new.values.tobytes() == old.values.tobytes()
        for new, old in zip(results, call.results, strict=True)
    )
    return "nothing" if same else "other numbers"


@pytest.mark.parametrize(
    ("damage", "kernel"), [(damage, kernel) for damage, by in FOUND.items() for kernel in by]
)
def test_damage_is_found(damage, kernel, small):
    call = small[kernel]
    found = [outcome(call, text) for text in damaged(call.compiled.text, damage)]
    assert found and "Endless" not in found
    assert sum(one != "nothing" for one in found) >= FOUND[damage][kernel] * len(found), found
    if damage in ("barrier", "wait"):
        assert set(found) <= {"Race", "nothing"}, found


def test_what_the_damages_leave_alone(small):
    """The same text gives the same bits; and a kernel without barriers has none to lose."""
    assert {outcome(call, call.compiled.text) for call in small.values()} == {"nothing"}
    assert not list(damaged(small["rotary"].compiled.text, "barrier"))

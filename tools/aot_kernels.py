# SPDX-License-Identifier: Apache-2.0
"""Single kernels, lowered for a GPU that is not there."""

from __future__ import annotations

import functools

# Cases that are compiled for narrow caches too.
OF_CACHES = (
    "tree_attention llama3.1-8b t1",
    "tree_attention llama3.1-8b t16",
    "tree_attention llama3.1-8b t512",
    "tree_attention llama2-7b t64",
    "tree_attention llama3.2-1b t64",
    "tree_attention head_dim 80",
    "tree_attention float32 t1",
    "tree_attention float32 t64",
    "cache_scores dot llama3.1-8b",
    "cache_scores softmax llama3.1-8b",
    "cache_scores dot float32",
    "cache_scores softmax float32",
)
NARROW_CACHE = ", narrow cache"
# And those that are compiled with ranks, of a wide cache and of a narrow one.
OF_RANKS = (
    "tree_attention llama3.1-8b t1",
    "tree_attention llama3.1-8b t64",
    "tree_attention llama3.1-8b t128",
    "tree_attention llama2-7b t64",
    "tree_attention llama3.2-1b t64",
    "tree_attention float32 t64",
)
RANKS = ", ranks"
# Formats of weights, and rows of their products.
PRODUCTS = {"Q8_0": (1, 64), "Q4_1": (1,), "Q4_K": (64,), "Q5_0": (1,), "Q6_K": (8,)}
OUTPUTS, INPUTS = 6144, 4096  # queries, keys and values of Llama-3.1-8B


def kernel_cases() -> dict:
    """Case name -> (function of the public API, shapes and types of its arguments)."""
    from pallas_kernels.cache_scores import specs as scores
    from pallas_kernels.cache_scores.api import cache_scores
    from pallas_kernels.narrow_product.matrix import FORMATS, shapes_of
    from pallas_kernels.tree_attention import specs as attention
    from pallas_kernels.tree_attention.api import tree_attention

    cases = {}
    for name, spec in attention.SPECS.items():
        run = functools.partial(tree_attention, implementation="triton")
        cases[f"tree_attention {name}"] = run, spec.shapes()
    for name, spec in scores.SPECS.items():
        for mode in ("dot", "softmax"):
            run = functools.partial(cache_scores, mode=mode, implementation="triton")
            cases[f"cache_scores {mode} {name}"] = run, spec.shapes()
    for case in OF_RANKS:
        cases[case + RANKS] = with_ranks(*cases[case])
    for case in (*OF_CACHES, *(case + RANKS for case in OF_RANKS)):
        run, shapes = cases[case]
        cases[case + NARROW_CACHE] = with_narrow_cache(run, shapes)
    for name, counts in PRODUCTS.items():
        run = functools.partial(narrow_product_of, format=FORMATS[name])
        arrays = shapes_of(FORMATS[name], OUTPUTS, INPUTS)
        for rows in counts:
            shapes = {"rows": ((1, rows, INPUTS), "bfloat16"), **arrays}
            cases[f"narrow_product {name}, rows={rows}"] = run, shapes
    return cases


def with_narrow_cache(run, shapes: dict) -> tuple:
    """A case with its cache in narrow rows, the exponents of which are further arguments."""
    from pallas_kernels.narrow_rows import NarrowRows

    caches = [name for name in shapes if name.endswith("_cache")]
    numbers = {name: (shapes[name][0], "int8") for name in caches}
    exponents = {f"{name}_exponents": ((*shapes[name][0][:-1], 1), "int8") for name in caches}

    def narrow(**arrays):
        rows = {name: NarrowRows(arrays[name], arrays.pop(f"{name}_exponents")) for name in caches}
        return run(**{**arrays, **rows})

    return narrow, {**shapes, **numbers, **exponents}


def with_ranks(run, shapes: dict) -> tuple:
    """A case of attention where rows see slots of lower ranks alone."""
    from pallas_kernels import Ranks

    (B, T, _, _), S = shapes["q"][0], shapes["k_cache"][0][2]

    def ranked(slots, rows, **arrays):
        return run(**arrays, ranks=Ranks(slots, rows))

    return ranked, {**shapes, "slots": ((B, S), "int32"), "rows": ((B, T), "int32")}


def narrow_product_of(rows, values, scales, steps=None, least=None, least_steps=None, *, format):
    from pallas_kernels import NarrowMatrix, narrow_product

    sizes = (OUTPUTS,), (INPUTS,)
    matrix = NarrowMatrix(values, scales, steps, least, least_steps, format, *sizes)
    return narrow_product(rows, matrix, implementation="triton")


def lower_kernel(case: str, target: str):
    import jax

    from tools import gpu_targets

    run, shapes = kernel_cases()[case]
    aval = gpu_targets.shapes_on(target)
    arrays = {name: aval(jax.ShapeDtypeStruct(*one)) for name, one in shapes.items()}
    return gpu_targets.lowered(target, jax.jit(run), **arrays)

# SPDX-License-Identifier: Apache-2.0
"""Which modules have the shapes in their signatures checked in the tests, and how.

`conftest.py` has jaxtyping wrap the functions of these modules when they are imported.
"""

MODULES = [
    "pallas_kernels.best_slots.reference",
    "pallas_kernels.cache_scores.reference",
    "pallas_kernels.narrow_product.reference",
    "pallas_kernels.narrow_rows",
    "pallas_kernels.product.reference",
    "pallas_kernels.rms_norm.reference",
    "pallas_kernels.rotary.reference",
    "pallas_kernels.tree_attention.reference",
    "tsjax.decoding.noise",
    "tsjax.decoding.processors",
    "tsjax.decoding.sampling",
    "tsjax.decoding.state",
    "tsjax.decoding.tree",
    "tsjax.methods.history",
    "tsjax.model.cache",
    "tsjax.methods.partial_cache",
    "tsjax.model.heads",
    "tsjax.model.int8",
    "tsjax.model.layers",
    "tsjax.model.passes",
    "tsjax.model.transformer",
]


def check(function):
    """beartype for all but constructors: a pytree may hold anything while jax rebuilds it."""
    if function.__name__ == "__init__":
        return function

    import beartype  # absent on a GPU machine

    return beartype.beartype(function)

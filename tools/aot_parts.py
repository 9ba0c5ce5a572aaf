# SPDX-License-Identifier: Apache-2.0
"""Parts of a step, lowered for a GPU that is not there: a pass of the model, a chain of drafts."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Pass(NamedTuple):
    """A pass of some rows of a model, and their logits, over a cache of `capacity` slots."""

    model: str
    rows: int
    capacity: int


# What `tsjax.methods.devices` counts: of draft passes and of verifications.
PASSES = {
    f"pass {model} {rows} of {capacity}": Pass(model, rows, capacity)
    for model in ("llama3.1-8b", "qwen2.5-1.5b", "llama2-7b-yarn-128k")
    for rows, capacity in ((1, 4096), (64, 106_496))
}


# A chain of drafts of a one-layer drafter, as the table of costs has it.
CHAINS = {f"chain {model}": model for model in ("llama3.1-8b", "qwen2.5-1.5b")}


def lower_chain(model: str, target: str):
    """A chain of drafts, from shapes alone."""
    import jax
    import jax.numpy as jnp

    import tsjax
    from tools import gpu_targets
    from tsjax.decoding.programs import compiler_options
    from tsjax.host.measuring import CHAIN, after_a_chain, before_a_chain
    from tsjax.model.params import declare_params, is_spec
    from tsjax.training.drafter_steps import shape_for

    cfg = tsjax.model_preset(model)
    cfg = dataclasses.replace(cfg, drafter=shape_for(cfg))
    aval = gpu_targets.shapes_on(target)
    params = jax.tree.map(aval, declare_params(cfg), is_leaf=is_spec)
    params = params.replace(model=params.model.replace(layers=()))
    memory, state = jax.tree.map(aval, jax.eval_shape(lambda: before_a_chain(cfg, 1, None)))
    program = jax.jit(
        after_a_chain, static_argnames="cfg", donate_argnames="memory",
        compiler_options=compiler_options("gpu", cfg.dtype),
    )  # fmt: skip
    noise = aval(jax.ShapeDtypeStruct((1, CHAIN, cfg.vocab_size), jnp.float32))
    return gpu_targets.lowered(target, program, memory, params, state, noise, cfg=cfg)


def lower_pass(one: Pass, target: str):
    """A pass, from shapes alone."""
    import jax
    import jax.numpy as jnp

    import tsjax
    from tools import gpu_targets
    from tsjax.decoding.programs import compiler_options
    from tsjax.model.cache import init_cache
    from tsjax.model.params import declare_params, is_spec
    from tsjax.model.passes import run_rows
    from tsjax.model.transformer import final_norm, unembed

    cfg, rows, aval = tsjax.model_preset(one.model), (1, one.rows), gpu_targets.shapes_on(target)
    weights = jax.tree.map(aval, declare_params(cfg).model, is_leaf=is_spec)
    cache = jax.tree.map(aval, jax.eval_shape(lambda: init_cache(cfg, 1, one.capacity)))

    def run(weights, cache, tokens, positions, mask):
        found = run_rows(weights, cache, tokens, positions, mask, cfg=cfg)
        logits = unembed(weights, final_norm(weights, found.hidden, cfg=cfg), cfg=cfg)
        return jnp.argmax(logits, axis=-1), found.k, found.v

    given = (rows, jnp.int32), (rows, jnp.int32), ((one.rows,) * 2, jnp.bool)
    arguments = (aval(jax.ShapeDtypeStruct(*shape)) for shape in given)
    program = jax.jit(run, compiler_options=compiler_options("gpu", cfg.dtype))
    return gpu_targets.lowered(target, program, weights, cache, *arguments)

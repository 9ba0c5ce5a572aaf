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
    sharding = jax.sharding.SingleDeviceSharding(gpu_targets.devices(target)[0])

    def aval(x):
        kind = jnp.dtype(x.dtype) if isinstance(x.dtype, str) else x.dtype  # some are of keys
        return jax.ShapeDtypeStruct(x.shape, kind, sharding=sharding)

    params = jax.tree.map(aval, declare_params(cfg), is_leaf=is_spec)
    params = params.replace(model=params.model.replace(layers=()))
    given = jax.tree.map(aval, jax.eval_shape(lambda: before_a_chain(cfg, 1, None)))
    program = jax.jit(
        after_a_chain, static_argnames="cfg", donate_argnames="memory",
        compiler_options=compiler_options("gpu", cfg.dtype),
    )  # fmt: skip
    memory, state = given
    noise = jax.ShapeDtypeStruct((1, CHAIN, cfg.vocab_size), jnp.float32, sharding=sharding)
    with gpu_targets.abstract_gpu(target):
        traced = program.trace(memory, params, state, noise, cfg=cfg)
        return traced.lower(lowering_platforms=("cuda",))


def lower_pass(one: Pass, target: str):
    """A pass, from shapes alone."""
    import jax
    import jax.numpy as jnp

    import tsjax
    from tools import gpu_targets
    from tsjax.decoding.programs import compiler_options
    from tsjax.model.cache import KVCache
    from tsjax.model.params import declare_params, is_spec
    from tsjax.model.passes import run_rows
    from tsjax.model.transformer import final_norm, unembed

    cfg, rows = tsjax.model_preset(one.model), (1, one.rows)
    sharding = jax.sharding.SingleDeviceSharding(gpu_targets.devices(target)[0])

    def aval(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    specs = declare_params(cfg).model
    weights = jax.tree.map(lambda spec: aval(spec.shape, spec.dtype), specs, is_leaf=is_spec)
    slots = aval((1, cfg.num_kv_heads, one.capacity, cfg.head_dim), cfg.dtype)
    layers = (slots,) * cfg.num_layers
    cache = KVCache(k=layers, v=layers, length=aval((1,), jnp.int32))

    def run(weights, cache, tokens, positions, mask):
        found = run_rows(weights, cache, tokens, positions, mask, cfg=cfg)
        logits = unembed(weights, final_norm(weights, found.hidden, cfg=cfg), cfg=cfg)
        return jnp.argmax(logits, axis=-1), found.k, found.v

    arguments = aval(rows, jnp.int32), aval(rows, jnp.int32), aval((one.rows,) * 2, jnp.bool)
    program = jax.jit(run, compiler_options=compiler_options("gpu", cfg.dtype))
    with gpu_targets.abstract_gpu(target):
        return program.trace(weights, cache, *arguments).lower(lowering_platforms=("cuda",))

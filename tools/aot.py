# SPDX-License-Identifier: Apache-2.0
"""Compiles one case for a GPU that is not there, and prints what the compiler made of it.

    JAX_PLATFORMS=cpu python -m tools.aot CASE TARGET

One process per case: a bad kernel can abort the whole process. Needs the plugin of jax[cuda], not
the CUDA libraries, and `ptxas`:

    pip install --no-deps jax-cuda12-plugin==$JAX jax-cuda12-pjrt==$JAX nvidia-cuda-nvcc-cu12

The last line is one JSON object: memory of the program, copies of cache buffers in it, and for each
kernel of this project registers, spilled bytes, shared memory and instructions.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tools import gpu_program
from tools.aot_kernels import kernel_cases, lower_kernel
from tools.aot_parts import CHAINS, PASSES, lower_chain, lower_pass
from tools.registers import kernels

ROOT = Path(__file__).resolve().parent.parent


class Step(NamedTuple):
    """A program of `tsjax.generate` for a model with `capacity` slots on a mesh."""

    model: str
    mesh: tuple[int, int, int] = (1, 1, 1)  # data, model, slots
    method: str = "tokenswift"
    capacity: int = 106_496
    rows: int = 1  # of the batch
    passes: int = 1
    revive: str | None = None  # of a lazy prefill
    prompt: int = 32_768  # tokens that it has room for
    program: str = "decode"  # a chunk of steps, a pass of the prefill, a part of a lazy one
    width: int = 512  # of a pass of the prefill
    draft_weights: str = "model"  # those that draft
    weights: str = "float"  # as tsjax.load has them
    cache: str = "same"


_plain = functools.partial(Step, method="autoregressive")
STEPS = {
    "step llama3.1-8b plain": _plain("llama3.1-8b"),
    "step llama2-7b-yarn-128k plain": _plain("llama2-7b-yarn-128k"),
    "step llama2-7b-yarn-128k tokenswift": Step("llama2-7b-yarn-128k"),
    "step qwen2.5-1.5b plain": _plain("qwen2.5-1.5b"),
    "step qwen2.5-1.5b plain, 64 rows": _plain("qwen2.5-1.5b", capacity=8192, rows=64),
    "step qwen2.5-1.5b plain, 64 rows on 2 devices": _plain(
        "qwen2.5-1.5b", (2, 1, 1), capacity=8192, rows=64
    ),
    "step qwen2.5-1.5b magicdec, 8 rows": Step("qwen2.5-1.5b", method="magicdec", rows=8),
    "step qwen2.5-1.5b plain, 8 rows in 2 parts": _plain("qwen2.5-1.5b", (1, 1, 2), rows=8),
    "step qwen2.5-1.5b tokenswift": Step("qwen2.5-1.5b"),
    "step llama3.1-8b tokenswift": Step("llama3.1-8b"),
    "step llama3.1-8b 3 passes": Step("llama3.1-8b", passes=3),
    "step llama3.1-8b int8 drafts": Step("llama3.1-8b", draft_weights="int8"),
    "step llama3.1-8b plain, narrow int8": _plain("llama3.1-8b", weights="int8"),
    "step llama3.1-8b plain, narrow int4": _plain("llama3.1-8b", weights="int4"),
    "step llama3.1-8b plain, narrow int8 and cache": _plain(
        "llama3.1-8b", weights="int8", cache="int8"
    ),
    "step llama3.1-8b tokenswift, narrow cache": Step("llama3.1-8b", cache="int8"),
    "step llama3.1-8b tokenswift, narrow int8": Step("llama3.1-8b", weights="int8"),
    "step llama3.1-8b auto": Step("llama3.1-8b", method="auto", draft_weights="int8"),
    "step llama3.1-8b heads alone": Step("llama3.1-8b", method="heads alone"),
    "step llama3.1-8b drafter": Step("llama3.1-8b", method="drafter"),
    "step llama3.1-8b magicdec": Step("llama3.1-8b", method="magicdec"),
    "step llama3.1-8b triforce": Step("llama3.1-8b", method="triforce"),
    "step qwen2.5-14b plain": _plain("qwen2.5-14b"),
    "step qwen2.5-14b tokenswift": Step("qwen2.5-14b"),
    "step qwen2.5-32b plain, 2 devices": _plain("qwen2.5-32b", (1, 2, 1)),
    "step qwen2.5-32b tokenswift, 2 devices": Step("qwen2.5-32b", (1, 2, 1)),
    "step llama3.1-8b lazily, 16K": _plain(
        "llama3.1-8b", capacity=16_640, revive="in_batches", prompt=16_384
    ),
    "step llama3.1-8b plain, 16K": _plain("llama3.1-8b", capacity=16_640),
    "step llama3.1-8b lazily": _plain("llama3.1-8b", revive="on_demand"),
    "step llama3.1-8b lazily, tokenswift": Step("llama3.1-8b", revive="in_batches"),
    **{
        f"prefill {model} by {width}": _plain(
            model, capacity=32_768, program="prefill", width=width
        )
        for model, width in (
            ("llama3.1-8b", 512),
            ("llama3.1-8b", 2048),
            ("llama2-7b-yarn-128k", 2048),
            ("qwen2.5-1.5b", 2048),
        )
    },  # fmt: skip
    "fill_stage llama3.1-8b": _plain("llama3.1-8b", revive="on_demand", program="fill_stage"),
    "choose_stage llama3.1-8b": _plain("llama3.1-8b", revive="on_demand", program="choose_stage"),
}


# (model, tokens, mesh): each with plain decoding and with TokenSwift.
SCALED = (
    ("qwen2.5-14b", 131_072, (1, 2, 1)),
    ("qwen2.5-32b", 131_072, (1, 2, 1)),
    ("qwen2.5-32b", 131_072, (1, 4, 1)),
    ("llama3.1-70b", 131_072, (1, 4, 1)),
    ("llama3.1-70b", 131_072, (1, 8, 1)),
    ("llama3.1-70b", 131_072, (1, 4, 2)),
    ("qwen2.5-14b", 1_048_576, (1, 1, 4)),
    ("qwen2.5-14b", 1_048_576, (1, 2, 2)),
    ("qwen2.5-32b", 1_048_576, (1, 2, 4)),
    ("llama3.1-70b", 1_048_576, (1, 2, 4)),
)
SCALING = {
    f"scaling {model} {name}, {tokens} tokens on {mesh[0]},{mesh[1]},{mesh[2]}": Step(
        model, mesh, method, tokens
    )
    for model, tokens, mesh in SCALED
    for name, method in (("plain", "autoregressive"), ("tokenswift", "tokenswift"))
}


# The programs of tsjax.training.train_heads for Llama-3.1-8B, with its defaults: one micro-batch.
TRAINING = {f"train_heads {part}": part for part in ("hidden_states", "add_gradients", "update")}


def lower_training(part: str, target: str):
    """One program of the training of draft heads, from shapes alone."""
    import jax
    import jax.numpy as jnp

    import tsjax
    from tools import gpu_targets
    from tsjax.decoding.programs import programs as decode_programs
    from tsjax.model.params import declare_params, is_spec
    from tsjax.training import loss as head_training
    from tsjax.training.run import training_programs

    aval = gpu_targets.shapes_on(target)
    cfg, settings = tsjax.model_preset("llama3.1-8b"), tsjax.training.HeadTraining()
    heads = jax.eval_shape(lambda: head_training.init_heads(cfg, settings))
    moments = jax.eval_shape(lambda: head_training.optimiser(settings).init(heads))
    total = jax.eval_shape(lambda: head_training.zero_gradients(heads))
    rows = (settings.micro_batch, settings.sequence_length)
    tokens = jax.ShapeDtypeStruct(rows, jnp.int32)
    hidden = jax.ShapeDtypeStruct((*rows, cfg.embed_dim), cfg.dtype)
    heads, moments, total, tokens, hidden = jax.tree.map(
        aval, (heads, moments, total, tokens, hidden)
    )
    params = jax.tree.map(aval, declare_params(cfg), is_leaf=is_spec)
    if part == "hidden_states":
        program = decode_programs("gpu", cfg.dtype).hidden_states
        return gpu_targets.lowered(target, program, params, tokens, cfg=cfg)
    if part == "add_gradients":
        program, how = training_programs().add_gradients, {"chunk_tokens": settings.chunk_tokens}
        given = heads, params.model, hidden, tokens, total
        return gpu_targets.lowered(target, program, *given, cfg=cfg, **how)
    program = training_programs().update
    return gpu_targets.lowered(target, program, heads, moments, total, settings=settings)


def training_bytes(found: list[dict]) -> int:
    """The most that is on the device at a time, from the figures of all of TRAINING.

    A program's arguments and results are there before and after it. The weights are all among the
    arguments of the first program, heads, moments and gradients among those of the last.
    """
    hidden, _, update = found
    resident = hidden["argument_bytes"] + update["argument_bytes"]
    return resident + max(one["temp_bytes"] + one["output_bytes"] for one in found)


def settings_of(step: Step, target: str):
    """What the step decodes with, and how it samples."""
    import tsjax
    from tsjax.decoding.config import DecodeConfig
    from tsjax.files.tensor_names import with_weights
    from tsjax.methods import METHODS
    from tsjax.methods.auto import choose
    from tsjax.methods.devices import device_of, estimated
    from tsjax.training.drafter_steps import shape_for

    config = with_weights(tsjax.model_preset(step.model), step.weights, {}, "")
    config = dataclasses.replace(config, cache=step.cache)
    method = METHODS.get(step.method, tsjax.methods.Autoregressive)()
    if step.method == "tokenswift":
        config = dataclasses.replace(config, num_draft_heads=3)
        method = tsjax.preset(step.model).method if step.model in PAPER else method
        if step.passes > 1:
            method = dataclasses.replace(
                method,
                tree=(1,) * step.passes,
                draft_passes=step.passes,
                suffix_alone=8,
                draft_rest=True,
            )
        method = dataclasses.replace(method, draft_weights=step.draft_weights)
    if step.method == "drafter":
        config = dataclasses.replace(config, drafter=shape_for(config))
        costs = estimated(config, device_of("gpu", target), 1)
        method = tsjax.LikelyTree(width=16, pass_widths=(1, 8), drafter=4, costs=costs)
    if step.method in ("auto", "heads alone"):
        config = dataclasses.replace(config, num_draft_heads=3)
        costs = estimated(config, device_of("gpu", target), 1)
        method = choose(config, costs, step.capacity)
        if step.method == "heads alone":
            method = tsjax.LikelyTree(width=16, pass_widths=(1, 8), heads=True, costs=costs)
    sampling = tsjax.preset(step.model if step.model in PAPER else "llama3.1-8b").config
    prefill = None if step.revive is None else tsjax.LazyPrefill(keep="paper", revive=step.revive)
    prefill = prefill and prefill.resolved(config, step.prompt)
    return DecodeConfig(config, method, prefill=prefill), sampling


def lower_step(step: Step, target: str):
    """The program that `tsjax.generate` runs, from shapes alone."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tools import gpu_targets
    from tsjax.decoding.programs import programs
    from tsjax.decoding.reading import UNREAD, reading_config
    from tsjax.decoding.sampling import sampling_values
    from tsjax.decoding.start import init_state
    from tsjax.model.cache import CACHE_AXES, WHOLE_AXES, Cache, KVCache
    from tsjax.model.int8 import Int8Matrix
    from tsjax.model.param_spec import ParamSpec
    from tsjax.model.params import Params, declare_params, is_spec
    from tsjax.model.sharding import named_sharding, usable_mesh
    from tsjax.model.transformer import int8_weights

    cfg, sampling = settings_of(step, target)
    config = cfg.model
    count = math.prod(step.mesh)
    devices = np.asarray(gpu_targets.devices(target, count)[:count]).reshape(step.mesh)
    mesh = usable_mesh(Mesh(devices, ("data", "model", "slots")))

    def aval(x, axes):
        sharding = named_sharding(x.shape, axes, mesh)
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype), sharding=sharding)

    def as_int8(spec: ParamSpec, inputs: int) -> Int8Matrix:
        outputs = dataclasses.replace(
            spec, shape=spec.shape[:-inputs], axes=spec.axes[:-inputs], dtype="float32"
        )
        return Int8Matrix(dataclasses.replace(spec, dtype="int8"), outputs)

    specs: Params = declare_params(config)
    if step.draft_weights == "int8":
        specs = specs.replace(drafts=int8_weights(specs.model, config, as_int8))
    params = jax.tree.map(lambda p: aval(p, p.axes), specs, is_leaf=is_spec)
    state = jax.eval_shape(
        lambda: init_state(
            jnp.zeros((step.rows, 4096), jnp.int32),
            jnp.full((step.rows,), 4096),
            cfg=cfg,
            capacity=step.capacity,
            max_length=jnp.full((step.rows,), step.capacity),
            prompt_capacity=step.prompt if cfg.prefill else None,
            sampling=sampling_values(sampling, (0,), config.vocab_size, config.dtype),
            mesh=mesh,
        )
    )
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(x):
        if isinstance(x, Cache):
            rest = jax.tree.map(place, x.replace(k=(), v=()))
            axes = CACHE_AXES if isinstance(x, KVCache) else WHOLE_AXES
            buffers = {name: getattr(x, name) for name in "kv"}
            return rest.replace(**jax.tree.map(lambda buffer: aval(buffer, axes), buffers))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

    state = jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, Cache))
    steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    compiled, given, how = programs("gpu", config.dtype), (params, state, steps), {"cfg": cfg}
    program = compiled.decode if step.program == "decode" else compiled.read_part
    if step.program == "prefill":
        given = params, state.replace(**dict.fromkeys(UNREAD)), steps
        how = dict(part=0, width=step.width, cfg=reading_config(cfg))
    elif step.program == "fill_stage":
        how |= dict(part=1, width=step.width)
    elif step.program == "choose_stage":
        program, given, how = compiled.finish_part, (params, state), dict(part=1, cfg=cfg)
    lowered = gpu_targets.lowered(target, program, *given, **how)
    partial = getattr(state.memory, "cache", None)
    caches = [state.kv] if partial is None else [state.kv, partial]
    buffers = [jax.tree.leaves(cache.k[0])[0] for cache in caches]  # of narrow rows the numbers
    return lowered, [
        (buffer.dtype.itemsize, buffer.sharding.shard_shape(buffer.shape)) for buffer in buffers
    ]


PAPER = ("llama2-7b-yarn-128k", "llama3.1-8b", "qwen2.5-1.5b", "qwen2.5-14b")


KINDS = {1: "s8", 2: "bf16"}  # of a cache's numbers, by their bytes


def figures(case: str, target: str, dump: Path) -> dict:
    """Compiles the case; XLA's dumps land in `dump`."""
    from tools.gpu_targets import CORES

    start = time.perf_counter()
    found: dict = {"case": case, "target": target}
    steps = {**STEPS, **SCALING}
    if case in steps:
        lowered, caches = lower_step(steps[case], target)
    elif case in PASSES:
        lowered, caches = lower_pass(PASSES[case], target), []
    elif case in CHAINS:
        lowered, caches = lower_chain(CHAINS[case], target), []
    elif case in TRAINING:
        lowered, caches = lower_training(TRAINING[case], target), []
    else:
        lowered, caches = lower_kernel(case, target), []
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    found.update(
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        seconds=round(time.perf_counter() - start, 1),
    )
    if caches:
        text, (size, cache) = compiled.as_text(), caches[0]
        shapes = "|".join(
            re.escape(f"{KINDS[size]}[{','.join(map(str, shape))}]") for size, shape in caches
        )
        found["cache_bytes"] = 2 * size * math.prod(cache)  # of one layer
        found["cache_copies"] = len(re.findall(rf"= ({shapes})\S* copy\(", text))
        found["sent"] = gpu_program.sent(text)
        found["kernels_called"] = sorted(set(re.findall(r"tsjax_\w+", text)))
        program, hlo = gpu_program.read_dump(dump)
        weights, cores = matrices(steps[case].model), CORES[target]
        found["program"] = gpu_program.figures(program, hlo, weights, cores)
        found["work"] = gpu_program.work(hlo)
    if case in PASSES or case in CHAINS:
        found["work"] = gpu_program.work(compiled.as_text())
    found["kernels"] = kernels(dump)
    return found


def matrices(model: str) -> set[tuple[int, int]]:
    """(outputs, inputs) of the products of a model with its weights."""
    import jax

    import tsjax
    from tsjax.model.params import is_spec
    from tsjax.model.transformer import declare_model

    specs = jax.tree.leaves(declare_model(tsjax.model_preset(model)), is_leaf=is_spec)
    shapes = ((spec.shape, len(spec.shape) - spec.inputs) for spec in specs if spec.inputs)
    return {(math.prod(shape[:cut]), math.prod(shape[cut:])) for shape, cut in shapes}


def compile_case(case: str, target: str, **environment: str) -> dict:
    """What `figures` says, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tools.aot", case, target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    )
    if done.returncode:
        raise RuntimeError(f"{case} for {target}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> int:
    if argv == ["--list"]:
        print("\n".join([*kernel_cases(), *STEPS, *SCALING, *PASSES, *CHAINS]))
        return 0
    case, target = argv
    # From jax 0.11 on, PTX is dumped only for emitters that are named.
    from importlib import metadata

    emitters = "" if metadata.version("jax").startswith("0.10.") else " --xla_dump_emitter_re=.*"
    with tempfile.TemporaryDirectory() as dump:
        given = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{given} --xla_dump_to={dump}{emitters}"
        print(json.dumps(figures(case, target, Path(dump))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""What is held in memory, in bytes on each device: weights, caches, states and what passes need.

Knows what is declared of weights, caches and states, and where it lies on a mesh, which needs no
devices. Allocates nothing. Does not know how much memory there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from tsjax.base.generation_config import GenerationConfig
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import accumulation_dtype
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.start import empty_memory
from tsjax.model.cache import Cache, cache_bytes, keys_in_cache
from tsjax.model.param_spec import ParamSpec
from tsjax.model.params import declare_params, is_spec, placement
from tsjax.model.sharding import named_sharding

USABLE = 0.9  # of a device's memory, for weights and caches: the rest is for all else
# Bytes of unfinished results that the kernel of attention leaves to its merge: on each of an H100's
# 132 multiprocessors four tiles of 128 rows, of head dimension 128, in float32.
UNMERGED = 132 * 4 * 128 * 128 * 4
SCORED_SLOTS = 512  # of the cache, at a time, where many rows attend in plain XLA
AnyMesh = Mesh | AbstractMesh | None


def weights_held(cfg: ModelConfig, mesh: AnyMesh = None) -> Iterator[tuple[str, ParamSpec, int]]:
    """Each parameter's path, declaration and bytes, draft heads and drafter included."""
    specs = jax.tree_util.tree_leaves_with_path(declare_params(cfg), is_leaf=is_spec)
    for path, spec in specs:
        place = placement(spec, mesh)
        shape = spec.shape if place is None else place.shard_shape(spec.shape)
        size = math.prod(shape) * jnp.dtype(spec.dtype).itemsize
        yield jax.tree_util.keystr(path), spec, size


def held_by_text(cfg: ModelConfig, rows: int, slots: int, mesh: AnyMesh = None) -> int:
    """Weights, and the cache of `rows` texts."""
    weights = sum(size for *_, size in weights_held(cfg, mesh))
    return weights + cache_bytes(cfg, rows, slots, mesh)


def int8_copy_bytes(cfg: ModelConfig, mesh: AnyMesh = None) -> int:
    """A copy of the matrices to draft with, without its scales; a narrow model drafts with
    itself."""
    if cfg.is_narrow:
        return 0
    return sum(
        size // jnp.dtype(spec.dtype).itemsize
        for path, spec, size in weights_held(cfg, mesh)
        if path.startswith(".model")
        and (spec.inputs or (cfg.tie_embeddings and path == ".model.embed"))
    )


def state_bytes(
    cfg: DecodeConfig,
    settings: GenerationConfig,
    rows: int,
    slots: int,
    *,
    prompt_capacity: int = 0,
    read_once: int = 0,
    prefixes: int = 0,
    has_processors: bool = False,
    mesh: AnyMesh = None,
) -> dict[str, int]:
    """What the state of a run takes, by what it is for.

    Args:
      prompt_capacity: tokens of the longest prompt, with a lazy prefill.
      read_once: texts that are read before they are copied to the rows that begin with them.
      prefixes: texts that were read before and are read again.
      has_processors: whether a user's own read the text of each node.
    """
    model, told = cfg.model, settings.logprobs
    counted = settings.presence_penalty != 0 or settings.frequency_penalty != 0
    return {
        "log-probabilities": 0 if told is None else rows * slots * (8 + 16 * told),
        "the cache of texts that are read once": cache_bytes(model, read_once, slots, mesh),
        "the cache of a prefix that is read again": cache_bytes(model, prefixes, slots, mesh),
        "counts of tokens": 4 * rows * model.vocab_size if counted else 0,
        "the text of each node": 4 * rows * slots * cfg.sizes.width if has_processors else 0,
        "the cache": cache_bytes(model, rows, slots, mesh),
        "what method and prefill remember": memory_bytes(cfg, rows, slots, prompt_capacity),
    }


def memory_bytes(cfg: DecodeConfig, batch: int, capacity: int, prompt_capacity: int) -> int:
    """Bytes that the method and a lazy prefill remember in a state, on one device."""

    def allocated():
        lazy, memory = cfg.prefill, empty_memory(cfg, batch, capacity, None)
        return memory, lazy and lazy.init(cfg.model, jnp.ones(batch), prompt_capacity, capacity)

    leaves = jax.tree.leaves(jax.eval_shape(allocated))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def temporary_bytes(
    cfg: DecodeConfig, batch: int, capacity: int, prefill_width: int, mesh=None
) -> int:
    """What a run's programs need beside weights and state on one device: estimated, rather high.

    XLA says it only when it has compiled. Arrays that are not needed at the same time share memory,
    so what counts is the largest moment: of a pass of the prefill; of a step while all rows of the
    widest tree are scored; or of its end, when the method chooses a partial cache anew.
    """
    model, sizes, (size, wide) = cfg.model, cfg.sizes, _sizes_of(cfg.model)
    # A choice makes for each key of the whole cache a score, and that as an integer of the same
    # order.
    memory = jax.eval_shape(lambda: cfg.method.init(model, batch, capacity, None))
    parts = jax.tree.leaves(memory, is_leaf=lambda part: isinstance(part, Cache))
    chooses = any(isinstance(part, Cache) for part in parts)
    choice = 2 * wide * keys_in_cache(model, batch, capacity, mesh) if chooses else 0
    if mesh is not None:  # rows of a batch may lie on several devices; the rest counts as whole
        (batch,) = named_sharding((batch,), ("batch",), mesh).shard_shape((batch,))
    prefill = _pass_bytes(model, batch * prefill_width, kept=2)
    if model.is_narrow:  # XLA's products of many rows: a matrix is wide while it is multiplied
        prefill += 2 * model.mlp_dim * model.embed_dim * size
    # Keys and values of all layers stay until they are written; for the method also queries, and
    # for one that asks for it all query heads and what they saw.
    kept = 3 + (2 * model.group_size if sizes.with_attended else 0)
    step = _pass_bytes(model, batch * sizes.width, kept=kept)
    # For each node and each position's noise, per token of the vocabulary, where all processors are
    # on: its logit, that as an integer of the same order, its probability, the noise, and whether
    # it is penalised.
    rows = batch * (sizes.width + sizes.depth + 1)
    scoring = rows * model.vocab_size * (4 * wide + 1)
    return max(prefill, step + max(scoring, choice))


def _pass_bytes(model: ModelConfig, rows: int, kept: int) -> int:
    """Bytes of `rows` rows: `kept` arrays for each layer's kv heads, and the work of one layer."""
    size, wide = _sizes_of(model)
    D, H, heads = model.embed_dim, model.head_dim, model.num_heads + 2 * model.num_kv_heads
    hidden = 4 * D * size + D * wide  # two layers' before and after a norm; a product's sums
    attention = heads * H * (wide + size) + 2 * model.num_heads * SCORED_SLOTS * wide
    mlp = 3 * model.mlp_dim * size
    layers = kept * model.num_layers * model.num_kv_heads * H * size
    return rows * (layers + hidden + max(attention, mlp)) + UNMERGED


def _sizes_of(model: ModelConfig) -> tuple[int, int]:
    """Bytes of a number of the model's type, and of the type of sums and scores."""
    return jnp.dtype(model.dtype).itemsize, jnp.dtype(accumulation_dtype(model.dtype)).itemsize

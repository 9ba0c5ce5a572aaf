# SPDX-License-Identifier: Apache-2.0
"""The preallocated key/value cache. Knows arrays and lengths, no model.

A cache is written in one way only: T consecutive rows per batch row, at any start. Nothing is ever
shifted or compacted inside it.
"""

from __future__ import annotations

import math

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from tsjax.config import ModelConfig
from tsjax.sharding import named_sharding

CACHE_AXES = ("batch", "kv_heads", "slots", "head_dim")


class KVCache(flax.struct.PyTreeNode):
    """Keys and values of the committed tokens.

    Attributes:
      k, v: one [B, K, S, H] array per layer. Slots at `length` and beyond are unspecified and are
        never read.
      length: [B] int32, committed tokens of each row.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: jax.Array

    @property
    def capacity(self) -> int:
        return self.k[0].shape[2]


def init_cache(cfg: ModelConfig, batch: int, capacity: int, mesh=None) -> KVCache:
    """An empty cache of `capacity` slots per row in the model's type."""
    shape = (batch, cfg.num_kv_heads, capacity, cfg.head_dim)
    sharding = named_sharding(shape, CACHE_AXES, mesh) if mesh is not None else None

    def buffers():
        return tuple(jnp.zeros(shape, cfg.dtype, device=sharding) for _ in range(cfg.num_layers))

    return KVCache(k=buffers(), v=buffers(), length=jnp.zeros((batch,), jnp.int32))


def cache_bytes(cfg: ModelConfig, batch: int, capacity: int, mesh=None) -> int:
    """Bytes of `init_cache` with the same arguments, on each device."""
    shape = (batch, cfg.num_kv_heads, capacity, cfg.head_dim)
    if mesh is not None:
        shape = named_sharding(shape, CACHE_AXES, mesh).shard_shape(shape)
    return 2 * cfg.num_layers * math.prod(shape) * jnp.dtype(cfg.dtype).itemsize


def write_rows(cache: KVCache, k_rows, v_rows, start, *, after) -> KVCache:
    """Writes rows [B, T, K, H] of every layer at slots start[b] .. start[b] + T. Lengths stay.

    The caller guarantees start + T <= capacity: beyond it XLA would clamp the start and overwrite
    committed slots.

    `after` is any array computed from all reads of this cache. Without a data dependency XLA may
    place the write before a read that does not see it, and then copies the whole cache to stay
    correct; with it the write is in place.
    """
    start = start + _zero_after(after)
    zero = jnp.int32(0)

    def write(buffer, rows):
        rows = jnp.swapaxes(rows, 1, 2).astype(buffer.dtype)  # [B, K, T, H]

        def one(b, buffer):
            row = lax.dynamic_slice_in_dim(rows, b, 1, axis=0)
            return lax.dynamic_update_slice(buffer, row, (b, zero, start[b], zero))

        if buffer.shape[0] == 1:
            return one(zero, buffer)
        return lax.fori_loop(zero, jnp.int32(buffer.shape[0]), one, buffer)

    with jax.named_scope("write_rows"):
        return cache.replace(
            k=tuple(map(write, cache.k, k_rows)), v=tuple(map(write, cache.v, v_rows))
        )


def _zero_after(x):
    """An int32 zero that XLA can only know once x is computed."""
    first = x.ravel()[0].astype(jnp.float32)
    is_nan = (first != first).astype(jnp.int32)
    return jnp.minimum(is_nan, 0)

# SPDX-License-Identifier: Apache-2.0
"""The key/value cache of all committed tokens, and how rows are written to any cache.

Knows arrays and lengths, no model. Caches are written in one way only: T consecutive rows per batch
row, at any start. Nothing is ever shifted or compacted inside the whole one.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import Summary
from tsjax.config import ModelConfig
from tsjax.model.sharding import named_sharding

CACHE_AXES = ("batch", "kv_heads", "slots", "head_dim")


class Cache(flax.struct.PyTreeNode):
    """Keys and values that a pass may see.

    Attributes:
      k, v: one [B, K, S, H] array per layer. Slots at `length` and beyond are unspecified and are
        never read.
      length: [B] int32, tokens of each row.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: jax.Array

    def rows_in(self, layer: int) -> jax.Array:
        """[B] int32, the rows of a layer that count: where the next one goes."""
        return self.length


class KVCache(Cache):
    """Keys and values of the committed tokens.

    Attributes:
      absent: [L, B] int32, how many of them are not in a layer; None where all are in all. The
        rows of a layer are then its first ones, in the order in which they were computed, and what
        `Cache` says of `length` holds for theirs.
    """

    absent: jax.Array | None = None

    @property
    def capacity(self) -> int:
        return self.k[0].shape[2]

    def rows_in(self, layer: int) -> jax.Array:
        return self.length if self.absent is None else self.length - self.absent[layer]

    @property
    def fewest_rows(self) -> jax.Array:
        """[B] int32, the rows that every layer has."""
        return self.length if self.absent is None else self.length - jnp.max(self.absent, axis=0)


class Attended(NamedTuple):
    """One layer's attention of a token: its queries, and the summary of all that they saw."""

    query: jax.Array  # [B, N, H]
    summary: Summary


AnyCache = TypeVar("AnyCache", bound=Cache)


def init_cache(cfg: ModelConfig, batch: int, capacity: int, mesh=None) -> KVCache:
    """An empty cache of `capacity` slots per row in the model's type."""
    return KVCache(
        k=empty_buffers(cfg, batch, capacity, mesh),
        v=empty_buffers(cfg, batch, capacity, mesh),
        length=jnp.zeros((batch,), jnp.int32),
    )


def empty_buffers(cfg: ModelConfig, batch: int, capacity: int, mesh) -> tuple[jax.Array, ...]:
    shape = (batch, cfg.num_kv_heads, capacity, cfg.head_dim)
    sharding = named_sharding(shape, CACHE_AXES, mesh) if mesh is not None else None
    return tuple(jnp.zeros(shape, cfg.dtype, device=sharding) for _ in range(cfg.num_layers))


def cache_bytes(cfg: ModelConfig, batch: int, capacity: int, mesh=None) -> int:
    """Bytes of the buffers of `init_cache`, on each device."""
    shape = (batch, cfg.num_kv_heads, capacity, cfg.head_dim)
    if mesh is not None:
        shape = named_sharding(shape, CACHE_AXES, mesh).shard_shape(shape)
    return 2 * cfg.num_layers * math.prod(shape) * jnp.dtype(cfg.dtype).itemsize


def write_rows(
    cache: AnyCache, k_rows, v_rows, start, *, after, layers: range | None = None
) -> AnyCache:
    """Writes rows [B, T, K, H] of `layers`, by default all, as tokens start[b] .. start[b] + T.

    Of a layer that lacks tokens, `start` counts these too. Lengths stay. The caller guarantees
    start + T <= capacity: beyond it XLA would clamp the start and overwrite committed slots.

    `after` is any array computed from all reads of this cache. Without a data dependency XLA may
    place the write before a read that does not see it, and then copies the whole cache to stay
    correct; with it the write is in place.
    """
    start = start + zero_after(after)
    zero = jnp.int32(0)

    def write(buffer, rows, slot):
        rows = jnp.swapaxes(rows, 1, 2).astype(buffer.dtype)  # [B, K, T, H]

        def one(b, buffer):
            row = lax.dynamic_slice_in_dim(rows, b, 1, axis=0)
            return lax.dynamic_update_slice(buffer, row, (b, zero, slot[b], zero))

        return for_each_row(one, buffer)

    with jax.named_scope("write_rows"):
        k, v = list(cache.k), list(cache.v)
        for index, layer in enumerate(range(len(k)) if layers is None else layers):
            slot = start + (cache.rows_in(layer) - cache.length)
            k[layer] = write(k[layer], k_rows[index], slot)
            v[layer] = write(v[layer], v_rows[index], slot)
        return cache.replace(k=tuple(k), v=tuple(v))


def for_each_row(one, buffer):
    """one(b, buffer) for every batch row b, in place."""
    if buffer.shape[0] == 1:
        return one(jnp.int32(0), buffer)
    return lax.fori_loop(jnp.int32(0), jnp.int32(buffer.shape[0]), one, buffer)


def zero_after(x):
    """An int32 zero that XLA can only know once x is computed."""
    first = x.ravel()[0].astype(jnp.float32)
    is_nan = (first != first).astype(jnp.int32)
    return jnp.minimum(is_nan, 0)

# SPDX-License-Identifier: Apache-2.0
"""The key/value cache of all committed tokens, and how rows are written to any cache.

Knows arrays and lengths, no model. Caches are written in one way only: T consecutive rows per batch
row, at any start. Nothing is ever shifted or compacted inside the whole one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from pallas_kernels import NarrowRows, Summary, narrowed
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, DTypeLike, Float, Int, Shaped
from tsjax.model.parts import dealt_out, taken_by_part, write_by_part
from tsjax.model.sharding import named_sharding, parts_of
from tsjax.model.writing import for_each_row, write_at_once

CACHE_AXES = ("cache_rows", "cache_heads", None, "head_dim")  # of rows by parts.py
WHOLE_AXES = ("batch", "cache_heads", None, "head_dim")  # of caches that are not dealt out


class Cache(flax.struct.PyTreeNode):
    """Keys and values that a pass may see.

    Attributes:
      k, v: one array per layer, or one of narrow rows. Slots at `length` and beyond are
        unspecified and are never read.
      length: tokens of each row.
    """

    k: tuple[Float[Array, "B K S H"] | NarrowRows, ...]
    v: tuple[Float[Array, "B K S H"] | NarrowRows, ...]
    length: Int[Array, "B"]
    parts: ClassVar[int] = 1  # over which tokens are dealt out

    def rows_in(self, layer: int) -> Int[Array, "B"]:
        """The rows of a layer that count: where the next one goes."""
        return self.length


class KVCache(Cache):
    """Keys and values of the committed tokens.

    They are narrow where the model's config says cache="int8". What is written is then rounded
    already (transformer.py), so it is the same numbers before and after.

    Attributes:
      absent: how many of them are not in a layer; None where all are in all. The rows of a layer
        are then its first ones, in the order in which they were computed, and what `Cache` says of
        `length` holds for theirs.
      parts: over how many the tokens of each text are dealt out, by the rule of parts.py: rows of
        k and v are then parts of texts. `length` is of texts.
    """

    absent: Int[Array, "L B"] | None = None
    parts: int = flax.struct.field(pytree_node=False, default=1)

    @property
    def capacity(self) -> int:
        return self.k[0].shape[2] * self.parts

    def rows_in(self, layer: int) -> Int[Array, "B"]:
        return self.length if self.absent is None else self.length - self.absent[layer]


class Attended(NamedTuple):
    """One layer's attention of a token: its queries, and the summary of all that they saw."""

    query: Float[Array, "B N H"]
    summary: Summary


AnyCache = TypeVar("AnyCache", bound=Cache)


def init_cache(cfg: ModelConfig, batch: int, capacity: int, mesh: Mesh | None = None) -> KVCache:
    """An empty cache of `capacity` slots per row, or a few more, held as the config says."""
    parts = parts_of(mesh)
    declared = _rows_of_layer(cfg, batch, capacity, parts)

    def empty(_: int):
        return jax.tree.map(lambda x: _zeros(x.shape, x.dtype, mesh, CACHE_AXES), declared)

    return KVCache(
        k=tuple(map(empty, range(cfg.num_layers))),
        v=tuple(map(empty, range(cfg.num_layers))),
        length=jnp.zeros((batch,), jnp.int32),
        parts=parts,
    )


def empty_buffers(
    cfg: ModelConfig, rows: int, slots: int, mesh: Mesh | None
) -> tuple[Float[Array, "{rows} K {slots} H"], ...]:
    """Each layer's keys, or its values, in the model's type, of a cache that is not dealt out."""
    shape = (rows, cfg.num_kv_heads, slots, cfg.head_dim)
    return tuple(_zeros(shape, cfg.dtype, mesh, WHOLE_AXES) for _ in range(cfg.num_layers))


def _zeros(
    shape: Sequence[int], dtype: DTypeLike, mesh: Mesh | None, axes: Sequence[str | None]
) -> Shaped[Array, "..."]:
    if mesh is None:
        return jnp.zeros(shape, dtype)
    sharding = named_sharding(shape, axes, mesh)
    # Twice: the first one places what is made at once, the second one what a program makes.
    return lax.with_sharding_constraint(jnp.zeros(shape, dtype, device=sharding), sharding)


def _rows_of_layer(cfg: ModelConfig, batch: int, capacity: int, parts: int) -> Any:
    """Shapes and types of what holds a layer's keys, and of what holds its values."""
    shape = (batch * parts, cfg.num_kv_heads, -(-capacity // parts), cfg.head_dim)
    if cfg.cache == "same":
        return jax.ShapeDtypeStruct(shape, jnp.dtype(cfg.dtype))
    both: Any = (
        jax.ShapeDtypeStruct(one, jnp.dtype(jnp.int8)) for one in (shape, (*shape[:-1], 1))
    )
    return NarrowRows(*both)


def cache_bytes(
    cfg: ModelConfig, batch: int, capacity: int, mesh: Mesh | AbstractMesh | None = None
) -> int:
    """Bytes of the buffers of `init_cache`, on each device."""

    def bytes_of(x: jax.ShapeDtypeStruct) -> int:
        shape = x.shape
        if mesh is not None:
            shape = named_sharding(shape, CACHE_AXES, mesh).shard_shape(shape)
        return math.prod(shape) * x.dtype.itemsize

    declared = jax.tree.leaves(_rows_of_layer(cfg, batch, capacity, parts_of(mesh)))
    return 2 * cfg.num_layers * sum(map(bytes_of, declared))


def keys_in_cache(
    cfg: ModelConfig, batch: int, capacity: int, mesh: Mesh | AbstractMesh | None = None
) -> int:
    """How many keys the buffers of `init_cache` have, of all layers, on each device."""
    one_byte = dataclasses.replace(cfg, cache="int8")
    return cache_bytes(one_byte, batch, capacity, mesh) // (2 * (cfg.head_dim + 1))


def write_rows(
    cache: AnyCache,
    k_rows: Sequence[Float[Array, "B T K H"]],
    v_rows: Sequence[Float[Array, "B T K H"]],
    start: Int[Array, "B"],
    *,
    after: Shaped[Array, "..."],
    layers: range | None = None,
) -> AnyCache:
    """Writes rows of `layers`, by default all, as tokens start[b] .. start[b] + T.

    Of a layer that lacks tokens, `start` counts these too. Lengths stay. The caller guarantees
    start + T <= capacity: beyond it XLA would clamp the start and overwrite committed slots.

    `after` is any array computed from all reads of this cache. Without a data dependency XLA may
    place the write before a read that does not see it, and then copies the whole cache to stay
    correct; with it the write is in place.
    """
    start = start + zero_after(after)
    zero = jnp.int32(0)

    def put(buffer, rows, slot):
        if cache.parts > 1:
            return write_by_part(buffer, rows, slot, parts=cache.parts)
        rows = jnp.swapaxes(rows, 1, 2).astype(buffer.dtype)  # [B, K, T, H]

        def one(b, buffer):
            row = lax.dynamic_slice_in_dim(rows, b, 1, axis=0)
            return lax.dynamic_update_slice(buffer, row, (b, zero, slot[b], zero))

        return for_each_row(one, write_at_once, buffer, rows, slot)

    if isinstance(cache.k[0], NarrowRows):  # of all layers at once: each alone is small
        stacked = narrowed(jnp.stack([*k_rows, *v_rows]))
        rows = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(2 * len(k_rows))]
        k_rows, v_rows = rows[: len(k_rows)], rows[len(k_rows) :]

    @jax.jit  # traced once for all layers
    def write(buffer, rows, slot):
        return jax.tree.map(lambda buffer, rows: put(buffer, rows, slot), buffer, rows)

    with jax.named_scope("write_rows"):
        k, v = list(cache.k), list(cache.v)
        for index, layer in enumerate(range(len(k)) if layers is None else layers):
            slot = start + (cache.rows_in(layer) - cache.length)
            k[layer] = write(k[layer], k_rows[index], slot)
            v[layer] = write(v[layer], v_rows[index], slot)
        return cache.replace(k=tuple(k), v=tuple(v))


def in_slots(
    buffer: Float[Array, "PB K S H"] | NarrowRows, slots: Int[Array, "B C"], *, parts: int
) -> Float[Array, "PB K S H"] | NarrowRows:
    """One layer's keys or values, with the row of slot slots[b, i] in slot i. Where they are dealt
    out, each device has the layer whole for a moment."""

    def taken(x):
        B, missing = len(slots), parts * x.shape[2] - slots.shape[1]
        places = jnp.pad(slots, ((0, 0), (0, missing)))
        places = jnp.broadcast_to(places[:, None], (B, x.shape[1], parts * x.shape[2]))
        if parts == 1:
            return jnp.take_along_axis(x, places[..., None], axis=2, mode="clip")
        found = taken_by_part(x, places, parts=parts)
        return jax.vmap(lambda x: dealt_out(x, parts), 3, 3)(found)

    return jax.tree.map(taken, buffer)


def zero_after(x: Shaped[Array, "..."]) -> Int[Array, ""]:
    """An int32 zero that XLA can only know once x is computed."""
    first = x.ravel()[0].astype(jnp.float32)
    is_nan = (first != first).astype(jnp.int32)
    return jnp.minimum(is_nan, 0)

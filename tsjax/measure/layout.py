# SPDX-License-Identifier: Apache-2.0
"""What each device of a mesh holds, in bytes, before anything is allocated.

Knows where sharding.py places parameters and caches. Needs no devices: a mesh here is three sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from tsjax.base.checks import check
from tsjax.base.model_config import ModelConfig
from tsjax.model.cache import cache_bytes
from tsjax.model.params import declare_params, is_spec, placement
from tsjax.model.sharding import AXES, wanted_axes


class Part(NamedTuple):
    """Attributes:
    each: bytes on each device.
    whole: bytes of one copy.
    split: into how many different parts it is cut.
    could: into how many the mesh would cut what divides.
    """

    name: str
    each: int
    whole: int
    split: int
    could: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Attributes:
    mesh: size of each axis.
    parts: weights by what they are for, and the cache.
    """

    model_name: str
    mesh: dict[str, int]
    context: int
    rows: int
    parts: tuple[Part, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def each(self) -> int:
        """Bytes of weights and cache on a device."""
        return sum(part.each for part in self.parts)


def sizes_of(text: str, name: str = "--mesh") -> dict[str, int]:
    """DATA,MODEL or DATA,MODEL,SLOTS by their names."""
    words = text.split(",")
    sizes = [int(word) for word in words if word.isdecimal()]
    valid = len(sizes) == len(words) in (2, 3) and all(sizes)
    check(valid, name, text, "DATA,MODEL or DATA,MODEL,SLOTS, sizes from 1 on")
    return dict(zip(AXES, [*sizes, 1][:3], strict=True))


def layout(
    model_name: str, cfg: ModelConfig, sizes: dict[str, int], context: int, rows: int = 1
) -> Layout:
    """Weights of a model, and the cache of `rows` texts of `context` tokens, on a mesh."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    found: dict[str, list[Part]] = {}
    specs = jax.tree_util.tree_leaves_with_path(declare_params(cfg), is_leaf=is_spec)
    for path, spec in specs:
        name = _name_of(jax.tree_util.keystr(path))
        place = placement(spec, mesh)
        assert place is not None
        shape = place.shard_shape(spec.shape)
        size = jnp.dtype(spec.dtype).itemsize
        wanted = {axis for one in spec.axes for axis in wanted_axes(one)}
        could = math.prod(sizes[axis] for axis in wanted)
        whole, each = math.prod(spec.shape), math.prod(shape)
        found.setdefault(name, []).append(
            Part(name, each * size, whole * size, whole // each, could)
        )
    parts = [_sum(name, some) for name, some in found.items()]
    each, whole = cache_bytes(cfg, rows, context, mesh), cache_bytes(cfg, rows, context)
    could = math.prod(sizes.values()) // (1 if rows > 1 else sizes["data"])  # a text is one row
    parts.append(Part("cache", each, whole, round(whole / each), could))
    return Layout(model_name, sizes, context, rows, tuple(parts))


def _name_of(path: str) -> str:
    kinds = {
        "draft heads": (".heads",), "attention": ("qkv", ".o"), "mlp": ("gate_up", "down"),
        "vocabulary": ("embed",),
    }  # fmt: skip
    for kind, words in kinds.items():
        if any(word in path for word in words) and "norm" not in path:
            return kind
    return "norms"


def _sum(name: str, parts: Sequence[Part]) -> Part:
    each, whole = (sum(getattr(one, field) for one in parts) for field in ("each", "whole"))
    large = max(parts, key=lambda one: one.whole)
    return Part(name, each, whole, large.split, large.could)


def layout_lines(found: Layout) -> list[str]:
    axes = ", ".join(f"{name} {size}" for name, size in found.mesh.items())
    rows = "" if found.rows == 1 else f" of {found.rows} rows"
    said = [f"{found.model_name} on a mesh of {found.devices} devices ({axes})"]
    for part in found.parts:
        name = f"cache, {found.context:,} tokens{rows}" if part.name == "cache" else part.name
        copies = "" if part.split == found.devices else f", {found.devices // part.split} copies"
        short = f" (it could be cut in {part.could})" if part.split < part.could else ""
        said.append(
            f"  {name:32}{part.each / 1e9:8.2f} GB on each, of {part.whole / 1e9:.2f} GB: "
            f"cut in {part.split}{copies}{short}"
        )
    said.append(f"  {'together':32}{found.each / 1e9:8.2f} GB on each")
    return said

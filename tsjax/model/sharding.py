# SPDX-License-Identifier: Apache-2.0
"""Where arrays live on a device mesh: logical axis names -> mesh axis names.

Knows meshes and the names of array dimensions. Does not know which arrays exist: the model names
logical axes only, and this is the single place that turns them into mesh axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from tsjax.base.errors import BadType, BadValue

AXES = ("data", "model", "slots")
MODEL = ("model", "slots")  # of weights: devices that hold slots of a cache share them as well


# Logical axis -> mesh axes: one after the other, each that the mesh has and that divides what those
# before it have left; an axis that none divides stays replicated.
SHARDING_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data",),
    "cache_rows": ("slots", "data"),  # see parts.py
    "cache_heads": ("model",),
    **dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), MODEL),
    **dict.fromkeys(("embed", "head_dim"), ()),
}


def usable_mesh(mesh: Mesh | None) -> Mesh | None:
    """The mesh with Auto axes, so that XLA places what lies between the named arrays.

    `jax.make_mesh` makes Explicit axes by default. A mesh with an axis that no rule names is
    refused: everything would be replicated over it silently.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise BadType(f"mesh={mesh!r} is not valid: a jax.sharding.Mesh or None")
    known = {axis for axes in SHARDING_RULES.values() for axis in axes}
    unknown = [axis for axis in mesh.axis_names if axis not in known]
    if unknown:
        raise BadValue(
            f"mesh axes {tuple(mesh.axis_names)} are not valid: {unknown} means nothing here; "
            f"use {' and '.join(sorted(repr(axis) for axis in known))}"
        )
    idle = set(range(jax.process_count())) - {one.process_index for one in mesh.devices.flat}
    if idle:
        raise BadValue(
            f"a mesh of {mesh.size} devices is not valid: process {min(idle)} of "
            f"{jax.process_count()} has none of them; take devices of all processes"
        )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def named_sharding(
    shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh | AbstractMesh
) -> NamedSharding:
    """The sharding of one array whose dimensions carry the logical names `axes`."""
    parts: list[str | tuple[str, ...] | None] = []
    used: set[str] = set()
    for size, axis in zip(shape, axes, strict=True):
        split: list[str] = []
        for one in wanted_axes(axis):
            count = math.prod(mesh.shape[name] for name in split)
            if one in mesh.shape and one not in used and size % (count * mesh.shape[one]) == 0:
                split.append(one)
        used.update(split)
        parts.append(tuple(split) if split[1:] else split[0] if split else None)
    return NamedSharding(mesh, PartitionSpec(*parts))


def wanted_axes(axis: str | None) -> tuple[str, ...]:
    """The mesh axes over which a dimension of that logical name is split where it divides."""
    return SHARDING_RULES[axis] if axis else ()


def everywhere(mesh: Mesh) -> NamedSharding:
    """Whole on each device."""
    return NamedSharding(mesh, PartitionSpec())


def parts_of(mesh: Mesh | AbstractMesh | None) -> int:
    """Parts over which the slots of a cache are dealt out."""
    return 1 if mesh is None else mesh.shape.get("slots", 1)


def placed(array: np.ndarray | jax.Array, sharding: Sharding | None) -> jax.Array:
    """An array that every process has, or that they hold together, where it is wanted."""
    is_shared = isinstance(array, jax.Array) and not array.is_fully_addressable
    if sharding is None or sharding.is_fully_addressable or is_shared:
        return jax.device_put(array, sharding)
    own = np.asarray(array)
    return jax.make_array_from_callback(own.shape, sharding, lambda index: own[index])


def held_here(shape: Sequence[int], sharding: NamedSharding | None) -> tuple[slice, ...]:
    """The smallest box of an array of that shape in which lies what this process holds of it."""
    if sharding is None:
        return tuple(slice(0, size) for size in shape)
    parts: Any = sharding.addressable_devices_indices_map(tuple(shape)).values()
    ends = [[part.indices(size) for part, size in zip(one, shape, strict=True)] for one in parts]
    return tuple(
        slice(min(one[0] for one in of_axis), max(one[1] for one in of_axis))
        for of_axis in zip(*ends, strict=True)
    )


def mesh_of(tree) -> Mesh | None:
    """The mesh the arrays of `tree` are placed on, None for a single device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None

# SPDX-License-Identifier: Apache-2.0
"""What each device of a mesh would hold, and whether it fits a card or the machine.

Knows how to name and print it; what is counted is decoding/held.py's. A mesh here is three sizes.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh

from tsjax.base.checks import check
from tsjax.base.model_config import ModelConfig
from tsjax.decoding.held import USABLE, held_by_text, weights_held
from tsjax.host.memory import available_bytes
from tsjax.methods.devices import GPUS
from tsjax.model.cache import cache_bytes
from tsjax.model.sharding import AXES, wanted_axes

# Counts of devices that are tried: few as they are, then those that machines come in.
COUNTS = (*range(1, 17), 32, 64, 128, 256, 512, 1024)


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
    for (path, spec, each), (*_, whole) in zip(
        weights_held(cfg, mesh), weights_held(cfg), strict=True
    ):
        wanted = {axis for one in spec.axes for axis in wanted_axes(one)}
        could = math.prod(sizes[axis] for axis in wanted)
        name = _name_of(path)
        found.setdefault(name, []).append(Part(name, each, whole, whole // each, could))
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


class Room(NamedTuple):
    """Attributes:
    device: the name of a card, or of what this machine has.
    memory: bytes of each of its devices, or free of all where they share it; None if nobody knows.
    devices: how many there are; None for any number.
    shared: whether simulated devices have these bytes together.
    """

    device: str
    memory: int | None
    devices: int | None = None
    shared: bool = False


def room_of(name: str | None) -> Room:
    """Of a card by its data sheet, of the "cpu", or what is free of this machine's first device."""
    if name not in (None, "cpu"):
        return Room(name, int(GPUS[name.replace("-", " ")].memory))
    try:
        here, *others = jax.devices(name)
    except (RuntimeError, AssertionError):  # a platform was asked for that is not here
        return Room("this machine", None)
    if here.platform == "cpu":
        return Room("this machine", available_bytes(here), shared=True)
    return Room(here.device_kind, available_bytes(here), 1 + len(others))


class Fit(NamedTuple):
    """Attributes:
    room: bytes of each device that weights and cache may take; None where nobody knows.
    fits: None where nobody knows.
    spare: bytes of each device that are left; below 0, that are missing.
    most_tokens: of each text, on this mesh; 0 where the weights alone are too much.
    fewest: the mesh of the fewest devices that have room, where this one does not fit.
    devices: how many there are, where the mesh has more.
    """

    device: str
    room: int | None = None
    fits: bool | None = None
    spare: int = 0
    most_tokens: int = 0
    fewest: dict[str, int] | None = None
    devices: int | None = None


def fit_of(found: Layout, cfg: ModelConfig, known: Room) -> Fit:
    """Whether a layout fits, and what would."""
    if known.memory is None:
        return Fit(known.device)
    most = known.devices or COUNTS[-1]
    room = int(USABLE * known.memory) // (found.devices if known.shared else 1)
    mesh, cache = AbstractMesh(tuple(found.mesh.values()), AXES), found.parts[-1].each

    def cache_of(tokens: int) -> int:
        return cache_bytes(cfg, found.rows, tokens, mesh)

    tokens = bisect.bisect_right(range(1, 2**40), room - (found.each - cache), key=cache_of)
    few = known.devices if found.devices > most else None
    fits = found.each <= room and few is None
    fewest = None if fits or known.shared else _fewest(found, cfg, room, most)
    return Fit(known.device, room, fits, room - found.each, tokens, fewest, few)


def _fewest(found: Layout, cfg: ModelConfig, room: int, most: int) -> dict[str, int] | None:
    """Of as many devices the mesh that leaves most room; of these the most parts of the model."""
    for count in (count for count in COUNTS if count <= most):
        parts = [part for part in range(count, 0, -1) if count % part == 0]
        meshes = [AbstractMesh((1, part, count // part), AXES) for part in parts]
        held = [held_by_text(cfg, found.rows, found.context, mesh) for mesh in meshes]
        if min(held) <= room:
            return dict(meshes[held.index(min(held))].shape)
    return None


def fit_line(found: Fit) -> str:
    if found.room is None:
        return f"whether it fits is not known: {found.device} does not say; --device names a card"
    is_card = found.device.replace("-", " ") in GPUS
    of_all = "of its memory" if is_card else "of what is free"
    room = f"the {found.room / 1e9:.2f} GB for each, nine tenths {of_all}"
    tokens = f"at most {found.most_tokens:,} tokens fit" if found.most_tokens else "no token fits"
    if found.fits:
        return f"fits {found.device}: {found.spare / 1e9:.2f} GB are left of {room}; {tokens}"
    why = f"{-found.spare / 1e9:.2f} GB more than {room}; {tokens}"
    if found.devices is not None:
        why = f"the mesh has more devices than the {found.devices} here"
    if found.fewest:
        shape = ",".join(map(str, found.fewest.values()))
        count = math.prod(found.fewest.values())
        why += f"; all fits on {count:,} device{'s' * (count > 1)}, MESH {shape}"
    return f"does not fit {found.device}: {why}"

# SPDX-License-Identifier: Apache-2.0
"""The functions of a run for a device: each is found on disk where it was finished before.

Knows where a program comes from: from memory, from disk, or made now. Does not know what it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from tsjax.base.telling import doing
from tsjax.decoding.programs import programs
from tsjax.files.checkpoint import Model
from tsjax.host import kept_programs, processes
from tsjax.host.compilation import counted_as_compiling, try_to_keep_programs, without_jaxs_folder

config: Any = jax.config
STATIC = (
    "cfg", "prompt_capacity", "mesh", "capacity", "part", "width", "count", "batch", "taps",
    "parts",
)  # fmt: skip


def programs_of(model: Model) -> Any:
    """The functions for the device where a model lies."""
    device = processes.own_device(model.params)
    if device.platform == "gpu":
        try_to_keep_programs()
    return programs_on(device.platform, model.cfg.dtype)


@functools.cache
def programs_on(platform: str, dtype: str) -> SimpleNamespace:
    made = vars(programs(platform, dtype))
    return SimpleNamespace(**{name: Program(name, one) for name, one in made.items()})


class Call(NamedTuple):
    """What a program is called with. What is static is given by name."""

    given: tuple[Any, ...]
    named: dict[str, Any]
    static: dict[str, Any]

    @classmethod
    def of(cls, given: tuple[Any, ...], named: dict[str, Any]) -> Call:
        static = {name: named[name] for name in STATIC if name in named}
        return cls(given, {k: v for k, v in named.items() if k not in static}, static)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.given, self.named

    @property
    def leaves(self) -> list[Any]:
        return jax.tree.leaves(self.arguments)

    def form(self) -> tuple[Any, ...]:
        """What calls of one compiled program have in common."""
        leaves, tree = jax.tree.flatten(self.arguments)
        static = tuple(self.static.items())
        return static, tree, tuple(map(_form_of, leaves)), kept_programs.settings()

    def device(self) -> Any:
        """The one device where all arrays lie; None where they lie on several."""
        placed = {leaf.sharding for leaf in self.leaves if isinstance(leaf, jax.Array)}
        devices = {device for sharding in placed for device in sharding.device_set}
        if not devices and config.jax_default_device is None:
            devices = {jax.devices()[0]}
        return devices.pop() if len(devices) == 1 and not processes.are_several() else None

    def abstract(self) -> Call:
        """With shapes in place of arrays."""
        return self._replace(
            given=jax.tree.map(_shape_of, self.given), named=jax.tree.map(_shape_of, self.named)
        )


def _form_of(leaf: Any) -> tuple[Any, ...]:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return (type(leaf),)
    return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), getattr(leaf, "sharding", 0)


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float):
        return leaf
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)


class Program:
    """A function of arrays, compiled once for each form of its arguments: where programs are kept,
    once on a machine. Arrays on several devices, and what holds functions of a user, are jax's."""

    def __init__(self, name: str, jitted: Any):
        self.name, self._jitted = name, jitted
        self._known: dict[Any, Callable] = {}  # by form; those that jax keeps are the jitted one
        self._whole: dict[str, Callable] = {}  # of them those that are kept, by words

    def __call__(self, *given: Any, **named: Any) -> Any:
        call = Call.of(given, named)
        if any(isinstance(leaf, Tracer) for leaf in call.leaves):
            return self._jitted(*given, **named)
        form = call.form()
        if form not in self._known:
            self._known[form] = self._had(call)
            if self._known[form] is self._jitted:
                with doing("compiling"):
                    return self._jitted(*given, **named)
        if self._known[form] is self._jitted:
            return self._jitted(*given, **named)
        return self._known[form](*call.given, **call.named)

    def _had(self, call: Call) -> Callable:
        """From disk, or compiled now; the jitted function where nothing is kept of it."""
        device = call.device()
        words = None if device is None else self.words_for(call, device)
        if words is None:
            return self._jitted
        if not self.has(words):
            self.load(words, device)
        if not self.has(words):
            with doing("compiling"):
                self._whole[words] = self.make(call, words)
        return self._whole[words]

    def has(self, words: str) -> bool:
        """Whether it is in memory."""
        return words in self._whole

    def load(self, words: str, device: Any) -> None:
        """From disk, if it is there."""
        with doing("reading a program"), counted_as_compiling():
            found = kept_programs.read_program(words, device)
        if found is not None:
            self._whole[words] = found

    def make(self, call: Call, words: str) -> Callable:
        """Compiles it, of arrays or of shapes, and keeps it."""
        with counted_as_compiling():
            lowered = self._jitted.lower(*call.given, **call.named, **call.static)
            with without_jaxs_folder():
                found = lowered.compile()
            kept_programs.keep_program(words, found)
        return found

    def words_for(self, call: Call, device: Any) -> str | None:
        """What it is kept by, for arrays on a device, or their shapes; None where it is not."""
        if kept_programs.safe_folder() is None or config.jax_disable_jit:
            return None
        try:
            return kept_programs.words_of(self.name, call.static, call.arguments, device)
        except kept_programs.NotKept:
            return None

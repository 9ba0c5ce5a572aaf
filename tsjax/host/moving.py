# SPDX-License-Identifier: Apache-2.0
"""Where a run can move to: to methods whose programs are there. Others are compiled beside it.

Knows which programs a method takes. Does not know which method is wanted, nor who compiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.method import PLAINLY
from tsjax.decoding.start import first_memory
from tsjax.decoding.state import DecodeState
from tsjax.files.checkpoint import Model
from tsjax.host import kept_programs, processes
from tsjax.host.beside import BESIDE, Asked
from tsjax.host.device_programs import Call, Program, programs_of
from tsjax.model.params import Params
from tsjax.model.sharding import mesh_of

SECONDS_PER_BYTE = 1e-7  # to read a program, which XLA links anew: 10 MB in a second


class Moves:
    """The methods that one run, or one batch, goes over to."""

    def __init__(self, model: Model, params: Callable[[Any], Params]):
        """`params` gives a method's arrays."""
        self._model, self._params = model, params
        device = processes.own_device(model.params)
        kept, alone = kept_programs.safe_folder() is not None, mesh_of(model.params) is None
        # Else what is not compiled yet is compiled when it is called.
        self.are_beside = kept and alone and device == jax.devices(device.platform)[0]
        self._asked: dict[Any, list[Asked]] = {}

    def is_there(self, decode: DecodeConfig, state: DecodeState) -> bool:
        """Whether a state can go on by it at no cost. Programs that this machine does not have are
        asked for. What nobody can compile beside the run is compiled when it is called."""
        absent = self._absent(decode, state)
        BESIDE.ask([one for one in absent if not kept_programs.is_kept(one.words)])
        return not absent

    def is_ready(self, decode: DecodeConfig, state: DecodeState) -> bool:
        """As `is_there`; what is on disk is read now. To read it beside the run would take more:
        both want all cores."""
        if self.is_there(decode, state):
            return True
        absent = self._absent(decode, state)
        if not all(kept_programs.is_kept(one.words) for one in absent):
            return False
        for one in absent:
            self._program(one).load(one.words, jax.devices(one.platform)[0])
        return self.is_there(decode, state)

    def seconds(self, decode: DecodeConfig, state: DecodeState) -> float:
        """That it takes to read what is on disk, and not in memory."""
        absent = self._absent(decode, state)
        return SECONDS_PER_BYTE * sum(kept_programs.bytes_of(one.words) for one in absent)

    def _absent(self, decode: DecodeConfig, state: DecodeState) -> list[Asked]:
        """Its programs that are not in memory."""
        BESIDE.look()
        key = decode, state.tokens.shape
        if key not in self._asked:
            self._asked[key] = self._programs(decode, state)
        return [one for one in self._asked[key] if not self._program(one).has(one.words)]

    def _program(self, asked: Asked) -> Program:
        return getattr(programs_of(self._model), asked.name)

    def _programs(self, decode: DecodeConfig, state: DecodeState) -> list[Asked]:
        """Those that can be compiled beside a run."""
        if not self.are_beside:
            return []
        device = processes.own_device(self._model.params)
        batch, capacity = state.tokens.shape
        cfg = first_memory_config(decode, None)
        how = {"cfg": cfg, "batch": batch, "capacity": capacity, "mesh": None}
        memory, stats = jax.eval_shape(functools.partial(first_memory, **how), None)
        begun = state.replace(memory=memory, stats=stats)
        calls = {
            "first_memory": Call.of((None,), how),
            "decode": Call.of((self._params(decode.method), begun, 1, 1), {"cfg": decode.in_steps}),
        }
        if decode.method == PLAINLY:  # nothing: compiled at once where it is wanted
            calls.pop("first_memory")
        found = []
        for name, call in calls.items():
            program, call = getattr(programs_of(self._model), name), call.abstract()
            words = program.words_for(call, device)
            if words is not None:
                found.append(Asked(name, device.platform, self._model.cfg.dtype, call, words))
        return found


def first_memory_config(decode: DecodeConfig, mesh: Any) -> DecodeConfig:
    """For what the program of a first memory is compiled: any prices, where the host can put in
    others. On a mesh it cannot, and a lazy prefill has a memory of its own."""
    return decode if mesh is not None or decode.prefill is not None else decode.in_steps


def plainly(decode: DecodeConfig) -> DecodeConfig:
    return dataclasses.replace(decode, method=PLAINLY)

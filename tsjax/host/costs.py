# SPDX-License-Identifier: Apache-2.0
"""The table of costs that a method chooses by: measured once on a machine, and kept in a file.

Knows what a table depends on, and the user's cache folder. Does not know how a table is measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
from jax.core import Tracer

from tsjax.base.input_files import read_json
from tsjax.base.model_config import ModelConfig
from tsjax.base.telling import doing
from tsjax.decoding.method import PLAINLY, Measured, Method, Tried
from tsjax.files.checkpoint import Model, tsjax_version
from tsjax.host import processes
from tsjax.host.compilation import kind_of_machine
from tsjax.host.info import cores
from tsjax.host.measured_files import keep_measured, kept_measured, measured_file, write_measured
from tsjax.host.measuring import context_bucket, device_in, measure, pieces
from tsjax.host.memory import available_bytes
from tsjax.methods import resolve_method
from tsjax.methods.auto import Choice
from tsjax.methods.cost_model import Costs, as_costs
from tsjax.methods.devices import device_of, estimated
from tsjax.model.params import Params
from tsjax.model.sharding import mesh_of

# Of a run's seconds those that measuring may take, by pieces that take about so many; and bytes
# that have to be free for its buffers.
MEASURING_SHARE, PIECE, ROOM = 0.02, 0.3, 2**31
TOO_FAST = 0.7  # of a plain step by the table
_KNOWN: dict[str, Costs] = {}  # by what `_key` says


def choose_method(method: Any, model: Model, context: int, *, batch: int = 1) -> Choice:
    """What a method begins with for a model, on the device where it lies: what `Auto` chooses.

    Args:
      method: a method's name or dataclass.
      model: what tsjax.load returns. Where its weights are shapes alone, or traced, costs are
        estimated.
      context: mean length of the rows during the run, prompt included.
      batch: rows.

    Returns:
      The method that drafts, what one of its steps costs in steps of plain decoding (None where
      that is not known), and the table of seconds that says so, the method's or this machine's.
    """
    method = resolve_method(method)
    costs = getattr(method, "costs", None) or costs_of(model.params, model.cfg, batch, context)
    measured = measured_on(PLAINLY, model, context, batch)._replace(costs=costs)
    chosen = method.next(measured)
    promise = chosen.promise(model.cfg, costs, context)
    step_cost = None if promise is None else promise.seconds / costs.plain(context)
    return Choice(chosen, step_cost, costs)


def measured_on(
    method: Method, model: Model, context: int, batch: int, new_tokens: int | None = None
) -> Measured:
    """What is known before the first step; the costs where the method wants them, and they were
    measured before. Else a formula says them, and a long run measures them in pieces."""
    platform, kind = device_in(model.params)
    costs = known_costs(model.params, model.cfg, batch, context) if method.wants_costs else None
    plain = earlier_plain(model, batch, context) if method.wants_costs else None
    return Measured(model.cfg, platform, kind, context, batch, new_tokens, costs=costs, plain=plain)


def costs_of(params: Params, cfg: ModelConfig, batch: int, context: float) -> Costs:
    """The table of a model on the device where it lies, for runs whose rows have `context` tokens
    on average: known, from the file, or measured now."""
    if not _can_run(params):
        return estimated(cfg, device_of(*device_in(params)), batch)
    found = known_costs(params, cfg, batch, context)
    if found is None:
        with doing("measuring"):
            found = measure(params, cfg, batch, context_bucket(int(2 * context)))
        _keep(found, params, cfg, batch, context)
    return found


def _can_run(params: Params) -> bool:
    leaves = jax.tree.leaves(params)
    return all(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) for leaf in leaves)


def known_costs(params: Params, cfg: ModelConfig, batch: int, context: float) -> Costs | None:
    """What was measured before, in this process or another one."""
    if not _can_run(params):
        return None
    key = _key(params, cfg, batch, context)
    # Several processes may have other files each, and they have to agree.
    if key not in _KNOWN and not processes.are_several():
        kept = kept_measured(key)
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if kept is not None:
                _KNOWN[key] = as_costs(kept["costs"])
    return _KNOWN.get(key)


def _keep(costs: Costs, params: Params, cfg: ModelConfig, batch: int, context: float) -> None:
    key = _key(params, cfg, batch, context)
    _KNOWN[key] = costs
    if not processes.are_several():
        keep_measured(key, {"costs": costs})


def earlier_plain(model: Model, batch: int, context: float) -> Tried | None:
    """Plain decoding as an earlier run knew it; None where none was long enough."""
    file = _plain_file(model, batch, context)
    if file is None:
        return None
    try:
        kept = read_json(os.fspath(file))
        seconds, at = float(kept["seconds"]), int(kept["context"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return Tried(PLAINLY, seconds, at, 1.0) if 0 < seconds < math.inf else None


def keep_plain(model: Model, batch: int, context: float, seconds: float, at: int) -> None:
    """What a plain step took `at` so many tokens, for later runs like this one, which then need
    none of their own to know whether drafts pay."""
    file = _plain_file(model, batch, context)
    if file is not None:
        write_measured(file, {"seconds": seconds, "context": at})


def _plain_file(model: Model, batch: int, context: float) -> Path | None:
    if processes.are_several() or not _can_run(model.params):
        return None
    return measured_file(_key(model.params, model.cfg, batch, context), ".plain.json")


class Measuring:
    """The table of costs, measured in pieces within a run that wants one and has none: for what is
    left of it, and for later runs."""

    def __init__(self, model: Model, wanted: bool, batch: int, context: float):
        free = available_bytes(processes.own_device(model.params)) if wanted else 0
        self._given = model.params, model.cfg, batch, context
        self._wanted = wanted and not processes.are_several() and (free is None or free > ROOM)
        self._going: Generator[None, None, Costs] | None = None
        self._spent = 0.0

    def go_on(self, elapsed: float) -> Costs | None:
        """A few pieces, as far as the run's seconds allow; the table, when it is whole."""
        while self._wanted and self._spent + PIECE <= MEASURING_SHARE * elapsed:
            params, cfg, batch, context = self._given
            going = self._going or pieces(params, cfg, batch, context_bucket(int(2 * context)))
            self._going, begun = going, time.perf_counter()
            try:
                with doing("measuring"):
                    next(going)
            except StopIteration as end:
                self._wanted, self._going = False, None
                _keep(end.value, *self._given)
                return end.value
            self._spent += time.perf_counter() - begun
        return None


def contradicts(costs: Costs | None, seconds: float, context: float) -> bool:
    """Whether plain steps of a run took so little that the machine was busy when it was measured.

    The least of several calls is kept, so a run takes about as long, or longer.
    """
    if costs is None or costs.origin != "measured":
        return False
    return seconds < TOO_FAST * costs.plain(context)


def forget(params: Params, cfg: ModelConfig, batch: int, context: float) -> None:
    """The next run measures anew."""
    key = _key(params, cfg, batch, context)
    _KNOWN.pop(key, None)
    file = measured_file(key)
    if file is not None:
        with contextlib.suppress(OSError):
            file.unlink()


def _key(params: Params, cfg: ModelConfig, batch: int, context: float) -> str:
    """All that the seconds depend on."""
    mesh = mesh_of(params)
    facts = {
        "device": device_in(params),
        "mesh": None if mesh is None else dict(mesh.shape),
        "cpus": cores(),
        "machine": kind_of_machine(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "jax": jax.__version__,
        "tsjax": tsjax_version(),
        "measured": 6,  # grows when other things are measured
        "longest": context_bucket(int(2 * context)),
        "model": cfg.to_dict(),
        "batch": batch,
    }
    return json.dumps(facts, sort_keys=True)

# SPDX-License-Identifier: Apache-2.0
"""How large a run is: its passes, its slots, its positions, and whether it fits into memory.

Knows a Request and the device. Nothing is allocated.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tsjax.base.checks import check, check_int
from tsjax.base.errors import BadValue
from tsjax.decoding.held import state_bytes, temporary_bytes
from tsjax.files.checkpoint import Model
from tsjax.host.info import memory_share
from tsjax.host.memory import available_bytes
from tsjax.host.processes import least, own_device
from tsjax.host.request import Request
from tsjax.model.cache import cache_bytes
from tsjax.model.sharding import mesh_of

SMALLEST_CAPACITY = 2048
LARGEST_DOUBLING = 32768
SMALLEST_PREFILL = 16
NARROW_PREFILL, WIDE_PREFILL = 512, 2048


def check_positions(request: Request) -> None:
    prompt, limit = max(request.prompt_length), request.decode.model.max_positions
    if max(request.max_length) <= limit or request.exceed_max_positions:
        return
    remedy = "or pass exceed_max_positions=True (--exceed-max-positions); quality will suffer"
    if prompt >= limit:
        raise BadValue(
            f"prompt of {prompt} tokens is not valid: the model has {limit} positions, the new "
            f"tokens included; shorten it, {remedy}"
        )
    raise BadValue(
        f"max_new_tokens={request.config.max_new_tokens} is not valid: with a prompt of {prompt} "
        f"tokens it goes beyond the model's {limit} positions; at most {limit - prompt}, {remedy}"
    )


def capacity_of(request: Request, wanted: int | None, prefill_width: int) -> int:
    """The slots a user asked for, if they suffice, or the bucket that holds the run."""
    # A step writes the rows of its longest path, of which the last ones may be in vain.
    decode = request.decode
    read = [request.prefix_length + sum(widths) for widths in request.prefill_widths]
    read.append(max(request.prompt_length) - 1 + sum(request.made_widths))
    read.append(max(request.prefix_widths, default=0))
    needed = max(max(request.max_length) + decode.rows_ahead, *read)
    if wanted is None:
        return capacity_bucket(needed)
    check_int(wanted, "capacity", 1)
    depth, ahead = decode.sizes.depth, decode.rows_ahead
    enough = (
        f"at least {needed} slots for this prompt, "
        f"max_new_tokens={request.config.max_new_tokens}, prefill_width={prefill_width} and "
        f"{depth} drafted tokens in a step" + (f" or revive_rows={ahead}" if ahead > depth else "")
    )
    check(wanted >= needed, "capacity", wanted, enough)
    return wanted


def wide_prefill(platform: str, rows: int) -> int:
    """Tokens per pass of a prefill where memory allows: so many rows of all texts fill a GPU."""
    if platform != "gpu":
        return NARROW_PREFILL
    return max(NARROW_PREFILL, WIDE_PREFILL >> (rows - 1).bit_length())


def widths_of(count: int, width: int) -> list[int]:
    """Passes that cover `count` tokens: full ones, then a power of two, for few programs."""
    full, rest = divmod(count, width)
    if rest == 0:
        return [width] * full
    last = max(SMALLEST_PREFILL, 1 << (rest - 1).bit_length())
    return [width] * full + [min(last, width)]


def capacity_bucket(needed: int, smallest: int = SMALLEST_CAPACITY) -> int:
    if needed > LARGEST_DOUBLING:
        return -(-needed // LARGEST_DOUBLING) * LARGEST_DOUBLING
    return max(smallest, 1 << (needed - 1).bit_length())


def memory_shortage(request: Request, model: Model) -> str | None:
    """Why a run cannot fit, before a byte of it is allocated; None where it can."""
    mesh, decode, second = mesh_of(model.params), request.decode, request.draft_model
    rows, slots = len(request.rows), request.capacity
    passes = [*request.prefill_widths, request.made_widths, request.prefix_widths]
    widest = max((width for part in passes for width in part), default=1)
    sizes = state_bytes(
        decode,
        request.config,
        rows,
        slots,
        prompt_capacity=request.prompt_capacity,
        read_once=0 if request.of_rows is None else max(request.of_rows) + 1,
        prefixes=1 if request.prefix_widths else 0,
        has_processors=bool(request.processors),
        mesh=mesh,
    ) | {
        "weights in int8": model.int8_bytes if request.may_want_int8 else 0,
        "the corpus": 0 if request.corpus is None else request.corpus.nbytes,
        "a copy of the second model": 0 if second is None else second.bytes_beside(model),
        "temporary arrays, an estimate": temporary_bytes(decode, rows, slots, widest, mesh),
    }
    device = own_device(model.params)
    if device.platform == "cpu" and mesh is not None:  # simulated devices share one memory
        sizes = {name: size * mesh.size for name, size in sizes.items()}
    needed, available = sum(sizes.values()), available_bytes(device)
    if available is not None:
        available = int(least(available))
    if available is None or needed <= available:
        return None
    parts_of_it = ", ".join(f"{size:,} for {name}" for name, size in sizes.items() if size)
    remedies = "; ".join(_remedies(request, device, mesh))
    return (
        f"not enough memory: capacity={slots} slots for {rows} rows take {needed:,} bytes per "
        f"device, {available:,} are free: {parts_of_it}; {remedies}"
    )


def _remedies(request: Request, device: Any, mesh: Any) -> list[str]:
    """What would make a run smaller, or leave it more memory."""
    decode = request.decode
    shorter = "lower max_new_tokens, shorten or split the batch"
    if jnp.dtype(decode.model.dtype).itemsize > 2:
        shorter += ", or load the model as bfloat16"
    found = [shorter]
    if decode.sizes.width > 1:
        found.append("method='autoregressive' remembers and scores less")
    if mesh is not None:
        one, each = (cache_bytes(decode.model, len(request.rows), 1024, on) for on in (None, mesh))
        copies = mesh.size * each // one
        if copies > 1:
            found.append(
                f"the {mesh.size} devices hold {copies} copies of the cache: more of them along "
                "an axis 'slots' of their mesh split it, see tsjax fits"
            )
    share = memory_share() if device.platform == "gpu" else None
    if share is not None and share < 0.9:
        found.append(
            f"jax takes {share:.0%} of a GPU's memory: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 "
            "before it starts to give it more"
        )
    return found

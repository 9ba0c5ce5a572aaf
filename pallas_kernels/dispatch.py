# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operation runs, and how a kernel runs on a device mesh."""

from __future__ import annotations

import functools
import hashlib
import marshal
import re
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec


class Implementation(NamedTuple):
    """One way to compute an operation.

    `run` raises NotImplementedError, while it is traced, for a case it cannot serve.
    """

    name: str
    platform: str | None  # what it can be compiled for; None: everything
    run: Callable


def of_all_rows(run: Callable) -> Callable:
    """An implementation that computes all rows, whatever its last operand says of them."""
    return lambda *arrays: run(*arrays[:-1])


def serving(implementations: Sequence[Implementation], platform: str) -> list[Implementation]:
    """Those that can be compiled for a platform ("cpu", "cuda", ...), in the order of choice."""
    return [one for one in implementations if one.platform in (platform, None)]


def run(implementations: Sequence[Implementation], arrays, *, name: str | None = None):
    """The result of the first implementation that serves the case on the platform compiled for.

    The platform is known when the program is lowered, not before, so a program that is compiled
    ahead of time for another machine gets that machine's implementation. A `name` asks for one
    implementation and no other: it raises what that one raises.
    """
    if name is not None:
        names = [one.name for one in implementations]
        if name not in names:
            raise ValueError(f"implementation={name!r} is not valid: one of {', '.join(names)}")
        implementations = [one for one in implementations if one.name == name]
    # In their order, so that each process lowers the same program and finds it where it was kept.
    platforms = dict.fromkeys(one.platform for one in implementations if one.platform is not None)
    branches = {platform: _first(serving(implementations, platform)) for platform in platforms}
    if general := [one for one in implementations if one.platform is None]:
        anywhere = _first(general)
        if not branches:
            return anywhere(*arrays)
        branches = {name: with_derivative_of(anywhere, f) for name, f in branches.items()}
        branches["default"] = anywhere
    return lax.platform_dependent(*arrays, **branches)


def with_derivative_of(other: Callable, function: Callable) -> Callable:
    """`function` for values, `other` for forward derivatives, which a kernel does not have."""
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(other, primals, tangents))
    return wrapped


def _first(implementations: Sequence[Implementation]) -> Callable:
    """A function that runs the first of them that does not refuse."""

    def call(*arrays):
        refusals = []
        for one in implementations:
            try:
                return one.run(*arrays)
            except NotImplementedError as refusal:
                refusals.append(f"{one.name}: {refusal}")
        raise NotImplementedError("; ".join(refusals))

    return call


def on_each_device(rule: str, *, group: int, leader: str = "b k s h") -> Callable:
    """A decorator that tells XLA how to split a kernel, as XLA cannot look into one.

    `rule` names the dimensions of the operands and of the results, in the notation of Shardy. Those
    called b and k (batch rows and kv heads) are split like those of the `leader`, an operand, by
    default the cache. Everything else is whole on every device. (k g) are query heads, `group` of
    them for each kv head.
    """
    names = leader.split()
    leading, heads = (
        [one.split() for one in rule.split("->")[0].split(",")].index(names),
        names.index("k"),
    )

    def decorate(kernel: Callable) -> Callable:
        def call(*arrays):
            return _split(kernel, rule, leading, arrays[leading].shape[heads], group)(*arrays)

        return call

    return decorate


def _split(kernel: Callable, rule: str, leading: int, heads: int, group: int) -> Callable:
    """`kernel` for `heads` kv heads, split like the operand number `leading`."""
    sizes: dict[str, Any] = {"g": group}
    if 1 in (heads, group):  # a factor of 1 may not be part of a product
        rule, sizes = rule.replace("(k g)", "k" if group == 1 else "g"), {}
    operands, results = (
        [[part.split()[0].strip("()") for part in _dimensions(array)] for array in side.split(",")]
        for side in rule.split("->")
    )
    # Shardy wants them in the order in which they appear.
    factors = dict.fromkeys(re.findall(r"\w+", f"{MARKED}{rule}"))
    whole = tuple(name for name in factors if name not in ("b", "k"))
    marked = mark_of(kernel)
    split = custom_partitioning(marked.kernel)

    def partition(mesh, arg_shapes, result_shape):
        found = arg_shapes[1 + leading].sharding.spec
        spec = dict(zip(operands[leading], (*found, *(None,) * 5), strict=False))
        axes = {name: spec[name] for name in ("b", "k")}

        def sharding(dims):
            return NamedSharding(mesh, PartitionSpec(*(axes.get(name) for name in dims)))

        made = tuple(map(sharding, results))
        given = tuple(map(sharding, [(), *operands]))
        return mesh, marked.kernel, made if made[1:] else made[0], given

    split.def_partition(
        partition, sharding_rule=f"{MARKED}{rule}", need_replication_factors=whole, **sizes
    )
    return _fold_batches(lambda *arrays: split(marked.mark(), *arrays))


class Marked(NamedTuple):
    """A kernel with one operand more, which it does not read, and what makes that operand.

    Where a kernel runs on several devices, the program that jax keeps names no more of it than its
    shapes: two kernels, or one with two settings, would be the same program. The operand is a
    constant, another one for each of them, and is gone once XLA has compiled.
    """

    kernel: Callable
    mark: Callable


MARKED = "mark, "  # before a rule: the operand's dimension, which has one element


def mark_of(kernel: Callable) -> Marked:
    number = int.from_bytes(hashlib.sha256(_told(kernel).encode()).digest()[:4])
    return Marked(lambda _, *arrays: kernel(*arrays), lambda: jnp.full((1,), number, jnp.uint32))


def _told(value: Any) -> str:
    """What a kernel is made of, in words that are the same in each process."""
    if isinstance(value, functools.partial):
        settings = sorted(value.keywords.items())
        return f"{_told(value.func)}({[*map(_told, value.args)]}, {[*map(_told, settings)]})"
    if isinstance(value, FunctionType):
        # Of version 2: what later ones write depends on who else holds a constant.
        code = hashlib.sha256(marshal.dumps(value.__code__, 2)).hexdigest()
        cells = [_told(cell.cell_contents) for cell in value.__closure__ or ()]
        given = _told((value.__defaults__ or (), *sorted((value.__kwdefaults__ or {}).items())))
        return f"{value.__module__}.{value.__qualname__} {code} {cells} {given}"
    if isinstance(value, tuple):
        return f"{[*map(_told, value)]}"
    return repr(value)


def _fold_batches(kernel: Callable) -> Callable:
    """`kernel`, whose operands all begin with batch rows, with a rule for jax.vmap: the new axis
    becomes more of them."""
    function = custom_vmap(lambda *arrays: kernel(*arrays))

    @function.def_vmap
    def rule(size, batched, *arrays):
        whole = [
            array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
            for array, is_batched in zip(arrays, batched, strict=True)
        ]
        rows = whole[0].shape[1]
        out = function(*(array.reshape(-1, *array.shape[2:]) for array in whole))

        def unfold(out):
            return out.reshape(size, rows, *out.shape[1:])

        return jax.tree.map(unfold, out), jax.tree.map(lambda _: True, out)

    return function


def _dimensions(array: str) -> list[str]:
    """The dimensions of one array of a rule: "b (k g) h" -> ["b", "(k g)", "h"]."""
    return re.findall(r"\([^)]*\)|\S+", array)

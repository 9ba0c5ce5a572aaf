# SPDX-License-Identifier: Apache-2.0
"""The public functions: check their arguments, then call the first implementation that serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import check_arrays, check_length, check_live
from pallas_kernels.narrow_rows import NarrowRows, as_array
from pallas_kernels.tree_attention import native, xla
from pallas_kernels.typing import Array, Bool, Float, Int, Integer, accumulation_dtype


class Summary(NamedTuple):
    """Many slots as one, for each query head: how a query saw them, or how it is to see them.

    Attributes:
      mean: in the queries' type, their values by their weights.
      log_total: in the type of the sums, the logarithm of the sum of exp(score).
    """

    mean: Float[Array, "B N H"]
    log_total: Float[Array, "B N"]


class Ranks(NamedTuple):
    """Which committed slots a row sees: those of a lower rank than its own.

    Attributes:
      slots: beyond `length` anything.
      rows: of the fresh rows.
    """

    slots: Int[Array, "B S"]
    rows: Int[Array, "B T"]


def tree_attention(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B K S H"] | NarrowRows,
    v_cache: Float[Array, "B K S H"] | NarrowRows,
    length: Integer[Array, "B"],
    k_new: Float[Array, "B T K H"],
    v_new: Float[Array, "B T K H"],
    tree_mask: Bool[Array, "T T"] | Bool[Array, "B T T"],
    *,
    ranks: Ranks | None = None,
    rest: Summary | None = None,
    live: Int[Array, "B"] | None = None,
    with_log_totals: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attention of T fresh rows to `length` committed slots and, by `tree_mask`, to each other.

    The cache is only read, and only its first `length` slots: the cost follows `length`, not the
    capacity, and slots beyond it may hold anything, NaN included. Scores are scaled by H**-0.5 and
    summed in float32 (float64 for float64 inputs).

    Args:
      q: queries.
      k_cache, v_cache: committed keys and values; N is a multiple of K. Narrow rows are read as
        the numbers of q's type that they stand for.
      length: committed slots of each batch row, at most S.
      k_new, v_new: keys and values of the fresh rows.
      tree_mask: tree_mask[t, u] or [b, t, u]: row t sees fresh row u. What a row gets that sees
        nothing at all is unspecified, but its log total, which is -1e29 or less.
      ranks: which committed slots a row sees; None is all of them.
      rest: slots that are not here; all rows of a query head see them as one slot with the value
        rest.mean and the score rest.log_total.
      live: how many fresh rows of each batch row are wanted, the first ones; what the others get is
        unspecified. The native kernel leaves them out.
      with_log_totals: to have both results, which together are a `Summary` of each row.
      implementation: "triton", "native" or "xla" to have that one or an error; None for the first
        that serves.

    Returns:
      [B, T, N, H] in q's type; and, if asked for, [B, T, N] in the type of the sums: the logarithm
      of the sum of exp(score) of what a row sees.
    """
    arrays = dict(
        q=q, k_cache=k_cache, v_cache=v_cache, length=length, k_new=k_new, v_new=v_new,
        tree_mask=tree_mask,
    )  # fmt: skip
    arrays = {name: as_array(array) for name, array in arrays.items()}
    check_arrays(
        arrays,
        dict(
            q="B T N H",
            k_cache="B K S H",
            v_cache="B K S H",
            length="B",
            k_new="B T K H",
            v_new="B T K H",
            tree_mask=("T T", "B T T"),
        ),
        floats=("q", "k_cache", "v_cache", "k_new", "v_new"),
        integers=("length",),
        bools=("tree_mask",),
    )
    check_length(arrays["length"], arrays["k_cache"].shape[2])
    mean, log_total = (None, None) if rest is None else _checked_rest(rest, arrays["q"])
    slots, rows = (None, None) if ranks is None else _checked_ranks(ranks, arrays)
    check_live(live, arrays["q"])
    operands = (*arrays.values(), mean, log_total, slots, rows, live)
    with jax.named_scope("tree_attention"):
        both = dispatch.run(IMPLEMENTATIONS, operands, name=implementation)
        return both if with_log_totals else both[0]


def _checked_ranks(ranks: Ranks, arrays: Mapping[str, Array]) -> Ranks:
    B, T, S = *arrays["q"].shape[:2], arrays["k_cache"].shape[2]
    ranks = Ranks(jnp.asarray(ranks.slots), jnp.asarray(ranks.rows))
    for name, shape in (("slots", (B, S)), ("rows", (B, T))):
        found = getattr(ranks, name)
        if found.dtype != jnp.int32 or found.shape != shape:
            raise ValueError(
                f"ranks.{name} of shape {found.shape} and type {found.dtype} is not valid: {shape} "
                "of int32, by q and k_cache"
            )
    return ranks


def _checked_rest(rest: Summary, q: Array) -> Summary:
    mean, log_total = map(jnp.asarray, rest)
    B, _, N, H = q.shape
    wide = accumulation_dtype(q.dtype)
    for name, array, shape, dtype in (
        ("rest.mean", mean, (B, N, H), q.dtype),
        ("rest.log_total", log_total, (B, N), wide),
    ):
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{name} of shape {array.shape} and type {array.dtype} is not valid: {shape} "
                f"of {dtype}, by q"
            )
    return Summary(mean, log_total)


def decode_attention(
    q: Float[Array, "B N H"],
    k_cache: Float[Array, "B K S H"] | NarrowRows,
    v_cache: Float[Array, "B K S H"] | NarrowRows,
    length: Integer[Array, "B"],
    k_new: Float[Array, "B K H"],
    v_new: Float[Array, "B K H"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B N H"]:
    """Attention of one fresh row per batch row to `length` committed slots and to itself.

    `tree_attention` for T = 1, without the dimension.
    """
    arrays = dict(
        q=q, k_cache=k_cache, v_cache=v_cache, length=length, k_new=k_new, v_new=v_new
    )  # fmt: skip
    arrays = {name: as_array(array) for name, array in arrays.items()}
    check_arrays(
        arrays,
        dict(
            q="B N H",
            k_cache="B K S H",
            v_cache="B K S H",
            length="B",
            k_new="B K H",
            v_new="B K H",
        ),
        floats=("q", "k_cache", "v_cache", "k_new", "v_new"),
        integers=("length",),
    )
    q, k_cache, v_cache, length, k_new, v_new = arrays.values()
    q, k_new, v_new = (x[:, None] for x in (q, k_new, v_new))
    itself = jnp.ones((1, 1), bool)
    out = tree_attention(
        q, k_cache, v_cache, length, k_new, v_new, itself, implementation=implementation
    )
    return out[:, 0]


def _triton(*operands: Any) -> tuple[Array, Array]:
    from pallas_kernels.tree_attention import triton

    return triton.tree_attention(*operands)


IMPLEMENTATIONS = (
    dispatch.Implementation("triton", "cuda", dispatch.of_all_rows(_triton)),
    dispatch.Implementation("native", "cpu", native.tree_attention),
    dispatch.Implementation("xla", None, dispatch.of_all_rows(xla.tree_attention)),
)

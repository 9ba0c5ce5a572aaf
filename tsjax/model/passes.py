# SPDX-License-Identifier: Apache-2.0
"""One pass of the model over rows that follow a cache. Reads caches, never writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import Ranks, Summary, tree_attention
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Bool, Float, Int
from tsjax.model.cache import Attended, Cache
from tsjax.model.parts import attention_by_part
from tsjax.model.transformer import ModelWeights, apply_layers, embed

# Traced once for all layers, see `apply_layers`.
_tree_attention = jax.jit(tree_attention, static_argnames=("with_log_totals",))
_attention_by_part = jax.jit(attention_by_part, static_argnames=("parts",))


class Rows(NamedTuple):
    """What a pass yields for its T rows; tuples have one entry for each layer that ran.

    `query` is summed over the query heads of each kv head: what `cache_scores` takes.
    """

    hidden: Float[Array, "B T D"]  # after the last of them, before the final norm
    k: tuple[Float[Array, "B T K H"], ...]
    v: tuple[Float[Array, "B T K H"], ...]
    query: tuple[Float[Array, "B T K H"], ...]
    attended: tuple[Attended, ...] = ()  # with T after B
    taps: tuple[Float[Array, "B T D"], ...] = ()  # after the layers that were asked for


def run_rows(
    weights: ModelWeights,
    cache: Cache,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    mask: Bool[Array, "T T"] | Bool[Array, "B T T"],
    *,
    cfg: ModelConfig,
    rest: tuple[Summary, ...] = (),
    live: Int[Array, "B"] | None = None,
    with_attended: bool = False,
    taps: Sequence[int] = (),
) -> Rows:
    """One pass of T rows that see the cached tokens and, where `mask` says, one another.

    Args:
      mask: which row sees which.
      rest: of each layer, tokens that are not in the cache and that rows see summed up.
      live: how many rows of each batch row are wanted, the first ones; None is all. What there is
        of the others is unspecified.
      with_attended: whether to fill in Rows.attended.
      taps: after how many layers to fill in Rows.taps.
    """
    return run_layers(
        weights,
        cache,
        embed(weights, tokens),
        positions,
        mask,
        range(cfg.num_layers),
        cfg=cfg,
        rest=rest,
        live=live,
        with_attended=with_attended,
        taps=taps,
    )


def run_layers(
    weights: ModelWeights,
    cache: Cache,
    hidden: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    mask: Bool[Array, "T T"] | Bool[Array, "B T T"],
    layers: range,
    *,
    cfg: ModelConfig,
    ranks: Ranks | None = None,
    rest: tuple[Summary, ...] = (),
    live: Int[Array, "B"] | None = None,
    with_attended: bool = False,
    taps: Sequence[int] = (),
) -> Rows:
    """As `run_rows`, but `layers` only, on `hidden`, what the layer before them gave.

    `ranks` says which cached rows a row sees; None is all. No `rest` goes with a cache that is
    dealt out to parts.
    """
    queries, attended = [], []

    def attend(layer: int, q, k, v):
        B, T, _, H = q.shape
        grouped = q.reshape(B, T, cfg.num_kv_heads, cfg.group_size, H)
        queries.append(jnp.sum(grouped, axis=3))
        seen = q, cache.k[layer], cache.v[layer], cache.rows_in(layer), k, v, mask
        if cache.parts > 1:
            mixed, log_totals = _attention_by_part(*seen, ranks=ranks, parts=cache.parts)
        else:
            mixed, log_totals = _tree_attention(
                *seen,
                ranks=ranks,
                rest=rest[layer] if rest else None,
                live=live,
                with_log_totals=True,
            )
        if with_attended:
            attended.append(Attended(q, Summary(mixed, log_totals)))
        return mixed

    hidden, k, v, tapped = apply_layers(
        weights,
        hidden,
        positions=positions,
        attend=attend,
        cfg=cfg,
        layers=layers,
        live=live,
        taps=taps,
    )
    return Rows(hidden, k, v, tuple(queries), tuple(attended), tapped)

# SPDX-License-Identifier: Apache-2.0
"""Draft heads, TokenSwift's chained ones and Medusa's parallel ones: declared once, run by one
function.

Knows the heads' shapes and arithmetic. Does not know where their hidden state comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import add_rms_norm, rms_norm
from tsjax.base.model_config import CHAINED, OWN_VOCABULARY, ModelConfig
from tsjax.base.typing import Array, Float, accumulation_dtype
from tsjax.model.layers import linear
from tsjax.model.param_spec import ParamSpec
from tsjax.model.transformer import ModelWeights, final_norm, unembed


class HeadWeights(flax.struct.PyTreeNode):
    """One head of the chain."""

    linear: Any  # [D, D]
    norm_in: Any  # [D]
    norm_out: Any  # [D]


class ParallelHead(flax.struct.PyTreeNode):
    """One of Medusa's heads (arXiv 2401.10774), all of which read the same state."""

    block: Any  # [D, D]
    block_bias: Any  # [D]
    unembed: Any = None  # [V, D]; None where the model's own matrix makes the logits


Head = HeadWeights | ParallelHead


def declare_heads(cfg: ModelConfig) -> tuple[Head, ...]:
    """As `declare_model`: a tree of ParamSpec, one entry per head."""
    D, V = cfg.embed_dim, cfg.vocab_size
    matrix = ParamSpec((D, D), ("embed", "embed"), cfg.dtype, inputs=1)
    norm, bias = (ParamSpec((D,), ("embed",), cfg.dtype, init) for init in ("ones", "zeros"))
    own = ParamSpec((V, D), ("vocab", "embed"), cfg.dtype, inputs=1)
    if cfg.head_kind == CHAINED:
        head = HeadWeights(linear=matrix, norm_in=norm, norm_out=norm)
    else:
        head = ParallelHead(matrix, bias, own if cfg.head_kind == OWN_VOCABULARY else None)
    return (head,) * cfg.num_draft_heads


def run_heads(
    heads: Sequence[Head],
    weights: ModelWeights,
    hidden: Float[Array, "B *rows D"],
    *,
    cfg: ModelConfig,
) -> Float[Array, "B {len(heads)} *rows D"]:
    """The normed states that a vocabulary matrix turns into the heads' logits.

    `hidden` is h, the last layer's output before the final norm. The first head looks one token
    further than the model itself, each of the others one further than the head before it.

    Chained: h_i = h_{i-1} + linear_i(rms(h_{i-1}, norm_in_i)) from h_0 = h, and head i's state is
    rms(h_i, norm_out_i). Parallel: head i's state is x + silu(block_i(x) + bias_i), where x is what
    the model's unembedding takes, its final norm of h.
    """
    with jax.named_scope("heads"):
        of_kind = _chained if cfg.head_kind == CHAINED else _parallel
        return jnp.stack(of_kind(heads, weights, hidden, cfg), axis=1)


def _chained(
    heads: Sequence[Any], weights: ModelWeights, hidden: Float[Array, "B *rows D"], cfg: ModelConfig
) -> list[Float[Array, "B *rows D"]]:
    states = []
    for head in heads:
        normed = rms_norm(hidden, head.norm_in, cfg.norm_eps)
        deeper = linear(normed, head.linear, out_dtype=accumulation_dtype(cfg.dtype))
        hidden, state = add_rms_norm(hidden, deeper, head.norm_out, cfg.norm_eps)
        states.append(state)
    return states


def _parallel(
    heads: Sequence[Any], weights: ModelWeights, hidden: Float[Array, "B *rows D"], cfg: ModelConfig
) -> list[Float[Array, "B *rows D"]]:
    states, wide = [], accumulation_dtype(cfg.dtype)
    normed = final_norm(weights, hidden, cfg=cfg)
    for head in heads:
        inner = linear(normed, head.block, head.block_bias, out_dtype=wide)
        states.append((normed.astype(wide) + jax.nn.silu(inner)).astype(normed.dtype))
    return states


def unembed_with_heads(
    weights: ModelWeights, heads: Sequence[Any], normed: Float[Array, "B n D"], *, cfg: ModelConfig
) -> Float[Array, "B n V"]:
    """Logits of normed states, of which the last ones are those of `heads`."""
    if cfg.head_kind != OWN_VOCABULARY:
        return unembed(weights, normed, cfg=cfg)
    before, wide = normed.shape[1] - len(heads), accumulation_dtype(cfg.dtype)
    logits = [unembed(weights, normed[:, :before], cfg=cfg)] if before else []
    with jax.named_scope("unembed"):
        for index, head in enumerate(heads, start=before):
            logits.append(linear(normed[:, index : index + 1], head.unembed, out_dtype=wide))
    return jnp.concatenate(logits, axis=1)

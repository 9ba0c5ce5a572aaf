# SPDX-License-Identifier: Apache-2.0
"""TokenSwift's chained draft heads: declared once, run by one function.

Knows the heads' shapes and arithmetic. Does not know where their first hidden state comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import add_rms_norm, rms_norm
from tsjax.config import ModelConfig
from tsjax.model.layers import linear
from tsjax.model.transformer import ParamSpec
from tsjax.typing import Array, Float, accumulation_dtype


class HeadWeights(flax.struct.PyTreeNode):
    """One head of the chain."""

    linear: Any  # [D, D]
    norm_in: Any  # [D]
    norm_out: Any  # [D]


def declare_heads(cfg: ModelConfig) -> tuple[HeadWeights, ...]:
    """As `declare_model`: a tree of ParamSpec, one entry per head."""
    D = cfg.embed_dim
    return tuple(
        HeadWeights(
            linear=ParamSpec((D, D), ("embed", "embed"), cfg.dtype, inputs=1),
            norm_in=ParamSpec((D,), ("embed",), cfg.dtype, "ones"),
            norm_out=ParamSpec((D,), ("embed",), cfg.dtype, "ones"),
        )
        for _ in range(cfg.num_draft_heads)
    )


def run_heads(
    heads: Sequence[HeadWeights], hidden: Float[Array, "B *rows D"], *, cfg: ModelConfig
) -> Float[Array, "B {len(heads)} *rows D"]:
    """The normed states that the unembedding turns into the heads' logits.

    h_i = h_{i-1} + linear_i(rms(h_{i-1}, norm_in_i)), and head i's state is rms(h_i, norm_out_i).
    `hidden` is h_0, the last layer's output before the final norm. Head i looks one token
    further than head i - 1, the first one token further than the model itself.
    """
    states = []
    with jax.named_scope("heads"):
        for head in heads:
            normed = rms_norm(hidden, head.norm_in, cfg.norm_eps)
            deeper = linear(normed, head.linear, out_dtype=accumulation_dtype(cfg.dtype))
            hidden, state = add_rms_norm(hidden, deeper, head.norm_out, cfg.norm_eps)
            states.append(state)
        return jnp.stack(states, axis=1)

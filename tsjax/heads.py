# SPDX-License-Identifier: Apache-2.0
"""TokenSwift's chained draft heads: declaration only, until a drafter runs them.

Knows the heads' shapes. h_i = h_{i-1} + linear_i(rms(h_{i-1}, norm_in_i)), and the logits of head i
are those of rms(h_i, norm_out_i) under the model's own unembedding.
"""

from __future__ import annotations

from typing import Any

import flax.struct

from tsjax.config import ModelConfig
from tsjax.model import ParamSpec


class HeadWeights(flax.struct.PyTreeNode):
    """One head of the chain."""

    linear: Any  # [D, D], input first
    norm_in: Any  # [D]
    norm_out: Any  # [D]


def declare_heads(cfg: ModelConfig) -> tuple[HeadWeights, ...]:
    """As `declare_model`: a tree of ParamSpec, one entry per head."""
    D = cfg.embed_dim
    return tuple(
        HeadWeights(
            linear=ParamSpec((D, D), ("embed", "embed"), cfg.dtype),
            norm_in=ParamSpec((D,), ("embed",), cfg.dtype, "ones"),
            norm_out=ParamSpec((D,), ("embed",), cfg.dtype, "ones"),
        )
        for _ in range(cfg.num_draft_heads)
    )

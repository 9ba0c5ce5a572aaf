# SPDX-License-Identifier: Apache-2.0
"""The drafter of one layer: declared once, run by one function.

Knows its weights and its arithmetic, which are EAGLE-3's (arXiv 2503.01840). Does not know where
the taps come from, nor what its keys and values are kept in.

A row stands for a position p: it takes a state, made of what the model has computed for p, and the
embedding of the token at p + 1, which is known; it gives logits of the token at p + 2, and a state
that a row of p + 1 can take where the model has computed nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import rms_norm, rotary_heads
from tsjax.base.model_config import ModelConfig
from tsjax.base.typing import Array, Float, Int, accumulation_dtype
from tsjax.model.layers import linear, rotary_angles
from tsjax.model.param_spec import ParamSpec
from tsjax.model.transformer import LayerWeights, layer_output


class DrafterWeights(flax.struct.PyTreeNode):
    """The layer reads the norms of a token's embedding and of a state, one after the other; only
    the state goes past it. In EAGLE-3's there are no norms of taps, the token does not go into the
    state, and the last row's state is the next one as it is: what is for that is None."""

    fuse: Any  # [D, n, D]: a state from n taps
    token_norm: Any  # [D]
    layer: LayerWeights  # its qkv is [K, G + 2, H, 2 D], its attn_norm the state's
    out_norm: Any  # [D]
    unembed: Any  # [W, D], of the words that it can say
    words: Any  # [W] int32, which tokens these are
    tap_norms: Any = None  # [n, D]
    token: Any = None  # [D, D]: what a state gets from its token
    carry: Any = None  # [D, D]: the state of the next row, from the norm of the last one's
    carry_norm: Any = None  # [D]


def declare_drafter(cfg: ModelConfig) -> DrafterWeights | None:
    """As `declare_model`: a tree of ParamSpec; None for a model without a drafter."""
    shape = cfg.drafter
    if shape is None:
        return None
    D, N, K, G, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.group_size, cfg.head_dim
    F, W, taps = shape.mlp_dim, shape.words, len(shape.taps)

    def matrix(shape, axes, inputs=1, parts=(), group=1):
        return ParamSpec(shape, axes, cfg.dtype, inputs=inputs, parts=parts, group=group)

    def norm(*lead):
        return ParamSpec((*lead, D), (None,) * len(lead) + ("embed",), cfg.dtype, "ones")

    qkv = matrix((K, G + 2, H, 2 * D), ("kv_heads", None, "head_dim", "embed"), parts=(G, 1, 1))
    layer = LayerWeights(
        attn_norm=norm(),
        qkv=qkv,
        o=matrix((D, N, H), ("embed", "heads", "head_dim"), inputs=2, group=G),
        mlp_norm=norm(),
        gate_up=matrix((F, 2, D), ("mlp", None, "embed"), parts=(1, 1)),
        down=matrix((D, F), ("embed", "mlp")),
    )
    own = {}
    if shape.token_in_state:
        mixing = matrix((D, D), ("embed", "embed"))
        own = {"tap_norms": norm(taps), "token": mixing, "carry": mixing, "carry_norm": norm()}
    return DrafterWeights(
        fuse=matrix((D, taps, D), ("embed", None, "embed"), inputs=2),
        token_norm=norm(),
        layer=layer,
        out_norm=norm(),
        unembed=matrix((W, D), ("vocab", "embed")),
        words=ParamSpec((W,), ("vocab",), "int32", "zeros"),
        **own,
    )


def fused(
    weights: DrafterWeights, taps: Float[Array, "B T n D"], *, cfg: ModelConfig, live=None
) -> Float[Array, "B T D"]:
    """States from what the model has computed."""
    if weights.tap_norms is not None:
        normed = [
            rms_norm(taps[:, :, i], weights.tap_norms[i], cfg.norm_eps, live=live)
            for i in range(taps.shape[2])
        ]
        taps = jnp.stack(normed, axis=2)
    return linear(taps, weights.fuse, contract=2, live=live)


def carried(
    weights: DrafterWeights, states: Float[Array, "B T D"], *, cfg: ModelConfig
) -> Float[Array, "B T D"]:
    """States for the next rows, from those of the last ones."""
    if weights.carry is None:
        return states
    return linear(rms_norm(states, weights.carry_norm, cfg.norm_eps), weights.carry)


def draft_rows(
    weights: DrafterWeights,
    states: Float[Array, "B T D"],
    embedded: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: Callable[..., Float[Array, "B T N H"]],
    *,
    cfg: ModelConfig,
    live: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """The next states of rows, and their keys and values.

    Args:
      embedded: of the token that follows each position.
      attend: attention of the rows' queries, keys and values; it alone knows what they see.
      live: how many rows of each batch row are wanted, the first ones; None is all.
    """
    assert cfg.drafter is not None
    layer = weights.layer
    with jax.named_scope("drafter"):
        token = rms_norm(embedded, weights.token_norm, cfg.norm_eps, live=live)
        if weights.token is not None:
            states = states + linear(token, weights.token, live=live)
        state = rms_norm(states, layer.attn_norm, cfg.norm_eps, live=live)
        both = jnp.concatenate([token, state], axis=2)
        fresh = linear(both, layer.qkv, out_dtype=accumulation_dtype(cfg.dtype), live=live)
        cos, sin = rotary_angles(positions, cfg.drafter.rope, cfg.head_dim, cfg.dtype)
        q, k, v = rotary_heads(fresh, cos, sin, cfg.dtype, live=live)
        taken = state if cfg.drafter.norm_before_residual else states
        x, update = layer_output(layer, taken, attend(q, k, v), live, cfg=cfg)
        return x + update.astype(x.dtype), k, v


def words_logits(
    weights: DrafterWeights, states: Float[Array, "*rows D"], *, cfg: ModelConfig
) -> Float[Array, "*rows W"]:
    """Logits of the drafter's words."""
    normed = rms_norm(states, weights.out_norm, cfg.norm_eps)
    return linear(normed, weights.unembed, out_dtype=accumulation_dtype(cfg.dtype))

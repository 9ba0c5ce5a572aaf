# SPDX-License-Identifier: Apache-2.0
"""What a prompt's last token attends to, layer by layer. Knows a pass, chooses nothing."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import cache_scores
from tsjax.base.typing import Array, Float
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.state import DecodeState
from tsjax.model.params import Params
from tsjax.model.passes import run_rows


def last_attention(
    params: Params, state: DecodeState, *, cfg: DecodeConfig
) -> Float[Array, "L B C"]:
    """What each cache slot gets of the attention of the last known token, the mean over heads, with
    all that it sees in the denominator: the scores by which a cut after that layer chooses."""
    kv, itself = state.kv, jnp.ones((1, 1), bool)
    rows = run_rows(
        params.model, kv, state.root[:, None], kv.length[:, None], itself, cfg=cfg.model,
        with_attended=True,
    )  # fmt: skip
    return jnp.stack(
        [
            cache_scores(
                query[:, 0], kv.k[layer], kv.rows_in(layer), "softmax",
                log_totals=log_totals[:, 0],
            )
            for layer, (query, (_, log_totals)) in enumerate(rows.attended)
        ]
    )  # fmt: skip

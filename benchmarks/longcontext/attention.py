# SPDX-License-Identifier: Apache-2.0
"""How sparse the attention of a prompt's last token is, layer by layer (the paper's Figure 2)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import tsjax
from pallas_kernels import cache_scores
from tsjax.decoding.reading import prefill
from tsjax.decoding.start import init_state
from tsjax.model.passes import run_rows

WIDTH = 512  # prompt tokens of a pass
MOST = 0.9  # of the attention
RANKS = 64  # of the sorted attention that are kept, spaced evenly in their logarithm

_prefill = jax.jit(prefill, static_argnames=("width", "cfg"), donate_argnums=1)


def last_attention(model: tsjax.Model, prompt: np.ndarray) -> np.ndarray:
    """[L, P]: what each token of a prompt gets of its last one's attention, the mean over heads."""
    count = len(prompt)
    cfg = tsjax.DecodeConfig(model=model.cfg)
    capacity = -(-count // WIDTH) * WIDTH + 2
    tokens, lengths = np.asarray(prompt, np.int32)[None], np.asarray([count])
    state = init_state(tokens, lengths, cfg=cfg, capacity=capacity, max_length=[count + 1])
    state = _prefill(model.params, state, width=min(WIDTH, capacity - 2), cfg=cfg)
    weights = np.asarray(_of_root(model.params, state, cfg=cfg))[:, 0, : count - 1]
    itself = 1 - weights.sum(axis=1, keepdims=True)
    return np.concatenate([weights, itself], axis=1)


@functools.partial(jax.jit, static_argnames=("cfg",))
def _of_root(params, state, *, cfg):
    kv, itself = state.kv, jnp.ones((1, 1), bool)
    rows = run_rows(
        params.model, kv, state.root[:, None], kv.length[:, None], itself,
        cfg=cfg.model, with_attended=True,
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


def holding_most(weights: np.ndarray) -> np.ndarray:
    """[L]: the smallest share of the tokens that holds MOST of the attention [L, P]."""
    sums = np.cumsum(-np.sort(-weights, axis=1), axis=1)
    wanted = MOST * sums[:, -1:]
    return (1 + np.sum(sums < wanted * (1 - 1e-9), axis=1)) / weights.shape[1]


def sparsity(model: tsjax.Model, prompts: Sequence[np.ndarray]) -> dict[str, list]:
    """Means over prompts: the share of tokens that holds most of the attention, and what the
    n-th of the sorted tokens gets, for some n."""
    found = [last_attention(model, prompt) for prompt in prompts]
    shortest = min(map(len, prompts))
    ranks = np.unique(np.geomspace(1, shortest, RANKS).round().astype(int))
    ordered = np.mean([-np.sort(-weights, axis=1)[:, ranks - 1] for weights in found], axis=0)
    return {
        "share": np.mean([holding_most(weights) for weights in found], axis=0).tolist(),
        "ranks": ranks.tolist(),
        "sorted": np.round(ordered, 8).tolist(),
    }

# SPDX-License-Identifier: Apache-2.0
"""Shorter prompts: what rivals of a lazy prefill make of a prompt before it is read.

Knows two ways to choose tokens. What is left is a prompt of its own, with positions of its own, so
any prefill and any method takes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tsjax.base.checks import check, check_int, one_of, refuse_unknown
from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.start import init_state
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.device_programs import programs_of
from tsjax.host.prompts import prompt_row
from tsjax.lazy.prefill import LazyPrefill
from tsjax.lazy.settings import LONGEST_PROMPT, kept

BY = ("attention", "self_information")
CHOICE = ("window", "pool", "block", "score_layers", "sinks", "recent")  # of LazyPrefill
WIDTHS = 64, 512  # tokens of a pass: a power of two between these


def compress_prompt(
    model: Model,
    prompt: Any,
    share: float,
    *,
    by: str = "attention",
    layer: int | None = None,
    **choice: Any,
) -> np.ndarray:
    """The ids of ceil(share * n) of a prompt's n tokens, in their order.

    Args:
      model: chooses the tokens; another one may read them.
      prompt: text or a row of token ids.
      by: "attention" as GemFilter (arXiv 2409.17422): those that the last token attends to most
        after `layer` layers, by default 40% of them. "self_information" as Selective Context: those
        that the model finds least likely, each after what comes before it, and the first. The last
        one stays in any case.
      choice: how attention chooses: window, pool (by default 5), block, score_layers, sinks and
        recent, as of LazyPrefill.
    """
    refuse_unknown(list(choice), CHOICE, "argument")
    processes.check_shared(model.params)
    row = prompt_row(model, prompt)
    check(by in BY, "by", by, one_of(BY))
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    check(is_number and 1e-4 <= share <= 1, "share", share, "a number from 0.0001 to 1")
    longest = min(model.cfg.max_positions, LONGEST_PROMPT)
    check(len(row) <= longest, "prompt", f"{len(row)} tokens", f"at most {longest} tokens")
    if by == "self_information":
        for name, value in {"layer": layer, **choice}.items():
            check(value is None, name, value, "left out beside by='self_information'")
        return row[_least_likely(model, row, kept(share, len(row)))]
    check(model.cfg.num_layers > 1, "by", by, "'self_information' for a model of one layer")
    if layer is None:
        layer = max(1, round(0.4 * model.cfg.num_layers))
    check_int(layer, "layer", 1, model.cfg.num_layers - 1)
    lazy = LazyPrefill(keep={layer: share}, revive="never", **{"pool": 5, **choice})
    for name, value in lazy.kept_anyway.items():
        check(value <= len(row), name, value, f"at most the {len(row)} tokens of the prompt")
    return row[_most_attended(model, row, DecodeConfig(model=model.cfg, prefill=lazy))]


def _padded(row: np.ndarray) -> tuple[np.ndarray, int]:
    """A row [1, n or more] in full passes, and their width: lengths that many prompts share."""
    width = min(max(1 << (len(row) - 1).bit_length(), WIDTHS[0]), WIDTHS[1])
    return np.pad(row, (0, -len(row) % width))[None], width


def _most_attended(model: Model, row: np.ndarray, cfg: DecodeConfig) -> np.ndarray:
    """Which tokens [n] go on after the cut."""
    (tokens, width), n, compiled = _padded(row), len(row), programs_of(model)
    capacity = tokens.shape[1] + 1
    length = np.asarray([n], np.int32)
    state = init_state(tokens, length, cfg=cfg, capacity=capacity, max_length=length)
    for start in range(0, n - 1, width):
        state = compiled.read_part(model.params, state, start, part=0, width=width, cfg=cfg)
    state = compiled.finish_part(model.params, state, part=0, cfg=cfg)
    return processes.on_host(state.prompt.chosen[1])[0, :n]


def _least_likely(model: Model, row: np.ndarray, count: int) -> np.ndarray:
    """Which tokens [n] the model did not expect, the first and the last one among them."""
    tokens, width = _padded(row)
    found = (
        programs_of(model).log_probs(model.params, tokens, cfg=model.cfg, count=0, width=width).raw
    )
    expected = processes.on_host(found)[0, : len(row)]
    always = np.isin(np.arange(len(row)), (0, len(row) - 1))
    order = np.lexsort((np.arange(len(row)), expected, ~always))
    chosen = np.zeros(len(row), bool)
    chosen[order[:count]] = True
    return chosen

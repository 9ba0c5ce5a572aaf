# SPDX-License-Identifier: Apache-2.0
"""Texts with what a model computes for them, in rows as a drafter takes them.

Knows the model, its mesh and the stream of texts. Does not know drafters' weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tsjax.base.checks import check
from tsjax.base.model_config import ModelConfig
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.device_programs import programs_of
from tsjax.training.batches import ROW_TOKENS, Stream, StreamRows
from tsjax.training.drafter_loss import Pieces
from tsjax.training.own_text import OwnText
from tsjax.training.places import parts_of_data, shared_out


class TappedTexts:
    """Attributes:
    steps: that one pass over the texts has.
    """

    def __init__(
        self, model: Model, cfg: ModelConfig, texts: Sequence[OwnText], step_tokens: int,
        seed: int, cached: bool = False,
    ):  # fmt: skip
        """`cfg`: the model's, with the drafter. `cached`: what the model has computed is kept."""
        self.model, self.cfg, self.cached, self._step_tokens = model, cfg, cached, step_tokens
        self._params = model.params.replace(heads=(), drafter=None)
        parts = parts_of_data(model.params)
        self._stream = Stream(texts, self._states, seed, parts=parts, cached=cached)
        self.kinds, self.steps = self._stream.kinds, max(1, self._stream.tokens // step_tokens)

    def rows(self, first: int = 0) -> Iterator[tuple[StreamRows, Pieces]]:
        """Of each step, from the `first` on, without end."""
        for rows in self._stream.rows(self._step_tokens // ROW_TOKENS, first):
            states = rows.states
            given = states[:, :, :-1], states[:, :, -1], rows.tokens, rows.text, rows.own
            yield rows, Pieces(*(shared_out(array, self._params) for array in given))

    def _states(self, tokens: np.ndarray) -> np.ndarray:
        """What the model computes for texts: the taps, and the last layer's output."""
        assert self.cfg.drafter is not None
        taps = (*self.cfg.drafter.taps, self.cfg.num_layers)
        states = programs_of(self.model).tapped_states(
            self._params, shared_out(tokens, self._params), cfg=self.cfg.alone, taps=taps
        )
        return processes.on_host(states)


def check_rows(step_tokens: int, model: Model) -> None:
    parts = parts_of_data(model.params)
    wanted = f"a multiple of {ROW_TOKENS * parts}, {ROW_TOKENS} for each of {parts} parts of a mesh"
    check(step_tokens % (ROW_TOKENS * parts) == 0, "step_tokens", step_tokens, wanted)

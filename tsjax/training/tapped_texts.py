# SPDX-License-Identifier: Apache-2.0
"""Texts with what a model computes for them, in rows as a drafter takes them.

Knows the model, its mesh and the stream of texts. Does not know drafters' weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from tsjax.base.checks import check
from tsjax.base.model_config import ModelConfig
from tsjax.files.checkpoint import Model
from tsjax.host import processes
from tsjax.host.device_programs import programs_of
from tsjax.model.sharding import mesh_of, named_sharding, placed
from tsjax.training.batches import ROW_TOKENS, Stream, StreamRows
from tsjax.training.drafter_loss import Pieces
from tsjax.training.own_text import OwnText


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
        self._mesh, parts = mesh_of(model.params), parts_of_data(model)
        self._stream = Stream(texts, self._states, seed, parts=parts, cached=cached)
        self.kinds, self.steps = self._stream.kinds, max(1, self._stream.tokens // step_tokens)

    def rows(self, first: int = 0) -> Iterator[tuple[StreamRows, Pieces]]:
        """Of each step, from the `first` on, without end."""
        for rows in self._stream.rows(self._step_tokens // ROW_TOKENS, first):
            states, place = rows.states, self._place
            yield (
                rows,
                Pieces(
                    place(states[:, :, :-1]),
                    place(states[:, :, -1]),
                    place(rows.tokens),
                    place(rows.text),
                    place(rows.own),
                ),
            )

    def _place(self, array: np.ndarray) -> jax.Array:
        """One batch, its texts shared out over the mesh."""
        if self._mesh is None:
            return jax.device_put(array, jax.tree.leaves(self._params)[0].sharding)
        names = ("batch", *(None,) * (array.ndim - 1))
        return placed(array, named_sharding(array.shape, names, self._mesh))

    def _states(self, tokens: np.ndarray) -> np.ndarray:
        """What the model computes for texts: the taps, and the last layer's output."""
        assert self.cfg.drafter is not None
        taps = (*self.cfg.drafter.taps, self.cfg.num_layers)
        states = programs_of(self.model).tapped_states(
            self._params, self._place(tokens), cfg=self.cfg.alone, taps=taps
        )
        return processes.on_host(states)


def parts_of_data(model: Model) -> int:
    mesh = mesh_of(model.params)
    return mesh.shape.get("data", 1) if mesh is not None else 1


def check_rows(step_tokens: int, model: Model) -> None:
    parts = parts_of_data(model)
    wanted = f"a multiple of {ROW_TOKENS * parts}, {ROW_TOKENS} for each of {parts} parts of a mesh"
    check(step_tokens % (ROW_TOKENS * parts) == 0, "step_tokens", step_tokens, wanted)

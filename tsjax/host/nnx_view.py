# SPDX-License-Identifier: Apache-2.0
"""A model as a module of Flax NNX, for projects that train such modules.

Knows NNX, which is imported when the first module is made. Does not know optimisers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tsjax.base.checks import check_type
from tsjax.files.checkpoint import assembled, named_arrays
from tsjax.files.model_in_memory import Model
from tsjax.host.scoring import forward


def as_nnx(model: Model) -> Any:
    """The model as a `flax.nnx.Module`: each array is an `nnx.Param`, a call is `tsjax.forward`.

    `module.model` is the tsjax.Model of its arrays as they are now, for `tsjax.generate`. Neither
    way copies an array.
    """
    check_type(model, Model, "model", "what tsjax.load returns")
    return _module_class()(model)


@functools.cache
def _module_class() -> Any:
    from flax import nnx

    def kind_of(array: jax.Array) -> Any:
        """Integers, such as a drafter's words, are not trained."""
        return nnx.Param if jnp.issubdtype(array.dtype, jnp.floating) else nnx.Variable

    class Decoder(nnx.Module):
        """`arrays` has an nnx.Param for each of the model's arrays, by its path in Params."""

        def __init__(self, model: Model):
            named = {entry.path: array for entry, array in named_arrays(model)}
            self.arrays = nnx.Dict({path: kind_of(x)(x) for path, x in named.items()})
            self.cfg, self.stop_ids, self.path = model.cfg, model.stop_ids, model.path

        def __call__(self, tokens: Any, *, remat: bool = False) -> jax.Array:
            return forward(self.model, tokens, remat=remat)

        @property
        def model(self) -> Model:
            arrays = {path: self.arrays[path][...] for path in self.arrays}
            return assembled(arrays, self.cfg, self.stop_ids, self.path)

    return Decoder

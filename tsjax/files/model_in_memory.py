# SPDX-License-Identifier: Apache-2.0
"""A model in memory: its weights and what they mean.

Knows devices and the tokenizer's place. Does not know files of weights (checkpoint.py).
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding

from tsjax.base.checks import check
from tsjax.base.errors import BadValue
from tsjax.base.habits import OF_MODEL
from tsjax.base.model_config import ModelConfig
from tsjax.base.telling import doing
from tsjax.decoding.held import int8_copy_bytes
from tsjax.decoding.method import Method
from tsjax.files import tensor_names
from tsjax.files.tokenizer import load_tokenizer
from tsjax.model.params import Params, with_int8_drafts
from tsjax.model.sharding import everywhere, mesh_of, placed
from tsjax.model.transformer import ModelWeights


class Model(flax.struct.PyTreeNode):
    """Weights and what they mean.

    Attributes:
      params: the arrays; everything else is static.
      stop_ids: tokens that end a text.
      path: the folder or file it was loaded from; the tokenizer is read from there.
    """

    params: Params
    cfg: ModelConfig = flax.struct.field(pytree_node=False)
    stop_ids: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    path: str | None = flax.struct.field(pytree_node=False, default=None)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model's folder, loaded once, under the names of transformers.

        What it lacks, transformers has: its error then says how to load that. A FileNotFoundError
        if there is no tokenizer, a ValueError if it is damaged.
        """
        if self.path is None:
            raise BadValue("this model has no path, so it has no tokenizer; pass token ids")
        with doing("making the tokenizer"):
            return load_tokenizer(self.path)

    @functools.cached_property
    def _with_int8(self) -> Params:
        with doing("rounding to int8"):
            return jax.block_until_ready(with_int8_drafts(self.params, self.cfg))

    def params_for(self, method: Method) -> Params:
        """The arrays that a method's steps take. A copy in int8 is made once and stays until
        `drop_copies`."""
        missing = self.params.drafts is None and not self.cfg.is_narrow
        return self._with_int8 if method.wants_int8 and missing else self.params

    def weights_beside(self, other: Model) -> ModelWeights:
        """Its weights, without heads, where another model's lie, whole on each device of a mesh."""
        place = _place_beside(other)
        weights = self.params.model
        return weights if place is None else jax.tree.map(lambda x: placed(x, place), weights)

    def bytes_beside(self, other: Model) -> int:
        """What `weights_beside` copies to each device."""
        place = _place_beside(other)
        leaves = jax.tree.leaves(self.params.model)
        if place is None or all(leaf.sharding == place for leaf in leaves):
            return 0
        return sum(leaf.nbytes for leaf in leaves)

    def with_params(self, params: Params) -> Model:
        """The same model with other weights of the same shapes: no program is compiled anew.

        They are placed as the model's are, from whatever devices they lie on, and an array that is
        as the model has it is not copied. Floating-point arrays of another type, a trainer's
        float32 masters of a bfloat16 model, say, are cast, which a warning tells.
        """
        old, new = (jax.tree.structure(one) for one in (self.params, params))
        if old != new:
            raise BadValue("params is not valid: the same tree of arrays as model.params")
        pairs = zip(
            jax.tree_util.tree_leaves_with_path(self.params), jax.tree.leaves(params), strict=True
        )
        cast = {}
        for (path, old), new in pairs:
            given = getattr(new, "shape", None), getattr(new, "dtype", None)
            name = f"params{jax.tree_util.keystr(path)}"
            fits = given[0] == old.shape and _same_kind(old.dtype, given[1])
            check(fits, name, given, f"{old.shape} of {old.dtype}")
            if given[1] != old.dtype:
                cast[f"{given[1]}", f"{old.dtype}"] = name
        for (theirs, ours), name in cast.items():
            warnings.warn(f"{name} and others: {theirs} is cast to {ours}", stacklevel=2)
        return self.replace(params=jax.tree.map(_where, self.params, params))

    def drop_copies(self) -> None:
        """Frees the copy in int8; `params_for` makes another one."""
        vars(self).pop("_with_int8", None)

    def bytes_for(self, method: Method) -> int:
        """What `params_for` makes on each device, without the scales; 0 if it is there already."""
        return self.int8_bytes if method.wants_int8 else 0

    @property
    def int8_bytes(self) -> int:
        """Of the copy in int8, where one has to be made: a narrow model drafts with itself."""
        is_there = self.params.drafts is not None or "_with_int8" in vars(self)
        return 0 if is_there else int8_copy_bytes(self.cfg, mesh_of(self.params))

    def __getattr__(self, name: str) -> Any:
        """What users of other programs look for, in an error."""
        advice = f": {OF_MODEL[name]}" if name in OF_MODEL else ""
        raise AttributeError(f"a tsjax.Model has no attribute {name!r}{advice}")

    def __repr__(self) -> str:
        return f"Model({self.num_params:,} parameters, {self.cfg}, path={self.path!r})"

    @property
    def num_params(self) -> int:
        """As the wide model has them."""
        return sum(math.prod(entry.spec.shape) for entry in tensor_names.entries(self.cfg.as_wide))


def named_arrays(model: Model) -> list[tuple[tensor_names.Entry, jax.Array]]:
    """Every array of the model with its names, in the order of the declaration."""
    trained = model.params.replace(drafts=None)
    return [*zip(tensor_names.entries(model.cfg), jax.tree.leaves(trained), strict=True)]


def _same_kind(old: Any, new: Any) -> bool:
    """Whether arrays of one type can take the place of the other's."""
    if new is None:
        return False
    return old == new or all(jnp.issubdtype(one, jnp.floating) for one in (old, new))


def _where(old: Any, new: Any) -> Any:
    """An array in the type of another one, where that lies; a traced one where it is."""
    new = jnp.asarray(new).astype(old.dtype)  # no copy of what is so already
    if isinstance(old, Tracer) or isinstance(new, Tracer):
        return new
    return new if new.sharding == old.sharding else jax.device_put(new, old.sharding)


def _place_beside(other: Model) -> NamedSharding | None:
    """None for what lies on one device."""
    mesh = mesh_of(other.params)
    return None if mesh is None else everywhere(mesh)

# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of a training lie, beside a model on one device or on a mesh.

Knows the mesh of a model's parameters. Does not know what is trained.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tsjax.model.sharding import everywhere, mesh_of, named_sharding, placed


def parts_of_data(params: Any) -> int:
    """Parts of the mesh that see rows of their own."""
    mesh = mesh_of(params)
    return 1 if mesh is None else mesh.shape.get("data", 1)


def shared_out(array: Any, params: Any) -> jax.Array:
    """One batch, its rows shared out over the parts."""
    mesh = mesh_of(params)
    if mesh is None:
        return jax.device_put(array, _device_of(params))
    names = ("batch", *(None,) * (np.ndim(array) - 1))
    return placed(array, named_sharding(np.shape(array), names, mesh))


def on_each_device(tree: Any, params: Any) -> Any:
    mesh = mesh_of(params)
    whole = _device_of(params) if mesh is None else everywhere(mesh)
    return jax.tree.map(lambda x: placed(x, whole), tree)


def _device_of(params: Any) -> jax.sharding.Sharding:
    return jax.tree.leaves(params)[0].sharding

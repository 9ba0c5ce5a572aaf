# SPDX-License-Identifier: Apache-2.0
"""The public function: checks its arguments, then calls the first implementation that serves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.threshold import native, xla
from pallas_kernels.typing import Array, UInt


def threshold(
    keys: UInt[Array, "*rows V"],
    most: UInt[Array, "*rows 1"],
    masses: UInt[Array, "*rows V"] | None = None,
    *,
    implementation: str | None = None,
) -> UInt[Array, "*rows 1"]:
    """The largest threshold for which the masses of all lower keys add up to at most `most`.

    Args:
      keys: uint32 or uint64.
      most: of each row; in the keys' type.
      masses: of each key, in the keys' type, in which a row's sum has to fit; None is 1 each.
      implementation: "native" (on a CPU, for uint32) or "xla" to have that one or an error; None
        for the first that serves.
    """
    keys, most = jnp.asarray(keys), jnp.asarray(most)
    masses = None if masses is None else jnp.asarray(masses)
    if not keys.ndim or most.shape != (*keys.shape[:-1], 1) or (
        masses is not None and masses.shape != keys.shape
    ):  # fmt: skip
        raise ValueError(
            "shapes do not fit together: keys [..., V], most [..., 1], masses as keys; "
            f"got keys {keys.shape}, most {most.shape}"
            + ("" if masses is None else f", masses {masses.shape}")
        )
    kinds = {array.dtype for array in (keys, most, masses) if array is not None}
    if kinds not in ({jnp.dtype("uint32")}, {jnp.dtype("uint64")}):
        named = ", ".join(sorted(map(str, kinds)))
        raise ValueError(f"keys, most and masses of {named} is not valid: uint32 or uint64, all")
    with jax.named_scope("threshold"):
        return dispatch.run(IMPLEMENTATIONS, (keys, most, masses), name=implementation)


IMPLEMENTATIONS = (
    dispatch.Implementation("native", "cpu", native.threshold),
    dispatch.Implementation("xla", None, xla.threshold),
)

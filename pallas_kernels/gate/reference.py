# SPDX-License-Identifier: Apache-2.0
"""The definition, as HuggingFace has it."""

from __future__ import annotations

import jax

from pallas_kernels.typing import Array, DTypeLike, Float


def gated(opened: Float[Array, "*rows F 2"], dtype: DTypeLike) -> Float[Array, "*rows F"]:
    """As `api.gated`."""
    opened = opened.astype(dtype)
    return jax.nn.silu(opened[..., 0]) * opened[..., 1]

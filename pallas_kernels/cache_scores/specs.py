# SPDX-License-Identifier: Apache-2.0
"""Named shapes of real models, shared by tests and benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Spec(NamedTuple):
    """One call: K kv heads with G query heads each, S slots."""

    K: int
    G: int
    H: int = 128
    S: int = 106_496
    B: int = 1
    dtype: str = "bfloat16"

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each argument of `cache_scores`, in order."""
        B, K, H = self.B, self.K, self.H
        return {
            "q_last": ((B, K * self.G, H), self.dtype),
            "k_cache": ((B, K, self.S, H), self.dtype),
            "length": ((B,), "int32"),
        }

    def key(self) -> str:
        """The line of `tuned/<device>.json` for this shape."""
        return tuned_key(self.B, self.K * self.G, self.K, self.S, self.H, self.dtype)


def tuned_key(B: int, N: int, K: int, S: int, H: int, dtype) -> str:
    """Group and capacity are rounded up to powers of two, so that one measurement serves many."""
    group, slots = (1 << (size - 1).bit_length() for size in (N // K, S))
    return f"heads={B * K} group={group} slots={slots} head_dim={H} {jnp.dtype(dtype).name}"


def inputs(spec: Spec, *, length, seed: int = 0) -> dict[str, jax.Array]:
    """Random arguments."""
    keys = jax.random.split(jax.random.key(seed), 3)
    arrays = {}
    for key, (name, (shape, dtype)) in zip(keys, spec.shapes().items(), strict=True):
        if name == "length":
            arrays[name] = jnp.broadcast_to(jnp.asarray(length, jnp.int32), shape)
        else:
            arrays[name] = jax.random.normal(key, shape, dtype)
    return arrays


SPECS = {
    "llama3.1-8b": Spec(K=8, G=4),
    "llama3.1-8b summed": Spec(K=8, G=1),  # TokenSwift keeps the sum of each group's queries
    "llama3.1-8b batch 4": Spec(K=8, G=4, S=32_768, B=4),
    "llama2-7b": Spec(K=32, G=1),
    "qwen2.5-1.5b": Spec(K=2, G=6),
    "qwen2.5-7b": Spec(K=4, G=7),
    "qwen2.5-14b": Spec(K=8, G=5),
    "llama3.2-1b": Spec(K=8, G=4, H=64),
    "head_dim 80": Spec(K=8, G=4, H=80, S=32_768),
    "float32": Spec(K=8, G=4, S=8192, dtype="float32"),
}

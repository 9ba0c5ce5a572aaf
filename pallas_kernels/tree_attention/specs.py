# SPDX-License-Identifier: Apache-2.0
"""Named shapes of real models, shared by tests and benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Spec(NamedTuple):
    """One call: T rows, K kv heads with G query heads each, S slots."""

    T: int
    K: int
    G: int
    H: int = 128
    S: int = 106_496  # 104K: what 100,000 new tokens from a prompt of 4,096 need
    B: int = 1
    dtype: str = "bfloat16"

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each argument of `tree_attention`, in order."""
        B, T, K, H, S = self.B, self.T, self.K, self.H, self.S
        cache, fresh = ((B, K, S, H), self.dtype), ((B, T, K, H), self.dtype)
        return {
            "q": ((B, T, K * self.G, H), self.dtype),
            "k_cache": cache,
            "v_cache": cache,
            "length": ((B,), "int32"),
            "k_new": fresh,
            "v_new": fresh,
            "tree_mask": ((B, T, T), "bool"),
        }

    def key(self) -> str:
        """The line of `tuned/<device>.json` for this shape: block sizes follow the rows of one
        tile, the number of programs the heads and the capacity."""
        return tuned_key(self.B, self.T, self.K * self.G, self.K, self.S, self.H, self.dtype)


def tuned_key(B: int, T: int, N: int, K: int, S: int, H: int, dtype) -> str:
    """Rows and capacity are rounded up to powers of two, so that one measurement serves many."""
    rows, slots = (1 << (size - 1).bit_length() for size in (T * N // K, S))
    return f"heads={B * K} rows={rows} slots={slots} head_dim={H} {jnp.dtype(dtype).name}"


def inputs(spec: Spec, *, length, seed: int = 0) -> dict[str, jax.Array]:
    """Random arguments; rows see themselves, those before them every other one, as in a tree."""
    keys = jax.random.split(jax.random.key(seed), 8)
    arrays = {}
    for key, (name, (shape, dtype)) in zip(keys, spec.shapes().items(), strict=False):
        if name == "length":
            arrays[name] = jnp.broadcast_to(jnp.asarray(length, jnp.int32), shape)
        elif name == "tree_mask":
            earlier = jnp.tril(jax.random.bernoulli(key, 0.5, shape))
            arrays[name] = earlier | jnp.eye(shape[1], dtype=bool)
        else:
            arrays[name] = jax.random.normal(key, shape, dtype)
    return arrays


SPECS = {
    **{f"llama3.1-8b t{T}": Spec(T, K=8, G=4) for T in (1, 8, 16, 32, 64, 101, 117, 128, 512)},
    "llama3.1-8b draft": Spec(1, K=8, G=4, S=4096),
    "llama3.1-8b batch 4": Spec(16, K=8, G=4, S=32_768, B=4),
    **{f"llama2-7b t{T}": Spec(T, K=32, G=1) for T in (1, 64, 101, 512)},
    **{f"qwen2.5-1.5b t{T}": Spec(T, K=2, G=6) for T in (1, 64, 512)},
    **{f"qwen2.5-7b t{T}": Spec(T, K=4, G=7) for T in (1, 64, 512)},
    **{f"qwen2.5-14b t{T}": Spec(T, K=8, G=5) for T in (1, 64, 512)},
    **{f"llama3.2-1b t{T}": Spec(T, K=8, G=4, H=64) for T in (1, 64)},
    **{f"head_dim {H}": Spec(16, K=8, G=4, H=H, S=32_768) for H in (80, 96)},
    **{f"float32 t{T}": Spec(T, K=8, G=4, S=8192, dtype="float32") for T in (1, 64)},
}

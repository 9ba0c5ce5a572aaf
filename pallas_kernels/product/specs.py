# SPDX-License-Identifier: Apache-2.0
"""Named shapes of real models, shared by tests and benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Spec(NamedTuple):
    """One call: so many rows in bfloat16, weights in the same type or in int8."""

    outputs: int
    inputs: int
    rows: int = 1
    weights: str = "bfloat16"

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each argument of `product`, in order."""
        shapes = {
            "rows": ((self.rows, self.inputs), "bfloat16"),
            "weights": ((self.outputs, self.inputs), self.weights),
        }
        scales = {"scales": ((self.outputs,), "float32")}
        return shapes | (scales if self.weights == "int8" else {})

    @property
    def read_bytes(self) -> int:
        return self.outputs * self.inputs * jnp.dtype(self.weights).itemsize


def inputs(spec: Spec, *, seed: int = 0) -> dict[str, jax.Array]:
    """Random arguments."""
    keys = jax.random.split(jax.random.key(seed), 3)
    arrays = {}
    for key, (name, (shape, dtype)) in zip(keys, spec.shapes().items(), strict=False):
        if dtype == "int8":
            arrays[name] = jax.random.randint(key, shape, -127, 128, jnp.int8)
        else:
            arrays[name] = jax.random.normal(key, shape, dtype)
    return arrays


SPECS = {
    "llama3.1-8b qkv": Spec(6144, 4096),
    "llama3.1-8b qkv 16 rows": Spec(6144, 4096, rows=16),
    "llama3.1-8b qkv int8": Spec(6144, 4096, weights="int8"),
    "llama3.1-8b o": Spec(4096, 4096),
    "llama3.1-8b gate_up": Spec(28_672, 4096),
    "llama3.1-8b gate_up int8": Spec(28_672, 4096, weights="int8"),
    "llama3.1-8b down": Spec(4096, 14_336),
    "llama3.1-8b down int8": Spec(4096, 14_336, weights="int8"),
    "llama3.1-8b unembed": Spec(128_256, 4096),
    "qwen2.5-1.5b o": Spec(1536, 1536),
    "qwen2.5-1.5b down": Spec(1536, 8960),
    "qwen2.5-14b gate_up": Spec(27_648, 5120),
}

# SPDX-License-Identifier: Apache-2.0
"""AnyTree: a method whose trees are data, for tests of everything that does not draft.

Who judges a tree does not know who drafted it. So a feature that holds for plain decoding and for
these trees holds for every method; what a method does is the subject of test_method_contract.py.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

import tsjax
from tsjax.decoding.tree import DraftTree, merge_paths

FOLLOWS = (5, 3)  # the token after t, most often, in the text of helpers.looping_model


@dataclasses.dataclass(frozen=True)
class AnyTree(tsjax.methods.Method):
    """Trees drawn anew at each length: right ones, wrong ones, none, and all between.

    A path goes on as `looping_model` most often does, is cut anywhere, and turns wrong anywhere: to
    any token, to a stop token, or to the one before it over and over. Paths share beginnings,
    repeat each other, and in every fifth step there are none.
    """

    sources: ClassVar[tuple[str, ...]] = ("first", "others")

    paths: int = 3
    depth: int = 4
    pass_widths: tuple[int, ...] = (1, 6)

    def sizes(self, model):
        width = 1 + self.paths * self.depth
        return tsjax.methods.Sizes(width=width, depth=self.depth, narrower=self.pass_widths)

    def draft(self, model, params, state, noise):
        width = self.sizes(model).width
        return state.memory, any_tree(state, model.vocab_size, self.paths, self.depth, width)


def any_tree(state, vocab: int, paths: int, depth: int, width: int) -> DraftTree:
    row = state.length[:, None, None].astype(jnp.uint32)
    path = jnp.arange(paths, dtype=jnp.uint32)[None, :, None]
    index = jnp.arange(depth, dtype=jnp.uint32)[None, None]

    def drawn(salt: int, *parts):
        """A number below 2**16, of the length and the parts."""
        number = row * jnp.uint32(0x9E3779B1) + jnp.uint32(salt)
        for part in parts:
            number = (number ^ (number >> 15)) * jnp.uint32(0x85EBCA6B) + part
        number = (number ^ (number >> 13)) * jnp.uint32(0xC2B2AE35)
        return (number >> 16).astype(jnp.int32)

    stop = jnp.argmax(state.sampling.stop_mask).astype(jnp.int32)  # 0 where there is none
    wrong = drawn(1, path, index) % vocab
    wrong = jnp.where(drawn(2, path, index) % 4 == 0, stop, wrong)
    is_wrong = drawn(3, path, index) % 8 < path.astype(jnp.int32) + 1
    is_wrong &= drawn(4, path) % 3 > 0
    repeats = drawn(5, path) % 6 == 0
    tokens, last = [], jnp.broadcast_to(state.root[:, None], (row.shape[0], paths))
    for i in range(depth):
        likely = (FOLLOWS[0] * last + FOLLOWS[1]) % vocab
        last = jnp.where(repeats[..., 0], last, likely)
        last = jnp.where(is_wrong[..., i], wrong[..., i], last)
        tokens.append(last)
    lengths = drawn(6, path)[..., 0] % (2 * depth)  # half of them whole
    lengths = jnp.where(drawn(7)[..., 0] % 5 == 0, 0, jnp.minimum(lengths, depth))
    numbers = [0] + [1] * (paths - 1)
    return merge_paths(
        state.root, jnp.stack(tokens, axis=2), lengths, numbers, width=width, num_sources=2
    )

# SPDX-License-Identifier: Apache-2.0
"""The acceptance that TokenSwift's program has, which only a benchmark runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.published_rule import draws, longest_agreement
from tsjax.decoding.tree import NO_NODE, merge_paths

LAW = np.asarray([0.2, 0.3, 0.1, 0.4])


@functools.partial(jax.jit, static_argnames=("width", "batch"))
def tree_of(paths, width, batch=1):
    """A trie of paths of one length; the root's token is 0."""
    paths = jnp.broadcast_to(jnp.asarray(paths, jnp.int32), (batch, *np.shape(paths)))
    lengths = jnp.full(paths.shape[:2], paths.shape[2], jnp.int32)
    return merge_paths(jnp.zeros((batch,), jnp.int32), paths, lengths, width=width)


def as_a_program(tree, drawn):
    """The accepted path and what is said, by a plain loop over the rows of the tree."""
    best, told = [0], None
    paths = [[int(node) for node in path if node != NO_NODE] for path in tree.path[0]]
    for row, nodes in enumerate(paths):
        inner = any(row in path[:-1] for path in paths)
        if nodes[0] != 0 or inner:
            continue  # padding, or no leaf
        agreed = 0
        while agreed + 1 < len(nodes):
            if int(tree.tokens[0, nodes[agreed + 1]]) != int(drawn[0, row, agreed]):
                break
            agreed += 1
        if told is None or agreed + 1 > len(best):
            best, told = nodes[: agreed + 1], [int(x) for x in drawn[0, row, : agreed + 1]]
    return best, told


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_agreeing_row_is_kept(seed):
    rng = np.random.default_rng(seed)
    paths = rng.integers(3, size=(5, 3))
    tree = tree_of(paths, width=20)
    drawn = jnp.asarray(rng.integers(3, size=tree.path.shape), jnp.int32)
    target, acceptance = jax.jit(longest_agreement)(tree, drawn)
    path, told = as_a_program(tree, drawn)
    count = int(acceptance.count[0])
    assert acceptance.path[0, : count + 1].tolist() == path
    assert target[0, jnp.asarray(path)].tolist() == told


def test_a_token_that_rows_share_has_as_many_tries():
    """Three rows share the token 2 of probability 0.1: one of their tries hits in 1 - 0.9^3."""
    batch, shared = 5_000, 2
    paths = jnp.asarray([[shared, 0], [shared, 1], [shared, 3]])
    tree = tree_of(paths, width=5, batch=batch)
    laws = jnp.broadcast_to(jnp.log(jnp.asarray(LAW)), (batch, 5, 4))
    keys = jax.random.split(jax.random.key(0), batch)
    target, _ = jax.jit(longest_agreement)(tree, jax.jit(draws)(keys, tree, laws))
    said = float(jnp.mean(target[:, 0] == shared))
    assert said == pytest.approx(1 - 0.9**3, abs=0.02)

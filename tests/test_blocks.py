# SPDX-License-Identifier: Apache-2.0
"""The sampler and the judge by themselves: what generate says, whatever batch, shard and tree."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SIZES, looping_model
from jax.sharding import NamedSharding, PartitionSpec

import tsjax
from tsjax.blocks import sample, token_noise, verify, warped_logits

VOCAB = 24
MODEL = looping_model()
WARP = dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)


sampled = jax.jit(functools.partial(sample, **WARP))


def test_sample_says_what_generate_says():
    prompts, seeds = [[1, 2, 3], [4, 5, 6]], np.asarray([7, 8])
    wanted = tsjax.generate(
        MODEL, prompts, do_sample=True, max_new_tokens=12, seed=seeds.tolist(), **SIZES, **WARP
    )
    texts = np.concatenate([prompts, wanted.tokens], axis=1)
    logits, positions = tsjax.forward(MODEL, texts)[:, 2:-1], np.tile(np.arange(3, 15), (2, 1))
    np.testing.assert_array_equal(
        sampled(logits, seeds, np.zeros(2, np.int32), positions), texts[:, 3:]
    )


def test_shards_say_the_same(rng):
    """Split by rows and by the vocabulary."""
    logits = rng.normal(size=(4, 3, 64)).astype(np.float32)
    given = np.arange(4), np.zeros(4, np.int32), np.arange(12).reshape(4, 3)
    mesh = jax.make_mesh((2, 2), ("rows", "words"))
    placed = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("rows", None, "words")))
    np.testing.assert_array_equal(sampled(placed, *given), sampled(logits, *given))


ALPHABET, DEPTH, PATHS, LENGTH = 4, 3, 5, 10
FIRST = np.zeros(1, np.int32)  # how often a row is repeated
one_token = jax.jit(functools.partial(sample, temperature=0.7))


@functools.partial(jax.jit, static_argnames="greedy")
def judged(root, guesses, lengths, seed, before, table, greedy):
    """The tree of the guesses, and what is emitted by a model that looks at two tokens."""
    tree = tsjax.methods.merge_paths(root, guesses, lengths, width=1 + PATHS * DEPTH)
    parents = tree.parents[0]
    last = jnp.where(parents >= 0, tree.tokens[0, parents], before)
    logits = table[last, tree.tokens[0]][None]
    if greedy:
        return tree, verify(tree, logits, None)
    positions = LENGTH + np.arange(DEPTH + 1)[None]
    noise = token_noise(seed, FIRST, positions, ALPHABET)
    return tree, verify(tree, warped_logits(logits, temperature=0.7), noise)


@hypothesis.given(seed=st.integers(0, 10**6), greedy=st.booleans())
@hypothesis.settings(max_examples=30)
def test_a_tree_emits_what_sampling_one_by_one_would(seed, greedy):
    """For a made-up model whose logits are a function of the last two tokens."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(ALPHABET,) * 3).astype(np.float32)
    root, before = rng.integers(ALPHABET, size=2).tolist()
    guesses = rng.integers(0, ALPHABET, (1, PATHS, DEPTH), np.int32)
    lengths = rng.integers(0, DEPTH + 1, (1, PATHS), np.int32)
    roots = np.asarray([root], np.int32)
    tree, found = judged(roots, guesses, lengths, np.asarray([seed]), before, table, greedy)
    tokens, count = np.asarray(tree.tokens)[0], int(found.count[0])

    text = [before, root]
    for position in range(LENGTH, LENGTH + count):
        row = table[text[-2], text[-1]]
        if greedy:
            text.append(int(row.argmax()))
        else:
            at = np.asarray([[position]])
            text.append(int(one_token(row[None, None], np.asarray([seed]), FIRST, at)[0, 0]))
    assert np.asarray(found.tokens)[0, :count].tolist() == text[2:]
    # And it goes on as long as some path goes on with it.
    drafted = [row[:n] for row, n in zip(guesses[0].tolist(), lengths[0].tolist(), strict=True)]
    agree = [
        next((i for i, (a, b) in enumerate(zip(d, text[2:], strict=False)) if a != b), len(d))
        for d in drafted
    ]
    assert count == 1 + min(max(agree), len(text) - 2)
    kept = np.asarray(found.path)[0, :count]
    assert tokens[kept].tolist() == [root, *text[2:-1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: sample(x[0], [0], [0], [[1]]), "logits"),
        (lambda x: sample(x, [0], [0], [[1]]), "positions"),
        (lambda x: sample(x, [0.9], [0], [[1, 2]]), r"seeds=\[0.9\] .*: \[B\] integers, at"),
        (lambda x: sample(x, [-1], [0], [[1, 2]]), "seeds=-1 is not valid: .* at least 0"),
        (lambda x: sample(x, [0], np.asarray([-2]), [[1, 2]]), "repeats=-2 is not valid"),
        (lambda x: sample(x, [0], [0], [[7.5, 8]]), r"positions=\[\[7.5, 8.0\]\] is no"),
        (lambda x: jax.jit(lambda p: sample(x, [0], [0], p))(x[:, :, 0]), "positions='float"),
        (lambda x: sample(x, [0], [0], [[1, 2]], temperature=0.0), "temperature"),
        (lambda x: sample(x, [0], [0], [[1, 2]], repetition_penalty=1.2), "unknown argument"),
        (lambda x: verify(_tree(), x), "logits"),
        (lambda x: verify(_tree(), jnp.ones((1, 3, 5)), x), "noise"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(tsjax.TsjaxError, match=message):
        jax.eval_shape(call, jnp.ones((1, 2, 5)))


@jax.jit
def _tree():
    paths, lengths = jnp.ones((1, 1, 2), jnp.int32), jnp.asarray([[2]])
    return tsjax.methods.merge_paths(jnp.asarray([1], jnp.int32), paths, lengths, width=3)

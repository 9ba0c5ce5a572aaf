# SPDX-License-Identifier: Apache-2.0
"""The sampler and the judge by themselves: what generate says, whatever batch, shard and tree."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_model
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tsjax

VOCAB = 61
MODEL = tiny_model()
WARP = dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)


def test_a_loop_around_sample_says_what_generate_says():
    prompts, seeds = [[1, 2, 3], [4, 5, 6]], (7, 8)
    wanted = tsjax.generate(
        MODEL, prompts, do_sample=True, max_new_tokens=12, seed=seeds, capacity=64,
        prefill_width=16, **WARP,
    )  # fmt: skip
    texts = np.asarray(prompts)
    for _ in range(12):
        logits = tsjax.forward(MODEL, texts)[:, -1:]
        positions = np.full((2, 1), texts.shape[1])
        token = tsjax.sample(logits, seeds, [0, 0], positions, **WARP)
        texts = np.concatenate([texts, token], axis=1)
    assert texts[:, 3:].tolist() == [row.tolist() for row in wanted.tokens]


def test_rows_and_positions_are_independent(rng):
    logits = jnp.asarray(rng.normal(size=(3, 5, VOCAB)), jnp.float32)
    positions = np.asarray([[0, 1, 2, 3, 4], [9, 10, 11, 12, 13], [7, 8, 9, 10, 11]])
    whole = np.asarray(tsjax.sample(logits, [1, 2, 3], [0, 1, 0], positions, **WARP))
    for row in range(3):
        for at in range(5):
            one = tsjax.sample(
                logits[row : row + 1, at : at + 1], [[1, 2, 3][row]], [[0, 1, 0][row]],
                positions[row : row + 1, at : at + 1], **WARP,
            )  # fmt: skip
            assert int(one[0, 0]) == whole[row, at]


@pytest.mark.parametrize("axes", [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)])
def test_shards_say_the_same(axes, rng):
    """On 1, 2 and 4 devices, split by rows or by the vocabulary."""
    vocab = 64
    logits = rng.normal(size=(4, 3, vocab)).astype(np.float32)
    seeds, repeats = np.arange(4), np.zeros(4, np.int64)
    positions = np.arange(12).reshape(4, 3)
    wanted = tsjax.sample(logits, seeds, repeats, positions, **WARP)
    devices = np.asarray(jax.devices()[: axes[0] * axes[1]]).reshape(axes)
    mesh = Mesh(devices, ("rows", "words"))
    placed = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("rows", None, "words")))

    @jax.jit
    def sampled(logits):
        return tsjax.sample(logits, seeds, repeats, positions, **WARP)

    np.testing.assert_array_equal(sampled(placed), wanted)


@hypothesis.given(seed=st.integers(0, 10**6), greedy=st.booleans())
@hypothesis.settings(max_examples=40)
def test_a_tree_emits_what_sampling_one_by_one_would(seed, greedy):
    """For a made-up model whose logits are a function of the last two tokens."""
    rng = np.random.default_rng(seed)
    alphabet, depth, paths = 4, 3, 5
    table = rng.normal(size=(alphabet, alphabet, alphabet)).astype(np.float32)
    root, before, length = int(rng.integers(alphabet)), int(rng.integers(alphabet)), 10
    guesses = jnp.asarray(rng.integers(0, alphabet, (1, paths, depth)), jnp.int32)
    lengths = jnp.asarray(rng.integers(0, depth + 1, (1, paths)), jnp.int32)
    tree = tsjax.merge_paths(
        jnp.asarray([root], jnp.int32), guesses, lengths, width=1 + paths * depth
    )
    tokens, parents = np.asarray(tree.tokens)[0], np.asarray(tree.parents)[0]
    logits = np.stack(
        [table[tokens[p] if p >= 0 else before, t] for t, p in zip(tokens, parents, strict=True)]
    )[None]
    positions = length + np.arange(depth + 1)[None]
    noise = None if greedy else tsjax.token_noise([seed], [0], positions, alphabet)
    law = logits if greedy else tsjax.warped_logits(logits, temperature=0.7)
    found = tsjax.verify(tree, law, noise)

    text = [before, root]
    for index in range(int(found.count[0])):
        row = table[text[-2], text[-1]][None, None]
        if greedy:
            text.append(int(row.argmax()))
        else:
            at = np.asarray([[length + index]])
            text.append(int(tsjax.sample(row, [seed], [0], at, temperature=0.7)[0, 0]))
    assert np.asarray(found.tokens)[0, : len(text) - 2].tolist() == text[2:]
    # And it goes on as long as some path goes on with it.
    drafted = [row[:n] for row, n in zip(guesses[0].tolist(), lengths[0].tolist(), strict=True)]
    agree = [
        next((i for i, (a, b) in enumerate(zip(d, text[2:], strict=False)) if a != b), len(d))
        for d in drafted
    ]
    assert int(found.count[0]) == 1 + min(max(agree), len(text) - 2)
    kept = np.asarray(found.path)[0, : int(found.count[0])]
    assert tokens[kept].tolist() == [root, *text[2:-1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: tsjax.sample(x[0], [0], [0], [[1]]), "logits"),
        (lambda x: tsjax.sample(x, [0], [0], [1, 2]), "positions"),
        (lambda x: tsjax.sample(x, [0], [0], [[1]]), "positions"),
        (lambda x: tsjax.sample(x, [0.9], [0], [[1, 2]]), r"seeds=\[0.9\] .*: \[B\] integers, at"),
        (lambda x: tsjax.sample(x, [-1], [0], [[1, 2]]), "seeds=-1 is not valid: .* at least 0"),
        (lambda x: tsjax.sample(x, [2**32], [0], [[1, 2]]), "seeds=4294967296 .* at most 42949672"),
        (lambda x: tsjax.sample(x, [0], jnp.asarray([-2]), [[1, 2]]), "repeats=-2 is not valid"),
        (lambda x: tsjax.sample(x, [0], [0], [[7.5, 8]]), r"positions=\[\[7.5, 8.0\]\] is no"),
        (lambda x: tsjax.sample(x, [0], [0], [[1, -7]]), "positions=-7 is not valid"),
        (lambda x: jax.jit(lambda p: tsjax.sample(x, [0], [0], p))(x[:, :, 0]), "positions='float"),
        (lambda x: tsjax.sample(x, [0], [0], [[1, 2]], temperature=0.0), "temperature"),
        (lambda x: tsjax.sample(x, [0], [0], [[1, 2]], repetition_penalty=1.2), "unknown argument"),
        (lambda x: tsjax.verify(_tree(), x), "logits"),
        (lambda x: tsjax.verify(_tree(), jnp.ones((1, 3, 5)), x), "noise"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(tsjax.TsjaxError, match=message):
        call(jnp.ones((1, 2, 5)))


def _tree():
    paths, lengths = jnp.ones((1, 1, 2), jnp.int32), jnp.asarray([[2]])
    return tsjax.merge_paths(jnp.asarray([1], jnp.int32), paths, lengths, width=3)

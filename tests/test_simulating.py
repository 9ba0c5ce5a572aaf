# SPDX-License-Identifier: Apache-2.0
"""Steps of given accepted lengths: what they accept, and that they are otherwise usual steps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import oracle, tiny_model

import tsjax
from tsjax.decoding.programs import programs
from tsjax.decoding.simulating import reach
from tsjax.decoding.tree import merge_paths

PROMPT = np.asarray([[3, 1, 4, 1, 5, 9, 2, 6]], np.int32)


def tree():
    """After the root 7: 1 2 3, and 1 4 beside it."""
    paths = jnp.asarray([[[1, 2, 3], [1, 4, 0]]], jnp.int32)
    lengths = jnp.asarray([[3, 2]], jnp.int32)
    return merge_paths(jnp.asarray([7]), paths, lengths, width=6, num_sources=1)


@pytest.mark.parametrize(("wanted", "count"), [(0, 0), (2, 2), (9, 3)])
def test_a_path_of_the_wanted_length_is_taken(wanted, count):
    found = reach(tree(), jnp.asarray([wanted]))
    assert found.count.tolist() == [count]
    path = found.path[0, : count + 1].tolist()
    assert np.asarray(tree().tokens)[0, path].tolist() == [7, 1, 2, 3][: count + 1]


@dataclasses.dataclass(frozen=True)
class Counting(tsjax.methods.Method):
    """Drafts 11 12 13, whatever was said."""

    def sizes(self, model):
        return tsjax.methods.Sizes(width=4, depth=3)

    def draft(self, model, params, state, noise):
        tokens, lengths = jnp.asarray([[[11, 12, 13]]], jnp.int32), jnp.asarray([[3]], jnp.int32)
        return (), merge_paths(state.root, tokens, lengths, width=4, num_sources=1)


def steps(lengths):
    """What 40 tokens after the prompt are found by."""
    model = tiny_model()
    cfg = tsjax.steps.DecodeConfig(model.cfg, Counting())
    state = tsjax.steps.init_state(PROMPT, [8], cfg=cfg, capacity=128, max_length=[48])
    state = tsjax.steps.prefill(model.params, state, width=16, cfg=cfg)
    program = programs("cpu", "float32").simulate
    return program(model.params, state, jnp.asarray(lengths, jnp.int32), 1000, cfg=cfg)


def test_steps_follow_the_lengths_and_begin_again():
    """40 tokens by steps of 1, 3, 4, 1, 3, 4, ...: five rounds; a draft cannot be longer than 3."""
    state = steps([0, 2, 7])
    assert state.length.tolist() == [48]
    assert state.stats.steps.tolist() == [15]
    assert state.stats.accepted.tolist() == [[5, 0, 5, 5]]
    assert state.stats.by_source.sum() == 5 * 5


def test_the_text_is_what_was_drafted():
    """And after it the model's own token."""
    state = steps([2, 2, 2])  # as many numbers as above, so it is one program
    text = state.tokens[0, 8:47].reshape(13, 3).tolist()
    assert [drafted for *drafted, _ in text] == 13 * [[11, 12]]
    assert state.sources[0, 8:47].reshape(13, 3).tolist() == 13 * [[1, 1, 0]]


def test_without_drafts_it_is_plain_decoding():
    expected = oracle(tiny_model(), PROMPT[0].tolist(), max_new_tokens=40)
    assert steps([0, 0, 0]).tokens[0, 8:48].tolist() == expected

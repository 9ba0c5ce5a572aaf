# SPDX-License-Identifier: Apache-2.0
"""The pure functions: prefill, decode_step, decode, forward.

Nothing here goes through `generate`, except to compare with it. What their programs cost is in
test_step_cost.py.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    VOCAB,
    chain,
    chain_model,
    compilations,
    decoded,
    fresh_state,
    new_tokens,
    oracle_logits,
    prefilled,
    tiny_model,
)

import tsjax
from tsjax.decoding.programs import programs
from tsjax.decoding.state import EOS, LENGTH

CAPACITY = 64
PROMPTS = [[1, 2, 3, 4, 5], [9, 8]]


@pytest.fixture(scope="module")
def model() -> tsjax.Model:
    return tiny_model()


def begun(model, prompts=PROMPTS, *, max_new_tokens=12, **settings):
    end = np.asarray([len(prompt) + max_new_tokens for prompt in prompts])
    return fresh_state(model, prompts, max_length=end, **settings)


@functools.partial(jax.jit, static_argnames="cfg")
def decode_step(params, state, *, cfg):
    return tsjax.steps.decode_step(params, state, cfg=cfg)


def run(model, state, num_steps):
    cfg = tsjax.steps.DecodeConfig(model=model.cfg)
    return decoded(model.params, prefilled(model.params, state, cfg=cfg), num_steps, cfg=cfg)


def row(state, index: int):
    """The part of a row that has a meaning: its buffers, cut at their lengths."""
    length, cached = int(state.length[index]), int(state.kv.length[index])
    return {
        "tokens": np.asarray(state.tokens)[index, :length],
        "k": [np.asarray(k)[index, :, :cached] for k in state.kv.k],
        "v": [np.asarray(v)[index, :, :cached] for v in state.kv.v],
        "last_seen": jax.tree.map(lambda x: np.asarray(x)[index], state.last_seen),
        "finish": int(state.finish[index]),
        "steps": int(state.stats.steps[index]),
    }


def specified(state):
    return [row(state, index) for index in range(state.tokens.shape[0])]


# --- forward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "num_kv_heads": 1}])
def test_forward_is_the_written_out_transformer(changes, rng):
    """Also traced with the model as argument, and in passes of any width."""
    model = tiny_model(**changes)
    tokens = rng.integers(0, VOCAB, (2, 21))
    expected = np.stack([oracle_logits(model, ids) for ids in tokens])
    np.testing.assert_allclose(tsjax.forward(model, tokens), expected, atol=2e-4)
    np.testing.assert_allclose(jax.jit(tsjax.forward)(model, tokens), expected, atol=2e-4)
    if not changes:
        parts = programs("cpu", "float32").logits(model.params, tokens, cfg=model.cfg, width=8)
        np.testing.assert_allclose(parts, expected, atol=2e-4)


def test_forward_takes_lists_and_refuses_other_shapes(model):
    expected = tsjax.forward(model, np.asarray([[1, 2, 3]]))
    with compilations() as compiled:
        np.testing.assert_array_equal(tsjax.forward(model, [[1, 2, 3]]), expected)
    assert "jit(logits)" not in compiled
    for bad in ([1, 2, 3], [[0.5]], [[]]):
        with pytest.raises(ValueError, match=r"tokens of shape .* is not valid: \[B, T\]"):
            tsjax.forward(model, bad)


# --- composition -------------------------------------------------------------------------------


def test_composed_in_the_users_own_jit_gives_the_tokens_of_generate(model):
    cfg = tsjax.steps.DecodeConfig(model=model.cfg)
    tokens, lengths = np.asarray([[1, 2, 3, 4, 5], [9, 8, 0, 0, 0]]), np.asarray([5, 2])

    @jax.jit
    def my_program(params, tokens, lengths):
        state = tsjax.steps.init_state(
            tokens, lengths, cfg=cfg, capacity=CAPACITY, max_length=lengths + 12
        )
        state = tsjax.steps.prefill(params, state, width=4, cfg=cfg)
        step = functools.partial(tsjax.steps.decode_step, params, cfg=cfg)
        return jax.lax.fori_loop(0, 15, lambda _, state: step(state), state)

    expected = tsjax.generate(model, PROMPTS, max_new_tokens=12)
    state = my_program(model.params, tokens, lengths)
    assert new_tokens(state) == [row.tolist() for row in expected.tokens]


def test_decode_is_decode_step_repeated(model):
    cfg = tsjax.steps.DecodeConfig(model=model.cfg)
    start = prefilled(model.params, begun(model, do_sample=True, seed=4), cfg=cfg)
    state = start
    for _ in range(5):
        state = decode_step(model.params, state, cfg=cfg)
    looped = decoded(model.params, start, 5, cfg=cfg)
    chex.assert_trees_all_close(specified(state), specified(looped), atol=1e-5)


def test_prefill_width_changes_nothing(model):
    cfg = tsjax.steps.DecodeConfig(model=model.cfg)
    expected = specified(prefilled(model.params, begun(model), cfg=cfg))
    actual = specified(prefilled(model.params, begun(model), cfg=cfg, width=3))
    chex.assert_trees_all_close(actual, expected, atol=1e-5)


# --- the end of rows ---------------------------------------------------------------------------


def test_rows_end_on_their_own_and_then_do_not_change():
    """Row 0 stops by its stop token, row 1 by its length, row 2 goes on."""
    model = chain_model({**chain(1, 2, 3, 4), 5: 6, 6: 5})
    state = begun(model, [[1], [5], [5, 6]], max_new_tokens=6, eos_token_id=(4,))
    state = state.replace(max_length=jnp.asarray([7, 4, 50]))
    early = run(model, state, 3)
    assert np.asarray(early.finish).tolist() == [EOS, LENGTH, 0]
    late = run(model, state, 23)
    assert new_tokens(late)[:2] == [[2, 3, 4], [6, 5, 6]]
    assert np.asarray(late.stats.steps).tolist() == [3, 3, 23]
    for index in (0, 1):
        chex.assert_trees_all_equal(row(late, index), row(early, index))
    # With no row left, it returns at once.
    ended = run(model, state.replace(max_length=jnp.asarray([7, 4, 5])), 10**6)
    assert np.asarray(ended.stats.steps).tolist() == [3, 3, 3]


def test_a_prefill_chunk_that_would_leave_the_buffers_begins_earlier(model):
    """19 tokens in passes of 16 with a capacity of 24: the second pass has to overlap the first."""
    prompt = [[(7 * i) % VOCAB for i in range(19)]]
    tight = run(model, begun(model, prompt, capacity=24, max_new_tokens=5), 5)
    roomy = run(model, begun(model, prompt, capacity=64, max_new_tokens=5), 5)
    assert tight.tokens[0, :24].tolist() == roomy.tokens[0, :24].tolist()
    with pytest.raises(ValueError, match="width=32 is not valid: at most the capacity 24"):
        state = begun(model, prompt, capacity=24, max_new_tokens=5)
        prefilled(model.params, state, cfg=tsjax.steps.DecodeConfig(model=model.cfg), width=32)


def test_a_donated_state_leaves_its_callers_arrays_alone(model):
    cfg = tsjax.steps.DecodeConfig(model=model.cfg)
    values = tsjax.steps.sampling_values(tsjax.GenerationConfig(), (), VOCAB, "float32")
    values = jax.tree.map(jnp.asarray, values)
    mine = (jnp.array([2]), jnp.array([9]), tsjax.steps.row_keys([0], [0]), values)
    state = tsjax.steps.init_state(
        jnp.array([[1, 2]]), mine[0], cfg=cfg, capacity=16, max_length=mine[1], row_key=mine[2],
        sampling=mine[3],
    )  # fmt: skip
    jax.block_until_ready(programs("cpu", "float32").decode(model.params, state, 2, cfg=cfg))
    assert not any(array.is_deleted() for array in jax.tree.leaves(mine))


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([1, 2], [2], r"tokens of shape \(2,\)"),
        ([[1.0]], [1], "float32 is not valid"),
        ([[1], [2]], [1], r"prompt_length of shape \(1,\).*2 rows"),
        ([[1] * 20], [20], "capacity=16"),
    ],
)
def test_init_state_refuses(model, tokens, lengths, message):
    cfg = tsjax.steps.DecodeConfig(model=model.cfg)
    with pytest.raises(ValueError, match=message):
        tsjax.steps.init_state(jnp.array(tokens), lengths, cfg=cfg, capacity=16, max_length=[16])


def test_a_row_ends_where_its_buffers_end(model):
    state = begun(model, [[1, 2, 3]], capacity=16, max_new_tokens=50)
    state = decoded(model.params, state, 50, cfg=tsjax.steps.DecodeConfig(model=model.cfg))
    assert int(state.length[0]) == 16


# --- what lies beyond the length --------------------------------------------------------------


@pytest.mark.parametrize("garbage", [np.nan, -1e30])
def test_slots_beyond_the_length_are_never_read(model, garbage):
    capacity = 1300
    cfg = tsjax.steps.DecodeConfig(model=model.cfg)
    prompts = [[(7 * i) % VOCAB for i in range(1025)], [1, 2, 3]]
    state = begun(model, prompts, capacity=capacity, do_sample=True, repetition_penalty=1.3)
    clean = prefilled(model.params, state, cfg=cfg, width=128)

    def poison(buffer):
        beyond = jnp.arange(capacity) >= clean.kv.length[:, None]
        return jnp.where(beyond[:, None, :, None], garbage, buffer)

    unknown = jnp.arange(capacity) >= clean.length[:, None]
    kv = clean.kv.replace(k=tuple(map(poison, clean.kv.k)), v=tuple(map(poison, clean.kv.v)))
    poisoned = clean.replace(kv=kv, tokens=jnp.where(unknown, VOCAB - 1, clean.tokens))
    expected = decoded(model.params, clean, 12, cfg=cfg)
    actual = decoded(model.params, poisoned, 12, cfg=cfg)
    chex.assert_trees_all_equal(specified(actual), specified(expected))

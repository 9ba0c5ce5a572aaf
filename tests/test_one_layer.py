# SPDX-License-Identifier: Apache-2.0
"""The one-layer drafter in a run: what it sees, and that it drafts what its training computes.

That tokens stay those of plain decoding is in test_method_contract.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import decoded, fresh_state, looping_model, prefilled, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import tsjax
from tsjax.base.errors import BadValue
from tsjax.costs import Costs, Line
from tsjax.decoding.start import first_memory
from tsjax.methods import correction, one_layer
from tsjax.methods.correction import LEARNED_AT_ONCE
from tsjax.methods.rates import first_rates
from tsjax.model.drafter import words_logits
from tsjax.model.logits import tapped_states
from tsjax.training import drafter_loss
from tsjax.training.drafter_loss import Pieces

LINE = Line(1.0)
CHEAP = Costs(
    passes=((1, LINE), (64, Line(1.01))), heads=0.0, choice=LINE, suffix=LINE, ngrams=0.0,
    overhead=0.0, origin="measured", any_rows=True,
)  # fmt: skip
PROMPT = [3, 14, 1, 5, 9, 2, 6]


def model_with_drafter(window: int = 64, **changes) -> tsjax.Model:
    shape = tsjax.training.OneLayer(mlp_dim=32, words=20, taps=(0, 1, 2), window=window)
    model = tiny_model(drafter=shape, num_layers=2, **changes)
    said = np.random.default_rng(5).permutation(model.cfg.vocab_size)[:20].astype(np.int32)
    drafter = model.params.drafter.replace(words=jnp.asarray(said))
    return model.replace(params=model.params.replace(drafter=drafter))


@functools.partial(jax.jit, static_argnames=("cfg", "number"))
def drafts(params, state, *, cfg, number):
    """What the drafter would say in this state, and the last step's first candidates."""
    model, noise = cfg.model, jnp.zeros((len(state.tokens), number, cfg.model.vocab_size))
    always = lambda depth, ranked: jnp.bool_(True)  # noqa: E731
    _, ranked, _ = one_layer.draft_chain(
        model, params, state, state.memory.layer, noise, number, 3, always
    )
    return [one.tokens for one in ranked], [one.scores for one in ranked]


def run_of(model, steps: int, method, prompts=(PROMPT,)):
    cfg = tsjax.steps.DecodeConfig(model.cfg, method)
    state = fresh_state(model, prompts, method=method, capacity=128)
    return cfg, decoded(model.params, prefilled(model.params, state, cfg=cfg), steps, cfg=cfg)


def trained(model, text, number: int):
    """What its training computes for a text, from the first place that a step computes on: the
    states of so many drafts in a row, and the model's own."""
    first, cfg = len(PROMPT) - 1, model.cfg
    taps = tapped_states(model.params, text, cfg=cfg.alone, taps=cfg.drafter.taps)[:, first:]
    text = jnp.asarray(text[:, first:])
    pieces = Pieces(taps, taps[:, :, -1], text, jnp.zeros_like(text), jnp.ones_like(text, bool))
    places = jnp.arange(text.shape[1], dtype=jnp.int32)
    drafter, embed = model.params.drafter, model.params.model.embed
    states = drafter_loss.unrolled(drafter, embed, pieces, places, number, cfg=cfg)
    return states, pieces.last


@pytest.mark.parametrize("drafted", [0, 3], ids=["plain steps", "drafting steps"])
def test_a_run_drafts_what_training_computes(drafted):
    """After steps of any number of tokens: the drafter has read all tokens since the run began, so
    its chain is what training unrolls at that place of the text."""
    model = model_with_drafter() if drafted == 0 else loop_with_drafter()
    width = 1 + max(drafted, 1)
    method = tsjax.LikelyTree(places=0, drafter=3, adapt=False, width=width, costs=CHEAP)
    cfg, state = run_of(model, 9, method)
    if drafted:
        assert int(state.length[0]) > len(PROMPT) + 12  # several tokens came in one step
    tokens, scores = drafts(model.params, state, cfg=cfg, number=3)
    length = int(state.length[0])
    text = np.asarray(state.tokens[0, :length])
    text = np.concatenate([text, [int(one[0, 0]) for one in tokens]])[None].astype(np.int32)
    states, _ = trained(model, text, 3)
    for row, found in enumerate(states):
        wanted = words_logits(model.params.drafter, found, cfg=model.cfg)
        wanted = np.asarray(wanted)[0, length - 1 - len(PROMPT)]
        order = np.argsort(-wanted, kind="stable")[:3]
        words = np.asarray(model.params.drafter.words)
        np.testing.assert_allclose(scores[row][0], wanted[order], rtol=1e-3, atol=1e-3)
        assert np.asarray(tokens[row][0]).tolist() == words[order].tolist()


def loop_with_drafter() -> tsjax.Model:
    return looping_model(
        drafter=tsjax.training.OneLayer(mlp_dim=16, words=20, taps=(0, 1, 2), window=64),
        num_layers=2,
    )


def delta_rule(matrix, states, wanted):
    """Row by row, in float64."""
    for state, target in zip(states, wanted, strict=True):
        missing = target - (state + matrix @ state)
        matrix = matrix + LEARNED_AT_ONCE * np.outer(missing, state) / len(state)
    return matrix


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.floats(0, 1))
def test_a_correction_learns_as_row_by_row(seed, rows, alike):
    """Also of rows that are alike, where each leaves little to learn for the next; and of those
    alone that count."""
    rng = np.random.default_rng(seed)
    states, wanted = rng.standard_normal((2, 2, rows, 6))
    states = alike * states[:, :1] + (1 - alike) * states
    matrix, counts = rng.standard_normal((2, 6, 6)), rng.random((2, rows)) < 0.7
    with jax.enable_x64(True):
        found = correction.after_rows(*map(jnp.asarray, (matrix, states, wanted, counts)))
    for b in range(2):
        some = counts[b]
        expected = delta_rule(matrix[b], states[b, some], wanted[b, some])
        np.testing.assert_allclose(found[b], expected, atol=1e-9)


def test_learning_calls_nothing_that_begins_threads():
    """LAPACK's threads wait for more work, and take a CPU's cores from the rest of a step."""
    shapes = (1, 8, 8), (1, 5, 8), (1, 5, 8)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    learned = jax.jit(correction.after_rows).lower(*given, jax.ShapeDtypeStruct((1, 5), bool))
    assert "lapack" not in learned.compile().as_text()


def test_a_run_learns_from_each_row_that_the_model_has_answered():
    """Its matrix is that of a plain loop over the text: each row's state as training computes it,
    and the model's state a token later."""
    model = loop_with_drafter()
    method = tsjax.LikelyTree(places=0, drafter=3, width=4, costs=CHEAP)
    cfg, state = run_of(model, 9, method)
    length = int(state.length[0])
    (said,), own = trained(model, state.tokens[:1, :length], 1)
    normed = [np.asarray(correction.normed_state(x, np.float32)[0]) for x in (said, own)]
    # A step's rows are read by the next step's drafts.
    known = length - int(state.emitted[0]) - len(PROMPT)
    expected = delta_rule(np.zeros((model.cfg.embed_dim,) * 2), normed[0][: known - 1],
                          normed[1][1:known])  # fmt: skip
    assert known > 10 and np.abs(expected).max() > 0.01
    found = np.asarray(state.memory.layer.correction)
    np.testing.assert_allclose(found[0], expected, atol=2e-4)
    # It outlives a change of method, as rates do.
    cfg = tsjax.steps.DecodeConfig(model.cfg, tsjax.LikelyTree(drafter=1, costs=CHEAP))
    how = dict(cfg=cfg, batch=1, capacity=state.tokens.shape[1], mesh=None)
    taught, fresh = (first_memory(one, **how)[0] for one in (method.lesson(state.memory), None))
    assert np.array_equal(taught.layer.correction, found) and not fresh.layer.correction.any()
    assert np.array_equal(taught.rates.values, state.memory.rates.values)
    assert not np.array_equal(taught.rates.values, fresh.rates.values)
    assert np.array_equal(fresh.rates.values, first_rates().values)


def test_a_published_head_does_not_learn():
    shape = tsjax.training.OneLayer(mlp_dim=16, words=20, taps=(0, 1, 2), token_in_state=False)
    model = tiny_model(drafter=shape, num_layers=2)
    method = tsjax.LikelyTree(drafter=2, costs=CHEAP)
    state = fresh_state(model, [PROMPT], method=method)
    cfg = tsjax.steps.DecodeConfig(model.cfg, method)
    step = functools.partial(tsjax.steps.decode_step, cfg=cfg)
    assert jax.eval_shape(step, model.params, state).memory.layer.correction is None


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(5, 12), st.lists(st.integers(0, 5), max_size=25))
def test_the_window_holds_the_last_rows(longest, window, counts):
    """Against a list: of each row that counts one copy, none older than the window, and none lost
    but those at its end that a block does not fit over."""
    counts = [min(count, longest) for count in counts]
    shape = tsjax.training.OneLayer(mlp_dim=4, words=2, taps=(0,), window=window)
    cfg = tiny_model(drafter=shape).cfg
    memory = one_layer.init_layer_memory(cfg, 1, 2, longest)
    written, held = 0, []
    K, H = cfg.num_kv_heads, cfg.head_dim
    for count in counts:
        numbers = np.arange(written + 1, written + 1 + longest, dtype=np.float32)
        rows = np.broadcast_to(numbers[None, :, None, None], (1, longest, K, H))
        memory = one_layer.with_rows(memory, rows, rows, jnp.asarray([count]), window)
        written += count
        held = np.asarray(memory.k)[0, 0, : int(memory.held[0]), 0].tolist()
        assert len(set(held)) == len(held) and 0 not in held
        assert all(written - max(window, longest) < number <= written for number in held)
        surely = range(written - max(window - 2 * longest, 0) + 1, written + 1)
        assert {number for number in surely if number > 0} <= set(held)


def test_rows_of_a_batch_draft_as_alone():
    """Rows of other lengths and other numbers of fresh tokens."""
    model = loop_with_drafter()
    method = tsjax.LikelyTree(places=0, drafter=3, width=4, costs=CHEAP)
    prompts = (PROMPT, [4, 4, 5])
    cfg, together = run_of(model, 6, method, prompts)
    tokens, scores = drafts(model.params, together, cfg=cfg, number=3)
    for row, prompt in enumerate(prompts):
        cfg, alone = run_of(model, 6, method, (prompt,))
        some, theirs = drafts(model.params, alone, cfg=cfg, number=3)
        for depth in range(3):
            assert tokens[depth][row].tolist() == some[depth][0].tolist()
            np.testing.assert_allclose(scores[depth][row], theirs[depth][0], rtol=1e-4)


def test_what_it_needs_is_said_before_anything_runs():
    with pytest.raises(BadValue, match="drafter=2 needs a one-layer drafter"):
        tsjax.generate(tiny_model(), [1, 2], method=tsjax.LikelyTree(drafter=2), max_new_tokens=2)
    with pytest.raises(BadValue, match="drafter=2 is not valid: 0, with draft_passes or heads"):
        tsjax.LikelyTree(drafter=2, draft_passes=1)
    with pytest.raises(BadValue, match="drafter taps=\\(0, 9\\) is not valid: at most"):
        tiny_model(drafter=tsjax.training.OneLayer(mlp_dim=4, words=2, taps=(0, 9)))

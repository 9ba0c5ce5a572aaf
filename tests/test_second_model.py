# SPDX-License-Identifier: Apache-2.0
"""A second model that drafts: what it has read, what it guesses, and what the whole run returns.

What a reader guesses is compared with the slow decoder on the tokens that the rule says it holds.
"""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import RecordingStreamer, oracle_logits, save_tokenizer, tiny_model

import tsjax
from tsjax.methods.second_model import forgotten, guess, init_reader, kept_up, known_text

VOCAB, CAPACITY, NUMBER = 24, 400, 3
SHAPE = dict(vocab_size=VOCAB, embed_dim=16, mlp_dim=16, num_heads=2, num_kv_heads=1)
SAMPLED = dict(do_sample=True, temperature=0.9, min_p=0.02, repetition_penalty=1.1, seed=7)
SIZES = dict(max_new_tokens=61, capacity=128, prefill_width=16)
PROMPTS = [[1, 2, 3, 1, 2, 3, 4] * 4, [4, 5]]


@functools.cache
def big():
    return tiny_model(seed=0, vocab_size=VOCAB)


@functools.cache
def small():
    return tiny_model(seed=5, num_layers=1, **SHAPE)


# --- what it has read -----------------------------------------------------------------------------

BUDGET, SINKS = 40, 4
STREAMING = tsjax.DraftModel(draft_choice="streaming", draft_budget=BUDGET, num_sinks=SINKS)
EVERYTHING = tsjax.DraftModel()


class Held:
    """The rule of Reader for one row: the tokens that it holds."""

    def __init__(self, limit, sinks):
        self.limit, self.sinks, self.behind = limit, sinks, sinks

    def tokens(self, text):
        if self.sinks + len(text) - 1 - self.behind > self.limit:
            self.behind = len(text) - 1 - (self.limit - self.sinks + 1) // 2
        return [*text[: self.sinks], *text[self.behind :]] if self.behind > self.sinks else text


@functools.partial(jax.jit, static_argnames=("settings",))
def step(reader, tokens, length, right, settings):
    """The reader after `length` known tokens, of which what it has read is right up to `right`, and
    what it guesses."""
    model = small()
    weights, running = model.params.model, jnp.ones(length.shape, bool)
    reader = forgotten(reader, right)
    reader = kept_up(reader, settings, weights, tokens, length - 1, NUMBER, cfg=model.cfg)
    noise, text = jnp.zeros((len(tokens), NUMBER, VOCAB)), known_text(state_of(tokens, length), 3)
    state = state_of(tokens, length)
    return guess(reader, weights, state, text, noise, NUMBER, running, cfg=model.cfg)


def state_of(tokens, length):
    cfg = tsjax.DecodeConfig(model=small().cfg)
    state = tsjax.init_state(
        tokens, length, cfg=cfg, capacity=CAPACITY, max_length=jnp.full(length.shape, CAPACITY)
    )
    return state


one_step = st.tuples(st.integers(0, NUMBER), st.sampled_from([0, 0, 0, 1, 2, 9]))


@hypothesis.given(
    st.tuples(st.integers(1, 120), st.integers(1, 30)),
    st.lists(st.tuples(one_step, one_step), min_size=3, max_size=12),
    st.sampled_from([STREAMING, EVERYTHING]),
    st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=12)
def test_guesses_are_those_of_a_model_that_reads_what_the_rule_says(first, steps, settings, seed):
    """Some of its guesses turn out right, then comes a token that it did not guess, or several."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(VOCAB, size=(2, CAPACITY))
    lengths, right = list(first), [0, 0]
    reader = init_reader(settings, small().cfg, 2, CAPACITY, NUMBER)
    limit = BUDGET if settings is STREAMING else CAPACITY
    rules = [Held(limit, settings.num_sinks) for _ in range(2)]
    for step_of_rows in (*steps, ((0, 0), (0, 0))):
        reader, found = step(
            reader, jnp.asarray(texts, jnp.int32), np.asarray(lengths), np.asarray(right), settings
        )
        for row, (rule, (accepted, more)) in enumerate(zip(rules, step_of_rows, strict=True)):
            held = list(rule.tokens(texts[row, : lengths[row]].tolist()))
            assert len(held) <= limit + 1
            guesses = np.asarray(found)[row].tolist()
            for token in guesses:
                logits = oracle_logits(small(), held)[-1]
                top = np.sort(logits)[-2:]
                assert token == np.argmax(logits) or top[1] - top[0] < 1e-4
                held.append(token)
            texts[row, lengths[row] :][:accepted] = guesses[:accepted]
            right[row] = lengths[row] + accepted
            lengths[row] += accepted + 1 + more


def test_a_streaming_reader_meets_no_large_position():
    """So it may have been made for short texts: its buffers have no more slots."""
    reader = init_reader(STREAMING, small().cfg, 1, 100_000, NUMBER)
    assert reader.kv.capacity < BUDGET + 100


# --- what is accepted -----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 4])
def test_the_same_model_is_right_each_time(settings, length):
    """As both share the noise of each position. 1 + 60 tokens: the first step has the prompt's."""
    method = tsjax.DraftModel(length=length)
    result = tsjax.generate(
        big(), PROMPTS, method=method, draft_model=big(), **{**SIZES, **settings}
    )
    steps = -(-SIZES["max_new_tokens"] // (length + 1))
    assert list(result.stats.steps) == [steps] * len(PROMPTS)


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_lowest_level_changes_no_chain(settings):
    """TriForce's chain is what passes on the retrieval cache alone would draft, one by one."""
    of_cache = dict(draft_choice="retrieval", draft_budget=24, num_sinks=8, draft_refresh="never")
    alone = tsjax.MagicDec(draft_passes=5, **of_cache)
    triforce = tsjax.TriForce(length=5, **of_cache)
    found = []
    with jax.enable_x64(True):
        model = tiny_model(seed=0, vocab_size=VOCAB, dtype="float64")
        second = tiny_model(seed=5, num_layers=1, dtype="float64", **SHAPE)
        inner = dict(inner_budget=40, inner_sinks=2)
        for method, draft_model in (
            (alone, None),
            (triforce, None),
            (dataclasses.replace(triforce, **inner), second),
            (dataclasses.replace(triforce, inner_length=3, **inner), second),
            (dataclasses.replace(triforce, inner_length=4), model),
        ):
            result = tsjax.generate(
                model, PROMPTS, method=method, draft_model=draft_model, **{**SIZES, **settings}
            )
            found.append((list(result.stats.steps), [row.tolist() for row in result.tokens]))
    assert all(one == found[0] for one in found)
    assert sum(found[0][0]) < 100, "something is accepted"


def test_the_lowest_level_saves_passes_of_the_middle_one():
    """With the model itself as the second one, a pass accepts all that it is offered."""
    model = big()
    passes = {}
    for inner_length in (1, 2, 5):
        method = tsjax.TriForce(length=6, draft_choice="all", inner_length=inner_length)
        method = dataclasses.replace(method, model=model.cfg, inner_budget=CAPACITY)
        cfg = tsjax.DecodeConfig(model=model.cfg, method=method)
        tokens = jnp.asarray([PROMPTS[0]], jnp.int32)
        state = tsjax.init_state(
            tokens, jnp.asarray([28]), cfg=cfg, capacity=128, max_length=jnp.asarray([100])
        )
        params = model.params.replace(draft_model=model.params.model)
        state = tsjax.prefill(params, state, width=16, cfg=cfg)
        state = tsjax.decode(params, state, 2, cfg=cfg)  # the middle level's cache is filled
        count, begun = 0, (state.memory.cache, state.memory.reader, known_text(state, method._most))
        noise = jnp.zeros((1, method._most, VOCAB))
        while int(begun[2].count[0]) < method.length:
            begun = method._lengthen(model.cfg, params, state, noise, *begun)
            count += 1
        passes[inner_length] = count
    assert passes == {1: 3, 2: 2, 5: 1}


# --- how it is asked for --------------------------------------------------------------------------

METHODS = {
    "all": tsjax.DraftModel(length=3),
    "importance": tsjax.DraftModel(draft_choice="importance", draft_budget=20, num_sinks=2),
    "triforce": tsjax.TriForce(draft_budget=24, inner_budget=40, inner_sinks=2),
}


@pytest.mark.parametrize("name", METHODS)
def test_streamed_saved_and_resumed(name, tmp_path):
    settings = dict(draft_model=small(), method=METHODS[name], **SIZES, **SAMPLED)
    plain = tsjax.generate(big(), PROMPTS[0], **SIZES, **SAMPLED).tokens[0].tolist()
    streamer, path = RecordingStreamer(), str(tmp_path / "run.json")
    tsjax.generate(big(), PROMPTS[0], streamer=streamer, **settings)
    assert streamer.tokens == plain
    settings["max_new_tokens"] = 20
    tsjax.generate(big(), PROMPTS[0], save_to=path, **settings)
    resumed = tsjax.generate(
        big(), resume_from=path, draft_model=small(), max_new_tokens=SIZES["max_new_tokens"]
    )
    assert resumed.tokens[0].tolist() == plain
    assert type(resumed.stats.method) is type(METHODS[name])
    if name != "triforce":  # which goes on without one
        with pytest.raises(ValueError, match="draft_model=None is not valid: a smaller model"):
            tsjax.generate(big(), resume_from=path, max_new_tokens=30)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("second_is_split", [True, False])
def test_on_a_mesh(name, second_is_split):
    """The tokens and the drafts that are right are those of one device."""
    mesh = jax.make_mesh((2,), ("model",))
    settings = dict(method=METHODS[name], **SAMPLED, **SIZES)
    alone = tsjax.generate(big(), PROMPTS, draft_model=small(), **settings)
    split = functools.partial(tiny_model, mesh=mesh)
    second = split(seed=5, num_layers=1, **SHAPE) if second_is_split else small()
    found = tsjax.generate(split(seed=0, vocab_size=VOCAB), PROMPTS, draft_model=second, **settings)
    for row, expected in zip(found.tokens, alone.tokens, strict=True):
        np.testing.assert_array_equal(row, expected)
    assert found.stats.accepted_lengths == alone.stats.accepted_lengths


def test_what_is_not_valid():
    asked = dict(max_new_tokens=4, capacity=64)
    with pytest.raises(ValueError, match="draft_model='a model'.*NGram does not"):
        tsjax.generate(big(), [1], method="ngram", draft_model=small(), **asked)
    with pytest.raises(TypeError, match="draft_model='small' is not valid"):
        tsjax.generate(big(), [1], method="draft_model", draft_model="small", **asked)
    with pytest.raises(ValueError, match="draft_model=None is not valid: a smaller model"):
        tsjax.generate(big(), [1], method="draft_model", **asked)
    other = tiny_model(seed=1, **{**SHAPE, "vocab_size": VOCAB + 1})
    with pytest.raises(ValueError, match="a vocabulary of 25 tokens"):
        tsjax.generate(big(), [1], method="draft_model", draft_model=other, **asked)
    for wrong in (dict(length=0), dict(draft_choice="snapkv"), dict(draft_budget=16)):
        (field,) = wrong
        with pytest.raises(ValueError, match=f"{field}="):
            tsjax.DraftModel(**wrong)
    for wrong in (dict(length=0), dict(inner_length=0), dict(inner_budget=16)):
        (field,) = wrong
        with pytest.raises(ValueError, match=f"{field}="):
            tsjax.TriForce(**wrong)


def test_vocabularies_are_compared_by_name(tmp_path):
    """Matrices with unused rows at their ends are no difference; another word is."""
    folder = tmp_path / "one"
    folder.mkdir()
    save_tokenizer(folder)
    words = len(tiny_model(path=str(folder)).tokenizer.get_vocab())
    model = tiny_model(path=str(folder), vocab_size=words)
    wider = tiny_model(path=str(folder), vocab_size=words + 5, num_layers=1, seed=3)
    plain = tsjax.generate(model, [1, 2, 3], **SIZES).tokens[0].tolist()
    for one, second in ((model, wider), (wider, model)):
        plain = tsjax.generate(one, [1, 2, 3], **SIZES).tokens[0].tolist()
        result = tsjax.generate(one, [1, 2, 3], method="draft_model", draft_model=second, **SIZES)
        assert result.tokens[0].tolist() == plain

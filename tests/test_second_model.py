# SPDX-License-Identifier: Apache-2.0
"""A second model that drafts: what it has read, what it guesses, and what the whole run returns.

What a reader guesses is compared with the slow decoder on the tokens that the rule says it holds.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PROMPTS, SIZES, looping_model, oracle_logits, save_tokenizer, tiny_model

import tsjax
from tsjax.host.asking import make_request
from tsjax.methods.second_model import forgotten, guess, init_reader, kept_up, known_text

VOCAB, CAPACITY, NUMBER = 24, 400, 3
SHAPE = dict(vocab_size=VOCAB, embed_dim=16, mlp_dim=16, num_heads=2, num_kv_heads=1)
SAMPLED = dict(do_sample=True, temperature=0.9, min_p=0.02, repetition_penalty=1.1, seed=7)


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
    state = tsjax.steps.init_state(
        tokens, length, cfg=tsjax.steps.DecodeConfig(model=model.cfg), capacity=CAPACITY,
        max_length=jnp.full(length.shape, CAPACITY),
    )  # fmt: skip
    noise, text = jnp.zeros((len(tokens), NUMBER, VOCAB)), known_text(state, NUMBER)
    return guess(reader, weights, state, text, noise, NUMBER, running, cfg=model.cfg)


one_step = st.tuples(st.integers(0, NUMBER), st.sampled_from([0, 0, 0, 1, 2, 9]))


@hypothesis.given(
    st.tuples(st.integers(1, 120), st.integers(1, 30)),
    st.lists(st.tuples(one_step, one_step), min_size=3, max_size=12),
    st.sampled_from([STREAMING, EVERYTHING]),
    st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=10)
def test_guesses_are_those_of_a_model_that_reads_what_the_rule_says(first, steps, settings, seed):
    """Some of its guesses turn out right, then comes a token that it did not guess, or several."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(VOCAB, size=(2, CAPACITY))
    lengths, right = list(first), [0, 0]
    reader = init_reader(settings, small().cfg, 2, CAPACITY, NUMBER)
    # A streaming reader meets no large position, so it may have been made for short texts.
    assert settings is EVERYTHING or reader.kv.capacity < BUDGET + 100
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


# --- what is accepted -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "settings"), [pytest.param(1, {}, marks=pytest.mark.wide), (4, SAMPLED)]
)
def test_the_same_model_is_right_each_time(length, settings, tmp_path):
    """As both share the noise of each position. 1 + 40 tokens: the first step has the prompt's."""
    method, model, path = tsjax.DraftModel(length=length), looping_model(), tmp_path / "run.json"
    result = tsjax.generate(
        model, PROMPTS, method=method, draft_model=model, max_new_tokens=41, save_to=path,
        **settings, **SIZES,
    )  # fmt: skip
    assert list(result.stats.steps) == [-(-41 // (length + 1))] * len(PROMPTS)
    with pytest.raises(ValueError, match="draft_model=None is not valid: a smaller model"):
        tsjax.generate(model, resume_from=path, max_new_tokens=50)


@pytest.mark.wide
def test_the_lowest_level_changes_no_chain():
    """TriForce's chain is what passes on the retrieval cache alone would draft, one by one."""
    of_cache = dict(draft_choice="retrieval", draft_budget=24, num_sinks=8, draft_refresh="never")
    alone = tsjax.methods.MagicDec(draft_passes=5, **of_cache)
    triforce = tsjax.methods.TriForce(length=5, inner_budget=40, inner_sinks=2, **of_cache)
    found = []
    with jax.enable_x64(True):
        model, second = (looping_model(dtype="float64", num_layers=n) for n in (2, 1))
        for method, draft_model in ((alone, None), (triforce, None), (triforce, second)):
            result = tsjax.generate(
                model, [PROMPTS[0] * 4], method=method, draft_model=draft_model,
                max_new_tokens=60, **SAMPLED, **SIZES,
            )  # fmt: skip
            found.append((list(result.stats.steps), [row.tolist() for row in result.tokens]))
    assert all(one == found[0] for one in found)
    assert found[0][0][0] < 45, "something is accepted"


# --- how it is asked for --------------------------------------------------------------------------


def test_what_is_not_valid():
    model, asked = looping_model(), dict(max_new_tokens=4, capacity=64)
    other = tiny_model(seed=1, **{**SHAPE, "vocab_size": VOCAB + 1})
    for error, message, given in (
        (ValueError, "draft_model='a model'.*NGram does not",
         dict(method="ngram", draft_model=small())),
        (TypeError, "draft_model='small' is not valid",
         dict(method="draft_model", draft_model="small")),
        (ValueError, "draft_model=None is not valid: a smaller model", dict(method="draft_model")),
        (ValueError, "a vocabulary of 25 tokens", dict(method="draft_model", draft_model=other)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            tsjax.generate(model, [1], **given, **asked)
    for method, field, value in (
        (tsjax.DraftModel, "length", 0),
        (tsjax.DraftModel, "draft_choice", "snapkv"),
        (tsjax.DraftModel, "draft_budget", 16),
        (tsjax.methods.TriForce, "inner_budget", 16),
    ):
        with pytest.raises(ValueError, match=f"{field}={value!r}"):
            method(**{field: value})


def test_vocabularies_are_compared_by_name(tmp_path):
    """Matrices with unused rows at their ends are no difference."""
    save_tokenizer(tmp_path)
    words = len(tiny_model(path=str(tmp_path)).tokenizer.get_vocab())
    exact = tiny_model(path=str(tmp_path), vocab_size=words)
    wider = tiny_model(path=str(tmp_path), vocab_size=words + 5, num_layers=1, seed=3)
    for model, second in ((exact, wider), (wider, exact)):
        settings = dict(max_new_tokens=9)
        make_request(model, [1, 2, 3], None, settings, draft_model=second, method="draft_model")

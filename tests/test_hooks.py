# SPDX-License-Identifier: Apache-2.0
"""Penalties and processors that read the text: against plain loops, transformers and each other.

That a node of a tree is judged by its own text, bit for bit, is in test_verification.py. Here: what
the rules say, that drafts change no token under them, and that a run is saved with their names.
"""

import dataclasses
import importlib.util
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import LOOPING, PROMPTS, SIZES, chain_model, compilations, looping_model

import tsjax
from tsjax.decoding import processors
from tsjax.decoding.processors import (
    KnownText,
    apply,
    bar_repeated_ngrams,
    first_counts,
    first_last_seen,
    penalise_counts,
)
from tsjax.decoding.sampling import process

VOCAB = LOOPING["vocab_size"]
MODEL = looping_model()
HAS_TORCH = importlib.util.find_spec("torch") is not None


# --- the rules, by plain loops -------------------------------------------------------------------


def by_counts(logits, text, prompt_length, presence, frequency):
    made = list(text[prompt_length:])
    return [
        x - frequency * made.count(token) - (presence if token in made else 0.0)
        for token, x in enumerate(logits)
    ]


def by_ngrams(logits, text, size):
    scores, text = list(logits), list(text)
    last = text[len(text) - (size - 1) :] if size > 1 else []
    for start in range(len(text) - size + 1):
        if text[start : start + size - 1] == last:
            scores[text[start + size - 1]] = -np.inf
    return scores


texts = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@hypothesis.given(
    text=texts, size=st.integers(1, 6), room=st.integers(0, 3),
    at_once=st.sampled_from([1, 5, processors.COMPARED_AT_ONCE]), data=st.data(),
)  # fmt: skip
@hypothesis.settings(max_examples=40)
def test_the_rules_are_the_plain_loops(text, size, room, at_once, data):
    """Also where a text is compared a few tokens at a time."""
    prompt_length = data.draw(st.integers(0, len(text)))
    presence, frequency = (data.draw(st.floats(-2, 2, width=32)) for _ in range(2))
    tokens = jnp.asarray([text + [0] * room + [1] * (24 - len(text) - room)])
    length, start = (jnp.asarray([n], jnp.int32) for n in (len(text), prompt_length))
    counts = first_counts(tokens, start, length, VOCAB)
    known = KnownText(tokens, length, start, None, counts)
    logits = np.random.default_rng(size).normal(size=VOCAB).astype(np.float32)
    given = jnp.asarray(logits)[None, None]
    out = penalise_counts(given, known, jnp.float32(presence), jnp.float32(frequency), None)
    wanted = by_counts(logits, text, prompt_length, presence, frequency)
    np.testing.assert_allclose(out[0, 0], wanted, rtol=1e-5, atol=1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processors, "COMPARED_AT_ONCE", at_once)
        out = bar_repeated_ngrams(given, known, size, None)
    np.testing.assert_array_equal(out[0, 0], np.float32(by_ngrams(logits, text, size)))


@pytest.mark.parity
@pytest.mark.skipif(not HAS_TORCH, reason="there is no torch")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ngrams_and_bad_words_are_those_of_transformers(size, rng):
    import torch
    from transformers.generation import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

    words = [[3], [1, 2], [0, 1, 2], [2, 2]]
    for _ in range(20):
        text = rng.integers(0, 4, 12)
        logits = rng.normal(size=VOCAB).astype(np.float32)
        ids, scores = torch.tensor(text)[None], torch.tensor(logits)[None]
        known = KnownText(jnp.asarray(text[None]), jnp.asarray([12]), jnp.asarray([4]))
        given = jnp.asarray(logits)[None, None]
        theirs = NoRepeatNGramLogitsProcessor(size)(ids, scores.clone())[0].numpy()
        np.testing.assert_array_equal(bar_repeated_ngrams(given, known, size, None)[0, 0], theirs)
        theirs = NoBadWordsLogitsProcessor(words, eos_token_id=99)(ids, scores.clone())[0].numpy()
        ours = apply(tsjax.bad_words(words, VOCAB), given, known, None)[0, 0]
        np.testing.assert_array_equal(ours, theirs)


def test_processors_come_after_the_penalties():
    """By hand: 1 and 3 are halved, or doubled below 0, and were said once; then the processor."""
    config = tsjax.GenerationConfig(repetition_penalty=2.0, presence_penalty=0.25)
    hook = tsjax.LogitsProcessor(lambda logits, tokens, length: 2 * logits + 1)
    values = tsjax.steps.sampling_values(config, (), 4, "float32", [hook])
    tokens, length, start = jnp.asarray([[3, 1, 3]]), jnp.asarray([3]), jnp.asarray([1])
    seen = first_last_seen(tokens, length, 4)
    text = KnownText(tokens, length, start, seen, first_counts(tokens, start, length, 4))
    found = process(jnp.asarray([[[1.0, 2.0, 3.0, -1.0]]]), text, length[:, None], values)
    assert found[0, 0].tolist() == [3.0, 2.5, 7.0, -3.5]


# --- drafts change nothing -----------------------------------------------------------------------


def alternating(logits, tokens, length, strength):
    """Likes a token the more the farther it is from the two last ones; depends on the length."""
    last, before = tokens[length - 1], tokens[jnp.maximum(length - 2, 0)]
    ids = jnp.arange(logits.shape[0])
    return logits + strength * jnp.abs(ids - last) - jnp.where(ids == before, 2.0, 0) + length % 2


@dataclasses.dataclass
class CannotBeHashed:
    by: float

    def __call__(self, logits, tokens, length):
        return logits + self.by


BARRED = dict(no_repeat_ngram_size=3)
HOOKS = dict(
    logits_processor=[
        tsjax.token_bias({3: 1.5, 4: -np.inf}, VOCAB),
        tsjax.bad_words([[1, 2], [5]], VOCAB),
        tsjax.LogitsProcessor(alternating, arrays=(0.05,)),
    ],
    repetition_penalty=1.2,
    repetition_window=6,
    do_sample=True,
    seed=5,
)


@pytest.mark.parametrize("settings", [HOOKS, BARRED], ids=["hooks", "ngrams"])
def test_drafts_change_no_token(settings):
    how = dict(max_new_tokens=40, **SIZES, **settings)
    plain = tsjax.generate(MODEL, PROMPTS, **how)
    found = tsjax.generate(MODEL, PROMPTS, method=AnyTree(), **how)
    assert [row.tolist() for row in found.tokens] == [row.tolist() for row in plain.tokens]
    assert found.stats.accepted > 5


@pytest.mark.wide
@pytest.mark.parametrize("where", ["after a lazy prefill", "on a mesh"])
def test_with_all_at_once_drafts_change_neither_tokens_nor_log_probabilities(where):
    prompts = [(np.arange(40) * 5 % VOCAB).tolist(), (np.arange(30) * 3 % VOCAB).tolist()]
    how = dict(
        HOOKS, frequency_penalty=0.1, no_repeat_ngram_size=4, min_new_tokens=9, logprobs=1,
        max_new_tokens=25, **SIZES,
    )  # fmt: skip
    model = MODEL
    if where == "on a mesh":
        model = looping_model(mesh=jax.make_mesh((2, 2), ("data", "model")))
        how["num_return_sequences"] = 2
    else:
        how["prefill"] = tsjax.LazyPrefill(keep="paper", revive="never")
    plain = tsjax.generate(MODEL, prompts, **how)
    found = tsjax.generate(model, prompts, method=AnyTree(), **how)
    assert [row.tolist() for row in found.tokens] == [row.tolist() for row in plain.tokens]
    assert found.stats.accepted > 3
    for one, other in zip(found.logprobs, plain.logprobs, strict=True):
        jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, atol=1e-4), one, other)


def test_drafts_are_accepted_where_a_hook_says_what_comes():
    """So drafts are chosen and judged by the same processed logits."""

    def counting(logits, tokens, length):
        return jnp.where(jnp.arange(VOCAB) == (tokens[length - 1] + 1) % VOCAB, 9.0, -9.0)

    model = chain_model({}, vocab_size=VOCAB)
    how = dict(max_new_tokens=60, logits_processor=counting, **SIZES)
    chain = tsjax.methods.MagicDec(draft_budget=12, num_sinks=2)
    found = tsjax.generate(model, [3], method=chain, **how)
    assert found.tokens[0].tolist() == [(4 + i) % VOCAB for i in range(60)]
    assert found.stats.tokens_per_step > 2


def test_other_arrays_do_not_compile_anew():
    how = dict(max_new_tokens=4, **SIZES)
    tsjax.generate(MODEL, [1], logits_processor=tsjax.token_bias({3: 1.0}, VOCAB), **how)
    with compilations() as names:
        tsjax.generate(MODEL, [1], logits_processor=tsjax.token_bias({2: 7.0}, VOCAB), **how)
    assert not names


def test_what_is_off_is_not_in_the_state():
    state = tsjax.steps.init_state(
        jnp.zeros((1, 4), jnp.int32), jnp.asarray([4]), capacity=32, max_length=jnp.asarray([9]),
        cfg=tsjax.steps.DecodeConfig(MODEL.cfg),
    )  # fmt: skip
    assert state.counts is None and state.logprobs is None and state.sampling.processors == ()


# --- a run that is saved -------------------------------------------------------------------------


def test_a_resumed_run_needs_the_same_processors(tmp_path):
    path = tmp_path / "run.json"
    hook = tsjax.LogitsProcessor(alternating, name="alternating", version=2, arrays=(0.2,))
    how = dict(do_sample=True, logits_processor=hook, **SIZES)
    whole = tsjax.generate(MODEL, [1, 2], max_new_tokens=30, **how)
    tsjax.generate(MODEL, [1, 2], max_new_tokens=12, save_to=path, **how)
    assert json.loads(path.read_text())["processors"] == [["alternating", 2]]
    with pytest.raises(
        ValueError, match=r"saved with these .*alternating \(version 2\); given: no"
    ):
        tsjax.generate(MODEL, resume_from=path)
    with pytest.raises(ValueError, match=r"given: alternating \(version 3\)"):
        tsjax.generate(MODEL, resume_from=path, logits_processor=hook.replace(version=3))
    with pytest.raises(ValueError, match="without a name"):
        nameless = tsjax.LogitsProcessor(alternating, arrays=(0.2,))
        tsjax.generate(MODEL, [1], logits_processor=nameless, save_to=tmp_path / "other.json")
    found = tsjax.generate(
        MODEL, resume_from=path, logits_processor=hook, max_new_tokens=30,
        method=tsjax.NGram(suffix_length=3), **SIZES,
    )  # fmt: skip
    assert found.tokens[0].tolist() == whole.tokens[0].tolist()
    assert not tsjax.check_run(MODEL, path, logits_processor=hook).departures


def test_counts_go_on_where_a_run_is_resumed(tmp_path):
    path, how = tmp_path / "run.json", dict(frequency_penalty=0.7, presence_penalty=0.2)
    whole = tsjax.generate(MODEL, [1, 2], max_new_tokens=30, **how, **SIZES)
    tsjax.generate(MODEL, [1, 2], max_new_tokens=12, save_to=path, **how, **SIZES)
    found = tsjax.generate(MODEL, resume_from=path, max_new_tokens=30, **SIZES)
    assert found.tokens[0].tolist() == whole.tokens[0].tolist()


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda logits, tokens, length: logits[:5], r"gave shape \(5,\)"),
        (lambda logits, tokens, length: logits > 0, "type bool"),
        (lambda logits, tokens, length: None, "gave None"),
        (lambda logits, tokens: logits, "it raised TypeError"),
        (lambda logits, tokens, length: logits if length > 3 else logits, "TracerBool"),
        (
            lambda logits, tokens, length: jax.pure_callback(np.asarray, logits, logits),
            "under vmap",
        ),
        (tsjax.LogitsProcessor(alternating, name="a", version=(1, 2)), r"version=\(1, 2\)"),
        (3, "logits_processor=3"),
        (CannotBeHashed(1.0), "a function that can be hashed"),
    ],
)
def test_a_function_that_cannot_run_in_a_step_is_refused(hook, message):
    with pytest.raises((ValueError, TypeError), match=message):
        tsjax.generate(MODEL, [1], logits_processor=hook)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tsjax.generate(MODEL, [1], presence_penalty=float("nan")), "presence_penalty=nan"),
        (lambda: tsjax.generate(MODEL, [1], frequency_penalty="1"), "frequency_penalty='1'"),
        (lambda: tsjax.generate(MODEL, [1], no_repeat_ngram_size=-1), "no_repeat_ngram_size=-1"),
        (lambda: tsjax.generate(MODEL, [1], no_repeat_ngram_size=65), "at most 64"),
        (lambda: tsjax.token_bias({VOCAB: 1.0}, VOCAB), f"token_bias={VOCAB}"),
        (lambda: tsjax.token_bias({1: float("inf")}, VOCAB), "-inf to bar one"),
        (lambda: tsjax.bad_words([], VOCAB), "at least one word"),
        (lambda: tsjax.bad_words([[1, -1]], VOCAB), "bad_words=-1"),
        (lambda: tsjax.allowed_tokens([], VOCAB), "at least one token"),
    ],
)
def test_wrong_values_are_refused(call, message):
    with pytest.raises(tsjax.TsjaxError, match=message):
        call()


def test_versions_tell_words_of_other_shapes_apart():
    one, two = tsjax.bad_words([[1, 2]], VOCAB), tsjax.bad_words([[1], [2]], VOCAB)
    assert one.version != two.version

# SPDX-License-Identifier: Apache-2.0
"""Where a model looks things up: attention by layer, the layer that follows from it, the file."""

import gc

import jax
import numpy as np
import pytest
from helpers import tiny_model
from lazy_oracle import LazyOracle

import tsjax
from tsjax.decoding.reading import prefill
from tsjax.decoding.start import init_state
from tsjax.host import lookups
from tsjax.host.lookups import ASKING_PROMPTS, Asking, Lookups, asking_prompt
from tsjax.lazy.looking import last_attention

PROMPT = np.random.default_rng(3).integers(0, 61, 45)


@jax.enable_x64(True)
def test_the_last_tokens_attention_is_the_oracles_in_every_layer():
    model = tiny_model(num_layers=3, dtype="float64")
    cfg, n = tsjax.steps.DecodeConfig(model=model.cfg), len(PROMPT)
    state = init_state(PROMPT[None], [n], cfg=cfg, capacity=64, max_length=[n + 1])
    state = jax.jit(prefill, static_argnames=("width", "cfg"))(
        model.params, state, width=16, cfg=cfg
    )
    found = np.asarray(last_attention(model.params, state, cfg=cfg))[:, 0]
    cuts = tsjax.LazyPrefill(keep={1: 1.0, 2: 1.0}, revive="never")
    oracle = LazyOracle(model, PROMPT.tolist(), cuts)
    oracle.keys, oracle.values = ([{} for _ in range(3)] for _ in "kv")
    x = np.stack([oracle.weights.embed[token] for token in PROMPT])
    for layer in range(3):
        x, scores = oracle._layers(range(layer, layer + 1), [*range(n)], x, set(range(n)))
        wanted = [scores[i] for i in range(n - 1)]
        np.testing.assert_allclose(found[layer, : n - 1], wanted, atol=1e-12)


def test_the_first_layer_that_is_nearly_as_good_as_the_best_is_cut_after():
    assert Lookups((0.0, 0.5, 0.91, 0.2, 1.0, 0.7)).layer == 3
    assert Lookups((0.0, 0.5, 0.89, 0.2, 1.0, 0.7)).layer == 5
    assert Lookups((0.3, 0.1, 1.0)).layer == 1  # no cut comes after the last layer


def test_what_is_among_the_best():
    weights = np.asarray([[0.5, 0.1, 0.3, 0.05, 0.0] * 8, [0.01] * 40])
    weights[1, 30:34] = 0.2

    def among(*answer):
        return lookups._among_best(weights, Asking(np.zeros(41, np.int32), np.asarray(answer)))

    # Of 41 tokens 9. Equal ones go by position, as a cut takes them: 30 to 33, then 0 to 4.
    np.testing.assert_allclose(among(0, 4, 33), [1 / 3, 1])
    np.testing.assert_allclose(among(5, 33), [0.5, 0.5])


def test_each_prompt_says_its_answer_once_and_ends_where_it_is_asked_for():
    tokenizer = tsjax.load(tsjax.EMBEDDED).tokenizer
    for index in range(ASKING_PROMPTS):
        one = asking_prompt(tokenizer, index)
        answer = tokenizer.decode(one.tokens[one.answer].tolist()).strip()
        text = tokenizer.decode(one.tokens.tolist())
        assert answer and text.count(answer) >= 1
        assert text.index("Question:") > text.index(answer)
        assert len(one.answer) >= 1 and one.answer.max() < text.index("Question:")
        again = asking_prompt(tokenizer, index)
        np.testing.assert_array_equal(one.tokens, again.tokens)


def test_a_checkpoint_is_measured_once_and_cut_there(tmp_path, monkeypatch):
    monkeypatch.setenv("TSJAX_CACHE", str(tmp_path))
    model, measured = tsjax.load(tsjax.EMBEDDED), []

    def measure(model):
        measured.append(model)
        return Lookups((0.0, 1.0, 0.0))

    monkeypatch.setattr(lookups, "measure_lookups", measure)
    for _ in range(2):  # as two processes
        lookups._FOUND.clear()
        result = tsjax.generate(
            model, "There was a house. " * 200, max_new_tokens=2, prefill="lazy"
        )
        whole, part = result.stats.prompt_computed
        assert whole == 1 and 0.1 <= part < 0.8
    short = tsjax.generate(model, ["A", "house. " * 400], max_new_tokens=2, prefill="lazy")
    assert short.stats.prompt_computed[1] < 1  # the other one; of the short one all goes on
    assert len(measured) == 1
    measured.clear()  # which holds the weights
    del model, result, short
    gc.collect()
    assert not lookups._FOUND


def test_a_model_that_reads_nothing_is_told_so():
    model = tiny_model(num_layers=3)
    with pytest.raises(ValueError, match="keep='auto' is not valid: named cuts, or keep='paper'"):
        tsjax.generate(model, [1, 2, 3], prefill=tsjax.LazyPrefill(at_least=2))

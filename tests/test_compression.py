# SPDX-License-Identifier: Apache-2.0
"""Shorter prompts, against what NumPy makes of the model's own logits and attention."""

import numpy as np
import pytest
from helpers import oracle_hidden, oracle_norm, oracle_unembed, tiny_model
from lazy_oracle import LazyOracle

import tsjax
from tsjax.host.device_programs import programs_of

PROMPT = np.random.default_rng(3).integers(0, 61, 45)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=3, max_positions=4096)


def test_attention_keeps_what_the_last_token_attends_to(model):
    lazy = tsjax.LazyPrefill(keep={2: 0.3}, revive="never", pool=3)
    (_, kept) = LazyOracle(model, PROMPT.tolist(), lazy).sets
    found = tsjax.compress_prompt(model, PROMPT, 0.3, layer=2, pool=3)
    np.testing.assert_array_equal(found, PROMPT[sorted(kept)])
    assert len(found) == 14 and found[-1] == PROMPT[-1]


def test_self_information_keeps_what_the_model_did_not_expect(model):
    hidden = oracle_hidden(model, PROMPT.tolist())
    norm = np.asarray(model.params.model.final_norm, np.float64)
    logits = oracle_unembed(model, oracle_norm(hidden, norm, model.cfg.norm_eps))
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    information = [-logs[i - 1, token] for i, token in enumerate(PROMPT) if i]
    inner = sorted(range(1, len(PROMPT) - 1), key=lambda i: -information[i - 1])
    kept = sorted([0, len(PROMPT) - 1, *inner[:7]])
    found = tsjax.compress_prompt(model, PROMPT, 0.2, by="self_information")
    np.testing.assert_array_equal(found, PROMPT[kept])


@pytest.mark.wide
def test_prompts_of_any_length_and_those_of_about_a_length_share_their_programs(model):
    of_run = programs_of(model)
    programs = of_run.read_part, of_run.finish_part, of_run.log_probs

    def compressed(length):
        prompt = np.resize(PROMPT, length)
        for by in ("attention", "self_information"):
            found = tsjax.compress_prompt(model, prompt, 0.5, by=by)
            assert len(found) == -(-length // 2) and found[-1] == prompt[-1]
            whole = tsjax.compress_prompt(model, prompt, 1.0, by=by)
            np.testing.assert_array_equal(whole, prompt)
        return [len(program._known) for program in programs]

    assert compressed(2) == compressed(1) == compressed(64)
    assert compressed(65) == compressed(99) == compressed(128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(share=0), "share=0 is not valid"),
        (dict(share=1e-5), "share=1e-05 is not valid: a number from 0.0001 to 1"),
        (dict(share=0.5, pool=3, by="self_information"), "pool=3 is not valid: left out"),
        (dict(share=0.5, prompt=[1] * 5000), "prompt='5000 tokens' is not valid: at most 4096"),
        (dict(share=0.5, by="length"), "by='length' is not valid"),
        (dict(share=0.5, layer=3), "layer=3 is not valid"),
        (dict(share=0.5, layer=1, by="self_information"), "layer=1 is not valid: left out"),
        (dict(share=0.5, prompt=[[1], [2]]), "prompt='2 rows' is not valid: one prompt"),
    ],
)
def test_bad_input_is_refused(model, settings, message):
    with pytest.raises(ValueError, match=message):
        tsjax.compress_prompt(model, settings.pop("prompt", PROMPT), **settings)

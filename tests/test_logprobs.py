# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities: against float64, torch, and plain decoding; of texts that are given, too."""

import json

import jax
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import LOOPING, PROMPTS, SIZES, TOKENS, looping_model, oracle_logits, save_tokenizer

import tsjax
from pallas_kernels import native
from tsjax.host.result import log_probs_from_dict, log_probs_to_dict

# The same bits where sums of a pass have one order.
EXACT = native.status(try_now=True).state == "ready"
VOCAB = LOOPING["vocab_size"]
MODEL = looping_model()
SAMPLED = dict(do_sample=True, temperature=0.7, top_k=5, repetition_penalty=1.3, seed=4)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def same(mine, theirs):
    np.testing.assert_allclose(mine, theirs, rtol=0 if EXACT else 1e-5, atol=0 if EXACT else 1e-5)


def all_same(found, wanted):
    for mine, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        jax.tree.map(same, mine, theirs)


def processed(logits, text, settings):
    """By plain loops: the penalty, the temperature, the k best."""
    x = np.asarray(logits, np.float64).copy()
    for token in set(text):
        penalty = settings.get("repetition_penalty", 1.0)
        x[token] = x[token] * penalty if x[token] < 0 else x[token] / penalty
    if settings.get("do_sample"):
        x = x / settings["temperature"]
        x[x < np.sort(x)[-settings["top_k"]]] = -np.inf
    return x


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_they_are_those_of_float64(settings):
    result = tsjax.generate(MODEL, PROMPTS, max_new_tokens=12, logprobs=3, **SIZES, **settings)
    for prompt, tokens, told in zip(PROMPTS, result.tokens, result.logprobs, strict=True):
        text = [*prompt, *tokens.tolist()]
        logits = oracle_logits(MODEL, text)
        assert told.raw.shape == (12,) and told.top.shape == (12, 3)
        for index, token in enumerate(tokens):
            row = logits[len(prompt) + index - 1]
            for found, top_tokens, top, law in (
                (told.raw, told.top_tokens, told.top, log_softmax(row)),
                (
                    told.processed, told.processed_top_tokens, told.processed_top,
                    log_softmax(processed(row, text[: len(prompt) + index], settings)),
                ),
            ):  # fmt: skip
                assert found[index] == pytest.approx(law[token], abs=1e-4)
                best = np.argsort(-law, kind="stable")[:3]
                assert top_tokens[index].tolist() == best.tolist()
                np.testing.assert_allclose(top[index], law[best], atol=1e-4)


def test_drafts_change_none():
    """Nor does a stream, which tells them piece by piece."""
    how = dict(max_new_tokens=30, logprobs=3, **SIZES, **SAMPLED)
    plain = tsjax.generate(MODEL, PROMPTS, **how)
    found = tsjax.generate(MODEL, PROMPTS, method=AnyTree(), **how)
    assert found.stats.tokens_per_step > 1.1
    all_same(found, plain)
    chunks = list(tsjax.stream(MODEL, PROMPTS, method=AnyTree(), **how))
    for row, told in enumerate(plain.logprobs):
        same(np.concatenate([chunk.logprobs[row].raw for chunk in chunks]), told.raw)
        assert all(len(c.logprobs[row].raw) == len(c.tokens[row]) for c in chunks)


def test_they_change_no_token_and_cost_nothing_where_nobody_asks():
    how = dict(max_new_tokens=20, **SIZES, **SAMPLED)
    told = tsjax.generate(MODEL, PROMPTS, logprobs=0, **how)
    silent = tsjax.generate(MODEL, PROMPTS, **how)
    assert silent.logprobs is None and told.logprobs[0].top.shape == (20, 0)
    assert [row.tolist() for row in told.tokens] == [row.tolist() for row in silent.tokens]


def test_a_resumed_run_has_those_of_its_first_part(tmp_path):
    path, how = tmp_path / "run.json", dict(logprobs=3, **SAMPLED)
    whole = tsjax.generate(MODEL, PROMPTS, max_new_tokens=20, **how, **SIZES)
    tsjax.generate(MODEL, PROMPTS, max_new_tokens=8, save_to=path, **how, **SIZES)
    all_same(tsjax.generate(MODEL, resume_from=path, max_new_tokens=20, **SIZES), whole)
    saved = json.loads(path.read_text())
    saved["logprobs"][0]["raw"].pop()
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="written by save_to"):
        tsjax.generate(MODEL, resume_from=path, max_new_tokens=20)


def test_a_row_that_a_stop_string_ends_has_one_for_each_token(tmp_path):
    sizes = dict(vocab_size=len(TOKENS), embed_dim=len(TOKENS))
    model = looping_model(**sizes, path=save_tokenizer(tmp_path))
    how = dict(max_new_tokens=20, logprobs=1, **SIZES)
    text = tsjax.generate(model, [3, 4], **how).text
    found = tsjax.generate(model, [3, 4], stop_strings=(text[len(text) // 2 :][:2],), **how)
    assert found.finish_reason == ["stop_string"]
    assert len(found.logprobs[0].raw) == len(found.tokens[0])


def test_json_keeps_what_cannot_be():
    found = tsjax.generate(MODEL, [1], max_new_tokens=4, logprobs=7, **SIZES, **SAMPLED).logprobs[0]
    assert np.isneginf(found.processed_top).any()  # seven of the five that are left
    text = json.dumps(log_probs_to_dict(found), allow_nan=False)
    again = log_probs_from_dict(json.loads(text), 7)
    assert (found.processed_top_tokens[np.isneginf(found.processed_top)] == -1).all()
    with pytest.raises(ValueError, match="wrong shape"):
        log_probs_from_dict(json.loads(text), 6)
    for name in ("raw", "top_tokens", "top", "processed", "processed_top"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))


# --- texts that are given ------------------------------------------------------------------------


def test_a_given_text_is_scored_as_float64_does():
    ends = [[5, 6, 7], [1] * 140, [2]]  # one of more than a block
    found = tsjax.score(MODEL, PROMPTS, ends, logprobs=2)
    for prompt, end, told in zip(PROMPTS, ends, found.logprobs, strict=True):
        law = log_softmax(oracle_logits(MODEL, [*prompt, *end])[len(prompt) - 1 : -1])
        np.testing.assert_allclose(told.raw, law[np.arange(len(end)), end], atol=2e-4)
        np.testing.assert_allclose(told.top, -np.sort(-law, axis=1)[:, :2], atol=2e-4)
        assert told.processed is None
    np.testing.assert_allclose(found.totals, [told.raw.sum() for told in found.logprobs], rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tsjax.score(MODEL, [1], []), r"continuation\[0\]"),
        (lambda: tsjax.score(MODEL, [[1], [2]], [[1]]), "one for each of 2 prompts"),
        (lambda: tsjax.score(MODEL, [1], [VOCAB]), f"token id {VOCAB}"),
        (lambda: tsjax.score(MODEL, [1], [2], logprobs=VOCAB + 1), "logprobs"),
        (lambda: tsjax.generate(MODEL, [1], logprobs=-1), "logprobs=-1"),
        (lambda: tsjax.generate(MODEL, [1], logprobs=VOCAB + 1), "logprobs"),
        (lambda: tsjax.generate(MODEL, [1], output_scores=True), "write logprobs"),
    ],
)
def test_what_cannot_be_told_is_refused(call, message):
    with pytest.raises(tsjax.TsjaxError, match=message):
        call()

# SPDX-License-Identifier: Apache-2.0
"""Logits that are NaN or infinite: no token follows, what came before is kept, and the error names
row and token."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SIZES, chain, chain_model

import tsjax
from tsjax.decoding.sampling import best_with_score, warp
from tsjax.files.fingerprint import model_fingerprint

SOUND = chain_model(chain(*range(1, 20)))
PROMPTS = [[1, 2, 3], [30]]  # the second says 0 for ever
HOW: dict[str, Any] = dict(max_new_tokens=8, **SIZES)
MESSAGE = r"new token 3 of row 0 \(position 5\) are NaN or infinite: see to the weights"


def breaks_after(token, value=jnp.nan):
    """The chain, whose logits after `token` are no numbers."""
    weights = SOUND.params.model
    weights = weights.replace(embed=weights.embed.at[token].set(value))
    return tsjax.Model(SOUND.params.replace(model=weights), cfg=SOUND.cfg)


MODEL = breaks_after(5)


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("autoregressive", {}),
        (
            tsjax.NGram(suffix_length=5),
            dict(do_sample=True, temperature=0.01, top_p=0.5, min_p=0.1),
        ),
    ],
    ids=["plain", "drafts"],
)
def test_a_row_that_breaks_is_named_and_saved_up_to_there(method, how, tmp_path):
    path = tmp_path / "run.json"
    with pytest.raises(tsjax.TsjaxError, match=MESSAGE):
        tsjax.generate(MODEL, PROMPTS, method=method, save_to=path, **HOW, **how)
    saved = json.loads(path.read_text())
    assert saved["tokens"][0] == [4, 5]
    assert saved["finish_reason"][0] is None
    # With weights that are whole, the same file goes on.
    saved["model"]["fingerprint"] = model_fingerprint(SOUND)
    path.write_text(json.dumps(saved))
    found = tsjax.generate(SOUND, resume_from=path, **SIZES)
    assert found.tokens[0].tolist() == [*range(4, 12)]


def test_a_stream_gives_what_came_before():
    chunks, made = tsjax.stream(MODEL, PROMPTS, **HOW), []
    with pytest.raises(RuntimeError, match=MESSAGE):
        for chunk in chunks:
            made += chunk.tokens[0].tolist()
    assert made == [4, 5]


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_prompt_may_break_at_once(value):
    with pytest.raises(tsjax.TsjaxError, match=r"new token 1 of row 0 \(position 2\)"):
        tsjax.generate(breaks_after(9, value), [8, 9], **HOW)


def test_a_row_that_ends_before_is_whole():
    result = tsjax.generate(MODEL, PROMPTS, eos_token_id=5, **HOW)
    assert result.tokens[0].tolist() == [4, 5] and result.finish_reason == ["eos", "length"]


def test_many_prompts_go_on_without_one_that_breaks():
    answers = tsjax.generate_many(MODEL, [[30], [1, 2, 3], [31]], rows=2, **HOW)
    found = {answer.index: answer for answer in answers}
    assert [found[i].finish_reason for i in range(3)] == ["length", "error", "length"]
    assert found[1].tokens.tolist() == [4, 5] and "new token 3 of row 1 " in str(found[1].error)


def test_a_processor_may_be_the_reason():
    def to_infinity(logits, tokens, length):
        return jnp.where(length > 4, jnp.inf, logits)

    with pytest.raises(tsjax.TsjaxError, match="new token 3 .* or to a logits_processor"):
        tsjax.generate(SOUND, [1, 2, 3], logits_processor=to_infinity, **HOW)


def test_where_all_tokens_are_barred_the_first_follows():
    """As ever: -inf is no broken score. Log-probabilities of it stay JSON."""
    nothing = tsjax.LogitsProcessor(lambda logits, tokens, length: jnp.full_like(logits, -jnp.inf))
    found = tsjax.generate(SOUND, [1], logits_processor=nothing, logprobs=1, **HOW)
    assert found.tokens[0].tolist() == [0] * 8
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_text_that_cannot_be_scored():
    with pytest.raises(RuntimeError, match=r"in continuation\[1\] or its prompt"):
        tsjax.score(MODEL, [[1], [1]], [[2, 3], [4, 5, 6, 7]])


# --- the sampler and the judge alone --------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"epsilon_cutoff": 0.5}, {"eta_cutoff": 0.5},
     {"top_p": 0.5, "min_tokens_to_keep": 2}],
    ids=str,
)  # fmt: skip
def test_no_truncation_hides_one_broken_logit(settings, rng):
    logits = rng.standard_normal((2, 3, 33)).astype(np.float32)
    logits[0, 1, 5], logits[1, 0, 3], logits[1, 2, 7] = np.nan, -np.nan, np.inf
    config = tsjax.GenerationConfig(do_sample=True, **settings)
    values = tsjax.steps.sampling_values(config, (), 33, jnp.float32)
    score, _ = jax.jit(lambda x: best_with_score(warp(x, values)))(logits)
    assert np.argwhere(~(np.asarray(score) < np.inf)).tolist() == [[0, 1], [1, 0], [1, 2]]


def test_sample_and_verify_refuse_them_or_say_minus_one(rng):
    logits = rng.standard_normal((2, 3, 33)).astype(np.float32)
    logits[1, 1] = np.nan
    given = [1, 2], [0, 0], [[4, 5, 6], [4, 5, 6]]
    with pytest.raises(RuntimeError, match="row 1, place 1"):
        tsjax.blocks.sample(logits, *given)
    assert jax.jit(lambda x: tsjax.blocks.sample(x, *given))(logits)[1].tolist()[1] == -1
    root, first = jnp.asarray([3, 3]), int(np.argmax(logits[0, 0]))
    other = int(np.argmax(logits[1, 0]))
    paths = jnp.asarray([[[first, 1]], [[other, 1]]], jnp.int32)
    tree = tsjax.methods.merge_paths(root, paths, jnp.full((2, 1), 2, jnp.int32), width=3)
    with pytest.raises(RuntimeError, match="row 1, place 1"):
        tsjax.blocks.verify(tree, logits)
    found = jax.jit(tsjax.blocks.verify)(tree, logits)
    assert found.count[1] == 2 and found.tokens[1, :2].tolist() == [other, -1]
    logits[1] = np.where(np.arange(3)[:, None] == 2, np.nan, 0)  # of no node that is reached
    tsjax.blocks.verify(tree, jnp.asarray(logits))

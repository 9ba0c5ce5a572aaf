# SPDX-License-Identifier: Apache-2.0
"""Rollouts: arrays that agree with `generate` and `score`, rows that depend on nothing beside them,
weights that are swapped at no cost; and tsjax in the place of tunix's sampler."""

import asyncio
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SIZES, assert_same_bits, compilations, looping_model, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import tsjax

MODEL = looping_model(stop_ids=(7,))
PROMPTS = [[1, 2, 3], [5, 6], [9, 8, 7, 6, 5]]
HOW = dict(max_new_tokens=12, **SIZES)


def test_arrays_are_what_generate_says():
    how = dict(HOW, temperature=0.8, top_k=20)
    found = tsjax.rollout(MODEL, PROMPTS, group=4, seed=5, **how)
    said = tsjax.generate(
        MODEL, PROMPTS, do_sample=True, num_return_sequences=4, seed=5, logprobs=0, **how
    )
    assert found.tokens.shape == (12, 64) and isinstance(found.tokens, jax.Array)
    arrays = jax.tree.map(np.asarray, found)
    for row in range(12):
        prompt, new = PROMPTS[row // 4], said.tokens[row]
        begin, end = len(prompt), len(prompt) + len(new)
        assert arrays.tokens[row, :end].tolist() == [*prompt, *new.tolist()]
        assert not arrays.tokens[row, end:].any()
        assert (arrays.prompt_length[row], arrays.length[row]) == (begin, end)
        assert np.flatnonzero(arrays.mask[row]).tolist() == [*range(begin, end)]
        for name in ("raw", "processed"):
            told = getattr(arrays, name)[row]
            np.testing.assert_array_equal(told[begin:end], getattr(said.logprobs[row], name))
            assert not told[~arrays.mask[row]].any()
        assert tsjax.results.FINISH_REASONS[arrays.finish_reason[row]] == said.finish_reason[row]
    assert {"eos", "length"} <= set(said.finish_reason)
    assert found.result.tokens[3].tolist() == said.tokens[3].tolist()


def test_log_probabilities_are_scores_bit_for_bit():
    found = tsjax.rollout(MODEL, PROMPTS, group=3, seed=1, **HOW)
    told = tsjax.log_probs(MODEL, found.tokens)
    assert_same_bits(jnp.where(found.mask, told, 0), found.raw)
    for row, one in enumerate(found.result.tokens):
        scored = tsjax.score(MODEL, PROMPTS[row // 3], one)
        begin, end = int(found.prompt_length[row]), int(found.length[row])
        assert_same_bits(scored.logprobs[0].raw, found.raw[row, begin:end])


@settings(max_examples=5, deadline=None)
@given(st.permutations(range(3)), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_row_depends_on_nothing_beside_it(order, count, seed):
    whole = tsjax.rollout(MODEL, PROMPTS, group=3, seed=seed, **HOW).result.tokens
    some = tsjax.rollout(MODEL, [PROMPTS[i] for i in order[:count]], group=2, seed=seed, **HOW)
    for place, prompt in enumerate(order[:count]):
        for member in range(2):
            mine = some.result.tokens[2 * place + member]
            assert mine.tolist() == whole[3 * prompt + member].tolist()


def test_a_key_is_a_seed():
    def sampled(seed):
        return np.asarray(tsjax.rollout(MODEL, PROMPTS[0], group=4, seed=seed, **HOW).tokens)

    key = jax.random.key(3)
    np.testing.assert_array_equal(sampled(key), sampled(int(jax.random.bits(key))))
    np.testing.assert_array_equal(sampled(jax.random.PRNGKey(3)), sampled(key))
    assert (sampled(key) != sampled(jax.random.key(4))).any()
    assert len({row.tobytes() for row in sampled(key)}) > 1


def test_its_texts_are_a_corpus():
    found = tsjax.rollout(MODEL, PROMPTS, group=2, seed=2, **HOW)
    texts = zip(found.result.prompts, found.result.tokens, strict=True)
    rows = [row.tolist() for row in found.corpus().rows]
    assert rows == [[*prompt.tolist(), *new.tolist()] for prompt, new in texts]


def test_a_pytree_of_arrays_goes_through_jit():
    found = tsjax.rollout(MODEL, PROMPTS, group=2, width=40, **HOW)
    assert found.tokens.shape == (6, 40)
    same = jax.jit(lambda rollout: rollout)(found)
    assert isinstance(same, tsjax.results.Rollout) and same.result is None
    np.testing.assert_array_equal(same.processed, found.processed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(group=0), "group=0 is not valid"),
        (dict(do_sample=False), "group=8 is not valid: 1, as greedy"),
        (dict(num_return_sequences=4), "write group"),
        (dict(seed=0.5), "seed=0.5 is not valid: an integer"),
        (dict(seed=jax.random.split(jax.random.key(0))), "an integer or one key"),
        (dict(width=10), "width=10 is not valid: at least 17"),
        (dict(top=3), "unknown argument 'top'"),
    ],
)
def test_what_is_wrong_is_said_before_any_compute(arguments, message):
    with compilations() as names, pytest.raises((ValueError, TypeError), match=message):
        tsjax.rollout(MODEL, PROMPTS, **{**HOW, **arguments})
    assert not [name for name in names if "decode" in name or "read_part" in name]


# --- Flax's modules ------------------------------------------------------------------------------


def test_a_module_trains_and_goes_back_without_a_copy():
    import optax
    from flax import nnx

    model = tiny_model(tie_embeddings=True, qkv_bias=True)
    module, tokens = tsjax.as_nnx(model), jnp.asarray([[1, 2, 3, 4, 5, 6]] * 2)
    np.testing.assert_array_equal(module(tokens), tsjax.forward(model, tokens))
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)

    def loss(module):
        told = jax.nn.log_softmax(module(tokens, remat=True))
        return -jnp.mean(jnp.take_along_axis(told[:, :-1], tokens[:, 1:, None], axis=-1))

    @nnx.jit
    def step(module, optimizer):
        value, slope = nnx.value_and_grad(loss)(module)
        optimizer.update(module, slope)
        return value

    losses = [float(step(module, optimizer)) for _ in range(8)]
    assert losses[-1] < losses[0] / 2
    arrays = {id(param[...]) for param in jax.tree.leaves(
        nnx.state(module, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param)
    )}  # fmt: skip
    assert {id(leaf) for leaf in jax.tree.leaves(module.model.params)} == arrays
    trained = module.model
    found = tsjax.generate(trained, [1, 2], max_new_tokens=4, **SIZES)
    assert found.tokens[0].tolist() == [3, 4, 5, 6]


# --- tunix ---------------------------------------------------------------------------------------


SPEAKING = functools.cache(lambda: tsjax.load(tsjax.EMBEDDED, dtype="float32"))
TEXTS = ["Once upon a time", "The dog", "There was"]


def request(prompt, **asked):
    params = dict(max_tokens=8, temperature=1.0, top_k=None, seed=3, return_logprobs=True)
    params = types.SimpleNamespace(**{**params, **asked})
    return types.SimpleNamespace(prompt=prompt, request_id=f"to {prompt}", sampling_params=params)


def test_tunix_asks_and_is_answered():
    model = SPEAKING()
    sampler, how = tsjax.TunixSampler(model), dict(max_new_tokens=8, do_sample=True, seed=3)
    said = tsjax.generate(model, TEXTS, logprobs=0, **how)
    output = sampler(TEXTS, 8, temperature=1.0, seed=3, return_logprobs=True, max_prompt_length=6)
    assert output.text == [text.strip() for text in said.text] or output.text == said.text
    for row in range(3):
        np.testing.assert_array_equal(output.tokens[row], said.tokens[row])
        np.testing.assert_array_equal(output.logprobs[row], said.logprobs[row].processed)
        padded, prompt = output.padded_prompt_tokens[row], said.prompts[row]
        assert len(padded) == 8  # the longest prompt has more than six
        np.testing.assert_array_equal(padded[len(padded) - len(prompt) :], prompt)
    whole = sampler(TEXTS, 8, temperature=1.0, seed=3, echo=True, pad_output=True)
    np.testing.assert_array_equal(whole.tokens[1][: len(said.prompts[1])], said.prompts[1])
    assert {len(row) for row in whole.tokens} == {16}
    greedy = tsjax.generate(model, TEXTS[0], max_new_tokens=8).tokens[0].tolist()
    assert sampler(TEXTS[0], 8).tokens[0].tolist() == greedy
    # A stop token is left out, as tunix does.
    found = sampler(TEXTS[0], 8, eos_tokens=[greedy[4]], return_logprobs=True)
    assert found.tokens[0].tolist() == greedy[:4] and len(found.logprobs[0]) == 4


def test_tunix_protocol():
    model = SPEAKING()
    sampler = tsjax.TunixSampler(model, method="ngram")
    sampler.initialize()
    requests = [request(TEXTS[0]), request(TEXTS[1], max_tokens=4), request([5, 6, 7])]
    found = asyncio.run(sampler.sample(requests))
    for asked, answer in zip(requests, found, strict=True):
        alone = asyncio.run(sampler.sample(asked))
        assert answer.request_id == f"to {asked.prompt}" and answer.finish_reason == "length"
        assert answer.text == alone.text
        np.testing.assert_array_equal(answer.token_ids, alone.token_ids)
        assert_same_bits(answer.logprobs, alone.logprobs)
        assert len(answer.token_ids) == asked.sampling_params.max_tokens
    asyncio.run(sampler.pause())
    with pytest.raises(ValueError, match="the sampler is paused"):
        asyncio.run(sampler.sample(requests[0]))
    asyncio.run(sampler.resume())
    metadata = asyncio.run(sampler.get_weight_sync_metadata())
    assert len(jax.tree.leaves(metadata)) == len(jax.tree.leaves(model.params))


def test_weights_come_in_every_form():
    model = SPEAKING()
    other = jax.tree.map(lambda x: x * 1.5, model.params)
    forms = (
        other, tsjax.as_nnx(model.with_params(other)),
        tsjax.TunixSampler(model.with_params(other)).transformer_state,
        tsjax.to_hf(model.with_params(other)),
        {name: np.asarray(x) for name, x in tsjax.to_hf(other, model.cfg).items()},
    )  # fmt: skip
    for form in forms:
        sampler = tsjax.TunixSampler(model)
        asyncio.run(sampler.weight_sync(params=form))
        assert sampler.policy_version == 1
        for one, wanted in zip(*map(jax.tree.leaves, (sampler.model.params, other)), strict=True):
            np.testing.assert_array_equal(one, wanted)
    drafting = tsjax.load(tsjax.EMBEDDED, dtype="float32", drafter=tsjax.EMBEDDED)
    sampler = tsjax.TunixSampler(drafting)
    sampler.update_params(tsjax.to_hf(model.with_params(other)))  # of the model alone
    np.testing.assert_array_equal(sampler.model.params.model.embed, other.model.embed)
    assert sampler.model.params.drafter is not None
    alone = {name: x for name, x in tsjax.to_hf(other, model.cfg).items() if "medusa" not in name}
    sampler.update_params(alone)
    assert len(sampler.model.params.heads) == model.cfg.num_draft_heads
    sampler.update_params(tsjax.as_nnx(drafting))
    np.testing.assert_array_equal(sampler.model.params.drafter.words, drafting.params.drafter.words)
    with pytest.raises(TypeError, match="params of int is not valid"):
        tsjax.TunixSampler(model).update_params(3)


def test_tunix_itself_takes_them():
    """Its own classes, where it is installed."""
    base = pytest.importorskip("tunix.generate.base_sampler")
    sampler = tsjax.TunixSampler(SPEAKING())
    assert isinstance(sampler(TEXTS, 4), base.SamplerOutput)
    wanted = {name for name in vars(base.BaseSampler) if not name.startswith("_")}
    assert {"transformer", "transformer_state", "tokenize"} <= wanted <= {*dir(sampler), "__call__"}

# SPDX-License-Identifier: Apache-2.0
"""One step of drafting and verifying: each node's decision, the walk, the law, and what it costs.

The promise is that a drafted token is judged as plain decoding would judge it: with its ancestors
in the repetition window, the noise of its position, and once only, however many paths share it.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import decoded, fresh_state, looping_model, prefilled, tiny_model
from test_any_tree import VALUES, VOCAB

import tsjax
from tsjax.decoding.processors import KnownText, LogitsProcessor, first_counts, first_last_seen
from tsjax.decoding.sampling import score_choices, step_noise
from tsjax.decoding.state import Acceptance
from tsjax.decoding.tree import NO_NODE, merge_paths
from tsjax.decoding.verification import accept, drafted_ancestors, verify_tree

BATCH, PATHS, DEPTH = 2, 7, 4
WIDTH = 1 + PATHS * DEPTH + 2  # two nodes are always padding
LONGEST = 24  # tokens of a history


# --- random trees --------------------------------------------------------------------------------


def random_tree(rng: np.random.Generator, root, alphabet: int):
    """Paths over few tokens, so that they share their beginnings and repeat their ancestors."""
    paths = rng.integers(0, alphabet, (BATCH, PATHS, DEPTH))
    lengths = rng.integers(0, DEPTH + 1, (BATCH, PATHS))
    return merged(jnp.asarray(root, jnp.int32), jnp.asarray(paths, jnp.int32), jnp.asarray(lengths))


@jax.jit
def merged(root, paths, lengths):
    return merge_paths(root, paths, lengths, width=WIDTH)


def drafted_texts(tree) -> list[dict[int, list[int]]]:
    """For each batch row, the drafted tokens from after the root to each node; no padding."""
    rows = []
    for tokens, parents in zip(np.asarray(tree.tokens), np.asarray(tree.parents), strict=True):
        texts = {0: []}
        for node, parent in enumerate(parents):
            if parent != NO_NODE:
                texts[node] = [*texts[parent], int(tokens[node])]
        rows.append(texts)
    return rows


def sampling_values(dtype: str, **settings):
    config = tsjax.GenerationConfig(**settings)
    return tsjax.steps.sampling_values(config, config.eos_token_id or (), VOCAB, dtype)


# --- each node's decision ------------------------------------------------------------------------


@jax.jit
def scores_in_the_tree(logits, tree, tokens, length, prompt_length, noise, values):
    ancestors = drafted_ancestors(tree, length)
    text = text_of(tokens, length, prompt_length)
    return score_choices(logits, text, tree.depths, noise, values, ancestors)


@jax.jit
def scores_alone(logits, tokens, length, prompt_length, noise, values):
    """One text per batch row, all of it known; one row of logits each."""
    depths = jnp.zeros((len(length), 1), jnp.int32)
    return score_choices(logits, text_of(tokens, length, prompt_length), depths, noise, values)


def text_of(tokens, length, prompt_length) -> KnownText:
    seen = first_last_seen(tokens, length, VOCAB)
    counts = first_counts(tokens, prompt_length, length, VOCAB)
    return KnownText(tokens, length, prompt_length, seen, counts)


def by_last_tokens(logits, tokens, length, weight):
    """Reads the last two tokens, how long the text is and how often it has its last one."""
    last, other = tokens[length - 1], tokens[jnp.maximum(length - 2, 0)]
    often = jnp.sum((tokens == last) & (jnp.arange(len(tokens)) < length))
    return logits + weight * jnp.cos(jnp.arange(VOCAB) * (1 + last + 3 * other) + length) - often


# What is on is compiled in: all that reads the text, and all.
READ = ("repetition_penalty", "repetition_window", "presence_penalty", "frequency_penalty",
        "no_repeat_ngram_size", "min_new_tokens", "eos_token_id")  # fmt: skip
SETTINGS = st.sampled_from([READ, tuple(VALUES)]).flatmap(
    lambda on: st.fixed_dictionaries(
        {"do_sample": st.just(len(on) > len(READ)), **{name: VALUES[name] for name in on}}
    )
)


@hypothesis.given(settings=SETTINGS, seed=st.integers(0, 10**6), alphabet=st.integers(1, VOCAB))
@hypothesis.settings(max_examples=40)
def test_a_nodes_scores_are_those_of_its_text_alone(settings, seed, alphabet):
    """Bit for bit, given the same logits: its ancestors are history, its position is its own."""
    rng = np.random.default_rng(seed)
    history = rng.integers(0, alphabet, (BATCH, LONGEST))
    length = rng.integers(1, LONGEST + 1, BATCH)
    prompt_length = np.asarray([rng.integers(1, n + 1) for n in length])
    logits = rng.normal(size=(BATCH, WIDTH, VOCAB)) * 3
    noise = rng.gumbel(size=(BATCH, DEPTH + 1, VOCAB))

    texts = np.zeros((BATCH, WIDTH, LONGEST + DEPTH), np.int32)
    lengths = np.ones((BATCH, WIDTH), np.int32)
    noises = np.zeros((BATCH, WIDTH, 1, VOCAB))
    real = np.zeros((BATCH, WIDTH), bool)
    with jax.enable_x64(True):
        tree = random_tree(rng, history[np.arange(BATCH), length - 1], alphabet)
        for b, nodes in enumerate(drafted_texts(tree)):
            for node, drafted in nodes.items():
                text = [*history[b, : length[b]], *drafted]
                texts[b, node, : len(text)], lengths[b, node] = text, len(text)
                noises[b, node, 0], real[b, node] = noise[b, len(drafted)], True
        values = sampling_values("float64", max_new_tokens=99, **settings)
        if seed % 2:
            hook = LogitsProcessor(by_last_tokens, arrays=(np.float64(2.0),))
            values = values.replace(processors=(hook,))
        given = (jnp.asarray(length, jnp.int32), jnp.asarray(prompt_length, jnp.int32))
        known = np.pad(history, ((0, 0), (0, DEPTH)))  # as a run has room for its drafts
        actual = scores_in_the_tree(logits, tree, jnp.asarray(known), *given, noise, values)
        expected = scores_alone(
            logits.reshape(-1, 1, VOCAB),
            texts.reshape(BATCH * WIDTH, -1),
            lengths.reshape(-1),
            jnp.repeat(given[1], WIDTH),
            noises.reshape(-1, 1, VOCAB),
            values,
        )
    actual, expected = np.asarray(actual), np.asarray(expected).reshape(actual.shape)
    assert actual.dtype == np.float64
    np.testing.assert_array_equal(actual[real].view(np.int64), expected[real].view(np.int64))


@functools.partial(jax.jit, static_argnames="cfg")
def verified(params, state, tree, *, cfg):
    noise = step_noise(state.row_key, state.length, DEPTH + 1, VOCAB, state.sampling)
    return verify_tree(params, state, tree, noise, cfg=cfg)


@pytest.mark.parametrize(
    "settings",
    [{}, dict(do_sample=True, repetition_penalty=1.4, repetition_window=3, min_p=0.02)],
    ids=["greedy", "sampled"],
)
def test_a_nodes_target_is_what_plain_decoding_says_after_its_text(settings, rng):
    """The pass over the whole tree against a prefill and one plain step for each node."""
    history = [rng.integers(0, VOCAB, 11).tolist(), rng.integers(0, VOCAB, 6).tolist()]
    with jax.enable_x64(True):
        model = tiny_model(vocab_size=VOCAB, dtype="float64")
        cfg = tsjax.steps.DecodeConfig(model=model.cfg)
        state = prefilled(model.params, fresh_state(model, history, **settings), cfg=cfg)
        tree = random_tree(rng, [text[-1] for text in history], 6)
        verdict = verified(model.params, state, tree, cfg=cfg)
        target = np.asarray(verdict.target)

        cases = [
            (b, node, [*history[b], *drafted])
            for b, nodes in enumerate(drafted_texts(tree))
            for node, drafted in nodes.items()
        ]
        assert len(cases) > 20
        rows, nodes, texts = zip(*cases, strict=True)
        starts = [len(history[b]) for b in rows]
        alone = fresh_state(model, texts, repeats=rows, prompt_length=starts, **settings)
        alone = decoded(model.params, prefilled(model.params, alone, cfg=cfg), 1, cfg=cfg)
    assert np.asarray(alone.length).tolist() == [len(text) + 1 for text in texts]
    assert target[list(rows), list(nodes)].tolist() == np.asarray(alone.root).tolist()


# --- the walk ------------------------------------------------------------------------------------

accepted = jax.jit(accept)


@hypothesis.given(seed=st.integers(0, 10**6), alphabet=st.integers(1, 4))
@hypothesis.settings(max_examples=60)
def test_the_walk_is_a_walk(seed, alphabet):
    """From the root on to the child that is the node's target, until there is none."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, rng.integers(0, alphabet, BATCH), alphabet)
    target = rng.integers(0, alphabet, (BATCH, WIDTH)).astype(np.int32)
    acceptance: Acceptance = accepted(tree, target)
    for b, texts in enumerate(drafted_texts(tree)):
        node_of = {tuple(text): node for node, text in texts.items()}
        assert len(node_of) == len(texts)  # no two nodes have the same path
        text, walk = (), [0]
        while (*text, int(target[b, walk[-1]])) in node_of:
            text = (*text, int(target[b, walk[-1]]))
            walk.append(node_of[text])
        count = int(acceptance.count[b])
        assert np.asarray(acceptance.path)[b, : count + 1].tolist() == walk


# --- what a step changes ------------------------------------------------------------------------


def test_steps_leave_the_state_of_a_prefill_of_the_same_text():
    """As if the emitted text had been the prompt, also of a row that has ended before others."""
    method, model = AnyTree(), looping_model()
    cfg = tsjax.steps.DecodeConfig(model=model.cfg, method=method)
    settings = dict(repetition_penalty=0.7, method=method)  # says again what it has said
    texts = [[1, 2, 3, 1, 2, 3, 1, 2], [4], [5, 6]]
    state = fresh_state(model, texts, **settings).replace(max_length=jnp.asarray([14, 58, 59]))
    state = prefilled(model.params, state, cfg=cfg)
    for steps in (1, 1, 2, 12):
        state = decoded(model.params, state, steps, cfg=cfg)
        tokens, length = np.asarray(state.tokens), np.asarray(state.length)
        texts = [row[:n].tolist() for row, n in zip(tokens, length, strict=True)]
        expected = prefilled(model.params, fresh_state(model, texts, **settings), cfg=cfg)
        np.testing.assert_array_equal(state.length, expected.length)
        np.testing.assert_array_equal(state.last_seen, expected.last_seen)
        for row, n in enumerate(np.asarray(state.kv.length)):
            for actual, wanted in zip(
                (*state.kv.k, *state.kv.v), (*expected.kv.k, *expected.kv.v), strict=True
            ):
                np.testing.assert_allclose(actual[row, :, :n], wanted[row, :, :n], atol=2e-5)
    assert np.asarray(state.stats.accepted)[:, 1:].sum() > 3
    assert (np.asarray(state.finish) != 0).tolist() == [True, False, False]  # the first since long

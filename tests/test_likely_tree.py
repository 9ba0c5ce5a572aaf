# SPDX-License-Identifier: Apache-2.0
"""LikelyTree: what it offers, how likely that is, what is judged, and what it learns.

That its tokens are those of plain decoding is the subject of test_method_contract.py; here is what
no token shows: the drafts themselves.
"""

import collections

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import chain_model, decoded, fresh_state, prefilled, tiny_config, tiny_model

import tsjax
from tsjax.costs import Costs, Int8Costs, Line
from tsjax.decoding.tree import NO_NODE, cut, grow_tree
from tsjax.methods import likely_growth, rates
from tsjax.methods.likely_sources import best_of_pass
from tsjax.methods.likely_tree import LikelyTree
from tsjax.methods.rates import KINDS, MOST_RATE, NO_DRAFT, REMEMBERED, TRUST

LINE = Line(1.0)


def table(rows: float, draft_pass: float = 0.1, width: int = 16) -> Costs:
    """A pass of `width` rows takes `rows` plain steps, one that drafts `draft_pass` of one."""
    return Costs(
        passes=((1, LINE), (width, Line(rows))), heads=0.0, choice=Line(0.0),
        suffix=Line(0.0), ngrams=0.0, overhead=0.0, origin="measured",
        int8=Int8Costs(Line(draft_pass), 0.0),
    )  # fmt: skip


FREE = table(1.001)

# --- the tree ------------------------------------------------------------------------------------

BATCH, PATHS, DEPTH, WIDTH = 2, 5, 4, 7


@st.composite
def offers(draw):
    """(tokens, chances) of some paths: few tokens, so that paths share nodes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = rng.integers(0, draw(st.integers(1, 4)), (BATCH, PATHS, DEPTH)).astype(np.int32)
    chances = np.cumprod(rng.uniform(0.2, 0.98, tokens.shape), axis=2).astype(np.float32)
    lengths = rng.integers(0, DEPTH + 1, (BATCH, PATHS))
    return tokens, np.where(np.arange(DEPTH) < lengths[..., None], chances, 0)


grow = jax.jit(grow_tree, static_argnames=("sources", "width", "num_sources"))
SOURCES_OF_PATHS = (0, 0, 2, 1, 2)


@hypothesis.given(offers(), st.integers(1, WIDTH))
@hypothesis.settings(max_examples=60)
def test_a_tree_has_the_likeliest_nodes(offer, nodes):
    """Against a dictionary of all prefixes; cut anywhere, it has the likeliest still."""
    tokens, chances = offer
    root = jnp.asarray([7, 8], jnp.int32)
    tree, found = grow(root, tokens, chances, SOURCES_OF_PATHS, width=WIDTH, num_sources=3)
    small = jax.tree.map(np.asarray, cut(tree, jnp.full((BATCH,), nodes, jnp.int32)))
    tree, found = jax.tree.map(np.asarray, (tree, found))
    for b in range(BATCH):
        best, named = collections.defaultdict(float), collections.defaultdict(set)
        for path, of_path, source in zip(tokens[b], chances[b], SOURCES_OF_PATHS, strict=True):
            for depth in range(int(np.sum(of_path > 0))):
                prefix = tuple(path[: depth + 1].tolist())
                best[prefix] = max(best[prefix], float(of_path[depth]))
                named[prefix].add(source)
        ranked = sorted(best, key=best.__getitem__, reverse=True)[: WIDTH - 1]
        expected = [()] + ranked + [None] * (WIDTH - 1 - len(ranked))
        for shown, limit in ((tree, WIDTH), (small, nodes)):
            for node, prefix in enumerate(expected):
                path = [int(i) for i in shown.path[b, node] if i != NO_NODE]
                if node >= limit or prefix is None:
                    assert path == [node] and shown.tokens[b, node] == 0
                    assert not shown.sources[b, node].any()
                    continue
                assert path[-1] == node and len(path) == len(prefix) + 1
                assert tuple(shown.tokens[b, path[1:]].tolist()) == prefix
                assert [expected[i] for i in path] == [prefix[:i] for i in range(len(path))]
                assert set(np.flatnonzero(shown.sources[b, node])) == (named[prefix] or set())
        assert found[b].tolist() == [1] + [best[p] if p else 0 for p in expected[1:]]


# --- rates ---------------------------------------------------------------------------------------


def test_rates_follow_what_was_right():
    """By hand, and with forgetting: two hundred wrong drafts outweigh a hundred right ones."""
    begun = rates.first_rates()
    kind = KINDS.passes + 5
    kinds = jnp.full((1, 2, 3), NO_DRAFT, jnp.int32).at[0, 0, 0].set(kind).at[0, 1, 1].set(kind)
    tried = kinds != NO_DRAFT
    one_right = tried & (jnp.arange(2)[None, :, None] == 0)
    found = rates.learned(begun, kinds, tried, one_right)
    assert found.tried[kind] == TRUST + 2
    assert found.right[kind] == pytest.approx(begun.right[kind] + 1)
    others = np.delete(np.arange(KINDS.count), kind)
    assert np.array_equal(found.tried[others], begun.tried[others])
    right = begun
    for _ in range(100):
        right = rates.learned(right, kinds, tried, tried)
    assert right.values[kind] == MOST_RATE and right.tried[kind] == REMEMBERED
    wrong = right
    for _ in range(100):
        wrong = rates.learned(wrong, kinds, tried, tried & False)
    assert wrong.values[kind] < 0.1
    assert rates.chances(right, kinds)[0, 0, 0] == MOST_RATE
    assert not rates.chances(right, kinds)[0, 1].any(), "nothing before it was offered"


def test_kinds_do_not_overlap():
    sizes = [rates.TEXT_AXES, rates.TEXT_AXES, rates.PASS_AXES, rates.HEAD_AXES, rates.LAYER_AXES]
    numbers = []
    for first, axes in zip(KINDS[:-1], sizes, strict=True):
        every = np.indices(axes).reshape(len(axes), -1)
        numbers += np.asarray(rates.kind_number(first, axes, *every)).tolist()
    assert sorted(numbers) == list(range(KINDS.count))


def test_a_pass_is_worth_what_it_finds_beyond_the_text():
    """Of the gaps that were seen, those that make the row pay; a draft that is there already
    takes off its chance."""
    begun = rates.first_rates()
    values = np.asarray(begun.values)[KINDS.passes : KINDS.passes + rates.PASS_AXES[1]]
    prices = likely_growth.Prices(rows=jnp.zeros(1), plain=jnp.float32(1),
                                one_row=jnp.float32(0.3), one_pass=jnp.float32(0),
                                one_layer=jnp.float32(0))  # fmt: skip
    survival = jnp.asarray([0.9, 0.5], jnp.float32)
    for found in (0.0, 0.3, 0.98):
        expected = sum(np.maximum((s * values - found) * 2 - 0.3, 0).mean() for s in (0.9, 0.5))
        known = jnp.full(2, found, jnp.float32)
        gain = likely_growth.gain_of_pass(
            begun, survival, known, prices, jnp.float32(2), best_of_pass(0)
        )
        assert float(gain) == pytest.approx(expected, rel=1e-5)
    assert expected == 0


# --- steps ---------------------------------------------------------------------------------------

CYCLE = {token: (token + 1) % 6 for token in range(6)}


def states(model, method, prompt, steps, **settings):
    """The state after the prompt and after each step."""
    cfg = tsjax.steps.DecodeConfig(model=model.cfg, method=method)
    state = fresh_state(model, [prompt], method=method, capacity=128, max_length=[100], **settings)
    found = [prefilled(model.params, state, cfg=cfg, width=64)]
    for _ in range(steps):
        found.append(decoded(model.params, found[-1], 1, cfg=cfg))
    return found


def emitted(found) -> list[int]:
    return [int(state.emitted[0]) for state in found[1:]]


def test_a_text_that_repeats_is_drafted_more_and_more():
    """Each step trusts the matches more, and the next one drafts further."""
    model, method = chain_model(CYCLE, vocab_size=8), LikelyTree(costs=table(3.0))
    found = states(model, method, [0, 1, 2, 3, 4, 5, 0, 1], 6)
    steps = emitted(found)
    assert 2 <= steps[0] < 16 and steps[-1] == 16 and steps == sorted(steps)
    drafted = int(found[-1].stats.drafted[0])
    assert drafted == sum(steps) - len(steps), "nothing was judged in vain"
    # But it trusts less what was wrong, where the text breaks its habit.
    model = chain_model({**CYCLE, 3: 7, 7: 0}, vocab_size=8)
    found = states(model, method, [0, 1, 2, 3, 4, 5] * 3 + [0, 1], 3)
    changes = np.asarray(found[2].memory.rates.values - found[0].memory.rates.values)
    assert (changes[KINDS.text : KINDS.corpus] < 0).any()


def test_rows_that_cost_more_than_they_bring_are_not_judged():
    """A row costs as much as a plain step, and no draft is surer than sure."""
    model = chain_model(CYCLE, vocab_size=8)
    found = states(model, LikelyTree(costs=table(16.0)), [0, 1, 2, 3, 4, 5] * 3, 6)
    assert emitted(found) == [1] * 6 and not found[-1].stats.drafted.any()
    # But what it offered is learned from, so it would draft as soon as rows were cheaper.
    values = found[-1].memory.rates.values - found[0].memory.rates.values
    text = values[KINDS.text : KINDS.corpus]
    assert (text > 0).any() and (text >= 0).all()


def test_the_width_follows_the_price():
    """Of the compiled widths that which saves most, by the definition."""
    sizes = LikelyTree(width=8, pass_widths=(1, 2, 4)).sizes(tiny_config())
    chance = jnp.asarray([[1.0, 0.9, 0.8, 0.3, 0.2, 0.1, 0.05, 0.0]])
    for row in (0.01, 0.15, 0.4, 0.85, 0.95):
        rows = jnp.asarray([1.0 + row * (n - 1) for n in (1, 2, 4, 8)], jnp.float32)
        prices = likely_growth.Prices(rows, *map(jnp.float32, (1.0, row, 0.1, 0.1)))
        nodes, seconds = likely_growth.best_width(
            sizes.pass_widths, chance, prices, jnp.float32(1.0), jnp.asarray([True])
        )
        saves = {n: float(chance[0, :n].sum()) - (1 + row * (n - 1)) for n in (1, 2, 4, 8)}
        best = max(saves, key=saves.__getitem__)
        assert int(nodes[0]) == best and float(seconds) == pytest.approx(1 + row * (best - 1))


def test_wrong_settings_and_what_a_model_lacks():
    for name, value in dict(
        width=1, places=0, draft_passes=-1, draft_budget=8, pass_widths=4, costs=(1, 2)
    ).items():
        with pytest.raises(ValueError, match=f"{name}=.* is not valid"):
            LikelyTree(**{name: value})
    with pytest.raises(ValueError, match="heads=True needs draft heads"):
        LikelyTree(heads=True).sizes(tiny_config())
    with pytest.raises(ValueError, match="corpus=True needs params with a corpus"):
        states(tiny_model(), LikelyTree(corpus=True, costs=FREE), [1, 2, 3], 1)
    with pytest.raises(ValueError, match="costs=None is not valid in a state"):
        states(tiny_model(), LikelyTree(), [1, 2, 3], 1)

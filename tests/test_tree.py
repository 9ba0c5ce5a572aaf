# SPDX-License-Identifier: Apache-2.0
"""Trees against a trie of plain dicts, and the static sizes of a step in tsjax.methods.

A node is named by the tokens on its path from the root, so the slots that merge_paths chooses do
not matter: only which paths there are, and what each node says about the others.
"""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from helpers import VOCAB, tiny_config

from tsjax.decoding.config import DecodeConfig
from tsjax.decoding.tree import NO_NODE, SOURCES, merge_paths
from tsjax.methods import Auto, Autoregressive, NGram, TokenSwift, resolve_method
from tsjax.methods.tokenswift import tree_paths

pytestmark = pytest.mark.usefixtures("strict_promotion")

B, R, J = 3, 5, 4
FROM = (0, 0, 1, 2, 1)  # the sources of the R paths
WIDEST = 1 + R * J
WIDTHS = (5, WIDEST)  # each is one compilation

merge = jax.jit(
    functools.partial(merge_paths, num_sources=len(SOURCES)), static_argnames=("sources", "width")
)


def define(paths, lengths, sources):
    """The nodes of one batch row: their tokens from the root -> the sources that drafted them."""
    nodes = {(): set()}
    for path, length, source in zip(paths.tolist(), lengths, sources, strict=True):
        for depth in range(1, length + 1):
            nodes.setdefault(tuple(path[:depth]), set()).add(source)
    return nodes


def read_nodes(tree, b, root):
    """slot -> tokens of the path, for every slot of row b that is not padding."""
    tokens, paths = np.asarray(tree.tokens[b]), np.asarray(tree.path[b])
    assert tokens[0] == root
    named = {}
    for slot, path in enumerate(paths.tolist()):
        chain = [node for node in path if node != NO_NODE]
        assert path == chain + [NO_NODE] * (len(path) - len(chain)), "the chain has no gaps"
        if slot and chain == [slot]:
            continue
        assert chain[0] == 0 and chain[-1] == slot
        assert chain == sorted(set(chain)), "parents come before their children"
        named[slot] = tuple(tokens[chain[1:]].tolist())
    return named


def check_tree(tree, roots, paths, lengths, sources):
    width, depth = tree.tokens.shape[1], paths.shape[2]
    assert tree.path.shape == (*tree.tokens.shape, depth + 1)
    for array in (tree.tokens, tree.path, tree.depths, tree.parents, tree.drafted):
        assert array.dtype == np.int32
    for b, root in enumerate(roots):
        expected, named = define(paths[b], lengths[b], sources), read_nodes(tree, b, root)
        slot_of = {path: slot for slot, path in named.items()}
        assert len(slot_of) == len(named), "a path is there twice"
        assert set(slot_of) == set(expected)
        assert tree.drafted[b] == len(expected) - 1
        seen = np.eye(width, dtype=bool)
        for slot in range(width):
            path = named.get(slot, ())
            assert tree.depths[b, slot] == len(path)
            parent = slot_of[path[:-1]] if path else NO_NODE
            assert tree.parents[b, slot] == parent
            drafted_by = expected[path] if slot in named else set()
            assert set(np.flatnonzero(tree.sources[b, slot]).tolist()) == drafted_by
            if slot in named:
                seen[slot, [slot_of[path[:d]] for d in range(len(path))]] = True
            else:
                assert tree.tokens[b, slot] == 0
        np.testing.assert_array_equal(tree.mask[b], seen)


@st.composite
def drafts(draw):
    """Roots [B], paths [B, R, J] over a few tokens and ragged lengths [B, R]."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocab = draw(st.sampled_from([1, 2, 3, 50]))
    shortest = draw(st.sampled_from([0, 0, 2, J]))
    return (
        rng.integers(0, 50, B, np.int32),
        rng.integers(0, vocab, (B, R, J), np.int32),
        rng.integers(shortest, J + 1, (B, R), np.int32),
    )


# --- merge_paths -----------------------------------------------------------------------------


@hypothesis.given(drafts(), st.sampled_from(WIDTHS))
@hypothesis.settings(max_examples=30)
def test_merge_paths(draft, width):
    _, paths, lengths = draft
    needed = max(len(define(*row, FROM)) for row in zip(paths, lengths, strict=True))
    width = next(enough for enough in WIDTHS if enough >= max(needed, width))
    tree = jax.device_get(merge(*draft, sources=FROM, width=width))
    check_tree(tree, *draft, FROM)


@pytest.mark.parametrize(("lengths", "width"), [(J, WIDEST), (0, 5)])
def test_the_width_is_exactly_enough(lengths, width):
    """All tokens differ; and paths of no tokens."""
    paths = np.arange(B * R * J, dtype=np.int32).reshape(B, R, J)
    draft = np.asarray([7, 8, 9], np.int32), paths, np.full((B, R), lengths, np.int32)
    with jax.enable_x64(True):
        tree = jax.device_get(merge(*draft, sources=FROM, width=width))
    check_tree(tree, *draft, FROM)
    assert tree.drafted.tolist() == [R * lengths] * B


@pytest.mark.parametrize("count, depth, width", [(0, 3, 1), (2, 0, 4)])
def test_no_paths(count, depth, width):
    roots, paths = np.asarray([7, 8], np.int32), np.zeros((2, count, depth), np.int32)
    draft = roots, paths, np.zeros((2, count), np.int32)
    tree = jax.device_get(merge_paths(*draft, width=width))
    check_tree(tree, *draft, [0] * count)


# --- tree_paths ------------------------------------------------------------------------------


@pytest.mark.parametrize("branching", [(), (1, 3, 3, 3), (2, 1, 4)])
def test_branching_trees(branching):
    """As many children of each node as the depth says, named by rank, parents first."""
    expected, layer = [], [()]
    for count in branching:
        layer = [(*parent, rank) for parent in layer for rank in range(count)]
        expected += layer
    nodes = list(tree_paths(branching))
    assert sorted(nodes) == sorted(expected) and nodes == sorted(nodes, key=len)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=30)
def test_explicit_trees(data):
    """Any order of the paths is accepted; the nodes are these, parents first."""
    nodes = [()]
    for _ in range(data.draw(st.integers(0, 12))):
        parent = data.draw(st.sampled_from(nodes))
        child = (*parent, data.draw(st.integers(0, 3)))
        nodes += [child] * (child not in nodes)
    given = tuple(data.draw(st.permutations(nodes[1:])))
    ours = tree_paths(given)
    assert set(ours) == set(given) and len(ours) == len(given)
    for index, path in enumerate(ours):
        assert len(path) == 1 or path[:-1] in ours[:index]


MALFORMED_TREES = [
    ((1, 0), "each depth has at least one child"),
    ((17, 17, 17), "at most 4096 nodes"),
    (tuple((rank,) for rank in range(4097)), "4097 paths.*at most 4096 nodes"),
    (((0,), (0, -1)), r"\(0, -1\) is neither"),
    (((0,), ()), r"; \(\) is neither"),
    (((0,), 1), "; 1 is neither"),
    (((0,), (False,)), r"\(False,\) is neither"),
    ((1, "3"), "is neither"),
    ((True, 3), "is neither"),  # which compares and hashes as (1, 3)
    (((0,), (1,), (0,)), r"\(0,\) is there twice"),
    (((0,), (0, 1, 2)), r"\(0, 1, 2\) cannot be reached, its parent \(0, 1\) is missing"),
]


@pytest.mark.parametrize("tree, message", MALFORMED_TREES, ids=lambda x: str(x)[:40])
def test_malformed_trees(tree, message):
    tree_paths((1, 3))
    for make in (tree_paths, lambda tree: TokenSwift(tree=tree)):
        with pytest.raises(ValueError, match=message) as caught:
            make(tree)
        assert "tree=" in str(caught.value)


# --- the sizes of a step ---------------------------------------------------------------------


def decode_config(method, heads):
    return DecodeConfig(tiny_config(num_draft_heads=heads), method)


def ngrams_follow(cfg):
    return isinstance(cfg.method, TokenSwift) and cfg.method.plan(cfg.model).ngrams_follow


def draft_paths(cfg, token):
    """All paths that one step may draft, as lists; `token(name)` is the token of a node or slot."""
    method, paths = cfg.method, []
    if isinstance(method, TokenSwift):
        reach = cfg.model.num_draft_heads
        reach += method.draft_passes if method.draft_from == "partial_cache" else 0
        for path in tree_paths(method.tree):
            cut = path[:reach]
            paths.append([token(cut[: d + 1]) for d in range(len(cut))])
    best = [token((0,))] if ngrams_follow(cfg) else []
    for n in range(method.num_ngrams):
        paths.append(best + [token(("ngram", n, i)) for i in range(method.ngram_size - 1)])
    paths.append([token(("suffix", i)) for i in range(method.suffix_length)])
    return paths


def count_nodes(paths):
    """Distinct nodes with the root."""
    return len({tuple(path[:d]) for path in paths for d in range(len(path) + 1)} | {()})


def all_different():
    numbers = itertools.count()
    return functools.cache(lambda name: next(numbers))


trees = st.one_of(
    st.lists(st.integers(1, 3), max_size=4).map(tuple),
    st.sampled_from([((0,), (0, 0), (1,)), ((1,),), ((2,), (2, 1), (2, 1, 0), (0,))]),
)
of_text = dict(
    num_ngrams=st.integers(0, 4), ngram_size=st.integers(2, 5), suffix_length=st.integers(0, 6)
)
sources = st.sampled_from(["partial_cache", "verified_state"])
methods = st.builds(NGram, **of_text) | st.builds(
    TokenSwift, tree=trees, draft_from=sources, draft_passes=st.integers(1, 3), **of_text
)


@hypothesis.given(methods, st.integers(0, 4), st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=60)
def test_the_tree_width_is_what_a_step_may_need_at_most(method, heads, seed):
    from_state = isinstance(method, TokenSwift) and method.draft_from == "verified_state"
    hypothesis.assume(heads or not from_state or not method.tree)
    cfg = decode_config(method, heads)
    paths = draft_paths(cfg, all_different())
    assert count_nodes(paths) == cfg.sizes.width
    assert max(map(len, paths), default=0) == cfg.sizes.depth
    if isinstance(method, TokenSwift):
        reach = heads + (0 if from_state else method.draft_passes)
        deepest = max(map(len, tree_paths(method.tree)), default=0)
        levels = min(deepest, reach) or int(ngrams_follow(cfg) and not from_state)
        assert cfg.sizes.levels == levels
    for vocab in (1, 2, 5, 50):
        rng = np.random.default_rng(seed)
        drawn = functools.cache(lambda name, rng=rng, vocab=vocab: int(rng.integers(vocab)))
        assert count_nodes(draft_paths(cfg, drawn)) <= cfg.sizes.width


# --- refusals --------------------------------------------------------------------------------

OF_NGRAMS = [  # argument, value, and what the message says would be right
    ("num_ngrams", 1025, "an integer, at most 1024"),
    ("num_ngrams", True, "an integer, at least 0"),
    ("ngram_size", 1, "an integer, at least 2"),
    ("ngram_delay", 2**31, "an integer, at most 2147483647"),
    ("suffix_length", "16", "an integer, at least 0"),
]
OF_TOKENSWIFT = [
    ("draft_from", "heads", "one of 'partial_cache', 'verified_state'"),
    ("draft_passes", 65, "an integer, at most 64"),
    ("draft_rest", 1, "True or False"),
    ("suffix_alone", 17, "an integer, at most 16"),
]
REFUSED = [(method, *one) for method in (NGram, TokenSwift) for one in OF_NGRAMS]
REFUSED += [(TokenSwift, *one) for one in OF_TOKENSWIFT]


@pytest.mark.parametrize("method, name, value, wanted", REFUSED)
def test_refused_settings(method, name, value, wanted):
    with pytest.raises(ValueError) as caught:
        method(**{name: value})
    assert str(caught.value) == f"{name}={value!r} is not valid: {wanted}"


def test_methods_by_name_and_by_dataclass():
    assert resolve_method("autoregressive") == Autoregressive()
    assert resolve_method("ngram") == NGram()
    assert resolve_method("tokenswift") == resolve_method("auto") == Auto()
    assert resolve_method(NGram(num_ngrams=3)) == NGram(num_ngrams=3)
    for value in ("eagle", None, TokenSwift):
        with pytest.raises(ValueError, match="method=.* is not valid: one of 'autoregressive'"):
            resolve_method(value)


def test_auto_has_to_be_resolved():
    for name in ("tree", "draft_from"):
        with pytest.raises(ValueError, match=f"{name}='auto' is not valid: .*tsjax.Auto"):
            TokenSwift(**{name: "auto"})
    with pytest.raises(ValueError, match=r"Auto\(\) is not valid here.*tsjax.costs.choose_method"):
        decode_config(Auto(), 3)


def test_what_the_model_has_not():
    """Ranks lie within the vocabulary, as far as they are drafted."""
    with pytest.raises(ValueError, match="needs draft heads.*heads=.*partial_cache.*ngram"):
        decode_config(TokenSwift(draft_from="verified_state"), 0)
    for tree in ((VOCAB + 1,), ((0,), (0, VOCAB))):
        with pytest.raises(ValueError, match=f"tree=.*below the vocabulary size {VOCAB}"):
            decode_config(TokenSwift(tree=tree), 3)
    decode_config(TokenSwift(tree=((0,), (0, VOCAB))), 0)  # drafted one token deep

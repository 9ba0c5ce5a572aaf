# SPDX-License-Identifier: Apache-2.0
"""Medusa: its heads against NumPy in float64, its trees against every tree there is, its files.

That its tokens are those of plain decoding is tested beside the other methods, in test_methods.py.
"""

import dataclasses
import functools
import itertools
import json
import math

import hf_fixtures
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers import chain_model, oracle_hidden, oracle_norm, oracle_unembed, tiny_config, tiny_model
from test_methods import RAGGED, SAMPLED, VOCAB, compare, decoded, headless, new_tokens, rows_of

import tsjax
import tsjax_convert
from tsjax.config import HeadTraining
from tsjax.methods import resolve_method
from tsjax.methods.medusa import VICUNA_7B
from tsjax.model.heads import run_heads, unembed_with_heads
from tsjax.model.logits import hidden_states
from tsjax.training.loss import add_gradients, init_heads, measure_heads, zero_gradients

KINDS = SHARED, OWN = "parallel", "parallel_own_vocabulary"


def oracle_head_logits(model, hidden) -> list[np.ndarray]:
    """Of each head, its logits [T, V] in float64 from the last layer's outputs."""
    weight = np.asarray(model.params.model.final_norm, np.float64)
    x, found = oracle_norm(hidden, weight, model.cfg.norm_eps), []
    for head in model.params.heads:
        inner = x @ np.asarray(head.block, np.float64).T + np.asarray(head.block_bias, np.float64)
        state = x + inner / (1 + np.exp(-inner))
        if head.unembed is None:
            found.append(oracle_unembed(model, state))
        else:
            found.append(state @ np.asarray(head.unembed, np.float64).T)
    return found


@functools.cache
def model_of(kind: str, heads: int = 3, **shape):
    """Random, norms and biases too."""
    model, rng = (
        tiny_model(num_draft_heads=heads, head_kind=kind, **shape),
        np.random.default_rng(4),
    )

    def shaken(leaf):
        noise = rng.normal(size=leaf.shape) * 0.2
        return leaf + jnp.asarray(noise, leaf.dtype) if leaf.ndim == 1 else leaf

    return model.replace(params=jax.tree.map(shaken, model.params))


# --- heads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_those_of_an_independent_computation(kind):
    model = model_of(kind)
    hidden = oracle_hidden(model, np.random.default_rng(0).integers(0, 61, 9))
    heads, weights = model.params.heads, model.params.model
    states = jax.jit(run_heads, static_argnames="cfg")(
        heads, weights, jnp.asarray(hidden, jnp.float32), cfg=model.cfg
    )
    assert states.shape == (9, 3, 32)
    logits = unembed_with_heads(weights, heads, states, cfg=model.cfg)
    for index, expected in enumerate(oracle_head_logits(model, hidden)):
        np.testing.assert_allclose(logits[:, index], expected, rtol=1e-4, atol=1e-3)
    # After states of the model itself, whose logits are by its own matrix.
    own = jnp.concatenate([states[:, 2:], states], axis=1)
    both = unembed_with_heads(weights, heads, own, cfg=model.cfg)
    np.testing.assert_allclose(both[:, 1:], logits, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(
        both[:, 0], oracle_unembed(model, np.asarray(states[:, 2])), rtol=1e-4, atol=1e-3
    )


def successor(token: int, steps: int = 1) -> int:
    return (token + 5 * steps) % VOCAB


def perfect_model(kind: str, heads: int, second: int | None = None) -> tsjax.Model:
    """It adds 5, and its heads know it; the one numbered `second` has the right token second."""
    plain = chain_model({token: successor(token) for token in range(VOCAB)}, vocab_size=VOCAB)
    cfg = dataclasses.replace(plain.cfg, num_draft_heads=heads, head_kind=kind)
    found = []
    for index, head in enumerate(tsjax.init_params(cfg).heads):
        # The matrix of the model adds 5 itself, one of a head's own does what it says.
        steps, matrix = index + 2 - (kind == SHARED), np.zeros((VOCAB, VOCAB), np.float32)
        for token in range(VOCAB):
            matrix[successor(token, steps), token] = 100
            matrix[(token + 1) % VOCAB, token] += 150 * (index == second)
        empty, given = jnp.zeros_like(head.block), jnp.asarray(matrix)
        changed = {"block": given} if kind == SHARED else {"block": empty, "unembed": given}
        found.append(head.replace(**changed))
    return tsjax.Model(plain.params.replace(heads=tuple(found)), cfg=cfg)


@pytest.mark.parametrize("kind", KINDS)
def test_perfect_heads_are_accepted_in_full(kind):
    """Each head guesses the token that it is for. Only the first step knows no state."""
    state = decoded(perfect_model(kind, 4), tsjax.Medusa(tree=(1, 1, 1, 1)), [[1], [7, 2]], 12)
    assert np.asarray(state.stats.accepted[:, 4]).min() >= 11
    for start, row in zip((1, 2), new_tokens(state), strict=True):
        assert row == [successor(start, 1 + i) for i in range(len(row))]


@pytest.mark.parametrize("second", [0, 2])
def test_a_second_rank_is_accepted(second):
    path = tuple(int(index == second) for index in range(3))
    method = tsjax.Medusa(tree=[path[: n + 1] for n in range(3)])
    state = decoded(perfect_model(OWN, 3, second), method, [[1]], 12)
    assert np.asarray(state.stats.accepted[0, 3]) >= 11


def test_drafts_are_ranked_with_the_noise_of_their_positions():
    """Where every token is drawn from one distribution, heads that know it draw what is drawn."""
    plain = chain_model({}, vocab_size=VOCAB)
    row = np.random.default_rng(3).standard_normal(VOCAB) / 3
    weights = plain.params.model.replace(unembed=jnp.tile(jnp.float32(row)[:, None], (1, VOCAB)))
    cfg = dataclasses.replace(plain.cfg, num_draft_heads=3, head_kind=SHARED)
    heads = jax.tree.map(jnp.zeros_like, tsjax.init_params(cfg).heads)
    model = tsjax.Model(tsjax.Params(model=weights, heads=heads), cfg=cfg)
    found = []
    for coupled in (True, False):
        method = tsjax.Medusa(tree=(1, 1, 1), noise_coupled=coupled)
        settings = dict(do_sample=True, repetition_penalty=1.1, repetition_window=4)
        state = decoded(model, method, [[1]], 20, **settings)
        found.append(int(state.stats.accepted[0, 3]))
    assert found[0] >= 19 and found[1] < 5


def test_a_mesh_gives_the_same_tokens():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    shape = dict(num_layers=1, num_draft_heads=2, head_kind=OWN)
    placed, single = tiny_model(mesh=mesh, **shape), tiny_model(**shape)
    settings = dict(SAMPLED, max_new_tokens=30)
    expected = rows_of(tsjax.generate(headless(single), RAGGED, **settings))
    result = tsjax.generate(placed, RAGGED, method=tsjax.Medusa(tree=(2, 2)), **settings)
    assert rows_of(result) == expected and result.stats.tokens_per_step > 1


@pytest.mark.parametrize("kind", KINDS)
def test_tokenswift_drafts_from_them_too(kind):
    """The paper's Medusa*: these heads with TokenSwift's tree, partial cache and n-grams."""
    model = perfect_model(kind, 3)
    method = tsjax.TokenSwift(tree=(1, 3, 1, 1), num_ngrams=0, suffix_length=0, draft_budget=64)
    state = decoded(model, method, [[1]], 12)
    assert np.asarray(state.stats.accepted[0, 4]) >= 11


def test_a_saved_run_goes_on_with_its_own_tree(tmp_path):
    model, path = perfect_model(SHARED, 2), tmp_path / "run.json"
    method = tsjax.Medusa(tree=((0,), (1,), (0, 0)))
    tsjax.generate(model, [1], method=method, max_new_tokens=9, save_to=path)
    result = tsjax.generate(model, resume_from=path, max_new_tokens=30)
    assert result.tokens[0].tolist() == [successor(1, 1 + i) for i in range(30)]
    assert result.stats.tokens_per_step > 2 and result.stats.method == method


def test_it_says_what_it_needs_before_it_computes():
    assert resolve_method("medusa") == tsjax.Medusa()
    for model, has in (
        (tiny_model(), "the model has none"),
        (tiny_model(num_draft_heads=2), "the 2 of the model are TokenSwift's"),
    ):
        shapes = jax.eval_shape(lambda model=model: model.params)  # nothing can be computed
        empty = model.replace(params=shapes)
        with pytest.raises(ValueError, match=f"method='medusa' needs parallel heads, and {has}"):
            tsjax.generate(empty, [1, 2], method="medusa", max_new_tokens=4)
    wrong = [(0, "at least 1"), ((), "at least one node"), (((1, 0),), "parent"), (True, "integer")]
    for tree, message in wrong:
        with pytest.raises(ValueError, match=f"tree=.* is not valid: .*{message}"):
            tsjax.Medusa(tree=tree)
    with pytest.raises(ValueError, match="below the vocabulary size 61"):
        tsjax.Medusa(tree=(99,)).sizes(model_of(SHARED).cfg)
    with pytest.raises(ValueError, match="head_kind='own' is not valid: one of 'chained'"):
        tiny_config(head_kind="own")


# --- trees ---------------------------------------------------------------------------------------


def value(table, path) -> float:
    return math.prod(table[depth][rank] for depth, rank in enumerate(path))


def worth(table, tree) -> float:
    return sum(value(table, path) for path in tree)


def every_tree(widths, nodes: int) -> list[set[frozenset]]:
    """All trees of 0, 1 ... `nodes` nodes, by adding every possible node to every smaller one."""
    ranks = [range(width) for width in widths]
    possible = [p for depth in range(len(widths)) for p in itertools.product(*ranks[: depth + 1])]
    found: list[set[frozenset]] = [{frozenset()}]
    for _ in range(nodes):
        found.append(
            {
                tree | {path}
                for tree in found[-1]
                for path in possible
                if path not in tree and (len(path) == 1 or path[:-1] in tree)
            }
        )
    return found


shares = st.floats(0.001, 0.99) | st.sampled_from([0.5, 0.25, 0.1])
tables = st.sampled_from([(3, 2), (2, 2, 2), (1, 3), (4,), (2, 1, 1, 1)]).flatmap(
    lambda widths: st.tuples(*(st.tuples(*[shares] * width) for width in widths))
)


@functools.cache
def trees_of(widths) -> list[set[frozenset]]:
    return every_tree(widths, 6)


@hypothesis.settings(max_examples=60)
@hypothesis.given(tables, st.integers(1, 6), st.floats(0.001, 1.0))
def test_no_tree_is_worth_more(table, nodes, row_cost):
    best = [
        max((worth(table, tree) for tree in trees), default=0.0)
        for trees in trees_of(tuple(map(len, table)))
    ]
    found = tsjax.tree_from_accuracy(table, nodes)
    assert len(set(found)) == len(found) <= nodes
    assert all(path[:-1] in found for path in found if len(path) > 1)
    assert worth(table, found) == pytest.approx(max(best[: nodes + 1]), rel=1e-12)
    # With a cost: the tree with the least time per token, among those that were tried.
    cost = max(row_cost, 0.6 * value(table, max(found, key=lambda path: value(table, path))))
    per_token = [(1 + cost * n) / (1 + v) for n, v in enumerate(best) if n == 0 or v]
    try:
        paid = tsjax.tree_from_accuracy(table, row_cost=cost)
    except ValueError:
        assert per_token[0] <= min(per_token) * (1 + 1e-12)
        return
    hypothesis.assume(len(paid) <= 6)
    found = (1 + cost * len(paid)) / (1 + worth(table, paid))
    assert found == pytest.approx(min(per_token), rel=1e-12)


def test_the_order_in_which_nodes_are_added():
    table = [[0.5, 0.25, 0.2], [0.5, 0.3], [0.5]]
    order = [(0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0)]  # 0.25 twice, 0.125 twice
    for nodes in range(1, 8):
        found = tsjax.tree_from_accuracy(table, nodes)
        assert set(found) == set(order[:nodes])
        assert list(found) == sorted(found, key=lambda path: (len(path), path))
    assert tsjax.tree_from_accuracy([[0.5, 0.0]], 5) == ((0,),)


DEFAULT = """
0 1 2 3 4 00 01 02 03 04 10 11 12 13 14 20 21 22 23 24 30 31 32 40 41 42
000 001 002 003 004 010 011 012 013 014 020 021 022 030 031 032 040 041 042
100 101 102 103 104 110 120 200 201 300 400 0000 0001 0002 0010 0011 0020 0100
"""


def test_the_default_trees():
    def paths(heads, **changes):
        cfg = tiny_config(num_draft_heads=heads, head_kind=SHARED, **changes)
        return tsjax.Medusa().paths(cfg)

    for heads in (4, 5, 7):
        assert {"".join(map(str, path)) for path in paths(heads)} == set(DEFAULT.split())
    # The value of a published tree of 63 nodes by the same table is 1.34 tokens.
    assert worth(VICUNA_7B, paths(4)) == pytest.approx(1.3846, abs=1e-4)
    sizes = [[sum(len(p) == depth for p in paths(n)) for depth in (1, 2, 3)] for n in (1, 2, 3)]
    assert sizes == [[5, 0, 0], [5, 25, 0], [5, 23, 35]]
    assert max(map(max, paths(3, vocab_size=2))) == 1
    assert len(tsjax.Medusa(tree=12).paths(tiny_config(num_draft_heads=3, head_kind=OWN))) == 12
    cut = tsjax.Medusa(tree=(2, 1, 1)).paths(tiny_config(num_draft_heads=2, head_kind=OWN))
    assert cut == ((0,), (1,), (0, 0), (1, 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "table=.* a row of shares for each head"),
        (([[0.5], []],), "table=.* a row of shares for each head"),
        (([[1.5]], 3), "table=1.5 is not valid: a finite number, between 0 and 1"),
        (([[0.5]],), "nodes=None is not valid: the number of nodes, or row_cost"),
        (([[0.5]], 0), "nodes=0 is not valid"),
        (([[0.0]], 3), "a head that is right now and then"),
    ],
)
def test_wrong_tables_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tsjax.tree_from_accuracy(*arguments)


def test_the_number_of_nodes_follows_the_costs():
    line = tsjax.Line

    def nodes(row: float) -> int:
        costs = tsjax.Costs(
            passes=((1, line(1.0)), (64, line(1.0 + 63 * row))), heads=0.1, choice=line(0.0),
            suffix=line(0.0), ngrams=0.0, overhead=0.0, origin="measured",
        )  # fmt: skip
        measured = tsjax.Measured(cfg, "cpu", "cpu", 100, 1, costs=costs)
        found = tsjax.Medusa(tree=None).next(measured)
        assert isinstance(found, tsjax.Medusa) and isinstance(found.tree, int)
        assert found.next(measured._replace(current=found)) == found
        return found.tree

    cfg = tiny_config(num_draft_heads=4, head_kind=SHARED)
    assert nodes(0.0) == 63 and nodes(10.0) == 1
    few, some = nodes(0.05), nodes(0.005)
    assert few < some
    assert few in range(
        *(len(tsjax.tree_from_accuracy(VICUNA_7B, row_cost=x)) for x in (0.06, 0.03))
    )
    choice = tsjax.choose_method(tsjax.Medusa(tree=None), model_of(SHARED), 100)
    assert isinstance(choice.method.tree, int)
    assert choice.step_cost > 0


# --- files -----------------------------------------------------------------------------------

D, ROWS = hf_fixtures.SIZES["hidden_size"], hf_fixtures.SIZES["vocab_size"]


def published(layout: str, heads: int = 3, prefix: str = "", bias: bool = True, seed: int = 5):
    """Tensors as the published files have them, and what each head's arrays should be."""
    rng, tensors, expected = np.random.default_rng(seed), {}, []
    for k in range(heads):
        block, of_bias, matrix = (
            rng.standard_normal(shape).astype(np.float32) for shape in ((D, D), (D,), (ROWS, D))
        )
        of_bias = of_bias if bias else 0 * of_bias
        if layout == "vllm":
            names = (
                f"blocks.{k}.layers.0.weight",
                f"blocks.{k}.layers.0.bias",
                f"lm_heads.{k}.weight",
            )
        else:
            names = f"{k}.0.linear.weight", f"{k}.0.linear.bias", f"{k}.1.weight"
        tensors[prefix + names[0]] = block
        if bias:
            tensors[prefix + names[1]] = of_bias
        if layout != "shared":
            tensors[prefix + names[2]] = matrix
        expected.append((block, of_bias, None if layout == "shared" else matrix))
    return tensors, expected


def write(file, tensors):
    file.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    return file


def check_heads(model, expected, kind: str) -> None:
    assert model.cfg.num_draft_heads == len(expected) and model.cfg.head_kind == kind
    for head, arrays in zip(model.params.heads, expected, strict=True):
        for found, array in zip((head.block, head.block_bias, head.unembed), arrays, strict=True):
            assert (found is None) == (array is None)
            if array is not None:
                np.testing.assert_array_equal(found, array)


@pytest.fixture
def base(tmp_path):
    return hf_fixtures.make(tmp_path / "base")


LAYOUTS = ("own", "shared", "vllm")


@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "medusa_head."])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_heads_come_in_and_go_out_byte_for_byte(layout, prefix, base, tmp_path):
    tensors, expected = published(layout, prefix=prefix)
    # A folder as it is on the hub, with the config that names a wrong number of heads.
    name = "model.safetensors" if layout == "vllm" else "medusa_lm_head.safetensors"
    file = write(tmp_path / "heads" / name, tensors)
    (file.parent / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    kind = SHARED if layout == "shared" else OWN
    for place in (file, file.parent):
        check_heads(tsjax.load(base, heads=place), expected, kind)
    # To a tsjax checkpoint, and from there to a folder of heads alone.
    tsjax_convert.to_tsjax(base, tmp_path / "ts", heads=file)
    check_heads(tsjax.load(tmp_path / "ts"), expected, kind)
    tsjax_convert.export_heads(
        tmp_path / "ts", tmp_path / "out", layout="vllm" if layout == "vllm" else "medusa"
    )
    plain = write(tmp_path / "plain.safetensors", published(layout)[0])
    assert (tmp_path / "out" / name).read_bytes() == plain.read_bytes()
    assert tsjax_convert.verify(tmp_path / "ts", tmp_path / "out") == len(tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_heads" if layout == "vllm" else "medusa_num_heads"] == 3


def test_loaded_heads_draft(base, tmp_path):
    model = tsjax.load(base, heads=write(tmp_path / "h.safetensors", published("own", heads=2)[0]))
    compare(model, [1, 2, 3], tsjax.Medusa(tree=7), max_new_tokens=20)


@pytest.mark.parametrize("layout", ["own", "shared"])
def test_a_pickle_as_it_was_published(layout, base, tmp_path):
    torch = pytest.importorskip("torch")
    tensors, expected = published(layout, heads=5)
    (tmp_path / "heads").mkdir()
    file = tmp_path / "heads" / "medusa_lm_head.pt"
    torch.save({name: torch.from_numpy(array).bfloat16() for name, array in tensors.items()}, file)
    (file.parent / "config.json").write_text('{"medusa_num_heads": 2}')
    with pytest.raises(ValueError, match="only pickled torch weights.*allow_pickle=True"):
        tsjax.load(base, heads=file.parent)
    model = tsjax.load(base, heads=file.parent, allow_pickle=True)
    rounded = [
        tuple(x if x is None else x.astype(jnp.bfloat16).astype(np.float32) for x in one)
        for one in expected
    ]
    check_heads(model, rounded, OWN if layout == "own" else SHARED)


def test_vllm_heads_without_biases_and_with_the_models_matrix(base, tmp_path):
    tensors, expected = published("vllm", bias=False)
    check_heads(tsjax.load(base, heads=write(tmp_path / "a.safetensors", tensors)), expected, OWN)
    shared = {name: array for name, array in tensors.items() if "lm_heads" not in name}
    shared["lm_head.weight"] = np.ones((ROWS, D), np.float32)
    expected = [(block, bias, None) for block, bias, _ in expected]
    file = write(tmp_path / "b.safetensors", shared)
    check_heads(tsjax.load(base, heads=file), expected, SHARED)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_merged_and_dropped(kind, base, tmp_path):
    tensors, expected = published("own" if kind == OWN else "shared")
    file = write(tmp_path / "heads.safetensors", tensors)
    tsjax_convert.to_hf(base, tmp_path / "merged", heads=file, draft_heads="merge")
    check_heads(tsjax.load(tmp_path / "merged"), expected, kind)
    # The config's number does not count, that of the tensors does.
    path = tmp_path / "merged" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"medusa_heads": 1}))
    check_heads(tsjax.load(tmp_path / "merged"), expected, kind)
    check_heads(tsjax.load(base, heads=tmp_path / "merged"), expected, kind)
    tsjax_convert.to_hf(tmp_path / "merged", tmp_path / "bare", draft_heads="drop")
    assert tsjax.load(tmp_path / "bare").cfg == tsjax.load(base).cfg


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.1.linear.weight": (D, D)}, "heads of several residual blocks are not supported"),
        ({"1.0.linear.weight": (D, D + 1)}, r"1.0.linear.weight.*shape \[32, 33\]"),
        ({"1.1.weight": (ROWS - 1, D)}, r"1.1.weight.* has shape \[47, 32\]"),
        ({"1.1.weight": None}, "missing in .*: medusa_head.1.1.weight"),
        ({"1.0.linear.bias": None}, "missing in .*: medusa_head.1.0.linear.bias"),
        ({"1.0.linear.weight": None, "1.0.linear.bias": None}, "missing in"),
        ({"something": (3,)}, "not part of this model: something"),
        ({"token_map": (3,)}, "has a token_map"),
        ({"blocks.1.layers.0.weight": (D, D)}, "is there again"),
        ({"medusa_layers.0.linear.weight": (D, D)}, "two kinds of draft heads"),
        ({f"{k}.0.linear.{x}": None for k in range(3) for x in ("weight", "bias")}, "it holds no"),
    ],
)
def test_wrong_heads_are_refused(change, message, base, tmp_path):
    tensors, _ = published("own")
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.zeros(shape, np.float32)
    file = write(tmp_path / "heads.safetensors", tensors)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        tsjax.load(base, heads=file)


def test_an_unknown_tensor_among_prefixed_heads_is_refused(base, tmp_path):
    tensors, _ = published("own", prefix="medusa_head.")
    tensors["medusa_head.0.scale"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="not part of this model: medusa_head.0.scale"):
        tsjax.load(base, heads=write(tmp_path / "heads.safetensors", tensors))


def test_several_vllm_blocks_are_refused(base, tmp_path):
    tensors, _ = published("vllm")
    tensors["blocks.0.layers.1.weight"] = np.zeros((D, D), np.float32)
    with pytest.raises(NotImplementedError, match="heads of several residual blocks"):
        tsjax.load(base, heads=write(tmp_path / "heads.safetensors", tensors))


def test_old_files_say_no_kind_of_heads(tmp_path):
    old = tiny_config(num_draft_heads=2)
    assert "head_kind" not in old.to_dict() and tsjax.ModelConfig.from_dict(old.to_dict()) == old
    new = tiny_config(num_draft_heads=2, head_kind=OWN)
    assert tsjax.ModelConfig.from_dict(new.to_dict()) == new
    assert new.with_heads(0) == old.with_heads(0) == tiny_config()


# --- training --------------------------------------------------------------------------------

LENGTH = 11
SETTINGS = HeadTraining.of_kind(
    SHARED, num_heads=3, sequence_length=LENGTH, steps=10, warmup_steps=2, batch_size=2,
    micro_batch=2,
)  # fmt: skip


def oracle_losses(model, tokens) -> np.ndarray:
    """Mean cross-entropy of each head over its labels, in float64."""
    found = np.zeros(len(model.params.heads))
    for row in tokens:
        logits_of_heads = oracle_head_logits(model, oracle_hidden(model, row))
        for k, logits in enumerate(logits_of_heads):
            places = range(len(row) - 2 - k)
            each = [np.log(np.exp(logits[t] - logits[t, row[t + 2 + k]]).sum()) for t in places]
            found[k] += np.mean(each) / len(tokens)
    return found


def with_head_arrays(model, heads):
    return model.replace(params=model.params.replace(heads=tuple(heads)))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_an_independent_computation(kind):
    model, rng = model_of(kind), np.random.default_rng(1)
    tokens = rng.integers(0, 61, (2, LENGTH)).astype(np.int32)
    heads, weights = model.params.heads, model.params.model
    hidden = jax.jit(hidden_states, static_argnames=("cfg", "width"))(
        model.params.replace(heads=()), tokens, cfg=model.cfg.with_heads(0), width=16
    )
    options = dict(cfg=model.cfg, chunk_tokens=8)
    labels = 2 * (LENGTH - 2 - np.arange(3))
    found = jax.jit(
        add_gradients, static_argnames=("cfg", "chunk_tokens", "loss_decay")
    )(heads, weights, hidden, tokens, zero_gradients(heads), loss_decay=0.8, **options)  # fmt: skip
    np.testing.assert_allclose(found.metrics.loss / labels, oracle_losses(model, tokens), rtol=1e-4)
    measured = jax.jit(measure_heads, static_argnames=("cfg", "chunk_tokens"))(
        heads, weights, hidden, tokens, **options
    )
    np.testing.assert_allclose(measured.loss[1:], found.metrics.loss, rtol=1e-5)

    def objective(heads):
        return 0.8 ** np.arange(3) @ oracle_losses(with_head_arrays(model, heads), tokens)

    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), heads)
    names = ["block", "block_bias"] + ["unembed"] * (kind == OWN)
    for k, name in itertools.product(range(3), names):  # in a random direction of each array
        array = getattr(wide[k], name)
        there = rng.standard_normal(array.shape)

        def moved(step, k=k, name=name, array=array, there=there):
            one = wide[k].replace(**{name: array + step * there})
            return objective([*wide[:k], one, *wide[k + 1 :]])

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        mean = np.asarray(getattr(found.gradient[k], name), np.float64) / tokens.size
        assert (mean * there).sum() == pytest.approx(slope, rel=2e-3, abs=1e-5), (k, name)


@pytest.mark.parametrize("kind", KINDS)
def test_training_teaches_heads_and_writes_them_as_medusa_does(kind, tmp_path):
    size = 12
    model = chain_model({i: (i + 1) % size for i in range(size)}, vocab_size=size)
    sharp = model.params.model.replace(unembed=model.params.model.unembed * 8)
    model = model.replace(params=model.params.replace(model=sharp))
    options = dict(
        head_kind=kind, num_heads=2, sequence_length=24, steps=60, warmup_steps=5, batch_size=4,
        micro_batch=4, learning_rate=0.05, save_to=tmp_path / "run",
    )  # fmt: skip
    trained = tsjax.train_heads(model, np.arange(40 * 24) % size, held_out=0.1, **options)
    first, last = trained.history[0], trained.history[-1]
    # A new head says what the model says, which is wrong here: its labels come a token later.
    assert min(first["head_losses"]) > 3 and max(last["head_losses"]) < 0.05
    for record in (first, last):
        a, b = record["head_losses"]
        assert record["loss"] == pytest.approx(a + 0.8 * b, rel=1e-6)
    assert [record["top1"] for record in trained.evaluation] == [1.0, 1.0, 1.0]
    np.testing.assert_array_equal(model.params.model.unembed, sharp.unembed)  # it is still there
    stored = safetensors.numpy.load_file(tmp_path / "run" / "heads.safetensors")
    wanted = {f"{k}.0.linear.{x}" for k in range(2) for x in ("weight", "bias")}
    assert set(stored) == wanted | ({"0.1.weight", "1.1.weight"} if kind == OWN else set())
    state = decoded(trained.model, tsjax.Medusa(tree=(1, 1)), [[3]], 8)
    assert state.stats.accepted[0, 2] >= 7


def test_a_run_of_medusa_heads_goes_on_and_is_no_other(tmp_path):
    model, data = tiny_model(), np.random.default_rng(0).integers(0, 61, (6, LENGTH))
    settings = dict(settings=SETTINGS, save_to=tmp_path, save_every=2)
    whole = tsjax.train_heads(model, data, settings=SETTINGS)

    def stop(record):
        if record["step"] == 4:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        tsjax.train_heads(model, data, on_step=stop, **settings)
    with pytest.raises(ValueError, match="head_kind='parallel', now 'chained'"):
        tsjax.train_heads(model, data, resume=True, head_kind="chained", **settings)
    resumed = tsjax.train_heads(model, data, resume=True, **settings)
    for a, b in zip(
        *(jax.tree.leaves(x.model.params.heads) for x in (resumed, whole)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_run_saved_before_there_were_kinds_of_heads_goes_on(tmp_path):
    model, data = tiny_model(), np.random.default_rng(0).integers(0, 61, (6, LENGTH))
    settings = HeadTraining(
        num_heads=1, sequence_length=LENGTH, steps=3, warmup_steps=1, batch_size=2, micro_batch=2
    )

    def stop(record):
        if record["step"] == 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        tsjax.train_heads(model, data, settings=settings, save_to=tmp_path, on_step=stop)
    (document,) = tmp_path.glob("checkpoint/*/run.json")
    content = json.loads(document.read_text())
    del content["settings"]["head_kind"], content["settings"]["loss_decay"]
    document.write_text(json.dumps(content))
    resumed = tsjax.train_heads(model, data, settings=settings, save_to=tmp_path, resume=True)
    assert len(resumed.history) == 3


def test_the_recipes():
    assert HeadTraining.of_kind("chained") == HeadTraining()
    for kind in KINDS:
        recipe = HeadTraining.of_kind(kind)
        assert (recipe.learning_rate, recipe.warmup_steps, recipe.weight_decay) == (2e-3, 40, 0.0)
        assert recipe.loss_weights == pytest.approx((1.0, 0.8, 0.64, 0.512))
        model = tiny_model()
        first = init_heads(model.cfg, dataclasses.replace(recipe, num_heads=1), model.params.model)[
            0
        ]
        assert not np.any(first.block) and not np.any(first.block_bias)
        if kind == OWN:
            np.testing.assert_array_equal(first.unembed, model.params.model.unembed)
    with pytest.raises(ValueError, match="head_kind='medusa' is not valid: one of"):
        HeadTraining(head_kind="medusa")
    with pytest.raises(ValueError, match="loss_decay=0.0 is not valid"):
        HeadTraining(loss_decay=0.0)

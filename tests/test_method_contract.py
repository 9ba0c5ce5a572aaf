# SPDX-License-Identifier: Apache-2.0
"""What every method has to keep, one suite for all of them: a new method is one row of ROWS.

The runs are in float64, where no two choices are near-ties: that tokens are those of plain
decoding is then a fact about the algorithm. How many drafts are right is recorded, as a draft that
became worse fails nothing else. What needs no run is traced only.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_tree import AnyTree
from helpers import MIXED_COSTS, PROMPTS, SIZES, looping_model

import tsjax
from tsjax.costs import Costs, Int8Costs, Line
from tsjax.decoding.method import Measured
from tsjax.decoding.start import init_state
from tsjax.host import run
from tsjax.methods import METHODS, auto

LINE = Line(1.0)
CHEAP_ROWS = Costs(  # what is drafted at all is judged
    passes=((1, LINE), (64, Line(1.01))), heads=0.0, choice=LINE, suffix=LINE, ngrams=0.0,
    overhead=0.0, origin="measured", int8=Int8Costs(Line(0.01), 0.0),
)  # fmt: skip
# Every processor is on, so each row of the table compiles one step; rows end by a stop token or by
# length, at different steps.
SETTINGS = dict(
    max_new_tokens=40, do_sample=True, temperature=0.8, top_k=20, top_p=0.98, min_p=0.005,
    epsilon_cutoff=0.001, eta_cutoff=0.001, min_tokens_to_keep=2, repetition_penalty=1.1,
    repetition_window=6, presence_penalty=0.1, frequency_penalty=0.05, no_repeat_ngram_size=9,
    suppress_tokens=(23,), min_new_tokens=5, eos_token_id=(11,), seed=7, logprobs=1,
)  # fmt: skip


class Row(NamedTuple):
    """A method, what its model needs, and what was accepted of its drafts.

    `accepted` are the steps of `SETTINGS` that emitted 0, 1, ... drafted tokens, `by_source` the
    emitted drafts of each source. Where they change, say in which way they became better.
    """

    method: tsjax.methods.Method
    accepted: tuple[int, ...] = ()
    by_source: tuple[int, ...] = ()
    heads: int = 0
    head_kind: str = "chained"
    second: bool = False  # whether there is a second model
    drafter: tsjax.training.OneLayer | None = None
    cache: str = "same"

    def model(self, dtype: str = "float64", mesh=None) -> tsjax.Model:
        heads = {"num_draft_heads": self.heads, "head_kind": self.head_kind} if self.heads else {}
        more = {"drafter": self.drafter, "cache": self.cache, **heads}
        return looping_model(dtype=dtype, mesh=mesh, **more)

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        drafts = {"draft_model": second_model()} if self.second else {}
        return {"method": self.method, **drafts}


@functools.cache
def second_model(dtype: str = "float64") -> tsjax.Model:
    """One layer of other weights, which says nearly the same."""
    return looping_model(dtype=dtype, num_layers=1)


ROWS = {
    "autoregressive": Row(tsjax.methods.Autoregressive(), (102,), (0, 0, 0)),
    "ngram": Row(
        tsjax.NGram(num_ngrams=4, ngram_size=3, ngram_slots=5, suffix_length=6, pass_widths=(1, 4)),
        (67, 10, 5, 0, 0, 0, 0), (0, 10, 12),
    ),
    "tokenswift": Row(
        tsjax.TokenSwift(
            tree=(2, 2, 1, 1), draft_passes=2, draft_budget=20, num_sinks=3, draft_refresh=5,
            draft_rest=True, num_ngrams=2, ngram_size=3, suffix_length=4, suffix_match=2,
            suffix_alone=4, pass_widths=(5,),
        ),
        (3, 1, 21, 6, 2), (68, 18, 2), heads=2,
    ),
    "narrow_cache": Row(
        tsjax.TokenSwift(
            tree=(2, 2, 1), draft_passes=2, draft_budget=20, num_sinks=3, draft_refresh=5,
            draft_rest=True, num_ngrams=2, ngram_size=3,
        ),
        (0, 2, 22, 8, 0, 0, 0, 0, 0), (69, 20, 4), heads=2, cache="int8",
    ),
    "medusa": Row(
        tsjax.methods.Medusa(tree=12), (35, 16, 9, 2), (40, 0, 0), heads=3, head_kind="parallel"
    ),
    "likely_tree": Row(
        tsjax.LikelyTree(
            width=16, pass_widths=(1, 4), draft_passes=2, heads=True, places=3, draft_budget=20,
            num_sinks=3, draft_refresh=None, draft_weights="int8", costs=CHEAP_ROWS,
        ),
        (1, 3, 16, 8, 3, *(0,) * 11), (71, 5, 5, 0), heads=2,
    ),
    "one_layer": Row(
        tsjax.LikelyTree(width=8, pass_widths=(1, 4), drafter=3, places=0, costs=CHEAP_ROWS),
        (29, 20, 7, 3), (43, 0, 0, 0),
        drafter=tsjax.training.OneLayer(mlp_dim=16, words=20, taps=(0, 1, 2), window=9),
    ),
    "magicdec": Row(
        tsjax.methods.MagicDec(draft_choice="snapkv", draft_passes=2, draft_budget=36, num_sinks=1),
        (2, 2, 32), (66, 0, 0),
    ),
    "draft_model": Row(
        tsjax.DraftModel(draft_choice="importance", draft_budget=12, num_sinks=2),
        (11, 13, 7, 1, 8), (62,), second=True,
    ),
    "triforce": Row(
        tsjax.methods.TriForce(length=4, draft_budget=20, inner_budget=24, inner_sinks=1),
        (5, 3, 1, 2, 16), (75,), second=True,
    ),
    "auto": Row(
        tsjax.Auto(costs=MIXED_COSTS), (95, 2, 1, 0), (0, 2, 3, 0)
    ),
    "any_tree": Row(AnyTree(), (44, 12, 5, 1, 3), (23, 27)),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def drafting(any_tree_has_a_name):
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "SHORT_RUN", 0)  # so that it drafts
        patch.setattr(auto, "STEPS_TO_JUDGE", 10_000)  # and no clock ends that
        yield


@pytest.fixture(params=ROWS)
def row(request) -> Row:
    return ROWS[request.param]


def by_default(*names: str):
    """The methods that meet a test in the default tier; the others do in the wide one."""
    rows = (
        pytest.param(name, marks=() if name in names else pytest.mark.wide, id=name)
        for name in ROWS
    )
    return pytest.mark.parametrize("row", [*rows], indirect=True)


@functools.cache
def plain(cache: str = "same") -> tsjax.GenerationResult:
    model = looping_model(dtype="float64", cache=cache)
    return tsjax.generate(model, PROMPTS, **SETTINGS, **SIZES)


def texts(result) -> list[list[int]]:
    return [row.tolist() for row in result.tokens]


def decoded_by(row: Row, dtype: str) -> tsjax.steps.DecodeConfig:
    """What the steps of a run are compiled for: Auto's first choice, a second model filled in."""
    second, cfg = second_model(dtype).cfg if row.second else None, row.model(dtype).cfg
    measured = Measured(cfg, "cpu", "cpu", context=64, batch=len(PROMPTS), draft_model=second)
    return tsjax.steps.DecodeConfig(cfg, row.method.next(measured))


def test_every_method_has_a_row():
    # LikelyTree with other drafts, TokenSwift on other numbers.
    assert set(ROWS) == {*METHODS, "one_layer", "narrow_cache"}


# Runs of Auto are in test_auto_runs.py, of AnyTree in test_any_tree.py; MagicDec's passes are those
# of a likely tree.
ELSEWHERE = ("auto", "any_tree", "magicdec")


@by_default(*(name for name in ROWS if name not in ELSEWHERE))
def test_the_tokens_and_log_probabilities_are_those_of_plain_decoding(row, monkeypatch):
    """In chunks of all sizes; and as many drafts are right as were."""
    sizes = itertools.cycle([1, 3, 2])
    monkeypatch.setattr(run, "_next_chunk", lambda steps, elapsed: next(sizes))
    found = tsjax.generate(row.model(), PROMPTS, **row.call, **SETTINGS, **SIZES)
    wanted = plain(row.cache)
    assert texts(found) == texts(wanted)
    assert found.finish_reason == wanted.finish_reason
    assert set(wanted.finish_reason) == {"eos", "length"}
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, atol=1e-9), one, other)
    stats = found.stats
    assert stats.accepted + sum(stats.steps) == stats.computed_tokens
    by_source = tuple(stats.accepted_by_source.values())
    assert (stats.accepted_lengths, by_source) == (row.accepted, row.by_source)


@by_default("tokenswift", "likely_tree", "triforce")
@pytest.mark.parametrize("begun", ["by itself", pytest.param("plainly", marks=pytest.mark.wide)])
def test_a_saved_run_goes_on(row, begun, tmp_path):
    """Where the method has begun it, its settings come back."""
    model, path = row.model(), tmp_path / "run.json"
    first, second = {"method": "autoregressive"}, row.call
    if begun == "by itself":
        first, second = row.call, {name: x for name, x in row.call.items() if name != "method"}
    begin = {**SETTINGS, **SIZES, "max_new_tokens": 9, "save_to": path}
    tsjax.generate(model, PROMPTS, **first, **begin)
    rest = tsjax.generate(model, resume_from=path, max_new_tokens=40, **second, **SIZES)
    assert texts(rest) == texts(plain(row.cache))
    if begun == "by itself":
        assert rest.stats.method == decoded_by(row, "float64").method


@by_default()  # AnyTree's, with a batch that does not divide, is in test_meshes.py
def test_a_mesh_gives_the_same_tokens(row):
    """Of two heads' and two slots' parts; with few processors, as AnyTree meets the others."""
    settings = dict(do_sample=True, min_p=0.02, repetition_penalty=1.1, seed=7, max_new_tokens=24)
    mesh = jax.make_mesh((1, 2, 2), ("data", "model", "slots"))
    found = tsjax.generate(row.model(mesh=mesh), PROMPTS, **row.call, **settings, **SIZES)
    assert texts(found) == texts(tsjax.generate(row.model(), PROMPTS, **settings, **SIZES))


def test_memory_keeps_its_shapes_and_types_and_is_read_once(row):
    """In float32 while 64-bit types are on as well, of which nothing of a step takes any."""
    model, cfg = row.model("float32"), decoded_by(row, "float32")
    second = second_model("float32").params.model if row.second else None
    params = model.params_for(cfg.method).replace(draft_model=second)
    config = tsjax.GenerationConfig(**{**SETTINGS, "seed": 0})
    state = init_state(
        np.asarray([[1, 2, 3, 4], [5, 6, 0, 0]]), np.asarray([4, 2]), cfg=cfg,
        capacity=SIZES["capacity"], max_length=np.asarray([60, 60]),
        sampling=tsjax.steps.sampling_values(config, (11,), model.cfg.vocab_size, "float32"),
    )  # fmt: skip
    after = jax.eval_shape(functools.partial(tsjax.steps.decode_step, cfg=cfg), params, state)
    assert_like(state, after)
    wide = {"int64", "float64", "uint64"}
    assert not wide & {str(leaf.dtype) for leaf in jax.tree.leaves(after)}
    noise = jax.ShapeDtypeStruct((2, cfg.sizes.levels, model.cfg.vocab_size), jnp.float32)
    draft = functools.partial(cfg.method.draft, model.cfg)
    memory, tree = jax.eval_shape(draft, params, state, noise)
    assert_like(state.memory, memory)
    width, depth, sources = cfg.sizes.width, cfg.sizes.depth, len(cfg.method.sources)
    assert tree.tokens.shape == (2, width) and tree.path.shape == (2, width, depth + 1)
    assert tree.sources.shape == (2, width, sources) and sources <= 8
    # What it hands on is taken up, by its own kind at least.
    assert_like(state.memory, cfg.method.taught(state.memory, cfg.method.lesson(state.memory)))
    # To read a text twice is to read it once.
    read = jax.jit(functools.partial(cfg.method.read, model.cfg))
    once = read(params, state.memory, state)
    jax.tree.map(np.testing.assert_array_equal, once, read(params, once, state))


def assert_like(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
